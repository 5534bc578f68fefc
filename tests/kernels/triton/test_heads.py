"""Norm, rope and cache writes in one Triton kernel: against the single steps in float64, and each
row alone.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.kernels.triton.support import (
    DEVICE,
    DTYPES,
    MARKS,
    ON_GPU,
    ROW_COUNTS,
    assert_close,
    assert_rows_alone,
    drawn,
    random,
)

from quire.kernels.reference import ReferenceKernels  # isort: skip

# isort: skip  (after the check for Triton)
from quire.kernels.ops import HeadNorms, HeadShape, LayerCache

from quire.backends.triton.heads import qkv_to_cache_  # isort: skip
from quire.backends.triton.shapes import is_wide  # isort: skip

pytestmark = MARKS
EPS, BLOCK_SIZE, MAX_POSITION = 1e-6, 16, 300
UNWRITTEN = 7.0


def make_cache(
    rows: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    shape = (rows // BLOCK_SIZE + 2, num_kv_heads, BLOCK_SIZE, head_dim)
    return torch.full(shape, UNWRITTEN, dtype=dtype, device=DEVICE), torch.full(
        shape, UNWRITTEN, dtype=dtype, device=DEVICE
    )


def make_angles(head_dim: int) -> Tensor:
    angles = random(MAX_POSITION, head_dim // 2, dtype=torch.float32, seed=9)
    return torch.cat((angles.cos(), angles.sin()), -1)


def truth_of(
    heads: Tensor, norm: Tensor | None, positions: Tensor, cos_sin: Tensor | None
) -> Tensor:
    """In float64, but rounded to the dtype where the single steps do."""
    wide = heads.double()
    if norm is not None:
        wide = (wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt()).to(heads.dtype).double()
        wide = (wide * norm.double()).to(heads.dtype).double()
    if cos_sin is None:
        return wide
    cos, sin = cos_sin[positions].double().unsqueeze(1).chunk(2, -1)
    first, second = wide.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def in_slots(side: Tensor, slots: Tensor) -> Tensor:
    return side[slots // BLOCK_SIZE, :, slots % BLOCK_SIZE]


@drawn
@given(
    st.sampled_from(DTYPES),
    st.sampled_from(
        [(4, 2, 64), (3, 3, 80), (9, 3, 96), (16, 8, 128), (14, 2, 64), (4, 1, 256), (20, 20, 64)]
    ),
    st.integers(1, 3),
    st.booleans(),
    st.booleans(),
)
def test_heads_are_those_of_the_single_steps(
    dtype: torch.dtype, shape: tuple[int, int, int], rows: int, normed: bool, rotated: bool
) -> None:
    num_heads, num_kv_heads, head_dim = shape
    qkv = random(rows, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype, seed=rows)
    query_norm, key_norm = (
        random(head_dim, dtype=dtype, seed=seed) if normed else None for seed in (1, 2)
    )
    norms = None if query_norm is None or key_norm is None else HeadNorms(query_norm, key_norm, EPS)
    positions = torch.arange(rows, device=DEVICE) * 50 + 3
    cos_sin = make_angles(head_dim) if rotated else None
    slots = torch.randperm(rows + BLOCK_SIZE, generator=torch.Generator().manual_seed(rows))[
        :rows
    ].to(DEVICE)
    keys, values = make_cache(rows, num_kv_heads, head_dim, dtype)
    query = qkv_to_cache_(
        qkv, HeadShape(*shape), norms, positions, cos_sin, LayerCache(keys, values), slots
    )
    q, k, v = qkv.view(rows, -1, head_dim).split((num_heads, num_kv_heads, num_kv_heads), 1)
    for got, heads, norm in ((query, q, query_norm), (in_slots(keys, slots), k, key_norm)):
        truth = truth_of(heads, norm, positions, cos_sin)
        # A number between two of the dtype may be rounded the other way, and the rotation mixes
        # pairs.
        first, second = truth.chunk(2, -1)
        assert_close(got, truth, roundings=3, size=torch.cat((first.hypot(second),) * 2, -1))
    assert torch.equal(in_slots(values, slots), v)
    owned = torch.zeros(keys.shape[0] * BLOCK_SIZE, dtype=torch.bool, device=DEVICE)
    owned[slots] = True
    for side in (keys, values):
        others = side.transpose(1, 2).reshape(len(owned), -1)[~owned]
        assert (others == UNWRITTEN).all()


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_keys_and_values_are_divided_by_their_scales(dtype: torch.dtype) -> None:
    """As the reference does it. (The interpreter rounds to FP8 wrongly: there they stay numbers.)"""
    qkv, slots = random(20, 8 * 64, dtype=dtype) * 30, torch.arange(20, device=DEVICE)
    sides = [
        torch.zeros(2, 2, 16, 64).to(torch.float8_e4m3fn if ON_GPU else torch.float32) for _ in "kv"
    ]
    caches = [
        LayerCache(*(side.to(device) for side in sides), fp8_scales=(0.37, 1.9))
        for device in (DEVICE, "cpu")
    ]
    query = qkv_to_cache_(qkv, HeadShape(4, 2, 64), None, slots, None, caches[0], slots)
    _, keys, values = qkv.cpu().view(20, 8, 64).split((4, 2, 2), 1)
    if ON_GPU:
        ReferenceKernels().write_kv_(keys, values, caches[1], slots.cpu())
    else:
        ReferenceKernels().write_kv_(
            keys.float() / 0.37, values.float() / 1.9, caches[1], slots.cpu()
        )
    assert torch.equal(query, qkv.view(20, 8, 64)[:, :4])
    assert torch.equal(caches[0].keys.float().cpu(), caches[1].keys.float())
    assert torch.equal(caches[0].values.float().cpu(), caches[1].values.float())


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_is_alone(dtype: torch.dtype) -> None:
    rows, num_heads, num_kv_heads, head_dim = max(ROW_COUNTS), 4, 2, 64
    norms = HeadNorms(*random(2, head_dim, dtype=dtype, seed=4), EPS)
    cos_sin = make_angles(head_dim)

    def rotate(qkv: Tensor, positions: Tensor, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        keys, values = make_cache(rows, num_kv_heads, head_dim, dtype)
        shape, cache = HeadShape(num_heads, num_kv_heads, head_dim), LayerCache(keys, values)
        query = qkv_to_cache_(qkv, shape, norms, positions, cos_sin, cache, slots)
        return query, in_slots(keys, slots), in_slots(values, slots)

    qkv = random(rows, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype)
    positions = torch.arange(rows, device=DEVICE) % MAX_POSITION
    slots = torch.randperm(rows, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    assert_rows_alone(rotate, [qkv, positions, slots])


def test_padding_rows_write_nothing_and_caches_may_be_views() -> None:
    num_heads, num_kv_heads, head_dim = 4, 2, 64
    qkv = random(3, (num_heads + 2 * num_kv_heads) * head_dim, dtype=torch.float32)
    both = torch.full(
        (2, 3, num_kv_heads, BLOCK_SIZE, head_dim), UNWRITTEN, device=DEVICE
    ).transpose(0, 1)
    slots = torch.tensor([-1, 20, -1], device=DEVICE)
    shape, cache = HeadShape(num_heads, num_kv_heads, head_dim), LayerCache(both[:, 0], both[:, 1])
    qkv_to_cache_(qkv, shape, None, slots, None, cache, slots)
    heads = qkv.view(3, -1, head_dim)
    assert torch.equal(both[1, 0, :, 4], heads[1, num_heads : num_heads + num_kv_heads])
    assert torch.equal(both[1, 1, :, 4], heads[1, num_heads + num_kv_heads :])
    assert (both != UNWRITTEN).sum() == 2 * num_kv_heads * head_dim


def test_odd_arguments_are_refused() -> None:
    qkv = random(2, 4 * 64, dtype=torch.float32)
    keys, values = make_cache(2, 1, 64, torch.float32)
    slots = torch.tensor([0, 1], device=DEVICE)
    with pytest.raises(ValueError, match="one layout"):
        qkv_to_cache_(
            qkv, HeadShape(2, 1, 64), None, slots, None, LayerCache(keys, values[:, :, ::2]), slots
        )


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["offset", "after rope", "whole"])
def test_other_norms_are_those_of_the_reference(kind: str, dtype: torch.dtype) -> None:
    shape, rows = HeadShape(4, 2, 64), 5
    sizes = (4 * 64, 2 * 64) if kind == "whole" else (64, 64)
    query_norm, key_norm = (
        random(size, dtype=dtype, seed=size + i) for i, size in enumerate(sizes)
    )
    norms = HeadNorms(query_norm, key_norm, EPS, float(kind == "offset"), kind == "after rope")
    qkv = random(rows, 8 * 64, dtype=dtype, seed=1)
    slots = torch.arange(3, 3 + rows, device=DEVICE)
    found = []
    for method in (qkv_to_cache_, ReferenceKernels().qkv_to_cache_):
        keys, values = make_cache(rows, 2, 64, dtype)
        query = method(qkv, shape, norms, slots, make_angles(64), LayerCache(keys, values), slots)
        found.append((query, in_slots(keys, slots), in_slots(values, slots)))
    for got, expected in zip(*found, strict=True):
        assert_close(got, expected.double(), roundings=3, size=expected.double().abs() + 1)


@pytest.mark.slow
def test_heads_have_the_same_bits_however_many_there_are() -> None:
    """As a rank has some of them only."""
    rows, num_heads, num_kv_heads, head_dim = ROW_COUNTS[-1], 16, 8, 128
    dtype = DTYPES[-1]
    qkv = random(rows, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype).view(
        rows, -1, head_dim
    )
    norms = HeadNorms(
        random(head_dim, dtype=dtype, seed=1), random(head_dim, dtype=dtype, seed=2), EPS
    )
    positions, slots = (
        torch.arange(rows, device=DEVICE) % MAX_POSITION,
        torch.arange(rows, device=DEVICE),
    )
    found = []
    for count in (1, 2, 4, 8):
        sides = [
            side.chunk(count, 1) for side in qkv.split((num_heads, num_kv_heads, num_kv_heads), 1)
        ]
        outputs = []
        for own in zip(*sides, strict=True):
            shape = HeadShape(num_heads // count, num_kv_heads // count, head_dim)
            keys, values = make_cache(rows, shape.num_kv_heads, head_dim, dtype)
            packed = torch.cat(own, 1).flatten(1)
            query = qkv_to_cache_(
                packed,
                shape,
                norms,
                positions,
                make_angles(head_dim),
                LayerCache(keys, values),
                slots,
            )
            outputs.append((query, in_slots(keys, slots)))
        found.append([torch.cat(side, 1) for side in zip(*outputs, strict=True)])
    for whole, *divided in zip(*found, strict=True):
        assert all(torch.equal(whole, parts) for parts in divided)


def test_places_of_blocks_that_lie_far_apart_need_64_bits() -> None:
    """In caches of layers of several kinds a layer's blocks are as far apart as the largest."""
    blocks = torch.empty(2**33, dtype=torch.bfloat16, device="meta").as_strided(
        (3000, 16, 2, 128), (2**20, 256, 128, 1)
    )
    assert blocks.numel() < 2**31
    assert is_wide(blocks)
    assert is_wide(blocks[:2048])
    assert not is_wide(blocks[:2047])
