"""Kernels that no card has run yet: an engine uses them only where a variable names them, so that who
has a card can test and time them. Without it nothing changes.
"""

from __future__ import annotations

import os

import torch

from quire.backends.triton import convolution, gated_norm, recurrent
from quire.backends.triton.kernels import TritonKernels
from quire.errors import DeviceError
from quire.kernels.recurrent import ConvolutionSpec, RecurrentSpec

VARIABLE = "QUIRE_UNTRIED_KERNELS"
"""Names with commas between them."""


class RecurrentTritonKernels(TritonKernels):
    """`recurrent`: layers with a state, whose steps are captured in graphs (docs/recurrent.md)."""

    convolve_ = staticmethod(convolution.convolve_)
    recur_ = staticmethod(recurrent.recur_)
    gated_norm = staticmethod(gated_norm.gated_norm)

    def captures(self, part: object) -> bool:
        return isinstance(part, (ConvolutionSpec, RecurrentSpec)) or super().captures(part)


_KINDS = {"recurrent": RecurrentTritonKernels}


def triton_kernels(dtype: torch.dtype = torch.bfloat16) -> TritonKernels:
    """Those to use."""
    wanted = {name.strip() for name in os.environ.get(VARIABLE, "").split(",")} - {""}
    if unknown := wanted - _KINDS.keys():
        raise DeviceError(
            f"{VARIABLE} names {', '.join(sorted(unknown))}, but there are only: {', '.join(_KINDS)}."
        )
    (kind,) = (_KINDS[name] for name in wanted) if wanted else (TritonKernels,)
    return kind(dtype)
