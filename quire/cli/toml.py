"""Values of a settings file: checked against what an option takes, and written as TOML."""

from __future__ import annotations

import reprlib
import types
from pathlib import Path
from typing import Any, Union, get_args, get_origin

import tomli_w

from quire.errors import InvalidRequestError

_WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    Path: "a path in quotes",
}


def check_value(name: str, value: Any, kind: Any) -> Any:
    """A value from a file as the command line would have given it: paths as paths, whole numbers
    where they are meant. A text option such as kv_cache_memory may stand there as a number.
    """
    kinds = (
        [one for one in get_args(kind) if one is not types.NoneType] if _is_union(kind) else [kind]
    )
    for one in kinds:
        if get_origin(one) is list:
            if isinstance(value, list) and all(isinstance(item, str) for item in value):
                return value
        elif one is Path and isinstance(value, str):
            return Path(value)
        elif one is float and isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        elif one is str and isinstance(value, int | float) and not isinstance(value, bool):
            return str(value)
        elif (
            isinstance(one, type)
            and isinstance(value, one)
            and (one is bool or not isinstance(value, bool))
        ):
            return value
    wanted = " or ".join(
        "a list of texts" if get_origin(one) is list else _WORDS.get(one, str(one)) for one in kinds
    )
    raise InvalidRequestError(name, f"must be {wanted}, not {reprlib.repr(value)}")


def _is_union(kind: Any) -> bool:
    return get_origin(kind) in (Union, types.UnionType)


def toml_line(name: str, value: Any) -> str:
    """`name = value`, as TOML writes it."""
    return tomli_w.dumps({name: str(value) if isinstance(value, Path) else value}).rstrip("\n")
