"""The step log: a bounded ring, a file that reads back equal, and metrics derived from either."""

from __future__ import annotations

import json
import resource
import tracemalloc
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.engine.core import EngineCore
from quire.engine.request import make_requests
from quire.engine.scheduler import Scheduler
from quire.errors import InvalidRequestError
from quire.observe.engine_metrics import EngineMetrics, derive_metrics
from quire.observe.step_lines import LineReader, LineWriter
from quire.observe.step_log import StepLog, iter_step_log, last_run, read_step_log
from quire.sampling_params import ResolvedTokens, SamplingParams, StructuredOutput
from quire.step import (
    AdmittedRequest,
    Finished,
    PromptLogprobs,
    ScheduledRequest,
    Step,
    StepLogEntry,
    StepResult,
    TokenLogprob,
)
from quire.tools.explain.explain import explain_request
from quire.tools.simulate.fake_runner import FakeRunner
from tests.engine.harness import config
from tests.long_runs import short_or_long

SETTINGS = asdict(config())


def run_with(log: StepLog) -> list[int]:
    """A run with everything in it: several answers, preemption, swapping, a failed step; returns
    the step ids.
    """
    limits = config(num_blocks=9, num_host_blocks=6)
    core = EngineCore(
        Scheduler(limits), FakeRunner(limits, 50, step_faults={15: "result"}), 2, log.append
    )
    params = SamplingParams(
        max_tokens=14,
        stop_token_ids=(1, 2),
        deadline=99.5,
        cache_salt="é",
        prompt_logprobs=0,
        logit_bias={3: 1.5, 4: -2.0},
        structured=StructuredOutput(choice=("a", "b")),
    )
    resolved = ResolvedTokens(((1, 2), (3,)), (4, 5))
    for name, n in (("a", 2), ("b", 1), ("c", 1)):
        for request in make_requests(
            name, range(10), replace(params, n=n), 2**64 - 1, [49], resolved
        ):
            core.add_request(request, 0.25)
    now = 0.25
    while core.has_work:
        now += 0.1
        core.step(now)
    log.close()
    return list(range(core.scheduler._num_steps))


def test_file_reads_back_equal_to_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    log = StepLog(path=path)
    step_ids = run_with(log)
    entries = read_step_log(path)
    assert entries == list(log)
    assert [entry.step.step_id for entry in entries] == step_ids
    assert all(json.loads(line)["version"] == 6 for line in path.read_text().splitlines())
    assert any(entry.error for entry in entries)
    assert any(entry.step.copies for entry in entries)
    assert any(entry.step.preempted for entry in entries)


def test_ends_and_parameters_survive_a_line() -> None:
    params = SamplingParams(
        logprobs=2,
        stop=("END", "é"),
        logits_processors=(lambda token_ids, logits: logits,),
        structured=StructuredOutput(json_schema={"type": "object"}),
    )
    admission = AdmittedRequest(
        "a", 0, (1, 2), 2, (), 0, 0, params, 3, (), 0.0, ResolvedTokens(((7, 8),)), 1
    )
    result = StepResult(0, {"a": (5,)}, ended=frozenset("ab"))
    got = LineReader().decode(
        LineWriter().encode(StepLogEntry(Step(0, 0.0, admitted=(admission,)), result, None, 1.0))
    )
    assert got.result == result
    assert got.step.admitted == (replace(admission, params=replace(params, logits_processors=())),)


def test_scores_are_not_kept() -> None:
    score = TokenLogprob(5, -0.1, 1)
    result = StepResult(
        0,
        {"a": (5,)},
        {},
        {"a": (score,)},
        {"a": PromptLogprobs(1, (score, score))},
        frozenset("a"),
    )
    log = StepLog()
    log.append(StepLogEntry(Step(0, 0.0), result, None, 1.0))
    assert list(log) == [
        StepLogEntry(Step(0, 0.0), StepResult(0, {"a": (5,)}, ended=frozenset("a")), None, 1.0)
    ]


def test_metrics_of_a_file_equal_those_gathered_live(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    live = EngineMetrics()
    run_with(StepLog(path=path, listeners=(live.observe,)))
    derived = derive_metrics(read_step_log(path))
    assert derived.counters == live.counters
    assert list(derived.finished) == list(live.finished)
    counters = live.counters
    assert sum(counters.finished.values()) == len(live.finished) == 4
    assert counters.output_tokens == sum(request.num_output_tokens for request in live.finished)
    assert counters.preemptions.total() == sum(request.preemptions for request in live.finished) > 0
    assert counters.recomputed_tokens == sum(request.recomputed_tokens for request in live.finished)
    assert counters.failed_steps > 0


def test_ring_keeps_only_the_last_entries() -> None:
    log = StepLog(capacity=3)
    step_ids = run_with(log)
    assert [entry.step.step_id for entry in log] == step_ids[-3:]


def test_a_file_that_cannot_be_written_stops_the_file_and_not_the_engine(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class FullDisk:
        def write(self, text: str) -> int:
            raise OSError("no space left on device")

        def flush(self) -> None: ...

        def close(self) -> None:
            raise OSError("still no space")

    log = StepLog(path=tmp_path / "steps.jsonl")
    assert log._file is not None
    log._file.close()
    log._file = FullDisk()  # type: ignore[assignment]
    step_ids = run_with(log)
    assert len(log) == len(step_ids)
    assert log.file_error == "step log stopped at step 0: no space left on device"
    assert caplog.text.count(log.file_error) == 1


def test_a_limit_on_the_size_of_files_is_like_a_full_disk(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, limits[1]))
    try:
        log = StepLog(path=tmp_path / "steps.jsonl")
        assert len(run_with(log)) == len(log)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "File too large" in (log.file_error or "")
    assert "make room" in caplog.text


@pytest.mark.parametrize("path", ["no/such/folder/steps.jsonl", ".", "steps.jsonl/below"])
def test_a_file_that_cannot_be_opened_says_so(tmp_path: Path, path: str) -> None:
    (tmp_path / "steps.jsonl").touch()
    with pytest.raises(
        InvalidRequestError, match=r"step_log: .* can't be written: .*; name another file"
    ):
        StepLog(path=tmp_path / path)
    with pytest.raises(InvalidRequestError, match="can't be read"):
        read_step_log(tmp_path / "nothing.jsonl")


EMPTY_STEP = json.dumps(
    {
        "step_id": 1,
        "now": 0,
        "num_free_blocks": 1,
        "num_waiting": 0,
        "num_running": 0,
        "num_decodes": 0,
    }
    | {
        "scheduled": {"rows": [], "starts": []},
        "admitted": [],
        "preempted": [],
        "finished": [],
        "copies": [],
    }
)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"version": 2}', "not a step log of version 5 or 6 .found 2."),
        ("[]", "found None"),
        ('{"version": 3}', "step"),
        ("{", "Expecting"),
        ("\udcff", "utf-8"),
        ("[" * 100_000, "nested too deep"),
        ('{"version": 6, "step": 5, "result": null}', "expected an object, got int"),
        ('{"version": 6, "step": {"admitted": [5]}, "result": null}', "int"),
        (
            '{"version": 6, "step": ' + EMPTY_STEP.replace("[]", "[5]", 1) + ', "result": null}',
            "row 5 has no name",
        ),
        ('{"version": 6, "step": ' + EMPTY_STEP + ', "result": {"tokens": [1]}}', "tokens of 1"),
    ],
)
def test_a_broken_file_is_refused_with_its_line(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "steps.jsonl"
    good = LineWriter().encode(StepLogEntry(Step(0, 0.0), StepResult(0, {}), None, 0.0))
    path.write_text(f"{good}\n{line}\n", errors="surrogateescape")
    with pytest.raises(InvalidRequestError, match=rf"line 2: .*{message}"):
        read_step_log(path)


@settings(deadline=None, max_examples=short_or_long(50, 50, quick=15))
@given(
    name=st.text(),
    error=st.none() | st.text(),
    times=st.tuples(*[st.floats(allow_nan=False, allow_infinity=False)] * 3),
    tokens=st.dictionaries(st.text(), st.tuples(st.integers(0, 2**31 - 1))),
)
def test_any_text_and_any_time_survive_a_line(
    name: str, error: str | None, times: tuple[float, float, float], tokens: dict[str, tuple[int]]
) -> None:
    finished = Finished(name, None, "stop", times[0], times[1], 3, 4)
    result = None if error is not None else StepResult(7, tokens, {name: "why"})
    entry = StepLogEntry(Step(7, times[2], finished=(finished,)), result, error, times[0])
    line = LineWriter().encode(entry)
    assert "\n" not in line
    assert LineReader().decode(line) == entry


def test_metrics_count_times_between_tokens() -> None:
    metrics = EngineMetrics()
    log = StepLog(listeners=(metrics.observe,))
    limits = config()
    core = EngineCore(Scheduler(limits), FakeRunner(limits, 50), 1, log.append)
    (request,) = make_requests("a", range(5), SamplingParams(max_tokens=3), 0)
    core.add_request(request, 1.0)
    for now in (4.0, 6.0, 9.0, 10.0):
        core.step(now)
    (told,) = metrics.finished
    assert (told.queue_time, told.time_to_first_token, told.time_per_output_token) == (
        3.0,
        3.0,
        2.5,
    )
    assert told == request.metrics()


def test_the_documented_example_is_a_line_of_this_version() -> None:
    page = (Path(__file__).parents[2] / "docs" / "step_log.md").read_text(encoding="utf-8")
    example = page.split("```json\n")[1].split("```")[0]
    entry = LineReader().decode(example)
    assert entry.step.admitted[0].token_ids == (5, 6, 7)
    assert entry.result == StepResult(0, {"a": (42,)})
    assert json.loads(LineWriter().encode(entry)) == json.loads(example)


def test_the_ring_forgets_earlier_when_prompts_are_long() -> None:
    admission = AdmittedRequest(
        "a", 0, tuple(range(100)), 100, (), 0, 0, SamplingParams(), 0, (), 0.0
    )
    log = StepLog(max_tokens=250)
    for step_id in range(5):
        log.append(StepLogEntry(Step(step_id, 0.0, admitted=(admission,)), None, None, 0.0))
        log.append(StepLogEntry(Step(step_id, 0.5), None, None, 0.5))
    assert [entry.step.step_id for entry in log] == [2, 3, 3, 4, 4]


def test_what_the_ring_holds_is_small_and_nothing_for_the_collector() -> None:
    """A server's log fills over minutes: as objects, it looked like a leak of a hundred megabytes."""
    names = [f"chatcmpl-{number:024x}" for number in range(64)]
    log = StepLog()

    def append(step_id: int) -> None:
        prompt = tuple(range(10_000, 10_500))
        admission = AdmittedRequest(names[0], 0, prompt, 500, (), 0, 0, params, 0, (), 0.0)
        scheduled = tuple(
            ScheduledRequest(name, row, 1000 + step_id, 1, True, (1000 + row,))
            for row, name in enumerate(names)
        )
        result = StepResult(step_id, dict.fromkeys(names, (1000 + step_id,)))
        log.append(
            StepLogEntry(
                Step(step_id, 0.5 + step_id, scheduled, (admission,)), result, None, 1.5 + step_id
            )
        )

    params = SamplingParams()
    append(0)
    tracemalloc.start()
    try:
        for step_id in range(1, 101):
            append(step_id)
        num_bytes = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert num_bytes / 100 < 64 * 110 + 500 * 5  # a row was 270 bytes, a token of a prompt 40
    assert len(log) == 101


def test_what_is_about_one_request_explains_it_as_the_whole_log_does() -> None:
    log = StepLog()
    run_with(log)
    whole = list(log)
    for name in ("a", "b", "c"):
        entries, before = log.about(name)
        assert [*before, *entries] == whole[: len(before) + len(entries)]
        assert explain_request(entries, name, config(), before) == explain_request(
            whole, name, config()
        )
    entries, before = log.about("nobody")
    assert (entries, len(before)) == ([], len(whole))


# Files of other versions, of other ends, and large ones


def test_a_file_of_version_5_is_read(tmp_path: Path) -> None:
    """It has an object for each request of each step."""
    path = Path(__file__).parent / "steps_v5.jsonl"
    entries = read_step_log(path)
    assert [entry.step.step_id for entry in entries] == list(range(len(entries)))
    log = StepLog(path=tmp_path / "again.jsonl")
    for entry in entries:
        log.append(entry)
    log.close()
    assert read_step_log(tmp_path / "again.jsonl") == entries
    assert (tmp_path / "again.jsonl").stat().st_size < 0.75 * path.stat().st_size
    assert derive_metrics(entries).counters.output_tokens == 32


def test_a_log_that_is_cut_off_anywhere_reads_up_to_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, cut = tmp_path / "steps.jsonl", tmp_path / "cut.jsonl"
    log = StepLog(path=path)
    run_with(log)
    whole, data = list(log), path.read_bytes()
    ends = [place + 1 for place, byte in enumerate(data) if byte == 10]
    for place in [*range(0, len(data), 97), *ends, *(end - 1 for end in ends)]:
        cut.write_bytes(data[:place])
        num_whole = sum(end <= place for end in ends) + (place + 1 in ends)
        assert list(iter_step_log(cut)) == whole[:num_whole]
    assert "in the middle of a line" in caplog.text


def test_a_run_after_one_that_was_cut_off_is_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "steps.jsonl"
    run_with(StepLog(path=path))
    path.write_bytes(path.read_bytes()[:-40])
    log = StepLog(path=path, engine={"depth": 2, **SETTINGS})
    run_with(log)
    entries, engine = last_run(path)
    assert list(entries) == list(log)
    assert engine is not None
    assert engine.depth == 2
    assert "another run begins behind it" in caplog.text


def test_rows_are_named_again_now_and_then(tmp_path: Path) -> None:
    """So that the end of a file can be read."""
    path = tmp_path / "steps.jsonl"
    log = StepLog(path=path)
    for step_id in range(1500):
        scheduled = (ScheduledRequest("a", 0, step_id, 1, True, ()),)
        log.append(
            StepLogEntry(
                Step(step_id, 0.0, scheduled), StepResult(step_id, {"a": (step_id,)}), None, 0.0
            )
        )
    log.close()
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[1024:]))
    assert read_step_log(path) == list(log)[1024:]
    path.write_bytes(b"".join(lines[1000:]))
    with pytest.raises(InvalidRequestError, match="lines before this one are missing"):
        read_step_log(path)


def test_a_long_log_is_small_and_read_in_little_memory(tmp_path: Path) -> None:
    """200 steps of 128 requests: a row of a step took 230 bytes of the file and a kilobyte of
    memory.
    """
    path = tmp_path / "steps.jsonl"
    names = [f"chatcmpl-{number:032x}" for number in range(128)]
    log = StepLog(path=path, engine={"depth": 2, **SETTINGS})
    for step_id in range(200):
        scheduled = tuple(
            ScheduledRequest(name, row, step_id, 1, True, ()) for row, name in enumerate(names)
        )
        tokens = dict.fromkeys(names, (10_000 + step_id,))
        log.append(
            StepLogEntry(Step(step_id, 0.1, scheduled), StepResult(step_id, tokens), None, 0.2)
        )
    log.close()
    assert path.stat().st_size / (200 * 128) < 20
    tracemalloc.start()
    try:
        assert sum(1 for _ in iter_step_log(path)) == 200
        _, streamed = tracemalloc.get_traced_memory()
        entries, _ = last_run(path)
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(entries) == 200
    assert streamed < 2 * 2**20
    assert kept / (200 * 128) < 120
