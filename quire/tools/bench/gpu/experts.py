"""One layer of experts in several formats: microseconds for routing, both products and the sum, and
how near they come to what their bytes take.

    python -m quire.tools.bench.gpu.experts --formats INT4_G128,FP8_G128
    python -m quire.tools.bench.gpu.experts --formats INT4_G128 --search
    python -m quire.tools.bench.gpu.experts --shape gpt-oss-20b --formats BF16,MXFP4

Inside a CUDA graph, in which each of 8 calls chooses other experts. With `--search` also for other
divisions of the products than the chosen ones, each compared with the bits of the first: the figures
that decide which are chosen.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from quire.backends.cuda import experts as many_rows
from quire.backends.triton import moe as experts
from quire.backends.triton.launch import HAS_GLUON
from quire.backends.triton.quantized import pack
from quire.kernels.formats import FORMATS
from quire.kernels.ops import ExpertWeights, MoeSpec
from quire.kernels.weights import Weight
from quire.models.spec import ModelSpec
from quire.process.compile_together import compile_together
from quire.tools.bench.gpu.ceiling import gpu_seconds, measure_rates
from quire.tools.bench.random_engine import itemsize_of, quantized
from quire.tools.bench.shapes import CONFIGS, spec_of

if HAS_GLUON:
    from quire.backends.triton import streamed_experts
    from quire.backends.triton.streamed_experts import Blocks

CALLS = 8
DEVICE, DTYPE = torch.device("cuda"), torch.bfloat16
Division = dict[int, Any]
"""How products are divided, by the width of tiles."""


class Layer:
    """The experts of a model's layer in one format, and rows for them."""

    def __init__(self, spec: ModelSpec, format: str) -> None:
        mlp = next(layer.mlp for layer in spec.layers if isinstance(layer.mlp, MoeSpec))
        self.spec, self.format, self.hidden = mlp, format, spec.hidden_size
        shapes = (
            (mlp.num_experts, 2 * mlp.intermediate_size, spec.hidden_size),
            (mlp.num_experts, spec.hidden_size, mlp.intermediate_size),
        )
        gate_up, down = (_random(format, shape) for shape in shapes)
        self.weights = ExpertWeights(gate_up, down)
        self.nbytes_each = sum(shape[1] * shape[2] for shape in shapes) * itemsize_of(format)

    @property
    def kind(self) -> str:
        """What computes it: which table of divisions."""
        first = self.weights.gate_up.parts[0]
        if first.tensors[0].dtype == torch.int32:
            return "exponents" if self.format == "MXFP4" else "integers"
        return "fp8" if first.tensors[0].dtype == torch.float8_e4m3fn else "tiles"

    def calls(self, rows: int) -> tuple[list[Callable[[], Tensor]], float]:
        """Calls that choose other experts each, and how many experts they read on average."""
        generator = torch.Generator(DEVICE).manual_seed(rows)
        found: list[Callable[[], Tensor]] = []
        used = 0
        for _ in range(CALLS):
            x = torch.randn(rows, self.hidden, device=DEVICE, generator=generator).to(DTYPE)
            logits = torch.randn(
                rows, self.spec.num_experts, device=DEVICE, generator=generator
            ).to(DTYPE)
            used += len(torch.unique(experts.route(logits, self.spec)[0]))
            found.append(partial(experts.moe, x, logits, self.weights, self.spec))
        return found, used / CALLS


def _random(format: str, shape: tuple[int, ...]) -> Weight:
    numbers = torch.empty(shape, dtype=DTYPE, device=DEVICE).normal_(0, 0.02)
    if FORMATS[format].dtype is not None:
        return Weight.dense(numbers)
    parts = quantized(FORMATS[format], numbers.flatten(0, 1))
    del numbers
    tensors = (part.view(*shape[:-1], *part.shape[1:]) for part in parts)
    return pack(Weight.of(FORMATS[format], shape, *tensors), DTYPE)


def microseconds(calls: list[Callable[[], Tensor]]) -> float:
    """Of one call inside a graph: the least of ten rounds."""
    for call in calls[:2]:
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls * 2:
            call()
    gpu_seconds(graph.replay)
    return min(gpu_seconds(graph.replay) for _ in range(10)) * 1e6 / (2 * len(calls))


def _table(kind: str) -> Division:
    if kind == "integers":
        return streamed_experts.INTEGER_BLOCKS
    if kind == "exponents":
        return streamed_experts.BLOCKS
    return experts.FP8_TILES if kind == "fp8" else experts.TILES


def divisions(kind: str, width: int) -> list[Any]:
    """What `--search` tries for a width of tiles."""
    if kind in ("fp8", "tiles"):
        return [
            (outputs, stages, warps)
            for outputs, stages, warps in (
                (64, 4, 4), (64, 5, 4), (64, 6, 4), (64, 8, 4), (64, 10, 4), (128, 3, 4),
                (128, 4, 4), (128, 6, 4), (128, 3, 8), (128, 4, 8), (128, 6, 8),
            )
            if (outputs + width) * 128 * stages <= 220 << 10
        ]  # fmt: skip
    by_mma = [
        Blocks(4, each, stages) for each, stages in ((2, 3), (3, 2), (4, 2), (2, 4), (1, 6), (6, 2))
    ]
    copied = [
        Blocks(warps, each, stages, is_async=True)
        for warps in (4, 8)
        for each, stages in ((2, 2), (3, 2), (4, 2), (2, 3), (3, 3))
    ]
    loaded = [
        Blocks(8, each, stages, in_registers=True, is_async=True, registers=registers)
        for each, stages in ((2, 2), (2, 3), (3, 2))
        for registers in ((80, 96, 128) if width <= 64 else (128, 168, None))
    ]
    if width == 8:
        return by_mma + copied[:5]
    return copied + (loaded if width >= 32 else by_mma[:2])


@contextmanager
def using(kind: str, width: int, division: Any) -> Iterator[None]:
    """With tiles of one width, divided so; also many rows of plain weights, which have another kernel."""
    table = _table(kind)
    before = table.get(width)
    streamed = kind in ("integers", "exponents")
    place, name = (streamed_experts if streamed else experts), "tile_width"
    table[width] = division
    try:
        with (
            patch.object(place, name, lambda *_: width),
            patch.object(many_rows, "takes", lambda *_: False),
        ):
            yield
    finally:
        table[width] = before


def search(layer: Layer, rows: int, ends: float) -> None:
    """Tries the divisions for the chosen width and the ones beside it; prints the best."""
    kind, pairs = layer.kind, rows * layer.spec.top_k
    if kind in ("integers", "exponents"):
        chosen = streamed_experts.tile_width(pairs, layer.spec.num_experts)
        widths = [8, 16, 32, 64, 128]
    else:
        chosen = experts.tile_width(pairs, layer.spec.num_experts, DTYPE)
        widths = [16, 32, 64, 128]
    at = widths.index(chosen)
    tried = [
        (width, division)
        for width in widths[max(0, at - 1) : at + 2]
        for division in divisions(kind, width)
    ]
    calls, _ = layer.calls(rows)
    expected = calls[0]()

    def launch_all() -> None:
        for width, division in tried:
            with using(kind, width, division):
                calls[0]()

    began = time.monotonic()
    compile_together(launch_all)
    print(f"  {rows} rows: {len(tried)} compiled in {time.monotonic() - began:.0f} s", flush=True)
    found = []
    for width, division in tried:
        if time.monotonic() > ends:
            print("  the time is up")
            break
        try:
            with using(kind, width, division):
                same = torch.equal(calls[0](), expected)
                found.append((microseconds(calls), width, division, same))
        except Exception as error:  # too much shared memory, or what a compiler says
            print(f"    {width} {division}: {type(error).__name__}", flush=True)
    different = [one for one in found if not one[3]]
    for taken, width, division, _ in sorted(found, key=lambda one: one[0])[:4]:
        print(f"    {taken:8.1f} µs: width {width}, {tuple(division)}", flush=True)
    print(f"    {len(found)} tried, {len(different)} with other bits", *different[:3], flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="qwen3-30b-a3b", choices=list(CONFIGS))
    parser.add_argument("--formats", default="BF16,FP8_G128,INT4_G128", help="with commas between")
    parser.add_argument("--rows", default="1,8,32,64,128,256,2048", help="with commas between")
    parser.add_argument("--search", action="store_true", help="try other divisions, too")
    parser.add_argument("--seconds", type=float, default=240, help="for all of it")
    options = parser.parse_args()
    names = options.formats.split(",")
    if unknown := [name for name in names if name not in FORMATS]:
        parser.error(f"there is no format {', '.join(unknown)}; choose of {', '.join(FORMATS)}")
    spec = spec_of(options.shape)
    if not any(isinstance(layer.mlp, MoeSpec) for layer in spec.layers):
        parser.error(f"{options.shape} has no experts")
    if not torch.cuda.is_available():
        parser.error("this needs a CUDA device")
    ends = time.monotonic() + options.seconds
    rates = measure_rates(DEVICE, DTYPE)
    print(f"{torch.cuda.get_device_name()}: {rates}", flush=True)
    for name in names:
        layer = Layer(spec, name)
        print(f"{options.shape}, {name}, by {layer.kind}", flush=True)
        for rows in map(int, options.rows.split(",")):
            if time.monotonic() > ends:
                print("the time is up")
                return
            calls, used = layer.calls(rows)
            taken = microseconds(calls)
            least = used * layer.nbytes_each / rates.read_bandwidth * 1e6
            flops = 6.0 * rows * layer.spec.top_k * layer.spec.intermediate_size * layer.hidden
            print(
                f"  {rows:5} rows {taken:9.1f} µs, {least:7.1f} by bytes ({least / taken:4.0%}), "
                f"{flops / taken / 1e6:6.1f} TFLOP/s",
                flush=True,
            )
            if options.search:
                search(layer, rows, ends)
        del layer
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
