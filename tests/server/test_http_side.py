"""What keeps the HTTP side cheap changes nothing that clients see: events written from a prepared
frame, events told together, texts and numbers shared between streams and processes.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import uvicorn
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from quire.observe.prometheus import ServerMetrics
from quire.observe.shared_metrics import Numbers
from quire.outputs import TokenLogprobs
from quire.process.gc_pauses import IdleCollector
from quire.sampling_params import SamplingParams
from quire.server.api.anthropic import MessageWriter
from quire.server.api.anthropic_fields import MessagesRequest
from quire.server.api.call_stream import DIRECT_BODY, CallStream
from quire.server.api.chat import ChatCompletionRequest, ChatWriter
from quire.server.api.completions import CompletionRequest, CompletionWriter
from quire.server.api.responses import OutputItems, ResponsesRequest, ResponseWriter
from quire.server.api.writer import TextEvent
from quire.server.calls.call import Call, TextSink
from quire.server.calls.generation import (
    GenerationEvent,
    GenerationRequest,
    TextPrompt,
    ToolCallDelta,
    Usage,
    join_events,
    whole_choices,
)
from quire.server.config import ServerConfig, decode_config, encode_config
from quire.server.errors import ApiError
from quire.server.guard.admission import Admission
from quire.server.guard.counts import ANSWERS, CONNECTIONS, Counts
from quire.server.guard.http_protocol import _DirectBody
from quire.server.http_responses import data_event, one_line
from quire.server.http_server import HttpServer
from quire.server.link.channel import Frames, frame
from quire.server.link.engine_client import EngineClient
from quire.server.link.listeners import BatchedCallbacks, Listeners
from quire.server.link.messages import (
    Fatal,
    Updates,
    decode_event,
    decode_to_worker,
    encode,
)
from quire.server.link.workers.relay import WorkerLink, _Request
from quire.step import RequestUpdate, TokenLogprob
from tests.server.harness import ROOT

anything = st.text(st.characters(exclude_categories=("Cs",)), min_size=1)
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "stream": True}
WRITERS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "chat": (ChatWriter, ChatCompletionRequest, CHAT),
    "chat with usage": (
        ChatWriter,
        ChatCompletionRequest,
        {**CHAT, "stream_options": {"include_usage": True}},
    ),
    "chat with all usage": (
        ChatWriter,
        ChatCompletionRequest,
        {**CHAT, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ),
    "chat with tokens": (ChatWriter, ChatCompletionRequest, {**CHAT, "return_token_ids": True}),
    "chat of a tier": (ChatWriter, ChatCompletionRequest, {**CHAT, "service_tier": "auto"}),
    "completions": (CompletionWriter, CompletionRequest, {"prompt": "Hi", "stream": True}),
    "completions with echo": (
        CompletionWriter,
        CompletionRequest,
        {"prompt": "Hi", "stream": True, "echo": True},
    ),
    "responses": (ResponseWriter, ResponsesRequest, {"input": "Hi", "stream": True}),
    "messages": (MessageWriter, MessagesRequest, {**CHAT, "model": "m", "max_tokens": 9}),
}


def new_writer(name: str) -> Any:
    kind, body_kind, fields = WRITERS[name]
    prompt = SimpleNamespace(plan=None, token_ids=(1, 2), is_clamped=False, text="Hi")
    request = GenerationRequest((TextPrompt("Hi"),), SamplingParams(n=2))
    call = SimpleNamespace(request_id="id", request=request, prompts=[prompt], usage=Usage(2, 0, 5))
    call.tokenizer = SimpleNamespace(special_token_ids=frozenset())
    writer = kind(
        body_kind.model_validate(fields), call, 'a "model"', "fp", SimpleNamespace(store=None)
    )
    writer.created = 7
    return writer


def text(content: str, index: int = 0) -> GenerationEvent:
    return GenerationEvent(index, content, content, token_ids=(5,))


EVENTS = [
    text("One"),
    text(' "two" \\ \x07\u2028'),
    text("中🦩é</script>"),
    GenerationEvent(0, token_ids=(7,)),  # half a character
    text("a", 1),
    GenerationEvent(0, "b", reasoning="b", token_ids=(8,)),
    GenerationEvent(0, "b", reasoning="b\n", token_ids=(8,)),
    GenerationEvent(0, "bc", "c", "b", token_ids=(8, 5)),
    text("c"),
    text("d"),
    GenerationEvent(0, "{}", tool_calls=(ToolCallDelta(0, "c1", "f", "{}"),), token_ids=(9,)),
    text("e"),
    text("f", 1),
    text("g"),
    GenerationEvent(0, "h", "h", token_ids=(5,), finish_reason="stop", stop_reason="x"),
]


@pytest.mark.parametrize("name", list(WRITERS))
def test_a_prepared_event_has_the_bytes_of_any_other(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same events from a writer that prepares nothing."""
    monkeypatch.setattr("quire.server.api.response_items.new_id", lambda prefix: f"{prefix}1")
    one_choice = name in ("responses", "messages")
    events = [event for event in EVENTS if not (one_choice and event.index)]
    quick, slow = new_writer(name), new_writer(name)
    prepared = 0
    prepared_chunks: list[bytes | None] = []
    text_chunk = quick.text_chunk
    monkeypatch.setattr(
        quick,
        "text_chunk",
        lambda *args: prepared_chunks.append(text_chunk(*args)) or prepared_chunks[-1],
    )
    for event in events:
        written = quick.chunk(event)
        prepared += prepared_chunks.pop() is not None if prepared_chunks else 0
        assert written == b"".join(slow.chunks(event))
    if name in ("chat with all usage", "chat with tokens"):
        assert prepared == 0
    else:
        assert prepared >= (3 if name.startswith("completions") else 4)  # those have no reasoning


@given(anything, st.integers(0, 10**9))
def test_any_text_is_escaped_as_the_encoder_does(text: str, number: int) -> None:
    def make(text: str, number: int) -> bytes:
        return data_event({"a": [{"delta": text}], "n": number, "z": None})

    assert TextEvent(make).write(text, number) == make(text, number)
    without = TextEvent(lambda text, _: data_event({"delta": text}))
    assert without.write(text) == data_event({"delta": text})
    twice = TextEvent(lambda text, number: data_event({"a": text, "b": text, "n": number}))
    assert twice.write(text, number) == data_event({"a": text, "b": text, "n": number})


@given(
    st.text(
        st.one_of(
            st.sampled_from("\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029\\"),
            st.characters(exclude_categories=["Cs"]),
        )
    )
)
def test_a_line_is_one_to_everybody(text: str) -> None:
    """httpx's `iter_lines` and a client's `text.splitlines()` take more for the end of a line than
    JSON does.
    """
    written = one_line({"delta": text}).decode()
    assert written.splitlines() == [written]
    assert json.loads(written) == {"delta": text}


indexes = st.integers(0, 1)
events = st.lists(
    st.one_of(
        st.builds(lambda i, t: GenerationEvent(i, t, t, token_ids=(len(t),)), indexes, anything),
        st.builds(
            lambda i, t: GenerationEvent(i, t, reasoning=t, token_ids=(len(t),)), indexes, anything
        ),
        # half a character, part of a tag
        st.builds(lambda i: GenerationEvent(i, token_ids=(7,)), indexes),
        st.builds(
            lambda i, t: GenerationEvent(
                i, t, tool_calls=(ToolCallDelta(0, None, None, t),), token_ids=(len(t),)
            ),
            indexes,
            anything,
        ),
    ),
    max_size=12,
)


@given(events, st.sets(indexes))
def test_events_told_together_tell_the_same_in_the_same_order(
    events: list[GenerationEvent], silent: set[int]
) -> None:
    begins = [next((event for event in events if event.index == index), None) for index in silent]
    joined = join_events(events, silent)
    assert all(any(event is one for one in joined) for event in begins if event is not None)
    assert whole_choices(joined) == whole_choices(events)
    for index in (0, 1):
        told = [one for event in joined if event.index == index for one in _parts(event)]
        assert _runs(told) == _runs(
            [one for event in events if event.index == index for one in _parts(event)]
        )


@given(st.lists(st.sampled_from(["reasoning", "content", "nothing"]), max_size=9))
def test_tokens_told_together_keep_their_logprobs(kinds: list[str]) -> None:
    """The message of a response has those of its own tokens, however slowly its client reads."""
    events = []
    for number, kind in enumerate(kinds):
        text = "" if kind == "nothing" else str(number)
        told = {} if kind == "nothing" else {kind: text}
        logprobs = (TokenLogprobs(number, -1.0, 1, text.encode(), ()),)
        events.append(GenerationEvent(0, text, **told, token_ids=(number,), logprobs=logprobs))

    def items(told: list[GenerationEvent]) -> list[dict[str, Any]]:
        written = OutputItems(True, {})
        for event in told:
            list(written.take(event))
        list(written.finish("stop"))
        return [{**item, "id": ""} for item in written.items]

    assert items(join_events(events)) == items(events)


def _parts(event: GenerationEvent) -> list[tuple[str, str]]:
    """As writers tell them."""
    found = [("reasoning", event.reasoning), ("content", event.content)]
    found += [("call", one.arguments) for one in event.tool_calls]
    return [one for one in found if one[1]]


def _runs(parts: list[tuple[str, str]]) -> list[tuple[str, str]]:
    runs: list[tuple[str, str]] = []
    for kind, piece in parts:
        if runs and runs[-1][0] == kind != "call":
            runs[-1] = (kind, runs[-1][1] + piece)
        else:
            runs.append((kind, piece))
    return runs


class Connection:
    """A client's, which may refuse to take more."""

    def __init__(self) -> None:
        self.is_blocked = False
        self.free = asyncio.Event()
        self.free.set()
        self.direct: list[bytes] = []
        self.sent: list[bytes] = []
        self.all: list[bytes] = []
        """Both."""

    def write(self, data: bytes) -> None:
        self.direct.append(data)
        self.all.append(data)

    async def send(self, message: Any) -> None:
        await self.free.wait()
        if message.get("body"):
            self.sent.append(message["body"])
            self.all.append(message["body"])

    def block(self, is_blocked: bool) -> None:
        self.is_blocked = is_blocked
        self.free.clear() if is_blocked else self.free.set()


class FakeCall(Call):
    """A call that says what it is told to: as events, or also by the short way that is for text
    alone.
    """

    def __init__(self, most: int, is_short: bool) -> None:
        self.on_news: Callable[[], None] | None = None
        self.callbacks = BatchedCallbacks()
        self.is_announced = self.is_over = False
        self.events: list[GenerationEvent] = []
        self._num_buffered, self._max_buffered = 0, most
        self._is_short, self._sink = is_short, cast(TextSink | None, None)
        self._silent = {0}
        self._error: ApiError | None = None
        self._wake = None

    def say(self, *words: str) -> None:
        for word in words:
            # what takes long to write is never text alone
            sink = None if self.events or word == "long" else self._sink
            if sink is None or not sink.push(word, (1,), False):
                self._emit(text(word))

    def write_text_to(self, index: int, sink: TextSink) -> None:
        self._sink = sink if self._is_short else None

    def fail(self, error: ApiError) -> None:
        self.events.clear()
        self._error = error
        self.over()

    def over(self) -> None:
        self.is_over = True
        self._notify()

    _prepare = _take = _count_finished = None  # type: ignore[assignment]


class Words:
    """A writer."""

    is_long = False
    may_take_long = True

    def __init__(self, call: FakeCall) -> None:
        self.call = call

    def begin(self) -> Iterable[bytes]:
        return (b"<",)

    def chunk(self, event: GenerationEvent) -> bytes:
        if event.content == "bad":
            raise RuntimeError("can't be written")
        return event.content.encode()

    def text_writer(self, index: int, is_reasoning: bool) -> Callable[[str], bytes | None]:
        return lambda word: self.text_chunk(index, word, is_reasoning)

    def text_chunk(self, index: int, word: str, is_reasoning: bool) -> bytes | None:
        if is_reasoning:
            return f"[{word}]".encode()
        return None if word == "odd" else self.chunk(text(word))

    def is_long_chunk(self, event: GenerationEvent) -> bool:
        return event.content == "long"

    def finish(self) -> Iterable[bytes]:
        return (b">",)

    def error_event(self, path: str, error: ApiError, request_id: str) -> bytes:
        return b"!" + str(error.status).encode()


def run_stream(scenario: Callable[[FakeCall, Connection], Any], most: int = 100) -> list[bytes]:
    """What the client sees, which is the same whichever way its text comes."""
    seen = [_run_stream(scenario, most, is_short).all for is_short in (False, True)]
    assert seen[0] == seen[1]
    return seen[0]


def _run_stream(
    scenario: Callable[[FakeCall, Connection], Any], most: int, is_short: bool
) -> Connection:
    async def run() -> Connection:
        call, connection = FakeCall(most, is_short), Connection()
        stream = CallStream(Words(call), lambda: None, {})  # type: ignore[arg-type]

        async def receive() -> Any:
            await asyncio.Event().wait()

        scope = {
            "extensions": {DIRECT_BODY: connection},
            "state": {"http_request_id": "r"},
            "path": "/",
        }
        task = asyncio.create_task(stream(scope, receive, connection.send))
        await _turns()
        await scenario(call, connection)
        await asyncio.wait_for(task, 60)
        return connection

    return asyncio.run(run())


async def _turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_a_stream_that_is_read_needs_no_task() -> None:
    async def scenario(call: FakeCall, connection: Connection) -> None:
        for word in ("a", "b"):
            call.say(word)
            await _turns()
        call.say("c", "d")  # two steps in one turn
        await _turns()
        assert connection.direct == [b"a", b"b", b"cd"]
        call.say("e")
        call.over()

    assert run_stream(scenario) == [b"<", b"a", b"b", b"cd", b"e", b">"]


def test_a_reader_who_lags_is_told_all_at_once() -> None:
    async def scenario(call: FakeCall, connection: Connection) -> None:
        connection.block(True)
        for word in "abcdef":
            call.say(word)
            await _turns()
        assert connection.direct == []
        connection.block(False)
        await _turns(20)
        assert connection.sent == [b"<", b"a", b"bcdef"]  # the first of all waits for nobody
        call.say("g")
        await _turns()
        assert connection.direct == [b"g"]
        call.over()

    assert run_stream(scenario)[-2:] == [b"g", b">"]


def test_a_reader_who_does_not_read_ends_alone() -> None:
    async def scenario(call: FakeCall, connection: Connection) -> None:
        connection.block(True)
        for _ in range(200):
            call.say("x")
            await _turns(2)
        assert call.is_over
        connection.block(False)

    assert run_stream(scenario) == [b"<", b"x", b"!408"]


def test_what_takes_long_is_written_by_the_task_and_faults_are_told() -> None:
    async def scenario(call: FakeCall, connection: Connection) -> None:
        call.say("long")
        for _ in range(6000):
            await asyncio.sleep(0.01)
            if b"long" in connection.sent:
                break
        call.say("a")
        await _turns()
        assert connection.direct == [b"a"]
        call.say("long")  # in the middle
        for _ in range(6000):
            await asyncio.sleep(0.01)
            if connection.sent[-1] == b"long" and len(connection.sent) == 3:
                break
        call.say("odd")  # text that needs other events first
        await _turns()
        assert connection.direct[1:] == [b"odd"]
        call.say("bad")

    assert run_stream(scenario) == [b"<", b"long", b"a", b"long", b"odd", b"!500"]


def test_reasoning_and_content_of_one_turn_keep_their_order() -> None:
    async def scenario(call: FakeCall, connection: Connection) -> None:
        call.say("a")
        await _turns()
        assert call._sink is not None
        assert all(call._sink.push(word, (1,), is_reasoning=True) for word in "rs")
        assert not call._sink.push("c", (1,), False)
        call._emit(text("c"))
        await _turns()
        assert call._sink.push("d", (1,), False)
        call.over()

    assert _run_stream(scenario, 100, True).all == [b"<", b"a", b"[rs]", b"c", b"d", b">"]


def test_a_long_row_is_told_in_several_turns() -> None:
    async def run() -> list[int]:
        turn, told, seen = BatchedCallbacks(), [], []

        def fail() -> None:
            raise RuntimeError("one of them fails")

        turn.add(fail)
        for number in range(600):
            turn.add(lambda number=number: told.append(number))  # type: ignore[misc]
        for _ in range(4):
            await asyncio.sleep(0)
            seen.append(len(told))
        assert told == list(range(600))
        return seen

    assert asyncio.run(run()) == [255, 511, 600, 600]


def _update(name: str, token_ids: tuple[int, ...], is_scored: bool) -> RequestUpdate:
    return RequestUpdate(
        name, token_ids, logprobs=(TokenLogprob(1, -0.5, 1, ()),) if is_scored else ()
    )


some_updates = st.builds(
    _update, st.sampled_from("ab"), st.sampled_from([(), (1,), (2,), (3, 4)]), st.booleans()
)


@given(st.lists(st.lists(some_updates, max_size=6), max_size=3))
def test_tokens_that_come_alone_do_not_overtake_what_else_is_told(
    steps: list[list[RequestUpdate]],
) -> None:
    """From the engine in one message, and from several of them to a worker in one."""
    link = WorkerLink(*cast(list[Any], [None] * 4))
    link.is_due = True  # no event loop is needed to send it
    listeners = Listeners()
    for name in "ab":
        listeners.add(name, [name], _Request(link, name, 1))
    for updates in steps:
        sent = Updates()
        sent.add_updates(updates)
        received = cast(Updates, decode_event(encode(sent)))
        assert _by_name(received.all_updates()) == _by_name(updates)
        assert all(token_ids for token_ids in received.appended_token_ids)
        listeners.take(received, lambda _: None)
    passed_on = cast(Updates, decode_to_worker(encode(link.news())))
    assert _by_name(passed_on.all_updates()) == _by_name(
        [one for updates in steps for one in updates]
    )


def _by_name(updates: list[RequestUpdate]) -> list[list[RequestUpdate]]:
    return [[one for one in updates if one.request_id == name] for name in "ab"]


def test_an_answer_s_tokens_are_kept_and_its_first_ones_are_told() -> None:
    grown: list[tuple[int, ...]] = []

    class Waiting:
        def grower(self, answer_id: str) -> Callable[[tuple[int, ...], float], None]:
            return lambda token_ids, now: grown.append(token_ids)

    listeners = Listeners()
    outputs: dict[str, list[int]] = {"a": [7], "b": []}  # one goes on with what it has
    computed: list[str] = []
    listeners.add("r", ["a", "b"], cast(Any, Waiting()), outputs, lambda: computed.append("r"))
    for _ in range(2):
        listeners.take(Updates(["a", "nobody"], [(1,), (2,)]), lambda _: None)
        assert computed == ["r"]
    listeners.take(Updates(["b"], [(3, 4)]), lambda _: None)
    assert computed == ["r", "r"]
    assert outputs == {"a": [7, 1, 1], "b": [3, 4]}
    assert grown == [(1,), (1,), (3, 4)]
    listeners.remove("r")
    listeners.take(Updates(["a"], [(5,)]), lambda _: None)
    assert outputs["a"] == [7, 1, 1]


@pytest.mark.parametrize("is_chunked", [True, False])
def test_nothing_is_written_into_a_connection_that_is_lost(is_chunked: bool) -> None:
    written: list[bytes] = []
    cycle = SimpleNamespace(
        flow=SimpleNamespace(write_paused=False), chunked_encoding=None, disconnected=False
    )
    direct = _DirectBody(cast(Any, cycle), cast(Any, SimpleNamespace(write=written.append)))
    cycle.chunked_encoding = is_chunked  # the response begins
    direct.write(b"data")
    direct.is_lost = True
    direct.write(b"more")
    assert written == [b"4\r\ndata\r\n" if is_chunked else b"data"]


def test_an_engine_that_is_ahead_keeps_nobody_waiting() -> None:
    """Its messages lie ready, one after the other, and others have their turn all the same."""
    taken, turns = 0, []

    class Ahead:
        async def receive(self) -> bytes:
            return self.receive_now()

        def receive_now(self) -> bytes:
            nonlocal taken
            taken += 1
            return encode(
                Fatal("over")
                if taken > 100
                else Updates(updates=[RequestUpdate("nobody", (1,))] * 256)
            )

    async def others() -> None:
        while True:
            turns.append(taken)
            await asyncio.sleep(0)

    async def run() -> str:
        client = EngineClient(ServerConfig(), ServerMetrics("m"), lambda: None)
        task = asyncio.create_task(others())
        reason = await client._read(Ahead())  # type: ignore[arg-type]
        task.cancel()
        return reason

    assert asyncio.run(run()) == "over"
    assert max(later - earlier for earlier, later in pairwise(turns)) <= 8


def test_limits_are_counted_over_processes(tmp_path: Path) -> None:
    first, second = (Counts(tmp_path / "counts", row, 3) for row in (1, 2))
    admissions = [Admission(2, 2, 100, counts=counts) for counts in (first, second)]
    tickets = [admissions[i % 2].enter(1) for i in range(4)]
    for admission in admissions:
        with pytest.raises(ApiError, match="4 answers are running or waiting"):
            admission.enter(1)
    tickets[0].release()
    tickets[3].add_tokens(90)
    with pytest.raises(ApiError, match="90 prompt tokens"):
        tickets[2].add_tokens(20)
    assert [one.num_answers for one in admissions] == [3, 3]
    main = Counts(tmp_path / "counts", 0, 3)
    main.clear(2)  # it was killed
    assert (admissions[0].num_answers, admissions[0].num_tokens) == (1, 0)
    assert first.add(CONNECTIONS, 1) == 1
    assert main.total(ANSWERS) == 1


_COUNT = """
import sys, os, signal
from pathlib import Path
from quire.observe.prometheus import ServerMetrics
from quire.observe.shared_metrics import Numbers
from quire.outputs import TokenLogprobs
metrics = ServerMetrics("m", numbers=Numbers(Path(sys.argv[1])))
for _ in range(1000):
    metrics.tokens(2, 0.02, False)
metrics.http_request("/x", 200)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_no_count_is_lost_with_a_process(tmp_path: Path) -> None:
    page = ServerMetrics("m")
    files = [tmp_path / "1", tmp_path / "2"]
    page.show([Numbers(path) for path in files])
    page.tokens(5, 0.02, False)
    # the first is started again, and goes on where it was
    for path in (files[0], files[0], files[1]):
        command = [sys.executable, "-c", _COUNT, str(path)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        assert subprocess.run(command, env=environment, timeout=60, check=False).returncode == -9
    samples = {
        (sample.name, sample.labels.get("le", ""), sample.labels.get("path", "")): sample.value
        for family in text_string_to_metric_families(page.text().decode())
        for sample in family.samples
    }
    assert samples["vllm:generation_tokens_total", "", ""] == 6005
    assert samples["quire_http_requests_total", "", "/x"] == 3
    for name in ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"):
        assert samples[f"{name}_count", "", ""] == 6005
        assert samples[f"{name}_bucket", "0.01", ""] == 6005
        assert samples[f"{name}_bucket", "0.005", ""] == 5
        assert samples[f"{name}_sum", "", ""] == pytest.approx(60.02)


def test_messages_come_in_any_pieces() -> None:
    sent = [b"a" * 1000, b"", b"b"]
    data = b"".join(map(frame, sent))
    for size in (1, 3, 500, len(data)):
        frames = Frames()
        found = [
            one for at in range(0, len(data), size) for one in frames.feed(data[at : at + size])
        ]
        assert found == sent


def test_a_worker_gets_the_server_s_options(tmp_path: Path) -> None:
    config = ServerConfig(
        api_keys=("a", "b"),
        http_workers=3,
        store=tmp_path,
        engine={"max_num_seqs": 3},
        tls_certificate=None,
    )
    assert decode_config(encode_config(config)) == config


def test_memory_is_given_back_once_when_nobody_has_asked_for_a_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tidied: list[float] = []
    monkeypatch.setattr(IdleCollector, "collect", lambda self, now: tidied.append(now))
    server = HttpServer(uvicorn.Config(app="none", log_config=None))
    state, start = server.server_state, server._last_busy
    for tenth in range(60):
        server._tidy(start + tenth / 10)
    assert tidied == []  # nothing was answered yet
    answer = cast("asyncio.Task[None]", object())
    state.tasks.add(answer)
    for tenth in range(60, 120):
        server._tidy(start + tenth / 10)
    assert tidied == []  # somebody is being answered
    state.tasks.discard(answer)
    state.total_requests += 1
    for tenth in range(120, 200):
        server._tidy(start + tenth / 10)
    assert [round(moment - start, 1) for moment in tidied] == [13.0]
    # Who asks the health twice a second is no silence.
    for tenth in range(200, 300):
        state.total_requests += tenth % 5 == 0
        server._tidy(start + tenth / 10)
    assert len(tidied) == 1


def test_what_was_freed_goes_back_to_the_system() -> None:
    """Small pieces between others that stay: C's allocator keeps their pages for itself."""
    code = """
import os
from pathlib import Path
from quire.process.gc_pauses import IdleCollector
resident = lambda: int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024
pieces = [bytearray(20_000) for _ in range(2000)]
del pieces[:-1]
before = resident()
IdleCollector(0.0).collect(1.0)
print(before - resident())
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert int(done.stdout) > 30_000  # KiB
