"""Adapters in a GPU's memory: which lies in which slot, and where kernels find its numbers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton.language as tl
from torch import Tensor

from quire.errors import UnsupportedModelError
from quire.kernels.low_rank import LowRank, LowRankPart, PackedLowRank

MAX_RANKS = 1024
"""The most ranks of all modules together that are packed in one product."""
RANK_TILE = 16
"""Ranks that kernels multiply with B at a time: B's rows are filled up to a multiple."""
_RANKS_AT_ONCE = 4
"""Neighbouring ranks whose sums a thread reads as one number of 16 bytes."""
SUMS_STRIDE = MAX_RANKS + RANK_TILE
"""From one row's sums to the next one's: tiles of ranks may end behind the last rank."""
FIELDS, PART_FIELDS = tl.constexpr(5), tl.constexpr(7)
"""Numbers of a slot, and of a part: see `TritonTable`."""


def _with_aligned_ranks(low_rank: LowRank) -> LowRank:
    """With parts that begin at multiples of _RANKS_AT_ONCE; A has rows of zeros between them."""
    if all(part.first_rank % _RANKS_AT_ONCE == 0 for part in low_rank.parts):
        return low_rank
    a, scale, parts, places = [], [], [], {}
    next_rank = 0
    for part in low_rank.parts:
        ranks = part.b.shape[1]
        taken = slice(part.first_rank, part.first_rank + ranks)
        if (part.first_rank, ranks) not in places:
            places[part.first_rank, ranks] = next_rank
            padding = -ranks % _RANKS_AT_ONCE
            a.append(F.pad(low_rank.a[taken], (0, 0, 0, padding)))
            scale.append(F.pad(low_rank.scale[taken], (0, padding)))
            next_rank += ranks + padding
        parts.append(part._replace(first_rank=places[part.first_rank, ranks]))
    return LowRank(torch.cat(a), torch.cat(scale), tuple(parts))


class TritonLowRank:
    """A `LowRank`, packed, in host memory; a table copies it to the device."""

    def __init__(self, low_rank: LowRank) -> None:
        ranks, dtype = low_rank.a.shape[0], low_rank.a.dtype
        low_rank = _with_aligned_ranks(low_rank)
        if len(low_rank.a) > MAX_RANKS:
            raise UnsupportedModelError(
                f"an adapter has ranks of {ranks} together for one product; on a GPU there may be {MAX_RANKS}: "
                'use a smaller rank, or device="cpu"'
            )
        self.a = low_rank.a.cpu().contiguous()
        # A tile of ranks that begins before the last may end behind it.
        self.scale = F.pad(low_rank.scale.float().cpu(), (0, RANK_TILE)).contiguous()
        self.ranks = [part.b.shape[1] for part in low_rank.parts]
        self.parts = [self._part(part, dtype) for part in low_rank.parts]

    @staticmethod
    def _part(part: LowRankPart, dtype: torch.dtype) -> LowRankPart:
        b = F.pad(part.b.to("cpu", dtype), (0, -part.b.shape[1] % RANK_TILE)).contiguous()
        if part.factor is None or part.offset is None:
            return part._replace(b=b)
        factor, offset = part.factor.float().cpu(), part.offset.float().cpu()
        return part._replace(b=b, factor=factor.contiguous(), offset=offset.contiguous())

    @property
    def nbytes(self) -> int:
        return LowRank(self.a, self.scale, tuple(self.parts)).nbytes


class TritonTable:
    """The slots of one product, where kernels read them: of each the addresses of A and of the
    ranks' factors, the number of ranks, the number of parts and their address; of each part its
    first output, their number, its first rank, their number, and addresses.
    """

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self.slots = torch.zeros(num_slots, FIELDS.value, dtype=torch.int64, device=device)
        self._kept: dict[int, list[Tensor]] = {}
        self.dtype: torch.dtype | None = None
        """Of the matrices; None before there are any."""

    def put(self, slot: int, packed: PackedLowRank | None) -> None:
        """Copies are made in the order of the stream: steps before this one still read the old."""
        device = self.slots.device
        numbers, kept = [0] * FIELDS.value, []

        def address(tensor: Tensor | None) -> int:
            if tensor is None:
                return 0
            kept.append(tensor.to(device))
            return kept[-1].data_ptr()

        if packed is not None:
            assert isinstance(packed, TritonLowRank)
            self.dtype = packed.a.dtype
            parts = [
                [part.first, len(part.b), part.first_rank, ranks]
                + [address(one) for one in (part.b, part.factor, part.offset)]
                for part, ranks in zip(packed.parts, packed.ranks, strict=True)
            ]
            listed = torch.tensor(parts, dtype=torch.int64)
            addresses = [address(one) for one in (packed.a, packed.scale, listed)]
            numbers = [addresses[0], addresses[1], len(packed.a), len(parts), addresses[2]]
        self.slots[slot] = torch.tensor(numbers).to(device)
        self._kept[slot] = kept
