"""Latent attention of single queries of few sequences, for the lowest latency: the bits of
`latent_attention.py`, whose programs walk the tiles of a split one after the other.

What must keep its order are the sums over a split's tiles; scores of keys, and columns of the
output, need nothing of each other. So one kernel computes the scores of all keys at once, a few keys
in a program, and puts them into memory (the L2 cache); the next has a program for some columns of a
split's output, which makes weights of its scores and walks the tiles. Both start while the kernels
before them run (PDL) and load the latents of earlier steps then; after that only what this step has
written is loaded.

Written in Gluon, Triton's lower level: Triton itself loads in advance into registers only, of which
a split's values need too many.
"""

# ruff: noqa: RUF005  (Triton knows no * within a tuple)
# mypy: disable-error-code="assignment,unreachable,var-annotated"
from __future__ import annotations

import math
from typing import Any

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
from quire.backends.triton.latent_work import small_rows
from quire.backends.triton.launch import LAUNCH, ROUND_ALWAYS, USE_PDL
from quire.backends.triton.shapes import cdiv, is_wide
from quire.kernels.latent import LatentHeads, LatentSpec
from quire.kernels.ops import LayerCache

_PIECE = 64
"""Numbers of a latent that lie side by side in shared memory: 128 bytes, in which a product's
operands are read without two threads meeting in a bank.
"""
_CHUNK = 32
"""Keys of a program of scores; bits don't depend on it."""
_SCORE_WARPS = 4
_COLUMNS = 64
"""Columns of a program of values; bits don't depend on it."""
_VALUE_WARPS = 8
_PROGRAMS = 2
"""Of either kernel, on a multiprocessor."""
_REGISTERS = 128
"""For two programs of values on a multiprocessor."""
_AT_ONCE = tl.constexpr(8)
"""Splits whose results are loaded before the first of them is merged."""


def takes(heads: LatentHeads, dtype: torch.dtype) -> bool:
    """Whether these kernels can compute such heads for a model in this dtype."""
    sizes = heads.rank, heads.head_dim - heads.rank
    return dtype in (torch.float16, torch.bfloat16) and not any(size % _PIECE for size in sizes)


@gluon.jit
def places_of_keys(
    key,
    exists,
    table,
    block_stride,
    D: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    WIDE: gl.constexpr,
):
    """The offset of each key in the cache. What is read before `gdc_wait` is not read through the L1
    cache, which may hold an earlier step's.
    """
    block = gl.load(table + key // BLOCK_SIZE, mask=exists, other=0, cache_modifier=".cg")
    if WIDE:
        block = block.to(gl.int64)
    return block * block_stride + (key % BLOCK_SIZE) * D


@gluon.jit
def allocate_pieces(
    NUMBER: gl.constexpr, COUNT: gl.constexpr, ROWS: gl.constexpr, WIDTH: gl.constexpr
):
    """Shared memory of its own for each of COUNT matrices: of one for all, the compiler would think
    that a copy to one of them had to wait for the others.
    """
    shared: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    staged = ()
    for _ in gl.static_range(COUNT):
        staged = staged + (gl.allocate_shared_memory(NUMBER, [ROWS, WIDTH], shared),)
    return staged


@gluon.jit
def stage_pieces(staged, source, exists, PIECES: gl.constexpr, PIECE: gl.constexpr):
    """Starts to copy PIECES of PIECE neighbouring numbers from `source` [rows, PIECE], and zeros for
    rows that do not exist, to the `staged` [rows, PIECE]; numbers of another type are converted on
    the way, which is exact.
    """
    if source.dtype.element_ty == staged[0].dtype:
        for i in gl.static_range(PIECES):
            async_copy.async_copy_global_to_shared(
                staged[i], source + i * PIECE, mask=exists[:, None]
            )
        async_copy.commit_group()
    else:
        loaded = ()
        for i in gl.static_range(PIECES):
            numbers = gl.load(
                source + i * PIECE, mask=exists[:, None], other=0.0, cache_modifier=".cg"
            )
            loaded = loaded + (numbers,)
        for i in gl.static_range(PIECES):
            staged[i].store(loaded[i].to(staged[i].dtype))


@gluon.jit
def _stage_values(
    staged,
    keys,
    table,
    key,
    until,
    column,
    block_stride,
    D: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    WIDE: gl.constexpr,
):
    """`stage_pieces`, for some columns of the latents of a tile's keys before `until`."""
    place = places_of_keys(key, key < until, table, block_stride, D, BLOCK_SIZE, WIDE)
    source = keys + place[:, None] + column[None, :]
    exists = (key < until)[:, None]
    if source.dtype.element_ty == staged.dtype:
        async_copy.async_copy_global_to_shared(staged, source, mask=exists)
        async_copy.commit_group()
    else:
        loaded = gl.load(source, mask=exists, other=0.0, cache_modifier=".cg")
        staged.store(loaded.to(staged.dtype))


@gluon.constexpr_function
def rows_layout(piece, bits, num_warps):
    """[rows, piece], of which a thread has 16 neighbouring bytes."""
    each = 128 // bits
    across = piece // each
    return gl.BlockedLayout([1, each], [32 // across, across], [num_warps, 1], [1, 0])


@gluon_jit(do_not_specialize=["table_stride"])
def _small_scores_kernel(
    query,
    keys,
    block_tables,
    work,
    scores,
    highest,
    table_stride,
    block_stride,
    HEADS: gl.constexpr,
    RANK: gl.constexpr,
    ROPE: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    ROWS: gl.constexpr,
    CHUNK: gl.constexpr,
    SPLIT: gl.constexpr,
    PIECE: gl.constexpr,
    WIDE: gl.constexpr,
    PDL: gl.constexpr,
    WARPS: gl.constexpr,
):
    """`work` is the list `small` of `latent_work.py`. Of each item, `scores` [ROWS, SPLIT] and the
    `highest` of every CHUNK of keys [SPLIT / CHUNK, ROWS].
    """
    CHUNKS: gl.constexpr = SPLIT // CHUNK
    D: gl.constexpr = RANK + ROPE
    PIECES: gl.constexpr = D // PIECE
    stored: gl.constexpr = keys.dtype.element_ty
    number: gl.constexpr = gl.float16 if stored == gl.float8e4nv else query.dtype.element_ty
    acc: gl.constexpr = gl.NVMMADistributedLayout(
        [2, 0], [ROWS // 16, WARPS // (ROWS // 16)], [16, 8]
    )
    as_left: gl.constexpr = gl.DotOperandLayout(0, acc, 2)
    as_right: gl.constexpr = gl.DotOperandLayout(1, acc, 2)
    of_keys: gl.constexpr = rows_layout(PIECE, stored.primitive_bitwidth, WARPS)
    of_query: gl.constexpr = rows_layout(PIECE, 16, WARPS)
    staged_query = allocate_pieces(number, PIECES, ROWS, PIECE)
    staged_keys = allocate_pieces(number, PIECES, CHUNK, PIECE)
    if PDL:
        cuda.gdc_launch_dependents()
    count = gl.load(work, cache_modifier=".cg")
    unit = gl.program_id(0)
    while unit < count * CHUNKS:
        # chunks that lie after a sequence's end come last
        item, chunk = unit % count, unit // count
        unit += gl.num_programs(0)
        entry = work + (1 + item) * 8
        _partial, split, query_row, new, context_len, table_row, _end = read_entry(entry)
        first_head = gl.load(entry + 7, cache_modifier=".cg")
        first_key = split * SPLIT + chunk * CHUNK
        if first_key < context_len:
            # the number of keys of earlier steps; the newest are written by the kernel before this
            old = context_len - new
            key = first_key + gl.arange(0, CHUNK, gl.SliceLayout(1, of_keys))
            table = block_tables + table_row.to(gl.int64) * table_stride
            exists = key < context_len
            place = places_of_keys(key, exists, table, block_stride, D, BLOCK_SIZE, WIDE)
            piece = gl.arange(0, PIECE, gl.SliceLayout(0, of_keys))
            source = keys + place[:, None] + piece[None, :]
            stage_pieces(staged_keys, source, key < old, PIECES, PIECE)
            if PDL:
                cuda.gdc_wait()
            head = first_head + gl.arange(0, ROWS, gl.SliceLayout(1, of_query))
            query_place = (query_row.to(gl.int64) * HEADS + head) * D
            query_piece = gl.arange(0, PIECE, gl.SliceLayout(0, of_query))
            query_source = query + query_place[:, None] + query_piece[None, :]
            if first_key + CHUNK > old:
                # before the zeros in place of the newest keys are overwritten
                async_copy.wait_group(0)
                tl.debug_barrier()
                stage_pieces(staged_keys, source, exists, PIECES, PIECE)
            stage_pieces(staged_query, query_source, head < HEADS, PIECES, PIECE)
            async_copy.wait_group(0)
            found = gl.zeros((ROWS, CHUNK), gl.float32, acc)
            for i in gl.static_range(PIECES):
                found = mma_v2(
                    staged_query[i].load(as_left),
                    staged_keys[i].permute((1, 0)).load(as_right),
                    found,
                )
            rows = gl.arange(0, ROWS, gl.SliceLayout(1, acc))
            used = first_head + rows < HEADS
            own_key = gl.arange(0, CHUNK, gl.SliceLayout(0, acc))
            found = gl.where((first_key + own_key < context_len)[None, :], found, float("-inf"))
            row = item.to(gl.int64) * ROWS + rows
            target = scores + (row * SPLIT + chunk * CHUNK)[:, None] + own_key[None, :]
            gl.store(target, found, mask=used[:, None])
            of_chunk = highest + (item.to(gl.int64) * CHUNKS + chunk) * ROWS + rows
            gl.store(of_chunk, gl.max(found, 1), mask=used)
            tl.debug_barrier()  # all threads have read what is staged
    if PDL and count == 0:  # programs with work have waited already
        cuda.gdc_wait()


@gluon.jit
def store_result(target, used, total, output, value_scale, SCALED: gl.constexpr):
    """As `latent_attention.store_rows`."""
    divisor = gl.max(total, 1)  # its columns are the same
    result = output / gl.where(divisor == 0.0, 1.0, divisor)[:, None]
    if SCALED:
        result = result * value_scale
    gl.store(target, result.to(target.dtype.element_ty), mask=used)


@gluon_jit(do_not_specialize=["table_stride"])
def _small_values_kernel(
    query,
    keys,
    block_tables,
    work,
    scores,
    highest,
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
    COLUMNS: gl.constexpr,
    CHUNK: gl.constexpr,
    KEYS: gl.constexpr,
    SPLIT: gl.constexpr,
    SCALED: gl.constexpr,
    WIDE: gl.constexpr,
    PDL: gl.constexpr,
    WARPS: gl.constexpr,
):
    """COLUMNS of the output of each item, from its scores."""
    PARTS: gl.constexpr = RANK // COLUMNS
    TILES: gl.constexpr = SPLIT // KEYS
    CHUNKS: gl.constexpr = SPLIT // CHUNK
    EACH: gl.constexpr = KEYS // CHUNK
    stored: gl.constexpr = keys.dtype.element_ty
    number: gl.constexpr = gl.float16 if stored == gl.float8e4nv else query.dtype.element_ty
    acc: gl.constexpr = gl.NVMMADistributedLayout(
        [2, 0], [ROWS // 16, WARPS // (ROWS // 16)], [16, 8]
    )
    as_left: gl.constexpr = gl.DotOperandLayout(0, acc, 2)
    as_right: gl.constexpr = gl.DotOperandLayout(1, acc, 2)
    of_values: gl.constexpr = rows_layout(COLUMNS, stored.primitive_bitwidth, WARPS)
    staged_values = allocate_pieces(number, TILES, KEYS, COLUMNS)
    staged_weights = allocate_pieces(number, TILES, ROWS, KEYS)
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, acc))
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, acc))
    tile_key = gl.arange(0, KEYS, gl.SliceLayout(0, acc))
    if PDL:
        cuda.gdc_launch_dependents()
    count = gl.load(work, cache_modifier=".cg")
    unit = gl.program_id(0)
    while unit < count * PARTS:
        item, part = unit // PARTS, unit % PARTS
        unit += gl.num_programs(0)
        entry = work + (1 + item) * 8
        partial, split, query_row, new, context_len, table_row, _end = read_entry(entry)
        first_head = gl.load(entry + 7, cache_modifier=".cg")
        old = context_len - new
        first_key = split * SPLIT
        table = block_tables + table_row.to(gl.int64) * table_stride
        value_key = gl.arange(0, KEYS, gl.SliceLayout(1, of_values))
        value_column = part * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(0, of_values))
        for tile in gl.static_range(TILES):
            if first_key + tile * KEYS < context_len:
                _stage_values(
                    staged_values[tile],
                    keys,
                    table,
                    first_key + tile * KEYS + value_key,
                    old,
                    value_column,
                    block_stride,
                    RANK + ROPE,
                    BLOCK_SIZE,
                    WIDE,
                )
        if PDL:
            cuda.gdc_wait()
        # the loads of all tiles, before anything waits for the first of them
        head = first_head + rows
        used = head < HEADS
        row = item.to(gl.int64) * ROWS + rows
        row_scores = scores + (row * SPLIT)[:, None] + tile_key[None, :]
        row_highest = highest + item.to(gl.int64) * (CHUNKS * ROWS) + rows
        tile_scores = ()
        tile_highest = ()
        for tile in gl.static_range(TILES):
            begin = first_key + tile * KEYS
            # by rows only, so that two neighbours are one load; what nobody wrote is not used
            loaded = gl.load(
                row_scores + tile * KEYS,
                mask=(used & (begin < context_len))[:, None],
                other=float("-inf"),
            )
            exists = (begin + tile_key < context_len)[None, :]
            tile_scores = tile_scores + (gl.where(exists, loaded, float("-inf")),)
            top = gl.full((ROWS,), float("-inf"), gl.float32, gl.SliceLayout(1, acc))
            for i in gl.static_range(EACH):
                chunk_exists = used & (begin + i * CHUNK < context_len)
                of_chunk = row_highest + (tile * EACH + i) * ROWS
                top = gl.maximum(top, gl.load(of_chunk, mask=chunk_exists, other=float("-inf")))
            tile_highest = tile_highest + (top,)
        if first_key + SPLIT > old:
            # before the zeros in place of the newest values are overwritten
            async_copy.wait_group(0)
            tl.debug_barrier()
            for tile in gl.static_range(TILES):
                begin = first_key + tile * KEYS
                if (begin < context_len) & (begin + KEYS > old):
                    _stage_values(
                        staged_values[tile],
                        keys,
                        table,
                        begin + value_key,
                        context_len,
                        value_column,
                        block_stride,
                        RANK + ROPE,
                        BLOCK_SIZE,
                        WIDE,
                    )
        reference = gl.full((ROWS,), float("-inf"), gl.float32, gl.SliceLayout(1, acc))
        references = ()
        for tile in gl.static_range(TILES):
            reference = raised(reference, tile_highest[tile] * scale, number)
            references = references + (reference,)
            if first_key + tile * KEYS < context_len:
                # Where no key is visible yet this is -inf, and -inf - -inf would be NaN.
                subtracted = gl.where(reference == float("-inf"), 0.0, reference)
                weights = gl.exp2(gl.fma(tile_scores[tile], scale, -subtracted[:, None]))
                staged_weights[tile].store(weights.to(number))
        async_copy.wait_group(0)
        tl.debug_barrier()
        ones = gl.full((KEYS, 16), 1.0, number, as_right)
        split_highest = gl.full((ROWS,), float("-inf"), gl.float32, gl.SliceLayout(1, acc))
        total = gl.zeros((ROWS, 16), gl.float32, acc)
        output = gl.zeros((ROWS, COLUMNS), gl.float32, acc)
        for tile in gl.static_range(TILES):
            if first_key + tile * KEYS < context_len:
                new_highest = references[tile]
                subtracted = gl.where(new_highest == float("-inf"), 0.0, new_highest)
                decay = gl.exp2(split_highest - subtracted)
                tile_weights = staged_weights[tile].load(as_left)
                total = mma_v2(tile_weights, ones, total * decay[:, None])
                output = mma_v2(
                    tile_weights, staged_values[tile].load(as_right), output * decay[:, None]
                )
                split_highest = new_highest
        place_of_row = query_row.to(gl.int64) * HEADS + head
        target = out + (place_of_row * RANK + part * COLUMNS)[:, None] + column[None, :]
        num_splits = gl.cdiv(context_len, SPLIT)
        if num_splits == 1:  # merging with an empty result would change no bit
            store_result(target, used[:, None], total, output, value_scale, SCALED)
        else:
            first_slot = partial * PARTS + part
            slot = (first_slot + split * PARTS).to(gl.int64)
            gl.store(
                stored_output + ((slot * ROWS + rows) * COLUMNS)[:, None] + column[None, :],
                output,
                mask=used[:, None],
            )
            state = stored_state + slot * 2 * ROWS + rows
            gl.store(state, split_highest)
            gl.store(state + ROWS, gl.max(total, 1))
            # all threads' stores must come before the atomic count, which makes them visible
            tl.debug_barrier()
            if gl.atomic_add(arrived + first_slot, 1, sem="acq_rel", scope="gpu") == num_splits - 1:
                _highest, merged_total, merged = merge_stored(
                    stored_output,
                    stored_state,
                    first_slot,
                    PARTS,
                    0,
                    num_splits,
                    rows,
                    column,
                    used[:, None],
                    gl.full((ROWS,), float("-inf"), gl.float32, gl.SliceLayout(1, acc)),
                    gl.zeros((ROWS, 1), gl.float32, acc),
                    gl.zeros((ROWS, COLUMNS), gl.float32, acc),
                    ROWS,
                    COLUMNS,
                    _AT_ONCE,
                )
                store_result(target, used[:, None], merged_total, merged, value_scale, SCALED)
                gl.store(arrived + first_slot, 0)
        tl.debug_barrier()  # all threads have read what is staged
    if PDL and count == 0:  # programs with work have waited already
        cuda.gdc_wait()


def small_batch_latent(
    query: Tensor,
    cache: LayerCache,
    block_tables: Tensor,
    work: Tensor,
    spec: LatentSpec,
    max_context_len: int,
    num_multiprocessors: int,
) -> Tensor:
    """`latent_attention.latent_attention` for the list `small`. Before the step's first kernel, all
    must be written but the latents that the list calls new.
    """
    rows, heads, _ = query.shape
    out = torch.empty(rows, heads, spec.rank, dtype=query.dtype, device=query.device)
    each, splits = small_rows(heads), cdiv(max_context_len, SPLIT)
    items = min(len(work) - 1, rows * cdiv(heads, each) * splits)
    if not items:
        return out
    chunks, parts = SPLIT // _CHUNK, spec.rank // _COLUMNS
    stored = (items if splits > 1 else 1) * each * parts
    key_scale, value_scale = cache.fp8_scales
    both: dict[str, Any] = {
        "query": query,
        "keys": cache.keys,
        "block_tables": block_tables,
        "work": work,
        "scores": query.new_empty(items * each * SPLIT, dtype=torch.float32),
        "highest": query.new_empty(items * each * chunks, dtype=torch.float32),
        "table_stride": block_tables.stride(0),
        "block_stride": cache.keys.stride(0),
        **constants(heads, spec, cache),
        **ROUND_ALWAYS,
        **LAUNCH,
    }
    most = _PROGRAMS * num_multiprocessors
    _small_scores_kernel[(min(items * chunks, most),)](
        **both, PIECE=_PIECE, WARPS=_SCORE_WARPS, num_warps=_SCORE_WARPS
    )
    _small_values_kernel[(min(items * parts, most),)](
        out=out,
        stored_output=query.new_empty(stored * _COLUMNS, dtype=torch.float32),
        stored_state=query.new_empty(stored * 2, dtype=torch.float32),
        arrived=counters(query.device, 1),
        # log2(e) is a part of the scale, as weights are computed with exp2
        scale=spec.scale * key_scale * math.log2(math.e),
        value_scale=value_scale,
        **both,
        COLUMNS=_COLUMNS,
        KEYS=KEY_TILE,
        SCALED=value_scale != 1,
        WARPS=_VALUE_WARPS,
        num_warps=_VALUE_WARPS,
        maxnreg=_REGISTERS,
    )
    return out


def constants(heads: int, spec: LatentSpec, cache: LayerCache) -> dict[str, Any]:
    """Those of both kernels."""
    return {
        "HEADS": heads,
        "RANK": spec.rank,
        "ROPE": spec.rope_dim,
        "BLOCK_SIZE": cache.block_size,
        "ROWS": small_rows(heads),
        "CHUNK": _CHUNK,
        "SPLIT": SPLIT,
        "WIDE": is_wide(cache.keys),
        "PDL": USE_PDL,
    }
