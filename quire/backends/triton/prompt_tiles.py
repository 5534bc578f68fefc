"""What the parts of the kernel for prompts (`prompt_attention.py`) share: which items of work a
program takes, and the copying of tiles of keys and values to shared memory, with barriers that say
which are there and which were used.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.extra import cuda

GROUP_ROWS = gl.constexpr(64)
"""(query, head) rows that a group of four warps computes."""
COPIED = gl.constexpr(64)
"""Numbers of a head per copy: as many as the tensor core's swizzled layout has side by side."""


@gluon.jit
def item_of(turn):
    """The item that this program takes in its turn number `turn`. Items get shorter along the list,
    so every second round goes backwards, to give all programs about the same work.
    """
    programs = gl.num_programs(0)
    place = gl.program_id(0)
    return turn * programs + (place if turn % 2 == 0 else programs - 1 - place)


@gluon.jit
def read_item(
    item,
    work,
    num_kv_heads,
    window,
    GROUP: gl.constexpr,
    ROWS: gl.constexpr,
    KEYS: gl.constexpr,
    WINDOW: gl.constexpr,
):
    """Returns: key head, first of the (query, head) rows, first row of the batch, number of
    queries, context length, row of the block table, first tile of keys, end of the tiles.
    """
    entry = work + item // num_kv_heads * 8
    first = gl.load(entry)
    first_row = gl.load(entry + 2)
    num_queries = gl.load(entry + 3)
    context_len = gl.load(entry + 4)
    table_row = gl.load(entry + 5)
    # No query sees keys after the last query.
    last_position = gl.minimum(
        context_len - num_queries + (first + ROWS - 1) // GROUP, context_len - 1
    )
    first_tile = 0
    if WINDOW:
        first_tile = gl.maximum(context_len - num_queries + first // GROUP - window + 1, 0) // KEYS
    end_tile = last_position // KEYS + 1
    return (
        item % num_kv_heads,
        first,
        first_row,
        num_queries,
        context_len,
        table_row,
        first_tile,
        end_tile,
    )


@gluon.jit
def _copy_tile(
    source,
    boxes,
    barrier,
    stage,
    rows,
    D: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    KEYS: gl.constexpr,
):
    """Starts to copy a tile [KEYS, D] whose blocks begin at these rows of the cache."""
    BLOCKS: gl.constexpr = KEYS // BLOCK_SIZE
    PARTS: gl.constexpr = D // COPIED
    mbarrier.expect(barrier, KEYS * D * 2)
    for i in gl.static_range(BLOCKS):
        for part in gl.static_range(PARTS):
            box = boxes.index((stage * PARTS + part) * BLOCKS + i)
            tma.async_copy_global_to_shared(source, [rows[i], part * COPIED], barrier, box)


@gluon.jit
def copy_tiles(
    keys,
    values,
    key_boxes,
    value_boxes,
    keys_full,
    keys_empty,
    values_full,
    values_empty,
    block_tables,
    work,
    num_tiles,
    table_stride,
    window,
    num_kv_heads,
    GROUP: gl.constexpr,
    D: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    ROWS: gl.constexpr,
    KEYS: gl.constexpr,
    WINDOW: gl.constexpr,
    STAGES: gl.constexpr,
    PDL: gl.constexpr,
):
    """The program of the copying warp."""
    if PDL:
        cuda.gdc_wait()
    num_items = num_tiles * num_kv_heads
    copied = 0
    for turn in range(0, gl.cdiv(num_items, gl.num_programs(0))):
        item = item_of(turn)
        if item < num_items:
            kv_head, _, _, _, context_len, table_row, first_tile, end_tile = read_item(
                item, work, num_kv_heads, window, GROUP, ROWS, KEYS, WINDOW
            )
            table = block_tables + table_row.to(gl.int64) * table_stride
            for tile in range(first_tile, end_tile):
                stage = copied % STAGES
                phase = copied // STAGES & 1
                rows = ()
                for i in gl.static_range(KEYS // BLOCK_SIZE):
                    # After the sequence's end block 0 is read, which belongs to no request.
                    place = tile * (KEYS // BLOCK_SIZE) + i
                    block = gl.load(table + place, mask=place * BLOCK_SIZE < context_len, other=0)
                    rows = rows + ((block * num_kv_heads + kv_head) * BLOCK_SIZE,)  # type: ignore  # noqa: RUF005
                mbarrier.wait(keys_empty.index(stage), phase ^ 1)
                _copy_tile(
                    keys, key_boxes, keys_full.index(stage), stage, rows, D, BLOCK_SIZE, KEYS
                )
                mbarrier.wait(values_empty.index(stage), phase ^ 1)
                _copy_tile(
                    values, value_boxes, values_full.index(stage), stage, rows, D, BLOCK_SIZE, KEYS
                )
                copied += 1


@gluon.jit
def barriers(STAGES: gl.constexpr, COUNT: gl.constexpr):
    """One for each stage, which opens when so many have arrived."""
    made = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(made.index(stage), count=COUNT)
    return made
