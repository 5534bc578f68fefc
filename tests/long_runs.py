"""Tests that search (many seeds, many drawn examples) have two lengths: `make test` runs the short
one, `make soak` the long one, by setting QUIRE_LONG_TESTS. Mark such a test with
`pytest.mark.soak`, so that `make soak` finds it.
"""

from __future__ import annotations

import os

IS_LONG = bool(os.environ.get("QUIRE_LONG_TESTS"))


def short_or_long(short: int, long: int) -> int:
    """How many seeds or examples to try."""
    return long if IS_LONG else short
