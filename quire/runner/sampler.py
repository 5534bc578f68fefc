"""From logits to token ids: argmax(logits / temperature + Gumbel(seed, position)) over what filters leave.

The order of operations for one row:

1.  masks: the grammar of `structured`, `allowed_token_ids`, end tokens before `min_tokens`, `bad_words`,
    `no_repeat_ngram_size`
2.  `logit_bias`
3.  `repetition_penalty`, then `frequency_penalty` and `presence_penalty`
4.  DRY
5.  `logits_processors`
6.  division by the temperature; with temperature 0 the highest score wins here, the lowest id among equals
7.  `top_n_sigma`, `top_k`, `top_p`, `min_p`, `typical_p`, XTC: each over what the one before left
8.  noise, argmax

Masks come first and nothing after them makes a finite score of minus infinity, so what is forbidden stays
forbidden whatever is added to it. Rows never meet: each is computed from its own logits, history and
parameters. A feature costs something only in the rows that ask for it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from quire.kernels.ops import Kernels
from quire.runner.filters import filter_, filtered_rows
from quire.runner.masks import mask_
from quire.runner.noise import noise_keys
from quire.runner.penalties import bias_, dont_repeat_, penalize_
from quire.runner.sampling_batch import SamplingBatch


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """One token per row, and which rows have none."""

    token_ids: Tensor
    """int64 [rows]; anything for a row that failed."""
    nothing_left: Tensor
    """bool [rows]: no token could be chosen."""
    errors: dict[int, str]
    """What went wrong in a row's own functions, by index."""

    def failures(self) -> dict[int, str]:
        """Why rows failed, by index; waits for the device."""
        stuck = self.nothing_left.nonzero()[:, 0].tolist()
        return {**dict.fromkeys(stuck, "no token is left to choose from: masks and bans forbid all"), **self.errors}


def sample(logits: Tensor, batch: SamplingBatch, kernels: Kernels) -> SampledTokens:
    """Tokens for float32 logits [rows, vocab] in one piece, which are changed on the way."""
    mask_(logits, batch)
    bias_(logits, batch)
    penalize_(logits, batch)
    dont_repeat_(logits, batch)
    errors = _process_(logits, batch)
    temperature = batch["temperature"].copy()
    rows = filtered_rows(batch, logits.shape[1])
    if len(rows):
        index = batch.on_device(rows)
        divisor = batch.on_device(temperature[rows]).unsqueeze(1)
        scores = logits.div_(divisor) if len(rows) == len(logits) else logits[index] / divisor
        filter_(scores, batch, rows, kernels)
        if len(rows) < len(logits):
            logits[index] = scores
        temperature[rows] = 1  # already divided
    keys = batch.on_device(noise_keys(batch["seed"], batch.position))
    token_ids = kernels.gumbel_argmax(logits, batch.on_device(temperature), keys)
    # The best score is minus infinity only where all are.
    nothing_left = logits.gather(1, token_ids.unsqueeze(1))[:, 0] == float("-inf")
    return SampledTokens(token_ids, nothing_left, errors)


def _process_(logits: Tensor, batch: SamplingBatch) -> dict[int, str]:
    """Runs the requests' own functions; one that fails, or gives no logits, is that row's error."""
    errors: dict[int, str] = {}
    for row in np.flatnonzero(batch["has_processors"]).tolist():
        history = batch.token_ids[batch.rows[row], : batch.position[row]].clone()
        scores = logits[row].clone()
        try:
            for processor in batch.lists[row].processors:
                scores = processor(history, scores)
                if not isinstance(scores, Tensor) or scores.shape != logits[row].shape:
                    raise ValueError(f"{processor!r} returned no logits of shape {tuple(logits[row].shape)}")
            if not (scores < float("inf")).all():
                raise ValueError("the logits hold NaN or infinity")
            logits[row] = scores.to(logits)
        except Exception as error:  # whatever a user's function raises must not reach the other rows
            errors[row] = f"a logits processor failed: {error!r}"
    return errors
