"""From attention's output to the end of a layer: the definition of `Kernels.finish_layer`, by the
operations that it consists of.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from quire.kernels.ops import LayerEnd


def finish_layer(
    self: Any, attended: Tensor, residual: Tensor, end: LayerEnd
) -> tuple[Tensor, Tensor]:
    """`self`: the kernels, whose method this is."""
    output = self.linear(attended, end.output)
    normed, total = self.add_rms_norm(output, residual, end.norm, end.eps)
    return self.linear(self.linear_gated(normed, end.up, None, end.activation), end.down), total


class LayerEnds:
    """A part of `ReferenceKernels`."""

    finish_layer = finish_layer

    def prepare_layer_end(self, end: LayerEnd) -> None:
        """There is nothing to test."""
