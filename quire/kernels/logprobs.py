"""Logprobs and ranks of tokens, as defined in plain torch, each row by itself."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.ops import LogprobsTensors


def gather_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> LogprobsTensors:
    """`Kernels.gather_logprobs`. Ties cost something only where there are any, for which the host must
    look.
    """
    logprobs = logits.log_softmax(-1)
    chosen = token_ids.unsqueeze(1)
    top_ids = _most_likely(logits, num_top) if num_top else chosen[:, :0]
    return LogprobsTensors(
        logprobs.gather(1, chosen).squeeze(1),
        _ranks(logits, chosen),
        top_ids,
        logprobs.gather(1, top_ids),
    )


def _most_likely(logits: Tensor, count: int) -> Tensor:
    """The ids of each row's highest logits, the highest first and the lower id first among equals.

    `topk` finds the values; which of several equal ones it picks is its own affair and is put right
    here.
    """
    vocab_size = logits.shape[1]
    values, ids = logits.topk(min(count + 1, vocab_size))
    ids = ids[:, :count]
    if count < vocab_size:
        tied = (values[:, count - 1] == values[:, count]).nonzero().squeeze(1)
        if len(tied):
            least = values[tied, count - 1].unsqueeze(1)
            rows = logits[tied]
            # Everything above the least value, then its equals by their ids (exact in float32 below
            # 2**24).
            numbers = torch.arange(vocab_size, dtype=torch.float32, device=logits.device)
            order = torch.where(
                rows == least, -numbers, torch.where(rows > least, 1.0, float("-inf"))
            )
            ids[tied] = order.topk(count).indices
    ids = ids.sort(-1).values
    by_value = logits.gather(1, ids).sort(dim=-1, descending=True, stable=True).indices
    return ids.gather(1, by_value)


def _ranks(logits: Tensor, chosen: Tensor) -> Tensor:
    """1 + how many tokens come before the chosen ones [rows, 1]: likelier ones, and equal ones of a
    lower id.
    """
    value = logits.gather(1, chosen)
    # Counted in float32, which is several times as fast as in integers here and exact below 2**24.
    flags = torch.empty_like(logits)
    ranks = torch.gt(logits, value, out=flags).sum(-1).long() + 1
    tied = (torch.eq(logits, value, out=flags).sum(-1) > 1).nonzero().squeeze(1)
    if len(tied):
        lower = torch.arange(logits.shape[1], device=logits.device) < chosen[tied]
        ranks[tied] += (flags[tied].bool() & lower).sum(-1)
    return ranks
