"""CPU kernels next to torch's, on the shapes of SmolLM2-135M.

    python -m quire.tools.bench.engine.cpu_kernels [--dtype float32] [--only attention] [--seconds 0.3]

Weights go round through enough copies that they come from where a real step finds them (a model's
weights don't stay in a core's own cache). Contenders take turns and each figure is the best of its
rounds: what else runs on the machine can only add. Note that torch's own products change bits with
the number of rows.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.backends.cpu.kernels import CpuKernels
from quire.kernels.formats import FORMATS
from quire.kernels.ops import Activation, AttentionSpec, HeadShape, LayerCache, PagedBatch
from quire.kernels.weights import Weight

LINEARS = {
    "qkv": (960, 576),
    "o": (576, 576),
    "gate_up": (3072, 576),
    "down": (576, 1536),
    "head": (49152, 576),
}
ROWS = (1, 8, 32, 64, 128, 512)
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 9, 3, 64, 16
COLD_BYTES = 200 << 20


T = TypeVar("T")


def seconds_each(contenders: Sequence[Callable[[int], object]], budget: float) -> list[float]:
    """Least seconds of one call of each; calls get a running number to pick a copy with."""
    for contender in contenders:
        contender(0)
    times: list[list[float]] = [[] for _ in contenders]
    started, turn = time.perf_counter(), 0
    while time.perf_counter() - started < budget * len(contenders) or turn < 5:
        for contender, its_times in zip(contenders, times, strict=True):
            calls = 8
            begin = time.perf_counter()
            for i in range(calls):
                contender(turn * calls + i)
            its_times.append((time.perf_counter() - begin) / calls)
        turn += 1
    return [min(its_times) for its_times in times]


def call_copy(linear: Callable[[Tensor, T], Tensor], x: Tensor, weights: list[T], i: int) -> Tensor:
    return linear(x, weights[i % len(weights)])


def bench_memory(budget: float) -> None:
    data = torch.ones(COLD_BYTES // 4)
    (seconds,) = seconds_each([lambda _: data.sum()], budget)
    print(
        f"memory read, {torch.get_num_threads()} threads (torch.sum): {COLD_BYTES / seconds / 1e9:.1f} GB/s\n"
    )


def bench_linear(kernels: CpuKernels, dtype: torch.dtype, budget: float) -> None:
    print(
        f"{'linear':10} {'rows':>4} {'µs':>9} {'torch µs':>9} {'ratio':>6} {'GB/s':>7} {'GFLOP/s':>8} {'torch':>8}"
    )
    for name, (columns, depth) in LINEARS.items():
        size = columns * depth * dtype.itemsize
        copies = max(1, COLD_BYTES // size)
        plain = [torch.randn(columns, depth).to(dtype) for _ in range(copies)]
        packed = [kernels.pack(Weight.dense(weight)) for weight in plain]
        for rows in ROWS:
            x = torch.randn(rows, depth).to(dtype)
            ours, theirs = seconds_each(
                [
                    partial(call_copy, kernels.linear, x, packed),
                    partial(call_copy, F.linear, x, plain),
                ],
                budget,
            )
            work = 2 * rows * columns * depth / 1e9
            print(
                f"{name:10} {rows:4} {ours * 1e6:9.1f} {theirs * 1e6:9.1f} {theirs / ours:6.2f} "
                f"{size / ours / 1e9:7.1f} {work / ours:8.0f} {work / theirs:8.0f}"
            )
    print()


def bench_quantized(kernels: CpuKernels, dtype: torch.dtype, budget: float) -> None:
    """Products with weights as they are stored, next to ours with plain float32 weights of the same
    shape.
    """
    columns, depth = 3072, 768
    plain = [
        kernels.pack(Weight.dense(torch.randn(columns, depth)))
        for _ in range(COLD_BYTES // (columns * depth * 4))
    ]
    print(
        f"{'quantized':10} {'rows':>4} {'µs':>9} {'float32':>9} {'ratio':>6} {'GB/s':>7} {'GMAC/s':>8}"
    )
    for name in ("Q4_0", "Q4_1", "Q5_0", "Q8_0", "Q4_K", "Q6_K", "INT8"):
        format = FORMATS[name]
        weights = []
        for _ in range(max(1, COLD_BYTES // format.nbytes((columns, depth)))):
            tensors = format.empty((columns, depth))
            for tensor in tensors:
                tensor.fill_(1)  # whatever the codes are, they take as long
            weights.append(kernels.pack(Weight.of(format, (columns, depth), *tensors)))
        size = weights[0].nbytes
        for rows in (1, 4, 32, 256):
            x = torch.randn(rows, depth)
            ours, plain_float = seconds_each(
                [
                    partial(call_copy, kernels.linear, x, weights),
                    partial(call_copy, kernels.linear, x, plain),
                ],
                budget,
            )
            print(
                f"{name:10} {rows:4} {ours * 1e6:9.1f} {plain_float * 1e6:9.1f} {plain_float / ours:6.2f} "
                f"{size / ours / 1e9:7.1f} {rows * columns * depth / ours / 1e9:8.0f}"
            )
    print()


def make_caches(
    num_sequences: int, context: int, dtype: torch.dtype
) -> tuple[list[LayerCache], Tensor]:
    """As many layers as make the cache large, and one block table with the blocks in random order."""
    blocks_each = -(-context // BLOCK_SIZE)
    num_blocks = num_sequences * blocks_each + 1
    shape = (num_blocks, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    layer_bytes = 2 * num_blocks * NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM * dtype.itemsize
    layers = max(1, min(30, COLD_BYTES // layer_bytes))
    caches = [
        LayerCache(torch.randn(shape).to(dtype), torch.randn(shape).to(dtype))
        for _ in range(layers)
    ]
    tables = torch.randperm(num_blocks - 1).add(1).view(num_sequences, blocks_each).int()
    return caches, tables


def bench_attention(kernels: CpuKernels, dtype: torch.dtype, budget: float) -> None:
    spec = AttentionSpec(HeadShape(NUM_HEADS, NUM_KV_HEADS, HEAD_DIM), HEAD_DIM**-0.5)
    print(f"{'attention':24} {'µs':>9} {'SDPA µs':>9} {'ratio':>6} {'KV GB/s':>8}")
    for num_sequences, context, new in (
        (32, 300, 1),
        (1, 300, 1),
        (1, 2048, 1),
        (1, 512, 512),
        (4, 512, 128),
    ):
        caches, tables = make_caches(num_sequences, context, dtype)
        rows = num_sequences * new
        batch = PagedBatch(
            torch.arange(0, rows + 1, new, dtype=torch.int32),
            torch.full((num_sequences,), context, dtype=torch.int32),
            tables,
            torch.arange(num_sequences, dtype=torch.int32),
            torch.zeros(rows, dtype=torch.int64),
            context,
        )
        query = torch.randn(rows, NUM_HEADS, HEAD_DIM).to(dtype)
        side = torch.randn(num_sequences, NUM_KV_HEADS, context, HEAD_DIM).to(dtype)
        contiguous = [(side.clone(), side.clone()) for _ in caches]
        wide_query = (
            query.view(num_sequences, new, NUM_HEADS, HEAD_DIM).transpose(1, 2).contiguous()
        )
        mask = None if new == 1 else torch.ones(new, context, dtype=torch.bool).tril(context - new)

        def ours(
            i: int,
            caches: list[LayerCache] = caches,
            query: Tensor = query,
            batch: PagedBatch = batch,
        ) -> Tensor:
            return kernels.attention(query, caches[i % len(caches)], batch, spec)

        def theirs(
            i: int,
            sides: list[tuple[Tensor, Tensor]] = contiguous,
            query: Tensor = wide_query,
            mask: Tensor | None = mask,
        ) -> Tensor:
            keys, values = sides[i % len(sides)]
            return F.scaled_dot_product_attention(
                query, keys, values, attn_mask=mask, enable_gqa=True
            )

        mine, sdpa = seconds_each([ours, theirs], budget)
        size = 2 * num_sequences * NUM_KV_HEADS * context * HEAD_DIM * dtype.itemsize
        label = f"{num_sequences} x {new} new of {context}"
        print(
            f"{label:24} {mine * 1e6:9.1f} {sdpa * 1e6:9.1f} {sdpa / mine:6.2f} {size / mine / 1e9:8.1f}"
        )
    print()


def bench_small(kernels: CpuKernels, dtype: torch.dtype, budget: float) -> None:
    """The fused row operations: what a call costs at 32 and at 512 rows."""
    print(f"{'small':16} {'32 rows µs':>11} {'512 rows µs':>12}")
    weight, cos_sin = torch.ones(576).to(dtype), torch.randn(2048, HEAD_DIM)

    def with_rows(rows: int) -> dict[str, Callable[[int], object]]:
        x, gate_up = torch.randn(rows, 576).to(dtype), torch.randn(rows, 3072).to(dtype)
        qkv = torch.randn(rows, 960).to(dtype)
        query = qkv[:, :576].view(rows, NUM_HEADS, HEAD_DIM)
        key, value = qkv[:, 576:768].view(rows, 3, HEAD_DIM), qkv[:, 768:].view(rows, 3, HEAD_DIM)
        positions = torch.arange(rows)
        cache = make_caches(1, 512, dtype)[0][0]
        slots = torch.randperm(512)[:rows]
        return {
            "rms_norm": lambda _: kernels.rms_norm(x, weight, 1e-5),
            "add_rms_norm": lambda _: kernels.add_rms_norm(x, x, weight, 1e-5),
            "rope": lambda _: kernels.rope(query, positions, cos_sin),
            "silu_mul": lambda _: kernels.gate(gate_up, Activation.SILU),
            "write_kv_": lambda _: kernels.write_kv_(key, value, cache, slots),
        }

    short, long = with_rows(32), with_rows(512)
    for name in short:
        small, large = seconds_each([short[name], long[name]], budget / 2)
        print(f"{name:16} {small * 1e6:11.1f} {large * 1e6:12.1f}")
    print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--only", choices=("linear", "quantized", "attention", "small"))
    parser.add_argument("--seconds", type=float, default=0.3, help="per figure")
    parser.add_argument("--no-amx", action="store_true", help="vector instructions only")
    args = parser.parse_args()
    kernels = CpuKernels(use_amx=not args.no_amx)
    dtype = torch.bfloat16 if args.dtype == "bfloat16" else torch.float32
    print(
        f"{args.dtype}, {torch.get_num_threads()} threads, {'AMX' if kernels.has_amx else 'vector instructions'}"
    )
    bench_memory(args.seconds)
    parts = {
        "linear": bench_linear,
        "quantized": bench_quantized,
        "attention": bench_attention,
        "small": bench_small,
    }
    for name, part in parts.items():
        if args.only in (None, name):
            part(kernels, dtype, args.seconds)


if __name__ == "__main__":
    main()
