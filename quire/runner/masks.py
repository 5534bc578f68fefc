"""Tokens a row can't choose: their logits become minus infinity. Each function works on the rows that ask, on all
of them at once, and never asks the device anything."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from torch import Tensor

from quire.kernels.ops import Kernels
from quire.runner.sampling_batch import Indices, SamplingBatch
from quire.runner.upload import upload

_NEVER = float("-inf")


def mask_(logits: Tensor, batch: SamplingBatch, kernels: Kernels) -> None:
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
        _repeat_no_ngram_(logits, batch, asking, kernels)


def _apply_bitmasks_(logits: Tensor, masks: Tensor, rows: Indices) -> None:
    whole = len(rows) == len(masks)
    index = upload(rows, masks.device)
    table = _bits_of_bytes(masks.device)
    chosen = masks if whole else masks[index]
    # Eight flags at once: a byte of the mask looks up the eight bytes that are its bits.
    allowed = table[chosen.contiguous().view(torch.uint8).int()].view(torch.bool)[:, : logits.shape[1]]
    if whole:
        logits.masked_fill_(~allowed, _NEVER)
    else:
        logits[index] = logits[index].masked_fill_(~allowed, _NEVER)


@cache
def _bits_of_bytes(device: torch.device) -> Tensor:
    """int64 [256]: byte i of entry b is bit i of b."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return upload(bits.copy().view(np.int64)[:, 0], device)


def _keep_allowed_(logits: Tensor, batch: SamplingBatch, asking: Indices) -> None:
    each = [batch.lists[row].allowed_ids for row in asking.tolist()]
    ids = [one for one in each if one is not None]
    where = flat_places(logits, batch, asking, ids)
    kept = logits.view(-1)[where]
    logits.index_fill_(0, batch.upload(asking)[0], _NEVER)
    logits.view(-1)[where] = kept


def flat_places(logits: Tensor, batch: SamplingBatch, asking: Indices, ids: list[Tensor]) -> Tensor:
    """Where in the flattened logits the rows' own token ids lie, one row's after the other's."""
    counts = np.array([len(one) for one in ids])
    first, repeats = batch.upload(asking * logits.shape[1], counts)
    return first.repeat_interleave(repeats, output_size=int(counts.sum())) + torch.cat(ids)


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
        (where,) = batch.upload(np.array(at) * logits.shape[1] + np.array(ids))
        logits.view(-1).index_fill_(0, where, _NEVER)


def _end_no_bad_word_(logits: Tensor, batch: SamplingBatch, asking: Indices) -> None:
    """The last token of a bad word, where the answer ends with the tokens before it."""
    starts, ends = [], []
    for row in asking.tolist():
        lists = batch.lists[row]
        assert lists.bad_word_starts is not None
        assert lists.bad_word_ends is not None
        starts.append(lists.bad_word_starts)
        ends.append(lists.bad_word_ends)
    owner = asking.repeat([len(one) for one in ends])
    longest = max(start.shape[1] for start in starts)
    wanted = torch.cat([torch.nn.functional.pad(start, (longest - start.shape[1], 0), value=-1) for start in starts])
    # The last `longest` tokens of the owner's answer; -2, which no word holds, before its beginning.
    position, answer_length, row, first = batch.upload(
        batch.position[owner, None],
        (batch.position - batch["num_prompt_tokens"])[owner, None],
        batch.rows[owner, None],
        owner * logits.shape[1],
    )
    back = torch.arange(longest, 0, -1, device=logits.device)
    tail = batch.token_ids[row, (position - back).clamp_min_(0)]
    tail.masked_fill_(answer_length < back, -2)
    matches = ((wanted == tail) | (wanted == -1)).all(1)
    _ban_where_(logits, first + torch.cat(ends), matches)


def _repeat_no_ngram_(logits: Tensor, batch: SamplingBatch, asking: Indices, kernels: Kernels) -> None:
    """The last token of every n-gram whose other tokens are the last ones of the history."""
    sizes, lengths = batch["no_repeat_ngram_size"][asking], batch.position[asking]
    row, size, length, first = batch.upload(batch.rows[asking], sizes[:, None], lengths, asking[:, None])
    history = batch.history(row, int(lengths.max()))
    # How many tokens before each one are the history's last: they and it are an n-gram if those are n - 1.
    before = torch.zeros_like(history, dtype=torch.int32)
    before[:, 1:] = kernels.match_lengths(history, length, None, int(sizes.max()) - 1)[:, :-1]
    inside = torch.arange(history.shape[1], device=history.device) < length.unsqueeze(1)
    _ban_where_(logits, first * logits.shape[1] + history, (before >= size - 1) & inside)


def _ban_where_(logits: Tensor, where: Tensor, matches: Tensor) -> None:
    """By a minimum, so that the device is not asked how many matches there are and their order is nothing."""
    lowest = torch.full(matches.shape, float("inf"), dtype=logits.dtype, device=logits.device)
    lowest.masked_fill_(matches, _NEVER)
    logits.view(-1).scatter_reduce_(0, where.flatten(), lowest.flatten(), "amin")
