"""The two groups of warps of the kernel for prompts' latent attention (`prompt_latent.py`), which share
a tile of rows: each has half of the output's columns and computes the weights of every second tile
of keys.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra import cuda

from quire.backends.triton.attention_tile import raised
from quire.backends.triton.attention_work import KEY_TILE, SPLIT
from quire.backends.triton.latent_work import LATENT_ROWS
from quire.backends.triton.prompt_tiles import item_of

ROWS = gl.constexpr(LATENT_ROWS)
TILE = gl.constexpr(KEY_TILE)
ONES = gl.constexpr(8)
_PAIRS = gl.constexpr(SPLIT // KEY_TILE // 2)
"""Pairs of tiles in a split."""
_HUGE = gl.constexpr(30)
"""A number of tiles shifted right by it is 0, which compilers don't know: they would compute the
addresses of all operands once for all tiles, more than there are registers for.
"""


@gluon.jit
def read_item(item, work, HEADS: gl.constexpr):
    """Returns: first row of the batch, first of the (query, head) rows, number of queries, context
    length, row of the block table, number of tiles of keys, and whether the item has all of them.
    """
    entry = work + (1 + item) * 8
    first_split = gl.load(entry + 1)
    first_row = gl.load(entry + 2)
    num_queries = gl.load(entry + 3)
    context_len = gl.load(entry + 4)
    table_row = gl.load(entry + 5)
    end_split = gl.load(entry + 6)
    first = gl.load(entry + 7)
    last_query = gl.minimum((first + ROWS - 1) // HEADS, num_queries - 1)
    num_tiles = gl.cdiv(context_len - num_queries + last_query + 1, TILE)
    is_whole = (first_split == 0) & (end_split * (2 * _PAIRS) >= num_tiles)
    return first_row, first, num_queries, context_len, table_row, num_tiles, is_whole


@gluon.jit
def _clear_rows(tile, end, HALF: gl.constexpr):
    """Sets rows from `end` on to zero: values after the sequence's end may be NaN."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    for start in gl.static_range(0, TILE, 16):
        part = tile.slice(start, 16)
        row = start + gl.arange(0, 16, gl.SliceLayout(1, layout))
        found = part.load(layout)
        part.store(gl.where((row < end)[:, None], found, gl.zeros_like(found)))
    fence_async_shared()
    tl.debug_barrier()  # explicit here, or the compiler adds one that all tiles go through


@gluon.jit
def _weights(scores, scale, before, first_key, position, first_position, dtype: gl.constexpr):
    """The weights of a tile; what they are relative to (`before`: those before them); and whether a
    row needs another factor for earlier weights than 1.
    """
    key = first_key + gl.arange(0, TILE, gl.SliceLayout(0, scores.type.layout))
    if first_key + TILE > first_position + 1:
        scores = gl.where(key[None, :] <= position[:, None], scores, float("-inf"))
    highest = raised(before, gl.max(scores, 1) * scale, gl.bfloat16)
    # Where no key is visible yet this is -inf, and -inf - -inf would be NaN.
    reference = gl.where(highest == float("-inf"), 0.0, highest)
    weights = gl.exp2(gl.fma(scores, scale, -reference[:, None]))
    change = (highest != before) & (before != float("-inf"))
    return weights.to(dtype), highest, change.to(gl.int32)


@gluon.jit
def _places(base, HALF: gl.constexpr, layout: gl.constexpr):
    """Where the numbers of a group lie in its memory: those that the threads of a warp store together
    side by side.
    """
    row = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    column = gl.arange(0, HALF, gl.SliceLayout(0, layout))
    of_row = row // 16 * (16 * HALF) + row // 8 % 2 * 64 + row % 8 * 8
    return base + of_row[:, None] + (column // 8 * 128 + column % 8)[None, :]


@gluon.jit
def _merge(highest, output, split_highest, places, is_first, is_last, as_output: gl.constexpr):
    """`attention_splits.merge`, of what was stored and a split's output; stores it if more follow.
    Also returns the factors for earlier weights and for the split's.
    """
    split_highest = gl.convert_layout(split_highest, gl.SliceLayout(1, as_output))
    new_highest = gl.maximum(highest, split_highest)
    reference = gl.where(new_highest == float("-inf"), 0.0, new_highest)
    old = gl.exp2(highest - reference)
    new = gl.exp2(split_highest - reference)
    if not is_first:  # merging with an empty result would change no bit
        merged = gl.load(places, cache_modifier=".cg")
        output = merged * old[:, None] + output * new[:, None]
    if not is_last:
        gl.store(places, output)
    return new_highest, output, old, new


@gluon.constexpr_function
def _four_columns(half: int) -> gl.DistributedLinearLayout:
    """A product's layout in which neighbouring threads have exchanged columns: each has four side by
    side, which are stored at once, and a row's 32 bytes are those of four threads.
    """
    others = [[0, 1 << bit] for bit in range(4, half.bit_length() - 1)]
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [8, 0], *others],
        lane_bases=[[0, 8], [0, 4], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[ROWS.value, half],
    )


@gluon.jit
def _store_rows(
    out,
    output,
    divisor,
    first_place,
    num_used,
    first_column,
    HALF: gl.constexpr,
    dtype: gl.constexpr,
):
    layout: gl.constexpr = _four_columns(HALF)
    row = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    column = first_column + gl.arange(0, HALF, gl.SliceLayout(0, layout))
    result = output / gl.where(divisor == 0.0, 1.0, divisor)[:, None]
    target = out + (first_place + row)[:, None] * (2 * HALF) + column[None, :]
    stored = gl.convert_layout(result.to(dtype), layout)
    gl.store(target, stored, mask=(row < num_used)[:, None])


@gluon.jit
def attend_first(
    query_halves,
    query_rope,
    first,
    second,
    rope,
    shared_weights,
    shared_highest,
    shared_divisor,
    ones,
    query_full,
    query_empty,
    first_full,
    first_empty,
    second_full,
    rope_full,
    rope_empty,
    weights_full,
    divisor_full,
    out,
    work,
    failed,
    stored,
    scale,
    HEADS: gl.constexpr,
    HALF: gl.constexpr,
    PDL: gl.constexpr,
):
    """The program of the group that has the first half of the columns, the scores of even tiles, and
    the sums of weights.
    """
    as_scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    as_output: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    as_total: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ONES, 16])
    as_left: gl.constexpr = gl.DotOperandLayout(0, as_output, 2)
    as_left_of_ones: gl.constexpr = gl.DotOperandLayout(0, as_total, 2)
    rows: gl.constexpr = gl.SliceLayout(1, as_scores)
    dtype: gl.constexpr = out.dtype.element_ty
    if PDL:
        cuda.gdc_wait()
    count = gl.load(work)
    num_items = 0
    num_seen = 0
    places = _places(stored + gl.program_id(0) * (2 * ROWS * HALF), HALF, as_output)
    nothing = gl.zeros((ROWS, TILE), gl.float32, as_scores)
    for turn in range(0, gl.cdiv(count, gl.num_programs(0))):
        item = item_of(turn)
        if item < count:
            first_row, row, num_queries, context_len, _, num_tiles, is_whole = read_item(
                item, work, HEADS
            )
            num_used = num_queries * HEADS - row
            place = first_row.to(gl.int64) * HEADS + row
            first_position = context_len - num_queries + row // HEADS
            own_row = gl.arange(0, ROWS, rows)
            position = context_len - num_queries + (row + own_row) // HEADS
            if not is_whole:
                gl.store(failed + item * 2, 1)
            else:
                num_pairs = gl.cdiv(num_tiles, 2)
                even = num_tiles >> _HUGE
                highest = gl.full((ROWS,), float("-inf"), gl.float32, gl.SliceLayout(1, as_output))
                total = gl.zeros((ROWS, ONES), gl.float32, as_total)
                split_total = gl.zeros((ROWS, ONES), gl.float32, as_total)
                output = gl.zeros((ROWS, HALF), gl.float32, as_output)
                mbarrier.wait(query_full.index(0), num_items & 1)
                num_items += 1
                mbarrier.wait(first_full.index(0), num_seen & 1)
                scores = warpgroup_mma(
                    query_halves.index(even),
                    first.index(even).permute((1, 0)),
                    nothing,
                    use_acc=False,
                    is_async=True,
                )
                mbarrier.wait(second_full.index(0), num_seen & 1)
                scores = warpgroup_mma(
                    query_halves.index(1 + even),
                    second.index(even).permute((1, 0)),
                    scores,
                    is_async=True,
                )
                mbarrier.wait(rope_full.index(0), num_seen & 1)
                scores = warpgroup_mma(
                    query_rope, rope.index(even).permute((1, 0)), scores, is_async=True
                )
                scores = warpgroup_mma_wait(0, deps=(scores,))
                mbarrier.arrive(rope_empty.index(0))
                mbarrier.arrive(query_empty.index(0), pred=num_pairs == 1)
                before = gl.full((ROWS,), float("-inf"), gl.float32, rows)
                weights, reference, has_failed = _weights(
                    scores, scale, before, 0, position, first_position, dtype
                )
                shared_weights.store(weights)
                shared_highest.store(reference)
                tl.debug_barrier()
                mbarrier.arrive(weights_full.index(0))
                for pair in range(0, num_pairs):
                    phase = num_seen & 1
                    even = pair >> _HUGE
                    num_seen += 1
                    has_next = pair + 1 < num_pairs
                    ends_split = (pair + 1) % _PAIRS == 0
                    continues = pair % _PAIRS != 0
                    end = context_len - pair * (2 * TILE)
                    if end < TILE:
                        _clear_rows(first.index(0), end, HALF)
                    left = gl.convert_layout(weights, as_left)
                    left_of_ones = gl.convert_layout(weights, as_left_of_ones)
                    adding_total = warpgroup_mma(
                        left_of_ones,
                        ones.permute((1, 0)),
                        split_total,
                        use_acc=continues,
                        is_async=True,
                    )
                    adding = warpgroup_mma(
                        left, first.index(0), output, use_acc=continues, is_async=True
                    )
                    # They end before the other group's softmax does: so the next tile's copy starts
                    # while this group waits for it.
                    left, adding_total, adding = warpgroup_mma_wait(
                        0, deps=(left, adding_total, adding)
                    )
                    mbarrier.arrive(first_empty.index(0))
                    mbarrier.wait(weights_full.index(1), phase)
                    mbarrier.wait(first_full.index(1), phase)
                    others = shared_weights.load(as_left)
                    reference = shared_highest.load(rows)
                    if end < 2 * TILE:
                        _clear_rows(first.index(1), end - TILE, HALF)
                    others_of_ones = gl.convert_layout(others, as_left_of_ones)
                    adding_total = warpgroup_mma(
                        others_of_ones, ones.permute((1, 0)), adding_total, is_async=True
                    )
                    adding = warpgroup_mma(others, first.index(1), adding, is_async=True)
                    split_highest = reference
                    if has_next:
                        mbarrier.wait(first_full.index(0), phase ^ 1)
                        scores = warpgroup_mma(
                            query_halves.index(even),
                            first.index(even).permute((1, 0)),
                            nothing,
                            use_acc=False,
                            is_async=True,
                        )
                        # Before it waits for more of the next tile: the other group needs what comes
                        # in this one's place.
                        split_total, output = warpgroup_mma_wait(1, deps=(adding_total, adding))
                        mbarrier.arrive(first_empty.index(1))
                        mbarrier.wait(second_full.index(0), phase ^ 1)
                        scores = warpgroup_mma(
                            query_halves.index(1 + even),
                            second.index(even).permute((1, 0)),
                            scores,
                            is_async=True,
                        )
                        mbarrier.wait(rope_full.index(0), phase ^ 1)
                        scores = warpgroup_mma(
                            query_rope, rope.index(even).permute((1, 0)), scores, is_async=True
                        )
                        scores = warpgroup_mma_wait(0, deps=(scores,))
                        mbarrier.arrive(rope_empty.index(0))
                        mbarrier.arrive(query_empty.index(0), pred=pair + 2 == num_pairs)
                        before = gl.where(ends_split, float("-inf"), reference)
                        weights, reference, change = _weights(
                            scores,
                            scale,
                            before,
                            (pair + 1) * (2 * TILE),
                            position,
                            first_position,
                            dtype,
                        )
                        has_failed = has_failed | change
                        shared_weights.store(weights)
                        shared_highest.store(reference)
                        tl.debug_barrier()
                        mbarrier.arrive(weights_full.index(0))
                    else:
                        split_total, output = warpgroup_mma_wait(0, deps=(adding_total, adding))
                        mbarrier.arrive(first_empty.index(1))
                    if ends_split | (not has_next):
                        highest, output, old, new = _merge(
                            highest,
                            output,
                            split_highest,
                            places,
                            pair < _PAIRS,
                            not has_next,
                            as_output,
                        )
                        old = gl.convert_layout(old, gl.SliceLayout(1, as_total))
                        new = gl.convert_layout(new, gl.SliceLayout(1, as_total))
                        total = total * old[:, None] + split_total * new[:, None]
                # its columns are the same
                divisor = gl.convert_layout(gl.max(total, 1), gl.SliceLayout(1, as_output))
                shared_divisor.store(divisor)
                tl.debug_barrier()
                mbarrier.arrive(divisor_full.index(0))
                _store_rows(out, output, divisor, place, num_used, 0, HALF, dtype)
                has_failed = gl.where(own_row < num_used, has_failed, 0)
                gl.store(failed + item * 2, gl.max(has_failed, 0))


@gluon.jit
def attend_second(
    query_halves,
    query_rope,
    first,
    second,
    rope,
    shared_weights,
    shared_highest,
    shared_divisor,
    query_full,
    query_empty,
    first_full,
    second_full,
    second_empty,
    rope_full,
    rope_empty,
    weights_full,
    divisor_full,
    out,
    work,
    failed,
    stored,
    scale,
    HEADS: gl.constexpr,
    HALF: gl.constexpr,
    PDL: gl.constexpr,
):
    """The program of the group that has the second half of the columns and the scores of odd tiles.
    An item's last tile may be one that no row sees, which changes nothing.
    """
    as_scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    as_output: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    as_left: gl.constexpr = gl.DotOperandLayout(0, as_output, 2)
    rows: gl.constexpr = gl.SliceLayout(1, as_scores)
    dtype: gl.constexpr = out.dtype.element_ty
    if PDL:
        cuda.gdc_wait()
    count = gl.load(work)
    num_items = 0
    num_seen = 0
    places = _places(stored + gl.program_id(0) * (2 * ROWS * HALF) + ROWS * HALF, HALF, as_output)
    nothing = gl.zeros((ROWS, TILE), gl.float32, as_scores)
    for turn in range(0, gl.cdiv(count, gl.num_programs(0))):
        item = item_of(turn)
        if item < count:
            first_row, row, num_queries, context_len, _, num_tiles, is_whole = read_item(
                item, work, HEADS
            )
            num_used = num_queries * HEADS - row
            place = first_row.to(gl.int64) * HEADS + row
            first_position = context_len - num_queries + row // HEADS
            own_row = gl.arange(0, ROWS, rows)
            position = context_len - num_queries + (row + own_row) // HEADS
            if not is_whole:
                gl.store(failed + item * 2 + 1, 1)
            else:
                num_pairs = gl.cdiv(num_tiles, 2)
                even = num_tiles >> _HUGE
                highest = gl.full((ROWS,), float("-inf"), gl.float32, gl.SliceLayout(1, as_output))
                output = gl.zeros((ROWS, HALF), gl.float32, as_output)
                has_failed = gl.zeros((ROWS,), gl.int32, rows)
                mbarrier.wait(query_full.index(0), num_items & 1)
                mbarrier.wait(first_full.index(1), num_seen & 1)
                scores = warpgroup_mma(
                    query_halves.index(even),
                    first.index(1 + even).permute((1, 0)),
                    nothing,
                    use_acc=False,
                    is_async=True,
                )
                mbarrier.wait(second_full.index(1), num_seen & 1)
                scores = warpgroup_mma(
                    query_halves.index(1 + even),
                    second.index(1 + even).permute((1, 0)),
                    scores,
                    is_async=True,
                )
                mbarrier.wait(rope_full.index(1), num_seen & 1)
                scores = warpgroup_mma(
                    query_rope, rope.index(1 + even).permute((1, 0)), scores, is_async=True
                )
                scores = warpgroup_mma_wait(0, deps=(scores,))
                mbarrier.arrive(rope_empty.index(1))
                mbarrier.arrive(query_empty.index(0), pred=num_pairs == 1)
                for pair in range(0, num_pairs):
                    phase = num_seen & 1
                    even = pair >> _HUGE
                    num_seen += 1
                    has_next = pair + 1 < num_pairs
                    end = context_len - pair * (2 * TILE)
                    mbarrier.wait(weights_full.index(0), phase)
                    mbarrier.wait(second_full.index(0), phase)
                    others = shared_weights.load(as_left)
                    reference = shared_highest.load(rows)
                    tl.debug_barrier()  # all have read what this group is going to overwrite
                    if end < TILE:
                        _clear_rows(second.index(0), end, HALF)
                    output = warpgroup_mma(
                        others,
                        second.index(0),
                        output,
                        use_acc=pair % _PAIRS != 0,
                        is_async=True,
                    )
                    # always so: the branch keeps the compilers from moving the softmax after the end
                    # of the product
                    if num_used > 0:
                        weights, reference, change = _weights(
                            scores,
                            scale,
                            reference,
                            pair * (2 * TILE) + TILE,
                            position,
                            first_position,
                            dtype,
                        )
                        has_failed = has_failed | change
                        shared_weights.store(weights)
                        shared_highest.store(reference)
                        tl.debug_barrier()
                        mbarrier.arrive(weights_full.index(1))
                    else:
                        weights = scores.to(dtype)
                    output = warpgroup_mma_wait(0, deps=(output,))
                    mbarrier.arrive(second_empty.index(0))
                    if end < 2 * TILE:
                        _clear_rows(second.index(1), end - TILE, HALF)
                    left = gl.convert_layout(weights, as_left)
                    output = warpgroup_mma(left, second.index(1), output, is_async=True)
                    output = warpgroup_mma_wait(0, deps=(output,))
                    mbarrier.arrive(second_empty.index(1))
                    if ((pair + 1) % _PAIRS == 0) | (not has_next):
                        highest, output, _old, _new = _merge(
                            highest,
                            output,
                            reference,
                            places,
                            pair < _PAIRS,
                            not has_next,
                            as_output,
                        )
                    if has_next:
                        mbarrier.wait(first_full.index(1), phase ^ 1)
                        scores = warpgroup_mma(
                            query_halves.index(even),
                            first.index(1 + even).permute((1, 0)),
                            nothing,
                            use_acc=False,
                            is_async=True,
                        )
                        mbarrier.wait(second_full.index(1), phase ^ 1)
                        scores = warpgroup_mma(
                            query_halves.index(1 + even),
                            second.index(1 + even).permute((1, 0)),
                            scores,
                            is_async=True,
                        )
                        mbarrier.wait(rope_full.index(1), phase ^ 1)
                        scores = warpgroup_mma(
                            query_rope, rope.index(1 + even).permute((1, 0)), scores, is_async=True
                        )
                        scores = warpgroup_mma_wait(0, deps=(scores,))
                        mbarrier.arrive(rope_empty.index(1))
                        mbarrier.arrive(query_empty.index(0), pred=pair + 2 == num_pairs)
                mbarrier.wait(divisor_full.index(0), num_items & 1)
                num_items += 1
                divisor = shared_divisor.load(gl.SliceLayout(1, as_output))
                _store_rows(out, output, divisor, place, num_used, HALF, HALF, dtype)
                has_failed = gl.where(own_row < num_used, has_failed, 0)
                gl.store(failed + item * 2 + 1, gl.max(has_failed, 0))
