"""From the packed projections to what attention reads: norm and rotate heads, store keys and
values.

One kernel instead of six: each number of query, key and value is read once and written once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.backends.triton.direct_launch import jit
from quire.backends.triton.launch import LAUNCH, USE_PDL, begin
from quire.backends.triton.rowwise import rms_norm
from quire.backends.triton.shapes import as_rows, cdiv, next_power_of_2, num_warps, row_stride
from quire.kernels.ops import HeadNorms, HeadShape, LayerCache

_HEADS = 8
"""Heads per program: enough loads at once, and several programs even for a single row. One number
for all models: the order in which a norm adds up depends on it, and a rank that has some of the
heads must get the same bits.
"""


@triton.jit
def _rotated(
    first,
    second,
    norm_first,
    norm_second,
    cos,
    sin,
    eps,
    offset,
    D: tl.constexpr,
    NORM: tl.constexpr,
    OFFSET: tl.constexpr,
    AFTER: tl.constexpr,
    ROPE: tl.constexpr,
):
    """Both halves of heads [heads, half], normed and rotated (the other way round if AFTER),
    rounded to the dtype after each of the two, as separate kernels would do.
    """
    dtype: tl.constexpr = first.dtype
    first, second = first.to(tl.float32), second.to(tl.float32)
    if NORM and not AFTER:
        first, second = _normed(
            first, second, norm_first, norm_second, eps, offset, D, OFFSET, dtype
        )
    if ROPE:
        first, second = first * cos - second * sin, second * cos + first * sin
    if NORM and AFTER:
        first, second = first.to(dtype).to(tl.float32), second.to(dtype).to(tl.float32)
        first, second = _normed(
            first, second, norm_first, norm_second, eps, offset, D, OFFSET, dtype
        )
    return first.to(dtype), second.to(dtype)


@triton.jit
def _normed(
    first,
    second,
    norm_first,
    norm_second,
    eps,
    offset,
    D: tl.constexpr,
    OFFSET: tl.constexpr,
    dtype: tl.constexpr,
):
    mean = tl.sum(first * first + second * second, 1, keep_dims=True) / D
    scale = tl.rsqrt(mean + eps)
    first, second = first * scale, second * scale
    norm_first, norm_second = norm_first.to(tl.float32), norm_second.to(tl.float32)
    if OFFSET:
        norm_first, norm_second = norm_first + offset, norm_second + offset
    else:
        first, second = first.to(dtype).to(tl.float32), second.to(dtype).to(tl.float32)
    return (first * norm_first).to(dtype).to(tl.float32), (second * norm_second).to(dtype).to(
        tl.float32
    )


@triton.jit
def _divided(x, scale, SCALED: tl.constexpr):
    return tl.div_rn(x.to(tl.float32), scale) if SCALED else x


@jit(do_not_specialize_on_alignment=["positions", "slots"])
def _qkv_to_cache_kernel(
    qkv,
    query_norm,
    key_norm,
    positions,
    cos_sin,
    slots,
    query,
    keys,
    values,
    qkv_stride,
    block_stride,
    head_stride,
    token_stride,
    eps,
    offset,
    key_scale,
    value_scale,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NORM: tl.constexpr,
    OFFSET: tl.constexpr,
    AFTER: tl.constexpr,
    ROPE: tl.constexpr,
    SCALED: tl.constexpr,
    PDL: tl.constexpr,
):
    """HEADS heads of one row: of the query, the key or the value, as the second grid index says."""
    QUERY_TILES: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    KEY_TILES: tl.constexpr = (NUM_KV_HEADS + HEADS - 1) // HEADS
    tile = tl.program_id(1)
    is_query = tile < QUERY_TILES
    is_value = tile >= QUERY_TILES + KEY_TILES
    column = tl.arange(0, HALF)[None, :]
    within = column < D // 2
    if NORM:
        norm = query_norm if is_query else key_norm
        norm_first = tl.load(norm + column, mask=within, other=0.0)  # constants: before the wait
        norm_second = tl.load(norm + D // 2 + column, mask=within, other=0.0)
    else:
        norm_first, norm_second = 0.0, 0.0
    begin(PDL)

    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    tiles_before = 0 if is_query else QUERY_TILES + KEY_TILES if is_value else QUERY_TILES
    heads_before = 0 if is_query else NUM_HEADS + NUM_KV_HEADS if is_value else NUM_HEADS
    head = (tile - tiles_before) * HEADS + tl.arange(0, HEADS)[:, None]
    exists = (head < (NUM_HEADS if is_query else NUM_KV_HEADS)) & within
    source = qkv + row * qkv_stride + (heads_before + head) * D + column
    first = tl.load(source, mask=exists, other=0.0)
    second = tl.load(source + D // 2, mask=exists, other=0.0)

    if not is_value:
        if ROPE:
            angle = cos_sin + tl.load(positions + row).to(tl.int64) * D + column
            cos = tl.load(angle, mask=within, other=0.0)
            sin = tl.load(angle + D // 2, mask=within, other=0.0)
        else:
            cos, sin = 0.0, 0.0
        first, second = _rotated(
            first,
            second,
            norm_first,
            norm_second,
            cos,
            sin,
            eps,
            offset,
            D,
            NORM,
            OFFSET,
            AFTER,
            ROPE,
        )

    place = (
        (slot // BLOCK_SIZE) * block_stride
        + (slot % BLOCK_SIZE) * token_stride
        + head * head_stride
        + column
    )
    owned = exists & (slot >= 0)
    if is_query:
        target = query + (row * NUM_HEADS + head) * D + column
        tl.store(target, first, mask=exists)
        tl.store(target + D // 2, second, mask=exists)
    elif is_value:
        tl.store(values + place, _divided(first, value_scale, SCALED), mask=owned)
        tl.store(values + place + D // 2, _divided(second, value_scale, SCALED), mask=owned)
    else:
        tl.store(keys + place, _divided(first, key_scale, SCALED), mask=owned)
        tl.store(keys + place + D // 2, _divided(second, key_scale, SCALED), mask=owned)


def qkv_to_cache_(
    qkv: Tensor,
    shape: HeadShape,
    norms: HeadNorms | None,
    positions: Tensor,
    cos_sin: Tensor | None,
    cache: LayerCache,
    slot_mapping: Tensor,
) -> Tensor:
    """`Kernels.qkv_to_cache_`. A row whose slot is negative is written to no cache."""
    keys, values = cache.keys, cache.values
    if keys.stride() != values.stride() or keys.stride(3) != 1:
        raise ValueError(
            f"Keys and values need one layout, heads in one piece: {keys.stride()}, {values.stride()}."
        )
    source = as_rows(qkv)
    rows = source.shape[0]
    num_heads, num_kv_heads, head_dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
    # one norm over all heads: they aren't in one program
    if norms is not None and len(norms.query) != head_dim:
        source, norms = _normed_whole(source, shape, norms), None
    query = torch.empty(rows, num_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    if rows == 0:
        return query
    half = next_power_of_2(head_dim // 2)
    tiles = cdiv(num_heads, _HEADS) + 2 * cdiv(num_kv_heads, _HEADS)
    # Where there is no rope or norm, any tensor is passed: the kernel does not read it.
    angles = qkv if cos_sin is None else cos_sin
    query_norm, key_norm, eps, offset, after = (
        (angles, angles, 0.0, 0.0, False) if norms is None else norms
    )
    key_scale, value_scale = cache.fp8_scales
    _qkv_to_cache_kernel[(rows, tiles)](
        qkv=source,
        query_norm=query_norm,
        key_norm=key_norm,
        positions=slot_mapping if cos_sin is None else positions,
        cos_sin=angles,
        slots=slot_mapping,
        query=query,
        keys=keys,
        values=values,
        qkv_stride=row_stride(source),
        block_stride=keys.stride(0),
        head_stride=keys.stride(1),
        token_stride=keys.stride(2),
        eps=eps,
        offset=offset,
        key_scale=key_scale,
        value_scale=value_scale,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        D=head_dim,
        HALF=half,
        HEADS=_HEADS,
        BLOCK_SIZE=keys.shape[2],
        NORM=norms is not None,
        OFFSET=offset != 0,
        AFTER=after,
        ROPE=cos_sin is not None,
        SCALED=cache.fp8_scales != (1.0, 1.0),
        PDL=USE_PDL,
        num_warps=num_warps(2 * _HEADS * half),
        **LAUNCH,
    )
    return query


def _normed_whole(qkv: Tensor, shape: HeadShape, norms: HeadNorms) -> Tensor:
    """The projections with all heads of a query normed together, and all of a key, before rope."""
    if norms.after_rope:
        raise ValueError("A norm over all heads comes before rope.")
    query, key = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    return torch.cat(
        (
            rms_norm(qkv[:, :query], norms.query, norms.eps, norms.offset),
            rms_norm(qkv[:, query : query + key], norms.key, norms.eps, norms.offset),
            qkv[:, query + key :],
        ),
        1,
    )
