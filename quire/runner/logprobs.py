"""Log-probabilities of tokens, from the logits as the model gave them: before masks, penalties and temperature.

Each row is computed by itself, so the numbers of a token are the same bits in any company. Only rows that
ask are scored, and a long prompt a few rows at a time: its logits are never all in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.step import Admission, PromptScores, ScheduledRequest, TokenScore

ROWS_AT_ONCE = 64
_NOT_ASKED = -1


@dataclass(frozen=True, slots=True)
class PromptRows:
    """The token rows of a step that predict prompt positions somebody wants scored."""

    request_id: str
    indices: slice
    """Among the step's token rows."""
    row: int
    start: int
    """The first position predicted; they follow each other."""
    num_top: int


class LogprobRows:
    """What each permanent row wants scored."""

    def __init__(self, max_num_seqs: int) -> None:
        self._num_top = np.full(max_num_seqs, _NOT_ASKED)
        self._prompts: dict[int, Admission] = {}
        """By row, for those whose prompt is not wholly scored."""

    def admit(self, admission: Admission) -> None:
        wanted = admission.params.logprobs
        self._num_top[admission.row] = _NOT_ASKED if wanted is None else wanted
        self._prompts.pop(admission.row, None)
        if admission.score_prompt_from is not None:
            self._prompts[admission.row] = admission

    @property
    def scores_prompts(self) -> bool:
        """Whether some row's prompt is not wholly scored."""
        return bool(self._prompts)

    def asking(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Which of these rows want the tokens they sample scored, as indices into `rows`."""
        return np.flatnonzero(self._num_top[rows] > _NOT_ASKED)

    def num_top(self, rows: npt.NDArray[np.int64]) -> list[int]:
        """How many of the most likely tokens each of these rows wants besides."""
        wanted: list[int] = self._num_top[rows].tolist()
        return wanted

    def prompt_rows(self, scheduled: Sequence[ScheduledRequest]) -> Iterator[PromptRows]:
        """The parts of a step that score prompts; rows whose prompt ends here are done with that."""
        if not self._prompts:
            return
        offset = 0
        for entry in scheduled:
            admission = self._prompts.get(entry.row)
            if admission is not None:
                assert admission.score_prompt_from is not None
                assert admission.params.prompt_logprobs is not None
                end = entry.start + entry.num_tokens
                # The token at position p - 1 predicts the one at p; the prompt's last one predicts the answer.
                first = max(entry.start, admission.score_prompt_from - 1)
                last = min(end, admission.num_prompt_tokens - 1)
                if first < last:
                    indices = slice(offset + first - entry.start, offset + last - entry.start)
                    num_top = admission.params.prompt_logprobs
                    yield PromptRows(entry.request_id, indices, entry.row, first + 1, num_top)
                if end >= admission.num_prompt_tokens - 1:
                    del self._prompts[entry.row]
            offset += entry.num_tokens


def score_prompt(
    part: PromptRows, hidden: Tensor, head: Callable[[Tensor], Tensor], token_ids: Tensor
) -> PromptScores | None:
    """The scores of one request's prompt positions, or None if the model's scores are not numbers.

    `hidden` are the step's token rows, `token_ids` [rows, length] the permanent rows' tokens.
    """
    scores: list[TokenScore] = []
    rows = hidden[part.indices]
    for begin in range(0, len(rows), ROWS_AT_ONCE):
        logits = head(rows[begin : begin + ROWS_AT_ONCE])
        if bool(logits.sum().isnan()):
            return None
        position = part.start + begin
        targets = token_ids[part.row, position : position + len(logits)]
        scores += score_tokens(logits, targets, [part.num_top] * len(logits))
    return PromptScores(part.start, tuple(scores))


def score_tokens(logits: Tensor, token_ids: Tensor, num_top: Sequence[int]) -> list[TokenScore]:
    """Scores int64 token_ids [rows] under float32 logits [rows, vocab], with the most likely tokens of each row,
    as many as it wants (or as there are)."""
    scores: list[TokenScore] = []
    for begin in range(0, len(logits), ROWS_AT_ONCE):
        part = slice(begin, begin + ROWS_AT_ONCE)
        scores += _score_some(logits[part], token_ids[part], num_top[part])
    return scores


def _score_some(logits: Tensor, token_ids: Tensor, num_top: Sequence[int]) -> list[TokenScore]:
    logprobs = logits.log_softmax(-1)
    chosen = token_ids.unsqueeze(1)
    top: list[list[tuple[int, float]]] = [[]] * len(logits)
    if max(num_top) > 0:
        top_ids = _most_likely(logits, min(max(num_top), logits.shape[1]))
        top_logprobs = logprobs.gather(1, top_ids)
        top = [list(zip(*pair, strict=True)) for pair in zip(top_ids.tolist(), top_logprobs.tolist(), strict=True)]
    return [
        TokenScore(token_id, logprob, rank, tuple(likely[:wanted]))
        for token_id, logprob, rank, likely, wanted in zip(
            token_ids.tolist(),
            logprobs.gather(1, chosen).squeeze(1).tolist(),
            _ranks(logits, chosen).tolist(),
            top,
            num_top,
            strict=True,
        )
    ]


def _most_likely(logits: Tensor, count: int) -> Tensor:
    """The ids of each row's highest logits, the highest first and the lower id first among equals.

    `topk` finds the values; which of several equal ones it picks is its own affair and is put right here.
    """
    vocab_size = logits.shape[1]
    values, ids = logits.topk(min(count + 1, vocab_size))
    ids = ids[:, :count]
    if count < vocab_size:
        tied = (values[:, count - 1] == values[:, count]).nonzero().squeeze(1)
        if len(tied):
            least = values[tied, count - 1].unsqueeze(1)
            rows = logits[tied]
            # Everything above the least value, then its equals by their ids (exact in float32 below 2**24).
            numbers = torch.arange(vocab_size, dtype=torch.float32, device=logits.device)
            order = torch.where(rows == least, -numbers, torch.where(rows > least, 1.0, float("-inf")))
            ids[tied] = order.topk(count).indices
    ids = ids.sort(-1).values
    by_value = logits.gather(1, ids).sort(dim=-1, descending=True, stable=True).indices
    return ids.gather(1, by_value)


def _ranks(logits: Tensor, chosen: Tensor) -> Tensor:
    """1 + how many tokens come before the chosen ones [rows, 1]: likelier ones, and equal ones of a lower id."""
    value = logits.gather(1, chosen)
    # Counted in float32, which is several times as fast as in integers here and exact below 2**24.
    flags = torch.empty_like(logits)
    ranks = torch.gt(logits, value, out=flags).sum(-1).long() + 1
    tied = (torch.eq(logits, value, out=flags).sum(-1) > 1).nonzero().squeeze(1)
    if len(tied):
        lower = torch.arange(logits.shape[1], device=logits.device) < chosen[tied]
        ranks[tied] += (flags[tied].bool() & lower).sum(-1)
    return ranks
