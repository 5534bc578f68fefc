"""Keys and values in FP8: what is stored, and what attention makes of it, by the definition of
both.
"""

from __future__ import annotations

import pytest
import torch

from quire.backends.select import device_of
from quire.errors import DeviceError
from quire.kernels.ops import AttentionSpec, HeadShape, LayerCache, PagedBatch
from quire.kernels.reference import ReferenceKernels
from quire.runner.dtypes import pick_cache_dtype

HEADS = HeadShape(4, 2, 32)
LENGTH = 40


def cache_of(dtype: torch.dtype, scales: tuple[float, float] = (1.0, 1.0)) -> LayerCache:
    return LayerCache(*(torch.zeros(4, 2, 16, 32).to(dtype) for _ in range(2)), fp8_scales=scales)


@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.25, 3.7)])
def test_attention_is_that_of_the_rounded_keys_and_values(scales: tuple[float, float]) -> None:
    kernels = ReferenceKernels()
    torch.manual_seed(0)
    keys, values, query = (
        torch.randn(LENGTH, 2, 32),
        torch.randn(LENGTH, 2, 32),
        torch.randn(LENGTH, 4, 32),
    )
    keys[3, 0, :2] = torch.tensor([1000.0, -1000.0])  # more than FP8 has
    rounded = [
        (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
        for x, scale in zip((keys, values), scales, strict=True)
    ]
    batch = PagedBatch(
        query_start=torch.tensor([0, LENGTH], dtype=torch.int32),
        context_lens=torch.tensor([LENGTH], dtype=torch.int32),
        block_tables=torch.tensor([[2, 1, 3]], dtype=torch.int32),
        table_rows=torch.zeros(1, dtype=torch.int32),
        slot_mapping=torch.tensor([[2, 1, 3][i // 16] * 16 + i % 16 for i in range(LENGTH)]),
        max_context_len=LENGTH,
    )
    found = []
    for dtype, (k, v) in ((torch.float8_e4m3fn, (keys, values)), (torch.float32, rounded)):
        cache = cache_of(dtype, scales if dtype == torch.float8_e4m3fn else (1.0, 1.0))
        kernels.write_kv_(k, v, cache, batch.slot_mapping)
        found.append(kernels.attention(query, cache, batch, AttentionSpec(HEADS, 32**-0.5)))
    assert torch.equal(*found)


def test_what_is_no_number_stays_none() -> None:
    cache = cache_of(torch.float8_e4m3fn)
    bad = torch.full((1, 2, 32), float("nan"))
    ReferenceKernels().write_kv_(bad, bad, cache, torch.tensor([16]))
    assert cache.keys[1, :, 0].float().isnan().all()
    assert not cache.keys[1, :, 1:].float().isnan().any()


def test_a_gpu_without_fp8_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(
        DeviceError,
        match=r"kv_cache_dtype fp8 is for CPUs and for NVIDIA GPUs from Ada .* Use auto",
    ):
        pick_cache_dtype("fp8", torch.bfloat16, device_of(torch.device("cuda")))
    assert (
        pick_cache_dtype("fp8", torch.float32, device_of(torch.device("cpu")))
        == torch.float8_e4m3fn
    )
