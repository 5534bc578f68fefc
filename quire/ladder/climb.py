"""Climbs the ladder: all rungs on one workload, then the experiments around them, into one report."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from quire.benchmark.jobs import random_jobs
from quire.benchmark.machine import report_facts
from quire.benchmark.measure import Clock, Spread, warm_up
from quire.benchmark.report import EMPTY, Bytes, Cell, Report, Table, factor
from quire.frontend.progress import BenchmarkBar
from quire.ladder import experiments
from quire.ladder.attention import compare_attention
from quire.ladder.engines import Engines
from quire.ladder.rungs import Rung, RungRun, find_rungs
from quire.ladder.settings import FULL, ClimbSettings

LADDER_TITLE = "The ladder"
_NUM_EXPERIMENTS = 7


@dataclass(frozen=True, slots=True)
class Climb:
    """What a climb found."""

    report: Report
    bars: tuple[tuple[str, Spread], ...]
    """Throughput by rung, for the plot."""
    differing: tuple[str, ...]
    """Rungs whose tokens are not those of the first rung."""


@dataclass(slots=True)
class _Passes:
    """All passes of one rung."""

    rung: Rung
    runs: list[RungRun] = field(default_factory=list)

    @property
    def seconds(self) -> Spread:
        return Spread(tuple(run.seconds for run in self.runs), "s")

    @property
    def latency(self) -> Spread:
        return Spread(tuple(statistics.mean(run.latencies) for run in self.runs), "s")

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.runs[0].tokens))


def climb(engines: Engines, settings: ClimbSettings = FULL, clock: Clock = time.perf_counter) -> Climb:
    """Measures everything; see docs/ladder for what it shows."""
    facts = report_facts(engines.device)
    facts["model"] = f"{engines.model}, {str(engines.dtype).removeprefix('torch.')}"
    began = time.perf_counter()
    jobs = random_jobs(
        settings.num_jobs, settings.question, settings.answer, engines.spec.vocab_size, settings.shared_tokens
    )
    rungs = find_rungs(engines, jobs, settings.max_num_seqs, clock)
    passes = [_Passes(rung) for rung in rungs]
    with BenchmarkBar(settings.repeats * sum(rung.run is not None for rung in rungs) + _NUM_EXPERIMENTS) as bar:
        for rung in rungs:
            if rung.run is not None:
                warm_up(partial(rung.run, "warm-up"), engines.device)
        for repeat in range(settings.repeats):  # interleaved, so that a busy moment hits all alike
            for each in passes:
                if each.rung.run is None:
                    continue
                bar.begin(f"rung {each.rung.number}, {each.rung.name}")
                each.runs.append(each.rung.run(f"rung {each.rung.number}, pass {repeat}"))
                bar.advance()
        engines.close()
        tables = _experiments(engines, settings, clock, bar)
    engines.close()
    differing = _differing(passes)
    climbed = [each for each in passes if each.runs]
    facts["took"] = f"{time.perf_counter() - began:.0f} s"
    facts["same tokens on all rungs"] = "yes" if not differing else f"no: {', '.join(differing)}"
    ladder = _ladder_table(passes, settings)
    report = Report("What each rung buys", facts, (ladder, *_missing_table(rungs), *tables))
    bars = tuple(
        (f"{each.rung.number} {each.rung.name}", each.seconds.per(each.num_tokens, "output tokens per second"))
        for each in climbed
    )
    return Climb(report, bars, differing)


def _experiments(engines: Engines, settings: ClimbSettings, clock: Clock, bar: BenchmarkBar) -> list[Table]:
    llm = engines.get(prefix_caching=True, max_num_seqs=settings.batch_seqs)
    small = engines.get(prefix_caching=True, max_num_seqs=settings.max_num_seqs)
    parts: tuple[tuple[str, Callable[[], Table]], ...] = (
        ("naive loop and KV cache", lambda: experiments.naive_against_cache(llm, settings, clock)),
        ("prompt lengths", lambda: experiments.cache_by_prompt_length(llm, settings, clock)),
        ("memory", lambda: experiments.memory_of_allocations(engines.spec, engines, settings)),
        ("batching", lambda: experiments.batching(llm, settings, clock)),
        ("early leavers", lambda: experiments.leaving_early(small, settings)),
        ("shared system prompt", lambda: experiments.shared_system_prompt(llm, settings)),
        ("attention kernels", lambda: compare_attention(llm, settings, clock)),
    )
    assert len(parts) == _NUM_EXPERIMENTS
    tables: list[Table] = []
    for name, measure in parts:
        bar.begin(name)
        tables.append(measure())
        bar.advance()
    return tables


def _differing(passes: Sequence[_Passes]) -> tuple[str, ...]:
    expected = passes[0].runs[0].tokens
    return tuple(
        f"{each.rung.number} {each.rung.name}" for each in passes if any(run.tokens != expected for run in each.runs)
    )


def _missing_table(rungs: Sequence[Rung]) -> list[Table]:
    """Why some rungs did not run, if any didn't."""
    rows = tuple((rung.number, rung.name, rung.missing) for rung in rungs if rung.run is None)
    note = "Each rung that did run builds on those below it that ran."
    return [Table("Rungs that did not run here", note, ("rung", "adds", "why not"), rows)] if rows else []


def _ladder_table(passes: Sequence[_Passes], settings: ClimbSettings) -> Table:
    rows: list[tuple[Cell, ...]] = []
    first = before = passes[0].seconds
    for each in passes:
        name: tuple[Cell, ...] = (each.rung.number, each.rung.name)
        if not each.runs:
            rows.append((*name, "not run", *[EMPTY] * 6))
            continue
        seconds = each.seconds
        cache = max(run.cache_bytes for run in each.runs)
        rate = seconds.per(each.num_tokens, "tok/s")
        over_before, over_first = factor(before, seconds), factor(first, seconds)
        rows.append(
            (*name, each.rung.kernels, seconds, each.latency, rate, Bytes(cache), over_before, over_first)
        )  # fmt: skip
        before = seconds
    tokens = passes[0].num_tokens
    note = (
        f"{settings.num_jobs} requests at once: {settings.shared_tokens} prompt tokens in common and "
        f"{settings.question} of their own, answers of {settings.answer} tokens, {tokens} in all, greedy; from rung 4 "
        f"on {settings.max_num_seqs} run at once. Each rung adds one technique to the one before. Medians of "
        f"{settings.repeats} interleaved passes, the lowest and highest in brackets. Latency is the mean over the "
        "requests of the time until the whole answer is there; KV memory is the most that was held between two tokens."
    )
    columns = (
        "rung", "adds", "kernels", "time", "latency", "throughput", "KV memory", "over the one before", "over rung 1",
    )  # fmt: skip
    return Table(LADDER_TITLE, note, columns, tuple(rows))
