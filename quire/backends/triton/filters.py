"""Filters without sorting and without waiting for the host: each row's limits are found on the
device.

Every filter keeps a range of scores (also `typical_p`, whose range of distances is one of scores),
so all filters of a row together are two numbers, a lower and an upper limit. They are found in four
launches:

1.  scale: divides the row by its temperature, chunk by chunk, and stores each chunk's highest score
2.  survey: each chunk's count, mean and spread, and how many scores (and how much weight) lie within fixed distances
    ("rings") of the row's highest one
3.  limits: one program per row. The survey tells it a score above which all scores lie that can matter. It collects
    these (a few thousand at most; if there are more, it works on the whole row) and finds each limit by bisection on
    the bits of float numbers, where each end moves on to the next existing score: about log2(number of scores) rounds
    4.  keep: sets scores outside the limits to minus infinity, chunk by chunk

All sums are over chunks of fixed size and over lists that depend on the row only: no bits depend on
the batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.backends.triton.direct_launch import jit
from quire.backends.triton.launch import LAUNCH, USE_PDL, begin
from quire.backends.triton.sampling import higher
from quire.backends.triton.shapes import ALIGNMENT, CHUNK, cdiv, next_power_of_2
from quire.kernels.ops import FILTERS

_CAPACITY = 4 * CHUNK
"""The most scores of a row that are collected."""
_NUM_LIMITS = tl.constexpr(len(FILTERS))
_TEMPERATURE = tl.constexpr(FILTERS.index("temperature"))
_TOP_N_SIGMA = tl.constexpr(FILTERS.index("top_n_sigma"))
_TOP_K = tl.constexpr(FILTERS.index("top_k"))
_TOP_P = tl.constexpr(FILTERS.index("top_p"))
_LOG_MIN_P = tl.constexpr(FILTERS.index("log_min_p"))
_TYPICAL_P = tl.constexpr(FILTERS.index("typical_p"))
_XTC_THRESHOLD = tl.constexpr(FILTERS.index("xtc_threshold"))
_NUM_RINGS = tl.constexpr(8)
_FIGURES = (
    "highest",
    "count",
    "total",
    "deviations",
    "weight",
    *["ring_count"] * 8,
    *["ring_weight"] * 8,
)
"""Stored per chunk: its highest score; of the scores above minus infinity the count, the sum, the
squared deviations from the chunk's mean, and the weight; then counts within each ring, and weights
within each ring.
"""
_NUM_FIGURES = tl.constexpr(len(_FIGURES))
_HIGHEST = tl.constexpr(_FIGURES.index("highest"))
_COUNT = tl.constexpr(_FIGURES.index("count"))
_TOTAL = tl.constexpr(_FIGURES.index("total"))
_DEVIATIONS = tl.constexpr(_FIGURES.index("deviations"))
_WEIGHT = tl.constexpr(_FIGURES.index("weight"))
_RING_COUNTS = tl.constexpr(_FIGURES.index("ring_count"))
_RING_WEIGHTS = tl.constexpr(_FIGURES.index("ring_weight"))
_NEVER = tl.constexpr(float("-inf"))
_FAINTEST = tl.constexpr(-80.0)
_BY_COUNT = tl.constexpr(0)
_BY_WEIGHT = tl.constexpr(1)
_BY_DISTANCE = tl.constexpr(2)


@triton.jit
def _ring(i):
    """How far below the highest score ring i reaches: 1.5, 3, 4.5, 6, 9, 12, 18, 24."""
    return tl.where(i < 4, 1.5 * (i + 1), tl.where(i < 6, 3.0 * (i - 1), 6.0 * (i - 3)))


@jit
def _scale_kernel(
    logits,
    rows,
    limits,
    figures,
    stride,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    i = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    own = logits + tl.load(rows + i) * stride + column
    score = tl.load(own, mask=column < VOCAB, other=_NEVER)
    score = tl.div_rn(score, tl.load(limits + i * _NUM_LIMITS + _TEMPERATURE))
    tl.store(own, score, mask=column < VOCAB)
    place = i * tl.num_programs(1) + tl.program_id(1)
    tl.store(figures + place * _NUM_FIGURES + _HIGHEST, tl.reduce(score, 0, higher))


@triton.jit
def _highest(figures, i, chunks, CHUNKS: tl.constexpr):
    """The row's highest score; NaN if it has one."""
    chunk = tl.arange(0, CHUNKS)
    each = tl.load(
        figures + (i * chunks + chunk) * _NUM_FIGURES + _HIGHEST, mask=chunk < chunks, other=_NEVER
    )
    return tl.reduce(each, 0, higher)


@jit
def _survey_kernel(
    logits,
    rows,
    figures,
    stride,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    i = tl.program_id(0)
    chunks = tl.num_programs(1)
    highest = _highest(figures, i, chunks, CHUNKS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    score = tl.load(logits + tl.load(rows + i) * stride + column, mask=column < VOCAB, other=_NEVER)
    below = score - highest
    known = score > _NEVER
    weight = tl.where(known, tl.exp(tl.maximum(below, _FAINTEST)), 0.0)
    place = figures + (i * chunks + tl.program_id(1)) * _NUM_FIGURES
    count = tl.sum(known.to(tl.float32))
    total = tl.sum(tl.where(known, below, 0.0))
    deviation = tl.where(known, below - total / tl.maximum(count, 1.0), 0.0)
    tl.store(place + _COUNT, count)
    tl.store(place + _TOTAL, total)
    tl.store(place + _DEVIATIONS, tl.sum(deviation * deviation))
    tl.store(place + _WEIGHT, tl.sum(weight))
    for ring in range(_NUM_RINGS):
        within = score >= highest - _ring(ring)
        tl.store(place + _RING_COUNTS + ring, tl.sum(within.to(tl.float32)))
        tl.store(place + _RING_WEIGHTS + ring, tl.sum(tl.where(within, weight, 0.0)))


@triton.jit
def _figure(figures, i, chunks, which, CHUNKS: tl.constexpr):
    """One figure of each of the row's chunks."""
    chunk = tl.arange(0, CHUNKS)
    return tl.load(
        figures + (i * chunks + chunk) * _NUM_FIGURES + which, mask=chunk < chunks, other=0.0
    )


@triton.jit
def _spread(figures, i, chunks, CHUNKS: tl.constexpr):
    """The standard deviation of the row, from deviations within the chunks and of the chunks'
    means.
    """
    counts = _figure(figures, i, chunks, _COUNT, CHUNKS)
    totals = _figure(figures, i, chunks, _TOTAL, CHUNKS)
    within = tl.sum(_figure(figures, i, chunks, _DEVIATIONS, CHUNKS))
    count = tl.sum(counts)
    apart = totals / tl.maximum(counts, 1.0) - tl.sum(totals) / count
    return tl.sqrt((within + tl.sum(counts * apart * apart)) / count)


@triton.jit
def _key(value):
    """An integer for each float, in the same order; `_value` is the inverse."""
    bits = value.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)


@triton.jit
def _value(key):
    bits = key.to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit
def _load_kept(source, length, start, low, high, BLOCK: tl.constexpr):
    """A block of scores, and which of them lie within the limits found so far."""
    place = start + tl.arange(0, BLOCK)
    score = tl.load(source + place, mask=place < length, other=_NEVER)
    return score, (score >= low) & (score <= high) & (score > _NEVER)


@triton.jit
def _weigh(source, length, low, high, highest, BLOCK: tl.constexpr):
    """The total weight of the scores within the limits, and their weighted mean distance from the
    highest score.
    """
    weights = tl.zeros([BLOCK], tl.float32)
    moments = tl.zeros([BLOCK], tl.float32)
    for start in range(0, length, BLOCK):
        score, kept = _load_kept(source, length, start, low, high, BLOCK)
        below = tl.maximum(score - highest, _FAINTEST)
        weight = tl.where(kept, tl.exp(below), 0.0)
        weights += weight
        moments += tl.where(kept, weight * below, 0.0)
    total = tl.sum(weights)
    return total, tl.sum(moments) / total


@triton.jit
def _bisect(
    source,
    length,
    low,
    high,
    highest,
    mean,
    wanted,
    bottom,
    top,
    MODE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The highest value v such that the scores within the limits whose value is at least v reach
    `wanted`, by count or by weight; `bottom` if they never do. A score's value is itself, or its
    negative distance from `mean`.
    """
    reached = _key(bottom)
    missed = _key(top) + 1
    while missed - reached > 1:
        key = reached + (missed - reached) // 2
        middle = _value(key)
        weights = tl.zeros([BLOCK], tl.float32)
        above = tl.full([BLOCK], float("inf"), tl.float32)
        under = tl.full([BLOCK], _NEVER, tl.float32)
        for start in range(0, length, BLOCK):
            score, kept = _load_kept(source, length, start, low, high, BLOCK)
            below = tl.maximum(score - highest, _FAINTEST)
            value = score
            if MODE == _BY_DISTANCE:
                value = -tl.abs(below - mean)
            counts = kept & (value >= middle)
            if MODE == _BY_COUNT:
                weights += counts.to(tl.float32)
            else:
                weights += tl.where(counts, tl.exp(below), 0.0)
            above = tl.minimum(above, tl.where(counts, value, float("inf")))
            under = tl.maximum(under, tl.where(kept & (value < middle), value, _NEVER))
        # Each end moves on to the next existing value, within bounds: +0 and -0 are equal but have
        # different keys.
        if tl.sum(weights) >= wanted:
            reached = tl.minimum(tl.maximum(_key(tl.min(above)), key), missed - 1)
        else:
            missed = tl.minimum(_key(tl.max(under)) + 1, key)
    return _value(reached)


@triton.jit
def _collect(row, figures, collected, i, chunks, cut, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """Writes the row's scores of at least `cut` one after the other; chunks without any are not
    read.
    """
    count = tl.zeros([], tl.int32)
    for chunk in range(0, chunks):
        if tl.load(figures + (i * chunks + chunk) * _NUM_FIGURES + _HIGHEST) >= cut:
            column = chunk * BLOCK + tl.arange(0, BLOCK)
            score = tl.load(row + column, mask=column < VOCAB, other=_NEVER)
            found = score >= cut
            place = tl.cumsum(found.to(tl.int32), 0)
            tl.store(collected + count + place - 1, score, mask=found)
            count += tl.sum(found.to(tl.int32))
    tl.debug_barrier()  # other threads read what a thread has written
    return count


@triton.jit
def _innermost_ring(figures, i, chunks, highest, low, top_k, top_p, total, CHUNKS: tl.constexpr):
    """The score above which all scores lie that the limits depend on, and how many do (1e9: not
    known).
    """
    cut = tl.full([], _NEVER, tl.float32)
    count = tl.full([], 1e9, tl.float32)
    for step in range(_NUM_RINGS):
        ring = _NUM_RINGS - 1 - step
        inside = tl.sum(_figure(figures, i, chunks, _RING_COUNTS + ring, CHUNKS))
        weight = tl.sum(_figure(figures, i, chunks, _RING_WEIGHTS + ring, CHUNKS))
        reaches = highest - _ring(ring)
        # With top_k and top_p the first k scores are enough for both: top_p keeps some of them.
        does = (
            (reaches <= low)
            | ((top_k > 0) & (inside >= top_k))
            | ((top_k == 0) & (weight >= top_p * total))
        )
        cut = tl.where(does, reaches, cut)
        count = tl.where(does, inside, count)
    return cut, count


@jit
def _limits_kernel(
    logits,
    rows,
    limits,
    figures,
    collected,
    found,
    stride,
    chunks,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    CAPACITY: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    i = tl.program_id(0)
    row = logits + tl.load(rows + i) * stride
    own = limits + i * _NUM_LIMITS
    top_k, top_p, typical_p = (
        tl.load(own + _TOP_K),
        tl.load(own + _TOP_P),
        tl.load(own + _TYPICAL_P),
    )
    top_n_sigma, xtc_threshold = tl.load(own + _TOP_N_SIGMA), tl.load(own + _XTC_THRESHOLD)
    zero = tl.full([], 0.0, tl.float32)
    never = tl.full([], _NEVER, tl.float32)
    low, high = never, -never
    highest = _highest(figures, i, chunks, CHUNKS)
    # Rows that are all minus infinity, or have infinity or NaN, are not filtered.
    if (highest > _NEVER) & (highest < float("inf")):
        if top_n_sigma > 0:
            low = highest - top_n_sigma * _spread(figures, i, chunks, CHUNKS)
        source = row
        length = tl.full([], VOCAB, tl.int32)
        if (top_k > 0) | (top_p < 1):
            total = tl.sum(_figure(figures, i, chunks, _WEIGHT, CHUNKS))
            if low > _NEVER:
                total, _ = _weigh(source, length, low, high, highest, BLOCK)
            cut, count = _innermost_ring(
                figures, i, chunks, highest, low, top_k, top_p, total, CHUNKS
            )
            if count <= CAPACITY:
                source = collected + i.to(tl.int64) * CAPACITY
                length = _collect(row, figures, source, i, chunks, cut, VOCAB, BLOCK)
            floor = tl.maximum(low, cut)
            if top_k > 0:
                low = _bisect(
                    source,
                    length,
                    low,
                    high,
                    highest,
                    zero,
                    top_k,
                    floor,
                    highest,
                    _BY_COUNT,
                    BLOCK,
                )
                total, _ = _weigh(source, length, low, high, highest, BLOCK)
                floor = low
            if top_p < 1:
                low = _bisect(
                    source,
                    length,
                    low,
                    high,
                    highest,
                    zero,
                    top_p * total,
                    floor,
                    highest,
                    _BY_WEIGHT,
                    BLOCK,
                )
        low = tl.maximum(low, highest + tl.load(own + _LOG_MIN_P))
        if typical_p < 1:
            total, mean = _weigh(source, length, low, high, highest, BLOCK)
            farthest = _bisect(
                source,
                length,
                low,
                high,
                highest,
                mean,
                typical_p * total,
                never,
                zero,
                _BY_DISTANCE,
                BLOCK,
            )
            low, high = _range_of(source, length, low, high, highest, mean, farthest, zero, BLOCK)
        if xtc_threshold < float("inf"):
            total, _ = _weigh(source, length, low, high, highest, BLOCK)
            least = xtc_threshold * total
            rarest, _ = _range_of(source, length, low, high, highest, zero, never, least, BLOCK)
            high = tl.minimum(high, rarest)
    tl.store(found + 2 * i, low)
    tl.store(found + 2 * i + 1, high)


@triton.jit
def _range_of(source, length, low, high, highest, mean, farthest, least, BLOCK: tl.constexpr):
    """The lowest and the highest score whose negative distance is at least `farthest` and whose
    weight is at least `least`; infinity and minus infinity if there is none.
    """
    lowest = tl.full([BLOCK], float("inf"), tl.float32)
    topmost = tl.full([BLOCK], _NEVER, tl.float32)
    for start in range(0, length, BLOCK):
        score, kept = _load_kept(source, length, start, low, high, BLOCK)
        below = tl.maximum(score - highest, _FAINTEST)
        kept &= (-tl.abs(below - mean) >= farthest) & (tl.exp(below) >= least)
        lowest = tl.minimum(lowest, tl.where(kept, score, float("inf")))
        topmost = tl.maximum(topmost, tl.where(kept, score, _NEVER))
    return tl.min(lowest), tl.max(topmost)


@jit
def _keep_kernel(
    logits, rows, found, stride, VOCAB: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    begin(PDL)
    i = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    own = logits + tl.load(rows + i) * stride + column
    score = tl.load(own, mask=column < VOCAB, other=0.0)
    excluded = (score < tl.load(found + 2 * i)) | (score > tl.load(found + 2 * i + 1))
    tl.store(own, tl.where(excluded, _NEVER, score), mask=column < VOCAB)


def filter_rows_(logits: Tensor, rows: Tensor, limits: Tensor) -> None:
    """`Kernels.filter_rows_`, as `quire.kernels.filters` defines it."""
    if (
        logits.stride(1) != 1
        or logits.dtype != torch.float32
        or limits.shape != (len(rows), _NUM_LIMITS.value)
    ):
        raise ValueError(
            f"There are no filters {tuple(limits.shape)} for {logits.dtype} rows of {logits.shape[1]}."
        )
    if logits.data_ptr() % ALIGNMENT:  # sums over unaligned rows would be taken in another order
        aligned = logits.clone(memory_format=torch.contiguous_format)
        filter_rows_(aligned, rows, limits)
        logits.copy_(aligned)
        return
    count, vocab_size = len(rows), logits.shape[1]
    if not count:
        return
    stride = vocab_size if logits.is_contiguous() else logits.stride(0)
    limits = limits.contiguous()
    chunks = cdiv(vocab_size, CHUNK)
    num_chunks = next_power_of_2(chunks)
    empty = logits.new_empty
    figures, collected, found = (
        empty(count, chunks, _NUM_FIGURES.value),
        empty(count, _CAPACITY),
        empty(count, 2),
    )
    grid = (count, chunks)
    common = {
        "logits": logits,
        "rows": rows,
        "stride": stride,
        "VOCAB": vocab_size,
        "BLOCK": CHUNK,
        "PDL": USE_PDL,
    }
    _scale_kernel[grid](limits=limits, figures=figures, **common, num_warps=8, **LAUNCH)
    _survey_kernel[grid](figures=figures, CHUNKS=num_chunks, **common, num_warps=8, **LAUNCH)
    _limits_kernel[(count,)](
        limits=limits,
        figures=figures,
        collected=collected,
        found=found,
        chunks=chunks,
        CHUNKS=num_chunks,
        CAPACITY=_CAPACITY,
        **common,
        num_warps=16,
        **LAUNCH,
    )
    _keep_kernel[grid](found=found, **common, num_warps=8, **LAUNCH)
