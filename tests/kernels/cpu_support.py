"""What the tests of the C++ kernels share."""

from __future__ import annotations

import ctypes
import itertools
import platform
from dataclasses import replace
from unittest import mock

import torch
from hypothesis import settings
from torch import Tensor

from quire.backends.cpu import build
from quire.backends.cpu.kernels import CpuKernels
from quire.kernels.ops import LayerCache, PagedBatch
from quire.kernels.reference import ReferenceKernels
from tests.long_runs import IS_LONG

REFERENCE = ReferenceKernels()
# All ways through the code this machine can run: its best one, plain vectors, and those of lesser
# CPUs.
VARIANTS: dict[str, tuple[str, bool]] = {"best": ("native", True), "vectors": ("native", False)}
if platform.machine() == "x86_64":
    VARIANTS |= {"avx2": ("x86-64-v3", False), "sse": ("x86-64", False)}
elif platform.machine() == "aarch64":
    VARIANTS |= {"no dot products": ("armv8-a", False)}
NAN = float("nan")
FP8_SCALES = (0.037, 1.9)


def is_best_again(variant: str) -> bool:
    """Whether a variant runs exactly what "best" does: without AMX, plain vectors are the best
    there is.
    """
    return variant == "vectors" and not variant_kernels("best").has_amx


def variant_kernels(variant: str) -> CpuKernels:
    architecture, use_amx = VARIANTS[variant]
    load_level(architecture)
    return CpuKernels(architecture, use_amx)


def load_level(architecture: str) -> ctypes.CDLL:
    """The library for what users have is built as theirs, those for lesser levels in the short form
    with less optimisation: in half the time, for the same bits.
    """
    flags = build.FLAGS if IS_LONG or architecture == "native" else (*build.FLAGS, "-O1")
    with mock.patch.object(build, "FLAGS", flags):
        return build.load_library(architecture)  # which keeps it


few_examples = settings(deadline=None, max_examples=12)


def assert_close(got: Tensor, truth: Tensor, reference: Tensor) -> None:
    """float32: 1e-5 of the truth's magnitude. bfloat16: hardly farther from it than the reference
    is.
    """
    magnitude = truth.abs().max().item() + 1e-6
    error = (got.double() - truth).abs().max().item()
    if got.dtype == torch.float32:
        assert error <= 1e-5 * magnitude
    else:
        reference_error = (reference.double() - truth).abs().max().item()
        assert error <= 1.5 * reference_error + magnitude * 2**-9


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def make_cache(
    contexts: list[tuple[Tensor, Tensor]],
    block_size: int,
    seed: int,
    unowned: float = NAN,
    stored: torch.dtype | None = None,
) -> tuple[LayerCache, Tensor]:
    """Keys and values [tokens, kv_heads, head_dim] of some sequences, in blocks placed at random;
    every slot that no token owns holds `unowned`, or has it for its scale. They are stored as they
    are, or in 8 bits.
    """
    counts = [-(-keys.shape[0] // block_size) for keys, _ in contexts]
    num_blocks = sum(counts) + 3
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed)).int()
    _, kv_heads, head_dim = contexts[0][0].shape
    shape = (num_blocks, kv_heads, block_size)
    if stored == torch.int8:
        bytes_ = [torch.full((*shape, head_dim), 77, dtype=torch.int8) for _ in "kv"]
        cache = LayerCache(*bytes_, *(torch.full(shape, unowned) for _ in "kv"))
    else:
        kind = stored or contexts[0][0].dtype
        cache = LayerCache(*(torch.full((*shape, head_dim), unowned).to(kind) for _ in "kv"))
        cache = replace(cache, fp8_scales=(1.0, 1.0) if stored is None else FP8_SCALES)
    tables = torch.full((len(contexts), max(counts)), int(order[-1]), dtype=torch.int32)
    taken = 0
    for table, count, (keys, values) in zip(tables, counts, contexts, strict=True):
        table[:count] = order[taken : taken + count]
        taken += count
        tokens = torch.arange(keys.shape[0])
        slots = table[tokens // block_size].long() * block_size + tokens % block_size
        REFERENCE.write_kv_(keys, values, cache, slots)
    return cache, tables


def by_dimension(cache: LayerCache) -> LayerCache:
    """The same numbers with keys in the other order in memory."""
    return replace(cache, keys=cache.keys.mT.contiguous().mT)


def make_batch(tables: Tensor, context_lens: list[int], query_lens: list[int]) -> PagedBatch:
    starts = [0, *itertools.accumulate(query_lens)]
    return PagedBatch(
        torch.tensor(starts, dtype=torch.int32),
        torch.tensor(context_lens, dtype=torch.int32),
        tables,
        torch.arange(len(tables), dtype=torch.int32),
        torch.zeros(starts[-1], dtype=torch.int64),
        max(query_lens),
        max(context_lens),
    )
