"""Checks of values that come from users: each names the field and its range in an InvalidRequestError."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any

from quire.errors import InvalidRequestError

MAX_TOKEN_ID = 2**31 - 1


def check_bool(field: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise InvalidRequestError(field, f"must be true or false, not {value!r}")


def check_int(field: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise InvalidRequestError(field, f"must be a whole number, not {value!r}")
    if not low <= int(value) <= high:
        raise InvalidRequestError(field, f"must be from {low} to {high}, not {value}")


def check_real(
    field: str, value: Any, low: float, high: float, *, low_open: bool = False, high_open: bool = False
) -> None:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise InvalidRequestError(field, f"must be a number, not {value!r}")
    number = float(value)
    too_low = number <= low if low_open else number < low
    too_high = number >= high if high_open else number > high
    if math.isnan(number) or too_low or too_high:
        words = f"{'above' if low_open else 'at least'} {low:g} and {'below' if high_open else 'at most'} {high:g}"
        raise InvalidRequestError(field, f"must be {words}, not {value!r}")


def checked_ids(field: str, value: Any, most: int) -> tuple[int, ...]:
    """The token ids of a list or tuple, as a tuple."""
    if not isinstance(value, list | tuple) or len(value) > most:
        raise InvalidRequestError(field, f"must be a list of at most {most} token ids")
    if set(map(type, value)) <= {int} and value and min(value) >= 0 and max(value) <= MAX_TOKEN_ID:
        return tuple(value)  # a long list is looked through without a step of Python for each
    for token_id in value:
        check_int(field, token_id, 0, MAX_TOKEN_ID)
    return tuple(int(token_id) for token_id in value)


def checked_strings(field: str, value: Any, most: int, longest: int) -> tuple[str, ...]:
    """The strings of a list or tuple, none of them empty, as a tuple; one string counts as a list of one."""
    strings = (value,) if isinstance(value, str) else value
    if not isinstance(strings, list | tuple) or len(strings) > most:
        raise InvalidRequestError(field, f"must be a list of at most {most} strings")
    for string in strings:
        if not isinstance(string, str) or not 1 <= len(string) <= longest:
            raise InvalidRequestError(field, f"must hold strings of 1 to {longest} characters")
    return tuple(strings)
