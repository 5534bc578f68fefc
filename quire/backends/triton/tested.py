"""Kernels for special cases are tested before they are used: once, on small inputs, against the kernels
that they replace. They are not used with a Triton that can't compile them, or on a GPU where they give
other bits.

The first call of such a test must not be during a graph capture, nor while kernels are only compiled.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from quire.backends.triton.launch import HAS_GLUON
from quire.process.compile_together import compile_together

logger = logging.getLogger(__name__)


def has_gluon(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether kernels in Gluon, Triton's young lower level, may be used for this device and dtype."""
    return HAS_GLUON and device.type == "cuda" and dtype in (torch.float16, torch.bfloat16)


def is_exact(what: str, compare: Callable[[], bool]) -> bool:
    """Whether kernels compile here and have the bits of those that they replace. `compare` launches
    all of them, whatever comes of the first: so all are compiled together.
    """
    try:
        compile_together(compare)
        is_same = compare()
    except Exception as error:  # whatever a compiler of another version says
        logger.warning("%s take longer, as a kernel for them doesn't compile here: %s", what, error)
        return False
    if not is_same:
        logger.warning("%s take longer, as a kernel for them gives other bits on this GPU", what)
    return is_same


def random_numbers(*shape: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator(device).manual_seed(0)
    return torch.randn(*shape, device=device, generator=generator).to(dtype)
