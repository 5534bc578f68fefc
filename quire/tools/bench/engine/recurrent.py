"""Decoding with layers that have a state, on a CPU: against a plain decoder of the same bytes, and
against the memory's bandwidth.

    python -m quire.tools.bench.engine.recurrent [--shape qwen3.5-9b] [--layers 4] [--rows 1 8]

A few layers of a true shape with random weights; every fourth attends, as in Qwen3.5. The plain
decoder only attends, and its MLPs are so much larger that a step of both reads the same bytes, of
weights and of the cache. The two take turns step by step, with a read of memory between them, so
that whatever else the machine does hits all three; figures are medians over the turns. A step of
the hybrid also writes states at the end of each chunk of 64 tokens: the turns cover whole chunks.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from quire.assemble import assemble
from quire.backends.cpu.kernels import CpuKernels
from quire.config import EngineConfig
from quire.engine import EngineCore
from quire.kernels.ops import AttentionSpec
from quire.kernels.recurrent import CHUNK, GatedNormSpec, RecurrentSpec
from quire.models.config_parts import plain_attention
from quire.models.spec import LayerSpec, MlpSpec, ModelSpec, RopeSpec
from quire.tools.bench.machine import report_facts
from quire.tools.bench.random_engine import random_decoder, random_prompts, requests_for

PROMPT = 64
"""Tokens, so that states are read from the first step on."""
_READ_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class HybridShape:
    """The sizes of a model with three recurrent layers for each that attends."""

    hidden_size: int
    intermediate_size: int
    recurrent: RecurrentSpec
    attention: AttentionSpec

    def spec(self, num_layers: int) -> ModelSpec:
        recurrent = LayerSpec(self.recurrent, None, MlpSpec(self.intermediate_size))
        attends = LayerSpec(
            self.attention,
            RopeSpec(),
            MlpSpec(self.intermediate_size),
            qk_norm=True,
            gated_attention=True,
        )
        return ModelSpec(
            family="qwen3_5_text",
            vocab_size=16_384,
            hidden_size=self.hidden_size,
            rms_norm_eps=1e-6,
            layers=tuple(attends if i % 4 == 3 else recurrent for i in range(num_layers)),
            max_position=4096,
            norm_offset=1.0,
        )


SHAPES = {
    "qwen3.5-9b": HybridShape(
        4096,
        12_288,
        RecurrentSpec(16, 32, 128, 128, taps=4, norm=GatedNormSpec(128)),
        plain_attention(16, 4, 256),
    ),
    # Nobody's model: what is not a matrix product weighs more.
    "small": HybridShape(
        1024,
        3584,
        RecurrentSpec(16, 16, 128, 128, taps=4, norm=GatedNormSpec(128)),
        plain_attention(8, 2, 256),
    ),
}


def step_bytes(spec: ModelSpec, rows: int, context: int, itemsize: int) -> float:
    """What a step of so many decodes reads: all weights but the embedding's, and of each request's
    cache what its layers say.
    """
    weights = sum(
        math.prod(parameter.shape) * (4 if parameter.keep_float32 else itemsize)
        for name, parameter in spec.parameters().items()
        if name != "embedding"
    )
    return weights + rows * sum(mixer.bytes_read(context, itemsize) for mixer in spec.mixers)


def plain_of_same_bytes(
    shape: HybridShape, spec: ModelSpec, rows: int, context: int, itemsize: int
) -> ModelSpec:
    """A decoder whose layers all attend, with MLPs as large as it takes."""
    wanted = step_bytes(spec, rows, context, itemsize)

    def with_size(size: int) -> ModelSpec:
        layer = LayerSpec(shape.attention, RopeSpec(), MlpSpec(size), qk_norm=True)
        return replace(spec, family="qwen3", layers=(layer,) * len(spec.layers), norm_offset=0.0)

    least = step_bytes(with_size(32), rows, context, itemsize)
    each = step_bytes(with_size(64), rows, context, itemsize) - least
    return with_size(32 * (1 + round((wanted - least) / each)))


def open_core(spec: ModelSpec, kernels: CpuKernels, dtype: torch.dtype, rows: int) -> EngineCore:
    decoder = random_decoder(spec, kernels, dtype, torch.device("cpu"))
    config = EngineConfig(
        device="cpu",
        dtype=str(dtype).removeprefix("torch."),
        kernels="cpu",
        max_model_len=1024,
        max_num_seqs=rows,
        kv_cache_memory="1GiB",
    )
    return assemble(decoder, config, name=spec.family).core


@dataclass(slots=True)
class Turns:
    """Seconds of each turn."""

    hybrid: list[float] = field(default_factory=list)
    plain: list[float] = field(default_factory=list)
    read: list[float] = field(default_factory=list)


def measure(hybrid: EngineCore, plain: EngineCore, rows: int, turns: int) -> Turns:
    """Decodes of both in turn, once all requests have their first token."""
    found, block = Turns(), torch.ones(_READ_BYTES // 4)
    for core in (hybrid, plain):
        prompts = random_prompts(rows, PROMPT, seed=rows)
        for request in requests_for(prompts, [turns + 2] * rows, f"{rows}", temperature=0.0):
            core.add_request(request, 0.0)
        answered = 0
        while answered < rows:
            answered += sum(len(update.new_token_ids) for update in core.step(0.0))
        core.step(0.0)  # the first decode is recorded
    for _ in range(turns):
        for core, times in ((hybrid, found.hybrid), (plain, found.plain)):
            times.append(_timed_step(core))
        begin = time.perf_counter()
        block.sum()
        found.read.append(time.perf_counter() - begin)
    for core in (hybrid, plain):
        while core.has_work:
            core.step(0.0)
    return found


def _timed_step(core: EngineCore) -> float:
    begin = time.perf_counter()
    core.step(0.0)
    return time.perf_counter() - begin


def report(shape: HybridShape, options: argparse.Namespace, rows: int) -> str:
    dtype = getattr(torch, options.dtype)
    context = PROMPT + options.turns // 2
    spec = shape.spec(options.layers)
    same = plain_of_same_bytes(shape, spec, rows, context, dtype.itemsize)
    kernels = CpuKernels()
    hybrid, plain = (open_core(one, kernels, dtype, rows) for one in (spec, same))
    turns = measure(hybrid, plain, rows, options.turns)
    size = step_bytes(spec, rows, context, dtype.itemsize)
    bandwidth = _READ_BYTES / statistics.median(turns.read)

    def line(name: str, times: Sequence[float]) -> str:
        median = statistics.median(times)
        ceiling = size / bandwidth
        return f"  {name:7} {1000 * median:8.1f} ms   {ceiling / median:5.2f} of the bandwidth"

    ratios = [h / p for h, p in zip(turns.hybrid, turns.plain, strict=True)]
    return "\n".join(
        [
            f"{rows} rows, {size / 1e6:,.0f} MB a step, memory read at {bandwidth / 1e9:.1f} GB/s",
            line("hybrid", turns.hybrid),
            line("plain", turns.plain),
            f"  hybrid / plain: {statistics.median(ratios):.2f} in the median of {len(ratios)} turns, "
            f"{sum(turns.hybrid) / sum(turns.plain):.2f} in their sum",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen3.5-9b")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rows", type=int, nargs="+", default=[1], help="requests that decode")
    parser.add_argument("--turns", type=int, default=CHUNK, help="a multiple of a chunk's tokens")
    options = parser.parse_args()
    for name, value in report_facts(torch.device("cpu"), "recurrent").items():
        print(f"{name}: {value}")
    for rows in options.rows:
        print(report(SHAPES[options.shape], options, rows), flush=True)
    print(f"load at the end: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
