"""A Jinja sandbox in which a hostile template can do little and not for long.

A model's chat template is a program that came with the model. Jinja's immutable sandbox keeps it
from reaching Python's internals and from changing what it is given; this module also bounds its
work:

- every turn of a loop, every macro call and every item that a filter hands on is counted;
- whatever may take long (filters, methods, operators, tests, slices, printing) looks at the
  deadline when it is done, and is given so little at once that this comes soon: most filters a
  megabyte of text, comparisons no more values than may be printed;
- `range`, `*`, `**`, `+`, `~`, padding, replacing, joining and formatting are checked *before* they
  make something too large, and so is the printing of nested lists and objects;
- block captures and the output as a whole have a size limit.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
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

from quire.frontend.template_limits import (
    ITERATING,
    QUICK,
    TemplateLimitError,
    budget,
    check_filtered,
    check_growth,
    check_operands,
    check_size,
    check_width,
    join_text,
    measured,
    stepped,
    timed,
)


class TemplateRefusalError(Exception):
    """The template itself called raise_exception."""


def concat(parts: Iterable[str], what: str = "text") -> str:
    """Joins the output of the template, a macro or a captured block."""
    kept: list[str] = []
    total = 0
    for part in parts:
        total += len(part)
        check_size(total, what)
        kept.append(part)
    return "".join(kept)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as templates expect it: no HTML escapes, and characters as they are unless asked
    otherwise.
    """
    if isinstance(indent, int):
        check_width(indent)
    measured(value)
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _range(*args: int) -> range:
    numbers = range(*args)
    check_size(len(numbers), "list")
    return numbers


def _raise_exception(message: object) -> None:
    raise TemplateRefusalError(str(message))


class _PlainNamespace(Namespace):
    """`namespace()` without names that begin with an underscore, which Python and Jinja give
    meanings to.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        for name, value in dict(*args, **kwargs).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError(f"namespace has no place for {name!r}")
        super().__setitem__(name, value)


class _GenerationBlock(Extension):
    """`{% generation %}` marks the model's own words for training; here its body is simply
    rendered.
    """

    tags = {"generation"}  # noqa: RUF012 - typed as a plain set by Jinja

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(
            parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line
        )


class _Counted(NodeTransformer):
    """Puts a step counter into every loop and macro, a size check into `~` and comparisons, and a
    look at the clock behind comparisons, tests and slices.
    """

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
        return (
            self._call("timed", [node], node.lineno) if isinstance(node.arg, nodes.Slice) else node
        )

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
    join_text = staticmethod(join_text)
    measured = staticmethod(measured)
    timed = staticmethod(timed)

    def __init__(self, clock: Callable[[], datetime]) -> None:
        extensions = [_GenerationBlock, loopcontrols]
        super().__init__(
            # The optimiser runs parts of a template while compiling it.
            optimized=False,
            trim_blocks=True,
            lstrip_blocks=True,
            finalize=measured,
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
        budget.get().step()
        return True

    def call_binop(
        self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any
    ) -> Any:
        check_operands(operator, left, right)
        return timed(super().call_binop(context, operator, left, right))

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, str):
            check_growth(obj.__name__, owner, args, kwargs)
        return timed(super().call(context, obj, *args, **kwargs))

    def unsafe_undefined(self, obj: Any, attribute: str) -> jinja2.Undefined:
        """Jinja would go on with an undefined value, which prints as nothing."""
        raise SecurityError(f"{attribute!r} is not for templates")

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Jinja replaces `str.format` by its own, which knows nothing of sizes."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def guarded(*args: Any, **kwargs: Any) -> str:
            check_growth("format", value.__self__, args, kwargs)
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


def _guarded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter whose arguments are looked at first; Jinja's marks for extra arguments are kept."""
    extra = 1 if hasattr(function, "jinja_pass_arg") else 0

    def guarded(*args: Any, **kwargs: Any) -> Any:
        values = args[extra:]
        if values:
            subject = values[0]
            if isinstance(subject, str) and name in ITERATING:
                check_size(len(subject), "list")
            elif name not in QUICK | ITERATING:
                check_filtered(name, subject)
            check_growth(name, subject, values[1:], kwargs)
        made = timed(function(*args, **kwargs))
        return stepped(made) if isinstance(made, Iterator) else made

    for mark in ("jinja_pass_arg", "jinja_async_variant"):
        if hasattr(function, mark):
            setattr(guarded, mark, getattr(function, mark))
    return guarded
