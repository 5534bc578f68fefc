"""What stands around latent attention: products with a matrix for each head, and from projections
to queries and the cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.backends.triton import cublas
from quire.backends.triton.direct_launch import jit
from quire.backends.triton.heads import _divided, _rotated
from quire.backends.triton.launch import (
    LAUNCH,
    ROUND_ALWAYS,
    USE_PDL,
    begin,
    let_next_start,
    wait_for_previous,
)
from quire.backends.triton.linear import Tile, room_for
from quire.backends.triton.shapes import as_rows, cdiv, next_power_of_2, row_stride
from quire.backends.triton.tile_product import prefetch
from quire.kernels.ops import LatentNorm, LayerCache
from quire.kernels.weights import Weight

_HEADS, _MANY_HEADS = 4, 32
"""Heads of a query that one program rotates, of few rows and of many."""
_MANY_QUERIES = Tile(128, 64, 64, 3, 4)
"""Of queries of more than 128 rows; bits don't depend on it (docs/performance.md, attempt 72)."""
MOST_JOINED = 256
"""Rows up to which products and what else a query needs are one launch: both have 4 warps there, and
with more of them norms would add in another order. More rows are multiplied by cuBLAS.
"""


@triton.jit
def _head_product(
    x,
    weight,
    out,
    head,
    output_tile,
    row_tile,
    M,
    x_stride,
    x_head_stride,
    OUT_STRIDE: tl.constexpr,
    OUT_HEAD_STRIDE: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """`linear._linear_kernel` for one head, whose rows lie x_stride apart: the same order of sums. The
    head's weights are asked for in the L2 cache before the wait.
    """
    outputs = output_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    if PDL:
        LINES: tl.constexpr = (K * weight.dtype.element_ty.primitive_bitwidth + 1023) // 1024
        prefetch(weight, head * N + outputs, outputs < N, K, triton.next_power_of_2(LINES))
    wait_for_previous(PDL)
    rows = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    inner = tl.arange(0, BLOCK_K)
    weights = weight + head * N * K + outputs[:, None] * K + inner[None, :]
    # rows past the last are computed as copies of it and not stored
    first = x + head * x_head_stride
    inputs = first + tl.minimum(rows, M - 1)[:, None].to(tl.int64) * x_stride + inner[None, :]
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    EVEN: tl.constexpr = N % BLOCK_N == 0 and K % BLOCK_K == 0
    for k in range(0, K, BLOCK_K):
        within = None if EVEN else inner[None, :] < K - k
        mask = None if EVEN else (outputs[:, None] < N) & within
        other = None if EVEN else 0.0
        tile = tl.trans(tl.load(inputs, mask=within, other=other))
        total = tl.dot(
            tl.load(weights, mask=mask, other=other), tile, total, input_precision="ieee"
        )
        inputs += BLOCK_K
        weights += BLOCK_K
    target = out + rows[None, :].to(tl.int64) * OUT_STRIDE + head * OUT_HEAD_STRIDE
    stored = (rows[None, :] < M) & (outputs < N)[:, None]
    tl.store(target + outputs[:, None], total.to(out.dtype.element_ty), mask=stored)


@jit(do_not_specialize=["M"])
def _heads_kernel(
    x,
    weight,
    out,
    M,
    x_stride,
    x_head_stride,
    OUT_STRIDE: tl.constexpr,
    OUT_HEAD_STRIDE: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    _head_product(
        x,
        weight,
        out,
        tl.program_id(2).to(tl.int64),
        tl.program_id(0),
        tl.program_id(1),
        M,
        x_stride,
        x_head_stride,
        OUT_STRIDE,
        OUT_HEAD_STRIDE,
        N,
        K,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
        PDL,
    )


def linear_heads(x: Tensor, weight: Weight, has_exact_cublas: bool = False) -> Tensor:
    """`Kernels.linear_heads`: all heads in one launch; of many rows by cuBLAS, where that has the same
    bits.
    """
    rows, heads, _ = x.shape
    size = weight.shape[1]
    out = room_for(x, heads * size).view(rows, heads, size)
    _multiply_heads(x, weight, out, has_exact_cublas)
    return out


def _multiply_heads(x: Tensor, weight: Weight, out: Tensor, has_exact_cublas: bool) -> None:
    """Into `out` [rows, heads, size], which may be a part of longer rows."""
    rows, heads, inner = x.shape
    count, size, depth = weight.shape
    if (count, depth) != (heads, inner) or weight.tensor.dtype != x.dtype:
        raise ValueError(f"the weight {weight.shape} was not packed for x {tuple(x.shape)}")
    x = _aligned(x)
    if has_exact_cublas and rows > MOST_JOINED:
        cublas.heads_product(x, weight.tensor, out)
    elif rows:
        tile = heads_tile(rows, x.dtype)
        _heads_kernel[(cdiv(size, tile.outputs), cdiv(rows, tile.rows), heads)](
            x=x,
            weight=weight.tensor,
            out=out,
            M=rows,
            x_stride=x.stride(0),
            x_head_stride=x.stride(1),
            OUT_STRIDE=out.stride(0),
            OUT_HEAD_STRIDE=out.stride(1),
            N=size,
            K=inner,
            BLOCK_M=tile.rows,
            BLOCK_N=tile.outputs,
            BLOCK_K=tile.inner,
            PDL=USE_PDL,
            num_stages=tile.stages,
            num_warps=tile.warps,
            **ROUND_ALWAYS,
            **LAUNCH,
        )


def _aligned(x: Tensor) -> Tensor:
    if x.stride(2) != 1 or x.stride(0) % 8 or x.stride(1) % 8 or x.data_ptr() % 16:
        return x.contiguous()
    return x


def heads_tile(rows: int, dtype: torch.dtype) -> Tile:
    """Bits don't depend on it. A head's matrix is small: with few rows it is read by many programs."""
    if dtype == torch.float32:
        return Tile(16, 64, 32, 2, 4)
    if rows <= 16:
        return Tile(16, 32, 64, 4, 4)
    if rows <= 256:
        return Tile(32 if rows <= 32 else 64, 64, 64, 4, 4)
    return Tile(128, 128, 64, 3, 8)


@triton.jit
def _rotate_and_store(
    row,
    part,
    absorbed,
    rotated,
    latent,
    norm,
    positions,
    cos_sin,
    slots,
    query,
    keys,
    rotated_stride,
    rotated_head_stride,
    latent_stride,
    block_stride,
    eps,
    key_scale,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    RANK_PAD: tl.constexpr,
    HALF_PAD: tl.constexpr,
    EACH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SCALED: tl.constexpr,
    COPIED: tl.constexpr,
):
    """A row's latent into its slot (part 0 of the row), or EACH heads of its query, of which what was
    absorbed is COPIED, or lies there.
    """
    D: tl.constexpr = RANK + ROPE
    HALF: tl.constexpr = ROPE // 2
    column, half = tl.arange(0, RANK_PAD), tl.arange(0, HALF_PAD)
    scale = tl.load(norm + column, mask=column < RANK, other=0.0)
    angle = cos_sin + tl.load(positions + row).to(tl.int64) * ROPE + half
    cos = tl.load(angle, mask=half < HALF, other=0.0)[None, :]
    sin = tl.load(angle + HALF, mask=half < HALF, other=0.0)[None, :]
    dtype: tl.constexpr = latent.dtype.element_ty
    if part == 0:
        source = latent + row * latent_stride
        x = tl.load(source + column, mask=column < RANK, other=0.0).to(tl.float32)
        mean = tl.sum(x * x, 0) / RANK
        normed = (x * tl.rsqrt(mean + eps)).to(dtype).to(tl.float32)
        normed = (normed * scale.to(tl.float32)).to(dtype)
        place = source + RANK + half[None, :]
        low = tl.load(place, mask=half[None, :] < HALF, other=0.0)
        high = tl.load(place + HALF, mask=half[None, :] < HALF, other=0.0)
        low, high = _rotated(
            low, high, 0.0, 0.0, cos, sin, 0.0, 0.0, ROPE, False, False, False, True
        )
        slot = tl.load(slots + row)
        target = keys + (slot // BLOCK_SIZE) * block_stride + (slot % BLOCK_SIZE) * D
        owned = slot >= 0
        stored = _divided(normed, key_scale, SCALED)
        tl.store(target + column, stored, mask=owned & (column < RANK))
        tail = target + RANK + half[None, :]
        inside = owned & (half[None, :] < HALF)
        tl.store(tail, _divided(low, key_scale, SCALED), mask=inside)
        tl.store(tail + HALF, _divided(high, key_scale, SCALED), mask=inside)
    else:
        head = (part - 1) * EACH + tl.arange(0, EACH)[:, None]
        exists = head < HEADS
        query_place = query + (row * HEADS + head) * D
        if COPIED:
            whole = exists & (column[None, :] < RANK)
            absorbed_place = absorbed + (row * HEADS + head) * RANK + column[None, :]
            numbers = tl.load(absorbed_place, mask=whole, other=0.0)
            tl.store(query_place + column[None, :], numbers, mask=whole)
        rotated_place = rotated + row * rotated_stride + head * rotated_head_stride + half[None, :]
        halves = exists & (half[None, :] < HALF)
        first = tl.load(rotated_place, mask=halves, other=0.0)
        second = tl.load(rotated_place + HALF, mask=halves, other=0.0)
        first, second = _rotated(
            first, second, 0.0, 0.0, cos, sin, 0.0, 0.0, ROPE, False, False, False, True
        )
        query_tail = query_place + RANK + half[None, :]
        tl.store(query_tail, first, mask=halves)
        tl.store(query_tail + HALF, second, mask=halves)


@jit(do_not_specialize_on_alignment=["positions", "slots"])
def _latent_cache_kernel(
    absorbed,
    rotated,
    latent,
    norm,
    positions,
    cos_sin,
    slots,
    query,
    keys,
    rotated_stride,
    rotated_head_stride,
    latent_stride,
    block_stride,
    eps,
    key_scale,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    RANK_PAD: tl.constexpr,
    HALF_PAD: tl.constexpr,
    EACH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SCALED: tl.constexpr,
    COPIED: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    _rotate_and_store(
        tl.program_id(0).to(tl.int64),
        tl.program_id(1),
        absorbed,
        rotated,
        latent,
        norm,
        positions,
        cos_sin,
        slots,
        query,
        keys,
        rotated_stride,
        rotated_head_stride,
        latent_stride,
        block_stride,
        eps,
        key_scale,
        HEADS,
        RANK,
        ROPE,
        RANK_PAD,
        HALF_PAD,
        EACH,
        BLOCK_SIZE,
        SCALED,
        COPIED,
    )


@jit(do_not_specialize=["M"], do_not_specialize_on_alignment=["positions", "slots"])
def _latent_query_kernel(
    plain,
    weight,
    rotated,
    latent,
    norm,
    positions,
    cos_sin,
    slots,
    query,
    keys,
    M,
    plain_stride,
    plain_head_stride,
    rotated_stride,
    rotated_head_stride,
    latent_stride,
    block_stride,
    eps,
    key_scale,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    RANK_PAD: tl.constexpr,
    HALF_PAD: tl.constexpr,
    EACH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Both, which do not need each other: programs of products first."""
    let_next_start(PDL)
    OUTPUT_TILES: tl.constexpr = (RANK + BLOCK_N - 1) // BLOCK_N
    PARTS: tl.constexpr = 1 + (HEADS + EACH - 1) // EACH
    products = tl.cdiv(M, BLOCK_M) * (OUTPUT_TILES * HEADS)
    program = tl.program_id(0)
    if program < products:
        _head_product(
            plain,
            weight,
            query,
            (program // OUTPUT_TILES % HEADS).to(tl.int64),
            program % OUTPUT_TILES,
            program // (OUTPUT_TILES * HEADS),
            M,
            plain_stride,
            plain_head_stride,
            HEADS * (RANK + ROPE),
            RANK + ROPE,
            RANK,
            NOPE,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
            PDL,
        )
    else:
        wait_for_previous(PDL)
        _rotate_and_store(
            ((program - products) // PARTS).to(tl.int64),
            (program - products) % PARTS,
            query,
            rotated,
            latent,
            norm,
            positions,
            cos_sin,
            slots,
            query,
            keys,
            rotated_stride,
            rotated_head_stride,
            latent_stride,
            block_stride,
            eps,
            key_scale,
            HEADS,
            RANK,
            ROPE,
            RANK_PAD,
            HALF_PAD,
            EACH,
            BLOCK_SIZE,
            SCALED,
            False,
        )


def _angles(positions: Tensor, cos_sin: Tensor | None, rope: int) -> tuple[Tensor, Tensor]:
    """Which row of a table each token is rotated by; without one, by the one that turns nothing."""
    if cos_sin is not None:
        return positions, cos_sin
    half = torch.ones(1, rope // 2, device=positions.device)
    return torch.zeros_like(positions), torch.cat((half, torch.zeros_like(half)), 1)


def latent_to_cache_(
    absorbed: Tensor,
    rotated: Tensor,
    latent: Tensor,
    norm: LatentNorm,
    positions: Tensor,
    cos_sin: Tensor | None,
    cache: LayerCache,
    slot_mapping: Tensor,
) -> Tensor:
    """`Kernels.latent_to_cache_`, in one launch."""
    rows, heads, rank = absorbed.shape
    absorbed = absorbed.contiguous()
    query = absorbed.new_empty(rows, heads, rank + rotated.shape[2])
    arguments = rotated, latent, norm, positions, cos_sin, cache, slot_mapping
    _rotate_to_cache_(query, absorbed, *arguments)
    return query


def _rotate_to_cache_(
    query: Tensor,
    absorbed: Tensor | None,
    rotated: Tensor,
    latent: Tensor,
    norm: LatentNorm,
    positions: Tensor,
    cos_sin: Tensor | None,
    cache: LayerCache,
    slot_mapping: Tensor,
) -> None:
    """Latents into their slots, and the rest of `query` [rows, heads, rank + rope] beside what was
    absorbed: `absorbed`, which is copied, or what lies there.
    """
    rows, heads, size = query.shape
    rope = rotated.shape[2]
    latent = as_rows(latent)
    rotated = rotated if rotated.stride(2) == 1 else rotated.contiguous()
    positions, cos_sin = _angles(positions, cos_sin, rope)
    each = _HEADS if absorbed is not None else _MANY_HEADS
    if rows:
        _latent_cache_kernel[(rows, 1 + cdiv(heads, each))](
            absorbed=query if absorbed is None else absorbed,
            rotated=rotated,
            latent=latent,
            norm=norm.weight,
            positions=positions,
            cos_sin=cos_sin,
            slots=slot_mapping,
            query=query,
            keys=cache.keys,
            rotated_stride=rotated.stride(0),
            rotated_head_stride=rotated.stride(1),
            latent_stride=row_stride(latent),
            block_stride=cache.keys.stride(0),
            eps=norm.eps,
            key_scale=cache.fp8_scales[0],
            HEADS=heads,
            RANK=size - rope,
            ROPE=rope,
            RANK_PAD=next_power_of_2(size - rope),
            HALF_PAD=next_power_of_2(rope // 2),
            EACH=each,
            BLOCK_SIZE=cache.block_size,
            SCALED=cache.fp8_scales != (1.0, 1.0),
            COPIED=absorbed is not None,
            PDL=USE_PDL,
            num_warps=4,
            **ROUND_ALWAYS,
            **LAUNCH,
        )


def latent_queries_(
    plain: Tensor,
    rotated: Tensor,
    key_up: Weight,
    latent: Tensor,
    norm: LatentNorm,
    positions: Tensor,
    cos_sin: Tensor | None,
    cache: LayerCache,
    slot_mapping: Tensor,
    has_exact_cublas: bool = False,
) -> Tensor:
    """`Kernels.latent_queries_`, in one launch if there are few rows; of many, products first, which
    are stored where the queries need them.
    """
    rows, heads, depth = plain.shape
    rope, rank = rotated.shape[2], key_up.shape[1]
    if not 0 < rows <= MOST_JOINED:
        query = plain.new_empty(rows, heads, rank + rope)
        _multiply_heads(plain, key_up, query[..., :rank], has_exact_cublas)
        _rotate_to_cache_(
            query, None, rotated, latent, norm, positions, cos_sin, cache, slot_mapping
        )
        return query
    if key_up.shape != (heads, rank, depth) or key_up.tensor.dtype != plain.dtype:
        raise ValueError(f"the weight {key_up.shape} was not packed for x {tuple(plain.shape)}")
    plain, latent = _aligned(plain), as_rows(latent)
    rotated = rotated if rotated.stride(2) == 1 else rotated.contiguous()
    positions, cos_sin = _angles(positions, cos_sin, rope)
    query = plain.new_empty(rows, heads, rank + rope)
    tile, rotated_heads = heads_tile(rows, plain.dtype), _HEADS
    if rows > 128 and plain.dtype != torch.float32:
        tile, rotated_heads = _MANY_QUERIES, _MANY_HEADS
    products = cdiv(rank, tile.outputs) * heads * cdiv(rows, tile.rows)
    _latent_query_kernel[(products + rows * (1 + cdiv(heads, rotated_heads)),)](
        plain=plain,
        weight=key_up.tensor,
        rotated=rotated,
        latent=latent,
        norm=norm.weight,
        positions=positions,
        cos_sin=cos_sin,
        slots=slot_mapping,
        query=query,
        keys=cache.keys,
        M=rows,
        plain_stride=plain.stride(0),
        plain_head_stride=plain.stride(1),
        rotated_stride=rotated.stride(0),
        rotated_head_stride=rotated.stride(1),
        latent_stride=row_stride(latent),
        block_stride=cache.keys.stride(0),
        eps=norm.eps,
        key_scale=cache.fp8_scales[0],
        HEADS=heads,
        RANK=rank,
        NOPE=depth,
        ROPE=rope,
        RANK_PAD=next_power_of_2(rank),
        HALF_PAD=next_power_of_2(rope // 2),
        EACH=rotated_heads,
        BLOCK_SIZE=cache.block_size,
        SCALED=cache.fp8_scales != (1.0, 1.0),
        BLOCK_M=tile.rows,
        BLOCK_N=tile.outputs,
        BLOCK_K=tile.inner,
        PDL=USE_PDL,
        num_stages=tile.stages,
        num_warps=tile.warps,
        **ROUND_ALWAYS,
        **LAUNCH,
    )
    return query
