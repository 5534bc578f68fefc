"""The rungs: what each adds, how it runs the workload, or why it can't here."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any

import torch

from quire.llm import LLM
from quire.models.decoder import Decoder
from quire.tools.bench.jobs import Job
from quire.tools.bench.ladder.engines import LadderEngines
from quire.tools.bench.measure import Clock
from quire.tools.bench.offline import run_together
from quire.tools.bench.spread import Spread
from quire.tools.ladder.kv_cache import generate_with_kv_cache
from quire.tools.ladder.naive import generate_naive

Answers = tuple[tuple[int, ...], ...]
"""The tokens of every request."""


@dataclass(frozen=True, slots=True)
class RungRun:
    """One pass of a rung over the workload."""

    tokens: Answers
    seconds: float
    latencies: tuple[float, ...]
    """From the start, when all requests were there, until each one's answer was complete."""
    cache_bytes: int
    """The most memory that held keys and values between two tokens."""


@dataclass(slots=True)
class Rung:
    """One technique more than the rung before, and what was measured of it."""

    number: int
    name: str
    run: Callable[[str], RungRun] | None = None
    """Takes a name no other pass has, so that nothing cached by another pass is found."""
    kernels: str = ""
    weight_bytes: int = 0
    missing: str = ""
    """Why it can't run, if it can't."""
    expected: Callable[[], Answers] | None = None
    """What it must answer, where that is not what the first rung does: other weights are another
    model, and with fewer bits than float32 other kernels round elsewhere.
    """
    has_other_weights: bool = False
    runs: list[RungRun] = field(default_factory=list)

    @property
    def seconds(self) -> Spread:
        return Spread.of(run.seconds for run in self.runs)

    @property
    def latency(self) -> Spread:
        return Spread.of(statistics.mean(run.latencies) for run in self.runs)

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.runs[0].tokens))

    def __str__(self) -> str:
        return f"{self.number} {self.name}"


def find_rungs(
    engines: LadderEngines, jobs: Sequence[Job], max_num_seqs: int, clock: Clock = perf_counter
) -> list[Rung]:
    """All rungs, in order, ready to run `jobs`, at most `max_num_seqs` at once where the rung can
    do several.
    """

    def loop(number: int, name: str, generate: Callable[[Job, list[int]], list[int]]) -> Rung:
        return Rung(
            number, name, lambda salt: _run_loop(generate, jobs, clock), "reference", plain.nbytes
        )

    def engine(
        number: int,
        name: str,
        together: bool = True,
        kernels: str = "auto",
        prefix_caching: bool = True,
        graphs: bool = False,
        depth: int = 1,
        quantization: str = "none",
        speculation: str = "off",
    ) -> Rung:
        options: dict[str, Any] = {
            "kernels": kernels,
            "prefix_caching": prefix_caching,
            "quantization": quantization,
        }
        options["speculation"] = speculation
        llm = engines.get(max_num_seqs=max_num_seqs, cuda_graphs=graphs, **options)
        decoder = llm.engine.decoder

        def run(salt: str) -> RungRun:
            llm.engine.core.depth = depth  # nothing is in flight between two passes
            return _run_engine(llm, jobs, together, salt, clock)

        is_rounded = engines.dtype != torch.float32 and decoder.kernels.name != plain.kernels.name
        others = quantization != "none"
        expected = partial(_naive_answers, decoder, jobs) if others or is_rounded else None
        return Rung(number, name, run, decoder.kernels.name, decoder.nbytes, "", expected, others)

    def cached(job: Job, sizes: list[int]) -> list[int]:
        ids, note = job.token_ids, lambda cache: sizes.append(cache.num_bytes)
        return generate_with_kv_cache(plain, ids, job.max_tokens, on_cache=note)

    plain = engines.get(
        kernels="reference", prefix_caching=False, max_num_seqs=max_num_seqs
    ).engine.decoder
    fused = engine(6, "fused kernels")
    is_fused = fused.kernels != plain.kernels.name
    no_graphs = _no_graphs(engines, is_fused)
    fast = engines.get(prefix_caching=True, max_num_seqs=max_num_seqs).engine.decoder.kernels
    quantizations = engines.quantizations(fast) if is_fused else ()
    no_fused = "the C++ kernels could not be built here; install a C++ compiler (g++ or clang++)"
    if engines.device.type == "cuda":
        no_fused = "no kernels but the plain torch ones run on this GPU in this build"
    on_top = 2 if engines.device.type == "cuda" else 1
    no_pipeline = (
        "needs a GPU: on a CPU preparing a step and computing one are the same cores' work"
    )
    return [
        loop(1, "naive loop", lambda job, _: generate_naive(plain, job.token_ids, job.max_tokens)),
        loop(2, "contiguous KV cache", cached),
        engine(3, "paged cache", together=False, kernels="reference", prefix_caching=False),
        engine(4, "continuous batching", kernels="reference", prefix_caching=False),
        engine(5, "prefix cache", kernels="reference"),
        fused if is_fused else Rung(6, fused.name, missing=no_fused),
        engine(7, "quantised weights", quantization=quantizations[0])
        if quantizations
        else Rung(7, "quantised weights", missing=_no_quantized(engines, is_fused)),
        Rung(8, "CUDA graphs", missing=no_graphs)
        if no_graphs
        else engine(8, "CUDA graphs", graphs=True),
        engine(9, "pipelined steps", graphs=not no_graphs, depth=2)
        if engines.device.type == "cuda"
        else Rung(9, "pipelined steps", missing=no_pipeline),
        engine(10, "speculation", graphs=not no_graphs, depth=on_top, speculation="ngram")
        if is_fused
        else Rung(10, "speculation", missing=no_fused),
    ]


def _no_quantized(engines: LadderEngines, is_fused: bool) -> str:
    if engines.device.type != "cpu" and engines.dtype == torch.float32:
        return f"in float32 only a CPU computes with quantised weights; this run is on the {engines.device.type}"
    if not is_fused:
        return "needs the fused kernels, which don't run here"
    return f"no kernel computes with {', '.join(engines.block_formats)} as it is stored"


def _no_graphs(engines: LadderEngines, is_fused: bool) -> str:
    if engines.device.type != "cuda":
        return f"needs a CUDA GPU; this run is on the {engines.device.type}"
    return "" if is_fused else "needs the fused kernels, which don't run here"


def _naive_answers(decoder: Decoder, jobs: Sequence[Job]) -> Answers:
    """What rung 1's loop answers with some decoder's weights."""
    return tuple(tuple(generate_naive(decoder, job.token_ids, job.max_tokens)) for job in jobs)


def _run_loop(
    generate: Callable[[Job, list[int]], list[int]], jobs: Sequence[Job], clock: Clock
) -> RungRun:
    """One request after the other; `generate` notes the bytes of its cache in the list it is given."""
    tokens, ends, sizes = [], [], [0]
    start = clock()
    for job in jobs:
        tokens.append(tuple(generate(job, sizes)))
        ends.append(clock() - start)
    return RungRun(tuple(tokens), ends[-1], tuple(ends), max(sizes))


def _run_engine(llm: LLM, jobs: Sequence[Job], together: bool, salt: str, clock: Clock) -> RungRun:
    entries = list(llm.engine.step_log)
    last_step = entries[-1].step.step_id if entries else -1
    outputs, ends = [], []
    start = clock()
    for group in [jobs] if together else [[job] for job in jobs]:
        answered = run_together(llm, group, salt)
        now = clock() - start
        # The engine's own clock says when each of several answers was complete.
        last = max(output.metrics.finished for output in answered)
        ends += [now - (last - output.metrics.finished) for output in answered]
        outputs += answered
    seconds = clock() - start
    free = min(
        entry.step.num_free_blocks
        for entry in llm.engine.step_log
        if entry.step.step_id > last_step
    )
    plan = llm.engine.plan
    tokens = tuple(output.token_ids for output in outputs)
    return RungRun(
        tokens, seconds, tuple(ends), (plan.num_blocks - 1 - free) * plan.bytes_per_block
    )
