"""Engine processes forked from a test's server, which has imported what they need: importing torch
takes two seconds of a processor, and tests start a hundred engines.

What the commands of Quire start (`quire serve`, `quire batch`) is started in the real way, by the
tests of those.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import ctypes
import gc
import os
import resource
import runpy
import signal
import sys
import traceback
import warnings
import weakref
from typing import Any, NoReturn

_MODULES = ("quire.server.link.engine_process", "tests.server.faulty_engine")
_PR_SET_NAME = 15


def fork_engines() -> None:
    """From now on this process forks them."""
    start = asyncio.create_subprocess_exec

    async def start_or_fork(*command: str, **options: Any) -> Any:
        if command[1] == "-m" and command[2] in _MODULES:
            return ForkedEngine(command[2], options["env"])
        return await start(*command, **options)

    asyncio.create_subprocess_exec = start_or_fork  # type: ignore[assignment]


class _Pipe:
    """Its standard input, with what the link uses of asyncio's."""

    def __init__(self, descriptor: int) -> None:
        self._file = os.fdopen(descriptor, "wb", buffering=0)
        self._error: BrokenPipeError | None = None

    def write(self, data: bytes) -> None:
        try:
            self._file.write(data)
        except BrokenPipeError as error:
            self._error = error

    async def drain(self) -> None:
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        self._file.close()


class ForkedEngine:
    """The process, with what the link uses of asyncio's."""

    def __init__(self, module: str, environment: dict[str, str]) -> None:
        read, write = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            _become_engine(module, environment, read)
        os.close(read)
        self.stdin = _Pipe(write)
        self.returncode: int | None = None
        self._ended = asyncio.Event()
        self._descriptor = os.pidfd_open(self.pid)
        asyncio.get_running_loop().add_reader(self._descriptor, self._on_end)

    def _on_end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._descriptor)
        os.close(self._descriptor)
        self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self._ended.set()

    async def wait(self) -> int:
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, which: int) -> None:
        if self.returncode is not None:
            raise ProcessLookupError
        os.kill(self.pid, which)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _become_engine(module: str, environment: dict[str, str], stdin: int) -> NoReturn:
    """What a new interpreter would find, then `python -m module`."""
    status: Any = 1
    try:
        gc.freeze()  # nothing of the server's is to be finalised here
        atexit._clear()
        weakref.finalize._registry.clear()  # type: ignore[attr-defined]
        weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]
        signal.set_wakeup_fd(-1)
        for one in signal.valid_signals():
            with contextlib.suppress(OSError):
                signal.signal(one, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.dup2(stdin, 0)
        os.dup2(2, 1)
        os.closerange(3, min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], 65536))
        os.environ.clear()
        os.environ.update(environment)
        sys.stdin = open(0)  # noqa: SIM115 - it stays open
        ctypes.CDLL(None).prctl(_PR_SET_NAME, b"engine", 0, 0, 0)  # so that tests find it
        import torch

        torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))  # read when torch was imported
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # that it is imported already
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as end:
        status = end.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status if isinstance(status, int) else 1)
