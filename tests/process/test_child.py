"""Children are started, asked, watched and ended, and nothing of them is left behind."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop

from quire.process.child import Child

MODULE = "tests.process.obedient_child"


def is_gone(pid: int) -> bool:
    """Or a zombie, which somebody else has to reap."""
    try:
        return ") Z " in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


@pytest.fixture
def child() -> Iterator[Child]:
    child = Child(MODULE, errors="kept", leads_group=True)
    yield child
    child.close()
    assert is_gone(child.pid)


def test_it_answers_with_json_and_what_it_prints_is_not_in_between(child: Child) -> None:
    message = {"a": [1, "ä\n", None]}
    assert child.ask(message) == message
    assert child.ask("print") == "print"
    assert child.ask("x" * 3_000_000, 60.0) == "x" * 3_000_000
    assert child.end is None
    child.close(10.0)
    assert child.end == "exited with code 0"
    child.close()  # a second time does nothing


def test_nothing_of_its_connection_stays_open(child: Child) -> None:
    """Nor of the file from which its answers were read."""
    assert child.ask("x") == "x"
    descriptor = child.connection.fileno()
    child.close()
    assert child.connection.fileno() == -1
    with pytest.raises(OSError, match="descriptor"):
        os.fstat(descriptor)


def test_one_that_writes_megabytes_of_errors_is_not_held_up_and_its_last_words_are_kept(
    child: Child,
) -> None:
    assert child.ask("write much", 30.0) == "write much"
    child.kill()
    words = child.last_words()
    assert words.endswith("xxx at last")
    assert len(words) <= 2000


def test_one_that_ends_says_how_and_why(child: Child) -> None:
    with pytest.raises(ConnectionError):
        child.ask("exit", 30.0)
    assert child.wait(30.0) == "exited with code 1"
    assert child.last_words() == "no more to say"
    with pytest.raises(ConnectionError):
        child.ask("too late", 30.0)


def test_one_that_never_starts() -> None:
    with pytest.raises(OSError, match="No such file"):
        Child(MODULE, python="/nowhere/python")
    nothing = Child("tests.process.no_such_module", errors="kept")
    with pytest.raises(ConnectionError):
        nothing.ask("anything", 30.0)
    assert nothing.wait(30.0) == "exited with code 1"
    assert "No module named" in nothing.last_words()
    nothing.close()


def test_one_that_hangs_is_not_waited_for(child: Child) -> None:
    began = time.monotonic()
    child.ask("ready?", 30.0)
    with pytest.raises(TimeoutError):
        child.ask("hang", 0.1)
    child.close(0.1)
    assert child.end == "killed by SIGKILL"
    assert time.monotonic() - began < 30


def test_it_can_be_killed_at_any_moment_of_its_start() -> None:
    source = random.Random(1)
    for _ in range(12):
        child = Child(MODULE, errors="dropped", leads_group=True)
        time.sleep(source.uniform(0.0, 0.1))
        child.kill()
        assert child.wait(30.0) == "killed by SIGKILL"
        child.close()


def test_what_it_has_started_is_killed_with_it(child: Child) -> None:
    another = child.ask("start another", 30.0)
    os.kill(child.pid, signal.SIGKILL)
    child.wait(30.0)
    assert not is_gone(another)
    child.kill()  # the child is gone, and its group is not
    wait_until(lambda: is_gone(another), "what it had started to end")


def test_it_goes_when_nobody_refers_to_it() -> None:
    child = Child(MODULE, errors="dropped")
    pid = child.pid
    del child
    assert is_gone(pid)


@pytest.mark.parametrize("is_busy", [False, True])
def test_it_ends_with_its_parent(is_busy: bool, child: Child) -> None:
    """Together with what it has started, which knows nothing of anybody's end."""
    order = "have a busy child" if is_busy else "have a child"
    pids = child.ask(order, 60.0)
    assert not any(is_gone(pid) for pid in pids)
    os.kill(child.pid, signal.SIGTERM)  # which it ignores
    assert child.ask("still there?", 30.0) == "still there?"
    os.kill(child.pid, signal.SIGKILL)
    wait_until(lambda: all(map(is_gone, pids)), "all to end")


def test_a_fork_leaves_its_parents_children_alone(
    child: Child, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: -1)
        child.kill()
        child.close()
    assert child.ask("still there?", 30.0) == "still there?"


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_its_end_is_heard_of_on_any_event_loop(child: Child, new_loop: Any) -> None:
    async def run() -> str:
        child.ask("ready?", 30.0)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(child.ended(), 0.05)
        threading.Timer(0.1, child.kill).start()
        both = await asyncio.gather(child.ended(), child.ended())
        assert both[0] == both[1]
        return await child.ended()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        assert runner.run(run()) == "killed by SIGKILL"


def test_importing_it_costs_little() -> None:
    code = (
        "import sys, quire.process.child; print(*{'torch', 'numpy', 'asyncio'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
