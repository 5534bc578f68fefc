"""Values of a settings file: checked against what an option takes, and written as TOML."""

from __future__ import annotations

import json
import reprlib
import types
from pathlib import Path
from typing import Any, Union, get_args, get_origin

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


def format_value(value: Any) -> str:
    """As TOML writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(format_value, value))}]"
    if isinstance(value, int | float):
        return repr(value)
    # What JSON escapes in a text, TOML reads; it wants DEL escaped, too.
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
