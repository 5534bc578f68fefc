"""How kernels follow each other: with programmatic dependent launch, the next kernel starts while this one ends.

A kernel that is launched so may begin before the kernel before it has finished. It says at once that its own
successor may start too, does what touches nothing but constants (fetching weights into the cache), and waits
before it reads or writes anything else. Each kernel waits for the one before it to be complete, so the order
of everything that is read and written is the order of the launches.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
"""Whether kernels run in Triton's interpreter on the CPU (for tests)."""

USE_PDL = not INTERPRETED and torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
"""Whether the GPU can: from Hopper on."""


def _has_gluon() -> bool:
    if INTERPRETED:
        return False
    try:
        from triton.experimental.gluon.language.nvidia.hopper import async_copy, mma_v2, warpgroup_mma  # noqa: F401
    except ImportError:
        return False
    return True


HAS_GLUON = _has_gluon()
"""Whether this Triton has its lower level, in which some kernels for small batches are written."""

ROUND_ALWAYS: dict[str, Any] = {} if INTERPRETED else {"enable_fp_fusion": False}
"""For kernels that compute the same number in different code and must agree to the bit: the compiler may not merge a
multiplication with an addition, which rounds once instead of twice, in the one and not in the other."""

LAUNCH: dict[str, Any] = {"launch_pdl": True} if USE_PDL else {}
"""Keyword arguments of every launch."""


@triton.jit
def begin(PDL: tl.constexpr):
    """The first lines of a kernel: let the next one start, then wait for the one before."""
    if PDL:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
