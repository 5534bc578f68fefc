"""Attention over one tile of keys and values, from a cache of 16 or 32 bits or of FP8.

FP8 numbers are read two at a time, as an int16, and converted to float16, which is exact. A tile
then has first the even numbers of a head and then the odd ones; queries and outputs have the same
order until the result is stored.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.backends.triton.rowwise import soft_capped

_TO_FLOAT16 = tl.constexpr(
    "{.reg .b32 bytes; .reg .b16 even, odd; prmt.b32 bytes, $2, 0, 0x3120; mov.b32 {even, odd}, bytes;"
    "cvt.rn.f16x2.e4m3x2 $0, even; cvt.rn.f16x2.e4m3x2 $1, odd;}"
)


@triton.jit
def _read_tile(source, place, exists, D: tl.constexpr, D_PAD: tl.constexpr):
    """Loads keys or values. After the sequence's end the cache may hold NaN: zeros are used
    instead.
    """
    column = tl.arange(0, D_PAD)
    mask = exists[:, None] & (column < D)[None, :]
    return tl.load(source + place[:, None] + column[None, :], mask=mask, other=0)


@triton.jit
def _numbers(pairs):
    """The even and the odd numbers of pairs, in float16. Each thread converts in its own registers,
    where it would have 16-bit numbers otherwise, so that products add in the same order.
    """
    return tl.inline_asm_elementwise(
        _TO_FLOAT16, "=r,=r,r", [pairs], (tl.float16, tl.float16), True, 2
    )


@triton.jit
def halves(rows):
    return tl.split(rows.reshape(rows.shape[0], 2, rows.shape[1] // 2).permute(0, 2, 1))


@triton.jit
def raised(reference, highest, NUMBER: tl.constexpr):
    """What a row's weights are relative to after a tile with this highest score: weights are
    2**(score - reference). It is the highest score of the first tile, and stays until weights come
    near the largest number, as all that was added up has to be scaled when it changes.
    """
    limit: tl.constexpr = 8.0 if NUMBER == tl.float16 else 64.0  # noqa: SIM300  (it is a type, no constant)
    return tl.where(highest > reference + limit, highest, reference)


@triton.jit
def attend_tile(
    query,
    highest,
    total,
    output,
    first_key,
    context_len,
    position,
    keys,
    values,
    table,
    kv_head,
    block_stride,
    head_stride,
    scale,
    window,
    cap,
    slope,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
    SLOPES: tl.constexpr,
    ONES: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Adds one tile of keys to the running softmax of the queries: highest [rows], total [rows,
    ONES] (all columns the same), output [rows, D_PAD]. `slope` [rows] has log2(e) in it.
    """
    key = first_key + tl.arange(0, KEYS)
    exists = key < context_len
    block = tl.load(table + key // BLOCK_SIZE, mask=exists, other=0)
    if WIDE:
        block = block.to(tl.int64)
    PAIRS: tl.constexpr = keys.dtype.element_ty == tl.int16
    WIDTH: tl.constexpr = 2 if PAIRS else 1
    place = block * block_stride + kv_head * head_stride + (key % BLOCK_SIZE) * (D // WIDTH)
    k = _read_tile(keys, place, exists, D // WIDTH, D_PAD // WIDTH)
    if PAIRS:
        even, odd = _numbers(k)
        even_query, odd_query = tl.split(query.reshape(query.shape[0], D_PAD // 2, 2))
        scores = tl.dot(odd_query, tl.trans(odd), tl.dot(even_query, tl.trans(even)))
    else:
        scores = tl.dot(query, tl.trans(k), input_precision="ieee")
    if CAP:  # the scaled scores are capped, so there is nothing left to scale
        scores, scale = soft_capped(scores * scale, cap), 1.0
    if SLOPES:
        distance = (key[None, :] - position[:, None]).to(tl.float32)
        scores, scale = tl.fma(slope[:, None], distance, scores * scale), 1.0
    visible = key[None, :] <= position[:, None]
    if WINDOW:
        visible = visible & (key[None, :] > position[:, None] - window)
    scores = tl.where(visible, scores, float("-inf"))
    new_highest = raised(highest, tl.max(scores, 1) * scale, query.dtype)
    # Where no key is visible yet this is -inf, and -inf - -inf would be NaN.
    reference = tl.where(new_highest == float("-inf"), 0.0, new_highest)
    # score * scale - reference with a single rounding, as in the other attention kernels.
    weights = tl.exp2(tl.fma(scores, scale, -reference[:, None])).to(query.dtype)
    decay = tl.exp2(highest - reference)
    v = _read_tile(values, place, exists, D // WIDTH, D_PAD // WIDTH)
    # The sum of the weights is a product too: the order of a reduction would depend on the tile's
    # layout.
    ones = tl.full((KEYS, ONES), 1.0, query.dtype)
    total = tl.dot(weights, ones, total * decay[:, None], input_precision="ieee")
    output = output * decay[:, None]
    if PAIRS:
        even, odd = _numbers(v)
        even_output, odd_output = halves(output)
        both = tl.join(tl.dot(weights, even, even_output), tl.dot(weights, odd, odd_output))
        output = both.permute(0, 2, 1).reshape(output.shape[0], D_PAD)
    else:
        output = tl.dot(weights, v, output, input_precision="ieee")
    return new_highest, total, output
