"""A Jinja sandbox in which a hostile template can do little and not for long.

A model's chat template is a program that came with the model. Jinja's immutable sandbox keeps it from
reaching Python's internals and from changing what it is given; this module also bounds its work:

- every turn of a loop, every macro call and every item that a filter hands on is counted;
- whatever may take long (filters, methods, operators, tests, slices, printing) looks at the deadline when it is done,
  and is given so little at once that this comes soon: most filters a megabyte of text, comparisons no more values than
  may be printed;
- `range`, `*`, `**`, `+`, `~`, padding, replacing, joining and formatting are checked *before* they make
  something too large, and so is the printing of nested lists and objects;
- block captures and the output as a whole have a size limit.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_STEPS = 250_000
MAX_SECONDS = 2.0
MAX_CHARS = 32 * 1024 * 1024
MAX_ITEMS = 100_000
MAX_PRINTED_ITEMS = 1_000_000
MAX_WIDTH = 10_000
MAX_FILTERED_CHARS = 1024 * 1024
MAX_FILTERED_ITEMS = 20_000
"""In lists that a filter makes text of."""

_QUICK = frozenset(
    ("trim", "length", "count", "default", "d", "string", "safe", "escape", "e", "forceescape", "lower", "upper",
     "replace", "first", "last", "tojson", "attr")
)  # fmt: skip
"""Filters that get through any text in a moment."""
_ITERATING = frozenset(
    ("batch", "dictsort", "groupby", "items", "join", "list", "map", "max", "min", "random", "reject", "rejectattr", "reverse", "select",
     "selectattr", "slice", "sort", "sum", "unique")
)  # fmt: skip
"""Filters for which a text is a list of characters."""
_PADDING = frozenset(("center", "ljust", "rjust", "zfill", "expandtabs", "indent", "wordwrap", "batch", "slice"))
_PRINTING = frozenset(("string", "pprint", "list", "sum", "escape", "e", "forceescape", "urlencode", "xmlattr"))


class TemplateLimitError(Exception):
    """The template asked for more than a chat template ever needs."""


class TemplateRefusalError(Exception):
    """The template itself called raise_exception."""


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


_budget: ContextVar[_Budget] = ContextVar("template_budget")


@contextmanager
def limited() -> Iterator[None]:
    """Everything rendered inside shares one budget of steps and time."""
    token = _budget.set(_Budget(MAX_STEPS, time.monotonic() + MAX_SECONDS))
    try:
        yield
    finally:
        _budget.reset(token)


def _check_size(count: int, what: str = "text") -> None:
    limit, units = (MAX_ITEMS, "items") if what == "list" else (MAX_CHARS, "characters")
    if count > limit:
        raise TemplateLimitError(f"makes a {what} of more than {limit} {units}")


def _measured(value: Any, most: int = MAX_PRINTED_ITEMS) -> Any:
    """Lists in lists in lists can be exponentially large to print or to compare; count before."""
    _budget.get().check_time()
    if isinstance(value, str):
        _check_size(len(value))
        return value
    if not isinstance(value, Mapping | list | tuple):
        return value
    pending, chars, items = [value], 0, 0
    while pending:
        item = pending.pop()
        items += 1
        if isinstance(item, str):
            chars += len(item)
            _check_size(chars)
        elif isinstance(item, Mapping):
            pending.extend(item.keys())
            pending.extend(item.values())
        elif isinstance(item, list | tuple):
            pending.extend(item)
        if items + len(pending) > most:
            raise TemplateLimitError(f"prints more than {most} items")
        if not items & 0xFFF:
            _budget.get().check_time()
    return value


def _timed(value: Any) -> Any:
    _budget.get().check_time()
    return value


def _stepped(items: Iterable[Any]) -> Iterator[Any]:
    """What a filter makes as it is asked for, counted."""
    budget = _budget.get()
    for item in items:
        budget.step()
        yield item


def _join_text(*parts: Any) -> str:
    texts = [str(_measured(part)) for part in parts]
    _check_size(sum(map(len, texts)))
    return "".join(texts)


def concat(parts: Iterable[str], what: str = "text") -> str:
    """Joins the output of the template, a macro or a captured block."""
    kept: list[str] = []
    total = 0
    for part in parts:
        total += len(part)
        _check_size(total, what)
        kept.append(part)
    return "".join(kept)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as templates expect it: no HTML escapes, and characters as they are unless asked otherwise."""
    if isinstance(indent, int):
        _check_width(indent)
    _measured(value)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _range(*args: int) -> range:
    numbers = range(*args)
    _check_size(len(numbers), "list")
    return numbers


def _raise_exception(message: object) -> None:
    raise TemplateRefusalError(str(message))


def _check_width(width: int) -> None:
    if abs(width) > MAX_WIDTH:
        raise TemplateLimitError(f"pads or indents text by {width} characters")


def _check_filtered(name: str, subject: Any) -> None:
    _measured(subject, MAX_FILTERED_ITEMS)
    if isinstance(subject, str) and len(subject) > MAX_FILTERED_CHARS:
        raise TemplateLimitError(f"uses {name} on more than {MAX_FILTERED_CHARS} characters")


class _PlainNamespace(Namespace):
    """`namespace()` without names that begin with an underscore, which Python and Jinja give meanings to."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        for name, value in dict(*args, **kwargs).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError(f"namespace has no place for {name!r}")
        super().__setitem__(name, value)


class _GenerationBlock(Extension):
    """`{% generation %}` marks the model's own words for training; here its body is simply rendered."""

    tags = {"generation"}  # noqa: RUF012 - typed as a plain set by Jinja

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Counted(NodeTransformer):
    """Puts a step counter into every loop and macro, a size check into `~` and comparisons, and a look at the clock
    behind comparisons, tests and slices."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802 - Jinja's naming
        self.generic_visit(node)
        return self._call("join_text", node.nodes, node.lineno)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.expr = self._call("measured", [node.expr], node.lineno)
        for operand in node.ops:
            operand.expr = self._call("measured", [operand.expr], node.lineno)
        return self._call("timed", [node], node.lineno)

    def visit_Test(self, node: nodes.Test) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return self._call("timed", [node], node.lineno)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return self._call("timed", [node], node.lineno) if isinstance(node.arg, nodes.Slice) else node

    def _count(self, node: nodes.For | nodes.Macro | nodes.CallBlock) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(self._call("step", [], node.lineno), lineno=node.lineno))
        if isinstance(node, nodes.For) and node.test is not None:
            # `for … if …` tests every item, also the ones it then leaves out.
            counter = self._call("step", [], node.lineno)
            node.test = nodes.And(counter, node.test, lineno=node.lineno)
        return node

    visit_For = visit_Macro = visit_CallBlock = _count  # noqa: N815

    @staticmethod
    def _call(name: str, arguments: list[nodes.Expr], line: int) -> nodes.Call:
        function = nodes.EnvironmentAttribute(name, lineno=line)
        return nodes.Call(function, arguments, [], None, None, lineno=line)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Where chat templates are compiled and run; render inside `limited()`."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})
    concat = staticmethod(concat)
    join_text = staticmethod(_join_text)
    measured = staticmethod(_measured)
    timed = staticmethod(_timed)

    def __init__(self, clock: Callable[[], datetime]) -> None:
        extensions = [_GenerationBlock, loopcontrols]
        super().__init__(
            # The optimiser runs parts of a template while compiling it.
            optimized=False,
            trim_blocks=True,
            lstrip_blocks=True,
            finalize=_measured,
            extensions=extensions,
        )
        self._clock = clock
        for name, function in list(self.filters.items()):
            self.filters[name] = _guarded_filter(name, function)
        self.filters["tojson"] = _tojson
        self.globals = {
            "range": _range,
            "dict": lambda *args, **kwargs: dict(*args, **kwargs),  # noqa: PLW0108 - the class itself is not for templates
            "namespace": _PlainNamespace,
            "raise_exception": _raise_exception,
            "strftime_now": self._strftime_now,
        }

    def step(self) -> bool:
        """Called by the template in every turn of a loop."""
        _budget.get().step()
        return True

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        _check_operands(operator, left, right)
        return _timed(super().call_binop(context, operator, left, right))

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, str):
            _check_growth(obj.__name__, owner, args, kwargs)
        return _timed(super().call(context, obj, *args, **kwargs))

    def unsafe_undefined(self, obj: Any, attribute: str) -> jinja2.Undefined:
        """Jinja would go on with an undefined value, which prints as nothing."""
        raise SecurityError(f"{attribute!r} is not for templates")

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Jinja replaces `str.format` by its own, which knows nothing of sizes."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def guarded(*args: Any, **kwargs: Any) -> str:
            _check_growth("format", value.__self__, args, kwargs)
            return wrapped(*args, **kwargs)

        return guarded

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        counted = _Counted().visit(super()._parse(source, name, filename))
        assert isinstance(counted, nodes.Template)
        return counted

    def _strftime_now(self, format: str) -> str:
        # The C library pads fields to a width given in the format.
        if len(format) > 200 or re.search(r"%[^a-zA-Z%]*\d{2}", format):
            raise TemplateLimitError("asks strftime_now for an unreasonable format")
        return self._clock().strftime(format)


def _check_operands(operator: str, left: Any, right: Any) -> None:
    if operator == "**":
        if abs(right) > 64 or abs(left) > 2**32:
            raise TemplateLimitError("raises a number to a huge power")
    elif operator == "*":
        for sequence, count in ((left, right), (right, left)):
            if isinstance(sequence, str | list | tuple) and isinstance(count, int):
                _check_size(len(sequence) * count, "text" if isinstance(sequence, str) else "list")
        if isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > 4096:
            raise TemplateLimitError("multiplies huge numbers")
    elif operator == "+":
        if isinstance(left, str) and isinstance(right, str):
            _check_size(len(left) + len(right))
        elif isinstance(left, list | tuple) and isinstance(right, list | tuple):
            _check_size(len(left) + len(right), "list")
    elif isinstance(left, str):  # "%": old-style formatting
        _check_growth("format", left, (right,), {})


def _guarded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter whose arguments are looked at first; Jinja's marks for extra arguments are kept."""
    extra = 1 if hasattr(function, "jinja_pass_arg") else 0

    def guarded(*args: Any, **kwargs: Any) -> Any:
        values = args[extra:]
        if values:
            subject = values[0]
            if isinstance(subject, str) and name in _ITERATING:
                _check_size(len(subject), "list")
            elif name not in _QUICK | _ITERATING:
                _check_filtered(name, subject)
            _check_growth(name, subject, values[1:], kwargs)
        made = _timed(function(*args, **kwargs))
        return _stepped(made) if isinstance(made, Iterator) else made

    for mark in ("jinja_pass_arg", "jinja_async_variant"):
        if hasattr(function, mark):
            setattr(guarded, mark, getattr(function, mark))
    return guarded


def _check_growth(name: str, subject: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Refuses a call whose result could be far larger than what went in."""
    values = [*args, *kwargs.values()]
    match name:
        case "replace" if len(values) >= 2:
            text, old, new = str(_measured(subject)), str(values[0]), str(_measured(values[1]))
            _check_size(len(text) + (text.count(old) if len(new) > len(old) else 0) * len(new))
        case "join":
            # As a method the separator is the subject, as a filter it is the first argument.
            separator = subject if isinstance(subject, str) and values else (values[0] if values else "")
            pieces = values[0] if separator is subject and values else subject
            if isinstance(pieces, list | tuple | str):
                _measured(pieces)
                _check_size(len(pieces) * len(str(_measured(separator))))
        case "format" | "format_map":
            text = str(_measured(subject))
            _check_filtered(name, text)
            if re.search(r"\d{4}|\*", text):
                raise TemplateLimitError("formats text to a huge width")
            fields = text.count("{") + text.count("%")
            _check_size(len(text) + fields * len(_join_text(*values)))
        case _ if name in _PADDING:
            for width in values:
                if isinstance(width, int):
                    _check_width(width)
                    lines = subject.count("\n") + subject.count("\t") + 1 if isinstance(subject, str) else 1
                    _check_size(width * lines)
                elif isinstance(width, str) and isinstance(subject, str):
                    _check_size(len(width) * (len(subject) + 1))
        case "split" | "rsplit" | "splitlines" if isinstance(subject, str):
            if values and isinstance(values[0], str):
                _check_size(subject.count(values[0]), "list")
            else:
                _check_filtered(name, subject)
        case "translate":
            raise TemplateLimitError("uses translate")
        case _ if name in _PRINTING:
            _measured(subject)
