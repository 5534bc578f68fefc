"""Messages between processes arrive whole, once and in their order, however far a reader lags, and
the other side's end is noticed.
"""

from __future__ import annotations

import asyncio
import random
import socket
import threading
import time
from typing import Any

import pytest
import uvloop

from quire.engine import make_requests
from quire.observe.step_lines import encode_params
from quire.sampling_params import SamplingParams
from quire.server.config import ServerConfig
from quire.server.link.channel import BlockingChannel, Channel, Tickets
from quire.server.link.engine_link import EngineLink
from quire.server.link.messages import AddRequest, Resume, pack_tokens
from quire.server.tasks import RunningTimeClock

LOOPS = [asyncio.new_event_loop, uvloop.new_event_loop]


def some_messages(count: int) -> list[bytes]:
    source = random.Random(1)
    return [source.randbytes(source.choice([0, 1, 3, 700, 70_000])) for _ in range(count)]


@pytest.mark.parametrize("new_loop", LOOPS)
def test_an_engine_that_is_far_ahead_waits_and_nothing_is_lost(
    new_loop: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.server.link.channel._MOST_WAITING", 5)
    sent, link_end, engine_end = some_messages(400), *socket.socketpair()
    engine = BlockingChannel(engine_end, most_unsent=100_000)
    num_sent = 0

    def run_engine() -> None:
        nonlocal num_sent
        for one in sent:
            engine.send_bytes(one)
            num_sent += 1
        engine.flush()
        engine_end.close()

    async def run() -> list[bytes]:
        link = EngineLink(ServerConfig(), RunningTimeClock(1.0))
        await link.open(link_end)
        thread = threading.Thread(target=run_engine)
        thread.start()
        await asyncio.sleep(0.2)
        assert num_sent < len(sent)  # nobody has taken anything yet
        found = [await link.receive() for _ in sent]
        assert await link.broken() == "its connection is closed"
        thread.join()
        return found

    with asyncio.Runner(loop_factory=new_loop) as runner:
        assert runner.run(run()) == sent


@pytest.mark.parametrize("new_loop", LOOPS)
def test_an_event_loop_never_waits_for_who_reads(new_loop: Any) -> None:
    sent, ours, theirs = some_messages(300), *socket.socketpair()
    found: list[bytes] = []

    def read() -> None:
        reader = BlockingChannel(theirs)
        while len(found) < len(sent):
            if (message := reader.receive(20.0)) is not None:
                found.append(message)

    async def run() -> None:
        lost = asyncio.Event()
        channel = Channel(lambda _: None, lost.set)
        await channel.open(ours)
        for one in sent:
            channel.send_bytes(one)
        assert channel.num_unread > 1_000_000
        thread = threading.Thread(target=read)
        thread.start()
        await asyncio.to_thread(thread.join)
        theirs.close()
        await asyncio.wait_for(lost.wait(), 20)
        channel.send_bytes(b"to nobody")

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(run())
    assert found == sent


def test_who_has_no_parent_any_more_hears_the_rest_and_then_that() -> None:
    ours, theirs = socket.socketpair()
    reader, writer = BlockingChannel(theirs), BlockingChannel(ours)
    assert reader.receive(0.0) is None
    began = time.monotonic()
    assert reader.receive(0.05) is None
    assert time.monotonic() - began >= 0.04
    writer.send_bytes(b"last words")
    ours.close()
    reader.send_bytes(b"x" * 1_000_000)  # no error: there is more to hear
    reader.flush(1.0)
    assert reader.wait(0.0)
    assert reader.receive() == b"last words"
    with pytest.raises(EOFError):
        reader.receive()


def test_a_question_gets_its_own_answer_or_none() -> None:
    async def run() -> None:
        tickets, asked = Tickets(), list[int]()
        first, second = (asyncio.create_task(tickets.ask(asked.append, 20.0)) for _ in range(2))
        await asyncio.sleep(0)
        tickets.answer(asked[1], "second")
        assert await second == "second"
        tickets.answer(asked[1], "again")  # nobody waits for that
        tickets.answer_all(None)
        assert await first is None
        with pytest.raises(TimeoutError):
            await tickets.ask(asked.append, 0.01)

    asyncio.run(run())


@pytest.mark.parametrize("options", [{}, {"n": 3}, {"n": 2, "best_of": 4}, {"best_of": 1}])
def test_a_request_s_answers_have_the_ids_that_the_engine_gives_them(
    options: dict[str, int],
) -> None:
    params = SamplingParams(**options)
    message = AddRequest("r", pack_tokens([1]), encode_params(params), seed=0)
    made = [request.request_id for request in make_requests("r", [1], params, 0)]
    assert list(message.answer_ids) == made
    message.resume = Resume({made[-1]: (1, 2)}, 0.0)
    assert message.answer_ids == (made[-1],)
