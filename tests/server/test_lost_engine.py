"""The engine dies at every point of a call, through every API: always 503 (or, in a stream that has
begun, an error event that says the same), the call is recorded as failed, and its place is free
again.
"""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import httpx
import pytest

from quire.checkpoints.sources import resolve
from quire.load import open_tokenizer
from quire.observe.prometheus import ServerMetrics
from quire.server.app import create_app
from quire.server.calls.call import EmbeddingCall
from quire.server.config import ServerConfig
from quire.server.link.channel import Channel
from quire.server.link.engine_client import EngineClient, unavailable
from quire.server.link.engine_link import EngineLink
from quire.server.link.messages import AddRequest, Ready, Updates, Watch
from quire.server.service import GenerationService
from quire.server.tasks import RunningTimeClock
from quire.step import RequestUpdate

MESSAGES = [{"role": "user", "content": "Hi!"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": ["a", "b", "c"]},
    "/v1/responses": {"input": "Hi!"},
    "/v1/messages": {"model": "m", "messages": MESSAGES, "max_tokens": 9},
    "/v1/embeddings": {"input": ["a", "b", "c"]},
}
Moment = Literal["before it takes the call", "between two prompts", "while it computes"]
CASES = [
    (path, moment, stream)
    for path in BODIES
    for moment in ("before it takes the call", "between two prompts", "while it computes")
    for stream in (False, True)
    if (path != "/v1/embeddings" or not stream)
    and (path in ("/v1/completions", "/v1/embeddings") or moment != "between two prompts")
]


class Engine(EngineClient):
    """An engine that lives in this process and dies when it has been given `lives` prompts: in a
    moment, or at once, so that the next prompt finds it dead. With many lives the texts to embed
    before that get their vectors.
    """

    def __init__(self, config: ServerConfig, vocab_size: int, moment: Moment, lives: int) -> None:
        super().__init__(config, ServerMetrics("tiny"), lambda: None)
        self.ready = Ready(vocab_size, 8, 256, 64, 64, 16, "fcfs", "fp")
        self.state = "ready"
        self._link = self  # type: ignore[assignment]
        self._moment = moment
        self._lives = lives
        self.added: list[str] = []

    def send(self, command: object) -> None:
        if not isinstance(command, AddRequest):
            return
        self.added.append(command.request_id)
        loop = asyncio.get_running_loop()
        if self._moment == "while it computes":
            loop.call_soon(self._begin, command)
        if len(self.added) == self._lives:
            if self._moment == "between two prompts":
                self.state = "restarting"
            loop.call_later(0.05, self._die)
        elif command.pooling is not None and len(self.added) < self._lives and self._lives > 3:
            loop.call_soon(self._finish, command)

    def _begin(self, command: AddRequest) -> None:
        name = command.request_id
        updates = [] if command.pooling is not None else [RequestUpdate(name, (5,), None)]
        self._take_updates(Updates(accepted=[name], started=[name], updates=updates))

    def _finish(self, command: AddRequest) -> None:
        name = command.request_id
        update = RequestUpdate(name, (), "length", pooled=b"\0" * 32)
        self._take_updates(Updates(accepted=[name], started=[name], updates=[update]))

    def _die(self) -> None:
        self.state = "restarting"
        self._lose_all(
            unavailable("the engine failed while computing this request; it is being restarted")
        )


async def lose(
    model: str, path: str, body: dict[str, Any], moment: Moment, lives: int
) -> tuple[httpx.Response, Engine]:
    config = ServerConfig(model=model, served_model_names=("m",))
    tokenizer = open_tokenizer(resolve(model))
    client = Engine(config, tokenizer.vocab_size, moment, lives)
    assert client.ready is not None
    service = GenerationService(config, tokenizer, client, client.ready, ServerMetrics("m"))
    transport = httpx.ASGITransport(create_app(service))
    async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=30) as http:
        response = await http.post(path, json=body, headers={"x-request-id": "mine"})
    record = service.records.find("mine", None)
    assert record is not None
    assert record.state == "failed"
    assert "restarted" in (record.error or "")
    assert "total" in record.timings
    assert (service.admission.num_answers, service.admission.num_tokens) == (0, 0)
    assert not client.seconds_silent  # nobody waits for it
    failed = service.metrics.registry.get_sample_value(
        "quire_answers_not_finished_total", {"why": "failed"}
    )
    assert failed is not None
    assert failed >= 1
    return response, client


@pytest.mark.few(4)
@pytest.mark.parametrize(("path", "moment", "stream"), CASES)
def test_it_dies(small_model: str, path: str, moment: Moment, stream: bool) -> None:
    body = BODIES[path] | ({"stream": True} if stream else {})
    num_prompts = 3 if path in ("/v1/completions", "/v1/embeddings") else 1
    lives = 2 if moment == "between two prompts" else num_prompts
    response, engine = asyncio.run(lose(small_model, path, body, moment, lives))
    assert len(engine.added) == lives
    if stream and moment == "while it computes":
        assert response.status_code == 200
        assert response.text.count("restarted") == 1
        assert (
            "overloaded_error" if path == "/v1/messages" else "engine_unavailable"
        ) in response.text
    else:
        assert response.status_code == 503, response.text
        assert "restarted" in response.json()["error"]["message"]
        assert int(response.headers["retry-after"]) >= 1


def test_a_command_that_cannot_be_sent_breaks_the_link_and_raises_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever the system has against it: those who wait hear that the engine is lost (503), not of
    a fault (500).
    """

    def refuse(self: Channel, data: bytes) -> None:
        raise OSError("no buffer space")

    monkeypatch.setattr(Channel, "send", refuse)
    link = EngineLink(ServerConfig(), RunningTimeClock(1.0))
    link.send(Watch(is_on=True))
    assert "Watch: no buffer space" in asyncio.run(link.broken())


def test_it_dies_before_the_later_texts_of_a_long_list(small_model: str) -> None:
    """The first texts have their vectors, and what takes in the next ones is gone."""
    body = {"input": [f"text {number}" for number in range(3 * EmbeddingCall.AT_ONCE)]}
    lives = EmbeddingCall.AT_ONCE + 5
    response, engine = asyncio.run(
        lose(small_model, "/v1/embeddings", body, "between two prompts", lives)
    )
    assert response.status_code == 503, response.text
    assert len(engine.added) == lives
