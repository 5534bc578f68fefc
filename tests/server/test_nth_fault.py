"""The first, second, third … send, allocation or write fails, until an operation meets no fault any
more: whatever was answered was right, and after each fault all is as before.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import httpx
import pytest

from tests.long_runs import IS_LONG
from tests.server.harness import SMALL_ENGINE, Server, wait_for

COMPLETIONS = "/v1/completions"
GREEDY = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
SMALL = {**GREEDY, "prompt": "ab", "max_tokens": 2}
BATCH = {**GREEDY, "prompt": ["so " * 20, "b", "c"], "max_tokens": 3}
LONG = {**GREEDY, "prompt": "Count:", "max_tokens": 900, "stream": True}
LETTERS = ["a", "e", "o", "t"]
"""One of them comes soon."""
TOO_MANY = 40
"""Faults that one operation may meet; far more than any here does."""

Outcome = list[Any]
"""What a client got: tokens, or that there was an error."""
ERROR = "error"


@pytest.fixture(scope="module")
def server(small_model: str) -> Iterator[Server]:
    with Server(faults=True, model=small_model, engine=SMALL_ENGINE) as server:
        server.assert_sound()
        yield server


def post(server: Server, body: dict[str, Any]) -> Outcome:
    """The tokens of each choice, or an error that says something; a connection that breaks says
    nothing.
    """
    try:
        response = server.post(COMPLETIONS, body)
    except httpx.TransportError:
        return [ERROR]
    if response.status_code == 200:
        return [choice["token_ids"] for choice in response.json()["choices"]]
    assert response.status_code in (500, 503), response.text
    assert response.json()["error"]["request_id"] == response.headers["x-request-id"]
    return [ERROR]


def small(server: Server) -> Outcome:
    return post(server, SMALL)


def batch(server: Server) -> Outcome:
    return post(server, BATCH)


def stream(server: Server) -> Outcome:
    tokens: list[int] = []
    is_done = False
    try:
        with (
            server.client() as client,
            client.stream("POST", COMPLETIONS, json={**SMALL, "stream": True}) as response,
        ):
            assert response.status_code == 200
            # to the last byte: a write after the end may fail too
            for line in response.iter_lines():
                if line == "data: [DONE]":
                    is_done = True
                elif line:
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        break
                    tokens += event["choices"][0]["token_ids"]
    except httpx.TransportError:
        return [ERROR]
    return [tokens if is_done else ERROR]


def every_command(server: Server) -> Outcome:
    """A request is added and ends at a stop string; another is added and aborted; the first is
    asked about.
    """
    outcome = post(server, {**SMALL, "max_tokens": 900, "stop": LETTERS})
    request_id = "req-of-the-nth-fault"
    try:
        with (
            server.client(headers={"x-request-id": request_id}) as client,
            client.stream("POST", COMPLETIONS, json=LONG) as response,
        ):
            next(response.iter_lines())
    except httpx.TransportError:
        outcome.append(ERROR)
    wait_for(lambda: server.is_idle, "the end of what was aborted")
    server.get(f"/v1/requests/{request_id}")
    return outcome


CASES: list[tuple[str, Callable[[Server], Outcome], bool]] = [
    ("engine_send", small, True),
    ("engine_send", batch, True),
    ("http_send", every_command, True),
    ("take_none", batch, False),
    ("take_raises", small, True),
    ("write_lost", stream, False),
    ("write_raises", stream, False),
]


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize(("fault", "operation", "is_replaced"), CASES)
def test_the_nth_fails(
    server: Server, fault: str, operation: Callable[[Server], Outcome], is_replaced: bool
) -> None:
    """`is_replaced`: such a fault costs the engine process, and only such a one does. A new one
    takes seconds, so the short form tries the first few, and one that is never met.
    """
    expected = operation(server)
    assert ERROR not in expected
    first = range(1, 4 if operation is every_command else 3)
    for n in range(1, TOO_MANY + 1) if IS_LONG or not is_replaced else (*first, TOO_MANY):
        wait_for(lambda: server.is_idle, what="idleness")
        restarts = num_restarts(server)
        found, is_met = attempt(server, f"{fault} {n}", operation)
        assert found == expected or (is_met and ERROR in found)
        if is_met and is_replaced:
            wait_for(partial(is_restarted, server, restarts), "a new engine")
        server.assert_sound()
        if not is_met:
            assert n > 1, "nothing was tried"
            return
        assert num_restarts(server) == restarts + is_replaced
    raise AssertionError("it meets faults forever")


def attempt(
    server: Server, order: str, operation: Callable[[Server], Outcome]
) -> tuple[Outcome, bool]:
    """What came of the operation, and whether it met the fault."""
    restarts = num_restarts(server)
    server.fault_file.write_text(order)
    found = operation(server)
    if not order.startswith("write"):  # what is asked here is written too
        wait_for(lambda: is_restarted(server, restarts) or server.is_idle, what="the end")
    is_met = not server.fault_file.read_text()
    server.fault_file.write_text("")
    return found, is_met


def num_restarts(server: Server) -> float:
    return server.metric("quire_engine_restarts_total")


def is_restarted(server: Server, before: float) -> bool:
    return num_restarts(server) > before
