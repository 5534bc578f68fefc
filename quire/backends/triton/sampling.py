"""The choice of a token: argmax(logits / temperature + Gumbel noise), or the plain argmax at
temperature 0.

The noise is that of `quire/kernels/noise.py`: the same 32 random bits for every token; its two
logarithms are the GPU's and differ from the CPU's in the last digits. The vocabulary is divided
into chunks of fixed size, one per program, and a second kernel picks the best of the chunks'
results, so that also a single row uses many programs.

If a row has NaN, its token is 0 and its flags have HAS_NAN; if all its scores are minus infinity,
its token is 0 and its flags have NOTHING_LEFT. So the host need not look at the logits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import libdevice

from quire.backends.triton.direct_launch import jit
from quire.backends.triton.launch import INTERPRETED, LAUNCH, USE_PDL, begin
from quire.backends.triton.shapes import CHUNK, as_rows, cdiv, next_power_of_2, row_stride
from quire.kernels.ops import HAS_NAN, NOTHING_LEFT

_HAS_NAN, _NOTHING_LEFT = tl.constexpr(HAS_NAN), tl.constexpr(NOTHING_LEFT)
_NO_ID = tl.constexpr(2**31 - 1)
_LARGEST_BELOW_ONE = tl.constexpr(1.0 - 2.0**-24)
_LN_2 = tl.constexpr(0.6931471805599453)
_COMPILED = tl.constexpr(not INTERPRETED)


@triton.jit
def _mix32(value):
    value = (value ^ (value >> 16)) * 0x7FEB352D
    value = (value ^ (value >> 15)) * 0x846CA68B
    return value ^ (value >> 16)


@triton.jit
def _mix64(value):
    value += 0x9E3779B97F4A7C15
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB
    return value ^ (value >> 31)


@triton.jit
def _log2(x):
    """log2 in one instruction instead of thirty, exact to 2^-22; Triton's interpreter does not have
    it.
    """
    return libdevice.fast_log2f(x) if _COMPILED else tl.log2(x)


@triton.jit
def _gumbel(token_ids, first_key, second_key):
    """Gumbel noise of uint32 token ids: -log(-log(1 - v)), where v is a uniform number made by
    hashing id and keys.
    """
    bits = _mix32(_mix32((token_ids * 0x9E3779B1) ^ first_key) ^ second_key) >> 1
    v = (bits.to(tl.int32).to(tl.float32) + 0.5) * 4.656612873077393e-10  # 2^-31
    v = tl.minimum(v, _LARGEST_BELOW_ONE)
    # -log(1 - v): by the first terms of its series where v is small, as 1 - v would lose v's
    # digits.
    series = 1 / 6 + v * (1 / 7)
    series = 1 / 5 + v * series
    series = 1 / 4 + v * series
    series = 1 / 3 + v * series
    series = 1 / 2 + v * series
    series = v + v * v * series
    inner = tl.where(v < 0.125, series, _log2(1.0 - v) * -_LN_2)
    return _log2(inner) * -_LN_2


@triton.jit
def higher(a, b):
    """The maximum, or NaN if either is NaN; used by other kernels too."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _highest(scores):
    """The maximum, or NaN if there is one. (In the interpreter `tl.reduce` would take a second.)"""
    if _COMPILED:
        found = tl.reduce(scores, 0, higher)
    else:
        found = tl.where(
            tl.max((scores != scores).to(tl.int32), 0) > 0, float("nan"), tl.max(scores, 0)
        )
    return found


@jit(do_not_specialize_on_alignment=["keys", "temperatures", "row_index", "positions"])
def _scan_kernel(
    logits,
    keys,
    temperatures,
    row_index,
    positions,
    best,
    best_ids,
    stride,
    OWNED: tl.constexpr,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Stores the highest score of one chunk of one row (NaN if there is one) and the lowest id that
    has it. If OWNED, logits belong to request rows: `keys` are the seeds of all request rows, and
    noise is made of seed and position.
    """
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    own = tl.load(row_index + row).to(tl.int64) if OWNED else row
    if own >= 0:
        if OWNED:
            seed = tl.load(keys + own).to(tl.uint64, bitcast=True)
            mixed = _mix64(_mix64(seed) + tl.load(positions + row).to(tl.uint64))
            first_key, second_key = mixed.to(tl.uint32), (mixed >> 32).to(tl.uint32)
        else:
            first_key = tl.load(keys + 2 * row).to(tl.uint32, bitcast=True)
            second_key = tl.load(keys + 2 * row + 1).to(tl.uint32, bitcast=True)
        temperature = tl.load(temperatures + own)
        token_id = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        score = tl.load(
            logits + row * stride + token_id, mask=token_id < VOCAB, other=float("-inf")
        ).to(tl.float32)
        if temperature > 0:
            score = score * (1.0 / temperature) + _gumbel(
                token_id.to(tl.uint32), first_key, second_key
            )
        highest = _highest(score)
        place = row * tl.num_programs(1) + tl.program_id(1)
        tl.store(best + place, highest)
        tl.store(best_ids + place, tl.min(tl.where(score == highest, token_id, _NO_ID)))


@jit(do_not_specialize_on_alignment=["row_index", "positions", "token_ids", "out", "flags"])
def _fold_kernel(
    best,
    best_ids,
    row_index,
    positions,
    token_ids,
    out,
    flags,
    chunks,
    token_stride,
    OWNED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Stores a row's token and flags, from the results of its chunks; if OWNED, the token in its
    request row too.
    """
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    own = tl.load(row_index + row).to(tl.int64) if OWNED else row
    if own >= 0:
        chunk = tl.arange(0, BLOCK)
        score = tl.load(best + row * chunks + chunk, mask=chunk < chunks, other=float("-inf"))
        ids = tl.load(best_ids + row * chunks + chunk, mask=chunk < chunks, other=_NO_ID)
        highest = _highest(score)
        has_nan = highest != highest
        token_id = tl.where(has_nan, 0, tl.min(tl.where(score == highest, ids, _NO_ID))).to(
            tl.int64
        )
        tl.store(out + row, token_id)
        tl.store(
            flags + row,
            tl.where(has_nan, _HAS_NAN, tl.where(highest == float("-inf"), _NOTHING_LEFT, 0)),
        )
        if OWNED:
            tl.store(token_ids + own * token_stride + tl.load(positions + row), token_id)


def gumbel_argmax(logits: Tensor, temperature: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """`Kernels.gumbel_argmax`, of logits in bfloat16 or float16 too."""
    out, flags = (
        logits.new_empty(len(logits), dtype=dtype) for dtype in (torch.int64, torch.int32)
    )
    keys = keys.contiguous()
    _choose(
        logits,
        keys,
        temperature,
        row_index=keys,
        positions=keys,
        token_ids=keys,
        out=out,
        flags=flags,
        owned=False,
    )
    return out, flags


def sample_rows(
    logits: Tensor,
    row_index: Tensor,
    seeds: Tensor,
    temperatures: Tensor,
    positions: Tensor,
    token_ids: Tensor,
    out: Tensor | None = None,
) -> Tensor:
    """Samples a token for every row of logits [rows, vocab] as `gumbel_argmax` does, and writes it
    to `token_ids[row_index, positions]` (int64) and, with its flags, to `out` int64 [2, rows],
    which is returned.

    `row_index` int32 [rows] is the request row of each row of logits; seeds (int64 or uint64) and
    temperatures (float32) are by request row. `positions` int32 [rows] is the token's position;
    with the seed it makes the noise keys, as `quire.kernels.noise.noise_keys` does. Where
    `row_index` is negative (padding) nothing is written.
    """
    if token_ids.stride(1) != 1:
        raise ValueError("A row's token ids must lie side by side.")
    out = logits.new_empty(2, len(logits), dtype=torch.int64) if out is None else out
    _choose(
        logits,
        seeds,
        temperatures,
        row_index=row_index,
        positions=positions,
        token_ids=token_ids,
        out=out[0],
        flags=out[1],
        owned=True,
    )
    return out


def _choose(
    logits: Tensor,
    keys: Tensor,
    temperatures: Tensor,
    *,
    row_index: Tensor,
    positions: Tensor,
    token_ids: Tensor,
    out: Tensor,
    flags: Tensor,
    owned: bool,
) -> None:
    """Fills `out` and `flags`. Unless `owned`, `row_index`, `positions` and `token_ids` are not
    read.
    """
    logits = as_rows(logits)
    rows, vocab_size = logits.shape
    chunks = cdiv(vocab_size, CHUNK)
    best, best_ids = (
        logits.new_empty(rows, chunks, dtype=dtype) for dtype in (torch.float32, torch.int32)
    )
    if rows:
        _scan_kernel[(rows, chunks)](
            logits=logits,
            keys=keys,
            temperatures=temperatures,
            row_index=row_index,
            positions=positions,
            best=best,
            best_ids=best_ids,
            stride=row_stride(logits),
            OWNED=owned,
            VOCAB=vocab_size,
            BLOCK=CHUNK,
            PDL=USE_PDL,
            num_warps=8,
            **LAUNCH,
        )
        _fold_kernel[(rows,)](
            best=best,
            best_ids=best_ids,
            row_index=row_index,
            positions=positions,
            token_ids=token_ids,
            out=out,
            flags=flags,
            chunks=chunks,
            token_stride=token_ids.stride(0),
            OWNED=owned,
            BLOCK=next_power_of_2(chunks),
            PDL=USE_PDL,
            num_warps=1,
            **LAUNCH,
        )
