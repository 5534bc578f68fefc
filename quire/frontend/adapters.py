"""Adapters by name: what callers ask for becomes the digest of its content, which the engine knows.

A name stands for a folder. The adapter is read when it is first needed, and again when its files
have changed. Loaded adapters share a budget of host memory: when it is full, those that no request
has leave, the least recently used first, and are read again when they are asked for.
"""

from __future__ import annotations

import logging
import os
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from quire.checkpoints.adapter_files import CONFIG_FILE, WEIGHTS_FILE
from quire.config import format_bytes
from quire.errors import CapacityError, InvalidRequestError, ModelFormatError, QuireError
from quire.models.adapters import Adapter

logger = logging.getLogger(__name__)

MAX_NAMES = 10_000
_NAME = re.compile(r"[\w][\w.:@+-]{0,199}")

Stamps = tuple[tuple[int, int, int], ...]
"""Of the files when they were read: what tells that they have changed."""


@dataclass(frozen=True)
class LoRARequest:
    """Which adapter a request has: a name, and the folder that PEFT wrote it to. `lora_int_id` is
    vLLM's number for it; Quire knows adapters by their content and needs none.
    """

    lora_name: str
    lora_int_id: int = 1
    lora_path: str = ""

    @property
    def name(self) -> str:
        return self.lora_name

    @property
    def path(self) -> str:
        return self.lora_path


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """An adapter that was read."""

    name: str
    path: Path
    digest: str
    rank: int
    nbytes: int
    stamps: Stamps = field(repr=False)


LoraChoice = LoRARequest | str | None
"""An adapter for a request: by name if it was loaded before; None: the model itself."""


def as_lora_requests(choice: LoraChoice | Sequence[LoraChoice], count: int) -> Sequence[LoraChoice]:
    """One for each prompt."""
    if not isinstance(choice, list | tuple):
        return [choice] * count  # type: ignore[list-item]
    if len(choice) != count:
        raise InvalidRequestError(
            "lora_request",
            f"has {len(choice)} entries for {count} prompts: give one, or one for each",
        )
    return choice


class AdapterHolder(Protocol):
    """Whoever computes with adapters: a runner, or one on several ranks."""

    def load_adapter(self, folder: Path) -> Adapter:
        """Reads one and keeps it until it is removed."""

    def remove_adapter(self, digest: str) -> None: ...


class AdapterRegistry:
    """All names and what they stand for."""

    def __init__(
        self,
        holder: AdapterHolder,
        budget: int,
        in_use: Callable[[], frozenset[str]],
        refusal: str | None = None,
    ) -> None:
        """`in_use` are the digests that live requests have; `refusal` says why adapters can't be
        computed here.
        """
        self._holder = holder
        self._budget = budget
        self._in_use = in_use
        self._refusal = refusal
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

    def add(self, name: str, path: Path | str) -> LoadedAdapter:
        """Gives a name to a folder, which may have had another, and reads it."""
        check_name(name)
        if not isinstance(path, Path | str) or not str(path):
            raise InvalidRequestError("lora_path", f"must be an adapter's folder, not {path!r}")
        if name not in self._paths and len(self._paths) >= MAX_NAMES:
            raise CapacityError(f"there are {MAX_NAMES} adapters' names already: unload some")
        loaded = self._read(name, Path(path))
        self._paths[name] = loaded.path
        return loaded

    def remove(self, name: str) -> None:
        """Forgets a name. Requests that have its adapter end with it."""
        if name not in self._paths:
            raise InvalidRequestError("lora_name", f"there is no adapter {name!r}")
        del self._paths[name]
        self._loaded.pop(name, None)
        self._drop_unused()

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

    def _read(self, name: str, path: Path) -> LoadedAdapter:
        if self._refusal is not None:
            raise InvalidRequestError("lora_request", self._refusal)
        stamps = _stamps(path)
        known = self._loaded.get(name)
        if known is not None and (known.path, known.stamps) == (path, stamps):
            self._loaded.move_to_end(name)
            return known
        size = stamps[1][0]
        if size > 2 * self._budget:  # float32 in files may be bfloat16 in memory, not less
            raise self._too_large(name, size)
        adapter = self._holder.load_adapter(path)
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
        self._drop_unused()
        logger.info("adapter %s: rank %d, %s", name, adapter.rank, format_bytes(adapter.nbytes))
        return loaded

    def _make_room(self, digest: str, name: str) -> None:
        """Has adapters leave that no request has, until the budget is kept."""
        if self.nbytes <= self._budget:
            return
        used = self._in_use() | {digest}
        for other, one in list(self._loaded.items()):
            if one.digest in used:
                continue
            del self._loaded[other]
            self.num_evictions += 1
            self._drop_unused(keep=digest)
            if self.nbytes <= self._budget:
                return
        raise self._too_large(name, self._sizes[digest])

    def _drop_unused(self, keep: str = "") -> None:
        """Has the holder let go of content that no name stands for, and no request has."""
        wanted = {one.digest for one in self._loaded.values()} | {keep}
        gone = [digest for digest in self._sizes if digest not in wanted]
        used = self._in_use() if gone else frozenset()
        for digest in gone:
            if digest not in used:
                del self._sizes[digest]
                self._holder.remove_adapter(digest)

    def _too_large(self, name: str, size: int) -> CapacityError:
        return CapacityError(
            f"the adapter {name} takes {format_bytes(size)}, and with those in use there is no room for it in "
            f"lora_memory ({format_bytes(self._budget)}): raise it, or try again later"
        )


def check_name(name: object) -> str:
    """Names are plain: they can't lead out of a folder."""
    if not isinstance(name, str) or not _NAME.fullmatch(name) or ".." in name:
        shown = name[:64] if isinstance(name, str) else name
        raise InvalidRequestError(
            "lora_name", f"must be letters, digits and . _ - : @ + (at most 200), not {shown!r}"
        )
    return name


def _stamps(folder: Path) -> Stamps:
    found = []
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        try:
            status = os.stat(folder / name)
        except OSError as error:
            raise ModelFormatError(
                f"{folder}: {name} can't be read ({error.strerror}): an adapter is a folder that PEFT wrote"
            ) from None
        found.append((status.st_size, status.st_mtime_ns, status.st_ino))
    return tuple(found)
