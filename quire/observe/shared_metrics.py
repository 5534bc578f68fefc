"""Counters, gauges and histograms whose numbers lie in memory that other processes can read.

They look like those of `prometheus_client`, which writes their page, and differ in two ways:
counting a value takes a fraction of a microsecond, since the numbers have one writer and need no
lock; and with several HTTP processes each has a file of its own, so that whoever answers /metrics
adds them up, those of a process that was killed included.

A file holds its numbers and, in front of them, their names: each is appended once, first its text
and then the length of all texts, so a reader never sees half of one. So there is room for many
names but not for ever new ones: texts that change (`Info`) have a place behind the numbers, where
they replace each other.
"""

from __future__ import annotations

import logging
import mmap
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.utils import floatToGoString

_NAME_BYTES = 512 * 1024
_NUM_VALUES = 16 * 1024
_SPARE_VALUES = 256
"""For what finds no room: counted, and shown nowhere."""
_TEXT_BYTES = 512 * 1024
_MOST_READS = 100
"""Of texts that are being written: that takes some microseconds."""
_TEXTS_AT = 8 + _NAME_BYTES + 8 * _NUM_VALUES
_SIZE = _TEXTS_AT + 16 + _TEXT_BYTES

logger = logging.getLogger(__name__)


class _Entry(msgspec.Struct, array_like=True, frozen=True):
    """Where the numbers of one metric with one set of labels are."""

    name: str
    labels: tuple[str, ...]
    offset: int
    count: int


class Numbers:
    """All numbers of one process. One thread writes, others may read."""

    def __init__(self, path: Path | None = None) -> None:
        """In a file, which is made if it is not there and continued if it is; None: in memory
        alone.
        """
        if path is None:
            self._map = mmap.mmap(-1, _SIZE)
        else:
            with path.open("a+b") as file:
                file.truncate(_SIZE)
                self._map = mmap.mmap(file.fileno(), _SIZE)
        self._used = memoryview(self._map)[:8].cast("q")
        self.values = memoryview(self._map)[8 + _NAME_BYTES : _TEXTS_AT].cast("d")
        self._places = {(one.name, one.labels): one.offset for one in self.entries()}
        self._next = max((one.offset + one.count for one in self.entries()), default=0)
        self._is_full = False
        self._texts: dict[int, tuple[str, ...]] = {}
        self._text_state = memoryview(self._map)[_TEXTS_AT : _TEXTS_AT + 16].cast("q")
        """How often texts were written, odd while they are; how many bytes they have."""

    def place(self, name: str, labels: tuple[str, ...], count: int) -> int:
        """Where the numbers of a metric are; they are 0 at first. Whoever counts goes on when there
        is no room: a server must not end for its metrics.
        """
        found = self._places.get((name, labels))
        if found is not None:
            return found
        written = msgspec.json.encode(_Entry(name, labels, self._next, count)) + b"\n"
        end = self._used[0] + len(written)
        if end > _NAME_BYTES or self._next + count > _NUM_VALUES - _SPARE_VALUES:
            assert count <= _SPARE_VALUES
            if not self._is_full:
                logger.warning("there are too many metrics: %s %s is not shown", name, labels)
            self._is_full = True
            return _NUM_VALUES - _SPARE_VALUES
        self._map[8 + self._used[0] : 8 + end] = written
        self._used[0] = end
        self._places[name, labels] = place = self._next
        self._next += count
        return place

    def set_texts(self, place: int, texts: tuple[str, ...]) -> None:
        """What the number at this place has as further labels; none, or more than there is room for:
        it is not shown.
        """
        self._texts[place] = texts
        written = msgspec.json.encode(self._texts)
        if len(written) > _TEXT_BYTES:
            self._texts[place] = ()
            written = msgspec.json.encode(self._texts)
        state = self._text_state
        state[0] |= 1
        self._map[_TEXTS_AT + 16 : _TEXTS_AT + 16 + len(written)] = written
        state[1] = len(written)
        state[0] += 1

    def texts(self) -> dict[int, tuple[str, ...]]:
        """By places. None where whoever was writing them was killed."""
        for _ in range(_MOST_READS):
            version, size = self._text_state
            data = self._map[_TEXTS_AT + 16 : _TEXTS_AT + 16 + size]
            if version % 2 == 0 and self._text_state[0] == version:
                return msgspec.json.decode(data or b"{}", type=dict[int, tuple[str, ...]])
        return {}

    def entries(self) -> list[_Entry]:
        lines = self._map[8 : 8 + self._used[0]].splitlines()
        return [msgspec.json.decode(line, type=_Entry) for line in lines]


class Registry:
    """The metrics of a process."""

    def __init__(self, numbers: Numbers | None = None) -> None:
        self.numbers = numbers or Numbers()
        self._all: tuple[Numbers, ...] = (self.numbers,)
        self._families: dict[str, _Family] = {}
        self._other_names: dict[str, str] = {}
        self.prometheus = CollectorRegistry()
        self.prometheus.register(self)

    def show(self, others: Iterable[Numbers]) -> None:
        """The page has the sums with these from now on."""
        self._all = (*self._all, *others)

    def show_as(self, name: str, other_name: str) -> None:
        """The page has a metric's numbers under another name, too."""
        self._other_names[other_name] = name

    def add(self, family: _Family) -> None:
        self._families[family.name] = family

    def collect(self) -> Iterable[Metric]:
        """For `prometheus_client`."""
        sums: dict[str, dict[tuple[str, ...], list[float]]] = {}
        for numbers in self._all:
            texts = numbers.texts()
            for one in numbers.entries():
                labels = one.labels
                if isinstance(self._families.get(one.name), Info):
                    if not texts.get(one.offset):
                        continue
                    labels = (*labels, *texts[one.offset])
                found = numbers.values[one.offset : one.offset + one.count].tolist()
                before = sums.setdefault(one.name, {}).get(labels, [0.0] * one.count)
                sums[one.name][labels] = [a + b for a, b in zip(before, found, strict=True)]
        for name, family in self._families.items():
            metric = family.metric()
            for labels, values in sorted(sums.get(self._other_names.get(name, name), {}).items()):
                family.add_to(metric, labels, values)
            yield metric


class _Family:
    """A metric with its label names; `labels` has the one for their values."""

    num_values = 1

    def __init__(
        self, name: str, text: str, labelnames: Sequence[str] = (), registry: Registry | None = None
    ) -> None:
        assert registry is not None
        self.name = name
        self.text = text
        self.labelnames = tuple(labelnames)
        self._registry = registry
        self._children: dict[tuple[str, ...], Any] = {}
        registry.add(self)

    def _key(self, values: Sequence[str], named: dict[str, str]) -> tuple[str, ...]:
        return tuple(values) if values else tuple(named[name] for name in self.labelnames)

    def _place(self, key: tuple[str, ...]) -> tuple[memoryview[float], int]:
        numbers = self._registry.numbers
        return numbers.values, numbers.place(self.name, key, self.num_values)

    def metric(self) -> Any:
        raise NotImplementedError

    def add_to(self, metric: Any, labels: tuple[str, ...], values: list[float]) -> None:
        metric.add_metric(labels, values[0])


class _Number:
    """One number."""

    def __init__(self, values: memoryview[float], place: int) -> None:
        self._values = values
        self._at = place

    def inc(self, amount: float = 1.0) -> None:
        self._values[self._at] += amount


class _Settable(_Number):
    def set(self, value: float) -> None:
        self._values[self._at] = value


class Counter(_Family):
    """Grows."""

    def labels(self, *values: str, **named: str) -> _Number:
        key = self._key(values, named)
        child = self._children.get(key)
        if child is None:
            child = self._children[key] = _Number(*self._place(key))
        return child

    def metric(self) -> CounterMetricFamily:
        return CounterMetricFamily(self.name, self.text, labels=self.labelnames)


class Gauge(_Family):
    """Goes up and down. Of several processes one sets it: the page has the sum."""

    def labels(self, *values: str, **named: str) -> _Settable:
        return _Settable(*self._place(self._key(values, named)))

    def metric(self) -> GaugeMetricFamily:
        return GaugeMetricFamily(self.name, self.text, labels=self.labelnames)


class Info(_Family):
    """Texts that change, as the last labels of a number."""

    def show(self, labels: tuple[str, ...], texts: tuple[str, ...], value: float) -> None:
        """No texts: it is not shown until there are some again."""
        numbers = self._registry.numbers
        place = numbers.place(self.name, labels, self.num_values)
        if self._children.get(labels, ()) != texts:
            self._children[labels] = texts
            numbers.set_texts(place, texts)
        numbers.values[place] = value

    def metric(self) -> GaugeMetricFamily:
        return GaugeMetricFamily(self.name, self.text, labels=self.labelnames)


class Histogram(_Family):
    """Counts values by size."""

    def __init__(
        self,
        name: str,
        text: str,
        labelnames: Sequence[str] = (),
        registry: Registry | None = None,
        buckets: Sequence[float] = (),
    ) -> None:
        self._bounds = tuple(map(float, buckets))
        self.num_values = len(self._bounds) + 2
        super().__init__(name, text, labelnames, registry)

    def labels(self, *values: str, **named: str) -> _Sizes:
        return _Sizes(*self._place(self._key(values, named)), self._bounds)

    def metric(self) -> HistogramMetricFamily:
        return HistogramMetricFamily(self.name, self.text, labels=self.labelnames)

    def add_to(self, metric: Any, labels: tuple[str, ...], values: list[float]) -> None:
        *counts, total = values
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        so_far = 0.0
        buckets = []
        for name, count in zip(names, counts, strict=True):
            so_far += count
            buckets.append((name, so_far))
        metric.add_metric(labels, buckets, total)


class _Sizes:
    """One histogram: a number for each bucket, one for what is larger, and the sum."""

    def __init__(self, values: memoryview[float], place: int, bounds: tuple[float, ...]) -> None:
        self._values = values
        self._at = place
        self._bounds = bounds
        self._sum = place + len(bounds) + 1

    def observe(self, value: float, count: int = 1) -> None:
        """So many times this value."""
        values = self._values
        values[self._at + bisect_left(self._bounds, value)] += count
        values[self._sum] += value * count
