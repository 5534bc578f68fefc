"""Which tensors travel together in one broadcast from a trainer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

PACKED_BYTES = 2**30
"""Of such a broadcast, about: vLLM's packed_buffer_size_bytes."""


def packs(sizes: Sequence[int], packed_bytes: int) -> Iterator[slice]:
    """Which tensors of so many bytes travel together, as vLLM packs them: until they are more than
    `packed_bytes`.
    """
    start, total = 0, 0
    for place, size in enumerate(sizes):
        total += size
        if total > packed_bytes:
            yield slice(start, place + 1)
            start, total = place + 1, 0
    if start < len(sizes):
        yield slice(start, len(sizes))
