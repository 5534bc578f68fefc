"""Engine processes forked from a test's server, which has imported what they need: importing torch
takes two seconds of a processor, and tests start a hundred engines.

What the commands of Quire start (`quire serve`, `quire batch`) is started in the real way, by the
tests of those.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import os
import resource
import runpy
import signal
import subprocess
import sys
import threading
import traceback
import warnings
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

from quire.frontend.tokenizer import Tokenizer
from quire.process import child

_MODULES = ("quire.server.link.engine_process", "tests.server.faulty_engine")
_PR_SET_NAME = 15
_reading = threading.Lock()
"""While a thread reads a tokenizer, which takes locks of the library that a fork would keep for ever."""


def fork_engines() -> None:
    """From now on this process forks them."""
    start = child.Popen

    def start_or_fork(command: list[str], **options: Any) -> Any:
        if command[2] in _MODULES:
            return ForkedEngine(command, **options)
        return start(command, **options)

    child.Popen = start_or_fork  # type: ignore[assignment, misc]
    for name in ("from_hf_folder", "from_gguf"):
        setattr(Tokenizer, name, _alone(getattr(Tokenizer, name)))


def _alone(read: Callable[..., Tokenizer]) -> Callable[..., Tokenizer]:
    def read_alone(*arguments: Any, **options: Any) -> Tokenizer:
        with _reading:
            return read(*arguments, **options)

    return read_alone


class ForkedEngine(subprocess.Popen[bytes]):
    """The process, with all that others have."""

    def _execute_child(self, args: list[str], *options: Any) -> None:  # type: ignore[override]
        environment, stdin = options[5], options[9]
        with _reading:
            self.pid = os.fork()
        if not self.pid:
            _become_engine(args[2], environment, stdin)
        os.setpgid(self.pid, self.pid)
        self._child_created = True


def _become_engine(module: str, environment: dict[str, str], stdin: int) -> NoReturn:
    """What a new interpreter would find, then `python -m module`."""
    status: Any = 1
    try:
        os.setpgid(0, 0)
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
