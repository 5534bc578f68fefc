"""From logits to token ids: argmax(logits / temperature + Gumbel(seed, position)) over the tokens
the features leave.

Masks come first, and nothing after them makes a finite score of minus infinity, so a forbidden
token stays forbidden. Each row is computed from its own logits, history and parameters. Rows that
don't ask for a feature don't pay for it.

On a GPU nothing here waits for the device: which rows ask for what is known on the host, everything
else stays in tensors. (The exception are `logits_processors`, which are the user's code.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.errors import NO_TOKEN_LEFT
from quire.kernels.noise import ACCEPTS, RESAMPLES, chances, noise_keys
from quire.kernels.ops import HAS_NAN, NOTHING_LEFT, Kernels
from quire.sampling.feature import Feature
from quire.sampling.filters import Filters
from quire.sampling.masks import AllowedTokens, BadWords, BannedTokens, GrammarMask, NoRepeatNgram
from quire.sampling.metadata import Indices, SamplingMetadata, effective_temperature
from quire.sampling.penalties import AnswerPenalties, Dry, LogitBias, RepetitionPenalty
from quire.sampling.processors import LogitsProcessors
from quire.sampling.upload import Uploader
from quire.step import AdmittedRequest

FEATURES: tuple[type[Feature], ...] = (
    GrammarMask,
    AllowedTokens,
    BannedTokens,
    BadWords,
    NoRepeatNgram,
    LogitBias,
    RepetitionPenalty,
    AnswerPenalties,
    Dry,
    LogitsProcessors,
    Filters,
)
"""All that can change logits before a token is sampled, in this order. A sample for which none of
these is active is plain: only its temperature, seed and position matter.
"""

BAD_PROCESSOR = 4
"""A flag beside those of the kernels: a logits processor returned NaN or infinity."""

UNDEFINED = 8
"""Another flag: the grammar allows nothing after the draft token that this draw follows. The
sample is dropped; no error.
"""

NOT_NUMBERS = "the model's scores are not numbers (NaN); quire inspect MODEL --trace TEXT says where that begins"
_MESSAGES = {  # the most important first
    HAS_NAN: NOT_NUMBERS,
    BAD_PROCESSOR: "a logits processor failed: the logits hold NaN or infinity",
    NOTHING_LEFT: NO_TOKEN_LEFT,
}


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """One token per draw, and the samples that failed."""

    tensor: Tensor
    """int64 [2, samples]: token ids (meaningless for a sample that failed), and flags: 0, or a sum
    of HAS_NAN, NOTHING_LEFT, BAD_PROCESSOR and UNDEFINED.
    """
    errors: dict[int, str] = field(default_factory=dict)
    """By sample, what went wrong in a request's logits processors."""

    @property
    def token_ids(self) -> Tensor:
        return self.tensor[0]

    def failures(self, on_host: Sequence[int] | None = None) -> dict[int, str]:
        """By sample, why it failed. `on_host` are the flags if they were copied; else this waits
        for the device.
        """
        found = dict(self.errors)
        for index, flags in enumerate(self.tensor[1].tolist() if on_host is None else on_host):
            if flags and not flags & UNDEFINED:
                weightiest = next(flag for flag in _MESSAGES if flags & flag)
                # a processor's error says more than the other flags
                if weightiest == HAS_NAN or index not in found:
                    found[index] = _MESSAGES[weightiest]
        return found


class Sampler:
    """Samples tokens for requests, whose parameters it keeps from their admission on."""

    def __init__(
        self, max_num_seqs: int, vocab_size: int, kernels: Kernels, device: torch.device
    ) -> None:
        uploader = Uploader(device)
        self._kernels = kernels
        self._upload = uploader.upload
        self._features = [
            feature(max_num_seqs, vocab_size, kernels, uploader) for feature in FEATURES
        ]
        self._asked: dict[int, int] = {}
        """By request row that asks for any feature: a bit for each feature it asks for."""
        self._seeds = np.zeros(max_num_seqs, np.uint64)
        self._temperatures = np.zeros(max_num_seqs, np.float32)
        self._prompt_lengths = np.zeros(max_num_seqs, np.int64)

    def admit(self, admission: AdmittedRequest) -> None:
        """Takes over the parameters of a request that gets a row."""
        row = admission.row
        self._asked.pop(row, None)
        if asked := sum(feature.admit(admission) << i for i, feature in enumerate(self._features)):
            self._asked[row] = asked
        self._seeds[row] = admission.seed
        self._temperatures[row] = effective_temperature(admission.params)
        self._prompt_lengths[row] = admission.num_prompt_tokens

    def metadata(
        self, request_rows: Indices, positions: Indices, token_ids: Tensor
    ) -> SamplingMetadata:
        """Samples for these request rows at these positions; `token_ids` are those of all request
        rows.
        """
        return SamplingMetadata(
            request_rows,
            positions,
            self._seeds[request_rows],
            self._temperatures[request_rows],
            self._prompt_lengths[request_rows],
            token_ids,
        )

    def asks_nothing(self, request_rows: Sequence[int]) -> bool:
        """Whether samples of these requests are plain at any position."""
        return self._asked.keys().isdisjoint(request_rows)

    def is_plain(self, metadata: SamplingMetadata) -> bool:
        """Whether no draw asks for more than a temperature."""
        return next(self._active(metadata), None) is None

    def sample(self, logits: Tensor, metadata: SamplingMetadata) -> SampledTokens:
        """Samples from contiguous float32 logits [samples, vocab], which are changed in place."""
        active = list(self._active(metadata))
        if not active:
            return SampledTokens(torch.stack(self._choose(logits, metadata, metadata.temperatures)))
        # Looked for before the features run: a mask would replace NaN by minus infinity.
        broken = logits.sum(-1).isnan()
        temperatures = metadata.temperatures.copy()
        failures: dict[int, str | Tensor] = {}
        for feature, which in active:
            failures |= feature.apply_(logits, metadata, which) or {}
            if feature.divides:
                temperatures[which] = 1
        token_ids, flags = self._choose(logits, metadata, temperatures)
        flags |= HAS_NAN * broken
        for row, failure in failures.items():
            if isinstance(failure, Tensor):
                flags[row] |= BAD_PROCESSOR * failure
        errors = {row: failure for row, failure in failures.items() if isinstance(failure, str)}
        return SampledTokens(torch.stack((token_ids, flags)), errors)

    def _active(self, metadata: SamplingMetadata) -> Iterator[tuple[Feature, Indices]]:
        """The features that change something, in their order, and in which samples."""
        asked = np.array(
            [self._asked.get(row, 0) for row in metadata.request_rows.tolist()], np.int64
        )
        by_anybody = int(np.bitwise_or.reduce(asked))
        for i, feature in enumerate(self._features if by_anybody else ()):
            if by_anybody >> i & 1:
                which = feature.active(metadata, np.flatnonzero(asked >> i & 1))
                if len(which):
                    yield feature, which

    def _choose(
        self, logits: Tensor, metadata: SamplingMetadata, temperatures: npt.NDArray[np.float32]
    ) -> tuple[Tensor, Tensor]:
        keys = noise_keys(metadata.seeds, metadata.positions)
        which = (
            np.flatnonzero((metadata.draft_tokens >= 0) & (temperatures > 0))
            if metadata.draft_tokens is not None
            else ()
        )
        if len(which):
            keys[which] = noise_keys(metadata.seeds[which] ^ RESAMPLES, metadata.positions[which])
            self._accept_by_chance_(logits, metadata, np.asarray(which), temperatures)
        divisor, sent = self._upload(temperatures, keys)
        token_ids, flags = self._kernels.gumbel_argmax(logits, divisor, sent)
        return token_ids, flags.long()

    def _accept_by_chance_(
        self,
        logits: Tensor,
        metadata: SamplingMetadata,
        which: Indices,
        temperatures: npt.NDArray[np.float32],
    ) -> None:
        """Rejection sampling of draft tokens, each of which its drafter proposed with probability
        1: a draft token is accepted with the probability p that the model gives it, else a token
        is sampled from all others. So every token keeps its probability. The random numbers are
        independent of those that a draft model samples with.
        """
        assert metadata.draft_tokens is not None
        accepts = chances(metadata.seeds[which] ^ ACCEPTS, metadata.positions[which])
        row, draft_token, divisor, chance = self._upload(
            which, metadata.draft_tokens[which], temperatures[which, None], accepts
        )
        scores = logits[row].double() / divisor
        probability = scores.softmax(-1).gather(1, draft_token[:, None])[:, 0]
        is_taken = (chance < probability)[:, None]
        is_draft_token = torch.arange(logits.shape[1], device=logits.device) == draft_token[:, None]
        logits[row] = logits[row].masked_fill_(is_taken != is_draft_token, float("-inf"))
