"""Log-probabilities of tokens, from the logits as the model gave them: before masks, penalties and temperature.

Each row is computed by itself, so a token's logprob has the same bits in any batch. Only rows that ask for it are
scored, and a long prompt a few rows at a time, so that its logits are never all in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.kernels.ops import Kernels
from quire.sampling.draws import Draws
from quire.sampling.upload import Uploader
from quire.step import Admission, ScheduledRequest, TokenScore

ROWS_AT_ONCE = 64


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


class Logprobs:
    """Which request rows want logprobs of the tokens they sample, and which of their prompt."""

    fields = ("logprobs", "prompt_logprobs")
    """Of SamplingParams."""

    def __init__(self, device: torch.device) -> None:
        self._num_top: dict[int, int] = {}
        """By request row that wants logprobs of its answer: how many of the most likely tokens."""
        self._uploader = Uploader(device)
        self._prompts: dict[int, Admission] = {}
        """By request row that wants logprobs of its prompt, until all of it is scored."""

    def admit(self, admission: Admission) -> None:
        self._num_top.pop(admission.row, None)
        self._prompts.pop(admission.row, None)
        if admission.params.logprobs is not None:
            self._num_top[admission.row] = admission.params.logprobs
        if admission.score_prompt_from is not None:
            self._prompts[admission.row] = admission

    @property
    def scores_prompts(self) -> bool:
        """Whether some prompt is still to be scored."""
        return bool(self._prompts)

    def are_wanted(self, request_rows: Sequence[int]) -> bool:
        """Whether one of these rows wants logprobs of the tokens it samples."""
        return not self._num_top.keys().isdisjoint(request_rows)

    def keep(self, logits: Tensor, draws: Draws) -> ScoredDraws | None:
        """Keeps the logits of the draws that want logprobs, before sampling changes them; None if there are none."""
        rows = draws.request_rows.tolist()
        which = [index for index, row in enumerate(rows) if row in self._num_top]
        if not which:
            return None
        (index,) = self._uploader.upload(np.array(which))
        return ScoredDraws(which, [self._num_top[rows[one]] for one in which], index, logits[index])

    def prompt_parts(self, scheduled: Sequence[ScheduledRequest]) -> Iterator[PromptPart]:
        """The step's tokens that score prompts, by request; a request whose prompt ends in this step is done then."""
        if not self._prompts:
            return
        offset = 0
        for entry in scheduled:
            admission = self._prompts.get(entry.row)
            if admission is not None:
                assert admission.score_prompt_from is not None
                assert admission.params.prompt_logprobs is not None
                end = entry.start + entry.num_tokens
                # The token at position p - 1 predicts the one at p; the prompt's last token predicts the answer.
                first = max(entry.start, admission.score_prompt_from - 1)
                last = min(end, admission.num_prompt_tokens - 1)
                if first < last:
                    indices = slice(offset + first - entry.start, offset + last - entry.start)
                    num_top = admission.params.prompt_logprobs
                    yield PromptPart(entry.request_id, indices, entry.row, first + 1, num_top)
                if end >= admission.num_prompt_tokens - 1:
                    del self._prompts[entry.row]
            offset += entry.num_tokens


class ScoreTensors(NamedTuple):
    """The scores of some tokens as tensors: on the device, or copies on the host."""

    token_ids: Tensor
    """int64 [rows]."""
    logprobs: Tensor
    """float32 [rows]; NaN where the model's scores are not numbers."""
    ranks: Tensor
    """int64 [rows]."""
    top_ids: Tensor
    """int64 [rows, most]: as many as the row that wants most."""
    top_logprobs: Tensor
    """float32 [rows, most]."""


@dataclass(frozen=True, slots=True)
class ScoredDraws:
    """The draws that want logprobs, with a copy of the model's logits, which sampling changes."""

    which: list[int]
    """Indices of these draws among all of the step's."""
    num_top: list[int]
    index: Tensor
    """`which`, on the device."""
    logits: Tensor

    def score(self, token_ids: Tensor, kernels: Kernels) -> ScoreTensors:
        """The logprobs of these draws' tokens; `token_ids` are those of all draws."""
        return score_on_device(self.logits, token_ids[self.index], self.num_top, kernels)


def score_on_device(logits: Tensor, token_ids: Tensor, num_top: Sequence[int], kernels: Kernels) -> ScoreTensors:
    """Scores int64 token_ids [rows] under float32 logits [rows, vocab], with the most likely tokens of each row,
    as many as it wants (or as there are). Waits for nothing on a GPU with kernels of its own."""
    most = min(max(num_top), logits.shape[1])
    parts: list[tuple[Tensor, ...]] = []
    for begin in range(0, len(logits), ROWS_AT_ONCE):
        part = slice(begin, begin + ROWS_AT_ONCE)
        parts.append((token_ids[part], *kernels.score_tokens(logits[part], token_ids[part], most)))
    return _joined(parts)


def score_prompt_on_device(
    part: PromptPart, hidden: Tensor, head: Callable[[Tensor], Tensor], token_ids: Tensor, kernels: Kernels
) -> ScoreTensors:
    """The scores of one request's prompt positions.

    `hidden` are the step's token rows, `token_ids` [request rows, length] everybody's tokens; `head` gives logits, in
    any dtype.
    """
    rows = hidden[part.indices]
    parts: list[ScoreTensors] = []
    for begin in range(0, len(rows), ROWS_AT_ONCE):
        logits = head(rows[begin : begin + ROWS_AT_ONCE]).float()
        position = part.start + begin
        targets = token_ids[part.request_row, position : position + len(logits)]
        parts.append(score_on_device(logits, targets, [part.num_top], kernels))
    return _joined(parts)


def read_scores(scores: ScoreTensors, num_top: Sequence[int]) -> list[TokenScore]:
    """The scores as Python values, from tensors on the host; of each row the `num_top` most likely tokens."""
    token_ids, logprobs, ranks, top_ids, top_logprobs = (tensor.tolist() for tensor in scores)
    return [
        TokenScore(token_id, logprob, rank, tuple(zip(ids[:wanted], likely[:wanted], strict=True)))
        for token_id, logprob, rank, ids, likely, wanted in zip(
            token_ids, logprobs, ranks, top_ids, top_logprobs, num_top, strict=True
        )
    ]


def _joined(parts: Sequence[Sequence[Tensor]]) -> ScoreTensors:
    """Copies even a single part: `token_ids` may be a view of request rows, which change before it is read."""
    return ScoreTensors(*(torch.cat(column) for column in zip(*parts, strict=True)))
