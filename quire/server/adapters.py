"""The adapters that clients may name as their model: given at the start, loaded while the server
runs, or found in a folder.

This process only knows names and folders; engines read them when requests need them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from quire.config import EngineConfig
from quire.errors import InvalidRequestError
from quire.frontend.adapter_names import check_name, is_adapter, parse_lora, slot_memory_of
from quire.server.config import ServerConfig
from quire.server.link.messages import AdapterFolder

_MOST_LISTED = 1000
"""Of those in the folder, in /v1/models."""
MOST_LOADED = 10_000


class ServedAdapters:
    """Names, and the folders they stand for."""

    def __init__(self, given: Iterable[tuple[str, str]] = (), folder: Path | None = None) -> None:
        self._known = {name: AdapterFolder(name, path) for name, path in given}
        self._folder = None if folder is None else Path(folder)

    def find(self, name: str) -> AdapterFolder | None:
        """What a name stands for; None: no adapter."""
        return self._known.get(name) or self._in_folder(name)

    def add(self, adapter: AdapterFolder) -> None:
        if adapter.name not in self._known and len(self._known) >= MOST_LOADED:
            raise InvalidRequestError(
                "lora_name", f"there are {MOST_LOADED} adapters already: unload some"
            )
        self._known[adapter.name] = adapter

    @property
    def known(self) -> tuple[AdapterFolder, ...]:
        """All but those that are only in the folder."""
        return tuple(self._known.values())

    def replace(self, adapters: Iterable[AdapterFolder]) -> None:
        """These are all that are known from here on."""
        self._known = {one.name: one for one in adapters}

    def remove(self, name: str) -> bool:
        """Whether there was one; those of the folder stay."""
        return self._known.pop(name, None) is not None

    def names(self) -> list[str]:
        """All that can be asked for, those of the folder last."""
        found = dict.fromkeys(self._known)
        if self._folder is not None:
            try:
                entries = sorted(
                    {entry.name.removesuffix(".gguf") for entry in os.scandir(self._folder)}
                )
            except OSError:
                entries = []
            present = (name for name in entries if self._in_folder(name) is not None)
            for _, name in zip(range(_MOST_LISTED), present, strict=False):
                found.setdefault(name)
        return list(found)

    def _in_folder(self, name: str) -> AdapterFolder | None:
        """A plain folder of that name directly in ours, or a GGUF file `name.gguf`: no link, and
        nothing that leads out of it.
        """
        if self._folder is None:
            return None
        try:
            check_name(name)
            for path in (self._folder / name, self._folder / f"{name}.gguf"):
                if is_adapter(path) and not path.is_symlink():
                    return AdapterFolder(name, str(path))
        except (InvalidRequestError, OSError, ValueError):
            pass
        return None


def slot_memory(config: ServerConfig) -> dict[str, int]:
    """What those given at the start take in slots, as an option of the engine."""
    engine = EngineConfig.of(config.engine)
    if engine.lora_slot_memory is not None:
        return {}
    size = slot_memory_of((path for _, path in config.adapters), engine.max_loras)
    return {"lora_slot_memory": size} if size else {}


def parse_adapters(given: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """`name=path`, as --lora takes them."""
    found: dict[str, str] = {}
    for one in given:
        request = parse_lora(one)
        if request.lora_name in found:
            raise InvalidRequestError("--lora", f"names {request.lora_name!r} twice")
        found[request.lora_name] = request.lora_path
    return tuple(found.items())
