"""`quire verify --url` against small servers: a sound one, one that adds differently in a crowd,
one that forgets seeds, one whose streams lose a token, one that is busy, and one that speaks chat
only.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from quire.tools.bench.http_client import HttpError
from quire.tools.verify.check import Verdict
from quire.tools.verify.server import verify_server

_count = itertools.count()


def _silent(what: str, spent: float) -> None:
    pass


class Handler(BaseHTTPRequestHandler):
    """Tokens are hex digits of a hash of the prompt and the seed."""

    protocol_version = "HTTP/1.1"
    fault = ""
    running = 0
    lock = threading.Lock()

    def log_message(self, *arguments: object) -> None:
        pass

    def do_GET(self) -> None:
        self._send({"data": [{"id": "fake"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        chat = self.path.endswith("chat/completions")
        if self.fault == "key" and self.headers["Authorization"] != "Bearer right":
            return self._send({"error": {"message": "a key is needed"}}, 401)
        if self.fault == "chat" and (not chat or "logprobs" in body):
            return self._send({"error": {"message": "no such thing"}}, 404)
        with self.lock:
            type(self).running += 1
            crowd = self.running
        try:
            time.sleep(0.02 if self.fault in ("crowd", "busy") else 0.001)  # so that a crowd meets
            if self.fault == "busy" and crowd > 1:
                return self._send({"error": {"message": "busy"}}, 429)
            self._answer(body, chat, crowd)
        finally:
            with self.lock:
                type(self).running -= 1

    def _answer(self, body: dict[str, Any], chat: bool, crowd: int) -> None:
        prompt = body["messages"][0]["content"] if chat else body["prompt"]
        seed = body["seed"] if body["temperature"] else 0
        seed = next(_count) if self.fault == "seed" and body["temperature"] else seed
        tokens = list(sha256(f"{prompt} {seed}".encode()).hexdigest()[: body["max_tokens"]])
        logprobs = [
            -int(token, 16) / 3 - (1e-7 if self.fault == "crowd" and crowd > 1 else 0)
            for token in tokens
        ]
        if not body["stream"]:
            self._send({"choices": [self._choice(chat, tokens, logprobs, "length", "message")]})
            return
        tokens = tokens[:-1] if self.fault == "stream" else tokens
        events = [
            {"choices": [self._choice(chat, [token], [logprob], None, "delta")]}
            for token, logprob in zip(tokens, logprobs, strict=False)
        ]
        events.append({"choices": [self._choice(chat, [], [], "length", "delta")]})
        text = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
        self._send_bytes(text.encode(), "text/event-stream")

    def _choice(
        self, chat: bool, tokens: list[str], logprobs: list[float], end: str | None, part: str
    ) -> dict[str, Any]:
        text = "".join(tokens)
        if chat:
            return {part: {"content": text}, "finish_reason": end}
        found = {
            "tokens": tokens,
            "token_logprobs": logprobs,
            "top_logprobs": [{"a": one} for one in logprobs],
        }
        return {"text": text, "logprobs": found, "finish_reason": end}

    def _send(self, body: object, status: int = 200) -> None:
        self._send_bytes(json.dumps(body).encode(), "application/json", status)

    def _send_bytes(self, data: bytes, kind: str, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        with suppress(ConnectionError):  # whoever aborted the request is gone
            self.end_headers()
            self.wfile.write(data)


@contextmanager
def server(fault: str) -> Iterator[str]:
    handler = type("FaultyHandler", (Handler,), {"fault": fault, "running": 0})
    httpd = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=httpd.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{httpd.server_address[1]}"
    finally:
        httpd.shutdown()
        httpd.server_close()


def tried(fault: str, key: str | None = None) -> tuple[Verdict, str]:
    with server(fault) as url:
        verdict, facts = verify_server(
            f"{url}/v1", key, None, 6, 600.0, 0, _silent, max_rounds=1, shrink_seconds=60.0
        )
    return verdict, facts["server"]


def test_a_sound_server_has_no_difference() -> None:
    verdict, server = tried("")
    assert verdict.is_exact, [axis.as_json() for axis in verdict.axes]
    assert verdict.notes == []
    assert "model fake, /v1/completions" in server
    assert all(axis.values > 100 for axis in verdict.axes)


@pytest.mark.parametrize(
    ("fault", "axes"),
    [
        ("crowd", {"in a crowd", "streamed in a crowd", "beside others"}),
        ("stream", {"streamed", "streamed in a crowd"}),
        ("seed", {"repeated", "streamed", "in a crowd", "streamed in a crowd", "beside others"}),
    ],
)
def test_faults_show_on_their_axes(fault: str, axes: set[str]) -> None:
    verdict, _ = tried(fault)
    assert {axis.name for axis in verdict.axes if axis.state == "different"} == axes
    assert verdict.smallest is not None
    assert len(verdict.smallest.cases) < 6 or not verdict.smallest.is_reproduced


def test_a_busy_server_is_not_an_inexact_one() -> None:
    verdict, _ = tried("busy")
    assert not any(axis.differences for axis in verdict.axes)
    assert any("refused, not counted" in axis.note for axis in verdict.axes)


def test_a_server_that_knows_chats_without_logprobs_is_asked_so() -> None:
    verdict, server = tried("chat")
    assert verdict.is_exact
    assert "/v1/chat/completions" in server
    assert verdict.notes == ["the server gives no logprobs: only text was compared"]


def test_keys_and_servers_that_are_not_there() -> None:
    assert tried("key", "right")[0].is_exact
    with pytest.raises(HttpError, match="a key is needed"):
        tried("key")
    with pytest.raises(HttpError, match=r"127\.0\.0\.1:9"):
        verify_server("http://127.0.0.1:9", None, None, 4, 1.0, 0, _silent)
