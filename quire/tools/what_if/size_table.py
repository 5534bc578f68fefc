"""Seconds by size: what steps of about a size took in the median, and the line between two sizes."""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from quire.tools.what_if.step_mix import StepKind

_SAME_SIZE = 1.1
"""Steps whose sizes differ by less, as a factor, are of about the same size."""
_FEWEST = 5
"""Of a size; where there are fewer, those of the next are counted with them."""
_APART = 1.5
"""But not of sizes that differ by so much."""
_OUTLIER = 3.0
"""Times the usual deviation: more counts as that much."""


class Size(NamedTuple):
    """What a step's time depends on."""

    kind: StepKind
    rows: float
    """The work of its rows."""
    keys: float
    """That are read."""


class Sample(NamedTuple):
    """A step that was measured."""

    size: Size
    seconds: float


class _Bucket(NamedTuple):
    """Steps of about one size."""

    rows: float
    seconds: float
    """Less those of their keys."""
    num_steps: int
    ratios: list[float]
    """What each took, over what the table says."""


class SizeTable:
    """A time for each key that is read, and on top of it one curve by the work of rows for each
    kind of step, which never falls. Beyond the largest step of a kind its curve goes on as in the
    upper half of its sizes; a kind that was never measured is taken to be like one that was, with
    or without prompts as itself if there is one.
    """

    def __init__(self, samples: Iterable[Sample]) -> None:
        of_kind: dict[StepKind, list[Sample]] = {}
        for sample in samples:
            of_kind.setdefault(sample.size.kind, []).append(sample)
        groups = {kind: list(_groups(found)) for kind, found in of_kind.items()}
        self._counts = {kind: len(found) for kind, found in of_kind.items()}
        self._per_key = _slope_of_keys([one for found in groups.values() for one in found])
        self._buckets = {
            kind: _monotone([_bucket(one, self._per_key) for one in found])
            for kind, found in groups.items()
        }
        self._slope = _slope([bucket for buckets in self._buckets.values() for bucket in buckets])
        """Of a curve with a single size: as of all sizes together."""
        for found in of_kind.values():
            for sample in found:
                ratio = sample.seconds / max(self.seconds(sample.size), 1e-12)
                self._nearest(sample.size).ratios.append(ratio)

    def seconds(self, size: Size) -> float:
        """Usually."""
        buckets = self._of(size.kind)
        above = bisect_left(buckets, size.rows, key=lambda bucket: bucket.rows)
        if above == len(buckets) or len(buckets) == 1:
            near = buckets[-1]
            rise = self._beyond(buckets)
        else:
            near, other = (
                (buckets[0], buckets[1]) if not above else (buckets[above - 1], buckets[above])
            )
            rise = (other.seconds - near.seconds) / (other.rows - near.rows)
        curve = max(near.seconds + rise * (size.rows - near.rows), buckets[0].seconds / 2)
        return curve + self._per_key * size.keys

    def draw(self, size: Size, source: random.Random) -> float:
        """What a step of about that size took, over what such steps usually take."""
        return source.choice(self._nearest(size).ratios or [1.0])

    def _nearest(self, size: Size) -> _Bucket:
        return min(self._of(size.kind), key=lambda bucket: abs(bucket.rows - size.rows))

    def _of(self, kind: StepKind) -> list[_Bucket]:
        if kind not in self._buckets:
            kind = max(self._counts, key=lambda one: (one[0] == kind[0], self._counts[one]))
        return self._buckets[kind]

    def _beyond(self, buckets: Sequence[_Bucket]) -> float:
        if len(buckets) == 1:
            return self._slope
        lower = max(
            0, bisect_left(buckets, buckets[-1].rows / 2, key=lambda bucket: bucket.rows) - 1
        )
        return _slope(buckets[lower:])


def _groups(samples: Iterable[Sample]) -> Iterator[list[Sample]]:
    """Those of about a size."""
    group: list[Sample] = []
    for sample in sorted(samples, key=lambda sample: sample.size.rows):
        if group:
            is_larger = sample.size.rows > _SAME_SIZE * group[0].size.rows
            is_far = sample.size.rows > _APART * group[-1].size.rows
            if is_far or (is_larger and len(group) >= _FEWEST):
                yield group
                group = []
        group.append(sample)
    yield group


def _slope_of_keys(groups: Iterable[Sequence[Sample]]) -> float:
    """What a key costs, by steps of about the same size with more and with fewer of them."""
    products = squares = 0.0
    for group in groups:
        keys = np.array([sample.size.keys for sample in group])
        seconds = np.array([sample.seconds for sample in group])
        deviation = seconds - np.median(seconds)
        most = _OUTLIER * float(np.median(np.abs(deviation)))
        keys -= keys.mean()
        products += float((keys * np.clip(deviation, -most, most)).sum())
        squares += float((keys * keys).sum())
    return max(0.0, products / max(squares, 1e-9))


def _bucket(group: Sequence[Sample], per_key: float) -> _Bucket:
    rows = float(np.mean([sample.size.rows for sample in group]))
    seconds = np.median([sample.seconds - per_key * sample.size.keys for sample in group])
    return _Bucket(rows, max(float(seconds), 1e-9), len(group), [])


def _slope(buckets: Sequence[_Bucket]) -> float:
    """From the smallest to the largest."""
    low = min(buckets)
    high = max(buckets)
    return max(0.0, (high.seconds - low.seconds) / max(high.rows - low.rows, 1e-9))


def _monotone(buckets: Sequence[_Bucket]) -> list[_Bucket]:
    """Neighbours of which the larger took less are taken together (isotonic regression): nothing in
    a step makes it shorter.
    """
    found: list[_Bucket] = []
    for bucket in buckets:
        while found and found[-1].seconds > bucket.seconds:
            last = found.pop()
            num_steps = last.num_steps + bucket.num_steps
            bucket = _Bucket(
                (last.rows * last.num_steps + bucket.rows * bucket.num_steps) / num_steps,
                (last.seconds * last.num_steps + bucket.seconds * bucket.num_steps) / num_steps,
                num_steps,
                [],
            )
        found.append(bucket)
    return found
