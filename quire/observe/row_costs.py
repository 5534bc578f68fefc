"""What the rows of a step cost, as far as it is known without any step: a step log says it, for
whoever predicts how long steps take that the log does not have.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RowCosts:
    """By the model's shapes and, where they were measured (`measure_costs`), by its kernels, which
    compute rows in tiles: the fifth may take as long as the two before it.
    """

    head_share: float = 0.0
    """The products of the scores of a row, over those of all layers' matrices."""
    pair_share: float = 0.0
    """The products of a query and a key it sees, over the same."""
    rows: tuple[int, ...] = ()
    """Numbers of rows that were measured, 1 first; none where nothing was."""
    layers: tuple[float, ...] = ()
    """Seconds of all layers with so many rows."""
    head: tuple[float, ...] = ()
    """Seconds of the scores of so many; perhaps of fewer numbers."""

    def work(self, tokens: int, sampled_rows: int) -> float:
        """The products of a step's tokens, and of the scores of those behind which one is drawn,
        beyond those of one row in the layers: in rows, as they are in a large step.
        """
        if len(self.rows) < 2:
            return tokens - 1 + self.head_share * sampled_rows
        row = max((self.layers[-1] - self.layers[0]) / (self.rows[-1] - self.rows[0]), 1e-9)
        return (
            self._seconds(self.layers, tokens)
            - self.layers[0]
            + self._seconds(self.head, sampled_rows)
        ) / row

    def _seconds(self, measured: Sequence[float], count: int) -> float:
        """As measured, or on the line between the nearest two; beyond the last on that from the
        middle one.
        """
        if not count:
            return 0.0
        last = len(measured) - 1
        above = min(max(1, bisect_left(self.rows, count)), last)
        below = above - 1 if count <= self.rows[last] else last // 2
        slope = (measured[above] - measured[below]) / (self.rows[above] - self.rows[below])
        return measured[below] + slope * (count - self.rows[below])
