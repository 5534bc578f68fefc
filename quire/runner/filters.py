"""Which tokens are left to draw from: everything a filter excludes gets the score minus infinity.

Scores are logits divided by the temperature. Each filter but one is a limit on the score, found from the
highest scores alone, and keeps ties with it; `typical_p` is a limit on the distance from the expected
surprise. So only a row's highest scores need be sorted, more of them where the first few don't reach.

A row's numbers must not depend on how many rows there are, so sums over the vocabulary are taken by
`sum_rows`, not by torch, which adds in an order that depends on the shape.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from quire.kernels.ops import Kernels
from quire.runner.noise import chances
from quire.runner.sampling_batch import Indices, SamplingBatch

_HEADS = (128, 2048)
_NEVER = float("-inf")
_FAINTEST = -80.0


def filtered_rows(batch: SamplingBatch, vocab_size: int) -> Indices:
    """The rows that draw from less than everything."""
    asks = (batch["top_k"] > 0) & (batch["top_k"] < vocab_size)
    asks |= (batch["top_p"] < 1) | (batch["min_p"] > 0) | (batch["typical_p"] < 1)
    asks |= (batch["top_n_sigma"] > 0) | (batch["xtc_probability"] > 0)
    return np.flatnonzero(asks & (batch["temperature"] > 0))


def filter_(scores: Tensor, batch: SamplingBatch, rows: Indices, kernels: Kernels) -> None:
    """Filters scores [rows, vocab] in place, each row by the parameters of `rows`, in the documented order."""
    highest = scores.amax(-1, keepdim=True)
    _top_n_sigma_(scores, highest, batch, rows, kernels)
    _top_k_(scores, batch, rows, kernels)
    _top_p_(scores, highest, batch, rows, kernels)
    _min_p_(scores, highest, batch, rows, kernels)
    _typical_p_(scores, highest, batch, rows)
    _xtc_(scores, highest, batch, rows, kernels)


class _Part:
    """The rows of a filter, taken out of all scores and put back; all of them are used where they lie."""

    def __init__(self, scores: Tensor, asks: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> None:
        self.rows = np.flatnonzero(asks)
        self._all = scores
        self._whole = len(self.rows) == len(scores)
        self.index = torch.from_numpy(self.rows).to(scores.device)
        self.scores = scores if self._whole else scores[self.index]

    def of(self, tensor: Tensor) -> Tensor:
        return tensor if self._whole else tensor[self.index]

    def keep_(self, kernels: Kernels, low: float | Tensor = _NEVER, high: float | Tensor = -_NEVER) -> None:
        """Excludes scores below `low` [rows, 1] and above `high` [rows, 1]."""
        limits = [torch.empty(len(self.scores), 1, device=self.scores.device) for _ in range(2)]
        for limit, value in zip(limits, (low, high), strict=True):
            limit[:] = value
        kernels.keep_between_(self.scores, limits[0][:, 0], limits[1][:, 0])
        self.put_back()

    def put_back(self) -> None:
        if not self._whole:
            self._all[self.index] = self.scores


def _top_n_sigma_(scores: Tensor, highest: Tensor, batch: SamplingBatch, rows: Indices, kernels: Kernels) -> None:
    asks = batch["top_n_sigma"][rows] > 0
    if not asks.any():
        return
    part = _Part(scores, asks)
    # Deviations are taken from the highest score: dividing by the temperature then changes nothing, and
    # tokens that are forbidden already don't count.
    below = part.scores - part.of(highest)
    unknown = below == _NEVER
    count = scores.shape[1] - sum_rows(unknown.float())
    mean = sum_rows(below.masked_fill_(unknown, 0.0)) / count
    spread = (sum_rows((below - mean).square_().masked_fill_(unknown, 0.0)) / count).sqrt_()
    limit = part.of(highest) - batch.numbers("top_n_sigma", rows[part.rows]) * spread
    part.keep_(kernels, low=limit)


def _top_k_(scores: Tensor, batch: SamplingBatch, rows: Indices, kernels: Kernels) -> None:
    k = batch["top_k"][rows]
    asks = (k > 0) & (k < scores.shape[1])
    if not asks.any():
        return
    part = _Part(scores, asks)
    k = k[part.rows]
    best = kernels.top_values(part.scores, int(k.max()))
    limit = best.gather(1, batch.on_device(k - 1).unsqueeze(1))
    part.keep_(kernels, low=limit)


def _top_p_(scores: Tensor, highest: Tensor, batch: SamplingBatch, rows: Indices, kernels: Kernels) -> None:
    asks = batch["top_p"][rows] < 1
    if not asks.any():
        return
    part = _Part(scores, asks)
    top = part.of(highest)
    wanted = _total_weight(part.scores, top) * batch.numbers("top_p", rows[part.rows])
    limit = torch.empty_like(top)
    rest = torch.arange(len(top), device=top.device)
    for head in _heads(scores.shape[1]):
        own = part.scores if len(rest) == len(top) else part.scores[rest]
        found, reached = _nucleus_limit(kernels.top_values(own, head), top[rest], wanted[rest])
        limit[rest] = found
        rest = rest[~reached]
        if len(rest) == 0:
            break
    part.keep_(kernels, low=limit)


def _nucleus_limit(best: Tensor, highest: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """The score [rows, 1] at which the weights of descending scores reach `wanted`, and whether they do."""
    last = (_weights(best, highest).cumsum(-1) < wanted).sum(-1, keepdim=True)
    return best.gather(1, last.clamp_max(best.shape[1] - 1)), last[:, 0] < best.shape[1]


def _min_p_(scores: Tensor, highest: Tensor, batch: SamplingBatch, rows: Indices, kernels: Kernels) -> None:
    min_p = batch["min_p"][rows]
    asks = min_p > 0
    if not asks.any():
        return
    part = _Part(scores, asks)
    limit = part.of(highest) + batch.on_device(np.log(min_p[part.rows].astype(np.float64)).astype(np.float32))[:, None]
    part.keep_(kernels, low=limit)


def _typical_p_(scores: Tensor, highest: Tensor, batch: SamplingBatch, rows: Indices) -> None:
    asks = batch["typical_p"][rows] < 1
    if not asks.any():
        return
    part = _Part(scores, asks)
    below = (part.scores - part.of(highest)).clamp_min_(_FAINTEST)
    weights = below.exp()
    total = sum_rows(weights)
    # A token's surprise is log(total) - below; its expectation is log(total) - the mean of below.
    distance = (below - sum_rows(weights * below) / total).abs_()
    wanted = total * batch.numbers("typical_p", rows[part.rows])
    part.scores.masked_fill_(distance > _limit_reaching(distance, weights, wanted), _NEVER)
    part.put_back()


def _xtc_(scores: Tensor, highest: Tensor, batch: SamplingBatch, rows: Indices, kernels: Kernels) -> None:
    asks = chances(batch["seed"][rows], batch.position[rows]) < batch["xtc_probability"][rows]
    if not asks.any():
        return
    part = _Part(scores, asks)
    threshold = batch["xtc_threshold"][rows[part.rows]]
    wanted = _total_weight(part.scores, part.of(highest)) * batch.on_device(threshold).unsqueeze(1)
    # Not more than 1 / threshold tokens can be that likely.
    most = int(min(1 / max(threshold.min(), 1e-6) + 1, scores.shape[1]))
    best = kernels.top_values(part.scores, most)
    likely = (_weights(best, part.of(highest)) >= wanted).sum(-1, keepdim=True)
    # All that are likely but the least likely of them go; a single one is that itself.
    least = best.gather(1, (likely - 1).clamp_min(0))
    part.keep_(kernels, high=least.masked_fill_(likely == 0, float("inf")))


def _limit_reaching(costs: Tensor, weights: Tensor, wanted: Tensor) -> Tensor:
    """The cost [rows, 1] up to which a row's entries must be taken, cheapest first, for their weights to reach
    `wanted`."""
    limit = torch.empty_like(wanted)
    rest = torch.arange(len(costs), device=costs.device)
    for head in _heads(costs.shape[1]):
        found, reached = _limit_in(costs[rest], weights[rest], wanted[rest], head)
        limit[rest] = found
        rest = rest[~reached]
        if len(rest) == 0:
            break
    return limit


def _limit_in(costs: Tensor, weights: Tensor, wanted: Tensor, head: int) -> tuple[Tensor, Tensor]:
    """The limit if the `head` cheapest entries reach `wanted`, and whether they do, [rows] (NaN never does)."""
    cheapest, where = costs.topk(head, largest=False, sorted=True)
    before = weights.gather(1, where).cumsum(-1)
    last = (before < wanted).sum(-1, keepdim=True)
    return cheapest.gather(1, last.clamp_max(head - 1)), last[:, 0] < head


def _heads(size: int) -> list[int]:
    """How many of a row's best are looked at: few at first, all of them in the end."""
    return [head for head in _HEADS if head < size] + [size]


def _weights(scores: Tensor, highest: Tensor) -> Tensor:
    """exp(score - highest). What is fainter than _FAINTEST counts as that: it vanishes in any sum beside the
    highest's 1, and exp takes a hundred times as long where its result is no normal number."""
    return (scores - highest).clamp_min_(_FAINTEST).exp_()


def _total_weight(scores: Tensor, highest: Tensor) -> Tensor:
    """[rows, 1]: what probabilities are fractions of."""
    return sum_rows(_weights(scores, highest))


def sum_rows(values: Tensor) -> Tensor:
    """The sum of each row [rows, 1], halves added to halves: an order fixed by the length of the row."""
    while (size := values.shape[1]) > 1:
        half = size // 2
        added = values[:, :half] + values[:, size - half :]
        if size % 2:
            added[:, :1] += values[:, half : half + 1]
        values = added
    return values
