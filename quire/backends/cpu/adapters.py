"""Adapters in the layout of `adapters.cpp`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.backends.cpu.strided import with_whole_rows
from quire.kernels.low_rank import LowRank, LowRankPart, LowRankTable, PackedLowRank

_STRIP = 16
"""Ranks whose A lies together."""
_PANEL = 32
"""Outputs whose B lies together."""
_SLOT_NUMBERS, _PART_NUMBERS = 5, 7
"""Eight bytes each of the C++ structs."""


class CpuLowRank:
    """A `LowRank`, packed: what the C++ structs of one slot hold."""

    def __init__(self, low_rank: LowRank) -> None:
        (ranks, depth), dtype = low_rank.a.shape, low_rank.a.dtype
        padding, step = -ranks % _STRIP, 2 if dtype == torch.bfloat16 else 1
        filled = F.pad(low_rank.a, (0, -depth % step, 0, padding))
        a = filled.view((ranks + padding) // _STRIP, _STRIP, -1, step).transpose(1, 2).contiguous()
        scale = F.pad(low_rank.scale.float(), (0, padding)).contiguous()
        self._tensors = [a, scale]
        numbers = [self._part(part, dtype) for part in low_rank.parts]
        parts = torch.tensor(numbers, dtype=torch.int64).view(-1, _PART_NUMBERS)
        self._tensors.append(parts)
        self.slot = torch.tensor(
            [a.data_ptr(), scale.data_ptr(), ranks + padding, len(numbers), parts.data_ptr()]
        )

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors)

    def _part(self, part: LowRankPart, dtype: torch.dtype) -> list[int]:
        count, rank = part.b.shape
        side = 2 if dtype == torch.bfloat16 else 1
        filled = F.pad(part.b.to(dtype), (0, 0, 0, -count % _PANEL))
        made = [filled.view(-1, side, _PANEL // side, rank).permute(0, 3, 2, 1).contiguous()]
        if part.factor is not None and part.offset is not None:
            made += [
                F.pad(one.float(), (0, -count % _PANEL)).contiguous()
                for one in (part.factor, part.offset)
            ]
        self._tensors += made
        pointers = [tensor.data_ptr() for tensor in made] + [0, 0]
        return [part.first, count, part.first_rank, rank, *pointers[:3]]


class CpuTable:
    """The slots of one product, where C++ reads them."""

    def __init__(self, num_slots: int) -> None:
        self.slots = torch.zeros(num_slots, _SLOT_NUMBERS, dtype=torch.int64)
        self._kept: dict[int, CpuLowRank] = {}

    def put(self, slot: int, packed: PackedLowRank | None) -> None:
        self.slots[slot] = 0
        self._kept.pop(slot, None)
        if packed is not None:
            assert isinstance(packed, CpuLowRank)
            self._kept[slot] = packed
            self.slots[slot] = packed.slot


def low_rank_arguments(
    out: Tensor, x: Tensor, slots: Tensor, table: LowRankTable
) -> tuple[Tensor, Tensor, CpuTable]:
    """x in whole rows, the slots as C++ reads them, and the table."""
    assert isinstance(table, CpuTable)
    if out.stride(1) != 1 or slots.dtype != torch.int32 or out.dtype != x.dtype:
        raise ValueError(f"out {out.dtype} {out.stride()}, x {x.dtype}, slots {slots.dtype}")
    return with_whole_rows(x), slots.contiguous(), table
