"""Triton kernels on the shapes of real models: microseconds, and how near they come to the card's
own limits.

    python -m quire.tools.bench.gpu.kernels --only moe,rms_norm --shape qwen3-0.6b --rows 1,256
    python -m quire.tools.bench.gpu.kernels --only int4,int4_repeated,int4_chunks_8 --shape qwen3-8b --rows 1,8

Every figure is taken inside a CUDA graph that calls the kernel on one set of buffers after the
other, as many as exceed the L2 cache (at most 64: what is smaller than that stays in the cache in a
real step too). GB/s counts what must be read and written once; the percentage is of the read rate
measured at the start, or for products that are bound by arithmetic, of the rate of a large matrix
product.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from quire.backends.triton.heads import qkv_to_cache_
from quire.backends.triton.launch import HAS_GLUON
from quire.backends.triton.linear import room_for
from quire.backends.triton.moe import moe, route
from quire.backends.triton.rowwise import add_rms_norm, embedding, rms_norm, sigmoid_mul
from quire.backends.triton.rowwise import gate as gate_rows
from quire.backends.triton.sampling import gumbel_argmax, sample_rows
from quire.kernels.noise import noise_keys
from quire.kernels.ops import Activation, ExpertWeights, HeadNorms, LayerCache, MoeSpec
from quire.kernels.weights import Weight
from quire.models.spec import MlpSpec, ModelSpec
from quire.tools.bench.gpu.ceiling import Work, gpu_seconds, measure_rates
from quire.tools.bench.shapes import CONFIGS, spec_of

if HAS_GLUON:
    from quire.backends.triton.few_rows_int4 import few_rows_linear
    from quire.backends.triton.streamed_linear import Int4, int4_linear, pack_int4

DEVICE = torch.device("cuda")
DTYPE = torch.bfloat16
SIZE = DTYPE.itemsize
SHAPES = ("qwen3-0.6b", "qwen3-8b", "qwen3-30b-a3b", "llama-3.2-1b")
ROWS = (1, 8, 32, 256, 4096)
MOST_SAMPLED = 256
BLOCK_SIZE = 16
COLD_BYTES = 256 << 20
MOST_COPIES = 64
EPS = 1e-6


@dataclass(frozen=True)
class KernelCase:
    """One kernel at one size."""

    make: Callable[[int], Callable[[], object]]
    """A call on a set of buffers of its own, by the number of the set."""
    bytes: float
    flops: float = 0.0
    copied_bytes: float | None = None
    """What a set of buffers takes, if that is not `bytes`."""


def randn(*shape: int, dtype: torch.dtype = DTYPE) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def norm_case(spec: ModelSpec, rows: int) -> KernelCase:
    weight = randn(spec.hidden_size)

    def make(_: int) -> Callable[[], object]:
        x = randn(rows, spec.hidden_size)
        return lambda: rms_norm(x, weight, EPS)

    return KernelCase(make, 2 * rows * spec.hidden_size * SIZE)


def add_norm_case(spec: ModelSpec, rows: int) -> KernelCase:
    weight = randn(spec.hidden_size)

    def make(_: int) -> Callable[[], object]:
        x, residual = randn(rows, spec.hidden_size), randn(rows, spec.hidden_size)
        return lambda: add_rms_norm(x, residual, weight, EPS)

    return KernelCase(make, 4 * rows * spec.hidden_size * SIZE)


def heads_case(spec: ModelSpec, rows: int) -> KernelCase:
    heads = spec.head_shapes[0]
    num_heads, num_kv_heads, head_dim = heads.num_heads, heads.num_kv_heads, heads.head_dim
    norm = HeadNorms(randn(head_dim), randn(head_dim), EPS) if spec.layers[0].qk_norm else None
    cos_sin, positions = (
        randn(4096, head_dim, dtype=torch.float32),
        torch.arange(rows, device=DEVICE) % 4096,
    )
    size = rows * (num_heads + 2 * num_kv_heads) * head_dim * SIZE

    def make(_: int) -> Callable[[], object]:
        qkv = randn(rows, (num_heads + 2 * num_kv_heads) * head_dim)
        keys, values = (
            randn(rows // BLOCK_SIZE + 1, num_kv_heads, BLOCK_SIZE, head_dim) for _ in range(2)
        )
        slots = torch.randperm(rows, device=DEVICE)
        cache = LayerCache(keys, values)
        return lambda: qkv_to_cache_(qkv, heads, norm, positions, cos_sin, cache, slots)

    return KernelCase(make, 2 * size)


def silu_case(spec: ModelSpec, rows: int) -> KernelCase | None:
    mlp = spec.layers[0].mlp
    if not isinstance(mlp, MlpSpec):
        return None  # it is part of the experts' product there

    def make(_: int) -> Callable[[], object]:
        gate_up = randn(rows, 2 * mlp.intermediate_size)
        return lambda: gate_rows(gate_up, Activation.SILU)

    return KernelCase(make, 3 * rows * mlp.intermediate_size * SIZE)


def sigmoid_case(spec: ModelSpec, rows: int) -> KernelCase:
    def make(_: int) -> Callable[[], object]:
        gate, x = randn(rows, 1), randn(rows, spec.hidden_size)
        return lambda: sigmoid_mul(gate, x)

    return KernelCase(make, 2 * rows * spec.hidden_size * SIZE)


def embedding_case(spec: ModelSpec, rows: int) -> KernelCase:
    weight = randn(spec.vocab_size, spec.hidden_size)

    def make(_: int) -> Callable[[], object]:
        token_ids = torch.randint(spec.vocab_size, (rows,), device=DEVICE)
        return lambda: embedding(token_ids, weight)

    return KernelCase(make, 2 * rows * spec.hidden_size * SIZE)


def argmax_case(spec: ModelSpec, rows: int, temperature: float) -> KernelCase | None:
    if rows > MOST_SAMPLED:
        return None
    keys = torch.from_numpy(noise_keys(np.arange(rows, dtype=np.uint64), np.arange(rows))).to(
        DEVICE
    )
    temperatures = torch.full((rows,), temperature, device=DEVICE)

    def make(_: int) -> Callable[[], object]:
        logits = randn(rows, spec.vocab_size)
        return lambda: gumbel_argmax(logits, temperatures, keys)

    return KernelCase(make, rows * spec.vocab_size * SIZE)


def sample_case(spec: ModelSpec, rows: int) -> KernelCase | None:
    if rows > MOST_SAMPLED:
        return None
    row_index = torch.arange(rows, dtype=torch.int32, device=DEVICE)
    positions = torch.full_like(row_index, 7)
    seeds, temperatures = torch.arange(rows, device=DEVICE), torch.full((rows,), 0.6, device=DEVICE)
    token_ids = torch.zeros(rows, 64, dtype=torch.int64, device=DEVICE)

    def make(_: int) -> Callable[[], object]:
        logits = randn(rows, spec.vocab_size)
        return lambda: sample_rows(logits, row_index, seeds, temperatures, positions, token_ids)

    return KernelCase(make, rows * spec.vocab_size * SIZE)


def moe_case(spec: ModelSpec, rows: int) -> KernelCase | None:
    mlp = spec.layers[0].mlp
    if not isinstance(mlp, MoeSpec):
        return None
    hidden, intermediate = spec.hidden_size, mlp.intermediate_size
    experts, top_k = mlp.num_experts, mlp.top_k
    gate_up = torch.empty(experts, 2 * intermediate, hidden, dtype=DTYPE, device=DEVICE).normal_(
        0, hidden**-0.5
    )
    down = torch.empty(experts, hidden, intermediate, dtype=DTYPE, device=DEVICE).normal_(
        0, intermediate**-0.5
    )
    weights = ExpertWeights(Weight.dense(gate_up), Weight.dense(down))
    # Each set of buffers chooses other experts of the same layer.
    logits = [randn(rows, experts) for _ in range(16)]
    chosen = [torch.unique(route(own, mlp)[0]) for own in logits]
    used = sum(map(len, chosen)) / len(logits)
    weight_bytes = used * 3 * intermediate * hidden * SIZE

    def make(i: int) -> Callable[[], object]:
        x, router_logits = randn(rows, hidden), logits[i % len(logits)]
        return lambda: moe(x, router_logits, weights, mlp)

    flops = 2.0 * rows * top_k * 3 * intermediate * hidden
    return KernelCase(
        make, weight_bytes + 2 * rows * hidden * SIZE, flops, copied_bytes=COLD_BYTES / len(logits)
    )


def int4_case(
    spec: ModelSpec,
    rows: int,
    compute: Callable[[Tensor, Int4, None, Tensor], None],
    most_rows: int = 4096,
) -> KernelCase | None:
    """The four products of a layer with weights in INT4_G128, one after the other."""
    mlp = spec.layers[0].mlp
    if not isinstance(mlp, MlpSpec) or rows > most_rows:
        return None
    heads, hidden, wide = spec.head_shapes[0], spec.hidden_size, mlp.intermediate_size
    attended = heads.num_heads * heads.head_dim
    shapes = (
        (attended + 2 * heads.num_kv_heads * heads.head_dim, hidden),
        (hidden, attended),
        (2 * wide, hidden),
        (hidden, wide),
    )
    numbers = sum(size * inner for size, inner in shapes)

    def make(_: int) -> Callable[[], object]:
        weights, inputs, outputs = [], [], []
        for size, inner in shapes:
            codes = torch.randint(0, 16, (size, inner), device=DEVICE).to(torch.uint8)
            scales = torch.full((size, inner // 128), 2.0**-6, device=DEVICE)
            weights.append(pack_int4(codes, scales, torch.full_like(scales, 8), None, DTYPE))
            inputs.append(randn(rows, inner))
            outputs.append(room_for(inputs[-1], size))

        def products() -> None:
            for weight, x, out in zip(weights, inputs, outputs, strict=True):
                compute(x, weight, None, out)

        return products

    return KernelCase(make, numbers * (0.5 + 4 / 128), 2.0 * rows * numbers)


def int4_cases() -> dict[str, Callable[[ModelSpec, int], KernelCase | None]]:
    """The kernel for few rows as it is, with copies of the last row instead of zeros after it, with
    larger chunks; and the kernel for more rows.
    """
    return {
        "int4": lambda spec, rows: int4_case(spec, rows, few_rows_linear, 16),
        "int4_repeated": lambda spec, rows: int4_case(
            spec, rows, partial(few_rows_linear, is_repeated=True), 16
        ),
        "int4_chunks_8": lambda spec, rows: int4_case(
            spec, rows, partial(few_rows_linear, most_tiles=8), 16
        ),
        "int4_wgmma": lambda spec, rows: int4_case(spec, rows, int4_linear),
    }


OPS: dict[str, Callable[[ModelSpec, int], KernelCase | None]] = {
    "rms_norm": norm_case,
    "add_rms_norm": add_norm_case,
    "qkv_to_cache": heads_case,
    "silu_mul": silu_case,
    "sigmoid_mul": sigmoid_case,
    "embedding": embedding_case,
    "argmax": lambda spec, rows: argmax_case(spec, rows, 0.0),
    "gumbel_argmax": lambda spec, rows: argmax_case(spec, rows, 0.6),
    "sample_rows": sample_case,
    "moe": moe_case,
    **(int4_cases() if HAS_GLUON else {}),
}


def microseconds(case: KernelCase, budget_ms: float = 30.0) -> float:
    """Of one call inside a graph: the least of five rounds, what else happens on the machine can
    only add.
    """
    size = case.bytes if case.copied_bytes is None else case.copied_bytes
    copies = int(min(MOST_COPIES, max(1, -(-COLD_BYTES // max(size, 1)))))
    calls = [case.make(i) for i in range(copies)]
    for call in calls[:2]:
        call()  # compiles
    repeats = -(-16 // copies)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls * repeats:
            call()

    gpu_seconds(graph.replay)
    rounds = max(5, min(50, int(budget_ms / max(1e3 * gpu_seconds(graph.replay), 1e-3))))
    return min(gpu_seconds(graph.replay) for _ in range(rounds)) * 1e6 / (copies * repeats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help=f"comma-separated, of {', '.join(OPS)}")
    parser.add_argument(
        "--shape", help=f"comma-separated, of {', '.join(CONFIGS)}", default=",".join(SHAPES)
    )
    parser.add_argument(
        "--rows", help="comma-separated numbers of rows", default=",".join(map(str, ROWS))
    )
    args = parser.parse_args()
    ops = args.only.split(",") if args.only else list(OPS)
    shapes = args.shape.split(",")
    for name, known in [
        *((op, list(OPS)) for op in ops),
        *((shape, list(CONFIGS)) for shape in shapes),
    ]:
        if name not in known:
            parser.error(f"there is no {name}; choose of {', '.join(known)}")
    if not torch.cuda.is_available():
        parser.error("this needs a CUDA device")
    rates = measure_rates(DEVICE, DTYPE)
    print(f"{torch.cuda.get_device_name()}, {DTYPE}: {rates}")
    print(
        f"{'op':14} {'shape':14} {'rows':>5} {'µs':>9} {'GB/s':>7} {'TFLOP/s':>8} {'of limit':>9}"
    )
    for op in ops:
        for shape in shapes:
            for rows in map(int, args.rows.split(",")):
                case = OPS[op](spec_of(shape), rows)
                if case is None:
                    continue
                time = microseconds(case)
                least = rates.seconds(Work(case.bytes, case.flops)) * 1e6
                figures = (
                    f"{time:9.2f} {case.bytes / time / 1e3:7.0f} {case.flops / time / 1e6:8.1f}"
                )
                print(f"{op:14} {shape:14} {rows:5} {figures} {least / time:9.0%}", flush=True)


if __name__ == "__main__":
    main()
