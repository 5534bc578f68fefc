"""Logprobs and ranks of tokens, and the most likely tokens, each row by itself.

A program reads its row twice, in chunks of fixed size: for the highest logit, then for the sum of
exponentials and the number of tokens that rank before the scored one.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from quire.backends.triton.direct_launch import jit
from quire.backends.triton.launch import LAUNCH, USE_PDL, begin
from quire.backends.triton.sampling import higher
from quire.backends.triton.shapes import CHUNK, as_rows, row_stride
from quire.kernels.ops import LogprobsTensors

_NEVER = tl.constexpr(float("-inf"))


@jit
def _logprobs_kernel(
    logits,
    token_ids,
    totals,
    logprobs,
    ranks,
    stride,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    own = logits + row * stride
    token_id = tl.load(token_ids + row)
    chosen = tl.load(own + token_id)
    each = tl.full([BLOCK], _NEVER, tl.float32)
    for start in range(0, VOCAB, BLOCK):
        column = start + tl.arange(0, BLOCK)
        each = higher(each, tl.load(own + column, mask=column < VOCAB, other=_NEVER))
    highest = tl.reduce(each, 0, higher)
    sums = tl.zeros([BLOCK], tl.float32)
    before = tl.zeros([BLOCK], tl.int32)
    for start in range(0, VOCAB, BLOCK):
        column = start + tl.arange(0, BLOCK)
        logit = tl.load(own + column, mask=column < VOCAB, other=_NEVER)
        sums += tl.exp(logit - highest)
        # The filling of the last chunk (-inf) is never counted: it is above no logit and its ids
        # are the highest.
        before += ((logit > chosen) | ((logit == chosen) & (column < token_id))).to(tl.int32)
    log_sum = tl.log(tl.sum(sums))
    tl.store(totals + 2 * row, highest)
    tl.store(totals + 2 * row + 1, log_sum)
    tl.store(logprobs + row, chosen - highest - log_sum)
    tl.store(ranks + row, tl.sum(before).to(tl.int64) + 1)


def gather_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> LogprobsTensors:
    """`Kernels.gather_logprobs`."""
    logits = as_rows(logits)
    rows, vocab_size = logits.shape
    totals, logprobs = logits.new_empty(rows, 2), logits.new_empty(rows)
    ranks = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        _logprobs_kernel[(rows,)](
            logits=logits,
            token_ids=token_ids.contiguous(),
            totals=totals,
            logprobs=logprobs,
            ranks=ranks,
            stride=row_stride(logits),
            VOCAB=vocab_size,
            BLOCK=CHUNK,
            PDL=USE_PDL,
            num_warps=16,
            **LAUNCH,
        )
    top_ids = likeliest(logits, num_top)
    top_logprobs = logits.gather(1, top_ids) - totals[:, :1] - totals[:, 1:]
    return LogprobsTensors(logprobs, ranks, top_ids, top_logprobs)


def likeliest(logits: Tensor, count: int) -> Tensor:
    """The ids of each row's highest logits, the highest first and the lower id first among equals.
    Logit and id are combined into one integer, so that there are no ties.
    """
    vocab_size = logits.shape[1]
    if not count:
        return torch.empty(len(logits), 0, dtype=torch.int64, device=logits.device)
    bits = (logits + 0.0).view(torch.int32)  # minus zero is zero
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    backwards = torch.arange(vocab_size - 1, -1, -1, device=logits.device)
    keys = (order << 32) + backwards
    return vocab_size - 1 - (keys.topk(count, sorted=True).values & 0xFFFFFFFF)
