"""Biases and penalties: changes to the logits of a few tokens, those a request names or has used
before.

Only these tokens' logits are touched, not the whole vocabulary. A token that occurs several times
in a history is written several times with the same value, computed from its logit before, so the
order of writing does not matter.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.sampling.feature import Feature
from quire.sampling.metadata import Indices, SamplingMetadata
from quire.step import AdmittedRequest

DRY_LONGEST = 64
"""A repetition is measured up to this many tokens beyond the allowed length."""
_MOST = 1e30  # the largest penalty, so that it stays finite


class LogitBias(Feature):
    """Adds `logit_bias`."""

    switches = ("logit_bias",)

    def prepare(self, admission: AdmittedRequest) -> tuple[Tensor, Tensor]:
        biases = dict(admission.params.logit_bias or ())
        ids, values = self.upload(
            np.array(list(biases), np.int64), np.array(list(biases.values()), np.float32)
        )
        return ids, values

    def apply_(self, logits: Tensor, metadata: SamplingMetadata, which: Indices) -> None:
        ids, biases = zip(*self.prepared_of(metadata, which), strict=True)
        logits.view(-1)[self.flat_places(which, list(ids))] += torch.cat(biases)


class _HistoryPenalty(Feature):
    def flat_tokens(
        self, logits: Tensor, metadata: SamplingMetadata, which: Indices, start: Indices
    ) -> tuple[Tensor, Tensor]:
        """Indices into the flattened logits of each history's tokens from `start` on, [samples,
        longest], and which of them are inside the history: shorter histories are filled up with
        their first token.
        """
        lengths = metadata.positions[which] - start
        row, begin, length, first = self.upload(
            metadata.request_rows[which, None],
            start[:, None],
            lengths[:, None],
            which[:, None] * self.vocab_size,
        )
        column = torch.arange(int(lengths.max()), device=logits.device)
        inside = column < length
        return metadata.token_ids[row, begin + column * inside] + first, inside


class RepetitionPenalty(_HistoryPenalty):
    """`repetition_penalty`, over prompt and answer."""

    switches = ("repetition_penalty",)

    def apply_(self, logits: Tensor, metadata: SamplingMetadata, which: Indices) -> None:
        where, _ = self.flat_tokens(logits, metadata, which, np.zeros_like(which))
        (penalty,) = self.upload(self.of("repetition_penalty", metadata, which)[:, None])
        before = logits.view(-1)[where]
        logits.view(-1)[where] = torch.where(before > 0, before / penalty, before * penalty)


class AnswerPenalties(_HistoryPenalty):
    """`frequency_penalty` and `presence_penalty`, over the answer."""

    switches = ("frequency_penalty", "presence_penalty")

    def active(self, metadata: SamplingMetadata, which: Indices) -> Indices:
        return which[metadata.positions[which] > metadata.prompt_lengths[which]]

    def apply_(self, logits: Tensor, metadata: SamplingMetadata, which: Indices) -> None:
        where, inside = self.flat_tokens(logits, metadata, which, metadata.prompt_lengths[which])
        by_count = self.of("frequency_penalty", metadata, which)
        frequency, presence = self.upload(
            by_count[:, None], self.of("presence_penalty", metadata, which)[:, None]
        )
        before = logits.view(-1)[where]
        counts = torch.ones_like(before)
        if (by_count != 0).any():
            # How often each token occurs in its history: counted in a table of the logits' size.
            table = torch.zeros(logits.numel(), dtype=torch.int32, device=logits.device)
            table.scatter_add_(0, where.flatten(), inside.flatten().int())
            counts = table[where].float()
        logits.view(-1)[where] = before - frequency * counts - presence


class Dry(Feature):
    """DRY: penalises a token that would make a repetition longer, by the repetition's length so
    far.

    Position i of the history repeats n tokens if the n tokens up to i equal the last n of the
    history; the token after i would make that n + 1. For each token the longest such n counts.
    """

    switches = ("dry_multiplier",)
    settings = ("dry_base", "dry_allowed_length", "dry_sequence_breakers")

    def prepare(self, admission: AdmittedRequest) -> Tensor:
        """bool [vocab]: tokens at which a repetition ends. Requests with the same breakers share
        the table.
        """
        return _breaker_table(admission.resolved.dry_breaker_ids, self.vocab_size, self.upload)

    def active(self, metadata: SamplingMetadata, which: Indices) -> Indices:
        return which[metadata.positions[which] > self.of("dry_allowed_length", metadata, which)]

    def apply_(self, logits: Tensor, metadata: SamplingMetadata, which: Indices) -> None:
        lengths, limits = metadata.positions[which], self.of("dry_allowed_length", metadata, which)
        breakers = self.prepared_of(metadata, which)
        distinct = {id(table): table for table in breakers}
        number = {key: i for i, key in enumerate(distinct)}
        row, length, allowed, own, first, table, penalties = self.upload(
            metadata.request_rows[which],
            lengths,
            limits[:, None],
            np.arange(len(which))[:, None] * self.vocab_size,
            which[:, None] * self.vocab_size,
            np.array([[number[id(one)]] for one in breakers]),
            self._penalties(metadata, which),
        )
        history = metadata.histories(row, int(lengths.max()))
        breaks = torch.stack(list(distinct.values()))[table, history]
        longest = int(limits.max()) + DRY_LONGEST
        repeated = self.kernels.match_lengths(history, length, breaks, longest)[:, :-1].flatten()
        following = history[:, 1:]
        # For each position: the repetition's length, the index of the token after it in `by_token`
        # and in the logits, whether that token is a breaker, and the sample.
        by_place = [
            repeated,
            (own + following).flatten(),
            (first + following).flatten(),
            breaks[:, 1:].flatten(),
        ]
        by_place.append(
            torch.arange(len(which), device=logits.device)
            .unsqueeze(1)
            .expand_as(following)
            .flatten()
        )
        # keep only the positions that matter; on a GPU this would wait for the device
        if logits.device.type == "cpu":
            some = (repeated >= int(limits.min())).nonzero()[:, 0]
            by_place = [values[some] for values in by_place]
        repeated, cell, where, is_break, at = by_place
        # For each token the longest repetition before it. Positions after a history's end have
        # length 0.
        by_token = torch.zeros(
            len(which) * self.vocab_size, dtype=torch.int32, device=logits.device
        )
        by_token.scatter_reduce_(0, cell, repeated, "amax")
        excess = by_token[cell] - allowed[at, 0]
        penalty = penalties[at, excess.clamp(0, DRY_LONGEST)]
        penalty.masked_fill_((excess < 0) | is_break, 0.0)
        logits.view(-1)[where] = logits.view(-1)[where] - penalty

    def _penalties(self, metadata: SamplingMetadata, which: Indices) -> npt.NDArray[np.float32]:
        """[samples, excess]: multiplier * base**excess, by repeated multiplication, as pow differs
        between libraries.
        """
        factors = np.repeat(
            self.of("dry_base", metadata, which)[:, None].astype(np.float64),
            DRY_LONGEST + 1,
            axis=1,
        )
        factors[:, 0] = self.of("dry_multiplier", metadata, which)
        penalties: npt.NDArray[np.float32] = np.minimum(factors.cumprod(axis=1), _MOST).astype(
            np.float32
        )
        return penalties


@lru_cache(maxsize=32)
def _breaker_table(
    ids: tuple[int, ...], vocab_size: int, upload: Callable[..., list[Tensor]]
) -> Tensor:
    table = np.zeros(vocab_size, dtype=np.bool_)
    table[[token_id for token_id in ids if token_id < vocab_size]] = True
    return upload(table)[0]
