"""How much a chat template may do: a budget of steps and time, and sizes that are checked before
something is made.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

MAX_STEPS = 250_000
MAX_SECONDS = 2.0
MAX_CHARS = 32 * 1024 * 1024
MAX_ITEMS = 100_000
MAX_PRINTED_ITEMS = 1_000_000
MAX_WIDTH = 10_000
MAX_FILTERED_CHARS = 1024 * 1024
MAX_FILTERED_ITEMS = 20_000
"""In lists that a filter makes text of."""

QUICK = frozenset(
    ("trim", "length", "count", "default", "d", "string", "safe", "escape", "e", "forceescape", "lower", "upper",
     "replace", "first", "last", "tojson", "attr")
)  # fmt: skip
"""Filters that get through any text in a moment."""
ITERATING = frozenset(
    ("batch", "dictsort", "groupby", "items", "join", "list",
     "map", "max", "min", "random", "reject", "rejectattr", "reverse", "select",
     "selectattr", "slice", "sort", "sum", "unique")
)  # fmt: skip
"""Filters for which a text is a list of characters."""
_PADDING = frozenset(
    ("center", "ljust", "rjust", "zfill", "expandtabs", "indent", "wordwrap", "batch", "slice")
)
_PRINTING = frozenset(
    ("string", "pprint", "list", "sum", "escape", "e", "forceescape", "urlencode", "xmlattr")
)


class TemplateLimitError(Exception):
    """The template asked for more than a chat template ever needs."""


@dataclass
class _Budget:
    steps: int
    deadline: float

    def check_time(self) -> None:
        if time.monotonic() > self.deadline:
            raise TemplateLimitError(f"runs longer than {MAX_SECONDS:g} s")

    def step(self) -> None:
        self.steps -= 1
        if self.steps < 0:
            raise TemplateLimitError(f"loops more than {MAX_STEPS} times")
        self.check_time()


budget: ContextVar[_Budget] = ContextVar("template_budget")


@contextmanager
def limited() -> Iterator[None]:
    """Everything rendered inside shares one budget of steps and time."""
    token = budget.set(_Budget(MAX_STEPS, time.monotonic() + MAX_SECONDS))
    try:
        yield
    finally:
        budget.reset(token)


def check_size(count: int, what: str = "text") -> None:
    limit, units = (MAX_ITEMS, "items") if what == "list" else (MAX_CHARS, "characters")
    if count > limit:
        raise TemplateLimitError(f"makes a {what} of more than {limit} {units}")


def measured(value: Any, most: int = MAX_PRINTED_ITEMS) -> Any:
    """Lists in lists in lists can be exponentially large to print or to compare; count before."""
    budget.get().check_time()
    if isinstance(value, str):
        check_size(len(value))
        return value
    if not isinstance(value, Mapping | list | tuple):
        return value
    pending, chars, items = [value], 0, 0
    while pending:
        item = pending.pop()
        items += 1
        if isinstance(item, str):
            chars += len(item)
            check_size(chars)
        elif isinstance(item, Mapping):
            pending.extend(item.keys())
            pending.extend(item.values())
        elif isinstance(item, list | tuple):
            pending.extend(item)
        if items + len(pending) > most:
            raise TemplateLimitError(f"prints more than {most} items")
        if not items & 0xFFF:
            budget.get().check_time()
    return value


def timed(value: Any) -> Any:
    budget.get().check_time()
    return value


def stepped(items: Iterable[Any]) -> Iterator[Any]:
    """What a filter makes as it is asked for, counted."""
    own = budget.get()
    for item in items:
        own.step()
        yield item


def join_text(*parts: Any) -> str:
    texts = [str(measured(part)) for part in parts]
    check_size(sum(map(len, texts)))
    return "".join(texts)


def check_width(width: int) -> None:
    if abs(width) > MAX_WIDTH:
        raise TemplateLimitError(f"pads or indents text by {width} characters")


def check_filtered(name: str, subject: Any) -> None:
    measured(subject, MAX_FILTERED_ITEMS)
    if isinstance(subject, str) and len(subject) > MAX_FILTERED_CHARS:
        raise TemplateLimitError(f"uses {name} on more than {MAX_FILTERED_CHARS} characters")


def check_operands(operator: str, left: Any, right: Any) -> None:
    if operator == "**":
        if abs(right) > 64 or abs(left) > 2**32:
            raise TemplateLimitError("raises a number to a huge power")
    elif operator == "*":
        for sequence, count in ((left, right), (right, left)):
            if isinstance(sequence, str | list | tuple) and isinstance(count, int):
                check_size(len(sequence) * count, "text" if isinstance(sequence, str) else "list")
        if (
            isinstance(left, int)
            and isinstance(right, int)
            and left.bit_length() + right.bit_length() > 4096
        ):
            raise TemplateLimitError("multiplies huge numbers")
    elif operator == "+":
        if isinstance(left, str) and isinstance(right, str):
            check_size(len(left) + len(right))
        elif isinstance(left, list | tuple) and isinstance(right, list | tuple):
            check_size(len(left) + len(right), "list")
    elif isinstance(left, str):  # "%": old-style formatting
        check_growth("format", left, (right,), {})


def check_growth(name: str, subject: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Refuses a call whose result could be far larger than what went in."""
    values = [*args, *kwargs.values()]
    match name:
        case "replace" if len(values) >= 2:
            text, old, new = str(measured(subject)), str(values[0]), str(measured(values[1]))
            check_size(len(text) + (text.count(old) if len(new) > len(old) else 0) * len(new))
        case "join":
            # As a method the separator is the subject, as a filter it is the first argument.
            separator = (
                subject if isinstance(subject, str) and values else (values[0] if values else "")
            )
            pieces = values[0] if separator is subject and values else subject
            if isinstance(pieces, list | tuple | str):
                measured(pieces)
                check_size(len(pieces) * len(str(measured(separator))))
        case "format" | "format_map":
            text = str(measured(subject))
            check_filtered(name, text)
            if re.search(r"\d{4}|\*", text):
                raise TemplateLimitError("formats text to a huge width")
            fields = text.count("{") + text.count("%")
            check_size(len(text) + fields * len(join_text(*values)))
        case _ if name in _PADDING:
            for width in values:
                if isinstance(width, int):
                    check_width(width)
                    lines = (
                        subject.count("\n") + subject.count("\t") + 1
                        if isinstance(subject, str)
                        else 1
                    )
                    check_size(width * lines)
                elif isinstance(width, str) and isinstance(subject, str):
                    check_size(len(width) * (len(subject) + 1))
        case "split" | "rsplit" | "splitlines" if isinstance(subject, str):
            if values and isinstance(values[0], str):
                check_size(subject.count(values[0]), "list")
            else:
                check_filtered(name, subject)
        case "translate":
            raise TemplateLimitError("uses translate")
        case _ if name in _PRINTING:
            measured(subject)
