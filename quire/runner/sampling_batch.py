"""What the sampler needs to know of the rows it samples.

Numbers lie in one structured array, a record per row, so that a step picks its rows with one numpy operation
and finds out with a comparison which features nobody asked for. What is longer than a number (lists of
token ids, functions) is prepared once, at admission, as tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.runner.upload import upload, upload_all
from quire.sampling_params import LogitsProcessor, SamplingParams
from quire.step import Admission

Indices = npt.NDArray[np.int64]
"""Which of the rows sampled now (not permanent rows)."""

GREEDY_BELOW = 1e-5
"""Temperatures under this are 0: what they would change is below the logits' own precision."""

PARAMETERS = np.dtype(
    [
        ("temperature", np.float32),
        ("top_k", np.int64),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("typical_p", np.float32),
        ("top_n_sigma", np.float32),
        ("repetition_penalty", np.float32),
        ("presence_penalty", np.float32),
        ("frequency_penalty", np.float32),
        ("no_repeat_ngram_size", np.int64),
        ("dry_multiplier", np.float32),
        ("dry_base", np.float32),
        ("dry_allowed_length", np.int64),
        ("xtc_probability", np.float64),
        ("xtc_threshold", np.float32),
        ("seed", np.uint64),
        ("num_prompt_tokens", np.int64),
        ("min_length", np.int64),  # tokens, prompt included, before which the end tokens can't be chosen
        ("is_plain", np.bool_),  # nothing but a temperature is asked for, once `min_length` is reached
        ("is_structured", np.bool_),
        ("has_bias", np.bool_),
        ("has_allowed", np.bool_),
        ("has_banned", np.bool_),
        ("has_bad_words", np.bool_),
        ("has_processors", np.bool_),
    ]
)


@dataclass(frozen=True, slots=True)
class RowLists:
    """A row's parameters that are lists."""

    end_ids: tuple[int, ...] = ()
    """Can't be chosen before `min_length`."""
    banned_ids: tuple[int, ...] = ()
    """Can't be chosen at all: bad words of one token."""
    allowed_ids: Tensor | None = None
    bias_ids: Tensor | None = None
    biases: Tensor | None = None
    bad_word_starts: Tensor | None = None
    """int64 [words, longest]: bad words without their last token, flush right, -1 before them."""
    bad_word_ends: Tensor | None = None
    """int64 [words]: their last tokens."""
    dry_breaker_ids: tuple[int, ...] = ()
    processors: tuple[LogitsProcessor, ...] = ()


def read_parameters(admission: Admission) -> tuple[Any, ...]:
    """The record of PARAMETERS for an admitted request."""
    params = admission.params
    bad_words = admission.resolved.bad_word_ids
    temperature = params.temperature if params.temperature >= GREEDY_BELOW else 0.0
    own = {
        "temperature": temperature,
        "is_plain": not (_masks(admission) or _changes_logits(params) or (temperature and _filters(params))),
        "seed": admission.seed,
        "num_prompt_tokens": admission.num_prompt_tokens,
        "min_length": admission.num_prompt_tokens + params.min_tokens,
        "is_structured": params.structured is not None,
        "has_bias": bool(params.logit_bias),
        "has_allowed": params.allowed_token_ids is not None,
        "has_banned": any(len(word) == 1 for word in bad_words),
        "has_bad_words": any(len(word) > 1 for word in bad_words),
        "has_processors": bool(params.logits_processors),
    }
    return tuple(own[name] if name in own else getattr(params, name) for name in PARAMETERS.fields or ())


def _masks(admission: Admission) -> bool:
    """Whether tokens are forbidden, `min_tokens` aside."""
    params = admission.params
    return (
        params.structured is not None
        or params.allowed_token_ids is not None
        or bool(admission.resolved.bad_word_ids)
        or params.no_repeat_ngram_size > 0
    )


def _changes_logits(params: SamplingParams) -> bool:
    return (
        bool(params.logit_bias)
        or bool(params.logits_processors)
        or params.repetition_penalty != 1
        or params.presence_penalty != 0
        or params.frequency_penalty != 0
        or params.dry_multiplier > 0
    )


def _filters(params: SamplingParams) -> bool:
    return (
        params.top_k > 0
        or params.top_p < 1
        or params.min_p > 0
        or params.typical_p < 1
        or params.top_n_sigma > 0
        or params.xtc_probability > 0
    )


def read_lists(admission: Admission, device: torch.device) -> RowLists:
    params, resolved = admission.params, admission.resolved
    ends = () if params.ignore_eos else admission.eos_token_ids
    bias = dict(params.logit_bias or ())
    words = [word for word in resolved.bad_word_ids if len(word) > 1]
    longest = max(map(len, words), default=1) - 1
    starts = [(-1,) * (longest + 1 - len(word)) + word[:-1] for word in words]

    def ids(values: Any) -> Tensor | None:
        return upload(np.array(values, dtype=np.int64), device) if values else None

    return RowLists(
        end_ids=(*ends, *params.stop_token_ids),
        banned_ids=tuple(word[0] for word in resolved.bad_word_ids if len(word) == 1),
        allowed_ids=ids(params.allowed_token_ids),
        bias_ids=ids(list(bias)),
        biases=upload(np.array(list(bias.values()), dtype=np.float32), device) if bias else None,
        bad_word_starts=ids(starts),
        bad_word_ends=ids([word[-1] for word in words]),
        dry_breaker_ids=resolved.dry_breaker_ids,
        processors=params.logits_processors,
    )


@dataclass(frozen=True)
class SamplingBatch:
    """The rows to sample, one entry each."""

    parameters: npt.NDArray[np.void]
    """Records of PARAMETERS."""
    lists: tuple[RowLists, ...]
    rows: Indices
    """Their permanent rows."""
    position: Indices
    """Where in its sequence each sampled token will stand: the number of tokens before it."""
    token_ids: Tensor
    """The tokens of all permanent rows, [rows, longest]; a row's history is what is before its position."""
    masks: Tensor | None = None
    """int32 [len(rows), words of 32 bits]: allowed tokens of the rows in `masked_rows`, lowest bit first."""

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        """One parameter of all rows."""
        return self.parameters[name]

    @cached_property
    def masked_rows(self) -> Indices:
        """The rows whose mask counts."""
        return np.flatnonzero(self.parameters["is_structured"])

    @property
    def is_plain(self) -> bool:
        """Whether no row asks for more than a temperature for its next token."""
        return bool((self.parameters["is_plain"] & (self.position >= self.parameters["min_length"])).all())

    def upload(self, *arrays: npt.NDArray[Any]) -> list[Tensor]:
        """Arrays on the device, sent as one and without waiting for it."""
        return upload_all(self.token_ids.device, *arrays)

    def columns(self, rows: Indices, *names: str) -> list[Tensor]:
        """Parameters of some rows, each as a column [rows, 1] on the device."""
        own = self.parameters[rows]
        return self.upload(*(own[name][:, None] for name in names))

    def history(self, rows: Tensor, longest: int) -> Tensor:
        """The tokens of some permanent rows, [rows, longest]; what is past a row's end is anything."""
        return self.token_ids[:, :longest].index_select(0, rows)
