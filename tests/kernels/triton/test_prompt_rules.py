"""Which kernel computes the attention of prompts, on a Hopper GPU that need not be here: kernels are
only noted and not run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quire.backends.triton import attention_kernels as module
from quire.backends.triton import prompt_rules
from quire.backends.triton.kernels import TritonKernels
from quire.kernels.ops import AttentionSpec, HeadShape, LayerCache, PagedBatch

META = torch.device("meta")
SPEC = AttentionSpec(HeadShape(8, 2, 128), 0.1)

Attend = Callable[..., str]


@pytest.fixture
def tested(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.device, torch.dtype, int]]:
    """What was asked about exactness so far; the answer is yes, but for heads of 256 in float16."""
    asked: list[tuple[torch.device, torch.dtype, int]] = []

    def are_exact(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
        asked.append((device, dtype, head_dim))
        return (dtype, head_dim) != (torch.float16, 256)

    monkeypatch.setattr(module, "prompts_are_exact", are_exact)
    return asked


@pytest.fixture
def attend(monkeypatch: pytest.MonkeyPatch, tested: list[Any]) -> Attend:
    """Attention of a prompt of 40 tokens: returns the kernel that was taken."""
    taken: list[str] = []
    hopper = SimpleNamespace(prompt_attention=lambda *_: taken.append("hopper"))
    monkeypatch.setattr(module, "prompt_attention", hopper, raising=False)
    for_all = SimpleNamespace(prefill_attention=lambda *_: taken.append("all"))
    monkeypatch.setattr(module, "paged_attention", for_all)
    monkeypatch.setattr(prompt_rules, "is_hopper", lambda device: True)

    def attended(
        spec: AttentionSpec,
        dtype: torch.dtype = torch.bfloat16,
        cache_dtype: torch.dtype | None = None,
        block_size: int = 16,
        has_sinks: bool = False,
        has_slopes: bool = False,
        is_contiguous: bool = True,
    ) -> str:
        heads = spec.heads
        per_head = torch.empty(heads.num_heads, device=META)
        blocks = 4, heads.num_kv_heads, block_size, heads.head_dim
        side = torch.empty(2, *blocks, dtype=cache_dtype or dtype, device=META)[0]
        if not is_contiguous:
            side = side.transpose(1, 2)
        numbers = torch.zeros(1, dtype=torch.int32, device=META)
        batch = PagedBatch(
            query_start=numbers,
            context_lens=numbers,
            block_tables=numbers[None],
            table_rows=numbers,
            slot_mapping=numbers,
            max_context_len=40,
            work={"prefill": torch.zeros(3, 8, dtype=torch.int32, device=META)},
        )
        taken.clear()
        TritonKernels(dtype).attention(
            torch.empty(40, heads.num_heads, heads.head_dim, dtype=dtype, device=META),
            LayerCache(side, side),
            batch,
            spec,
            per_head if has_sinks else None,
            per_head if has_slopes else None,
        )
        (kernel,) = taken
        return kernel

    return attended


@pytest.mark.parametrize(
    ("head_dim", "kernel"),
    [(64, "hopper"), (80, "all"), (96, "all"), (128, "hopper"), (192, "all"), (256, "hopper")],
)
def test_head_sizes(attend: Attend, head_dim: int, kernel: str) -> None:
    for num_heads, num_kv_heads in ((8, 2), (14, 2), (71, 1), (4, 4)):
        heads = HeadShape(num_heads, num_kv_heads, head_dim)
        assert attend(replace(SPEC, heads=heads)) == kernel


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_windows_of_few_keys_stay_with_the_kernel_for_all(attend: Attend, head_dim: int) -> None:
    spec = replace(SPEC, heads=HeadShape(8, 2, head_dim))
    kernels = {size: attend(replace(spec, sliding_window=size)) for size in (128, 511, 512, 4096)}
    assert kernels == {128: "all", 511: "all", 512: "hopper", 4096: "hopper"}


def test_number_types(attend: Attend) -> None:
    assert attend(SPEC, torch.float16) == "hopper"
    assert attend(SPEC, torch.float32) == "all"
    assert attend(SPEC, cache_dtype=torch.float8_e4m3fn) == "all"


def test_caps_and_slopes_stay_but_not_sinks(attend: Attend) -> None:
    assert attend(replace(SPEC, soft_cap=30.0)) == "all"
    assert attend(SPEC, has_slopes=True) == "all"
    assert attend(SPEC, has_sinks=True) == "hopper"


def test_caches_that_cannot_be_copied_by_blocks_stay(attend: Attend) -> None:
    sizes = 8, 16, 32, 64, 128
    kernels = [attend(SPEC, block_size=size) for size in sizes]
    assert kernels == ["all", "hopper", "hopper", "hopper", "all"]
    assert attend(SPEC, is_contiguous=False) == "all"


def test_other_devices_stay(attend: Attend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_rules, "is_hopper", lambda device: False)
    assert attend(SPEC) == "all"


def test_a_cpu_is_not_hopper() -> None:
    assert not prompt_rules.is_hopper(torch.device("cpu"))


def test_a_head_size_that_is_not_exact_here_stays(attend: Attend) -> None:
    spec = replace(SPEC, heads=HeadShape(8, 2, 256))
    assert attend(spec, torch.float16) == "all"
    assert attend(spec, torch.bfloat16) == "hopper"
    assert attend(SPEC, torch.float16) == "hopper"


def test_a_head_size_is_tested_once_and_before_the_first_prompt(
    attend: Attend, tested: list[tuple[torch.device, torch.dtype, int]]
) -> None:
    """A test fails while kernels are only compiled, or captured."""
    kernels = TritonKernels(torch.float16)
    for head_dim in (64, 80, 256):
        kernels.decode_lists(1, 1, 1, HeadShape(8, 2, head_dim))
    before = set(tested)
    assert [asked[1:] for asked in tested] == [(torch.float16, 64), (torch.float16, 256)]
    assert attend(replace(SPEC, heads=HeadShape(8, 2, 64)), torch.float16) == "hopper"
    assert set(tested) == before
