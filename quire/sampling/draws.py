"""What a step draws: tokens at positions of request rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from quire.sampling_params import SamplingParams

Indices = npt.NDArray[np.int64]

GREEDY_BELOW = 1e-5
"""Temperatures under this are 0: what they would change is below the logits' own precision."""


def effective_temperature(params: SamplingParams) -> float:
    return params.temperature if params.temperature >= GREEDY_BELOW else 0.0


@dataclass(frozen=True)
class Draws:
    """The tokens to draw, one entry each, a row of logits belonging to it. A request row may stand here several times,
    at several positions."""

    request_rows: Indices
    positions: Indices
    """Where in its sequence each drawn token will stand: the number of tokens before it."""
    seeds: npt.NDArray[np.uint64]
    temperatures: npt.NDArray[np.float32]
    prompt_lengths: Indices
    token_ids: Tensor
    """int64 [request rows, longest]: everybody's tokens. The history of a draw is what is before its position."""
    masks: Tensor | None = None
    """int32 [draws, words of 32 bits]: tokens that grammars allow, lowest bit first. They count for the requests that
    asked for structured output."""
    only_ends: npt.NDArray[np.bool_] | None = None
    """bool [draws]: its grammar leaves nothing but an end, which may come however short the answer is."""

    guesses: Indices | None = None
    """int64 [draws]: with acceptance by rejection, the token that was guessed there; -1 where none was."""

    def __len__(self) -> int:
        return len(self.request_rows)

    def histories(self, request_rows: Tensor, longest: int) -> Tensor:
        """The tokens of some request rows, [rows, longest]; what is past a history's end is anything."""
        return self.token_ids[:, :longest].index_select(0, request_rows)
