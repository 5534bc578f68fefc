"""Engines in the test's own process, which die between any two of their messages, at a word:
everything but the process and its sockets is the real thing, the encoding of messages included.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from quire.assemble import assemble
from quire.backends.select import pick_device
from quire.checkpoints.sources import resolve
from quire.config import EngineConfig
from quire.constrain import GrammarCompiler
from quire.load import LoadedModel, Share, load_model
from quire.observe.cache_events import CacheEvents
from quire.server.app import create_app
from quire.server.config import ServerConfig
from quire.server.link import engine_client, messages
from quire.server.link.engine_process import EngineLoop, _ready
from quire.server.link.engine_requests import EngineRequests
from quire.server.link.replicas.open import metrics_for, open_engines
from quire.server.link.replicas.pool import ReplicaPool
from quire.server.service import GenerationService
from quire.server.tasks import RunningTimeClock
from tests.server.harness import SMALL_ENGINE

_models: dict[str, LoadedModel] = {}


class _Mailbox:
    """Stands for an engine's channel."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.received: list[bytes] = []

    def fileno(self) -> int:
        """The loop's poller only keeps it."""
        return 0

    def send(self, message: messages.Event) -> None:
        self.sent.append(messages.encode(message))

    @property
    def has_received(self) -> bool:
        return bool(self.received)

    def receive(self, seconds: float) -> bytes | None:
        return self.received.pop(0) if self.received else None


class LocalLink:
    """Stands for EngineLink."""

    def __init__(self, engines: LocalEngines, config: ServerConfig) -> None:
        self.engines = engines
        self.config = config
        self.number = int(config.share.log_name.partition(" ")[2] or 0)
        self.is_dead = False
        self.is_hung = False
        self._death = asyncio.Event()
        self._commands: list[messages.Command] = []
        self._work = asyncio.Event()
        self._mailbox = _Mailbox()

    async def start(self) -> messages.Ready:
        if self.engines.refuses_to_start:
            raise OSError("no more processes")
        loaded, config = self.engines.model, EngineConfig(**self.config.engine)
        self._loop = EngineLoop(self._mailbox)  # type: ignore[arg-type]
        self._engine = assemble(
            loaded.decoder,
            config,
            name="local",
            tokenizer=loaded.tokenizer,
            eos_token_ids=loaded.eos_token_ids,
            listeners=[self._loop.observe],
            grammars=self.engines.grammars,
        )
        self._requests = EngineRequests(self._engine)
        if self.config.share.block_events:
            self._loop._cache_events = CacheEvents(self._engine.core.scheduler.blocks)
        return _ready("local", self._engine)

    def send(self, command: messages.Command) -> None:
        self._commands.append(messages.decode_command(messages.encode(command)))
        self._work.set()

    async def receive(self) -> bytes:
        while True:
            await asyncio.sleep(0)
            if self.is_dead:
                await asyncio.Event().wait()
            if self.is_hung:
                await asyncio.sleep(0.002)
                continue
            if self._mailbox.sent:
                data = self._mailbox.sent.pop(0)
                if not self.engines.lets_pass(self, messages.decode_event(data)):
                    continue
                return data
            await self._turn()

    def receive_now(self) -> bytes | None:
        return None

    async def _turn(self) -> None:
        """One of the engine's loop."""
        core, now = self._engine.core, time.monotonic()
        commands, self._commands = self._commands, []
        for command in commands:
            self._loop._handle(command, self._requests, self._engine)
        self._requests.poll(now)
        updates = core.step(now)
        self._requests.forget(updates)
        self._loop._send_updates(self._requests, updates, self._engine)
        self._loop._describe(self._requests, self._engine)
        if not core.has_work and not self._commands and not self._mailbox.sent:
            self._work.clear()
            if self._requests.is_compiling:
                await asyncio.sleep(0.001)
            else:
                await self._work.wait()

    def kill(self) -> None:
        self.is_dead = True
        self._death.set()

    async def wait(self) -> str:
        await self._death.wait()
        return "killed by SIGKILL"

    async def broken(self) -> str:
        await asyncio.Event().wait()
        return ""

    async def kill_hung(self) -> None:
        self.kill()

    async def stop(self) -> None:
        self.is_dead = True
        self._work.set()


class LocalEngines:
    """Makes links, and says when their engines die: `lets_pass` is asked about each message."""

    def __init__(self, model: str, options: dict[str, Any] | None = None) -> None:
        self.options = {**SMALL_ENGINE, **(options or {})}
        if model not in _models:
            _models[model] = load_model(
                resolve(model), EngineConfig(dtype="float32"), pick_device("cpu"), Share()
            )
        self.model = _models[model]
        self.grammars = GrammarCompiler(
            self.model.tokenizer, self.model.spec.vocab_size, self.model.eos_token_ids
        )
        self.links: list[LocalLink] = []
        self.refuses_to_start = False
        self.watch: Callable[[LocalLink, messages.Updates], bool] = lambda link, event: True

    def __call__(self, config: ServerConfig, clock: RunningTimeClock) -> LocalLink:
        link = LocalLink(self, config)
        self.links.append(link)
        return link

    @property
    def live(self) -> list[LocalLink]:
        return [link for link in self.links if not link.is_dead]

    def lets_pass(self, link: LocalLink, event: messages.Event) -> bool:
        return not isinstance(event, messages.Updates) or self.watch(link, event)

    def kill_at(self, *counts: int, delivers: bool = True) -> None:
        """An engine dies with the message that holds the n-th token (of all engines), or just
        before it is heard.
        """
        left, seen = sorted(counts), 0

        def watch(link: LocalLink, event: messages.Updates) -> bool:
            nonlocal seen
            seen += sum(len(update.new_token_ids) for update in event.all_updates())
            if left and seen >= left[0]:
                del left[0]
                link.kill()
                return delivers
            return True

        self.watch = watch


class LocalServer:
    """The HTTP side around a pool of local engines."""

    def __init__(self, engines: LocalEngines, replicas: int = 2, **fields: Any) -> None:
        self.engines = engines
        self.failures: list[str] = []
        config = ServerConfig(
            model="local",
            engine=engines.options,
            replicas=replicas,
            served_model_names=("m",),
            **fields,
        )
        self.metrics = metrics_for(config)
        self.client = open_engines(config, self.metrics, lambda: self.failures.append("given up"))
        self.config = config

    @property
    def pool(self) -> ReplicaPool:
        assert isinstance(self.client, ReplicaPool)
        return self.client

    async def __aenter__(self) -> httpx.AsyncClient:
        ready = await self.client.start()
        self.service = GenerationService(
            self.config, self.engines.model.tokenizer, self.client, ready, self.metrics
        )
        transport = httpx.ASGITransport(create_app(self.service))
        self.http = httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60)
        return self.http

    async def __aexit__(self, *args: object) -> None:
        await self.http.aclose()
        await self.client.stop()

    async def all_up(self) -> None:
        """Waits until every engine that was lost is there again."""
        async with asyncio.timeout(60):
            while any(replica.state != "ready" for replica in self.pool.replicas):
                await asyncio.sleep(0.001)

    def moved(self) -> int:
        """How often requests went on elsewhere so far."""
        return round(
            sum(
                self.count("quire_requests_moved_total", had_tokens=had)
                for had in ("false", "true")
            )
        )

    def count(self, name: str, **labels: str) -> float:
        value = self.metrics.registry.get_sample_value(name, labels)
        assert value is not None, (name, labels)
        return value

    def assert_empty(self) -> None:
        """Nobody is remembered, nothing is counted."""
        pool = self.pool
        assert not pool._relays
        assert not pool._owners
        assert not pool._stranded
        assert [pool.router.load(number) for number in range(len(pool.replicas))] == [0] * len(
            pool.replicas
        )
        assert not any(pool.router.expected(number) for number in range(len(pool.replicas)))
        assert (self.service.admission.num_answers, self.service.admission.num_tokens) == (0, 0)


@contextmanager
def local_links(engines: LocalEngines) -> Iterator[None]:
    """Within, engines are local ones, and pauses are short."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_client, "EngineLink", engines)
        patch.setattr(engine_client, "_FIRST_PAUSE", 0.001)
        patch.setattr(engine_client, "_LAST_WORDS", 0.0)
        yield


async def seen_by_client(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Any:
    """What a client sees, but for what names this very call: the body, or all that the events of a
    stream say, those of each choice in their order (choices may come in turns of any kind, and
    several tokens in one event).
    """
    response = await http.post(path, json=body)
    if not body.get("stream") or response.status_code != 200:
        return response.status_code, _anonymous(response.json())
    lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
    assert path == "/v1/messages" or lines.pop() == "[DONE]"
    events = [_anonymous(json.loads(line)) for line in lines]
    for event in events:
        if event.get("type") == "message_start":
            del event["message"]["usage"]  # how many tokens were there when it was written
    return response.status_code, _joined(sorted(events, key=_choice))


class _DifferError(Exception):
    """These don't say more of the same."""


def _joined(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Neighbours that add to the same text and lists as one."""
    joined: list[dict[str, Any]] = []
    for event in events:
        try:
            joined[-1:] = [_sum(joined[-1], event)] if joined else [event]
        except _DifferError:
            joined.append(event)
    return joined


def _sum(first: Any, second: Any, name: str = "") -> Any:
    if first is None or second is None:
        return second if first is None else first
    if isinstance(first, dict) and isinstance(second, dict):
        names = dict.fromkeys([*first, *second])
        return {
            one: _sum(first.get(one), second.get(one), one)
            for one in names
            if one != "sequence_number"
        }
    if isinstance(first, list) and isinstance(second, list):
        if name == "choices" and len(first) == len(second) == 1:
            return [_sum(first[0], second[0])]
        return first + second
    if isinstance(first, str) and isinstance(second, str) and name in _GROWING:
        return first + second
    if first != second:
        raise _DifferError
    return first


_GROWING = (
    "text",
    "content",
    "delta",
    "reasoning",
    "reasoning_content",
    "thinking",
    "partial_json",
    "arguments",
)


def _choice(event: dict[str, Any]) -> int:
    choices = event.get("choices")
    return int(choices[0]["index"]) if choices else 10**6 if "usage" in event else 0


def _anonymous(found: Any) -> Any:
    if isinstance(found, dict):
        return {
            name: _anonymous(value) for name, value in found.items() if name not in _OF_THE_CALL
        }
    return [_anonymous(value) for value in found] if isinstance(found, list) else found


_OF_THE_CALL = (
    "id",
    "created",
    "request_id",
    "prompt_tokens_details",
    "cache_read_input_tokens",
    "input_tokens",
)
"""How many tokens were cached may differ: what was computed before is another engine's."""
