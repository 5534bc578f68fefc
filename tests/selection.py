"""Which tests `make test` runs, and which of them share a worker.

`make test` leaves out what is marked `slow`. `few(count)` on a test with parameters keeps that
many of its cases, evenly spread, and makes the others slow. `make test-all` runs what was left out,
and tests that search once more, for longer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import pytest

SHARED_SERVERS = ("shared_server", "shared_small_server", "scripted", "keyed")
"""Fixtures with a server for the whole session: their tests run in one worker, which starts it."""


def mark_slow_cases(items: Sequence[pytest.Item]) -> None:
    """What `few` leaves out becomes slow. Cases that are slow for another reason don't count."""
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("few") and not item.get_closest_marker("slow"):
            cases[item.nodeid.partition("[")[0]].append(item)
    for several in cases.values():
        mark = several[0].get_closest_marker("few")
        assert mark is not None
        kept = evenly_spread(len(several), *mark.args)
        for place, item in enumerate(several):
            if place not in kept:
                item.add_marker(pytest.mark.slow)


def evenly_spread(count: int, wanted: int) -> set[int]:
    """That many of `count` places, the first and the last among them if there are two."""
    if wanted >= count:
        return set(range(count))
    return {place * (count - 1) // max(1, wanted - 1) for place in range(wanted)}


def share_workers(items: Sequence[pytest.Item]) -> None:
    """With `--dist loadgroup`: tests of one server go to one worker, and those of one file, whose
    fixtures they share.
    """
    for item in items:
        names = getattr(item, "fixturenames", ())
        shared = [name for name in SHARED_SERVERS if name in names]
        group = shared[0] if shared else item.nodeid.partition("::")[0]
        item.add_marker(pytest.mark.xdist_group(group))
