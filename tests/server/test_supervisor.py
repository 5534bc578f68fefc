"""Who watches the engine process: it is started again whatever was in the way, a start that hangs
ends, and a pause of the whole service is nobody's fault.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop

from quire.errors import EngineError, QuireError
from quire.observe.prometheus import ServerMetrics
from quire.process.temporary_folders import temporary_folder
from quire.server.config import ServerConfig
from quire.server.link import engine_client
from quire.server.link.engine_client import EngineClient
from quire.server.link.engine_link import EngineLink
from quire.server.link.messages import AddRequest, Loading, Ready, decode_event, pack_tokens
from quire.server.tasks import RunningTimeClock

READY = Ready(100, 8, 256, 64, 64, 16, "fcfs", "fp")
FAULTS: list[Exception] = [
    FileNotFoundError(errno.ENOENT, "No usable temporary directory found"),
    OSError(errno.EMFILE, "Too many open files"),
    BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"),
    OSError(errno.ENOSPC, "No space left on device"),
    MemoryError("no memory"),
    RuntimeError("can't start new thread"),
    QuireError("the model is not there any more"),
    EngineError("the engine process did not start"),
]


class Links:
    """Stands for EngineLink: processes that die at once; those after the first fail to start,
    `failures` times.
    """

    def __init__(self, fault: Exception, failures: float) -> None:
        self.fault = fault
        self.failures = failures
        self.starts = 0
        self.stops = 0
        self.breaks: Exception | None = None

    def __call__(self, config: ServerConfig, clock: RunningTimeClock) -> Links:
        return self

    async def start(self) -> Ready:
        self.starts += 1
        if 1 < self.starts <= 1 + self.failures:
            raise self.fault
        return READY

    async def stop(self) -> None:
        self.stops += 1

    async def wait(self) -> str:
        if self.starts == 1 and self.breaks is None:
            return "killed by SIGKILL"
        return await self.broken()

    async def broken(self) -> str:
        await asyncio.Event().wait()
        return ""

    async def receive(self) -> bytes:
        if self.starts == 1 and self.breaks is not None:
            raise self.breaks
        await asyncio.Event().wait()
        raise AssertionError

    def send(self, command: object) -> None:
        pass


class HangingLinks(Links):
    """The first process hangs, and is gone the moment it is killed."""

    def __init__(self) -> None:
        super().__init__(OSError(), 0)
        self.killed = asyncio.Event()

    async def wait(self) -> str:
        if self.starts > 1:
            return await self.broken()
        await self.killed.wait()
        return "killed by SIGKILL"

    async def kill_hung(self) -> None:
        self.killed.set()


class Waiting:
    """Somebody who waits for an answer, and can't even hear that there will be none."""

    def __init__(self) -> None:
        self.errors: list[Exception] = []

    def fail(self, error: Exception) -> None:
        self.errors.append(error)
        raise RuntimeError("a fault in the one who listens")

    def __getattr__(self, name: str) -> Any:
        return lambda *args: None


def supervise(
    monkeypatch: pytest.MonkeyPatch, links: Links, **fields: Any
) -> tuple[EngineClient, list[str], Waiting]:
    """Runs a client until it has a new engine, or none for good."""
    monkeypatch.setattr(engine_client, "EngineLink", links)
    monkeypatch.setattr(engine_client, "_FIRST_PAUSE", 0.001)
    given_up: list[str] = []
    listener = Waiting()

    async def run() -> EngineClient:
        client = EngineClient(
            ServerConfig(**fields), ServerMetrics("m"), lambda: given_up.append(client.state)
        )
        await client.start()
        client.add(AddRequest("r", pack_tokens((1,)), {}, 0), listener)
        async with asyncio.timeout(60):
            while not given_up and (client.state != "ready" or links.starts == 1):
                await asyncio.sleep(0.001)
        state = client.state
        await client.stop()
        client.state = state
        return client

    return asyncio.run(run()), given_up, listener


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: type(fault).__name__)
def test_whatever_fails_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fault: Exception
) -> None:
    links = Links(fault, 2)
    client, given_up, listener = supervise(monkeypatch, links)
    assert (client.state, given_up, links.starts) == ("ready", [], 4)
    assert len(listener.errors) == 1
    assert caplog.text.count(str(fault)) == 2


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: type(fault).__name__)
def test_in_the_end_the_server_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fault: Exception
) -> None:
    links = Links(fault, float("inf"))
    client, given_up, _ = supervise(monkeypatch, links)
    assert (client.state, given_up) == ("failed", ["failed"])
    assert links.starts == 6
    assert "giving up" in caplog.text


def test_an_event_that_cannot_be_read_costs_the_process_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    links = Links(OSError(), 0)
    links.breaks = RuntimeError("a bug in reading it")
    client, given_up, _ = supervise(monkeypatch, links)
    assert (client.state, given_up, links.starts) == ("ready", [], 2)


def test_who_was_killed_for_hanging_is_said_to_have_hung(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Not to have been killed, as if by somebody else."""
    supervise(monkeypatch, HangingLinks(), stall_seconds=0.02, hang_seconds=0.05)
    assert "is gone: it had work and gave no sign of life" in caplog.text
    assert "SIGKILL" not in caplog.text


def test_a_supervisor_that_fails_itself_ends_the_server(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ServerMetrics, "restarted", lambda self: 1 / 0)
    client, given_up, _ = supervise(monkeypatch, Links(OSError(), 0))
    assert (client.state, given_up) == ("failed", ["failed"])
    assert "ZeroDivisionError" in caplog.text


# The real link


@pytest.fixture
def few_descriptors() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = max(int(path.name) for path in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 30, limits[1]))
    taken: list[int] = []
    with contextlib.suppress(OSError):
        while True:
            taken.append(os.open(os.devnull, os.O_RDONLY))
    for one in taken[:6]:
        os.close(one)
    yield
    for one in taken[6:]:
        os.close(one)
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def start_link(**fields: Any) -> str:
    """What a start says that fails; nothing of it is left."""

    async def run() -> str:
        clock = RunningTimeClock(0.05)
        ticking = asyncio.create_task(clock.run())
        link = EngineLink(ServerConfig(**fields), clock)
        with pytest.raises(EngineError) as caught:
            await link.start()
        await link.stop()
        ticking.cancel()
        return str(caught.value)

    return asyncio.run(run())


@pytest.mark.usefixtures("few_descriptors")
def test_without_descriptors() -> None:
    assert "Too many open files" in start_link()


def test_without_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr("quire.process.child.Popen", refuse)
    assert "temporarily unavailable" in start_link()


def test_a_start_that_hangs_ends() -> None:
    began = time.monotonic()
    message = start_link(engine_module="tests.server.hanging_engine", start_seconds=0.5)
    assert "no sign of life for 0.5 s while it started" in message
    assert time.monotonic() - began < 55  # it would have slept for a minute


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [2.5, 60.0], ids=["it comes to an end", "its server gives up"])
def test_compiling_at_a_start_is_life_and_what_compiles_ends_with_the_engine(
    seconds: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A compiler that the engine has started, and that knows nothing of it, is gone with the
    engine.
    """
    told = tmp_path / "compiler"
    monkeypatch.setenv("QUIRE_TEST_FAULT", str(told))
    monkeypatch.setenv("QUIRE_TEST_SECONDS", str(seconds))
    seen: list[object] = []

    class Counting(EngineLink):
        async def receive(self) -> bytes:
            data = await super().receive()
            seen.append(decode_event(data))
            return data

    async def run() -> None:
        link = Counting(
            ServerConfig(engine_module="tests.server.compiling_engine"), RunningTimeClock(0.05)
        )
        starting = asyncio.create_task(link.start())
        while not starting.done() and len(seen) < 3:
            await asyncio.sleep(0.05)
        if seconds > 10:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
        else:
            with pytest.raises(QuireError, match="compiled, but the model is wrong"):
                await starting
        await link.stop()

    asyncio.run(run())
    assert sum(isinstance(event, Loading) for event in seen) >= 3
    stat = Path(f"/proc/{told.read_text()}/stat")
    deadline = time.monotonic() + 10
    while stat.exists() and ") Z " not in stat.read_text():  # a zombie is init's to reap
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("uses_uvloop", [False, True])
def test_a_process_that_is_gone_before_it_is_told_anything(
    uses_uvloop: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine: that its connection is closed is no message for a user."""

    def start_and_miss(*command: Any, **options: Any) -> Any:
        process = subprocess.Popen(*command, **options)
        process.wait()
        return process

    monkeypatch.setattr("quire.process.child.Popen", start_and_miss)

    async def run() -> str:
        link = EngineLink(
            ServerConfig(engine_module="tests.server.no_such_engine"), RunningTimeClock(0.05)
        )
        with pytest.raises(EngineError) as caught:
            await link.start()
        await link.stop()
        return str(caught.value)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop if uses_uvloop else None) as runner:
        assert "did not start: exited with code 1" in runner.run(run())


# Pauses


def paused_clock(work: Callable[[RunningTimeClock], None]) -> RunningTimeClock:
    async def run() -> RunningTimeClock:
        clock = RunningTimeClock(0.02)
        ticking = asyncio.create_task(clock.run())
        await asyncio.sleep(0.1)
        work(clock)
        await asyncio.sleep(0.05)
        ticking.cancel()
        return clock

    return asyncio.run(run())


def test_time_in_which_nobody_ran_does_not_count() -> None:
    assert paused_clock(lambda clock: time.sleep(1.5)).now < 0.5
    assert paused_clock(lambda clock: None).now > 0.03


# Leftovers


def test_what_a_killed_process_left_is_taken_away_by_the_next(tmp_path: Path) -> None:
    code = "import sys, pathlib\nfrom quire.process.temporary_folders import temporary_folder as t"
    code += "\np = pathlib.Path(sys.argv[1])"
    code += "\nwith t('quire-', p) as folder: print(folder, flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", code, str(tmp_path)]
    streams: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **streams) as process:
        assert process.stdout is not None
        left = Path(process.stdout.readline().strip())
        (left / "commands").touch()
        stranger = tmp_path / "quire-of-somebody"
        stranger.mkdir()
        with temporary_folder("quire-", tmp_path):
            assert left.exists()  # its process lives
        process.send_signal(signal.SIGKILL)
    with temporary_folder("quire-", tmp_path) as folder:
        assert set(tmp_path.iterdir()) == {stranger, folder}
    assert set(tmp_path.iterdir()) == {stranger}
