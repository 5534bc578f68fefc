"""A Triton kernel that does nothing but read: what it reaches is the device's read bandwidth."""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK = 16_384
"""Numbers one program reads: 64 KiB, enough loads in flight to hide the memory's latency."""


@triton.jit  # type: ignore[untyped-decorator]
def read_blocks(memory, found, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """Writes the largest of each block's int32 numbers, so that no load can be left out."""
    program = tl.program_id(0).to(tl.int64)
    values = tl.load(memory + program * block + tl.arange(0, block))
    tl.store(found + program, tl.max(values, 0))
