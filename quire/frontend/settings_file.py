"""Settings from a TOML file: which model, and the options of its engine and of its server.

    model = "smollm2"
    [engine]                 # by the names of quire.config.EngineConfig
    kv_cache_memory = "2GiB"
    [server]                 # by the names of `quire serve`'s options
    port = 8080

`quire serve --print-config` writes a whole one.
"""

from __future__ import annotations

from collections.abc import Mapping
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
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequestError("config", f"{path} can't be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise InvalidRequestError("config", f"{path} is not TOML: {error}") from None
    model = found.pop("model", None)
    if model is not None and not isinstance(model, str):
        raise InvalidRequestError("config", f"{path}: model must be text, not {model!r}")
    for name, section in found.items():
        if name not in SECTIONS or not isinstance(section, dict):
            known = " and ".join(f"[{one}]" for one in SECTIONS)
            raise InvalidRequestError("config", f"{path}: {name} is unknown; there are model, {known}")
    return SettingsFile(path, model, found)


def with_settings(
    config: str | Path | None, model: object, options: Mapping[str, Any], default: str = "smollm2"
) -> tuple[str, dict[str, Any]]:
    """The model and the engine's options: as given, else as a file says. The server's part of it is for a server."""
    file = SettingsFile() if config is None else read_settings(config)
    model = file.model or default if model is UNSET else model
    if not isinstance(model, str | Path):
        raise InvalidRequestError("model", f"must be a name or a path, not {type(model).__name__}")
    return str(model), {**file.sections.get("engine", {}), **options}
