"""Tests that search (many seeds, many drawn examples) have three lengths: `make test` runs the
quick one, by setting QUIRE_QUICK_TESTS, `make test-all` the short one, and `make soak` the long
one, by setting QUIRE_LONG_TESTS. Mark such a test with `pytest.mark.soak`, so that the last two
find it.
"""

from __future__ import annotations

import os

IS_LONG = bool(os.environ.get("QUIRE_LONG_TESTS"))
IS_QUICK = bool(os.environ.get("QUIRE_QUICK_TESTS")) and not IS_LONG


def short_or_long(short: int, long: int, quick: int | None = None) -> int:
    """How many seeds or examples to try; `quick` for `make test`, where that differs from `short`."""
    if IS_LONG:
        return long
    return short if quick is None or not IS_QUICK else quick


def examples(count: int) -> int:
    """How many Hypothesis draws, for `max_examples`: 60 at most in `make test`."""
    return min(count, 60) if IS_QUICK else count
