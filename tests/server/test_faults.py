"""What breaks inside: the engine is killed, raises, hangs. Those in flight go on with the next one, or
are told, and then all is as before.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.server.faulty_engine import SECRET
from tests.server.harness import SMALL_ENGINE, Server, error_of, send, wait_for

LONG = {"prompt": "Count: 1, 2, 3,", "max_tokens": 900, "ignore_eos": True, "temperature": 0}
COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def server(small_model: str) -> Iterator[Server]:
    limits = {"stall_seconds": 1.0, "hang_seconds": 3.0}
    with Server(faults=True, model=small_model, engine=SMALL_ENGINE, **limits) as server:
        server.assert_sound()
        yield server
        server.assert_sound()


@pytest.fixture(autouse=True)
def _slow_steps(server: Server) -> Iterator[None]:
    """So that a request lasts long enough for something to happen to it."""
    server.fault_file.write_text("slow 0.02")
    yield
    server.fault_file.write_text("")
    server.assert_sound()


class Background:
    """A request in another thread; `result` is its response, the events of its stream, or the
    exception.
    """

    def __init__(self, server: Server, body: dict[str, Any], stream: bool = False) -> None:
        self.result: Any = None
        self.events: list[Any] = []
        self._server, self._body, self._stream = server, body, stream
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            if self._stream:
                self.events.extend(self._server.stream(COMPLETIONS, self._body))
            else:
                self.result = self._server.post(COMPLETIONS, self._body)
        except (httpx.HTTPError, AssertionError) as error:
            self.result = error

    def wait(self) -> Any:
        self._thread.join(60)
        assert not self._thread.is_alive()
        return self.result


def running(server: Server, count: int) -> None:
    wait_for(
        lambda: server.metric("vllm:num_requests_running") == count,
        what=f"{count} running requests",
    )


@pytest.fixture(scope="module")
def wanted(server: Server) -> str:
    """The answer to `LONG` when nothing goes wrong."""
    text: str = server.complete(**LONG)["choices"][0]["text"]
    return text


def resumed(wanted: str, *works: Background) -> None:
    """They have noticed nothing."""
    for work in works:
        response = work.wait()
        if work.events:
            assert "".join(event["choices"][0]["text"] for event in work.events) == wanted
        else:
            assert response.status_code == 200, response.text
            assert response.json()["choices"][0]["text"] == wanted


def test_the_engine_is_killed(server: Server, wanted: str) -> None:
    whole, stream = Background(server, LONG), Background(server, LONG, stream=True)
    running(server, 2)
    pid = server.engine_pid
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: server.health() == 503, what="the loss to be noticed")
    error_of(server.post(COMPLETIONS, {"prompt": "x"}), 503)
    assert server.get("/ready").status_code == 503
    server.fault_file.write_text("")
    resumed(wanted, whole, stream)
    server.assert_sound()
    assert server.engine_pid != pid
    assert "killed by SIGKILL" in server.log
    assert "its last steps" in server.log
    assert server.get("/ready").status_code == 200


def test_the_engine_exits_in_a_step(server: Server, wanted: str) -> None:
    work = Background(server, LONG)
    running(server, 1)
    server.fault_file.write_text("exit")
    resumed(wanted, work)
    server.assert_sound()
    assert "exited with code 3" in server.log


def test_the_forward_pass_raises(server: Server) -> None:
    """The requests of that step fail; the process and everybody else go on."""
    pid = server.engine_pid
    works = [Background(server, LONG, stream=bool(i % 2)) for i in range(4)]
    running(server, 4)
    server.fault_file.write_text("raise 1")
    for work in works:
        response = work.wait()
        if work.events:
            error = work.events[-1]["error"]
            assert error["type"] == "server_error"
            assert SECRET not in str(error)
        else:
            assert SECRET not in error_of(response, 500)
    server.assert_sound()
    assert server.engine_pid == pid
    assert SECRET in server.log  # where it belongs
    assert "Traceback" in server.log


def test_a_forward_pass_that_always_raises_gets_a_new_process(server: Server) -> None:
    pid = server.engine_pid
    server.fault_file.write_text("raise 3")
    for _ in range(3):
        assert server.post(COMPLETIONS, {"prompt": "x"}).status_code in (500, 503)
    wait_for(lambda: server.health() == 503, what="the end of the engine")
    server.assert_sound()
    assert server.engine_pid != pid


def test_the_engine_loses_count_of_what_it_has(server: Server) -> None:
    """Whoever has ended is told so; then the process, whose books can't be trusted any more, is
    replaced.
    """
    pid = server.engine_pid
    server.fault_file.write_text("lose_row")
    assert error_of(server.post(COMPLETIONS, {**LONG, "deadline": 0.3}), 504)
    wait_for(lambda: server.health() == 503, what="the end of the engine")
    server.assert_sound()
    assert server.engine_pid != pid
    assert "rows are lost" in server.log


def test_the_engine_hangs(server: Server, wanted: str) -> None:
    """Not ready first, then replaced; its stacks are in the log."""
    work = Background(server, LONG)
    running(server, 1)
    server.fault_file.write_text("slow 30")
    wait_for(lambda: server.get("/ready").status_code == 503, what="not being ready")
    assert server.health() == 200
    assert "no sign of life" in server.get("/ready").json()["why"]
    server.fault_file.write_text("")
    resumed(wanted, work)
    server.assert_sound()
    assert "Current thread" in server.log
    assert "in submit" in server.log


def test_the_engine_is_stopped_while_idle(server: Server, wanted: str) -> None:
    """A process that does not run at all, with a request on its way to it."""
    pid = server.engine_pid
    os.kill(pid, signal.SIGSTOP)
    work = Background(server, LONG)
    resumed(wanted, work)
    server.assert_sound()
    assert server.engine_pid != pid


CUTS: list[tuple[str, dict[str, Any], bool]] = [
    ("at once", {}, False),
    ("at once", {}, True),
    ("running", {}, False),
    ("running", {}, True),
    ("in a long prompt", {"prompt": "so " * 300, "max_tokens": 90}, True),
    ("with several prompts", {"prompt": ["a", "b", "c"], "n": 2}, False),
    ("with several answers", {"n": 4}, True),
    ("with a grammar", {"guided_regex": "(ab|cd){400}"}, True),
]


@pytest.mark.parametrize(("when", "fields", "stream"), CUTS)
def test_a_client_leaves(server: Server, when: str, fields: dict[str, Any], stream: bool) -> None:
    lost_before = server.metric("quire_answers_not_finished_total")
    with send(server, {**LONG, "stream": stream, **fields}):
        if when != "at once":
            wait_for(lambda: server.metric("vllm:num_requests_running") > 0, what="the request")
    wait_for(lambda: server.is_idle, "its end")
    if when != "at once":
        assert server.metric("quire_answers_not_finished_total") > lost_before


def test_clients_leave_in_the_queue(server: Server) -> None:
    """Sixteen run, the others wait; all leave."""
    connections = [send(server, LONG) for _ in range(24)]
    wait_for(lambda: server.metric("vllm:num_requests_waiting") == 8, what="a queue")
    for connection in connections:
        connection.close()
    wait_for(lambda: server.is_idle, "their end")


def test_a_deadline_ends_a_request(server: Server) -> None:
    response = server.post(COMPLETIONS, {**LONG, "deadline": 0.3})
    assert error_of(response, 504)
    events = server.stream_to_deadline(COMPLETIONS, LONG, deadline=0.3)
    assert events[-1]["error"]["code"] == "deadline_exceeded"
    assert len(events) > 1
