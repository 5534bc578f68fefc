"""The samples of a step: which tokens are sampled, for which request rows and at which
positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from quire.sampling_params import SamplingParams

Indices = npt.NDArray[np.int64]

GREEDY_BELOW = 1e-5
"""Temperatures under this count as 0 (greedy): the difference is below the precision of the logits."""


def effective_temperature(params: SamplingParams) -> float:
    """0 where it is so small that only the likeliest token has a chance: then nothing is drawn."""
    return params.temperature if params.temperature >= GREEDY_BELOW else 0.0


@dataclass(frozen=True)
class SamplingMetadata:
    """The tokens to sample, one for each row of logits. Where draft tokens are checked, a request
    row has several.
    """

    request_rows: Indices
    positions: Indices
    """The position that each sampled token will have in its sequence: the number of tokens before
    it.
    """
    seeds: npt.NDArray[np.uint64]
    temperatures: npt.NDArray[np.float32]
    prompt_lengths: Indices
    token_ids: Tensor
    """int64 [request rows, longest]: the tokens of all requests. A sample's history is its row up
    to its position.
    """
    masks: Tensor | None = None
    """int32 [samples, words of 32 bits]: the tokens that grammars allow, lowest bit first, for
    structured output.
    """
    only_ends: npt.NDArray[np.bool_] | None = None
    """bool [samples]: the grammar allows only an end token, which then overrides `min_tokens`."""
    draft_tokens: Indices | None = None
    """int64 [samples], with acceptance by rejection: the token drafted at this position; -1 where
    none was.
    """

    def __len__(self) -> int:
        return len(self.request_rows)

    def histories(self, request_rows: Tensor, longest: int) -> Tensor:
        """The first `longest` tokens of some request rows, [rows, longest]; after a history's end
        they mean nothing.
        """
        return self.token_ids[:, :longest].index_select(0, request_rows)
