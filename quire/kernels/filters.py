"""Which tokens are left to draw from: the definition, in plain torch. What a filter excludes gets minus infinity.

Scores are logits divided by the temperature. Each filter but one is a limit on the score, found from the
highest scores alone, and keeps ties with it; `typical_p` is a limit on the distance from the expected
surprise. So only a row's highest scores need be sorted, more of them where the first few don't reach.

A row's numbers must not depend on how many rows there are, so sums over the vocabulary are taken by
`sum_rows`, not by torch, which adds in an order that depends on the shape.

How far it must look depends on the numbers, so on a GPU this waits for the device; `triton/filters.py` does not.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.ops import FILTERS, Kernels

_HEADS = (128, 2048)
_NEVER = float("-inf")
_FAINTEST = -80.0


def filter_rows_(kernels: Kernels, logits: Tensor, rows: Tensor, limits: Tensor) -> None:
    """`Kernels.filter_rows_`, each filter over what the one before left."""
    whole = len(rows) == len(logits)
    of = dict(zip(FILTERS, limits.unsqueeze(2).unbind(1), strict=True))
    scores = logits.div_(of["temperature"]) if whole else logits[rows] / of["temperature"]
    highest = scores.amax(-1, keepdim=True)
    _top_n_sigma_(_Part(scores, highest, of["top_n_sigma"], of["top_n_sigma"] > 0), kernels)
    _top_k_(_Part(scores, highest, of["top_k"], (of["top_k"] > 0) & (of["top_k"] < scores.shape[1])), kernels)
    _top_p_(_Part(scores, highest, of["top_p"], of["top_p"] < 1), kernels)
    _min_p_(_Part(scores, highest, of["log_min_p"], of["log_min_p"] > _NEVER), kernels)
    _typical_p_(_Part(scores, highest, of["typical_p"], of["typical_p"] < 1))
    _xtc_(_Part(scores, highest, of["xtc_threshold"], of["xtc_threshold"] < float("inf")), kernels)
    if not whole:
        logits[rows] = scores


class _Part:
    """The rows of a filter, taken out of all scores and put back; all of them are used where they lie."""

    def __init__(self, scores: Tensor, highest: Tensor, parameter: Tensor, asks: Tensor) -> None:
        self._all = scores
        self._index = asks[:, 0].nonzero()[:, 0]
        self._whole = len(self._index) == len(scores)
        self.is_empty = len(self._index) == 0
        self.scores = scores if self._whole else scores[self._index]
        self.highest = highest if self._whole else highest[self._index]
        self.parameter = parameter if self._whole else parameter[self._index]

    def keep_(self, kernels: Kernels, low: float | Tensor = _NEVER, high: float | Tensor = -_NEVER) -> None:
        """Excludes scores below `low` [rows, 1] and above `high` [rows, 1]."""
        limits = [torch.empty(len(self.scores), 1, device=self.scores.device) for _ in range(2)]
        for limit, value in zip(limits, (low, high), strict=True):
            limit[:] = value
        kernels.keep_between_(self.scores, limits[0][:, 0], limits[1][:, 0])
        self.put_back()

    def put_back(self) -> None:
        if not self._whole:
            self._all[self._index] = self.scores


def _top_n_sigma_(part: _Part, kernels: Kernels) -> None:
    if part.is_empty:
        return
    # Deviations are taken from the highest score: dividing by the temperature then changes nothing, and
    # tokens that are forbidden already don't count.
    below = part.scores - part.highest
    unknown = below == _NEVER
    count = below.shape[1] - sum_rows(unknown.float())
    mean = sum_rows(below.masked_fill_(unknown, 0.0)) / count
    spread = (sum_rows((below - mean).square_().masked_fill_(unknown, 0.0)) / count).sqrt_()
    part.keep_(kernels, low=part.highest - part.parameter * spread)


def _top_k_(part: _Part, kernels: Kernels) -> None:
    if part.is_empty:
        return
    k = part.parameter.long()
    best = kernels.top_values(part.scores, int(k.max()))
    part.keep_(kernels, low=best.gather(1, k - 1))


def _top_p_(part: _Part, kernels: Kernels) -> None:
    if part.is_empty:
        return
    wanted = _total_weight(part) * part.parameter
    limit = torch.empty_like(wanted)
    rest = torch.arange(len(wanted), device=wanted.device)
    for head in _heads(part.scores.shape[1]):
        own = part.scores if len(rest) == len(wanted) else part.scores[rest]
        found, reached = _nucleus_limit(kernels.top_values(own, head), part.highest[rest], wanted[rest])
        limit[rest] = found
        rest = rest[~reached]
        if len(rest) == 0:
            break
    part.keep_(kernels, low=limit)


def _nucleus_limit(best: Tensor, highest: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """The score [rows, 1] at which the weights of descending scores reach `wanted`, and whether they do."""
    last = (_weights(best, highest).cumsum(-1) < wanted).sum(-1, keepdim=True)
    return best.gather(1, last.clamp_max(best.shape[1] - 1)), last[:, 0] < best.shape[1]


def _min_p_(part: _Part, kernels: Kernels) -> None:
    if not part.is_empty:
        part.keep_(kernels, low=part.highest + part.parameter)


def _typical_p_(part: _Part) -> None:
    if part.is_empty:
        return
    below = (part.scores - part.highest).clamp_min_(_FAINTEST)
    weights = below.exp()
    total = sum_rows(weights)
    # A token's surprise is log(total) - below; its expectation is log(total) - the mean of below.
    distance = (below - sum_rows(weights * below) / total).abs_()
    part.scores.masked_fill_(distance > _limit_reaching(distance, weights, total * part.parameter), _NEVER)
    part.put_back()


def _xtc_(part: _Part, kernels: Kernels) -> None:
    if part.is_empty:
        return
    wanted = _total_weight(part) * part.parameter
    # Not more than 1 / threshold tokens can be that likely.
    most = int(min(1 / max(float(part.parameter.min()), 1e-6) + 1, part.scores.shape[1]))
    best = kernels.top_values(part.scores, most)
    # A threshold of 0 is reached by all, but what is excluded already is none of them.
    likely = ((_weights(best, part.highest) >= wanted) & (best > _NEVER)).sum(-1, keepdim=True)
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


def _total_weight(part: _Part) -> Tensor:
    """[rows, 1]: what probabilities are fractions of."""
    return sum_rows(_weights(part.scores, part.highest))


def sum_rows(values: Tensor) -> Tensor:
    """The sum of each row [rows, 1], halves added to halves: an order fixed by the length of the row."""
    while (size := values.shape[1]) > 1:
        half = size // 2
        added = values[:, :half] + values[:, size - half :]
        if size % 2:
            added[:, :1] += values[:, half : half + 1]
        values = added
    return values
