"""Tokens a row can't choose: their logits become minus infinity. Each function works on the rows that ask."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from torch import Tensor

from quire.runner.sampling_batch import Indices, SamplingBatch

_NEVER = float("-inf")


def mask_(logits: Tensor, batch: SamplingBatch) -> None:
    """Everything that forbids tokens outright."""
    if batch.masks is not None and len(batch.masked_rows):
        _apply_bitmasks_(logits, batch.masks, batch.masked_rows)
    asking = np.flatnonzero(batch["has_allowed"])
    if len(asking):
        _keep_allowed_(logits, batch, asking)
    _ban_known_tokens_(logits, batch)
    asking = np.flatnonzero(batch["has_bad_words"])
    if len(asking):
        _end_no_bad_word_(logits, batch, asking)
    # An n-gram can't have occurred before there were n tokens.
    size = batch["no_repeat_ngram_size"]
    asking = np.flatnonzero((size > 0) & (batch.position >= size))
    if len(asking):
        _repeat_no_ngram_(logits, batch, asking)


def _apply_bitmasks_(logits: Tensor, masks: Tensor, rows: Indices) -> None:
    index = torch.from_numpy(rows).to(masks.device)
    chosen = masks if len(rows) == len(masks) else masks[index]
    table = _bits_of_bytes(chosen.device)
    # Eight flags at once: a byte of the mask looks up the eight bytes that are its bits.
    allowed = table[chosen.contiguous().view(torch.uint8).int()].view(torch.bool)[:, : logits.shape[1]]
    if len(rows) == len(logits):
        logits.masked_fill_(~allowed, _NEVER)
    else:
        logits[index] = logits[index].masked_fill_(~allowed, _NEVER)


@cache
def _bits_of_bytes(device: torch.device) -> Tensor:
    """int64 [256]: byte i of entry b is bit i of b."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return torch.from_numpy(bits.copy().view(np.int64)[:, 0]).to(device)


def _keep_allowed_(logits: Tensor, batch: SamplingBatch, asking: Indices) -> None:
    for row in asking.tolist():
        ids = batch.lists[row].allowed_ids
        assert ids is not None
        kept = logits[row, ids]
        logits[row] = _NEVER
        logits[row, ids] = kept


def _ban_known_tokens_(logits: Tensor, batch: SamplingBatch) -> None:
    """End tokens of answers that are too short, and bad words of one token: one write for all rows."""
    too_short = batch.position < batch["min_length"]
    banned = batch["has_banned"]
    at: list[int] = []
    ids: list[int] = []
    for row in np.flatnonzero(too_short | banned).tolist():
        lists = batch.lists[row]
        forbidden = (*(lists.end_ids if too_short[row] else ()), *(lists.banned_ids if banned[row] else ()))
        # An end token may lie outside a model's vocabulary: tokenizers know more tokens than some models.
        forbidden = tuple(token_id for token_id in forbidden if token_id < logits.shape[1])
        at.extend([row] * len(forbidden))
        ids.extend(forbidden)
    if ids:
        where = torch.tensor([at, ids]).to(logits.device)
        logits[where[0], where[1]] = _NEVER


def _end_no_bad_word_(logits: Tensor, batch: SamplingBatch, asking: Indices) -> None:
    """The last token of a bad word, where the answer ends with the tokens before it."""
    answer_lengths = batch.position - batch["num_prompt_tokens"]
    owners, starts, ends = [], [], []
    for row in asking.tolist():
        lists = batch.lists[row]
        assert lists.bad_word_starts is not None
        assert lists.bad_word_ends is not None
        owners.append(np.full(len(lists.bad_word_ends), row))
        starts.append(lists.bad_word_starts)
        ends.append(lists.bad_word_ends)
    owner = np.concatenate(owners)
    longest = max(start.shape[1] for start in starts)
    wanted = torch.cat([torch.nn.functional.pad(start, (longest - start.shape[1], 0), value=-1) for start in starts])
    # The last `longest` tokens of the owner's answer; -2, which no word holds, before its beginning.
    back = np.arange(longest, 0, -1)
    at = batch.on_device(np.maximum(batch.position[owner, None] - back, 0))
    tail = batch.token_ids[batch.on_device(batch.rows[owner, None]), at]
    tail.masked_fill_(batch.on_device(answer_lengths[owner, None] < back), -2)
    matches = ((wanted == tail) | (wanted == -1)).all(1)
    _ban_where_(logits, batch.on_device(owner), torch.cat(ends), matches)


def _repeat_no_ngram_(logits: Tensor, batch: SamplingBatch, asking: Indices) -> None:
    """The last token of every n-gram whose other tokens are the last ones of the history."""
    history = batch.history(asking)
    size, length = batch["no_repeat_ngram_size"][asking], batch.position[asking]
    # matches[r, i]: the n-gram that ends at i is one; its token i is then forbidden.
    where = np.arange(history.shape[1])
    matches = batch.on_device((where >= size[:, None] - 1) & (where < length[:, None]))
    for back in range(1, int(size.max())):
        last = history.gather(1, batch.on_device(np.maximum(length - back, 0)[:, None]))
        same = torch.zeros_like(matches)
        same[:, back:] = history[:, : history.shape[1] - back] == last
        matches &= same | batch.on_device(size[:, None] <= back)
    owner = batch.on_device(asking).unsqueeze(1).expand_as(history)
    _ban_where_(logits, owner, history, matches)


def _ban_where_(logits: Tensor, owner: Tensor, token_ids: Tensor, matches: Tensor) -> None:
    """By a minimum, so that the device is not asked how many matches there are and their order is nothing."""
    where = (owner * logits.shape[1] + token_ids).flatten()
    lowest = torch.full_like(where, float("inf"), dtype=logits.dtype).masked_fill_(matches.flatten(), _NEVER)
    logits.view(-1).scatter_reduce_(0, where, lowest, "amin")
