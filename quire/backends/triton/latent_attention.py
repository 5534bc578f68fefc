"""Latent attention over the paged cache: one key head for all query heads, whose value is the first
part of its key.

One kernel for decode steps and prompts; on Hopper `prompt_latent.py` computes most of a prompt. A
program computes a tile of 64 (query, head) rows of one sequence, so that a latent is read once for
all of them and multiplied by the wide tensor core instruction, whose left operand is read from
shared memory: rows of 576 numbers have no room in registers. With 20 heads three queries fill a
tile; a decode step leaves rows empty, which costs nothing while the time goes to reading.

Exactness is that of `attention.py`: keys in tiles of KEYS, tiles in splits of SPLIT keys, the
splits' results merged in order. A program that walks all splits of a tile keeps what is merged so
far in memory, as registers hold the output (64 x 512 numbers) only once; where splits go to several
programs, each stores its results and the last to finish merges them.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from quire.backends.triton.attention import read_entry
from quire.backends.triton.attention_splits import (
    MERGED_ROWS,
    counters,
    merge_stored,
    store_split,
)
from quire.backends.triton.attention_tile import raised
from quire.backends.triton.attention_work import SPLIT
from quire.backends.triton.direct_launch import jit
from quire.backends.triton.latent_work import LATENT_ROWS, MAX_LATENT_PARTIALS
from quire.backends.triton.launch import LAUNCH, ROUND_ALWAYS, USE_PDL
from quire.backends.triton.shapes import is_wide, next_power_of_2
from quire.kernels.latent import LatentSpec
from quire.kernels.ops import LayerCache

_ONES = 16
_WARPS = 8
_AT_ONCE = tl.constexpr(8)
"""Splits whose results are loaded before the first of them is merged."""
_LOOKED_AT = tl.constexpr(64)
"""Items whose flags are loaded at once."""
_KEPT = 5
"""Results that a program stores before it merges them: of 64 rows each has 128 KiB."""
FORMS: dict[int, tuple[int, int, int]] = {2: (LATENT_ROWS, 64, 2), 4: (16, 16, 2)}
"""By bytes of a query's number: rows of a program (a part of a tile), keys of a tile, stages."""


@triton.jit
def _latent_tile(
    query,
    query_tail,
    highest,
    total,
    output,
    first_key,
    context_len,
    position,
    keys,
    table,
    block_stride,
    scale,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    RANK_PAD: tl.constexpr,
    ROPE_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    ONES: tl.constexpr,
    WIDE: tl.constexpr,
):
    """As `attention_tile.attend_tile`, of queries in two parts, to keys whose first part is their
    value.
    """
    column, tail = tl.arange(0, RANK_PAD), tl.arange(0, ROPE_PAD)
    key = first_key + tl.arange(0, KEYS)
    exists = key < context_len
    block = tl.load(table + key // BLOCK_SIZE, mask=exists, other=0)
    if WIDE:
        block = block.to(tl.int64)
    place = block * block_stride + (key % BLOCK_SIZE) * (RANK + ROPE)
    # After the sequence's end the cache may hold NaN: zeros are used instead.
    inside = exists[:, None] if RANK == RANK_PAD else exists[:, None] & (column < RANK)[None, :]
    k = tl.load(keys + place[:, None] + column[None, :], mask=inside, other=0.0)
    inside_tail = exists[:, None] if ROPE == ROPE_PAD else exists[:, None] & (tail < ROPE)[None, :]
    k_tail = tl.load(keys + place[:, None] + RANK + tail[None, :], mask=inside_tail, other=0.0)
    k, k_tail = k.to(query.dtype), k_tail.to(query.dtype)  # FP8 to float16, which is exact
    scores = tl.dot(query, tl.trans(k), input_precision="ieee")
    scores = tl.dot(query_tail, tl.trans(k_tail), scores, input_precision="ieee")
    scores = tl.where(key[None, :] <= position[:, None], scores, float("-inf"))
    new_highest = raised(highest, tl.max(scores, 1) * scale, query.dtype)
    # Where no key is visible yet this is -inf, and -inf - -inf would be NaN.
    reference = tl.where(new_highest == float("-inf"), 0.0, new_highest)
    weights = tl.exp2(tl.fma(scores, scale, -reference[:, None])).to(query.dtype)
    decay = tl.exp2(highest - reference)
    ones = tl.full((KEYS, ONES), 1.0, query.dtype)
    total = tl.dot(weights, ones, total * decay[:, None], input_precision="ieee")
    output = tl.dot(weights, k, output * decay[:, None], input_precision="ieee")
    return new_highest, total, output


@triton.jit
def _store_rows(
    out, output, total, place, used, value_scale, RANK: tl.constexpr, SCALED: tl.constexpr
):
    """Divides by the sum of the weights (`total` [rows, columns], which are the same) and stores
    rows; `place`: which of all rows of all heads.
    """
    column = tl.arange(0, output.shape[1])
    divisor = tl.max(total, 1)
    result = output / tl.where(divisor == 0.0, 1.0, divisor)[:, None]
    if SCALED:
        result = result * value_scale
    target = out + place[:, None] * RANK + column[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask=used[:, None] & (column < RANK)[None, :])


@triton.jit
def _merge_tile(
    stored_output,
    stored_state,
    out,
    slot,
    stride,
    count,
    is_last,
    num_rows,
    first_place,
    value_scale,
    ROWS: tl.constexpr,
    RANK: tl.constexpr,
    RANK_PAD: tl.constexpr,
    SCALED: tl.constexpr,
):
    """Merges the `count` results from `slot` on, in their order; into the first of these places, or
    as the rows' output.
    """
    column = tl.arange(0, RANK_PAD)
    for begin in range(0, num_rows, MERGED_ROWS):
        rows = begin + tl.arange(0, MERGED_ROWS)
        used = rows < num_rows
        highest, total, output = merge_stored(
            stored_output,
            stored_state,
            slot,
            stride,
            0,
            count,
            rows,
            column,
            used[:, None],
            tl.full((MERGED_ROWS,), float("-inf"), tl.float32),
            tl.zeros((MERGED_ROWS, 1), tl.float32),
            tl.zeros((MERGED_ROWS, RANK_PAD), tl.float32),
            ROWS,
            RANK_PAD,
            _AT_ONCE,
        )
        if is_last:
            _store_rows(out, output, total, first_place + rows, used, value_scale, RANK, SCALED)
        else:
            tl.debug_barrier()  # all threads have loaded the state
            store_split(
                stored_output,
                stored_state,
                slot,
                highest,
                total,
                output,
                rows,
                used[:, None],
                ROWS,
                RANK_PAD,
            )


@triton.jit
def _next_item(item, count, failed, PARTS: tl.constexpr, AGAIN: tl.constexpr):
    """The first item from `item` on that this program computes."""
    if AGAIN:
        ahead = tl.arange(0, _LOOKED_AT)
        skipped = _LOOKED_AT
        while skipped == _LOOKED_AT:
            at = item + ahead * tl.num_programs(0)
            flags = failed + at // PARTS * 2
            first = tl.load(flags, mask=at < count, other=1, cache_modifier=".cg")
            second = tl.load(flags + 1, mask=at < count, other=1, cache_modifier=".cg")
            skipped = tl.min(tl.where(first + second != 0, ahead, _LOOKED_AT), 0)
            item += skipped * tl.num_programs(0)
    return item


@jit(do_not_specialize=["table_stride"])
def _latent_kernel(
    query,
    out,
    keys,
    block_tables,
    work,
    failed,
    stored_output,
    stored_state,
    arrived,
    table_stride,
    block_stride,
    scale,
    value_scale,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    RANK_PAD: tl.constexpr,
    ROPE_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    TILES: tl.constexpr,
    SCALED: tl.constexpr,
    ONES: tl.constexpr,
    STAGES: tl.constexpr,
    OWN_SLOTS: tl.constexpr,
    KEPT: tl.constexpr,
    WIDE: tl.constexpr,
    PDL: tl.constexpr,
    AGAIN: tl.constexpr,
):
    """`work` is the list of `latent_work.py`. A program computes ROWS of a tile's TILE_ROWS rows.
    AGAIN: only of items for which one of two flags in `failed` [items, 2] is set.
    """
    PARTS: tl.constexpr = TILE_ROWS // ROWS
    rows = tl.arange(0, ROWS)
    column, tail = tl.arange(0, RANK_PAD), tl.arange(0, ROPE_PAD)
    item = tl.program_id(0)
    if PDL:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    count = tl.load(work, cache_modifier=".cg") * PARTS
    item = _next_item(item, count, failed, PARTS, AGAIN)
    while item < count:
        entry = work + (1 + item // PARTS) * 8
        partial, first_split, first_row, num_queries, context_len, table_row, end_split = (
            read_entry(entry)
        )
        first = tl.load(entry + 7, cache_modifier=".cg")
        # All rows of a tile are divided at the same keys: those that its last row sees.
        last_query = tl.minimum((first + TILE_ROWS - 1) // HEADS, num_queries - 1)
        num_tiles = tl.cdiv(context_len - num_queries + last_query + 1, KEYS)
        num_splits = tl.cdiv(num_tiles, TILES)
        # A sequence may have become shorter than the list was told.
        end_split = tl.minimum(end_split, num_splits)
        is_whole = (first_split == 0) & (end_split == num_splits)
        part = item % PARTS
        row = first + part * ROWS + rows
        used = row < num_queries * HEADS
        position = context_len - num_queries + row // HEADS
        place = first_row.to(tl.int64) * HEADS + row
        table = block_tables + table_row.to(tl.int64) * table_stride
        source = query + place[:, None] * (RANK + ROPE)
        q = tl.load(
            source + column[None, :], mask=used[:, None] & (column < RANK)[None, :], other=0.0
        )
        q_tail = tl.load(
            source + RANK + tail[None, :], mask=used[:, None] & (tail < ROPE)[None, :], other=0.0
        )
        if keys.dtype.element_ty == tl.float8e4nv:
            q, q_tail = q.to(tl.float16), q_tail.to(tl.float16)
        # Where a split's result is stored: beside those of the tile's other programs, or in this
        # program's own places, of which the first then holds what is merged so far.
        counter = partial * PARTS + part
        slot = tl.where(is_whole, OWN_SLOTS + tl.program_id(0) * KEPT, counter)
        stride = tl.where(is_whole, 1, PARTS)
        place_of_split = tl.where(is_whole, 0, first_split)
        num_rows = tl.minimum(num_queries * HEADS - first - part * ROWS, ROWS)
        for split in range(first_split, end_split):
            highest = tl.full((ROWS,), float("-inf"), tl.float32)
            total = tl.zeros((ROWS, ONES), tl.float32)
            output = tl.zeros((ROWS, RANK_PAD), tl.float32)
            end_tile = tl.minimum((split + 1) * TILES, num_tiles)
            for tile in tl.range(split * TILES, end_tile, num_stages=STAGES):
                highest, total, output = _latent_tile(
                    q,
                    q_tail,
                    highest,
                    total,
                    output,
                    tile * KEYS,
                    context_len,
                    position,
                    keys,
                    table,
                    block_stride,
                    scale,
                    RANK,
                    ROPE,
                    RANK_PAD,
                    ROPE_PAD,
                    BLOCK_SIZE,
                    KEYS,
                    ONES,
                    WIDE,
                )
            if num_splits == 1:  # merging with an empty result would change no bit
                _store_rows(out, output, total, place, used, value_scale, RANK, SCALED)
            else:
                store_split(
                    stored_output,
                    stored_state,
                    slot + place_of_split * stride,
                    highest,
                    total,
                    output,
                    rows,
                    used[:, None],
                    ROWS,
                    RANK_PAD,
                )
                place_of_split += 1
                is_last = split + 1 == num_splits
                if is_whole & (is_last | (place_of_split == KEPT)):
                    tl.debug_barrier()  # threads merge what others have stored
                    _merge_tile(
                        stored_output,
                        stored_state,
                        out,
                        slot,
                        stride,
                        place_of_split,
                        is_last,
                        num_rows,
                        first_row.to(tl.int64) * HEADS + first + part * ROWS,
                        value_scale,
                        ROWS,
                        RANK,
                        RANK_PAD,
                        SCALED,
                    )
                    tl.debug_barrier()
                    place_of_split = 1
        done = end_split - first_split
        if (done > 0) & (is_whole == 0):
            # all threads' stores must come before the atomic count, which makes them visible
            tl.debug_barrier()
            before = tl.atomic_add(arrived + counter, done, sem="acq_rel", scope="gpu")
            if before + done == num_splits:
                _merge_tile(
                    stored_output,
                    stored_state,
                    out,
                    slot,
                    stride,
                    num_splits,
                    True,
                    num_rows,
                    first_row.to(tl.int64) * HEADS + first + part * ROWS,
                    value_scale,
                    ROWS,
                    RANK,
                    RANK_PAD,
                    SCALED,
                )
                tl.store(arrived + counter, 0)
        item = _next_item(item + tl.num_programs(0), count, failed, PARTS, AGAIN)


def latent_attention(
    query: Tensor,
    cache: LayerCache,
    block_tables: Tensor,
    work: Tensor,
    spec: LatentSpec,
    max_context_len: int,
    num_multiprocessors: int,
    out: Tensor | None = None,
    failed: Tensor | None = None,
) -> Tensor:
    """[rows, heads, rank] of query [rows, heads, rank + rope]; `work`: the list `decode` or `prompts`.
    Of the latter, only items that `failed` may be computed: rows of `out`.
    """
    rows, heads, _ = query.shape
    if out is None:
        out = torch.empty(rows, heads, spec.rank, dtype=query.dtype, device=query.device)
    tile_rows, _, _ = FORMS[query.itemsize]
    parts = LATENT_ROWS // tile_rows
    programs = min((len(work) - 1) * parts, num_multiprocessors)
    if not programs:
        return out
    is_divided = max_context_len > SPLIT
    own_slots = MAX_LATENT_PARTIALS * parts
    slots = tile_rows * (own_slots + programs * _KEPT if is_divided else 1)
    rank_pad = max(16, next_power_of_2(spec.rank))
    _latent_kernel[(programs,)](
        query=query,
        out=out,
        keys=cache.keys,
        block_tables=block_tables,
        work=work,
        failed=work if failed is None else failed,
        stored_output=query.new_empty(slots * rank_pad, dtype=torch.float32),
        stored_state=query.new_empty(slots * 2, dtype=torch.float32),
        arrived=counters(query.device, 1),
        table_stride=block_tables.stride(0),
        block_stride=cache.keys.stride(0),
        OWN_SLOTS=own_slots,
        PDL=USE_PDL,
        AGAIN=failed is not None,
        **arguments(query, cache, spec),
        num_warps=_WARPS,
        **ROUND_ALWAYS,
        **LAUNCH,
    )
    return out


def arguments(query: Tensor, cache: LayerCache, spec: LatentSpec) -> dict[str, Any]:
    """What follows from shapes and dtypes."""
    rows, keys, stages = FORMS[query.itemsize]
    key_scale, value_scale = cache.fp8_scales
    return {
        # log2(e) is a part of the scale, as weights are computed with exp2
        "scale": spec.scale * key_scale * math.log2(math.e),
        "value_scale": value_scale,
        "HEADS": query.shape[1],
        "RANK": spec.rank,
        "ROPE": spec.rope_dim,
        "RANK_PAD": max(16, next_power_of_2(spec.rank)),
        "ROPE_PAD": max(16, next_power_of_2(spec.rope_dim)),
        "BLOCK_SIZE": cache.block_size,
        "TILE_ROWS": LATENT_ROWS,
        "ROWS": rows,
        "KEYS": keys,
        "TILES": SPLIT // keys,
        "SCALED": value_scale != 1,
        "ONES": _ONES,
        "STAGES": stages,
        "KEPT": _KEPT,
        "WIDE": is_wide(cache.keys),
    }
