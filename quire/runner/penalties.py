"""Biases and penalties: changes to the logits of a few tokens, those a request names or has used before.

Nothing here goes over the vocabulary. A token that stands several times in a history is written several
times, always with the same value computed from the logit before, so the order of writing does not matter.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from quire.runner.sampling_batch import Indices, SamplingBatch

DRY_LONGEST = 64
"""A repetition is measured up to this many tokens beyond the allowed length."""
_MOST = 1e30  # a penalty stays a number


def bias_(logits: Tensor, batch: SamplingBatch) -> None:
    """Adds `logit_bias`."""
    asking = np.flatnonzero(batch["has_bias"]).tolist()
    if not asking:
        return
    lists = [batch.lists[row] for row in asking]
    ids = [one.bias_ids for one in lists if one.bias_ids is not None]
    biases = [one.biases for one in lists if one.biases is not None]
    owner = batch.on_device(np.repeat(asking, [len(one) for one in ids]))
    logits[owner, torch.cat(ids)] += torch.cat(biases)


def penalize_(logits: Tensor, batch: SamplingBatch) -> None:
    """`repetition_penalty` over the whole history, then frequency and presence over the answer."""
    asking = np.flatnonzero(batch["repetition_penalty"] != 1)
    if len(asking):
        _penalize_repetition_(logits, batch, asking)
    has_answer = batch.position > batch["num_prompt_tokens"]
    wanted = (batch["frequency_penalty"] != 0) | (batch["presence_penalty"] != 0)
    asking = np.flatnonzero(wanted & has_answer)
    if len(asking):
        _penalize_answer_(logits, batch, asking)


def _penalize_repetition_(logits: Tensor, batch: SamplingBatch, asking: Indices) -> None:
    where = _flat_tokens(logits, batch, asking, np.zeros_like(asking))
    penalty = batch.numbers("repetition_penalty", asking)
    before = logits.view(-1)[where]
    logits.view(-1)[where] = torch.where(before > 0, before / penalty, before * penalty)


def _penalize_answer_(logits: Tensor, batch: SamplingBatch, asking: Indices) -> None:
    start = batch["num_prompt_tokens"][asking]
    where = _flat_tokens(logits, batch, asking, start)
    before = logits.view(-1)[where]
    frequency = batch.numbers("frequency_penalty", asking)
    counts = torch.ones_like(before)
    if (batch["frequency_penalty"][asking] != 0).any():
        # How often each entry's token is in its row: counted on a table that is all zeros but for these tokens.
        inside = batch.on_device(np.arange(where.shape[1]) < (batch.position[asking] - start)[:, None])
        table = torch.zeros(logits.numel(), dtype=torch.int32, device=logits.device)
        table.scatter_add_(0, where.flatten(), inside.flatten().int())
        counts = table[where].float()
    logits.view(-1)[where] = before - frequency * counts - batch.numbers("presence_penalty", asking)


def _flat_tokens(logits: Tensor, batch: SamplingBatch, asking: Indices, start: Indices) -> Tensor:
    """Where in the flattened logits the rows' tokens from `start` on lie; past a row's end, its first one again."""
    length = batch.position[asking] - start
    column = np.arange(int(length.max()))
    at = start[:, None] + np.where(column < length[:, None], column, 0)
    tokens = batch.token_ids[batch.on_device(batch.rows[asking, None]), batch.on_device(at)]
    return tokens + batch.on_device(asking[:, None] * logits.shape[1])


def dont_repeat_(logits: Tensor, batch: SamplingBatch) -> None:
    """DRY: a token that would make a repetition longer pays for the length it has.

    A place i in the history repeats n tokens if the n tokens up to i are the last n of all; the token after
    i would make it n + 1. The longest such n counts for each token.
    """
    asking = np.flatnonzero((batch["dry_multiplier"] > 0) & (batch.position > batch["dry_allowed_length"]))
    if len(asking) == 0:
        return
    history = batch.history(asking)
    breaks = _breaker_flags(history, batch, asking, logits.shape[1])
    length = batch.position[asking]
    allowed = batch["dry_allowed_length"][asking]
    # Candidates: (row, place) pairs that repeat the last token, fewer with every further token compared.
    places = np.arange(history.shape[1])
    inside = batch.on_device(places < length[:, None] - 1)
    row, place = _repeats(history, breaks, batch.on_device(length), inside)
    longest = torch.zeros(len(asking) * logits.shape[1], dtype=torch.int32, device=logits.device)
    touched, shortest = None, int(allowed.min())
    for n in range(1, int(allowed.max()) + DRY_LONGEST + 1):
        if n > 1:
            row, place = _still_repeating(history, breaks, batch.on_device(length), row, place, n)
        if len(row) == 0:
            break
        if n < shortest:
            continue
        where = row * logits.shape[1] + history[row, place + 1]
        longest[where] = n  # n only grows, so the last one written is the longest
        touched = (row, place, where) if touched is None else touched
    if touched is None:
        return
    row, place, where = touched
    excess = longest[where] - batch.on_device(allowed)[row]
    penalty = _dry_penalties(batch, asking)[row, excess.clamp(0, DRY_LONGEST)]
    penalty.masked_fill_((excess < 0) | breaks[row, place + 1], 0.0)
    where = batch.on_device(asking)[row] * logits.shape[1] + history[row, place + 1]
    logits.view(-1)[where] = logits.view(-1)[where] - penalty


def _dry_penalties(batch: SamplingBatch, asking: Indices) -> Tensor:
    """multiplier * base**excess as [rows, excess], by multiplying: powers in float32 differ between libraries."""
    factors = np.repeat(batch["dry_base"][asking, None].astype(np.float64), DRY_LONGEST + 1, axis=1)
    factors[:, 0] = batch["dry_multiplier"][asking]
    return batch.on_device(np.minimum(factors.cumprod(axis=1), _MOST).astype(np.float32))


def _repeats(history: Tensor, breaks: Tensor, length: Tensor, inside: Tensor) -> tuple[Tensor, Tensor]:
    last = (length - 1).unsqueeze(1)
    same = (history == history.gather(1, last)) & inside & ~breaks.gather(1, last)
    row, place = same.nonzero(as_tuple=True)
    return row, place


def _still_repeating(
    history: Tensor, breaks: Tensor, length: Tensor, row: Tensor, place: Tensor, n: int
) -> tuple[Tensor, Tensor]:
    """The candidates whose n-th token back is the history's n-th last one too."""
    mine, last = place - (n - 1), length[row] - n
    known = mine >= 0
    same = known & (history[row, mine.clamp_min(0)] == history[row, last.clamp_min(0)])
    same &= ~breaks[row, last.clamp_min(0)]
    return row[same], place[same]


def _breaker_flags(history: Tensor, batch: SamplingBatch, asking: Indices, vocab_size: int) -> Tensor:
    """Which tokens of the histories no repetition extends over."""
    each = [batch.lists[row].dry_breaker_ids for row in asking.tolist()]
    # By identity: requests with the same breakers share one tuple, and comparing thousands of ids takes time.
    distinct = {id(ids): ids for ids in each}
    number = {key: i for i, key in enumerate(distinct)}
    tables = torch.stack([_breaker_table(ids, vocab_size, history.device) for ids in distinct.values()])
    which = torch.tensor([number[id(ids)] for ids in each], device=history.device)
    return tables[which.unsqueeze(1), history]


@lru_cache(maxsize=32)
def _breaker_table(ids: tuple[int, ...], vocab_size: int, device: torch.device) -> Tensor:
    table = torch.zeros(vocab_size, dtype=torch.bool, device=device)
    table[[token_id for token_id in ids if token_id < vocab_size]] = True
    return table
