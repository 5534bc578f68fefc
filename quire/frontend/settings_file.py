"""Settings from a TOML file: which model, and the options of its engine and of its server.

    model = "smollm2"
    [engine]                 # by the names of quire.config.EngineConfig
    kv_cache_memory = "2GiB"
    [server]                 # by the names of `quire serve`'s options
    port = 8080

`quire serve --print-config` writes a whole one.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.errors import InvalidRequestError

SECTIONS = ("engine", "server")
UNSET: Any = object()
"""Of a model: the one that the file names, else smollm2."""


@dataclass(frozen=True, slots=True)
class SettingsFile:
    """What a file says, by sections."""

    path: Path | None = None
    model: str | None = None
    sections: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def read_settings(path: str | Path) -> SettingsFile:
    """Reads and checks the file's form; what its options may be, their owners know."""
    import tomllib  # most commands start without a file, and sooner without this

    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # which text that is no UTF-8 is, and a path with a NUL
        raise InvalidRequestError("config", f"{path} can't be read: {error}") from None
    try:
        found = tomllib.loads(text)
    except RecursionError:
        raise InvalidRequestError("config", f"{path} is nested too deeply") from None
    except (
        ValueError
    ) as error:  # TOML's own error, and Python's for integers of thousands of digits
        raise InvalidRequestError("config", f"{path} is not TOML: {error}") from None
    if any(not -(2**63) <= number < 2**63 for number in _whole_numbers(found)):
        raise InvalidRequestError(
            "config", f"{path}: whole numbers must have at most 64 bits, as TOML says"
        )
    model = found.pop("model", None)
    if model is not None and not isinstance(model, str):
        raise InvalidRequestError(
            "config", f"{path}: model must be text, not {reprlib.repr(model)}"
        )
    for name, section in found.items():
        if name not in SECTIONS or not isinstance(section, dict):
            known = " and ".join(f"[{one}]" for one in SECTIONS)
            raise InvalidRequestError(
                "config", f"{path}: {name} is unknown; there are model, {known}"
            )
    return SettingsFile(path, model, found)


def _whole_numbers(value: Any) -> Iterator[int]:
    """All that are in there: Python's have no end, and can't even be shown then."""
    left = [value]
    while left:  # not by recursion: keys with a thousand dots make a thousand levels
        one = left.pop()
        if isinstance(one, dict | list):
            left += one.values() if isinstance(one, dict) else one
        elif isinstance(one, int):
            yield one


def with_settings(
    config: str | Path | None, model: object, options: Mapping[str, Any], default: str = "smollm2"
) -> tuple[str, dict[str, Any]]:
    """The model and the engine's options: as given, else as a file says. The server's part of it is
    for a server.
    """
    file = SettingsFile() if config is None else read_settings(config)
    model = file.model or default if model is UNSET else model
    if not isinstance(model, str | Path):
        raise InvalidRequestError("model", f"must be a name or a path, not {type(model).__name__}")
    return str(model), {**file.sections.get("engine", {}), **options}
