"""What a watcher is told, against the engine itself: simulated, with preemptions, guesses, faults
and a host tier.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from importlib.resources import files
from types import SimpleNamespace
from typing import Any

import pytest

from quire.engine import SchedulerConfig
from quire.observe.block_map import CACHED, FREE, SHARED, UNSEEN, USED
from quire.observe.live_view import FRAME_SECONDS, KEY_SECONDS, Column, LiveView
from quire.observe.request_records import RecordBook, RequestRecord
from quire.sampling_params import SamplingParams
from quire.server.errors import ApiError
from quire.server.link import watch_hub
from quire.server.link.engine_watch import EngineWatch
from quire.server.link.messages import Watched
from quire.server.link.watch_hub import WatchHub, WatchHubs
from quire.step import (
    AdmittedRequest,
    Finished,
    ScheduledRequest,
    Step,
    StepLogEntry,
    StepPromise,
    StepResult,
)
from quire.tools.simulate.scenario import make_scenario
from quire.tools.simulate.simulation import Simulation

CONFIG = SchedulerConfig(
    num_blocks=9, max_num_seqs=4, max_batched_tokens=64, max_model_len=64, block_size=4
)


class Client:
    """What a page makes of frames: the map and the requests, by differences alone."""

    def __init__(self) -> None:
        self.blocks: list[int] = []
        self.requests: dict[int, list[Any]] = {}
        self.steps = 0

    def take(self, frame: dict[str, Any]) -> None:
        if "key" in frame:
            runs = frame["key"]["blocks"]
            self.blocks = [0]
            for code, count in zip(runs[::2], runs[1::2], strict=True):
                self.blocks += [code] * count
            self.requests = {one[0]: one for one in frame["key"]["requests"]}
        changes = frame.get("blocks", [])
        for block, code in zip(changes[::2], changes[1::2], strict=True):
            self.blocks[block] = code
        for one in frame.get("ended", ()):
            self.requests.pop(one[0], None)
        for one in frame.get("requests", ()):
            self.requests[one[0]] = one
        self.steps += sum(column[3] for column in frame["steps"])


@pytest.mark.parametrize("seed", range(16))
def test_blocks_and_requests_are_those_of_the_engine(seed: int) -> None:
    simulation = Simulation(make_scenario(seed))
    view = LiveView(simulation.scheduler.config, is_complete=True)
    client = Client()
    entries: list[StepLogEntry] = []

    def observe(entry: StepLogEntry) -> None:
        entries.append(entry)
        view.observe(entry)
        counts = view.blocks.counts()
        free = counts["free"] + counts["cached"]
        if simulation.scheduler.config.leaving_groups:
            # What leaves the window does so with a step's result, which the next one may not have
            # waited for.
            assert free >= entry.step.num_free_blocks
        else:
            assert free == entry.step.num_free_blocks
        assert counts["unseen"] == 0
        assert sum(one.is_running for one in view.requests.values()) == entry.step.num_running
        if len(entries) % 5 == 1:
            client.take(json.loads(json.dumps(view.take_frame()[0])))

    on_step = simulation.core._on_step
    assert on_step is not None

    def both(entry: StepLogEntry) -> None:
        on_step(entry)
        observe(entry)

    simulation.core._on_step = both
    simulation.run()
    client.take(json.loads(json.dumps(view.take_frame()[0])))
    assert not view.requests
    assert not client.requests
    assert view.blocks.counts()["used"] == view.blocks.counts()["shared"] == 0
    assert client.steps == len(entries)
    assert client.blocks[1:] == view.blocks._codes[1:]
    # Whoever comes later and has missed the beginning contradicts nobody who has seen it all.
    late = LiveView(simulation.scheduler.config, is_complete=False)
    for entry in entries[len(entries) // 2 :]:
        late.observe(entry)
    for block in range(1, simulation.scheduler.config.num_blocks):
        if late.blocks.state(block) != UNSEEN:
            assert (late.blocks.state(block) in (USED, SHARED)) == (
                view.blocks.state(block) in (USED, SHARED)
            )


def admission(
    name: str, tokens: int, blocks: tuple[int, ...] = (), cached: int = 0
) -> AdmittedRequest:
    ids = tuple(range(tokens))
    return AdmittedRequest(
        name, 0, ids, tokens, blocks, cached, 0, SamplingParams(), 0, (), arrival=0.0
    )


def entry(
    number: int, now: float, *, tokens: Sequence[str] = (), error: str | None = None, **fields: Any
) -> StepLogEntry:
    result = None if error else StepResult(number, dict.fromkeys(tokens, (1,)))
    return StepLogEntry(Step(number, now, **fields), result, error, now + 0.01)


def test_owners_of_shared_and_cached_blocks() -> None:
    view = LiveView(CONFIG, is_complete=True)
    chunk = ScheduledRequest("a", 0, 0, 9, True, (3, 4, 5))
    view.observe(
        entry(
            0, 0.0, admitted=(admission("a", 9),), scheduled=(chunk,), tokens=["a"], num_running=1
        )
    )
    frame, is_key = view.take_frame()
    assert is_key
    assert frame["key"]["names"] == [[1, "a"]]
    assert [view.blocks.state(block) for block in (3, 4, 5, 6)] == [USED, USED, USED, FREE]
    # Another finds two of these, then the first ends: what is full stays.
    found = admission("b", 9, (3, 4), cached=8)
    second = ScheduledRequest("b", 1, 8, 1, True, (6,))
    view.observe(
        entry(1, 1.0, admitted=(found,), scheduled=(second,), num_decodes=0, num_running=2)
    )
    assert [view.blocks.state(block) for block in (3, 4, 5, 6)] == [SHARED, SHARED, USED, USED]
    assert [view.blocks.owner(block) for block in (3, 6)] == [1, 2]
    view.observe(entry(2, 2.0, finished=(Finished("a", 0, "stop", 0.0, 2.0, 9, 1),), num_running=1))
    view.observe(entry(3, 3.0, finished=(Finished("b", 1, "stop", 0.0, 3.0, 9, 4),)))
    assert [view.blocks.state(block) for block in (3, 4, 5, 6)] == [CACHED, CACHED, FREE, CACHED]
    frame, is_key = view.take_frame()
    assert not is_key
    assert [one[1] for one in frame["ended"]] == ["a", "b"]
    columns = [Column(*one) for one in frame["steps"]]
    assert (
        sum(one.cached_tokens for one in columns) / sum(one.admitted_tokens for one in columns)
        == 8 / 9
    )


def test_a_frame_is_bounded_and_adds_up() -> None:
    view = LiveView(replace(CONFIG, bytes_per_block=4096), is_complete=True)
    for number in range(1000):
        view.observe(entry(number, number / 1000, num_running=number % 3, num_waiting=7))
    frame, _ = view.take_frame()
    assert frame["key"]["bytes_per_block"] == 4096
    steps = [Column(*one) for one in frame["steps"]]
    assert len(steps) <= 32
    assert sum(one.steps for one in steps) == 1000
    assert sum(one.seconds for one in steps) == pytest.approx(10.0)
    assert (steps[-1].step_id, steps[-1].running, steps[-1].waiting) == (999, 0, 7)


def test_draft_tokens_and_failures_are_counted() -> None:
    view = LiveView(CONFIG, is_complete=True)
    guessing = ScheduledRequest("a", 0, 5, 4, True, (), (7, 8, 9))
    step = Step(0, 0.0, (guessing,), num_running=1)
    view.observe(StepLogEntry(step, StepResult(0, {"a": (7, 8, 1)}), None, 0.1))
    view.observe(entry(1, 1.0, error="broke", scheduled=(guessing,)))
    first, second = (Column(*one) for one in view.take_frame()[0]["steps"])
    assert (first.decodes, first.accepted, first.refused, first.sampled) == (1, 2, 1, 3)
    assert (second.failed, second.sampled) == (1, 0)


def test_promises_of_time_are_told() -> None:
    view = LiveView(CONFIG, is_complete=True)
    promises = [StepPromise(16, 0.02), StepPromise(32, 0.03, "first_token"), None]
    for number, promise in enumerate(promises):
        step = Step(number, float(number), num_running=1, promise=promise)
        view.observe(StepLogEntry(step, StepResult(number, {}), None, number + 0.1))
    steps = [Column(*one) for one in view.take_frame()[0]["steps"]]
    assert [(one.planned_seconds, one.late) for one in steps] == [(0.02, 0), (0.03, 1), (0.0, 0)]


def test_the_page_reads_columns_by_the_numbers_that_they_have() -> None:
    """By name where the page's is a part of ours."""
    source = (files("quire.server.web") / "timeline.js").read_text()
    text = source[source.index("STEP = {") : source.index("};", source.index("STEP = {"))]
    places = {name: int(place) for name, place in re.findall(r"(\w+): (\d+)", text)}
    assert sorted(places.values()) == list(range(len(Column._fields)))
    assert all(name in Column._fields[place] for name, place in places.items())


def test_frames_are_few_and_none_is_owed_for_long() -> None:
    """Five in a second of steps; what is left when the engine has nothing to do comes as soon as
    that allows.
    """
    log = [entry(number, number / 100, num_running=1) for number in range(500)]
    watch = EngineWatch(log, CONFIG)
    assert watch.wait_seconds(10.0) == 0.0
    frames: list[Watched] = []
    turns = 0
    while watch.wait_seconds(10.0) == 0.0:
        frames += watch.take_frames(10.0, is_idle=False)
        turns += 1
        assert turns < 100
    assert turns > 4  # the engine is not kept for long
    assert [frame.is_key for frame in frames] == [True] + [False] * (len(frames) - 1)
    assert all(frame.is_past for frame in frames)  # the log goes on behind each of them
    assert len(frames) <= 5.0 / FRAME_SECONDS + 1
    left = watch.wait_seconds(10.0)
    assert left is not None
    assert 0 < left <= FRAME_SECONDS
    assert not list(watch.take_frames(10.0, is_idle=True))
    (last,) = watch.take_frames(10.0 + left, is_idle=True)
    assert json.loads(last.frame)["steps"][-1][0] == 499
    assert not last.is_past
    assert watch.wait_seconds(11.0) is None


def test_long_steps_leave_time_for_more_of_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else, with steps of a second, a page would show the past for minutes."""
    log = [entry(number, number / 100, num_running=1) for number in range(500)]
    clock = [0.0]
    watch = EngineWatch(log, CONFIG)
    monkeypatch.setattr(
        "quire.server.link.engine_watch.time", SimpleNamespace(monotonic=lambda: clock[0])
    )
    observe = watch._view.observe

    def slowly(one: StepLogEntry) -> None:
        clock[0] += 1e-4
        observe(one)

    monkeypatch.setattr(watch._view, "observe", slowly)
    turns = []
    for seconds in (0.0, 1.0):
        watch.observe(replace(entry(500, 5.0), committed=5.0 + seconds))
        before = clock[0]
        list(watch.take_frames(10.0, is_idle=False))
        turns.append(round((clock[0] - before) / 1e-4))
    assert turns == [16, pytest.approx(100, abs=2)]  # a hundredth of a second of it


def test_a_watch_of_an_idle_engine_begins_at_once() -> None:
    watch = EngineWatch([], CONFIG)
    assert watch.wait_seconds(1.0) == 0.0
    (frame,) = watch.take_frames(1.0, is_idle=True)
    assert frame.is_key
    assert watch.wait_seconds(1.0) is None


class EngineStub:
    """Stands for the client of the engine."""

    def __init__(self) -> None:
        self.calls: list[bool] = []
        self.tell: Any = None

    def watch(self, listener: Any) -> None:
        self.calls.append(listener is not None)
        self.tell = listener


def hub_of(engine: EngineStub, is_closing: list[bool]) -> WatchHub:
    records = RecordBook()
    records.add(RequestRecord("cmpl-1", "req-1", "/v1/completions", 5.0, prompt_tokens=3))
    records.add(RequestRecord("cmpl-2", "req-2", "/v1/completions", 6.0, state="running"))
    return WatchHub(engine, records, lambda: is_closing[0])  # type: ignore[arg-type]


def test_each_engine_has_a_hub_of_its_own() -> None:
    engines = [EngineStub(), EngineStub()]
    hubs = WatchHubs(SimpleNamespace(engines=engines), RecordBook(), lambda: False)  # type: ignore[arg-type]
    assert hubs.of(0) is hubs.of(0) is not hubs.of(1)
    with pytest.raises(ApiError):
        hubs.of(2)
    engines.pop()
    with pytest.raises(ApiError):
        hubs.of(1)


async def received(stream: Any, count: int) -> list[dict[str, Any]]:
    """So many frames of a stream of events."""
    found: list[dict[str, Any]] = []
    while len(found) < count:
        events = (await anext(stream)).decode().split("\n\n")
        found += [
            json.loads(event.partition("data: ")[2])
            for event in events
            if event.startswith("event: frame")
        ]
    return found


def test_the_hub_asks_the_engine_only_while_somebody_watches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watch_hub, "_GRACE_SECONDS", 0.01)
    monkeypatch.setattr(watch_hub, "_MOST_WATCHERS", 2)

    async def run() -> None:
        engine, is_closing = EngineStub(), [False]
        hub = hub_of(engine, is_closing)
        first = hub.follow()
        await anext(first)
        assert engine.calls == [True]
        for second in range(0, 1300, 10):
            engine.tell(Watched(b'{"time": %d}' % second, second % KEY_SECONDS == 0, float(second)))
        # Ten minutes are kept, from a frame on that tells everything; who is behind goes on there.
        frames = await received(first, 1)
        assert frames[0]["queue"] == [["cmpl-1", 5.0, 3]]
        times = [one["frame"]["time"] for one in frames]
        assert times[0] % KEY_SECONDS == 0
        assert 1290 - KEY_SECONDS - 600 <= times[0] <= 1290 - 600
        later = hub.follow()
        assert await received(later, len(frames)) == frames
        with pytest.raises(ApiError):
            hub.check_room()
        engine.tell(Watched(b'{"time": 1300}', False, 1300.0))
        assert [one["frame"]["time"] for one in await received(later, 1)] == [1300]
        # Of a moment that is over nobody knows who waited: those who wait now did not.
        engine.tell(Watched(b'{"time": 1301}', False, 1301.0, is_past=True))
        (past,) = await received(later, 1)
        assert (past["queue"], past["past"], frames[0]["past"]) == ([], True, False)
        await later.aclose()  # type: ignore[attr-defined]
        assert engine.calls == [True]
        await first.aclose()  # type: ignore[attr-defined]
        await asyncio.sleep(0.05)
        assert engine.calls == [True, False]
        # A frame that was under way is nobody's, and the next watcher begins anew.
        third = hub.follow()
        await anext(third)
        engine.tell(Watched(b'{"time": 1310}', False, 1310.0))
        engine.tell(Watched(b'{"time": 1320}', True, 1320.0))
        assert [one["frame"]["time"] for one in await received(third, 1)] == [1320]
        is_closing[0] = True
        with pytest.raises(StopAsyncIteration):
            await anext(third)

    asyncio.run(run())
