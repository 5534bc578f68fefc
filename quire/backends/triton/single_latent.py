"""Latent attention of single queries of many sequences: the bits of `latent_attention.py` in less time.

A program computes all heads of a sequence, for one or more splits of its keys. It has a tile of keys
in shared memory, which is read twice, for scores and as values; two programs share a
multiprocessor, so that one multiplies while the other's keys come, and each asks for its next
tile's keys piece by piece as soon as it has done with this tile's. The heads fill 16 or 32 rows
(`mma`), where the kernel for all has 64 (`wgmma`), so outputs have room in four warps' registers.

It starts while the kernel before it runs (PDL), and asks for its first keys then, unless this step
writes them.
"""

# ruff: noqa: RUF005  (Triton knows no * within a tuple)
# mypy: disable-error-code="assignment,unreachable,var-annotated"
from __future__ import annotations

import math

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra import cuda

from quire.backends.triton.attention import read_entry
from quire.backends.triton.attention_splits import counters, merge_stored
from quire.backends.triton.attention_tile import raised
from quire.backends.triton.attention_work import KEY_TILE, SPLIT
from quire.backends.triton.direct_launch import gluon_jit
from quire.backends.triton.latent_work import (
    MAX_LATENT_PARTIALS,
    SINGLE_HEADS,
    SINGLE_PROGRAMS,
    small_rows,
)
from quire.backends.triton.launch import LAUNCH, ROUND_ALWAYS, USE_PDL
from quire.backends.triton.shapes import is_wide
from quire.backends.triton.small_batch_latent import (
    allocate_pieces,
    places_of_keys,
    rows_layout,
    stage_pieces,
    store_result,
)
from quire.backends.triton.small_batch_latent import takes as small_takes
from quire.kernels.latent import LatentHeads, LatentSpec
from quire.kernels.ops import LayerCache

_PIECE = 64
"""Numbers of a latent that lie side by side in shared memory."""
_WARPS = 4
_REGISTERS = 255
"""Of a thread, for two programs on a multiprocessor."""
_MERGED_ROWS = gl.constexpr(4)
"""Rows of stored results that are merged at a time."""
_AT_ONCE = tl.constexpr(8)
"""Splits whose results are loaded before the first of them is merged."""


def takes(heads: LatentHeads, dtype: torch.dtype) -> bool:
    """Whether this kernel can compute such heads for a model in this dtype."""
    return heads.num_heads <= SINGLE_HEADS and heads.rank <= 512 and small_takes(heads, dtype)


@gluon.jit
def _copy(staged, source, exists, FIRST: gl.constexpr, END: gl.constexpr, PIECE: gl.constexpr):
    """Starts to copy the pieces FIRST to END of latents, and zeros for keys that do not exist; numbers
    of another type are converted on the way, which is exact.
    """
    if source.dtype.element_ty == staged[0].dtype:
        for i in gl.static_range(FIRST, END):
            async_copy.async_copy_global_to_shared(
                staged[i], source + i * PIECE, mask=exists[:, None]
            )
    else:
        for i in gl.static_range(FIRST, END):
            numbers = gl.load(
                source + i * PIECE, mask=exists[:, None], other=0.0, cache_modifier=".cg"
            )
            staged[i].store(numbers.to(staged[i].dtype))


@gluon_jit(do_not_specialize=["table_stride"])
def _single_latent_kernel(
    query,
    keys,
    block_tables,
    work,
    out,
    stored_output,
    stored_state,
    arrived,
    table_stride,
    block_stride,
    scale,
    value_scale,
    HEADS: gl.constexpr,
    RANK: gl.constexpr,
    ROPE: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    ROWS: gl.constexpr,
    KEYS: gl.constexpr,
    SPLIT: gl.constexpr,
    OWN_SLOTS: gl.constexpr,
    PIECE: gl.constexpr,
    SCALED: gl.constexpr,
    WIDE: gl.constexpr,
    PDL: gl.constexpr,
    WARPS: gl.constexpr,
):
    """`work` is the list `single` of `latent_work.py`."""
    D: gl.constexpr = RANK + ROPE
    PIECES: gl.constexpr = D // PIECE
    VALUES: gl.constexpr = RANK // PIECE
    FIRST: gl.constexpr = (VALUES + 1) // 2
    TILES: gl.constexpr = SPLIT // KEYS
    stored: gl.constexpr = keys.dtype.element_ty
    number: gl.constexpr = gl.float16 if stored == gl.float8e4nv else query.dtype.element_ty
    IS_COPIED: gl.constexpr = stored == number
    acc: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, WARPS], [16, 8])
    as_left: gl.constexpr = gl.DotOperandLayout(0, acc, 2)
    as_right: gl.constexpr = gl.DotOperandLayout(1, acc, 2)
    of_keys: gl.constexpr = rows_layout(PIECE, stored.primitive_bitwidth, WARPS)
    of_query: gl.constexpr = rows_layout(PIECE, 16, WARPS)
    of_merged: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [WARPS, 1], [1, 0])
    staged_query = allocate_pieces(number, PIECES, ROWS, PIECE)
    staged_keys = allocate_pieces(number, PIECES, KEYS, PIECE)
    (staged_weights,) = allocate_pieces(number, 1, ROWS, KEYS)
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, acc))
    used = (rows < HEADS)[:, None]
    column = gl.arange(0, PIECE, gl.SliceLayout(0, acc))
    own_key = gl.arange(0, KEYS, gl.SliceLayout(0, acc))
    tile_key = gl.arange(0, KEYS, gl.SliceLayout(1, of_keys))
    piece = gl.arange(0, PIECE, gl.SliceLayout(0, of_keys))
    ones = gl.full((KEYS, 16), 1.0, number, as_right)
    if PDL:
        cuda.gdc_launch_dependents()
    count = gl.load(work, cache_modifier=".cg")
    item = gl.program_id(0)
    while item < count:
        entry = work + (1 + item) * 8
        partial, first_split, query_row, _one, context_len, table_row, end_split = read_entry(entry)
        new = gl.load(entry + 7, cache_modifier=".cg")
        num_tiles = gl.cdiv(context_len, KEYS)
        num_splits = gl.cdiv(num_tiles, TILES)
        # A sequence may have become shorter than the list was told.
        end_split = gl.minimum(end_split, num_splits)
        is_whole = (first_split == 0) & (end_split == num_splits)
        first_key = first_split * SPLIT
        end_key = gl.minimum(end_split * SPLIT, context_len)
        table = block_tables + table_row.to(gl.int64) * table_stride
        key = first_key + tile_key
        exists = key < end_key
        place = places_of_keys(key, exists, table, block_stride, D, BLOCK_SIZE, WIDE)
        source = keys + place[:, None] + piece[None, :]
        # The keys of earlier steps; the newest are written by the kernel before this.
        is_early = gl.minimum(first_key + KEYS, end_key) <= context_len - new
        if IS_COPIED:  # noqa: SIM102  (known when it is compiled; the other one is not)
            if is_early:
                _copy(staged_keys, source, exists, 0, PIECES, PIECE)
        if PDL:
            cuda.gdc_wait()
        head = gl.arange(0, ROWS, gl.SliceLayout(1, of_query))
        query_place = (query_row.to(gl.int64) * HEADS + head) * D
        query_piece = gl.arange(0, PIECE, gl.SliceLayout(0, of_query))
        query_source = query + query_place[:, None] + query_piece[None, :]
        stage_pieces(staged_query, query_source, head < HEADS, PIECES, PIECE)
        if IS_COPIED:
            if is_early:
                async_copy.wait_group(0)
            else:
                _copy(staged_keys, source, exists, 0, FIRST, PIECE)
            async_copy.commit_group()
            if is_early == 0:
                _copy(staged_keys, source, exists, FIRST, PIECES, PIECE)
            async_copy.commit_group()
        merged_highest = gl.full((ROWS,), float("-inf"), gl.float32, gl.SliceLayout(1, acc))
        merged_total = gl.zeros((ROWS, 16), gl.float32, acc)
        row_place = query_row.to(gl.int64) * HEADS + rows
        target = out + (row_place * RANK)[:, None] + column[None, :]
        # Where this program keeps what is merged so far: every thread its own numbers.
        own_slot = (OWN_SLOTS + gl.program_id(0)).to(gl.int64)
        own_place = stored_output + ((own_slot * ROWS + rows) * RANK)[:, None] + column[None, :]
        for split in range(first_split, end_split):
            highest = gl.full((ROWS,), float("-inf"), gl.float32, gl.SliceLayout(1, acc))
            total = gl.zeros((ROWS, 16), gl.float32, acc)
            output = ()
            for _ in gl.static_range(VALUES):
                output = output + (gl.zeros((ROWS, PIECE), gl.float32, acc),)
            end_tile = gl.minimum((split + 1) * TILES, num_tiles)
            for tile in range(split * TILES, end_tile):
                # a tile ahead; after the last one nothing exists
                next_key = (tile + 1) * KEYS + tile_key
                next_exists = next_key < end_key
                next_place = places_of_keys(
                    next_key, next_exists, table, block_stride, D, BLOCK_SIZE, WIDE
                )
                if IS_COPIED:
                    async_copy.wait_group(1)
                else:
                    _copy(
                        staged_keys,
                        keys + place[:, None] + piece[None, :],
                        tile * KEYS + tile_key < end_key,
                        0,
                        PIECES,
                        PIECE,
                    )
                    async_copy.wait_group(0)  # of the query
                tl.debug_barrier()
                scores = gl.zeros((ROWS, KEYS), gl.float32, acc)
                for i in gl.static_range(FIRST):
                    scores = mma_v2(
                        staged_query[i].load(as_left),
                        staged_keys[i].permute((1, 0)).load(as_right),
                        scores,
                    )
                async_copy.wait_group(0)
                tl.debug_barrier()
                for i in gl.static_range(FIRST, PIECES):
                    scores = mma_v2(
                        staged_query[i].load(as_left),
                        staged_keys[i].permute((1, 0)).load(as_right),
                        scores,
                    )
                scores = gl.where(
                    (tile * KEYS + own_key < context_len)[None, :], scores, float("-inf")
                )
                new_highest = raised(highest, gl.max(scores, 1) * scale, number)
                # Where no key is visible yet this is -inf, and -inf - -inf would be NaN.
                reference = gl.where(new_highest == float("-inf"), 0.0, new_highest)
                weights = gl.exp2(gl.fma(scores, scale, -reference[:, None]))
                staged_weights.store(weights.to(number))
                decay = gl.exp2(highest - reference)
                highest = new_highest
                tl.debug_barrier()
                left = staged_weights.load(as_left)
                total = mma_v2(left, ones, total * decay[:, None])
                place = next_place
                next_source = keys + place[:, None] + piece[None, :]
                added = ()
                for i in gl.static_range(FIRST):
                    added = added + (
                        mma_v2(left, staged_keys[i].load(as_right), output[i] * decay[:, None]),
                    )
                if IS_COPIED:
                    tl.debug_barrier()
                    if (tile + 1) * KEYS < end_key:
                        _copy(staged_keys, next_source, next_exists, 0, FIRST, PIECE)
                    async_copy.commit_group()
                for i in gl.static_range(FIRST, VALUES):
                    added = added + (
                        mma_v2(left, staged_keys[i].load(as_right), output[i] * decay[:, None]),
                    )
                tl.debug_barrier()
                if IS_COPIED:
                    if (tile + 1) * KEYS < end_key:
                        _copy(staged_keys, next_source, next_exists, FIRST, PIECES, PIECE)
                    async_copy.commit_group()
                output = added
            if num_splits == 1:  # merging with an empty result would change no bit
                for i in gl.static_range(VALUES):
                    store_result(target + i * PIECE, used, total, output[i], value_scale, SCALED)
            elif is_whole:
                # As `attention_splits.merge`; no thread needs what another one has stored.
                both_highest = gl.maximum(merged_highest, highest)
                reference = gl.where(both_highest == float("-inf"), 0.0, both_highest)
                old = gl.exp2(merged_highest - reference)[:, None]
                newer = gl.exp2(highest - reference)[:, None]
                merged_highest = both_highest
                merged_total = merged_total * old + total * newer
                is_last = split + 1 == num_splits
                for i in gl.static_range(VALUES):
                    merged = gl.load(own_place + i * PIECE, mask=used & (split > 0), other=0.0)
                    merged = merged * old + output[i] * newer
                    if is_last:
                        store_result(
                            target + i * PIECE, used, merged_total, merged, value_scale, SCALED
                        )
                    else:
                        gl.store(own_place + i * PIECE, merged, mask=used)
            else:
                slot = (partial + split).to(gl.int64)
                slot_place = (
                    stored_output + ((slot * ROWS + rows) * RANK)[:, None] + column[None, :]
                )
                for i in gl.static_range(VALUES):
                    gl.store(slot_place + i * PIECE, output[i], mask=used)
                state = stored_state + slot * 2 * ROWS + rows
                gl.store(state, highest)
                gl.store(state + ROWS, gl.max(total, 1))
        done = end_split - first_split
        if (done > 0) & (is_whole == 0):
            # all threads' stores must come before the atomic count, which makes them visible
            tl.debug_barrier()
            before = gl.atomic_add(arrived + partial, done, sem="acq_rel", scope="gpu")
            if before + done == num_splits:
                row = gl.arange(0, _MERGED_ROWS, gl.SliceLayout(1, of_merged))
                wide_column = gl.arange(0, RANK, gl.SliceLayout(0, of_merged))
                for begin in range(0, HEADS, _MERGED_ROWS):
                    merged_row = begin + row
                    is_used = (merged_row < HEADS)[:, None]
                    _highest, all_total, all_output = merge_stored(
                        stored_output,
                        stored_state,
                        partial,
                        1,
                        0,
                        num_splits,
                        merged_row,
                        wide_column,
                        is_used,
                        gl.full(
                            (_MERGED_ROWS,), float("-inf"), gl.float32, gl.SliceLayout(1, of_merged)
                        ),
                        gl.zeros((_MERGED_ROWS, 1), gl.float32, of_merged),
                        gl.zeros((_MERGED_ROWS, RANK), gl.float32, of_merged),
                        ROWS,
                        RANK,
                        _AT_ONCE,
                    )
                    merged_place = (query_row.to(gl.int64) * HEADS + merged_row) * RANK
                    store_result(
                        out + merged_place[:, None] + wide_column[None, :],
                        is_used,
                        all_total,
                        all_output,
                        value_scale,
                        SCALED,
                    )
                gl.store(arrived + partial, 0)
        async_copy.wait_group(0)
        tl.debug_barrier()  # all threads have read what is staged
        item += gl.num_programs(0)
    if PDL and count == 0:  # programs with work have waited already
        cuda.gdc_wait()


def single_latent(
    query: Tensor,
    cache: LayerCache,
    block_tables: Tensor,
    work: Tensor,
    spec: LatentSpec,
    max_context_len: int,
    num_multiprocessors: int,
) -> Tensor:
    """`latent_attention.latent_attention` for the list `single`. Before the step's first kernel, all
    must be written but the latents that the list calls new.
    """
    rows, heads, _ = query.shape
    out = torch.empty(rows, heads, spec.rank, dtype=query.dtype, device=query.device)
    programs = min(len(work) - 1, SINGLE_PROGRAMS * num_multiprocessors)
    if not programs:
        return out
    each = small_rows(heads)
    slots = each * (MAX_LATENT_PARTIALS + programs if max_context_len > SPLIT else 1)
    key_scale, value_scale = cache.fp8_scales
    _single_latent_kernel[(programs,)](
        query=query,
        keys=cache.keys,
        block_tables=block_tables,
        work=work,
        out=out,
        stored_output=query.new_empty(slots * spec.rank, dtype=torch.float32),
        stored_state=query.new_empty(slots * 2, dtype=torch.float32),
        arrived=counters(query.device, 1),
        table_stride=block_tables.stride(0),
        block_stride=cache.keys.stride(0),
        # log2(e) is a part of the scale, as weights are computed with exp2
        scale=spec.scale * key_scale * math.log2(math.e),
        value_scale=value_scale,
        HEADS=heads,
        RANK=spec.rank,
        ROPE=spec.rope_dim,
        BLOCK_SIZE=cache.block_size,
        ROWS=each,
        KEYS=KEY_TILE,
        SPLIT=SPLIT,
        OWN_SLOTS=MAX_LATENT_PARTIALS,
        PIECE=_PIECE,
        SCALED=value_scale != 1,
        WIDE=is_wide(cache.keys),
        PDL=USE_PDL,
        WARPS=_WARPS,
        num_warps=_WARPS,
        maxnreg=_REGISTERS,
        **ROUND_ALWAYS,
        **LAUNCH,
    )
    return out
