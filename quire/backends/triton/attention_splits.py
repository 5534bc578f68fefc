"""Merges the results of a sequence's splits: in registers, or from memory by the program that
finishes last.

A split's result is, per row, the maximum score, the sum of weights and the output. They are merged
in the order of the splits, so it does not matter which programs computed them.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.backends.triton.attention_work import DECODE_ROWS, MAX_PARTIALS

MERGED_ROWS = tl.constexpr(4)
"""Rows that are merged from memory at a time: few, so that registers hold the results of many
splits.
"""
MERGED_AT_ONCE = tl.constexpr(16)
"""Splits whose results are loaded before the first of them is merged."""


@triton.jit
def merge(highest, total, output, split_highest, split_total, split_output):
    """Adds a split's result to those of the splits before it. Merging with an empty result changes
    no bit.
    """
    new_highest = tl.maximum(highest, split_highest)
    reference = tl.where(new_highest == float("-inf"), 0.0, new_highest)
    old = tl.exp2(highest - reference)
    new = tl.exp2(split_highest - reference)
    total = total * old[:, None] + split_total * new[:, None]
    output = output * old[:, None] + split_output * new[:, None]
    return new_highest, total, output


@triton.jit
def store_split(
    partial_output,
    partial_state,
    slot,
    highest,
    total,
    output,
    rows,
    used,
    ROWS: tl.constexpr,
    D_PAD: tl.constexpr,
):
    """Stores the result of a split for a later merge; `used` [rows, 1] says which rows have a
    query.
    """
    column = tl.arange(0, D_PAD)
    slot = slot.to(tl.int64)
    state = partial_state + slot * 2 * ROWS + rows
    tl.store(
        partial_output + (slot * ROWS + rows[:, None]) * D_PAD + column[None, :], output, mask=used
    )
    tl.store(state, highest)
    tl.store(state + ROWS, tl.max(total, 1))  # its columns are the same


@triton.jit
def merge_stored(
    partial_output,
    partial_state,
    first_slot,
    slot_stride,
    first_split,
    num_splits,
    rows,
    column,
    used,
    highest,
    total,
    output,
    ROWS: tl.constexpr,
    D_PAD: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Merges stored splits `first_split` to `num_splits` into highest [rows], total [rows, 1],
    output [rows, columns].
    """
    slot = first_slot.to(tl.int64)
    states = partial_state + slot * 2 * ROWS + rows
    outputs = partial_output + (slot * ROWS + rows[:, None]) * D_PAD + column[None, :]
    for first in range(first_split, num_splits, AT_ONCE):
        for i in tl.static_range(AT_ONCE):
            exists = first + i < num_splits
            offset = (first + i) * slot_stride * ROWS
            split_highest = tl.load(
                states + offset * 2, mask=exists, other=float("-inf"), cache_modifier=".cg"
            )
            split_total = tl.load(
                states + offset * 2 + ROWS, mask=exists, other=0.0, cache_modifier=".cg"
            )
            split_output = tl.load(
                outputs + offset * D_PAD, mask=used & exists, other=0.0, cache_modifier=".cg"
            )
            highest, total, output = merge(
                highest, total, output, split_highest, split_total[:, None], split_output
            )
    return highest, total, output


def partial_results(
    query: Tensor, num_kv_heads: int, num_partials: int, d_pad: int
) -> tuple[Tensor, Tensor]:
    """Memory for the outputs and the (maximum, total) of splits that wait to be merged."""
    slots = max(num_partials, 1) * num_kv_heads * DECODE_ROWS
    return (
        torch.empty(slots * d_pad, dtype=torch.float32, device=query.device),
        torch.empty(slots * 2, dtype=torch.float32, device=query.device),
    )


@cache
def counters(device: torch.device, num_kv_heads: int) -> Tensor:
    """Counts the finished splits of each sequence and key head; the program that merges resets its
    count to zero.
    """
    return torch.zeros(MAX_PARTIALS * num_kv_heads, dtype=torch.int32, device=device)
