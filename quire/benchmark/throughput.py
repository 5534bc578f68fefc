"""Throughput and latency of the engine on one set of jobs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

from quire.benchmark.engine_runs import run_one_by_one, run_together, time_to_first_token
from quire.benchmark.jobs import Job
from quire.benchmark.measure import Clock, Spread, timed
from quire.benchmark.report import Table
from quire.frontend.progress import BenchmarkBar
from quire.llm import LLM
from quire.outputs import RequestOutput


def measure_throughput(llm: LLM, jobs: Sequence[Job], repeats: int, clock: Clock = time.perf_counter) -> Table:
    """All jobs at once, `repeats` times after one small run to warm up."""
    device = llm.engine.decoder.embedding.device
    times: list[float] = []
    runs: list[list[RequestOutput]] = []
    with BenchmarkBar(repeats + 1) as bar:
        bar.begin("warming up")
        run_together(llm, jobs[:2], salt="warm-up")
        bar.advance()
        for repeat in range(repeats):
            bar.begin(f"{len(jobs)} requests, pass {repeat + 1}")
            seconds, outputs = timed(partial(run_together, llm, jobs, f"pass {repeat}"), device, clock)
            times.append(seconds)
            runs.append(outputs)
            bar.advance()
    seconds_spread = Spread(tuple(times), "s")
    prompt_tokens = sum(len(job.prompt) for job in jobs)
    new_tokens = sum(job.new_tokens for job in jobs)
    latency = _over_runs(runs, _latency)
    first = _over_runs(runs, time_to_first_token)
    rows = (
        ("time", seconds_spread),
        ("output tokens", seconds_spread.per(new_tokens, "tok/s")),
        ("prompt and output tokens", seconds_spread.per(prompt_tokens + new_tokens, "tok/s")),
        ("requests", seconds_spread.per(len(jobs), "per s")),
        ("time to first token, median", _each(first, statistics.median)),
        ("time to first token, longest", _each(first, max)),
        ("time to the whole answer, median", _each(latency, statistics.median)),
        ("time to the whole answer, longest", _each(latency, max)),
    )
    note = (
        f"{len(jobs)} requests at once, {prompt_tokens} prompt tokens and {new_tokens} new ones in all, greedy, end "
        f"tokens ignored. Medians of {repeats} passes from an empty cache, the lowest and highest in brackets."
    )
    return Table("Throughput", note, ("what", "measured"), rows)


def measure_latency(llm: LLM, jobs: Sequence[Job], repeats: int) -> Table:
    """One request at a time: how long a user alone waits."""
    outputs: list[RequestOutput] = []
    with BenchmarkBar(repeats + 1) as bar:
        bar.begin("warming up")
        run_one_by_one(llm, jobs[:1], salt="warm-up")
        bar.advance()
        for repeat in range(repeats):
            bar.begin(f"pass {repeat + 1}")
            outputs += run_one_by_one(llm, jobs, salt=f"pass {repeat}")
            bar.advance()
    first = Spread(tuple(map(time_to_first_token, outputs)), "s")
    whole = Spread(tuple(map(_latency, outputs)), "s")
    rows = [("time to first token", first), ("time to the whole answer", whole)]
    between = [output.metrics.time_per_output_token for output in outputs]
    known = tuple(1000 * seconds for seconds in between if seconds is not None)
    if known:
        rows.append(("time per further token", Spread(known, "ms")))
    note = (
        f"{len(jobs)} requests one after the other, {repeats} passes from an empty cache, greedy, end tokens ignored; "
        "medians, the lowest and highest in brackets."
    )
    return Table("Latency", note, ("what", "measured"), tuple(rows))


def _latency(output: RequestOutput) -> float:
    return output.metrics.finished - output.metrics.arrival


def _over_runs(runs: Sequence[Sequence[RequestOutput]], of: Callable[[RequestOutput], float]) -> list[list[float]]:
    return [[of(output) for output in outputs] for outputs in runs]


def _each(runs: Sequence[Sequence[float]], summary: Callable[[Sequence[float]], float]) -> Spread:
    return Spread(tuple(summary(values) for values in runs), "s")
