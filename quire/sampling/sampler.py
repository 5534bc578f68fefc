"""From logits to token ids: argmax(logits / temperature + Gumbel(seed, position)) over what the features leave.

Masks come first and nothing after them makes a finite score of minus infinity, so what is forbidden stays
forbidden whatever is added to it. Rows never meet: each is computed from its own logits, history and
parameters. A feature costs something only in the rows that ask for it.

On a GPU nothing here waits for the device: which rows ask for what is known on the host, everything else stays
tensors. (`logits_processors` are the exception: what they do is theirs.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.errors import NO_TOKEN_LEFT
from quire.kernels.ops import HAS_NAN, NOTHING_LEFT, Kernels
from quire.sampling.draws import Draws, Indices, effective_temperature
from quire.sampling.feature import Feature
from quire.sampling.filters import Filters
from quire.sampling.masks import AllowedTokens, BadWords, BannedTokens, GrammarMask, NoRepeatNgram
from quire.sampling.noise import ACCEPTS, REDRAWS, chances, noise_keys
from quire.sampling.penalties import AnswerPenalties, Dry, LogitBias, RepetitionPenalty
from quire.sampling.processors import LogitsProcessors
from quire.sampling.upload import Uploader
from quire.step import Admission

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
"""Everything that can happen to logits before a token is drawn from them, in the order in which it happens. A draw for
which none of these is active is plain: nothing but its temperature, seed and position count."""

BAD_PROCESSOR = 4
"""A flag beside those of the kernels: a logits processor returned NaN or infinity."""

UNDEFINED = 8
"""Another: the draw follows a guess after which nothing can be drawn; it is no failure."""

NOT_NUMBERS = "the model's scores are not numbers (NaN); quire inspect MODEL --trace TEXT says where that begins"
_MESSAGES = {  # the weightiest first
    HAS_NAN: NOT_NUMBERS,
    BAD_PROCESSOR: "a logits processor failed: the logits hold NaN or infinity",
    NOTHING_LEFT: NO_TOKEN_LEFT,
}


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """One token per draw, and which draws have none."""

    tensor: Tensor
    """int64 [2, draws]: token ids (anything for a draw that failed), and flags: 0, or the sum of HAS_NAN, NOTHING_LEFT,
    BAD_PROCESSOR and UNDEFINED."""
    errors: dict[int, str] = field(default_factory=dict)
    """What went wrong in a request's own functions, by index."""

    @property
    def token_ids(self) -> Tensor:
        return self.tensor[0]

    def failures(self, on_host: Sequence[int] | None = None) -> dict[int, str]:
        """Why draws failed, by index, from the flags if they are on the host. Else it waits for the device."""
        found = dict(self.errors)
        for index, flags in enumerate(self.tensor[1].tolist() if on_host is None else on_host):
            if flags and not flags & UNDEFINED:
                weightiest = next(flag for flag in _MESSAGES if flags & flag)
                if weightiest == HAS_NAN or index not in found:  # a function's own error says more than other flags
                    found[index] = _MESSAGES[weightiest]
        return found


class Sampler:
    """Draws tokens for requests, whose parameters it takes over at their admission."""

    fields = ("temperature", "seed")
    """The fields of SamplingParams that count for every draw; the others belong to the features."""

    def __init__(self, max_num_seqs: int, vocab_size: int, kernels: Kernels, device: torch.device) -> None:
        uploader = Uploader(device)
        self._kernels = kernels
        self._upload = uploader.upload
        self._features = [feature(max_num_seqs, vocab_size, kernels, uploader) for feature in FEATURES]
        self._asked: dict[int, int] = {}
        """By request row, a bit for each feature it asks for; not those that ask for none."""
        self._seeds = np.zeros(max_num_seqs, np.uint64)
        self._temperatures = np.zeros(max_num_seqs, np.float32)
        self._prompt_lengths = np.zeros(max_num_seqs, np.int64)

    def admit(self, admission: Admission) -> None:
        """A request row begins anew."""
        row = admission.row
        self._asked.pop(row, None)
        if asked := sum(feature.admit(admission) << i for i, feature in enumerate(self._features)):
            self._asked[row] = asked
        self._seeds[row] = admission.seed
        self._temperatures[row] = effective_temperature(admission.params)
        self._prompt_lengths[row] = admission.num_prompt_tokens

    def draws(self, request_rows: Indices, positions: Indices, token_ids: Tensor) -> Draws:
        """Draws for these request rows at these positions; `token_ids` are those of all request rows."""
        return Draws(
            request_rows,
            positions,
            self._seeds[request_rows],
            self._temperatures[request_rows],
            self._prompt_lengths[request_rows],
            token_ids,
        )

    def asks_nothing(self, request_rows: Sequence[int]) -> bool:
        """Whether draws of these requests are plain at any position."""
        return self._asked.keys().isdisjoint(request_rows)

    def is_plain(self, draws: Draws) -> bool:
        """Whether no draw asks for more than a temperature."""
        return next(self._active(draws), None) is None

    def sample(self, logits: Tensor, draws: Draws) -> SampledTokens:
        """Tokens for float32 logits [draws, vocab] in one piece, which are changed on the way."""
        active = list(self._active(draws))
        if not active:
            return SampledTokens(torch.stack(self._choose(logits, draws, draws.temperatures)))
        # Looked for before anything hides it: what is masked is a number again.
        broken = logits.sum(-1).isnan()
        temperatures = draws.temperatures.copy()
        failures: dict[int, str | Tensor] = {}
        for feature, which in active:
            failures |= feature.apply_(logits, draws, which) or {}
            if feature.divides:
                temperatures[which] = 1
        token_ids, flags = self._choose(logits, draws, temperatures)
        flags |= HAS_NAN * broken
        for row, failure in failures.items():
            if isinstance(failure, Tensor):
                flags[row] |= BAD_PROCESSOR * failure
        errors = {row: failure for row, failure in failures.items() if isinstance(failure, str)}
        return SampledTokens(torch.stack((token_ids, flags)), errors)

    def _active(self, draws: Draws) -> Iterator[tuple[Feature, Indices]]:
        """The features that change something, in their order, and in which draws."""
        asked = np.array([self._asked.get(row, 0) for row in draws.request_rows.tolist()], np.int64)
        by_anybody = int(np.bitwise_or.reduce(asked))
        for i, feature in enumerate(self._features if by_anybody else ()):
            if by_anybody >> i & 1:
                which = feature.active(draws, np.flatnonzero(asked >> i & 1))
                if len(which):
                    yield feature, which

    def _choose(self, logits: Tensor, draws: Draws, temperatures: npt.NDArray[np.float32]) -> tuple[Tensor, Tensor]:
        keys = noise_keys(draws.seeds, draws.positions)
        which = np.flatnonzero((draws.guesses >= 0) & (temperatures > 0)) if draws.guesses is not None else ()
        if len(which):
            keys[which] = noise_keys(draws.seeds[which] ^ REDRAWS, draws.positions[which])
            self._accept_by_chance_(logits, draws, np.asarray(which), temperatures)
        divisor, sent = self._upload(temperatures, keys)
        token_ids, flags = self._kernels.gumbel_argmax(logits, divisor, sent)
        return token_ids, flags.long()

    def _accept_by_chance_(
        self, logits: Tensor, draws: Draws, which: Indices, temperatures: npt.NDArray[np.float32]
    ) -> None:
        """The rule of speculative sampling for a guess that was certain: it is taken with its own probability, else a
        token is drawn from all others. Both leave each token the probability it has. Chance and noise are others than
        those that a draft model draws with."""
        assert draws.guesses is not None
        accepts = chances(draws.seeds[which] ^ ACCEPTS, draws.positions[which])
        row, guess, divisor, chance = self._upload(which, draws.guesses[which], temperatures[which, None], accepts)
        scores = logits[row].double() / divisor
        probability = scores.softmax(-1).gather(1, guess[:, None])[:, 0]
        is_taken = (chance < probability)[:, None]
        is_guess = torch.arange(logits.shape[1], device=logits.device) == guess[:, None]
        logits[row] = logits[row].masked_fill_(is_taken != is_guess, float("-inf"))
