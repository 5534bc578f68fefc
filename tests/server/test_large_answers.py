"""Answers whose size the client chooses: encoded in pieces beside the event loop, each so small
that nobody waits.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.types import Message

from quire.server import http_responses
from quire.server.http_responses import LargeJsonResponse, encode_in_pieces
from tests.long_runs import examples

TOP = [{"token": "ab", "logprob": -1.5, "bytes": [97, 98]}] * 20
ENTRY = {"token": "ab", "logprob": -0.5, "bytes": [97, 98], "top_logprobs": TOP}
LARGE: dict[str, Any] = {
    "embeddings": {
        "data": [{"embedding": [0.25] * 2048, "index": i} for i in range(200)],
        "model": "m",
    },
    "one long embedding": {"data": [{"embedding": [0.25] * 200_000}]},
    "base64": {"data": [{"embedding": "ab" * 8192} for _ in range(300)]},
    "n x logprobs": {
        "choices": [{"index": i, "logprobs": {"content": [ENTRY] * 60}} for i in range(16)]
    },
    "prompt logprobs": {
        "choices": [{"prompt_logprobs": [None] + [{str(i): ENTRY for i in range(21)}] * 300}]
    },
    "old logprobs": {
        "choices": [
            {"logprobs": {"tokens": ["a"] * 9000, "top_logprobs": [None, {"a": 1.0}] * 4500}}
        ]
    },
    "tokens": {"count": 300_000, "tokens": [5] * 300_000, "token_strs": ["ab"] * 300_000},
    "text": {"prompt": "x" * 3_000_000},
    "ids as a tuple": {"choices": [{"token_ids": (1, 2, 3) * 30_000}]},
}

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**50), 2**50)
    | st.floats(allow_nan=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@pytest.mark.slow
@settings(max_examples=examples(100), deadline=None)
@given(value=values, at_once=st.sampled_from([1, 2, 7]))
def test_pieces_are_the_whole(value: Any, at_once: int) -> None:
    before = http_responses._VALUES_AT_ONCE
    http_responses._VALUES_AT_ONCE = at_once
    try:
        assert b"".join(encode_in_pieces(value)) == msgspec.json.encode(value)
    finally:
        http_responses._VALUES_AT_ONCE = before


@pytest.mark.few(3)
@pytest.mark.parametrize("value", LARGE.values(), ids=LARGE.keys())
def test_no_piece_is_large(value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is handed to the encoder at once takes it a millisecond or so."""
    sizes: list[int] = []

    def count(one: Any) -> int:
        if isinstance(one, dict):
            return sum(map(count, one.values()))
        return sum(map(count, one)) if isinstance(one, list | tuple) else 1

    def encode(one: Any) -> bytes:
        sizes.append(count(one))
        return msgspec.json.encode(one)

    monkeypatch.setattr(http_responses, "encode", encode)
    response = LargeJsonResponse.of(lambda: value)
    assert max(sizes) <= 2 * http_responses._VALUES_AT_ONCE
    assert len(sizes) < 3000  # nor so small that the pieces are all the work
    assert b"".join(response._pieces) == msgspec.json.encode(value)


def test_it_is_written_piece_by_piece() -> None:
    """Others have their turn between two pieces, and the length is known from the start."""
    events: list[str | bytes] = []
    headers: dict[bytes, bytes] = {}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers.update(message["headers"])
        else:
            events.append(message["body"])

    async def other() -> None:
        while True:
            events.append("another's turn")
            await asyncio.sleep(0)

    async def run() -> None:
        task = asyncio.create_task(other())
        response = LargeJsonResponse.of(lambda: LARGE["tokens"], {"x-quire-ignored": "a"})
        await response({}, None, send)  # type: ignore[arg-type]
        task.cancel()

    asyncio.run(run())
    pieces = [one for one in events if isinstance(one, bytes)]
    assert json.loads(b"".join(pieces)) == LARGE["tokens"]
    assert int(headers[b"content-length"]) == sum(map(len, pieces))
    assert headers[b"content-type"] == b"application/json"
    assert headers[b"x-quire-ignored"] == b"a"
    assert all(len(one) < 200_000 for one in pieces)
    turns = [index for index, one in enumerate(events) if one == "another's turn"]
    assert len(turns) >= len(pieces) - 2


@pytest.mark.parametrize("value", [None, [], LARGE["tokens"]], ids=["none", "empty", "large"])
def test_the_last_piece_ends_the_answer(value: Any) -> None:
    """A client that has read as much as it was told may use the connection again at once: a server
    that still held the answer for unfinished would take the next request for one sent ahead, and
    drop it.
    """
    messages: list[Message] = []

    async def send(message: Message) -> None:
        messages.append(message)

    asyncio.run(LargeJsonResponse.of(lambda: value)({}, None, send))  # type: ignore[arg-type]
    start, *bodies = messages
    length = int(dict(start["headers"])[b"content-length"])
    assert length == sum(len(body["body"]) for body in bodies) > 0
    assert [body["more_body"] for body in bodies] == [True] * (len(bodies) - 1) + [False]
    assert all(body["body"] for body in bodies)
