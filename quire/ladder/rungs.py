"""The rungs: what each adds, how it runs the workload, or why it can't here."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quire.benchmark.engine_runs import run_together
from quire.benchmark.jobs import Job
from quire.benchmark.measure import Clock
from quire.ladder.contiguous import ContiguousCache
from quire.ladder.engines import HAS_CUDA_GRAPHS, Engines
from quire.ladder.kv_cache import generate_with_kv_cache
from quire.ladder.naive import generate_naive
from quire.llm import LLM


@dataclass(frozen=True, slots=True)
class RungRun:
    """One pass of a rung over the workload."""

    tokens: tuple[tuple[int, ...], ...]
    """Every request's answer."""
    seconds: float
    latencies: tuple[float, ...]
    """From the start, when all requests were there, until each one's answer was complete."""
    cache_bytes: int
    """The most memory that held keys and values between two tokens."""


@dataclass(frozen=True, slots=True)
class Rung:
    """One technique more than the rung before."""

    number: int
    name: str
    run: Callable[[str], RungRun] | None
    """Takes a name no other pass has, so that nothing cached by another pass is found."""
    kernels: str = ""
    missing: str = ""
    """Why it can't run, if it can't."""


def find_rungs(
    engines: Engines, jobs: Sequence[Job], max_num_seqs: int, clock: Clock = time.perf_counter
) -> list[Rung]:
    """All rungs, in order, ready to run `jobs`, at most `max_num_seqs` at once where the rung can do several."""

    def engine(
        number: int, name: str, together: bool = True, kernels: str = "auto", prefix_caching: bool = True,
        graphs: bool = False, depth: int = 1,
    ) -> Rung:  # fmt: skip
        llm = engines.get(kernels=kernels, prefix_caching=prefix_caching, max_num_seqs=max_num_seqs, cuda_graphs=graphs)

        def run(salt: str) -> RungRun:
            llm.engine.core.depth = depth  # nothing is in flight between two passes
            return _run_engine(llm, jobs, together, salt, clock)

        return Rung(number, name, run, llm.engine.decoder.kernels.name)

    def loop(number: int, name: str, run: Callable[[LLM, Sequence[Job], Clock], RungRun]) -> Rung:
        llm = engines.get(kernels="reference", prefix_caching=False, max_num_seqs=max_num_seqs)
        return Rung(number, name, lambda salt: run(llm, jobs, clock), "reference")

    rungs = [
        loop(1, "naive loop", _run_naive),
        loop(2, "contiguous KV cache", _run_cached),
        engine(3, "paged cache", together=False, kernels="reference", prefix_caching=False),
        engine(4, "continuous batching", kernels="reference", prefix_caching=False),
        engine(5, "prefix cache", kernels="reference"),
    ]
    fused = engine(6, "fused kernels")
    is_fused = fused.kernels != "reference"
    rungs.append(fused if is_fused else Rung(6, fused.name, None, missing=_no_fused_kernels(engines)))
    rungs.append(Rung(7, "quantised weights", None, missing="this build expands quantised weights when it loads them"))
    reason = _no_graphs(engines, is_fused)
    rungs.append(Rung(8, "CUDA graphs", None, missing=reason) if reason else engine(8, "CUDA graphs", graphs=True))
    if engines.device.type == "cuda":
        rungs.append(engine(9, "pipelined steps", graphs=not reason, depth=2))
    else:
        text = "needs a GPU: on a CPU preparing a step and computing one are the same cores' work"
        rungs.append(Rung(9, "pipelined steps", None, missing=text))
    rungs.append(Rung(10, "speculation", None, missing="this build has no drafters"))
    return rungs


def _no_fused_kernels(engines: Engines) -> str:
    if engines.device.type == "cuda":
        return "no kernels but the plain torch ones run on this GPU in this build"
    return "the C++ kernels could not be built here; install a C++ compiler (g++ or clang++)"


def _no_graphs(engines: Engines, is_fused: bool) -> str:
    if engines.device.type != "cuda":
        return f"needs a CUDA GPU; this run is on the {engines.device.type}"
    if not HAS_CUDA_GRAPHS:
        return "this build captures no CUDA graphs"
    return "" if is_fused else "needs the fused kernels, which don't run here"


def _run_naive(llm: LLM, jobs: Sequence[Job], clock: Clock) -> RungRun:
    decoder = llm.engine.decoder
    start = clock()
    tokens, ends = [], []
    for job in jobs:
        tokens.append(tuple(generate_naive(decoder, job.prompt, job.new_tokens)))
        ends.append(clock() - start)
    return RungRun(tuple(tokens), ends[-1], tuple(ends), cache_bytes=0)


def _run_cached(llm: LLM, jobs: Sequence[Job], clock: Clock) -> RungRun:
    decoder = llm.engine.decoder
    largest = 0

    def note(cache: ContiguousCache) -> None:
        nonlocal largest
        largest = max(largest, cache.num_bytes)

    start = clock()
    tokens, ends = [], []
    for job in jobs:
        tokens.append(tuple(generate_with_kv_cache(decoder, job.prompt, job.new_tokens, on_cache=note)))
        ends.append(clock() - start)
    return RungRun(tuple(tokens), ends[-1], tuple(ends), largest)


def _run_engine(llm: LLM, jobs: Sequence[Job], together: bool, salt: str, clock: Clock) -> RungRun:
    first_step = _next_step_id(llm)
    start = clock()
    outputs, ends = [], []
    for group in [jobs] if together else [[job] for job in jobs]:
        answered = run_together(llm, group, salt)
        now = clock() - start
        # The engine's own clock says when each of several answers was complete.
        last = max(output.metrics.finished for output in answered)
        ends += [now - (last - output.metrics.finished) for output in answered]
        outputs += answered
    seconds = clock() - start
    entries = [entry for entry in llm.engine.step_log if entry.step.step_id >= first_step]
    usable = llm.engine.plan.num_blocks - 1
    most_blocks = max(usable - entry.step.num_free_blocks for entry in entries)
    tokens = tuple(output.token_ids for output in outputs)
    return RungRun(tokens, seconds, tuple(ends), most_blocks * llm.engine.plan.bytes_per_block)


def _next_step_id(llm: LLM) -> int:
    entries = list(llm.engine.step_log)
    return entries[-1].step.step_id + 1 if entries else 0
