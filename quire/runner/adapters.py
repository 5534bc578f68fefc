"""Adapters on the device: which lies in which slot, and which request row has which.

Adapters are kept in host memory by the digest of their content. A slot is a place in the tables of
all products of the decoder; a request's adapter gets one when the request is admitted. The scheduler
never runs requests of more different adapters than there are slots, so one is always free, or holds
an adapter that no running request has: the one that was needed least recently makes room.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from quire.errors import EngineError, UnsupportedModelError
from quire.kernels.ops import Int32Array
from quire.models.adapters import Adapter, AdapterLoader
from quire.models.decoder import Decoder
from quire.step import Step

NO_ADAPTER = -1
NO_ADAPTERS = (
    "this engine takes no adapters: it was started with max_loras=0, or its kernels have none: use "
    "device=cpu"
)


class AdapterSlots:
    """The adapters of one device."""

    def __init__(
        self,
        decoder: Decoder,
        num_slots: int,
        max_num_seqs: int,
        loader: AdapterLoader,
        room: int | None = None,
    ) -> None:
        self.loader = loader
        self.num_slots = num_slots
        self.room = room
        """Bytes of a GPU for all in slots together; None: there they take no further memory. Whoever
        loads adapters keeps it (`AdapterRegistry`): the largest that are loaded fill all slots at once.
        """
        self._decoder = decoder
        self._linears = decoder.linears
        for linear in self._linears.values():
            linear.take_adapters(decoder.kernels, num_slots)
        self._adapters: dict[str, Adapter] = {}
        self._slots: OrderedDict[str, int] = OrderedDict()
        """By digest, the least recently needed first."""
        self._free = list(reversed(range(num_slots)))
        self._row_slots = np.full(max_num_seqs, NO_ADAPTER, np.int32)
        self._owners: dict[int, str] = {}
        """By request row, the digest of its adapter."""
        self._not_captured: set[int] = set()
        """Slots: see `are_captured`."""
        self.num_swaps = 0
        """How often an adapter was put into a slot."""

    @property
    def digests(self) -> frozenset[str]:
        return frozenset(self._adapters)

    @property
    def depends_on_weights(self) -> bool:
        """Whether some adapter was made for the base model's present weights (DoRA)."""
        return any(adapter.is_dora for adapter in self._adapters.values())

    @property
    def on_device(self) -> tuple[str, ...]:
        """Digests of those in slots, the least recently needed first."""
        return tuple(self._slots)

    def load(self, folder: Path, adapter: Adapter | None = None) -> Adapter:
        """Reads an adapter, unless that was done before; it stays until it is removed."""
        adapter = self.loader.load(folder) if adapter is None else adapter
        if adapter.is_dora and not self._decoder.has_files_weights:
            raise UnsupportedModelError(
                f"{folder}: use_dora divides by norms of the weights in the model's files, but others were put in "
                "their place since: load the model from files that have the present ones"
            )
        return self._adapters.setdefault(adapter.digest, adapter)

    def remove(self, digest: str) -> None:
        """Lets go of an adapter that no request has."""
        self._adapters.pop(digest, None)
        if digest in self._slots and digest not in self._owners.values():
            self._vacate(digest)

    def apply(self, step: Step) -> None:
        """Rows that a step gives up lose their slots, those of admitted requests get theirs."""
        self._release(one.row for one in step.preempted)
        self._release(one.row for one in step.finished)
        for admission in step.admitted:
            self._release((admission.row,))
            digest = admission.resolved.adapter
            if digest:
                self._owners[admission.row] = digest
                self._row_slots[admission.row] = self._slot_of(digest)

    def of_rows(self, request_rows: Int32Array) -> Int32Array | None:
        """The slot of each request row, -1 where it has no adapter; None if none of them has one."""
        if not self._owners:
            return None
        slots = self._row_slots[request_rows]
        return slots if (slots != NO_ADAPTER).any() else None

    def are_captured(self, slots: Int32Array) -> bool:
        """Whether graphs and recorded steps compute these slots' adapters: see `Adapter.is_captured`."""
        return self._not_captured.isdisjoint(slots.tolist())

    @property
    def not_captured(self) -> frozenset[int]:
        """The slots whose adapters they don't compute."""
        return frozenset(self._not_captured)

    def of_row(self, row: int) -> int:
        return int(self._row_slots[row])

    def _release(self, rows: Iterable[int | None]) -> None:
        for row in rows:
            if row is not None and row in self._owners:
                del self._owners[row]
                self._row_slots[row] = NO_ADAPTER

    def _slot_of(self, digest: str) -> int:
        if digest in self._slots:
            self._slots.move_to_end(digest)
            return self._slots[digest]
        adapter = self._adapters.get(digest)
        if adapter is None:
            raise EngineError(f"the adapter {digest[:12]} was unloaded while a request had it")
        if not self._free:
            used = set(self._owners.values())
            self._vacate(next(other for other in self._slots if other not in used))
        slot = self._slots[digest] = self._free.pop()
        for name, linear in self._linears.items():
            linear.put_adapter(slot, adapter.products.get(name))
        if not adapter.is_captured:
            self._not_captured.add(slot)
        self.num_swaps += 1
        return slot

    def _vacate(self, digest: str) -> None:
        slot = self._slots.pop(digest)
        for linear in self._linears.values():
            linear.put_adapter(slot, None)
        self._not_captured.discard(slot)
        self._free.append(slot)
