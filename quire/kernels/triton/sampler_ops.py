"""The operations of the sampler, as methods for a backend to inherit."""

from __future__ import annotations

from torch import Tensor

from quire.kernels.ops import TokenScores
from quire.kernels.triton.filters import filter_rows_
from quire.kernels.triton.repeats import match_lengths
from quire.kernels.triton.sampling import gumbel_argmax, keep_between_, top_values
from quire.kernels.triton.scores import score_tokens


class SamplerKernels:
    """What `quire.sampling` needs of `quire.kernels.ops.Kernels`. Nothing here waits for the device."""

    def gumbel_argmax(self, logits: Tensor, temperature: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        return gumbel_argmax(logits, temperature, keys)

    def filter_rows_(self, logits: Tensor, rows: Tensor, limits: Tensor) -> None:
        filter_rows_(logits, rows, limits)

    def match_lengths(self, tokens: Tensor, lengths: Tensor, breaks: Tensor | None, most: int) -> Tensor:
        return match_lengths(tokens, lengths, breaks, most)

    def score_tokens(self, logits: Tensor, token_ids: Tensor, num_top: int) -> TokenScores:
        return score_tokens(logits, token_ids, num_top)

    def top_values(self, x: Tensor, k: int) -> Tensor:
        return top_values(x, k)

    def keep_between_(self, x: Tensor, low: Tensor, high: Tensor) -> None:
        keep_between_(x, low, high)
