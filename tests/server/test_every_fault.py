"""Every fault at every phase of a server's life, from one table: those in flight get their answer,
or an error that says what happened, the server goes on or ends with a status that tells, and nothing
is left behind.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest

from tests.long_runs import IS_LONG
from tests.server.harness import PATIENCE, Server, wait_for

COMPLETIONS = "/v1/completions"
HANG, START = 3.0, 8.0
PATIENT = {"drain_seconds": 90.0}
"""Where nothing hangs, an engine may be as slow as a busy machine makes it."""
IMPATIENT = PATIENT | {"stall_seconds": 0.5, "hang_seconds": HANG}
AT_ONCE = 6

Ending = Literal["lost", "unharmed", "drained"]
"""What a fault does: to the engine, to nobody, or the server ends."""
Phase = Literal["loading", "loading again", "idle", "prompt", "streaming", "draining"]


class ScriptedServer(Server):
    """Starts at once: its engine has no model, and its HTTP process is forked from one that is
    ready.
    """

    def __init__(self, model: str, folder: Path, limits: dict[str, float]) -> None:
        super().__init__(
            model=model, engine={}, engine_module="tests.server.scripted_engine", **limits
        )
        self.temporary, self.limits = folder, limits
        self._environment["TMPDIR"] = str(folder)

    def order(self, text: str) -> None:
        """Tells the engine, all of it at once."""
        part = self.fault_file.with_suffix(".part")
        part.write_text(text)
        part.rename(self.fault_file)

    @property
    def is_engine_here(self) -> bool:
        """It has begun to run."""
        engine, note = self.engine, self.fault_file.with_suffix(".here")
        return engine is not None and note.exists() and note.read_text() == str(engine)

    @property
    def engine(self) -> int | None:
        """Its process, if there is one."""
        try:
            return self.engine_pid
        except (OSError, StopIteration):
            return None


# The faults


def signal_engine(*which: signal.Signals) -> Callable[[ScriptedServer], None]:
    def send(server: ScriptedServer) -> None:
        for one in which:
            os.kill(server.engine_pid, one)

    return send


def signal_server(which: signal.Signals) -> Callable[[ScriptedServer], None]:
    def send(server: ScriptedServer) -> None:
        assert server.process is not None
        server.process.send_signal(which)

    return send


def pause_all(server: ScriptedServer) -> None:
    """As a container is paused, or a laptop sleeps."""
    assert server.process is not None
    pids = (server.process.pid, server.engine_pid)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(server.limits.get("start_seconds", HANG) + 1)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)


def kill_without_descriptors(server: ScriptedServer) -> None:
    """The first attempts to start it again fail for a reason of the system."""
    assert server.process is not None
    pid = server.process.pid
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, hard))
    os.kill(server.engine_pid, signal.SIGKILL)
    failed = "could not be started"
    wait_for(
        lambda: failed in server.log or server.process is None or server.process.poll() is not None
    )
    with contextlib.suppress(ProcessLookupError):
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))


def raw(server: ScriptedServer, *pieces: bytes) -> None:
    """Another client, that does what none should."""
    with (
        contextlib.suppress(OSError),
        socket.create_connection(("127.0.0.1", server.port), timeout=5) as connection,
    ):
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        connection.sendall(head)
        for piece in pieces:
            connection.sendall(piece)


CHUNKED = b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n"


@dataclass(frozen=True)
class Fault:
    apply: Callable[[ScriptedServer], None]
    ending: Ending = "unharmed"
    in_log: str = ""

    def limits(self, phase: Phase) -> dict[str, float]:
        if self.apply is not pause_all and "no sign of life" not in self.in_log:
            return PATIENT
        return IMPATIENT | (
            {"start_seconds": START} if phase in ("loading", "loading again") else {}
        )


FAULTS = {
    "engine killed": Fault(signal_engine(signal.SIGKILL), "lost", "killed by SIGKILL"),
    "engine ended by its own fault": Fault(
        signal_engine(signal.SIGBUS), "lost", "killed by SIGBUS"
    ),
    "engine exits": Fault(lambda server: server.order("exit"), "lost", "exited with code 3"),
    "engine gives up": Fault(lambda server: server.order("fatal"), "lost", "it can't go on"),
    "engine hangs": Fault(lambda server: server.order("hang"), "lost", "no sign of life"),
    "engine stopped": Fault(signal_engine(signal.SIGSTOP), "lost", "no sign of life"),
    "engine talks nonsense": Fault(
        lambda server: server.order("nonsense"), "lost", "can't be read"
    ),
    "engine killed, no descriptors": Fault(kill_without_descriptors, "lost", "killed by SIGKILL"),
    "signals for the engine": Fault(signal_engine(signal.SIGTERM, signal.SIGINT, signal.SIGHUP)),
    "all paused": Fault(pause_all),
    "a client leaves": Fault(lambda server: raw(server, b"content-length: 20\r\n\r\n{}")),
    "malformed chunks": Fault(lambda server: raw(server, CHUNKED + b"ZZ\r\n")),
    "trailers without end": Fault(
        lambda server: raw(server, CHUNKED + b"0\r\n", *[b"a: b\r\n" * 10_000] * 10)
    ),
    "a body without end": Fault(
        lambda server: raw(server, b"content-length: 99999999\r\n\r\n", b"x" * 9_000_000)
    ),
    "SIGTERM": Fault(signal_server(signal.SIGTERM), "drained", "no new requests"),
    "SIGINT": Fault(signal_server(signal.SIGINT), "drained", "no new requests"),
    "SIGHUP": Fault(signal_server(signal.SIGHUP), "drained", "no new requests"),
}


# The phases


class InFlight:
    """A request in another thread."""

    def __init__(self, server: ScriptedServer, body: dict[str, Any]) -> None:
        self.status = 0
        self.text = ""
        self._server, self._body = server, body
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            with (
                self._server.client(timeout=PATIENCE) as client,
                client.stream("POST", COMPLETIONS, json=self._body) as response,
            ):
                self.status = response.status_code
                for text in response.iter_text():
                    self.text += text
        except httpx.HTTPError as error:
            self.text += f"broken: {error!r}"

    def end(self) -> tuple[int, str]:
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive(), "it never ends"
        return self.status, self.text


STREAM = {"prompt": "ab", "max_tokens": 100, "stream": True}
PROMPT = {"prompt": list(range(5, 105)), "max_tokens": 2}


@contextlib.contextmanager
def at_phase(
    phase: Phase, model: str, folder: Path, limits: dict[str, float]
) -> Iterator[tuple[ScriptedServer, InFlight | None]]:
    """A server that has come so far, and the request that is in flight then."""
    server = ScriptedServer(model, folder, limits)
    if phase == "loading":
        server.order("loading")
    server.begin()
    try:
        if phase == "loading":
            wait_for(lambda: server.is_engine_here, "the engine process")
            yield server, None
            return
        wait_for(server._is_up, "the server")
        work = None
        if phase == "loading again":
            server.order("loading")
            old = server.engine_pid
            os.kill(old, signal.SIGKILL)
            wait_for(
                lambda: server.engine not in (old, None) and server.is_engine_here, "another one"
            )
        elif phase == "prompt":
            work = InFlight(server, PROMPT)
            wait_for(lambda: server.metric("vllm:num_requests_running") == 1, "the request")
        elif phase in ("streaming", "draining"):
            work = InFlight(server, STREAM)
            wait_for(lambda: "data:" in work.text, "the first token")
        if phase == "draining":
            signal_server(signal.SIGTERM)(server)
            wait_for(lambda: "no new requests" in server.log, "the signal")
        yield server, work
    finally:
        server.__exit__(None, None, None)


def try_fault(name: str, phase: Phase, model: str, folder: Path) -> None:
    fault = FAULTS[name]
    folder.mkdir()
    with at_phase(phase, model, folder, fault.limits(phase)) as (server, work):
        assert server.process is not None
        fault.apply(server)
        if phase == "idle" and "no sign of life" in fault.in_log:
            work = InFlight(server, PROMPT)  # only who has work is expected to say something
        if fault.ending == "lost":
            wait_for(lambda: fault.in_log in server.log, fault.in_log)
        if phase in ("loading", "loading again"):
            server.order("")
        else:
            server.order("release")
        check_request(work, phase, name)
        ends = (
            phase == "draining"
            or fault.ending == "drained"
            or (phase == "loading" and fault.ending == "lost")
        )
        if ends:
            code = server.process.wait(PATIENCE)
            assert code == expected_code(fault.ending, phase, name), f"status {code}"
        else:
            wait_for(lambda: server.health() == 200, "health")
            assert server.complete(prompt="ab", max_tokens=3)["usage"]["completion_tokens"] == 3
            wait_for(lambda: server.metric("vllm:num_requests_running") == 0, "an idle server")
            engine = server.engine_pid
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(PATIENCE) == 0
            wait_for(lambda: not Path(f"/proc/{engine}/cmdline").exists(), "the engine's end")
        assert "Task exception was never retrieved" not in server.log
    assert list(folder.iterdir()) == [], "something is left behind"


def check_request(work: InFlight | None, phase: Phase, name: str) -> None:
    """Who was in flight got an answer, whatever became of the engine; one that the server's end cut
    short says so.
    """
    if work is None:
        return
    status, text = work.end()
    if phase == "draining" and name in ("SIGTERM", "SIGINT"):
        assert "shutting_down" in text, (status, text[-300:])
    else:
        assert status == 200, text
        assert text.endswith("data: [DONE]\n\n") or '"completion_tokens":2' in text, text[-300:]


def expected_code(ending: Ending, phase: Phase, name: str) -> int:
    if phase == "loading" and ending == "lost":
        return 1
    if phase == "draining" and name in ("SIGTERM", "SIGINT"):  # the second one
        return 128 + int(signal.Signals[name])
    return 0


PHASES: list[Phase] = ["loading", "loading again", "idle", "prompt", "streaming", "draining"]


def is_tried(name: str, phase: Phase) -> bool:
    """In the short form each fault meets every other phase, those that all others resemble every
    one.
    """
    if phase == "draining" and name == "engine killed, no descriptors":
        return False  # nothing is started again then, and uvloop needs one to end
    if IS_LONG or name in ("engine killed", "SIGTERM"):
        return True
    if phase == "draining" and FAULTS[name].ending == "drained":  # the second signal
        return True
    return (list(FAULTS).index(name) + PHASES.index(phase)) % 2 == 0


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("phase", PHASES)
def test_every_fault(phase: Phase, small_model: str, tmp_path: Path) -> None:
    def attempt(name: str) -> str | None:
        try:
            try_fault(name, phase, small_model, tmp_path / str(list(FAULTS).index(name)))
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return None

    tried = [name for name in FAULTS if is_tried(name, phase)]
    with ThreadPoolExecutor(AT_ONCE) as attempts:
        found = dict(zip(tried, attempts.map(attempt, tried), strict=True))
    assert {name: error for name, error in found.items() if error} == {}
