"""Biases and penalties: changes to the logits of a few tokens, those a request names or has used before.

Nothing here goes over the vocabulary, and nothing asks the device anything. A token that stands several times in a
history is written several times, always with the same value computed from the logit before, so the order of writing
does not matter.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.kernels.ops import Kernels
from quire.runner.masks import flat_places
from quire.runner.sampling_batch import Indices, SamplingBatch
from quire.runner.upload import upload

DRY_LONGEST = 64
"""A repetition is measured up to this many tokens beyond the allowed length."""
_MOST = 1e30  # a penalty stays a number


def bias_(logits: Tensor, batch: SamplingBatch) -> None:
    """Adds `logit_bias`."""
    asking = np.flatnonzero(batch["has_bias"])
    if len(asking) == 0:
        return
    lists = [batch.lists[row] for row in asking.tolist()]
    ids = [one.bias_ids for one in lists if one.bias_ids is not None]
    biases = [one.biases for one in lists if one.biases is not None]
    where = flat_places(logits, batch, asking, ids)
    logits.view(-1)[where] += torch.cat(biases)


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
    where, _ = _flat_tokens(logits, batch, asking, np.zeros_like(asking))
    (penalty,) = batch.columns(asking, "repetition_penalty")
    before = logits.view(-1)[where]
    logits.view(-1)[where] = torch.where(before > 0, before / penalty, before * penalty)


def _penalize_answer_(logits: Tensor, batch: SamplingBatch, asking: Indices) -> None:
    where, inside = _flat_tokens(logits, batch, asking, batch["num_prompt_tokens"][asking])
    frequency, presence = batch.columns(asking, "frequency_penalty", "presence_penalty")
    before = logits.view(-1)[where]
    counts = torch.ones_like(before)
    if (batch["frequency_penalty"][asking] != 0).any():
        # How often each entry's token is in its row: counted on a table that is all zeros but for these tokens.
        table = torch.zeros(logits.numel(), dtype=torch.int32, device=logits.device)
        table.scatter_add_(0, where.flatten(), inside.flatten().int())
        counts = table[where].float()
    logits.view(-1)[where] = before - frequency * counts - presence


def _flat_tokens(logits: Tensor, batch: SamplingBatch, asking: Indices, start: Indices) -> tuple[Tensor, Tensor]:
    """Where in the flattened logits the rows' tokens from `start` on lie, and which of these are: past a row's end
    stands its first one again."""
    lengths = batch.position[asking] - start
    row, begin, length, first = batch.upload(
        batch.rows[asking, None], start[:, None], lengths[:, None], asking[:, None] * logits.shape[1]
    )
    column = torch.arange(int(lengths.max()), device=logits.device)
    inside = column < length
    return batch.token_ids[row, begin + column * inside] + first, inside


def dont_repeat_(logits: Tensor, batch: SamplingBatch, kernels: Kernels) -> None:
    """DRY: a token that would make a repetition longer pays for the length it has.

    A place i in the history repeats n tokens if the n tokens up to i are the last n of all; the token after
    i would make it n + 1. The longest such n counts for each token.
    """
    asking = np.flatnonzero((batch["dry_multiplier"] > 0) & (batch.position > batch["dry_allowed_length"]))
    if len(asking) == 0:
        return
    lengths, limits = batch.position[asking], batch["dry_allowed_length"][asking]
    tables, which = _breaker_tables(batch, asking, logits.shape[1])
    row, length, allowed, own, first, table, penalties = batch.upload(
        batch.rows[asking],
        lengths,
        limits[:, None],
        np.arange(len(asking))[:, None] * logits.shape[1],
        asking[:, None] * logits.shape[1],
        which[:, None],
        _dry_penalties(batch, asking),
    )
    history = batch.history(row, int(lengths.max()))
    breaks = tables[table, history]
    repeated = kernels.match_lengths(history, length, breaks, int(limits.max()) + DRY_LONGEST)[:, :-1].flatten()
    following = history[:, 1:]
    # By place: the repetition's length, the token after it in the tables below and in the logits, whose it is.
    by_place = [repeated, (own + following).flatten(), (first + following).flatten(), breaks[:, 1:].flatten()]
    by_place.append(torch.arange(len(asking), device=logits.device).unsqueeze(1).expand_as(following).flatten())
    if logits.device.type == "cpu":  # where there is nobody to wait for: only places that count
        some = (repeated >= int(limits.min())).nonzero()[:, 0]
        by_place = [values[some] for values in by_place]
    repeated, cell, where, is_break, at = by_place
    # By token, of all places it stands at. What stands past the end of a history matches nothing, so it adds nothing.
    longest = torch.zeros(len(asking) * logits.shape[1], dtype=torch.int32, device=logits.device)
    longest.scatter_reduce_(0, cell, repeated, "amax")
    excess = longest[cell] - allowed[at, 0]
    penalty = penalties[at, excess.clamp(0, DRY_LONGEST)]
    penalty.masked_fill_((excess < 0) | is_break, 0.0)
    logits.view(-1)[where] = logits.view(-1)[where] - penalty


def _dry_penalties(batch: SamplingBatch, asking: Indices) -> npt.NDArray[np.float32]:
    """multiplier * base**excess as [rows, excess], by multiplying: powers in float32 differ between libraries."""
    factors = np.repeat(batch["dry_base"][asking, None].astype(np.float64), DRY_LONGEST + 1, axis=1)
    factors[:, 0] = batch["dry_multiplier"][asking]
    penalties: npt.NDArray[np.float32] = np.minimum(factors.cumprod(axis=1), _MOST).astype(np.float32)
    return penalties


def _breaker_tables(batch: SamplingBatch, asking: Indices, vocab_size: int) -> tuple[Tensor, Indices]:
    """bool [tables, vocab]: tokens no repetition extends over; and which table is whose."""
    each = [batch.lists[row].dry_breaker_ids for row in asking.tolist()]
    # By identity: requests with the same breakers share one tuple, and comparing thousands of ids takes time.
    distinct = {id(ids): ids for ids in each}
    number = {key: i for i, key in enumerate(distinct)}
    device = batch.token_ids.device
    tables = torch.stack([_breaker_table(ids, vocab_size, device) for ids in distinct.values()])
    return tables, np.array([number[id(ids)] for ids in each])


@lru_cache(maxsize=32)
def _breaker_table(ids: tuple[int, ...], vocab_size: int, device: torch.device) -> Tensor:
    table = np.zeros(vocab_size, dtype=np.bool_)
    table[[token_id for token_id in ids if token_id < vocab_size]] = True
    return upload(table, device)
