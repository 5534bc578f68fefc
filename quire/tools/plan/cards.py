"""A GPU's kernels where there is no such GPU: what they can do, by the rules that decide it there."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.backends.triton.attention_work import SPLIT
from quire.backends.triton.packed_size import packed_bytes
from quire.kernels.formats import Format, gpu_computes
from quire.kernels.ops import AttentionSpec
from quire.kernels.recurrent import RecurrentSpec
from quire.kernels.reference import ReferenceKernels


class CardKernels(ReferenceKernels):
    """Nothing is ever computed with these: they answer as those for a GPU of a compute capability
    would.
    """

    name = "planned"
    keys_at_once = SPLIT

    def __init__(self, capability: tuple[int, int], dtype: torch.dtype) -> None:
        self.capability = capability
        self._dtype = dtype

    def computes(self, format: Format) -> bool:
        return self._dtype != torch.float32 and gpu_computes(format, self.capability)

    def has_kernels_for(self, mixer: object) -> bool:
        if isinstance(mixer, RecurrentSpec):
            return not (mixer.gate_rank or mixer.norm.sigmoid)
        return not isinstance(mixer, AttentionSpec) or mixer.chunk is None

    def packed_bytes(self, parts: Sequence[tuple[Format, tuple[int, ...]]]) -> int:
        return packed_bytes(parts, self._dtype, self.capability)
