"""Masks: tokens that must not be sampled get a logit of minus infinity."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.sampling.feature import Feature
from quire.sampling.metadata import Indices, SamplingMetadata
from quire.step import AdmittedRequest

_NEVER = float("-inf")


class GrammarMask(Feature):
    """Allows only what the grammar of `structured` allows; `metadata.masks` has the bits."""

    switches = ("structured",)

    def apply_(self, logits: Tensor, metadata: SamplingMetadata, which: Indices) -> None:
        assert metadata.masks is not None
        are_all = len(which) == len(metadata)
        (index,) = self.upload(which)
        chosen = metadata.masks if are_all else metadata.masks[index]
        # Bits to bools, eight at a time: each byte of the mask is looked up as the int64 whose
        # bytes are its bits.
        allowed = self._bits_of_bytes[chosen.contiguous().view(torch.uint8).int()].view(torch.bool)
        allowed = allowed[:, : logits.shape[1]]
        if are_all:
            logits.masked_fill_(~allowed, _NEVER)
        else:
            logits[index] = logits[index].masked_fill_(~allowed, _NEVER)

    @cached_property
    def _bits_of_bytes(self) -> Tensor:
        """int64 [256]: byte i of entry b is bit i of b."""
        bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
        return self.upload(bits.copy().view(np.int64)[:, 0])[0]


class AllowedTokens(Feature):
    """Allows only `allowed_token_ids`."""

    switches = ("allowed_token_ids",)

    def prepare(self, admission: AdmittedRequest) -> Tensor:
        return self.upload(np.array(admission.params.allowed_token_ids, np.int64))[0]

    def apply_(self, logits: Tensor, metadata: SamplingMetadata, which: Indices) -> None:
        where = self.flat_places(which, self.prepared_of(metadata, which))
        kept = logits.view(-1)[where]
        logits.index_fill_(0, self.upload(which)[0], _NEVER)
        logits.view(-1)[where] = kept


class BannedTokens(Feature):
    """Forbids end tokens before `min_tokens`, and bad words of one token."""

    switches = ("min_tokens",)
    settings = ("ignore_eos", "stop_token_ids")

    def is_asked(self, admission: AdmittedRequest) -> bool:
        return super().is_asked(admission) or any(
            len(word) == 1 for word in admission.resolved.bad_word_ids
        )

    def prepare(self, admission: AdmittedRequest) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The request's end tokens, and the tokens that are always forbidden."""
        ends = admission.params.end_token_ids(admission.eos_token_ids)
        words = (word[0] for word in admission.resolved.bad_word_ids if len(word) == 1)
        # An end token may be outside the model's vocabulary: some tokenizers have more tokens than
        # the model.
        return tuple(one for one in ends if one < self.vocab_size), tuple(words)

    def active(self, metadata: SamplingMetadata, which: Indices) -> Indices:
        has_words = np.array([bool(always) for _, always in self.prepared_of(metadata, which)])
        return which[has_words | self._is_too_short(metadata, which)]

    def apply_(self, logits: Tensor, metadata: SamplingMetadata, which: Indices) -> None:
        at: list[int] = []
        ids: list[int] = []
        too_short = self._is_too_short(metadata, which).tolist()
        rows = zip(which.tolist(), self.prepared_of(metadata, which), too_short, strict=True)
        for row, (ends, always), is_short in rows:
            own = (*ends, *always) if is_short else always
            at.extend([row] * len(own))
            ids.extend(own)
        if ids:
            (where,) = self.upload(np.array(at) * self.vocab_size + np.array(ids))
            logits.view(-1).index_fill_(0, where, _NEVER)

    def _is_too_short(self, metadata: SamplingMetadata, which: Indices) -> npt.NDArray[np.bool_]:
        lengths = metadata.positions[which] - metadata.prompt_lengths[which]
        is_short: npt.NDArray[np.bool_] = lengths < self.of("min_tokens", metadata, which)
        return is_short if metadata.only_ends is None else is_short & ~metadata.only_ends[which]


class BadWords(Feature):
    """Forbids the last token of a bad word where the answer ends with the word's other tokens."""

    switches = ("bad_words",)

    def is_asked(self, admission: AdmittedRequest) -> bool:
        return any(len(word) > 1 for word in admission.resolved.bad_word_ids)

    def prepare(self, admission: AdmittedRequest) -> tuple[Tensor, Tensor]:
        """int64 [words, longest]: words without their last token, padded with -1 on the left;
        [words]: last tokens.
        """
        words = [word for word in admission.resolved.bad_word_ids if len(word) > 1]
        longest = max(map(len, words)) - 1
        starts = [(-1,) * (longest + 1 - len(word)) + word[:-1] for word in words]
        first, last = self.upload(
            np.array(starts, np.int64), np.array([word[-1] for word in words], np.int64)
        )
        return first, last

    def apply_(self, logits: Tensor, metadata: SamplingMetadata, which: Indices) -> None:
        starts, ends = zip(*self.prepared_of(metadata, which), strict=True)
        owner = which.repeat([len(one) for one in ends])
        longest = max(start.shape[1] for start in starts)
        pad = torch.nn.functional.pad
        wanted = torch.cat(
            [pad(start, (longest - start.shape[1], 0), value=-1) for start in starts]
        )
        # The last `longest` tokens of the answer; -2, which is in no word, where the answer is
        # shorter.
        position, answer_length, row, first = self.upload(
            metadata.positions[owner, None],
            (metadata.positions - metadata.prompt_lengths)[owner, None],
            metadata.request_rows[owner, None],
            owner * self.vocab_size,
        )
        back = torch.arange(longest, 0, -1, device=logits.device)
        tail = metadata.token_ids[row, (position - back).clamp_min_(0)]
        tail.masked_fill_(answer_length < back, -2)
        matches = ((wanted == tail) | (wanted == -1)).all(1)
        _ban_where_(logits, first + torch.cat(ends), matches)


class NoRepeatNgram(Feature):
    """Forbids a token that would complete an n-gram which is in the history already."""

    switches = ("no_repeat_ngram_size",)

    def active(self, metadata: SamplingMetadata, which: Indices) -> Indices:
        # An n-gram can't have occurred before there were n tokens.
        return which[metadata.positions[which] >= self.of("no_repeat_ngram_size", metadata, which)]

    def apply_(self, logits: Tensor, metadata: SamplingMetadata, which: Indices) -> None:
        sizes, lengths = self.of("no_repeat_ngram_size", metadata, which), metadata.positions[which]
        row, size, length, first = self.upload(
            metadata.request_rows[which], sizes[:, None], lengths, which[:, None]
        )
        history = metadata.histories(row, int(lengths.max()))
        # For each token of the history, how many before it equal the history's last ones: n - 1
        # forbid this token.
        before = torch.zeros_like(history, dtype=torch.int32)
        before[:, 1:] = self.kernels.match_lengths(history, length, None, int(sizes.max()) - 1)[
            :, :-1
        ]
        inside = torch.arange(history.shape[1], device=history.device) < length.unsqueeze(1)
        _ban_where_(logits, first * self.vocab_size + history, (before >= size - 1) & inside)


def _ban_where_(logits: Tensor, where: Tensor, matches: Tensor) -> None:
    """Sets the logits at the indices `where` to minus infinity if they match. By a minimum, so that
    the number of matches need not be known on the host and the order of writing does not matter.
    """
    lowest = torch.full(matches.shape, float("inf"), dtype=logits.dtype, device=logits.device)
    lowest.masked_fill_(matches, _NEVER)
    logits.view(-1).scatter_reduce_(0, where.flatten(), lowest.flatten(), "amin")
