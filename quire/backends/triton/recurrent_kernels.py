"""The kernels with those of layers with a state, which no card has run yet."""

from __future__ import annotations

import torch

from quire.backends.triton import convolution, gated_norm, recurrent
from quire.backends.triton.kernels import TritonKernels
from quire.backends.triton.untried import is_on
from quire.kernels.recurrent import ConvolutionSpec, RecurrentSpec


class RecurrentTritonKernels(TritonKernels):
    """Their steps are captured in graphs (docs/recurrent.md)."""

    convolve_ = staticmethod(convolution.convolve_)
    recur_ = staticmethod(recurrent.recur_)
    gated_norm = staticmethod(gated_norm.gated_norm)

    def captures(self, part: object) -> bool:
        return isinstance(part, (ConvolutionSpec, RecurrentSpec)) or super().captures(part)


def triton_kernels(dtype: torch.dtype = torch.bfloat16) -> TritonKernels:
    """Those to use."""
    return RecurrentTritonKernels(dtype) if is_on("recurrent") else TritonKernels(dtype)
