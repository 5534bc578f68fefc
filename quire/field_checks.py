"""Tables of parameters: a dataclass whose fields say, each in one place, what a value may be, what
it is for and who may set it.

A field is made by `real`, `whole`, `flag`, `choice`, `pattern`, `token_ids`, `strings`, `text` or
`checked`; the dataclass's `__post_init__` calls `check_fields`. `parameters(table)` gives the table
to those who follow from it: the server's request bodies, the command line's options, the page's form
and the docs. Errors are InvalidRequestErrors that name the field and what is allowed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from numbers import Integral, Real
from typing import Any, TypedDict, Unpack

from quire.errors import InvalidRequestError

MAX_TOKEN_ID = 2**31 - 1
NO_LIMIT = 2**31 - 1
"""The highest whole number where nothing else limits it."""

Check = Callable[[str, Any], Any]
"""Takes a field's name and its value; raises, or returns the value to keep."""


class Values:
    """What values a parameter may have; as text, what docs say about them."""

    def check(self, name: str, value: Any) -> Any:
        """Raises, or returns the value to keep."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Number(Values):
    """Numbers of a kind (int or float) from `low` to `high`."""

    kind: type
    low: float
    high: float
    low_open: bool = False
    high_open: bool = False

    def check(self, name: str, value: Any) -> Any:
        if self.kind is int:
            return check_int(name, value, int(self.low), int(self.high))
        ends = {"low_open": self.low_open, "high_open": self.high_open}
        return check_real(name, value, self.low, self.high, **ends)

    def within(self, low: float | None, high: float | None) -> Number:
        """The same with other limits, where some are given."""
        return replace(
            self,
            low=self.low if low is None else low,
            high=self.high if high is None else high,
        )

    def limits(self) -> dict[str, float]:
        """As JSON schemas name them."""
        found = {"exclusiveMinimum" if self.low_open else "minimum": self.low}
        return found if self.high == math.inf else {**found, "maximum": self.high}

    def __str__(self) -> str:
        if self.high in (NO_LIMIT, math.inf):
            if self.low < -1:
                return "any whole number"
            return f"{'above' if self.low_open else 'at least'} {self.low:g}"
        high = "2**64 - 1" if self.high == 2**64 - 1 else f"{self.high:g}"
        return f"above {self.low:g}, at most {high}" if self.low_open else f"{self.low:g} to {high}"


@dataclass(frozen=True, slots=True)
class Flag(Values):
    def check(self, name: str, value: Any) -> bool:
        return check_bool(name, value)

    def __str__(self) -> str:
        return "true or false"


@dataclass(frozen=True, slots=True)
class Choice(Values):
    names: tuple[str, ...]

    def check(self, name: str, value: Any) -> Any:
        if value not in self.names:
            raise InvalidRequestError(
                name, f"must be one of {', '.join(self.names)}, not {shown(value)}"
            )
        return value

    def __str__(self) -> str:
        return ", ".join(self.names)


@dataclass(frozen=True, slots=True)
class Pattern(Values):
    """Text that a regular expression matches; `words` say what it allows."""

    regex: str
    words: str

    def check(self, name: str, value: Any) -> str:
        if not isinstance(value, str) or not re.fullmatch(self.regex, value):
            raise InvalidRequestError(name, f"must be {self.words}, not {shown(value)}")
        return value

    def __str__(self) -> str:
        return self.words


@dataclass(frozen=True, slots=True)
class TokenIds(Values):
    most: int
    least: int = 0

    def check(self, name: str, value: Any) -> tuple[int, ...]:
        return checked_ids(name, value, self.most, self.least)

    def __str__(self) -> str:
        return f"up to {self.most} token ids"


@dataclass(frozen=True, slots=True)
class Strings(Values):
    most: int
    longest: int

    def check(self, name: str, value: Any) -> tuple[str, ...]:
        return checked_strings(name, value, self.most, self.longest)

    def __str__(self) -> str:
        return f"up to {self.most} strings"


@dataclass(frozen=True, slots=True)
class Text(Values):
    longest: int
    """In bytes."""

    def check(self, name: str, value: Any) -> str:
        return check_text(name, value, self.longest)

    def __str__(self) -> str:
        return "text"


@dataclass(frozen=True, slots=True)
class Other(Values):
    """Whatever a function accepts; `words` say what that is."""

    function: Check
    words: str

    def check(self, name: str, value: Any) -> Any:
        return self.function(name, value)

    def __str__(self) -> str:
        return self.words


class About(TypedDict, total=False):
    """What a field is for, and who may set it besides Python."""

    help: str
    api: bool
    """Every API for text has a field of this name and these values."""
    cli: bool
    """Commands have an option of this name."""
    page: bool
    """The page's form of settings has it."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """A line of a table."""

    values: Values
    default: Any
    optional: bool = False
    """Whether it may be None as well."""
    help: str = ""
    api: bool = True
    cli: bool = False
    page: bool = False


def parameters(table: type) -> Mapping[str, Parameter]:
    """The lines of a table by name, in its order."""
    return {one.name: one.metadata["parameter"] for one in fields(table)}


def check_fields(checked: Any, prefix: str = "") -> None:
    """Checks every field of a dataclass, which may be frozen; `prefix` comes before their names in
    errors.
    """
    for name, one in parameters(type(checked)).items():
        value = getattr(checked, name)
        if value is not None or not one.optional:
            object.__setattr__(checked, name, one.values.check(prefix + name, value))


def parameter(
    default: Any, values: Values, *, optional: bool = False, **about: Unpack[About]
) -> Any:
    """A dataclass field that is a line of a table; an `optional` one may be None as well."""
    line = Parameter(values, default, optional, **about)
    return field(default=default, metadata={"parameter": line})


def checked(
    default: Any, check: Check, words: str = "", *, optional: bool = False, **about: Unpack[About]
) -> Any:
    return parameter(default, Other(check, words), optional=optional, **about)


def real(
    default: float | None,
    low: float,
    high: float,
    *,
    low_open: bool = False,
    high_open: bool = False,
    optional: bool = False,
    **about: Unpack[About],
) -> Any:
    values = Number(float, low, high, low_open, high_open)
    return parameter(default, values, optional=optional, **_on_page(about))


def whole(
    default: int | None,
    low: int,
    high: int = NO_LIMIT,
    *,
    optional: bool = False,
    **about: Unpack[About],
) -> Any:
    return parameter(default, Number(int, low, high), optional=optional, **_on_page(about))


def flag(default: bool, **about: Unpack[About]) -> Any:
    return parameter(default, Flag(), **_on_command_line(about))


def choice(default: str, *names: str, **about: Unpack[About]) -> Any:
    return parameter(default, Choice(names), **_on_command_line(about))


def pattern(default: str, regex: str, words: str, **about: Unpack[About]) -> Any:
    return parameter(default, Pattern(regex, words), **_on_command_line(about))


def token_ids(
    default: tuple[int, ...] | None,
    most: int,
    *,
    least: int = 0,
    optional: bool = False,
    **about: Unpack[About],
) -> Any:
    return parameter(default, TokenIds(most, least), optional=optional, **about)


def strings(default: tuple[str, ...], most: int, longest: int, **about: Unpack[About]) -> Any:
    return parameter(default, Strings(most, longest), **_on_command_line(about))


def text(longest: int, **about: Unpack[About]) -> Any:
    """A text of some bytes, or None."""
    return parameter(None, Text(longest), optional=True, **about)


def _on_command_line(about: About) -> About:
    """Unless the table says otherwise."""
    return {"cli": True, **about}


def _on_page(about: About) -> About:
    return {"page": True, **_on_command_line(about)}


def check_bool(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InvalidRequestError(name, f"must be true or false, not {shown(value)}")
    return value


def check_text(name: str, value: Any, longest: int) -> str:
    if not isinstance(value, str) or not value or len(value.encode("utf-8", "replace")) > longest:
        raise InvalidRequestError(name, f"must be a text of 1 to {longest} bytes")
    return value


def check_int(name: str, value: Any, low: int, high: int) -> Any:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise InvalidRequestError(name, f"must be a whole number, not {shown(value)}")
    if value < low and high == NO_LIMIT:
        raise InvalidRequestError(name, f"must be at least {low}, not {shown(value)}")
    if not low <= int(value) <= high:
        raise InvalidRequestError(name, f"must be from {low} to {high}, not {shown(value)}")
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
        raise InvalidRequestError(name, f"must be a number, not {shown(value)}")
    number = as_float(value)
    too_low = number <= low if low_open else number < low
    too_high = number >= high if high_open else number > high
    if math.isnan(number) or too_low or too_high:
        words = f"{'above' if low_open else 'at least'} {low:g} and {'below' if high_open else 'at most'} {high:g}"
        raise InvalidRequestError(name, f"must be {words}, not {shown(value)}")
    return value


def as_float(value: Any) -> float:
    """A number as a float; infinite where no float is as large."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def shown(value: Any) -> str:
    """A number in an error: Python refuses to write those of thousands of digits."""
    if isinstance(value, int) and abs(value) >= 10**40:
        return f"a whole number of about {value.bit_length() * 3 // 10} digits"
    return repr(value)


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
