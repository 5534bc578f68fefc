"""From logits to token ids: argmax(logits / temperature + Gumbel(seed, position)) over what filters leave.

The order of operations for one row: end tokens masked before `min_tokens`, division by the temperature,
top_k, top_p over what top_k left, noise, argmax (the lowest id wins ties). With temperature 0 it is the
argmax of the masked logits. Rows never meet: each is computed from its own logits and parameters.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.runner.noise import gumbel_noise, noise_keys


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """The parameters of the rows to sample, one entry each."""

    temperature: npt.NDArray[np.float32]
    top_k: npt.NDArray[np.int64]
    top_p: npt.NDArray[np.float32]
    seed: npt.NDArray[np.uint64]
    position: npt.NDArray[np.int64]
    forbidden: tuple[tuple[int, ...], ...]
    """Token ids each row can't choose."""


def sample(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """int64 token ids [rows] from float32 logits [rows, vocab]. The logits are changed on the way."""
    for row, token_ids in enumerate(batch.forbidden):
        if token_ids:
            logits[row, list(token_ids)] = float("-inf")
    drawn = np.flatnonzero(batch.temperature > 0)
    if len(drawn) == 0:
        return logits.argmax(-1)
    everyone = len(drawn) == len(logits)
    index = torch.from_numpy(drawn).to(logits.device)
    scores = logits if everyone else logits[index]
    scores = scores / torch.from_numpy(batch.temperature[drawn]).to(logits.device).unsqueeze(1)
    _filter_(scores, batch.top_k[drawn], batch.top_p[drawn])
    keys = torch.from_numpy(noise_keys(batch.seed[drawn], batch.position[drawn])).to(logits.device)
    chosen = scores.add_(gumbel_noise(keys, scores.shape[1])).argmax(-1)
    if everyone:
        return chosen
    tokens = logits.argmax(-1)
    tokens[index] = chosen
    return tokens


def _filter_(scores: Tensor, top_k: npt.NDArray[np.int64], top_p: npt.NDArray[np.float32]) -> None:
    """Sets what top_k and top_p exclude to -inf; only rows that ask for it are sorted."""
    vocab_size = scores.shape[1]
    asking = np.flatnonzero(((top_k > 0) & (top_k < vocab_size)) | (top_p < 1))
    if len(asking) == 0:
        return
    index = torch.from_numpy(asking).to(scores.device)
    # Stable: among equals the lower id comes first, here as in the argmax.
    ordered, order = scores[index].sort(dim=-1, descending=True, stable=True)
    k = np.where(top_k[asking] > 0, np.minimum(top_k[asking], vocab_size), vocab_size)
    kth = ordered.gather(1, torch.from_numpy(k - 1).to(scores.device).unsqueeze(1))
    ordered.masked_fill_(ordered < kth, float("-inf"))
    probabilities = ordered.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    p = torch.from_numpy(top_p[asking]).to(scores.device).unsqueeze(1)
    excluded = (before >= p) & (p < 1)
    excluded[:, 0] = False
    ordered.masked_fill_(excluded, float("-inf"))
    scores[index] = torch.empty_like(ordered).scatter_(1, order, ordered)
