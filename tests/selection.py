"""Which tests `make test` runs, and which of them share a process.

`make test` leaves out what is marked `slow`. `few(count)` on a test with parameters keeps that
many of its cases, evenly spread, and makes the others slow. `make test-all` runs what was left out,
and tests that search once more, for longer.

The tests of one file share a process (tests/processes.py), and so do files whose tests talk to the
same server.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[1]
_SHARED = re.compile(r"\b(shared_server|shared_small_server|scripted|keyed|server): Server\b")
"""Fixtures of tests/server/conftest.py with a server for the whole session, as tests ask for them."""


LONG = frozenset(
    f"tests/{name}.py"
    for name in (
        "engine/test_fair_shares",
        "engine/test_simulate",
        "kernels/test_instruction_sets",
        "ladder/test_rungs",
        "models/test_gguf_file",
        "parallel/test_engine",
        "parallel/test_server",
        "parallel/test_weights",
        "runner/test_other_device",
        "server/test_batch_api",
        "server/test_batches",
        "server/test_weight_updates",
        "speculate/test_prediction",
        "speculate/test_same_answers",
        "test_adapters",
        "test_adapters_exactness",
        "test_exactness",
        "test_examples",
        "test_llm",
        "test_long_chats",
        "test_many_updates",
        "test_nano_vllm",
        "test_quantized_exactness",
        "train/test_updates",
        "verify/test_faults",
    )
)
"""Files with tests of 25 s and more in `make test-all`, by `--durations=0`. Where single tests are given
out, theirs come first, so that nobody is at a long one when all others are done.
"""


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


@cache
def worker_group(path: str) -> str:
    """Files with the same group are tested by one process: the shared server that its tests name
    first, or the file itself.
    """
    text = (_ROOT / path).read_text()
    found = _SHARED.search(text)
    if found is None or "def server(" in text:  # one of its own
        return path
    return found[1].replace("shared_", "")
