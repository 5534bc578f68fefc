"""Adapters by name: what callers ask for becomes the digest of its content, which the engine knows.

A name stands for a folder. The adapter is read when it is first needed, and again when its files
have changed. Loaded adapters share a budget of host memory: when it is full, those that no request
has leave, the least recently used first, and are read again when they are asked for.
"""

from __future__ import annotations

import heapq
import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from quire.checkpoints.adapter_files import CONFIG_FILE, WEIGHTS_FILE
from quire.checkpoints.files import is_gguf
from quire.config import format_bytes
from quire.errors import (
    CapacityError,
    InvalidRequestError,
    ModelFormatError,
    NoRoomNowError,
    QuireError,
)
from quire.frontend.adapter_names import check_name
from quire.models.adapters import Adapter

logger = logging.getLogger(__name__)

MAX_NAMES = 10_000

Stamps = tuple[tuple[int, int, int], ...]
"""Of the files when they were read: what tells that they have changed."""


class ReadAdapter(NamedTuple):
    """An adapter that was read and is not in use yet."""

    adapter: Adapter
    stamps: Stamps
    """From before it was read: if files have changed meanwhile, the next request notices."""

    def is_current(self, path: Path) -> bool:
        """Whether the files are still those that were read."""
        return self.stamps == _stamps(path)


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """An adapter that was read."""

    name: str
    path: Path
    digest: str
    rank: int
    nbytes: int
    stamps: Stamps = field(repr=False)


class SlotMemory(NamedTuple):
    """Memory of a GPU for the adapters of running requests, which are copied there."""

    nbytes: int
    num_slots: int

    def holds(self, sizes: Iterable[int]) -> bool:
        """Whether adapters of these sizes fit, whichever of them are in slots."""
        return sum(heapq.nlargest(self.num_slots, sizes)) <= self.nbytes


class AdapterHolder(Protocol):
    """Whoever computes with adapters: a runner, or one on several ranks."""

    def read_adapter(self, folder: Path) -> Adapter:
        """Reads one and keeps nothing: any thread may do so."""

    def load_adapter(self, folder: Path, adapter: Adapter | None = None) -> Adapter:
        """Reads one, unless that was done before, and keeps it until it is removed."""

    def remove_adapter(self, digest: str) -> None: ...


class AdapterRegistry:
    """All names and what they stand for."""

    def __init__(
        self,
        holder: AdapterHolder,
        budget: int,
        in_use: Callable[[], frozenset[str]],
        refusal: str | None = None,
        slot_memory: SlotMemory | None = None,
    ) -> None:
        """`in_use` are the digests that live requests have; `refusal` says why adapters can't be
        computed here. `slot_memory`: None where slots take none.
        """
        self._holder = holder
        self._budget = budget
        self._in_use = in_use
        self._refusal = refusal
        self._slot_memory = slot_memory
        self._paths: dict[str, Path] = {}
        self._loaded: OrderedDict[str, LoadedAdapter] = OrderedDict()
        """By name, the least recently used first."""
        self._sizes: dict[str, int] = {}
        """By digest, of those that the holder has."""
        self.num_loads = 0
        self.num_evictions = 0

    @property
    def names(self) -> dict[str, Path]:
        """All that can be asked for, and their folders."""
        return dict(self._paths)

    @property
    def loaded(self) -> list[LoadedAdapter]:
        """Those in memory."""
        return list(self._loaded.values())

    @property
    def nbytes(self) -> int:
        return sum(self._sizes.values())

    def is_current(self, name: str, path: Path) -> bool:
        """Whether the folder under this name is in memory as it is on disk."""
        known = self._loaded.get(name)
        return known is not None and (known.path, known.stamps) == (path, _stamps(path))

    def read(self, path: Path) -> ReadAdapter:
        """Reads a folder for `add`; any thread may do so."""
        stamps = _stamps(path)
        self._check_size(path.name, stamps)
        return ReadAdapter(self._holder.read_adapter(path), stamps)

    def add(self, name: str, path: Path | str, read: ReadAdapter | None = None) -> LoadedAdapter:
        """Gives a name to a folder, which may have had another, and reads it, unless that was done
        just now.
        """
        check_name(name)
        if not isinstance(path, Path | str) or not str(path):
            raise InvalidRequestError(
                "lora_path", f"must be an adapter's folder or .gguf file, not {path!r}"
            )
        if name not in self._paths and len(self._paths) >= MAX_NAMES:
            raise CapacityError(f"there are {MAX_NAMES} adapters' names already: unload some")
        loaded = self._read(name, Path(path), read)
        self._paths[name] = loaded.path
        return loaded

    def remove(self, name: str) -> None:
        """Forgets a name. Requests that have its adapter end with it."""
        if name not in self._paths:
            raise InvalidRequestError("lora_name", f"there is no adapter {name!r}")
        del self._paths[name]
        self._loaded.pop(name, None)
        self.drop_unused()

    def digest_of(self, name: str) -> str:
        """What a name stands for now; it is in memory then."""
        path = self._paths.get(name)
        if path is None:
            raise InvalidRequestError("lora_name", f"there is no adapter {name!r}")
        return self._read(name, path).digest

    def resolve(self, request: Any) -> tuple[str, str]:
        """The name and the digest of a `LoRARequest`, Quire's or vLLM's, or of a name."""
        if isinstance(request, str):
            return request, self.digest_of(request)
        name = getattr(request, "lora_name", None) or getattr(request, "name", None)
        path = getattr(request, "lora_path", None) or getattr(request, "path", None)
        if not isinstance(name, str) or not isinstance(path, str | Path | None):
            raise InvalidRequestError(
                "lora_request", f"must be a LoRARequest or a name, not {request!r}"
            )
        if not path or self._paths.get(name) == Path(path):
            return name, self.digest_of(name)
        return name, self.add(name, path).digest

    def _check_size(self, name: str, stamps: Stamps) -> None:
        if self._refusal is not None:
            raise InvalidRequestError("lora_request", self._refusal)
        size = max(stamp[0] for stamp in stamps)
        if size > 2 * self._budget:  # float32 in files may be bfloat16 in memory, not less
            raise self._too_large(name, size)

    def _read(self, name: str, path: Path, read: ReadAdapter | None = None) -> LoadedAdapter:
        stamps = _stamps(path) if read is None else read.stamps
        self._check_size(name, stamps)
        known = self._loaded.get(name)
        if known is not None and (known.path, known.stamps) == (path, stamps):
            self._loaded.move_to_end(name)
            return known
        adapter = self._holder.load_adapter(path, None if read is None else read.adapter)
        is_new = adapter.digest not in self._sizes
        self._sizes[adapter.digest] = adapter.nbytes
        try:
            self._make_room(adapter.digest, name)
        except QuireError:
            if is_new:
                del self._sizes[adapter.digest]
                self._holder.remove_adapter(adapter.digest)
            raise
        self.num_loads += 1
        loaded = LoadedAdapter(name, path, adapter.digest, adapter.rank, adapter.nbytes, stamps)
        self._loaded[name] = loaded
        self._loaded.move_to_end(name)
        self.drop_unused()
        logger.info("adapter %s: rank %d, %s", name, adapter.rank, format_bytes(adapter.nbytes))
        return loaded

    def _make_room(self, digest: str, name: str) -> None:
        """Has adapters leave that no request has, until the rest fits into the budget, and as many
        as there are slots into the memory of these.
        """
        if self._fits(self._sizes.values()):
            return
        if not self._fits([self._sizes[digest]]):
            raise self._too_large(name, self._sizes[digest])
        used = self._in_use() | {digest}
        for other, one in list(self._loaded.items()):
            if one.digest in used:
                continue
            del self._loaded[other]
            self.num_evictions += 1
            self.drop_unused(keep=digest)
            if self._fits(self._sizes.values()):
                return
        raise self._too_large(name, self._sizes[digest])

    def _fits(self, sizes: Collection[int]) -> bool:
        slots = self._slot_memory
        return sum(sizes) <= self._budget and (slots is None or slots.holds(sizes))

    def drop_unused(self, keep: str = "") -> None:
        """Has the holder let go of content that no name stands for, and no request has."""
        wanted = {one.digest for one in self._loaded.values()} | {keep}
        gone = [digest for digest in self._sizes if digest not in wanted]
        used = self._in_use() if gone else frozenset()
        for digest in gone:
            if digest not in used:
                del self._sizes[digest]
                self._holder.remove_adapter(digest)

    def _too_large(self, name: str, size: int) -> CapacityError:
        budget, remedy = f"lora_memory ({format_bytes(self._budget)})", "raise it"
        takes = f"the adapter {name} takes {format_bytes(size)}"
        slots = self._slot_memory
        if slots is not None and size <= self._budget and not slots.holds(self._sizes.values()):
            budget = f"the GPU's memory for adapters ({format_bytes(slots.nbytes)}, max_loras {slots.num_slots})"
            remedy = "set lora_slot_memory, or lower max_loras"
        if not self._fits([size]):
            return CapacityError(f"{takes}, more than {budget}: {remedy}")
        return NoRoomNowError(
            f"{takes}, and with those in use there is no room for it in {budget}: {remedy}, or try again later"
        )


def _stamps(folder: Path) -> Stamps:
    found = []
    files = (folder,) if is_gguf(folder) else (folder / CONFIG_FILE, folder / WEIGHTS_FILE)
    for file in files:
        try:
            status = os.stat(file)
        except OSError as error:
            raise ModelFormatError(
                f"{folder}: {file.name} can't be read ({error.strerror}): an adapter is a folder that PEFT wrote, or "
                "a .gguf file"
            ) from None
        found.append((status.st_size, status.st_mtime_ns, status.st_ino))
    return tuple(found)
