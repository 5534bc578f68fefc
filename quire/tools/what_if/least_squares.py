"""Weights of at least 0: nothing in a step makes it shorter."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
_ROUNDS = 20


def fit_weights(inputs: Array, times: Array, counts: Array, equal: Array | None = None) -> Array:
    """Those with the least relative errors, each time counting for as long as it is, `counts`
    times, and single outliers little; `equal` has more rows, which should come to 0.
    """
    if equal is None:
        equal = np.zeros((0, inputs.shape[1]))
    weight = np.sqrt(counts * times / np.average(times, weights=counts))
    matter = weight
    weights = np.zeros(inputs.shape[1])
    for _ in range(3):
        rows = np.concatenate([inputs / times[:, None] * matter[:, None], equal])
        weights = _least_squares(rows, np.concatenate([matter, np.zeros(len(equal))]))
        errors = np.abs(inputs @ weights / times - 1)
        usual = max(float(np.median(errors)), 1e-6)
        matter = weight * np.sqrt(np.minimum(1.0, 3 * usual / np.maximum(errors, 1e-12)))
    return weights


def _least_squares(rows: Array, wanted: Array) -> Array:
    """The weights of at least 0 with the least squares: those that come out negative are left out,
    the worst first.
    """
    active = list(range(rows.shape[1]))
    weights = np.zeros(rows.shape[1])
    for _ in range(_ROUNDS):
        solution = np.linalg.lstsq(rows[:, active], wanted, rcond=None)[0]
        if (solution >= 0).all():
            weights[active] = solution
            break
        del active[int(np.argmin(solution))]
        if not active:
            break
    return weights
