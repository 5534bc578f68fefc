"""A layer with a state on a GPU, without a model: the kernels in use beside a candidate.

    python -m quire.tools.bench.gpu.recurrence                  # Qwen3.5's shape, 1 to 256 requests, prompts
    python -m quire.tools.bench.gpu.recurrence --heads 1:48:128:64 --no-delta
    python -m quire.tools.bench.gpu.recurrence --forms tiles,cuda,cuda:1,cuda:2,cuda:4,cuda:0:128

Convolution and recurrence, captured in a graph; each request is at the 32nd token of its 17th chunk.
Beside the times stands what the bytes take that must be moved, and how far outputs are from those of
the first form. First of all each form is asked whether a token has the same bits alone, among 64
and in a prompt.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from quire.backends.cuda import recurrent as cuda_recurrent
from quire.backends.triton.kernels import TritonKernels
from quire.backends.triton.recurrent import recur_ as recur_by_tiles
from quire.kernels.layer_state import CarriedPart
from quire.kernels.ops import PagedBatch
from quire.kernels.recurrent import (
    CHUNK,
    ConvolutionCache,
    RecurrentCache,
    RecurrentSpec,
    RecurrentWeights,
)

BLOCK = 16
CEILING = 4.5e12
"""Bytes a second that an H200 reads (`quire.tools.bench.gpu.ceiling`)."""


class OneLayer:
    """Random weights, and requests in the middle of a chunk, all of whose records and states are
    random, too.
    """

    def __init__(self, spec: RecurrentSpec, count: int, context: int, device: str) -> None:
        self.spec = spec
        self.count = count
        source = torch.Generator(device).manual_seed(count)

        def random(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
            drawn = torch.randn(*shape, generator=source, device=device)
            return (drawn * scale).to(dtype)

        heads, channels = spec.num_value_heads, spec.convolution.channels
        self.random, self.device = random, device
        self.weights = RecurrentWeights(
            random(heads), random(heads), None if spec.is_delta else random(heads)
        )
        self.taps = random(channels, spec.taps, scale=0.5, dtype=torch.bfloat16)
        self.bias = random(channels, dtype=torch.bfloat16) if spec.conv_bias else None
        per_request = -(-context // BLOCK)
        used = min(per_request, 2 * CHUNK // BLOCK)  # records of older tokens nobody reads
        self.tables = torch.zeros(count, per_request, dtype=torch.int32, device=device)
        last = torch.arange(count * used, dtype=torch.int32, device=device).view(count, used)
        self.tables[:, -used:] = 1 + last
        blocks = 1 + count * used
        self.states = torch.arange(2 * count, dtype=torch.int32, device=device).view(2, count, 1)
        shape = (spec.key_dim, spec.value_dim)
        keys = random(blocks, spec.num_key_heads, BLOCK, spec.key_dim)
        # the sums of decays fall from token to token, and begin anew with each chunk
        fall = -0.02 * (torch.arange(BLOCK, device=device) + 1)
        self.cache = RecurrentCache(
            ConvolutionCache(
                random(blocks, 1, BLOCK, channels, dtype=torch.bfloat16),
                CarriedPart(
                    ((0, random(2 * count, spec.taps - 1, channels, dtype=torch.bfloat16)),)
                ),
                0,
            ),
            keys / keys.norm(dim=-1, keepdim=True),
            random(blocks, heads, BLOCK, spec.value_dim, scale=0.1),
            fall.expand(blocks, heads, BLOCK).contiguous(),
            CarriedPart(((0, random(2 * count, heads, *shape, scale=0.1)),)),
            0,
        )

    def step(self, first: int, length: int, count: int | None = None) -> PagedBatch:
        """The next tokens of each request, of the first `count`, as the engine gives them."""
        count = self.count if count is None else count
        at = first + torch.arange(length, device=self.device)
        rows = torch.arange(count, dtype=torch.int32, device=self.device)
        starts = torch.arange(count + 1, dtype=torch.int32, device=self.device) * length
        slots = self.tables[:count, at // BLOCK].long() * BLOCK + at % BLOCK
        return PagedBatch(
            query_start=starts,
            context_lens=torch.full_like(rows, first + length),
            block_tables=self.tables,
            table_rows=rows,
            slot_mapping=slots.flatten(),
            max_context_len=first + length,
            state_tables=self.states,
            token_rows=rows.repeat_interleave(length),
            positions=at.int().repeat(count),
        )

    def inputs(self, rows: int) -> tuple[Tensor, Tensor]:
        channels, gates = self.spec.convolution.channels, self.spec.num_gates
        return (
            self.random(rows, channels, dtype=torch.bfloat16),
            self.random(rows, gates, dtype=torch.bfloat16),
        )

    def compute(
        self, kernels: TritonKernels, x: Tensor, gates: Tensor, batch: PagedBatch
    ) -> Tensor:
        spec, cache = self.spec, self.cache
        mixed = kernels.convolve_(
            x, self.taps, self.bias, spec.convolution, cache.convolution, batch
        )
        return kernels.recur_(mixed, gates, self.weights, spec, cache, batch)

    @property
    def bytes_of_a_token(self) -> float:
        """State and records that are read, and a 64th of a state that is written."""
        state = 4.0 * self.spec.value_size * self.spec.key_dim
        return self.spec.bytes_read(CHUNK, 2.0) + state / CHUNK


class _Tiles(TritonKernels):
    """Where CUDA kernels can't be compiled."""

    recur_ = staticmethod(recur_by_tiles)


def kernels_of(form: str) -> TritonKernels:
    if form == "tiles":
        return _Tiles(torch.bfloat16)
    name, lane, program = [*form.split(":"), "0", "0"][:3]
    if name != "cuda":
        raise ValueError(
            f"{form}: a form is tiles, cuda or cuda:<columns of a lane>:<of a program for prompts>"
        )
    cuda_recurrent.columns_of_a_lane = int(lane)
    cuda_recurrent.columns_of_a_program = int(program)
    return TritonKernels(torch.bfloat16)


def seconds_of(call: Callable[[], object], device: str, repeats: int) -> float:
    """Of one call among many in a graph; the median."""
    call()
    if device == "cpu":
        began = time.perf_counter()
        call()
        return time.perf_counter() - began
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            call()
    times = []
    for _ in range(7):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(float(start.elapsed_time(end)) / 1000 / repeats)
    return statistics.median(times)


def check_bits(form: str, spec: RecurrentSpec, device: str, count: int, length: int) -> None:
    """A prompt at once, and token by token in a batch."""
    kernels = kernels_of(form)
    found = []
    for lengths in ([length], [length // 3, *[1] * (length - length // 3)]):
        layer = OneLayer(spec, count, 2 * CHUNK, device)
        x, gates = layer.inputs(count * length)
        x, gates = x.view(count, length, -1), gates.view(count, length, -1)
        outputs, first = [], 0
        for size in lengths:
            part = slice(first, first + size)
            out = layer.compute(
                kernels,
                x[:, part].flatten(0, 1).contiguous(),
                gates[:, part].flatten(0, 1).contiguous(),
                layer.step(first, size),
            )
            outputs.append(out.view(count, size, -1))
            first += size
        found.append(torch.cat(outputs, 1))
    alone = OneLayer(spec, count, 2 * CHUNK, device)
    x, gates = alone.inputs(count * length)
    first_x, first_gates = x[:length], gates[:length]
    one = alone.compute(kernels, first_x, first_gates, alone.step(0, length, 1))
    equal = torch.equal(found[0], found[1]) and torch.equal(found[0][0], one)
    print(
        f"{form}: a token's bits {'do not depend' if equal else 'DEPEND'} on its step", flush=True
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--heads", default="16:32:128:128", help="keys:values:key_dim:value_dim")
    parser.add_argument("--no-delta", action="store_true", help="a state space (Mamba-2)")
    parser.add_argument("--forms", default="tiles,cuda")
    parser.add_argument("--batches", default="1,8,32,128,256")
    parser.add_argument("--prompts", default="4:2048,1:8192", help="number:length")
    parser.add_argument("--device", default="cuda", help="cpu: in Triton's interpreter, to try it")
    options = parser.parse_args()
    keys, values, key_dim, value_dim = map(int, options.heads.split(":"))
    spec = RecurrentSpec(keys, values, key_dim, value_dim, taps=4, is_delta=not options.no_delta)
    forms, device = options.forms.split(","), options.device
    is_cpu = device == "cpu"
    for form in forms:
        try:
            check_bits(form, spec, device, 3 if is_cpu else 64, 20 if is_cpu else 2 * CHUNK)
        except Exception as error:  # one that is not compiled says nothing of the others
            print(f"{form}: {error!r}"[:300], file=sys.stderr, flush=True)
    print(f"{'':>14}{'bytes, µs':>12}" + "".join(f"{form:>24}" for form in forms))
    for batch in map(int, options.batches.split(",") if options.batches else []):
        layer = OneLayer(spec, batch, 16 * CHUNK + CHUNK // 2, device)
        x, gates = layer.inputs(batch)
        step = layer.step(16 * CHUNK + CHUNK // 2 - 1, 1)
        show(layer, f"{batch} requests", forms, x, gates, step, batch, device)
    for prompt in options.prompts.split(",") if options.prompts else []:
        count, length = map(int, prompt.split(":"))
        layer = OneLayer(spec, count, length, device)
        # all blocks are there: a prompt writes into each of them
        layer.tables.copy_(
            torch.arange(layer.tables.numel()).view_as(layer.tables) % len(layer.cache.keys)
        )
        x, gates = layer.inputs(count * length)
        show(layer, f"prompts {prompt}", forms, x, gates, layer.step(0, length), 0, device)


def show(
    layer: OneLayer,
    name: str,
    forms: list[str],
    x: Tensor,
    gates: Tensor,
    batch: PagedBatch,
    tokens: int,
    device: str,
) -> None:
    """A row of the table."""
    shown, first = [], None
    for form in forms:
        try:
            kernels = kernels_of(form)
            out = layer.compute(kernels, x, gates, batch).double()
            first = out if first is None else first
            error = ((out - first).norm() / first.norm()).item()
            seconds = seconds_of(partial(layer.compute, kernels, x, gates, batch), device, 20)
            shown.append(f"{1e6 * seconds:>15.1f} ({error:.0e})")
        except Exception as error:
            print(f"{form}: {error!r}"[:300], file=sys.stderr, flush=True)
            shown.append(f"{'-':>24}")
    least = 1e6 * tokens * layer.bytes_of_a_token / CEILING
    print(f"{name:>14}{least:>12.1f}" + "".join(f"{one:>24}" for one in shown), flush=True)


if __name__ == "__main__":
    main()
