"""What the absorbed form of latent attention costs prompts on a CPU, against keys and values that
are made from the latents.

    python -m quire.tools.bench.engine.latent [--shape glm-4.7-flash] [--lengths 256 1024] [--dtype bfloat16]

One layer's attention for a prompt in one piece, from queries to what the output's product takes, with
random numbers. The expanded form multiplies the latents with the same matrices and attends to what
comes out, with as many key heads as query heads; values are as long as keys there, which our kernel
wants. Processor seconds of one thread, the least of some runs in turn, so that whatever else the
machine does counts little.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from quire.backends.cpu.kernels import CpuKernels
from quire.kernels.latent import LatentSpec, latent_heads
from quire.kernels.layer_state import CacheMemory
from quire.kernels.ops import AttentionSpec, HeadShape, LayerCache, PagedBatch
from quire.kernels.weights import Weight
from quire.tools.bench.machine import report_facts

SHAPES = {
    "glm-4.7-flash": LatentSpec(
        latent_heads(20, 512, 64), 256**-0.5, nope_dim=192, rope_dim=64, value_dim=256
    ),
    "deepseek-v2-lite": LatentSpec(
        latent_heads(16, 512, 64), 192**-0.5, nope_dim=128, rope_dim=64, value_dim=128
    ),
}
_BLOCK = 16


def prompt_batch(length: int) -> PagedBatch:
    """One sequence, whose blocks lie one after the other."""
    return PagedBatch(
        query_start=torch.tensor([0, length], dtype=torch.int32),
        context_lens=torch.tensor([length], dtype=torch.int32),
        block_tables=torch.arange(-(-length // _BLOCK), dtype=torch.int32)[None],
        table_rows=torch.zeros(1, dtype=torch.int32),
        slot_mapping=torch.arange(length),
        max_context_len=length,
    )


def both_forms(
    spec: LatentSpec, length: int, dtype: torch.dtype, kernels: CpuKernels
) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    """The absorbed and the expanded form of the same prompt."""
    heads, size = spec.heads.num_heads, spec.query_dim

    def made(*shape: int) -> Tensor:
        return torch.randn(*shape).to(dtype)

    def packed(*shape: int) -> Weight:
        return kernels.pack(Weight.dense(made(*shape)))

    batch, blocks = prompt_batch(length), -(-length // _BLOCK)
    key_up = packed(heads, spec.rank, spec.nope_dim)
    value_up = packed(heads, spec.value_dim, spec.rank)
    latents = made(length, 1, spec.heads.head_dim)
    cache = spec.layer_cache(CacheMemory([made(blocks, 1, _BLOCK, spec.heads.head_dim)], 0))
    query, rotated = made(length, heads, spec.nope_dim), made(length, heads, spec.rope_dim)

    def absorbed() -> Tensor:
        whole = torch.cat((kernels.linear_heads(query, key_up), rotated), 2)
        return kernels.linear_heads(kernels.attention(whole, cache, batch, spec), value_up)

    plain = AttentionSpec(HeadShape(heads, heads, size), spec.scale)
    shape = (blocks, heads, _BLOCK, size)
    keys, values = made(*shape), made(*shape)
    if kernels.keys_by_dimension(dtype, _BLOCK):
        keys = keys.mT.contiguous().mT
    wide = LayerCache(keys, values)
    up = packed(heads * (spec.nope_dim + spec.value_dim), spec.rank)
    whole_query = torch.cat((query, rotated), 2)

    def expanded() -> Tensor:
        made_of = kernels.linear(latents[:, 0, : spec.rank], up).view(length, heads, -1)
        own_keys, own_values = made_of.split_with_sizes((spec.nope_dim, spec.value_dim), 2)
        tails = latents[..., spec.rank :].expand(-1, heads, -1)
        own_values = torch.nn.functional.pad(own_values, (0, size - spec.value_dim))
        kernels.write_kv_(torch.cat((own_keys, tails), 2), own_values, wide, batch.slot_mapping)
        return kernels.attention(whole_query, wide, batch, plain)

    return absorbed, expanded


def least_seconds(forms: Sequence[Callable[[], Tensor]], runs: int) -> list[float]:
    found = [float("inf")] * len(forms)
    for _ in range(runs):
        for i, form in enumerate(forms):
            start = time.process_time()
            form()
            found[i] = min(found[i], time.process_time() - start)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else "")
    parser.add_argument("--shape", choices=SHAPES, default="glm-4.7-flash")
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 1024, 2048])
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name, value in report_facts(torch.device("cpu"), "latent").items():
        print(f"{name}: {value}")
    spec, dtype, kernels = SHAPES[options.shape], getattr(torch, options.dtype), CpuKernels()
    print("tokens  absorbed, ms  expanded, ms  ratio")
    for length in options.lengths:
        forms = both_forms(spec, length, dtype, kernels)
        absorbed, expanded = least_seconds(forms, options.runs)
        print(
            f"{length:6}  {absorbed * 1e3:12.1f}  {expanded * 1e3:12.1f}  {absorbed / expanded:5.2f}"
        )


if __name__ == "__main__":
    main()
