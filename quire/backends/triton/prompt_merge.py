"""How the kernel for prompts (`prompt_attention.py`) merges the results of a row's splits of keys.

A program keeps what came of the earlier ones in shared memory, as far as there is room, the rest in
memory of its own (96 KiB for heads of 256, in the L2 cache). Every thread stores and loads its own
numbers.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quire.backends.triton.prompt_tiles import GROUP_ROWS

LARGE_SHARED = 64
"""Columns of heads of 256 for which there is room in shared memory."""
PIECE = gl.constexpr(32)
"""Columns that are merged at once."""
_AHEAD = gl.constexpr(2)
"""Pieces that are loaded before the first one is used: for more of them others would be spilled."""


@gluon.jit
def merge(
    highest,
    total,
    merged,
    stored,
    split_highest,
    split_total,
    output,
    is_first,
    is_last,
    NUMBER: gl.constexpr,
    SHARED: gl.constexpr,
    as_total: gl.constexpr,
    as_output: gl.constexpr,
):
    """`attention_splits.merge`, for totals and outputs in different layouts, with what came of the
    splits before; unless this is the last one, what comes of it is kept for the next one: SHARED
    columns in shared memory, the others in memory.
    """
    split_highest = gl.convert_layout(split_highest, gl.SliceLayout(1, as_output))
    new_highest = gl.maximum(highest, split_highest)
    reference = gl.where(new_highest == float("-inf"), 0.0, new_highest)
    old = gl.exp2(highest - reference)
    new = gl.exp2(split_highest - reference)
    output = _merge_output(
        output, merged, stored, old, new, is_first, is_last, NUMBER, SHARED // PIECE, as_output
    )
    old = gl.convert_layout(old, gl.SliceLayout(1, as_total))
    new = gl.convert_layout(new, gl.SliceLayout(1, as_total))
    total = total * old[:, None] + split_total * new[:, None]
    return new_highest, total, output


@gluon.jit
def _merge_output(
    output,
    merged,
    stored,
    old,
    new,
    is_first,
    is_last,
    NUMBER: gl.constexpr,
    SHARED: gl.constexpr,
    as_output: gl.constexpr,
):
    """The outputs' part of `merge`, in pieces, so that some are loaded while others are computed, but
    no more than there are registers for. The first SHARED are in shared memory.
    """
    pieces = _pieces(output)
    STORED: gl.constexpr = len(pieces) - SHARED
    AHEAD: gl.constexpr = min(STORED, _AHEAD)
    SIZE: gl.constexpr = GROUP_ROWS * PIECE
    layout: gl.constexpr = _by_thread(pieces[0]).type.layout
    places = stored + gl.arange(0, SIZE, layout)
    loaded = ()
    for i in gl.static_range(AHEAD):
        loaded = loaded + (_load_piece(places + i * SIZE, is_first),)  # type: ignore  # noqa: RUF005
    results = ()
    for i in gl.static_range(SHARED):
        if is_first:  # noqa: SIM108
            earlier = gl.zeros((SIZE,), gl.float32, layout)
        else:
            earlier = merged.index(NUMBER * SHARED + i).load(layout)
        result = _add_piece(earlier, pieces[i], old, new)
        if not is_last:
            merged.index(NUMBER * SHARED + i).store(_by_thread(result))
        results = results + (result,)  # type: ignore  # noqa: RUF005
    for i in gl.static_range(STORED):
        if i + AHEAD < STORED:
            following = _load_piece(places + (i + AHEAD) * SIZE, is_first)
            loaded = loaded + (following,)  # type: ignore  # noqa: RUF005
        result = _add_piece(loaded[i], pieces[SHARED + i], old, new)
        if not is_last:
            gl.store(places + i * SIZE, _by_thread(result))
        results = results + (result,)  # type: ignore  # noqa: RUF005
    tl.debug_barrier()  # explicit here, or the compiler adds one that all tiles go through
    return gl.convert_layout(_joined(results), as_output, assert_trivial=True)


@gluon.jit
def _load_piece(places, is_first):
    """A piece of what came of earlier splits: zeros if there were none."""
    if is_first:
        layout: gl.constexpr = places.type.layout
        numbers = gl.zeros((GROUP_ROWS * PIECE,), gl.float32, layout)
    else:
        numbers = gl.load(places, cache_modifier=".cg")
    return numbers


@gluon.jit
def _add_piece(earlier, piece, old, new):
    layout: gl.constexpr = piece.type.layout
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    old = gl.convert_layout(old, rows, assert_trivial=True)
    new = gl.convert_layout(new, rows, assert_trivial=True)
    parts = earlier.reshape(PIECE // 8, GROUP_ROWS // 16, 8, 4, 2, 2)  # `_by_thread` undone
    earlier = parts.permute(1, 4, 2, 0, 3, 5).reshape(GROUP_ROWS, PIECE)
    earlier = gl.convert_layout(earlier, layout, assert_trivial=True)
    return earlier * old[:, None] + piece * new[:, None]


@gluon.jit
def _by_thread(piece):
    """A piece's numbers side by side as the threads have them: four of each, which it stores at once."""
    parts = piece.reshape(GROUP_ROWS // 16, 2, 8, PIECE // 8, 4, 2)
    return parts.permute(3, 0, 2, 4, 1, 5).reshape(GROUP_ROWS * PIECE)


@gluon.jit
def _pieces(numbers):
    """Pieces of PIECE columns, for which no thread gives a number away."""
    COLUMNS: gl.constexpr = numbers.shape[1]
    if COLUMNS == PIECE:
        return (numbers,)
    else:  # noqa: RET505
        halves = numbers.reshape(GROUP_ROWS, 2, COLUMNS // 2).permute(0, 2, 1)
        first, second = halves.split()
        return _pieces(first) + _pieces(second)


@gluon.jit
def _joined(pieces):
    """`_pieces` undone."""
    COUNT: gl.constexpr = len(pieces)
    if COUNT == 1:
        return pieces[0]
    else:  # noqa: RET505
        first = _joined(pieces[: COUNT // 2])
        second = _joined(pieces[COUNT // 2 :])
        second = gl.convert_layout(second, first.type.layout, assert_trivial=True)
        both = gl.join(first, second).permute(0, 2, 1)
        return both.reshape(GROUP_ROWS, COUNT * PIECE)
