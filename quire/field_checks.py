"""Checks of values that come from users: each names the field and its range in an
InvalidRequestError.

A dataclass whose fields are made by `real`, `whole`, `flag`, `token_ids`, `strings` and `text` says
what a value may be where its field is declared; its `__post_init__` calls `check_fields`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import field, fields
from numbers import Integral, Real
from typing import Any

from quire.errors import InvalidRequestError

MAX_TOKEN_ID = 2**31 - 1

Check = Callable[[str, Any], Any]
"""Takes a field's name and its value; raises, or returns the value to keep."""


def check_fields(checked: Any, prefix: str = "") -> None:
    """Checks every field of a dataclass, which may be frozen; `prefix` comes before their names in
    errors.
    """
    for one in fields(checked):
        value = getattr(checked, one.name)
        if value is not None or not one.metadata["optional"]:
            object.__setattr__(checked, one.name, one.metadata["check"](prefix + one.name, value))


def checked(default: Any, check: Check, *, optional: bool = False) -> Any:
    """A dataclass field with a check; an `optional` one may be None as well."""
    return field(default=default, metadata={"check": check, "optional": optional})


def real(
    default: float | None, low: float, high: float, *, optional: bool = False, **ends: bool
) -> Any:
    return checked(
        default, lambda name, value: check_real(name, value, low, high, **ends), optional=optional
    )


def whole(default: int | None, low: int, high: int, *, optional: bool = False) -> Any:
    return checked(
        default, lambda name, value: check_int(name, value, low, high), optional=optional
    )


def flag(default: bool) -> Any:
    return checked(default, check_bool)


def token_ids(
    default: tuple[int, ...] | None, most: int, *, least: int = 0, optional: bool = False
) -> Any:
    return checked(
        default, lambda name, value: checked_ids(name, value, most, least), optional=optional
    )


def strings(default: tuple[str, ...], most: int, longest: int) -> Any:
    return checked(default, lambda name, value: checked_strings(name, value, most, longest))


def text(longest: int) -> Any:
    """A text of some bytes, or None."""
    return checked(None, lambda name, value: check_text(name, value, longest), optional=True)


def check_bool(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InvalidRequestError(name, f"must be true or false, not {value!r}")
    return value


def check_text(name: str, value: Any, longest: int) -> str:
    if not isinstance(value, str) or not value or len(value.encode("utf-8", "replace")) > longest:
        raise InvalidRequestError(name, f"must be a text of 1 to {longest} bytes")
    return value


def check_int(name: str, value: Any, low: int, high: int) -> Any:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise InvalidRequestError(name, f"must be a whole number, not {value!r}")
    if not low <= int(value) <= high:
        raise InvalidRequestError(name, f"must be from {low} to {high}, not {value}")
    return value


def check_real(
    name: str,
    value: Any,
    low: float,
    high: float,
    *,
    low_open: bool = False,
    high_open: bool = False,
) -> Any:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise InvalidRequestError(name, f"must be a number, not {value!r}")
    number = float(value)
    too_low = number <= low if low_open else number < low
    too_high = number >= high if high_open else number > high
    if math.isnan(number) or too_low or too_high:
        words = f"{'above' if low_open else 'at least'} {low:g} and {'below' if high_open else 'at most'} {high:g}"
        raise InvalidRequestError(name, f"must be {words}, not {value!r}")
    return value


def checked_ids(name: str, value: Any, most: int, least: int = 0) -> tuple[int, ...]:
    """The token ids of a list or tuple, as a tuple."""
    if not isinstance(value, list | tuple) or len(value) > most:
        raise InvalidRequestError(name, f"must be a list of at most {most} token ids")
    if len(value) < least:
        raise InvalidRequestError(name, "must hold at least one token id")
    if set(map(type, value)) <= {int} and value and min(value) >= 0 and max(value) <= MAX_TOKEN_ID:
        return tuple(value)  # quick for a long list: no Python code runs per token
    return tuple(int(check_int(name, token_id, 0, MAX_TOKEN_ID)) for token_id in value)


def checked_strings(name: str, value: Any, most: int, longest: int) -> tuple[str, ...]:
    """The strings of a list or tuple, none of them empty, as a tuple; one string counts as a list
    of one.
    """
    given = (value,) if isinstance(value, str) else value
    if not isinstance(given, list | tuple) or len(given) > most:
        raise InvalidRequestError(name, f"must be a list of at most {most} strings")
    for string in given:
        if not isinstance(string, str) or not 1 <= len(string) <= longest:
            raise InvalidRequestError(name, f"must hold strings of 1 to {longest} characters")
    return tuple(given)
