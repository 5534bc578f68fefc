"""Log-probabilities of tokens, from the logits as the model gave them: before masks, penalties and
temperature.

Each row is computed by itself, so a token's logprob has the same bits in any batch. Only rows that
ask for it are scored, and a long prompt a few rows at a time, so that its logits are never all in
memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.kernels.ops import Kernels
from quire.sampling.metadata import SamplingMetadata
from quire.sampling.upload import Uploader
from quire.step import AdmittedRequest, ScheduledRequest, TokenLogprob

ROWS_AT_ONCE = 64
_NUM_LOGPROBS = 5
"""Tensors that `logprobs_of_rows` returns."""


@dataclass(frozen=True, slots=True)
class PromptPart:
    """Consecutive tokens of a step, of one request's prompt, whose next positions are to be scored."""

    request_id: str
    indices: slice
    """Which of the step's tokens."""
    request_row: int
    start: int
    """The first position that is scored: the one after the first of these tokens."""
    num_top: int

    def score(
        self, hidden: Tensor, head: Callable[[Tensor], Tensor], token_ids: Tensor, kernels: Kernels
    ) -> list[Tensor]:
        """The logprobs of these positions, as `logprobs_of_rows` returns them. `hidden` are the
        states of the step's tokens, `head` makes logits of them, `token_ids` [request rows,
        length] are all requests' tokens.
        """
        rows = hidden[self.indices]
        targets = token_ids[self.request_row, self.start : self.start + len(rows)]
        return logprobs_of_rows(rows, head, targets, self.num_top, kernels)


class Logprobs:
    """Which request rows want logprobs of the tokens they sample, and which of their prompt."""

    def __init__(self, device: torch.device) -> None:
        self._num_top: dict[int, int] = {}
        """By request row that wants logprobs of its answer: how many of the most likely tokens."""
        self._named: dict[int, tuple[int, ...]] = {}
        """By request row that asks for tokens by id: which."""
        self._uploader = Uploader(device)
        self._prompts: dict[int, AdmittedRequest] = {}
        """By request row that wants logprobs of its prompt, until all of it is scored."""

    def admit(self, admission: AdmittedRequest) -> None:
        self._num_top.pop(admission.row, None)
        self._named.pop(admission.row, None)
        self._prompts.pop(admission.row, None)
        if admission.params.logprobs is not None:
            self._num_top[admission.row] = admission.params.logprobs
            if admission.params.logprob_token_ids:
                self._named[admission.row] = admission.params.logprob_token_ids
        if admission.score_prompt_from is not None:
            self._prompts[admission.row] = admission

    @property
    def scores_prompts(self) -> bool:
        """Whether some prompt is still to be scored."""
        return bool(self._prompts)

    def are_wanted(self, request_rows: Sequence[int]) -> bool:
        """Whether one of these rows wants logprobs of the tokens it samples."""
        return not self._num_top.keys().isdisjoint(request_rows)

    def keep(self, logits: Tensor, metadata: SamplingMetadata) -> LogprobsMetadata | None:
        """Keeps the logits of the samples that want logprobs, before sampling changes them; None if
        there are none.
        """
        rows = metadata.request_rows.tolist()
        which = [index for index, row in enumerate(rows) if row in self._num_top]
        if not which:
            return None
        num_top = [self._num_top[rows[one]] for one in which]
        if self._named.keys().isdisjoint(rows):
            (index,) = self._uploader.upload(np.array(which))
            return LogprobsMetadata(which, num_top, index, logits[index])
        named = [self._named.get(rows[one], ()) for one in which]
        places = np.repeat(np.arange(len(which)), [len(ids) for ids in named])
        index, named_rows, named_ids = self._uploader.upload(
            np.array(which), places, np.array([one for ids in named for one in ids])
        )
        return LogprobsMetadata(which, num_top, index, logits[index], named, named_rows, named_ids)

    def prompt_parts(self, scheduled: Sequence[ScheduledRequest]) -> Iterator[PromptPart]:
        """The step's tokens that score prompts, by request; a request whose prompt ends in this
        step is done then.
        """
        if not self._prompts:
            return
        offset = 0
        for entry in scheduled:
            admission = self._prompts.get(entry.row)
            if admission is not None:
                assert admission.score_prompt_from is not None
                assert admission.params.prompt_logprobs is not None
                end = entry.start + entry.num_tokens
                # The token at position p - 1 predicts the one at p; the prompt's last token
                # predicts the answer.
                first = max(entry.start, admission.score_prompt_from - 1)
                last = min(end, admission.num_prompt_tokens - 1)
                if first < last:
                    indices = slice(offset + first - entry.start, offset + last - entry.start)
                    yield PromptPart(
                        entry.request_id,
                        indices,
                        entry.row,
                        first + 1,
                        admission.params.prompt_logprobs,
                    )
                if end >= admission.num_prompt_tokens - 1:
                    del self._prompts[entry.row]
            offset += entry.num_tokens


@dataclass(frozen=True, slots=True)
class LogprobsMetadata:
    """The samples that want logprobs, with a copy of the model's logits, which sampling changes."""

    which: list[int]
    """Indices of these samples among all of the step's."""
    num_top: list[int]
    index: Tensor
    """`which`, on the device."""
    logits: Tensor
    named: Sequence[tuple[int, ...]] = ()
    """The tokens that each of these samples asks for by id."""
    named_rows: Tensor | None = None
    named_ids: Tensor | None = None
    """All of them, and which rows of `logits` they are about, on the device."""

    def score(self, token_ids: Tensor, kernels: Kernels) -> list[Tensor]:
        """The logprobs of these samples' tokens, as `logprobs_of_rows` returns them; `token_ids`
        are those of all samples. If there are tokens that are asked for by id, then the logprobs
        and ranks of those.
        """
        tensors = logprobs_of_rows(
            self.logits, lambda logits: logits, token_ids[self.index], max(self.num_top), kernels
        )
        if self.named_rows is not None and self.named_ids is not None:
            rows, ids = self.named_rows, self.named_ids
            _, logprobs, ranks, *_ = logprobs_of_rows(
                rows, lambda some: self.logits[some], ids, 0, kernels
            )
            tensors += [logprobs, ranks]
        return tensors

    def read(self, tensors: Sequence[Tensor]) -> list[TokenLogprob]:
        """What `score` returned, copied to the host."""
        found = read_logprobs(tensors[:_NUM_LOGPROBS], self.num_top)
        if len(tensors) == _NUM_LOGPROBS:
            return found
        logprobs, ranks = (iter(tensor.tolist()) for tensor in tensors[_NUM_LOGPROBS:])
        return [
            score._replace(named=tuple((one, next(logprobs), next(ranks)) for one in ids))
            for score, ids in zip(found, self.named, strict=True)
        ]


def logprobs_of_rows(
    rows: Tensor,
    head: Callable[[Tensor], Tensor],
    token_ids: Tensor,
    num_top: int,
    kernels: Kernels,
) -> list[Tensor]:
    """Gathers the logprobs of int64 token_ids [rows] by the logits `head(rows)`, some rows at a
    time, with each row's `num_top` most likely tokens (or as many as there are). Returns copies of
    the ids, then the fields of `LogprobsTensors`.
    """
    parts: list[tuple[Tensor, ...]] = []
    for begin in range(0, len(rows), ROWS_AT_ONCE):
        own = token_ids[begin : begin + ROWS_AT_ONCE]
        logits = head(rows[begin : begin + ROWS_AT_ONCE]).float()
        parts.append((own, *kernels.gather_logprobs(logits, own, min(num_top, logits.shape[1]))))
    return [torch.cat(column) for column in zip(*parts, strict=True)]


def read_logprobs(tensors: Sequence[Tensor], num_top: Sequence[int]) -> list[TokenLogprob]:
    """What `logprobs_of_rows` returned, copied to the host, as Python values; row i has `num_top[i]` most
    likely tokens.
    """
    rows = zip(*(tensor.tolist() for tensor in tensors), num_top, strict=True)
    return [
        TokenLogprob(
            token_id, logprob, rank, tuple(zip(ids[:wanted], likely[:wanted], strict=True))
        )
        for token_id, logprob, rank, ids, likely, wanted in rows
    ]
