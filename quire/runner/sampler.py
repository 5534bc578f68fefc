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

On a GPU nothing here waits for the device: which rows ask for what is known on the host, everything else stays
tensors. (`logits_processors` are the exception: what they do is theirs.)
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.errors import NO_TOKEN_LEFT
from quire.kernels.ops import HAS_NAN, NOTHING_LEFT, Kernels
from quire.runner.filters import filter_, filtered_rows
from quire.runner.masks import mask_
from quire.runner.noise import noise_keys
from quire.runner.penalties import bias_, dont_repeat_, penalize_
from quire.runner.sampling_batch import SamplingBatch

BAD_PROCESSOR = 4
"""A flag beside those of the kernels: a logits processor returned NaN or infinity."""

_MESSAGES = {
    NOTHING_LEFT: NO_TOKEN_LEFT,
    BAD_PROCESSOR: "a logits processor failed: the logits hold NaN or infinity",
    HAS_NAN: "the model's scores are not numbers (NaN)",
}


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """One token per row, and which rows have none: on the device, or, after `with_tensors`, on the host."""

    token_ids: Tensor
    """int64 [rows]; anything for a row that failed."""
    flags: Tensor
    """int32 [rows]: 0, or the sum of HAS_NAN, NOTHING_LEFT and BAD_PROCESSOR."""
    errors: dict[int, str] = field(default_factory=dict)
    """What went wrong in a row's own functions, by index."""

    def tensors(self) -> tuple[Tensor, Tensor]:
        """What must be brought to the host."""
        return self.token_ids, self.flags

    def with_tensors(self, token_ids: Tensor, flags: Tensor) -> SampledTokens:
        """The same with copies of `tensors()`."""
        return replace(self, token_ids=token_ids, flags=flags)

    def failures(self) -> dict[int, str]:
        """Why rows failed, by index. For copies on the host: on the device's own tensors it would wait."""
        return self.errors | describe_flags(self.flags.tolist(), self.errors)


def describe_flags(flags: list[int], errors: dict[int, str] | None = None) -> dict[int, str]:
    """What the flags of rows mean, by index. What is in `errors` says more than any flag but that of NaN."""
    found: dict[int, str] = {}
    for index, flag in enumerate(flags):
        if flag:
            weightiest = next(one for one in (HAS_NAN, BAD_PROCESSOR, NOTHING_LEFT) if flag & one)
            if weightiest == HAS_NAN or not errors or index not in errors:
                found[index] = _MESSAGES[weightiest]
    return found


def sample(logits: Tensor, batch: SamplingBatch, kernels: Kernels) -> SampledTokens:
    """Tokens for float32 logits [rows, vocab] in one piece, which are changed on the way."""
    temperature = batch["temperature"]
    if batch.is_plain:
        return SampledTokens(*_choose(logits, batch, temperature, kernels))
    # Looked for before anything hides it: what is masked is a number again.
    broken = logits.sum(-1).isnan()
    mask_(logits, batch, kernels)
    bias_(logits, batch)
    penalize_(logits, batch)
    dont_repeat_(logits, batch, kernels)
    errors, is_bad = _process_(logits, batch)
    rows = filtered_rows(batch, logits.shape[1])
    if len(rows):
        filter_(logits, batch, rows, kernels)
        temperature = temperature.copy()
        temperature[rows] = 1  # already divided
    token_ids, flags = _choose(logits, batch, temperature, kernels)
    flags |= HAS_NAN * broken.int()
    for row, bad in is_bad.items():
        flags[row] |= BAD_PROCESSOR * bad.int()
    return SampledTokens(token_ids, flags, errors)


def _choose(
    logits: Tensor, batch: SamplingBatch, temperature: npt.NDArray[np.float32], kernels: Kernels
) -> tuple[Tensor, Tensor]:
    divisor, keys = batch.upload(temperature, noise_keys(batch["seed"], batch.position))
    return kernels.gumbel_argmax(logits, divisor, keys)


def _process_(logits: Tensor, batch: SamplingBatch) -> tuple[dict[int, str], dict[int, Tensor]]:
    """Runs the requests' own functions. One that raises, or gives no logits, is that row's error; whether all are
    numbers below infinity stays on the device, a bool for each row. Logits that are no good are not taken."""
    errors: dict[int, str] = {}
    is_bad: dict[int, Tensor] = {}
    for row in np.flatnonzero(batch["has_processors"]).tolist():
        history = batch.token_ids[batch.rows[row], : batch.position[row]].clone()
        scores = logits[row].clone()
        try:
            for processor in batch.lists[row].processors:
                scores = processor(history, scores)
                if not isinstance(scores, Tensor) or scores.shape != logits[row].shape:
                    raise ValueError(f"{processor!r} returned no logits of shape {tuple(logits[row].shape)}")
            scores = scores.to(logits)
        except Exception as error:  # whatever a user's function raises must not reach the other rows
            errors[row] = f"a logits processor failed: {error!r}"
            continue
        is_bad[row] = ~(scores < float("inf")).all()
        if logits.device.type == "cuda":
            scores = torch.where(is_bad[row], logits[row], scores)
        elif is_bad[row]:  # where there is nobody to wait for, looking is cheaper
            continue
        logits[row] = scores
    return errors, is_bad
