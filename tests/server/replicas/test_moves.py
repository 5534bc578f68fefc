"""An engine dies at any point of an answer, and whoever reads it sees nothing of that: the same
tokens, the same events, as if nothing had happened.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from quire.engine.core import Pending
from quire.errors import EngineError
from quire.server.config import ServerConfig
from quire.server.link.messages import AddRequest, Updates, encode, pack_tokens
from quire.server.tasks import RunningTimeClock
from quire.step import Step
from tests.server.replicas.local_engines import (
    LocalEngines,
    LocalLink,
    LocalServer,
    local_links,
    seen_by_client,
)

PROMPT = "Tell me about the river and the mill, and what became of the miller. " * 3
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
SAMPLED = {"temperature": 1.0, "seed": 7}
TEXT: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "logprobs": 3},
    "sampled": {**SAMPLED, "top_p": 0.9, "top_k": 40, "logprobs": 1},
    "penalties": {
        **SAMPLED,
        "presence_penalty": 0.9,
        "frequency_penalty": 0.7,
        "repetition_penalty": 1.3,
        "logit_bias": {"5": 2.5},
        "min_tokens": 20,
    },
    "several": {**SAMPLED, "n": 3},
    "prompt logprobs": {**SAMPLED, "prompt_logprobs": 2},
    "echo": {**SAMPLED, "echo": True, "logprobs": 1},
    "no seed": {"temperature": 0, "ignore_eos": True},
    "prompts": {"prompt": ["one and two", "three", PROMPT], **SAMPLED, "n": 2},
}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        name: ("/v1/completions", {"prompt": PROMPT, "max_tokens": 24, **fields})
        for name, fields in TEXT.items()
    },
    "best of": (
        "/v1/completions",
        {"prompt": PROMPT, "max_tokens": 12, **SAMPLED, "n": 1, "best_of": 3},
    ),
    "chat": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 24, **SAMPLED},
    ),
    "schema": (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "Who?"}],
            "max_tokens": 60,
            **SAMPLED,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "p", "schema": SCHEMA, "strict": True},
            },
        },
    ),
    "messages": (
        "/v1/messages",
        {
            "model": "m",
            "messages": [{"role": "user", "content": PROMPT}],
            "max_tokens": 24,
            "temperature": 0,
        },
    ),
}
CALLS = [
    (path, {**body, "return_token_ids": True, "stream": stream})
    for name, (path, body) in BODIES.items()
    for stream in (False, True)
    if not (stream and name in ("best of", "prompt logprobs"))
]


@pytest.fixture(scope="module")
def engines(small_model: str) -> LocalEngines:
    return LocalEngines(small_model, {"max_batched_tokens": 2048, "max_num_seqs": 64})


def run(
    engines: LocalEngines,
    script: Callable[[LocalServer, httpx.AsyncClient], Awaitable[None]],
    replicas: int = 2,
) -> None:
    """Runs a script against a server of so many engines, and sees that nothing is left of its
    requests.
    """

    async def main() -> None:
        engines.kill_at()
        server = LocalServer(engines, replicas)
        async with server as http:
            await script(server, http)
            server.assert_empty()

    with local_links(engines):
        asyncio.run(main())


@pytest.mark.few(1)
@pytest.mark.parametrize("replicas", [2, 1])
def test_all_answers_are_the_same(engines: LocalEngines, replicas: int) -> None:
    """Clients of all kinds at the same time, and engines that die again and again; a single one is
    waited for until it is back.
    """

    async def script(server: LocalServer, http: httpx.AsyncClient) -> None:
        async def ask_all() -> list[Any]:
            return await asyncio.gather(*(seen_by_client(http, path, body) for path, body in CALLS))

        wanted = await ask_all()
        assert [status for status, _ in wanted] == [200] * len(CALLS), wanted
        assert server.moved() == 0
        for delivers in (True, False):
            before = server.moved()
            await server.all_up()
            engines.kill_at(1, 90, 250, 400, 600, 700, delivers=delivers)
            found = await ask_all()
            assert server.moved() - before > len(CALLS)
            for call, one, other in zip(CALLS, found, wanted, strict=True):
                assert one == other, call

    run(engines, script, replicas)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["sampled", "schema", "several"])
def test_wherever_it_dies(engines: LocalEngines, name: str) -> None:
    """One request alone: after each of its first tokens, and with one lost engine after the other."""
    path, body = BODIES[name]

    async def script(server: LocalServer, http: httpx.AsyncClient) -> None:
        wanted = await seen_by_client(http, path, body)
        for kills in ((1,), (3, 4, 5, 6, 7, 8)):
            await server.all_up()
            engines.kill_at(*kills)
            before = server.moved()
            assert await seen_by_client(http, path, body) == wanted, kills
            assert server.moved() > before

    run(engines, script)


def test_with_draft_tokens(small_model: str) -> None:
    """Speculation: several tokens come at a time, and where an engine dies is anywhere among them."""
    engines = LocalEngines(small_model, {"speculation": "ngram"})
    body = {
        "prompt": PROMPT,
        "max_tokens": 40,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }

    async def script(server: LocalServer, http: httpx.AsyncClient) -> None:
        _, wanted = await seen_by_client(http, "/v1/completions", body)
        assert len(wanted["choices"][0]["token_ids"]) == 40
        engines.kill_at(5, 6, 21)
        _, found = await seen_by_client(http, "/v1/completions", body)
        assert found["choices"] == wanted["choices"]

    run(engines, script)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_across_the_gap(engines: LocalEngines, stream: bool) -> None:
    """Its first half came from one engine, the second from another; and one that ends an answer of
    several while the others go on is not begun again, and counted once.
    """
    path, body = (
        "/v1/completions",
        {"prompt": PROMPT, "max_tokens": 24, **SAMPLED, "n": 2, "return_token_ids": True},
    )

    async def script(server: LocalServer, http: httpx.AsyncClient) -> None:
        def num_finished() -> float:
            labels = {"engine": "all", "model_name": "m"}
            reasons = ("stop", "length")
            return sum(
                server.count("vllm:request_success_total", finished_reason=why, **labels)
                for why in reasons
            )

        _, whole = await seen_by_client(http, path, body)
        text = whole["choices"][0]["text"]
        stop = text[len(text) // 2 - 2 : len(text) // 2 + 2]
        stopping = {**body, "stop": [stop], "stream": stream}
        wanted = await seen_by_client(http, path, stopping)
        if not stream:
            assert wanted[1]["choices"][0]["finish_reason"] == "stop"
            assert stop not in wanted[1]["choices"][0]["text"]
        for kill in (10, 22, 25):
            await server.all_up()
            engines.kill_at(kill)
            before = num_finished()
            assert await seen_by_client(http, path, stopping) == wanted
            # the engine's own word about an answer that was ended comes later
            await asyncio.sleep(0.01)
            assert num_finished() == before + 2

    run(engines, script)


def test_embeddings(engines: LocalEngines) -> None:
    body = {"input": ["one", "two and three", PROMPT]}

    async def script(server: LocalServer, http: httpx.AsyncClient) -> None:
        def watch(link: LocalLink, event: Updates) -> bool:
            if len(engines.live) == 2 and event.updates:
                link.kill()
            return not link.is_dead

        wanted = await seen_by_client(http, "/v1/embeddings", body)
        assert wanted[0] == 200
        engines.links = engines.live
        engines.watch = watch
        assert await seen_by_client(http, "/v1/embeddings", body) == wanted
        assert server.moved() > 0

    run(engines, script)


def test_what_a_lost_rank_takes_along_is_not_called_an_error(
    small_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's process ends without a word about the requests of the step that failed: so they
    go on elsewhere.
    """
    engines = LocalEngines(small_model)
    link = engines(ServerConfig(model="local", engine=engines.options), RunningTimeClock(1.0))
    asyncio.run(link.start())
    engine, commands = (
        link._engine,
        [encode(AddRequest("r", pack_tokens((1, 2, 3)), {"max_tokens": 3}, 0))],
    )

    def submit(step: Step) -> Pending:
        engine.runner.broken = "rank 1 was killed by SIGKILL"
        raise RuntimeError("connection closed by peer")

    monkeypatch.setattr(engine.runner, "submit", submit)
    link._mailbox.received += commands
    with pytest.raises(EngineError, match="rank 1 was killed"):
        link._loop.run(engine)
    assert not link._mailbox.sent


# An engine that hangs


def hang_at(engines: LocalEngines, count: int) -> list[LocalLink]:
    """The engine that gives the n-th token gives no further one; the list will hold it."""
    hung: list[LocalLink] = []
    seen = 0

    def watch(link: LocalLink, event: Updates) -> bool:
        nonlocal seen
        seen += sum(len(update.new_token_ids) for update in event.all_updates())
        if seen >= count and not hung:
            hung.append(link)
            link.is_hung = True
        return True

    engines.watch = watch
    return hung


QUICK_TO_SUSPECT = {"suspect_seconds": 0.6, "stall_seconds": 0.8}


@pytest.mark.few(1)
@pytest.mark.parametrize("recovers", [True, False])
def test_streams_leave_an_engine_that_hangs_while_another_has_room(
    engines: LocalEngines, recovers: bool
) -> None:
    """Long before it is killed; one that is heard of again goes on, one that is not is killed in
    the end.
    """
    path, body = BODIES["sampled"]

    async def main() -> None:
        engines.kill_at()
        hang_seconds = 30.0 if recovers else 10.0
        server = LocalServer(engines, 2, **QUICK_TO_SUSPECT, hang_seconds=hang_seconds)
        async with server as http:
            wanted = await seen_by_client(http, path, body)
            hung = hang_at(engines, 5)
            clock = asyncio.get_running_loop()
            began = clock.time()
            assert await seen_by_client(http, path, body) == wanted
            assert clock.time() - began < hang_seconds - 0.5
            assert server.moved() == 1
            (link,) = hung
            suspect = server.pool.replicas[link.number]
            assert suspect.is_suspect  # that its request is gone changes nothing about it
            assert await seen_by_client(http, path, body) == wanted  # at the other one
            assert server.moved() == 1
            if recovers:
                link.is_hung = False
                async with asyncio.timeout(60):
                    while suspect.is_suspect:
                        await asyncio.sleep(0.01)
                assert await seen_by_client(http, path, body) == wanted
                assert not link.is_dead
            else:
                async with asyncio.timeout(60):
                    while not link.is_dead:
                        await asyncio.sleep(0.01)
                await server.all_up()
                assert not server.pool.replicas[link.number].is_suspect
            server.assert_empty()

    with local_links(engines):
        asyncio.run(main())


def test_a_step_that_takes_long_everywhere_is_waited_for(engines: LocalEngines) -> None:
    """It moves once, not to and fro, and is never given up for that."""
    path, body = BODIES["greedy"]

    async def main() -> None:
        engines.kill_at()
        server = LocalServer(engines, 2, **QUICK_TO_SUSPECT, hang_seconds=30.0)
        async with server as http:
            wanted = await seen_by_client(http, path, body)
            asking = asyncio.create_task(seen_by_client(http, path, body))
            for link in engines.live:
                link.is_hung = True
            await asyncio.sleep(2.5)
            assert server.moved() <= 1
            for link in engines.live:
                link.is_hung = False
            assert await asking == wanted
            assert server.moved() <= 1

    with local_links(engines):
        asyncio.run(main())


@pytest.mark.slow
def test_streams_leave_an_engine_that_hangs_as_far_as_others_have_room(small_model: str) -> None:
    full = LocalEngines(small_model, {"max_num_seqs": 1})
    path, body = BODIES["greedy"]

    async def main() -> None:
        server = LocalServer(full, 2, **QUICK_TO_SUSPECT, hang_seconds=30.0)
        async with server as http:
            wanted = await seen_by_client(http, path, body)
            hung = hang_at(full, 3)
            long = asyncio.create_task(
                seen_by_client(http, path, {**body, "max_tokens": 90, "ignore_eos": True})
            )
            asking = asyncio.create_task(seen_by_client(http, path, body))
            async with asyncio.timeout(60):
                while not hung:
                    await asyncio.sleep(0.001)
            moves: list[int] = []
            async with asyncio.timeout(60):
                while not (asking.done() and long.done()):
                    moves.append(server.moved())
                    await asyncio.sleep(0.01)
            assert asking.result() == wanted
            assert moves == sorted(moves)
            # where both were with the one that hung, one after the other
            assert 1 <= moves[-1] <= 2

    with local_links(full):
        asyncio.run(main())
