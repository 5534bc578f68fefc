"""Masks that take long, computed beside the steps instead of in them.

A mask is needed when its row samples. If it is cheap, it is computed while the model runs, together
with those of the other rows. If it is not, or nobody knows yet, it is begun as soon as the token
before it is known, and its row is held back (not scheduled) until it is there: whoever shares the
steps does not wait for it.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # the process that checks grammars starts sooner without
    import numpy as np
    import numpy.typing as npt

_CHEAP_SECONDS = 0.005
"""A mask of a row; many of them share a step."""
_DRAFT_SECONDS = 0.05
"""A mask of a row beyond which no draft tokens are followed: one mask behind each of them would be
needed in the step.
"""
_PROVEN_MASKS = 3
"""Masks in a row that have to be cheap before a grammar counts as cheap: the first is often the
only cheap one.
"""
_DECAY = 0.9
_LONGEST_WAIT = 0.05
"""Seconds for which an engine with nothing else to do waits at a time, so that it still hears of
new requests.
"""


class AheadMask(NamedTuple):
    """The mask of one row."""

    words: npt.NDArray[np.int32]
    error: str
    """Why the row can't go on; empty if it can."""


class MaskCosts:
    """What the masks of one grammar took of late."""

    def __init__(self) -> None:
        self._num_measured = 0
        self._peak = 0.0

    def note(self, seconds: float) -> None:
        self._num_measured += 1
        self._peak = max(seconds, _DECAY * self._peak)

    @property
    def is_cheap(self) -> bool:
        return self._num_measured >= _PROVEN_MASKS and self._peak <= _CHEAP_SECONDS

    @property
    def allows_draft_tokens(self) -> bool:
        """Whether further masks, behind draft tokens, may be computed in a step."""
        return self._peak <= _DRAFT_SECONDS


class MasksAhead:
    """The masks that are being computed, by row. Used by one thread; one other computes, one mask
    at a time.
    """

    def __init__(self) -> None:
        self._begun: dict[int, Future[AheadMask]] = {}
        self._sampling: set[int] = set()
        """Rows that had an expensive mask and whose token is not known yet: the next mask can't
        even be begun.
        """
        self._thread: ThreadPoolExecutor | None = None

    def __contains__(self, row: int) -> bool:
        return row in self._begun

    def begin(self, row: int, compute: Callable[[], AheadMask]) -> None:
        """Has a row's next mask computed."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="quire-masks-ahead")
        self.drop(row)
        self._begun[row] = self._thread.submit(compute)

    def take(self, row: int) -> AheadMask:
        """What was computed for a row; waits for it."""
        return self._begun.pop(row).result()

    def samples(self, row: int) -> None:
        """The row samples under an expensive mask."""
        self._sampling.add(row)

    def drew(self, row: int) -> None:
        """Its token is known."""
        self._sampling.discard(row)

    def drop(self, row: int) -> None:
        """Whoever had the row has left it."""
        self._sampling.discard(row)
        begun = self._begun.pop(row, None)
        if begun is not None:
            begun.cancel()

    def held_rows(self) -> frozenset[int]:
        """Rows that can't draw now."""
        if not self._begun and not self._sampling:
            return frozenset()
        return frozenset(self._sampling).union(
            row for row, one in self._begun.items() if not one.done()
        )

    def wait(self) -> None:
        """For a moment, or until one of them is there."""
        unfinished = [one for one in self._begun.values() if not one.done()]
        if unfinished:
            wait(unfinished, _LONGEST_WAIT, FIRST_COMPLETED)

    def close(self) -> None:
        for row in [*self._begun]:
            self.drop(row)
        if self._thread is not None:
            self._thread.shutdown()
