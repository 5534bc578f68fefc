"""Ways to damage a file, for Hypothesis; and the promise every reader must keep about what comes of
it.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path

import torch
from hypothesis import strategies as st

from quire.errors import QuireError
from quire.models.load import open_checkpoint

Damage = Callable[[bytes], bytes]

MAX_PEAK_BYTES = 4 * 2**20
"""More than reading an intact little file takes; far less than an absurd count would ask for."""


def _flip(place: int, mask: int) -> Damage:
    def damage(data: bytes) -> bytes:
        at = place % len(data)
        return data[:at] + bytes([data[at] ^ mask]) + data[at + 1 :]

    return damage


def _overwrite(place: int, value: int, width: int) -> Damage:
    def damage(data: bytes) -> bytes:
        at = place % len(data)
        return (data[:at] + value.to_bytes(8, "little")[:width] + data[at + width :])[: len(data)]

    return damage


def _truncate(place: int) -> Damage:
    return lambda data: data[: place % len(data)]


def _grow(extra: bytes) -> Damage:
    return lambda data: data + extra


_absurd = st.sampled_from([0, 1, 2**15, 2**31 - 1, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1])


def damages(header_bytes: int) -> st.SearchStrategy[list[Damage]]:
    """One to three kinds of damage, most of them within the header."""
    place = st.one_of(st.integers(0, header_bytes - 1), st.integers(0, 2**20))
    one = st.one_of(
        st.builds(_flip, place, st.integers(1, 255)),
        st.builds(
            _overwrite,
            place,
            st.one_of(_absurd, st.integers(0, 2**64 - 1)),
            st.sampled_from([1, 4, 8]),
        ),
        st.builds(_truncate, place),
        st.builds(_grow, st.binary(min_size=1, max_size=40)),
    )
    return st.lists(one, min_size=1, max_size=3)


def check_open_and_read(path: Path) -> bool:
    """Opens and reads all; whether that worked. Anything but success or a QuireError is let
    through, and so is a reader that asks for more memory than the file can justify.
    """
    tracemalloc.start()
    try:
        checkpoint = open_checkpoint(path)
        for name, info in checkpoint.tensors.items():
            assert info.num_bytes <= info.file.stat().st_size
            assert checkpoint.read(name).dtype == torch.float32
    except QuireError:
        return False
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < MAX_PEAK_BYTES, f"reading the file took {peak} bytes"
    return True
