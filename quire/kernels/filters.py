"""The filters (top-k, top-p, ...), as defined in plain torch. A token that is filtered out gets
minus infinity.

Scores are logits divided by the temperature. Each filter but one is a limit on the score, found
from the highest scores only, and keeps ties with it; `typical_p` is a limit on the distance from
the expected surprise. So only a row's highest scores are sorted: a few at first, more where these
are not enough.

A row's numbers must not depend on how many rows there are, so sums over the vocabulary are taken by
`sum_rows`, not by torch, which adds in an order that depends on the shape.

How many depends on the numbers, so on a GPU this would wait for the device, which
`triton/filters.py` does not.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quire.kernels.ops import FILTERS, Kernels

_HEADS = (128, 2048)
_NEVER = float("-inf")
_FAINTEST = -80.0


def filter_rows_(kernels: Kernels, logits: Tensor, rows: Tensor, limits: Tensor) -> None:
    """`Kernels.filter_rows_`: applies each filter to the tokens that the one before left."""
    whole = len(rows) == len(logits)
    limit = dict(zip(FILTERS, limits.unsqueeze(2).unbind(1), strict=True))
    scores = logits.div_(limit["temperature"]) if whole else logits[rows] / limit["temperature"]
    highest = scores.amax(-1, keepdim=True)
    for name, filter_, asks in (
        ("top_n_sigma", _top_n_sigma_, limit["top_n_sigma"] > 0),
        ("top_k", _top_k_, (limit["top_k"] > 0) & (limit["top_k"] < scores.shape[1])),
        ("top_p", _top_p_, limit["top_p"] < 1),
        ("log_min_p", _min_p_, limit["log_min_p"] > _NEVER),
        ("typical_p", _typical_p_, limit["typical_p"] < 1),
        ("xtc_threshold", _xtc_, limit["xtc_threshold"] < float("inf")),
    ):
        index = asks[:, 0].nonzero()[:, 0]
        if 0 < len(index) < len(scores):
            own = scores[index]
            filter_(kernels, own, highest[index], limit[name][index])
            scores[index] = own
        elif len(index):
            filter_(kernels, scores, highest, limit[name])
    if not whole:
        logits[rows] = scores


# Each filter takes the rows that ask for it, with the highest score of each before any filter and
# the filter's own parameter [rows, 1] both, and changes the scores.


def _top_n_sigma_(kernels: Kernels, scores: Tensor, highest: Tensor, parameter: Tensor) -> None:
    # Deviations are taken from the highest score: dividing by the temperature then changes nothing,
    # and tokens that are forbidden already don't count.
    below = scores - highest
    unknown = below == _NEVER
    count = below.shape[1] - sum_rows(unknown.float())
    mean = sum_rows(below.masked_fill_(unknown, 0.0)) / count
    spread = (sum_rows((below - mean).square_().masked_fill_(unknown, 0.0)) / count).sqrt_()
    _keep_(kernels, scores, low=highest - parameter * spread)


def _top_k_(kernels: Kernels, scores: Tensor, highest: Tensor, parameter: Tensor) -> None:
    k = parameter.long()
    best = kernels.top_values(scores, int(k.max()))
    _keep_(kernels, scores, low=best.gather(1, k - 1))


def _top_p_(kernels: Kernels, scores: Tensor, highest: Tensor, parameter: Tensor) -> None:
    def likeliest(rest: Tensor, count: int) -> tuple[Tensor, Tensor]:
        own = scores if len(rest) == len(scores) else scores[rest]
        best = kernels.top_values(own, count)
        return best, _weights(best, highest[rest])

    wanted = sum_rows(_weights(scores, highest)) * parameter
    _keep_(kernels, scores, low=_limit_reaching(wanted, scores.shape[1], likeliest))


def _min_p_(kernels: Kernels, scores: Tensor, highest: Tensor, parameter: Tensor) -> None:
    _keep_(kernels, scores, low=highest + parameter)


def _typical_p_(_: Kernels, scores: Tensor, highest: Tensor, parameter: Tensor) -> None:
    below = (scores - highest).clamp_min_(_FAINTEST)
    weights = below.exp()
    total = sum_rows(weights)
    # A token's surprise is log(total) - below; its expectation is log(total) - the mean of below.
    distance = (below - sum_rows(weights * below) / total).abs_()

    def nearest(rest: Tensor, count: int) -> tuple[Tensor, Tensor]:
        closest, where = distance[rest].topk(count, largest=False, sorted=True)
        return closest, weights[rest].gather(1, where)

    limit = _limit_reaching(total * parameter, distance.shape[1], nearest)
    scores.masked_fill_(distance > limit, _NEVER)


def _xtc_(kernels: Kernels, scores: Tensor, highest: Tensor, parameter: Tensor) -> None:
    wanted = sum_rows(_weights(scores, highest)) * parameter
    # At most 1 / threshold tokens can be as likely as the threshold.
    most = int(min(1 / max(float(parameter.min()), 1e-6) + 1, scores.shape[1]))
    best = kernels.top_values(scores, most)
    # A threshold of 0 is reached by all tokens, but those already filtered out don't count.
    likely = ((_weights(best, highest) >= wanted) & (best > _NEVER)).sum(-1, keepdim=True)
    # All tokens above the threshold are removed but the least likely of them.
    least = best.gather(1, (likely - 1).clamp_min(0))
    _keep_(kernels, scores, high=least.masked_fill_(likely == 0, float("inf")))


def _keep_(
    kernels: Kernels, scores: Tensor, low: float | Tensor = _NEVER, high: float | Tensor = -_NEVER
) -> None:
    """Excludes scores below `low` [rows, 1] and above `high` [rows, 1]."""
    limits = [torch.empty(len(scores), 1, device=scores.device) for _ in range(2)]
    for limit, value in zip(limits, (low, high), strict=True):
        limit[:] = value
    kernels.keep_between_(scores, limits[0][:, 0], limits[1][:, 0])


def _limit_reaching(
    wanted: Tensor, size: int, best_of: Callable[[Tensor, int], tuple[Tensor, Tensor]]
) -> Tensor:
    """The value [rows, 1] of the last entry that is needed, taking a row's best entries first, for
    their weights to reach `wanted` (NaN is never reached). `best_of(rows, count)` gives values and
    weights of the `count` best entries of some rows; it is called with more entries for the rows
    where the first ones are not enough.
    """
    limit = torch.empty_like(wanted)
    rest = torch.arange(len(wanted), device=wanted.device)
    for count in [head for head in _HEADS if head < size] + [size]:
        values, weights = best_of(rest, count)
        last = (weights.cumsum(-1) < wanted[rest]).sum(-1, keepdim=True)
        limit[rest] = values.gather(1, last.clamp_max(count - 1))
        rest = rest[last[:, 0] >= count]
        if len(rest) == 0:
            break
    return limit


def _weights(scores: Tensor, highest: Tensor) -> Tensor:
    """exp(score - highest), which divided by the row's sum is a probability. The difference is at
    least _FAINTEST: smaller weights vanish in any sum beside the highest's 1, and exp takes a
    hundred times as long for denormals.
    """
    return (scores - highest).clamp_min_(_FAINTEST).exp_()


def sum_rows(values: Tensor) -> Tensor:
    """The sum of each row [rows, 1], by adding its halves until one number is left: an order fixed
    by its length.
    """
    while (size := values.shape[1]) > 1:
        half = size // 2
        added = values[:, :half] + values[:, size - half :]
        if size % 2:
            added[:, :1] += values[:, half : half + 1]
        values = added
    return values
