"""Climbs the ladder: all rungs on one workload, then the experiments around them, into one report."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from quire.config import format_bytes
from quire.frontend.progress import BenchmarkBar
from quire.process.granted import peak_resident
from quire.tools.bench.jobs import TokenSource, random_jobs
from quire.tools.bench.ladder import experiments
from quire.tools.bench.ladder.attention import compare_attention
from quire.tools.bench.ladder.engines import LadderEngines
from quire.tools.bench.ladder.rungs import Rung, find_rungs
from quire.tools.bench.ladder.settings import FULL, ClimbSettings
from quire.tools.bench.ladder.sources import sources_digest
from quire.tools.bench.ladder.weights import compare_rounding, compare_weights
from quire.tools.bench.machine import report_facts
from quire.tools.bench.measure import Clock, warm_up
from quire.tools.bench.report import EMPTY, Bytes, Factor, Report, Row, Table
from quire.tools.bench.spread import Spread

_NUM_EXPERIMENTS = 9


OTHER_WEIGHTS = (
    "Quantised weights are other numbers: rung 7 must give the tokens of rung 1's loop with the same weights; how far "
    "they are from the full ones is measured below. The rungs above it have the full ones again, and are compared with "
    "rung 6 or what came after it."
)
OTHER_KERNELS = (
    "Kernels that fuse what others do one after the other round in other places, which shows in fewer bits than "
    "float32's: from rung 6 on a rung must give the tokens of rung 1's loop with its own kernels."
)


@dataclass(frozen=True, slots=True)
class Climb:
    """What a climb found."""

    report: Report
    bars: tuple[tuple[str, Spread], ...]
    """Throughput by rung, for the plot."""
    differing: tuple[str, ...]
    """Rungs whose tokens are not those they must give."""


def climb(
    engines: LadderEngines, settings: ClimbSettings = FULL, clock: Clock = time.perf_counter
) -> Climb:
    """Measures everything; see docs/ladder for what it shows."""
    facts = report_facts(engines.device) | {
        "model": f"{engines.model}, {engines.dtype_name}",
        "rungs": sources_digest(),
    }
    began = time.perf_counter()
    source = TokenSource(0, engines.spec.vocab_size)
    jobs = random_jobs(
        settings.num_jobs, settings.question, settings.answer, source, settings.shared_tokens
    )
    rungs = find_rungs(engines, jobs, settings.max_num_seqs, clock)
    runs = [(rung, rung.run) for rung in rungs if rung.run is not None]
    with BenchmarkBar(settings.repeats * len(runs) + _NUM_EXPERIMENTS) as bar:
        for _, run in runs:
            warm_up(partial(run, "warm-up"), engines.device)
        for repeat in range(settings.repeats):  # interleaved, so that a busy moment hits all alike
            for rung, run in runs:
                bar.begin(f"rung {rung.number}, {rung.name}")
                rung.runs.append(run(f"rung {rung.number}, pass {repeat}"))
                bar.advance()
        differing = tuple(str(rung) for rung, _ in runs if not _says_what_it_must(rung, rungs[0]))
        peak = peak_resident()
        engines.close()
        tables = _experiments(engines, settings, clock, bar)
    engines.close()
    facts["took"] = f"{time.perf_counter() - began:.0f} s"
    if peak is not None:
        facts["process memory"] = (
            f"{format_bytes(peak)} at most, with the engines of all rungs in it at once"
        )
    facts["same tokens on all rungs"] = "yes" if not differing else f"no: {', '.join(differing)}"
    tables = [_ladder_table(rungs, settings), *_missing_table(rungs), *tables]
    bars = [
        (str(rung), rung.seconds.per(rung.num_tokens, "output tokens per second"))
        for rung, _ in runs
    ]
    return Climb(Report("What each rung buys", facts, tuple(tables)), tuple(bars), differing)


def _says_what_it_must(rung: Rung, first: Rung) -> bool:
    expected = first.runs[0].tokens if rung.expected is None else rung.expected()
    return all(run.tokens == expected for run in rung.runs)


def _experiments(
    engines: LadderEngines, settings: ClimbSettings, clock: Clock, bar: BenchmarkBar
) -> list[Table]:
    llm = engines.get(prefix_caching=True, max_num_seqs=settings.batch_seqs)
    small = engines.get(prefix_caching=True, max_num_seqs=settings.max_num_seqs)
    parts: dict[str, Callable[[], Table]] = {
        "naive loop and KV cache": lambda: experiments.naive_against_cache(llm, settings, clock),
        "prompt lengths": lambda: experiments.cache_by_prompt_length(llm, settings, clock),
        "memory": lambda: experiments.memory_of_allocations(llm.engine.decoder, settings),
        "batching": lambda: experiments.batching(llm, settings, clock),
        "early leavers": lambda: experiments.leaving_early(small, settings),
        "shared system prompt": lambda: experiments.shared_system_prompt(llm, settings),
        "attention kernels": lambda: compare_attention(llm, settings, clock),
        "weights in other formats": lambda: compare_weights(engines, settings),
        "rounding": compare_rounding,
    }
    assert len(parts) == _NUM_EXPERIMENTS
    tables: list[Table] = []
    for name, measure in parts.items():
        bar.begin(name)
        tables.append(measure())
        bar.advance()
    return tables


def _missing_table(rungs: Sequence[Rung]) -> list[Table]:
    """Why some rungs did not run, if any didn't."""
    rows = tuple((rung.number, rung.name, rung.missing) for rung in rungs if rung.run is None)
    note = "Each rung that did run builds on those below it that ran."
    return (
        [Table("Rungs that did not run here", note, ("rung", "adds", "why not"), rows)]
        if rows
        else []
    )


def _ladder_table(rungs: Sequence[Rung], settings: ClimbSettings) -> Table:
    rows: list[Row] = []
    first = before = rungs[0].seconds
    for rung in rungs:
        if not rung.runs:
            rows.append((rung.number, rung.name, "not run", *[EMPTY] * 9))
            continue
        seconds = rung.seconds
        held = max(run.cache_bytes for run in rung.runs)
        factors = Factor.of(before, seconds), Factor.of(first, seconds)
        rate = seconds.per(rung.num_tokens)
        measured = seconds, rung.latency, rate, Bytes(held), *factors, Bytes(rung.weight_bytes)
        together = seconds.each(rung.num_tokens), Bytes(held + rung.weight_bytes)
        rows.append((rung.number, rung.name, rung.kernels, *measured, *together))
        # those after the one with other weights have the model's own again
        if not rung.has_other_weights:
            before = seconds
    note = (
        f"{settings.num_jobs} requests at once: {settings.shared_tokens} prompt tokens in common and "
        f"{settings.question} of their own, answers of {settings.answer} tokens, {rungs[0].num_tokens} in all, greedy; "
        f"from rung 4 on {settings.max_num_seqs} run at once. Each rung adds one technique to the one before. Medians "
        f"of {settings.repeats} interleaved passes, the lowest and highest in brackets. Latency is the mean over the "
        "requests of the time until the whole answer is there; per token is the time divided by all new tokens; KV "
        "memory is the most that was held between two tokens."
    )
    if any(rung.has_other_weights for rung in rungs):
        note += f" {OTHER_WEIGHTS}"
    if any(rung.expected is not None and not rung.has_other_weights for rung in rungs):
        note += f" {OTHER_KERNELS}"
    columns = (
        "rung",
        "adds",
        "kernels",
        "time",
        "latency",
        "throughput",
        "KV memory",
        "over the one before",
        "over rung 1",
        "weights",
        "per token",
        "model and cache",
    )
    return Table("The ladder", note, columns, tuple(rows))
