"""Programmatic dependent launch (PDL): a kernel starts while the one before it is still finishing.

Such a kernel first allows its own successor to start, then does work that only touches constants
(loading weights into the cache), and waits for the kernel before it to be complete before it reads
or writes anything else. So all reads and writes still happen in the order of the launches.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
"""Whether kernels run in Triton's interpreter on the CPU (for tests)."""

USE_PDL = (
    not INTERPRETED and torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
)
"""Whether the GPU supports PDL: from Hopper on."""


def _has_gluon() -> bool:
    if INTERPRETED:
        return False
    try:
        from triton.experimental.gluon.language.nvidia.hopper import (
            async_copy,  # noqa: F401
            mma_v2,  # noqa: F401
            warpgroup_mma,  # noqa: F401
        )
    except ImportError:
        return False
    return True


HAS_GLUON = _has_gluon()
"""Whether this Triton has Gluon, its lower level, in which some kernels are written."""

ROUND_ALWAYS: dict[str, Any] = {} if INTERPRETED else {"enable_fp_fusion": False}
"""Launch options of kernels that compute the same number by different code and must agree to the
bit: the compiler may not fuse a multiplication and an addition, which would round once instead of
twice, in only one of them.
"""

LAUNCH: dict[str, Any] = {"launch_pdl": True} if USE_PDL else {}
"""Keyword arguments of every launch."""


@cache
def num_multiprocessors(device: torch.device) -> int:
    return (
        torch.cuda.get_device_properties(device).multi_processor_count
        if device.type == "cuda"
        else 1
    )


@triton.jit
def begin(PDL: tl.constexpr, SHARES_INPUT: tl.constexpr = False):
    """The first lines of a kernel: let the next one start, then wait for the one before. With
    SHARES_INPUT the other way round: the next one may read this one's input before it waits.
    """
    if SHARES_INPUT:
        wait_for_previous(PDL)
        let_next_start(PDL)
    else:
        let_next_start(PDL)
        wait_for_previous(PDL)


@triton.jit
def let_next_start(PDL: tl.constexpr):
    """`begin` in two halves, for kernels that read something in between which no kernel of this step
    writes, or one that ended before another began that was not launched early.
    """
    if PDL:
        cuda.gdc_launch_dependents()


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """At least one program of each kernel must call it: the next one waits for this kernel only, and
    by this for all before it.
    """
    if PDL:
        cuda.gdc_wait()
