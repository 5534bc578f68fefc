"""Clients that leave: at each phase of a request, for each endpoint, streaming or not, one answer
or many.
"""

from __future__ import annotations

import itertools
import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.harness import SMALL_ENGINE, Server, wait_for

LONG_TEXT = "so " * 250
"""Some 750 tokens: a dozen steps."""
NUM_ROWS = 4
NO_END = {"temperature": 0}
"""Where `ignore_eos` is no field: the likeliest tokens of this model never are its end."""
numbers = itertools.count()
"""Each prompt begins with another: what was cut must not be found in the prefix cache."""

Body = dict[str, Any]


def completions(text: str, max_tokens: int) -> Body:
    return {"prompt": text, "max_tokens": max_tokens, "ignore_eos": True}


def batch(text: str, max_tokens: int) -> Body:
    return {
        "prompt": [text + "a", text + "b"],
        "n": 2,
        "max_tokens": max_tokens,
        "ignore_eos": True,
    }


def chat(text: str, max_tokens: int) -> Body:
    messages = [{"role": "user", "content": text}]
    return {"messages": messages, "n": 2, "max_tokens": max_tokens, "ignore_eos": True}


def responses(text: str, max_tokens: int) -> Body:
    return {"input": text, "max_output_tokens": max_tokens, **NO_END}


def messages(text: str, max_tokens: int) -> Body:
    return {
        "model": "m",
        "messages": [{"role": "user", "content": text}],
        "max_tokens": max_tokens,
        **NO_END,
    }


def embeddings(text: str, max_tokens: int) -> Body:
    return {"input": [f"{i} {text}" for i in range(max(2, max_tokens // 100))]}


ENDPOINTS = {
    completions: "/v1/completions",
    batch: "/v1/completions",
    chat: "/v1/chat/completions",
    responses: "/v1/responses",
    messages: "/v1/messages",
    embeddings: "/v1/embeddings",
}
CASES = [
    (make, phase, stream)
    for make in ENDPOINTS
    for phase in ("queued", "in its prompt", "in its answer", "at its last token")
    for stream in (False, True)
    if make is not embeddings or (not stream and phase in ("queued", "in its prompt"))
]


@pytest.fixture(scope="module")
def server(small_model: str) -> Iterator[Server]:
    engine = {**SMALL_ENGINE, "max_num_seqs": NUM_ROWS}
    with Server(faults=True, model=small_model, engine=engine, served_model_names=["m"]) as server:
        server.assert_sound()
        yield server


class Cut:
    """A request on a connection of its own; `leave` closes that."""

    def __init__(self, server: Server, path: str, body: Body) -> None:
        self.server = server
        self._lost_before = server.metric("quire_answers_not_finished_total")
        self._tokens_before = server.metric("vllm:generation_tokens_total")
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        self._connection = socket.create_connection(("127.0.0.1", server.port), timeout=60)
        self._connection.sendall(head.encode() + b"content-length: %d\r\n\r\n" % len(data) + data)

    def leave(self) -> None:
        self._connection.close()

    @property
    def num_tokens(self) -> float:
        """Of its answers, if nobody else is there."""
        return self.server.metric("vllm:generation_tokens_total") - self._tokens_before

    @property
    def is_aborted(self) -> bool:
        """The server has noticed, and counts its answers as not finished."""
        return self.server.metric("quire_answers_not_finished_total") > self._lost_before

    def wait_for_abort(self) -> None:
        wait_for(lambda: self.is_aborted, what="its end")


def wait_for_running(server: Server, count: int) -> None:
    wait_for(
        lambda: server.metric("vllm:num_requests_running") >= count,
        what=f"{count} running requests",
    )


@pytest.mark.parametrize("make", [responses, messages])
def test_answers_that_are_to_be_cut_do_not_end_by_themselves(server: Server, make: Any) -> None:
    answer = server.post(ENDPOINTS[make], make("Go on:", 200))
    assert answer.status_code == 200
    assert answer.json()["usage"]["output_tokens"] == 200


@pytest.mark.few(8)
@pytest.mark.parametrize(("make", "phase", "stream"), CASES)
def test_a_client_leaves(server: Server, make: Any, phase: str, stream: bool) -> None:
    path = ENDPOINTS[make]
    options: Body = {"stream": True} if stream else {}
    server.fault_file.write_text("slow 0.03")
    others: list[Cut] = []
    if phase == "queued":
        others = [Cut(server, "/v1/completions", completions(f"{i}", 900)) for i in range(NUM_ROWS)]
        wait_for_running(server, NUM_ROWS)
        cut = Cut(server, path, make("Go on:", 200) | options)
        wait_for(lambda: server.metric("vllm:num_requests_waiting") > 0, what="a queue")
        cut.leave()
        wait_for(lambda: server.metric("vllm:num_requests_waiting") == 0, what="an empty queue")
        # it left while nobody made room for it
        assert server.metric("vllm:num_requests_running") == NUM_ROWS
        cut.wait_for_abort()
    elif phase == "in its prompt":
        server.fault_file.write_text("slow 0.1")
        cut = Cut(server, path, make(f"{next(numbers)} {LONG_TEXT}", 200) | options)
        wait_for_running(server, 1)
        cut.leave()
        cut.wait_for_abort()
        assert cut.num_tokens == 0
    elif phase == "in its answer":
        cut = Cut(server, path, make("Go on:", 200) | options)
        wait_for(lambda: cut.num_tokens >= 2, what="tokens")
        cut.leave()
        cut.wait_for_abort()
    else:
        cut = Cut(server, path, make("Go on:", 3) | options)
        wait_for(lambda: cut.num_tokens >= 2, what="all tokens but the last")
        cut.leave()
    for other in others:
        other.leave()
    wait_for(lambda: server.is_idle, what="free blocks")
    server.fault_file.write_text("")
    server.assert_sound()
