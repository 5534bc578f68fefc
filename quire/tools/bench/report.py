"""The one form of all benchmark reports: facts, then tables whose cells are what was measured.

A cell keeps its raw values, and every number that is printed, written or plotted is made from them.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table as RichTable

from quire.config import format_bytes
from quire.errors import QuireError
from quire.tools.bench.spread import Spread


@dataclass(frozen=True, slots=True)
class Factor:
    """How many times faster one median is than another."""

    value: float

    @classmethod
    def of(cls, slow: Spread, fast: Spread) -> Factor:
        """How many times shorter `fast` took."""
        return cls(slow.median / fast.median)


@dataclass(frozen=True, slots=True)
class Bytes:
    """A size in memory."""

    value: int


@dataclass(frozen=True, slots=True)
class Number:
    """A figure that was not measured repeatedly, and that may be very small."""

    value: float
    unit: str = ""


Cell = str | int | Spread | Factor | Bytes | Number
Row = tuple[Cell, ...]
EMPTY = "–"
_PIPE_WIDTH = 200


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells under a title; `note` says what was done and how to read it."""

    title: str
    note: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]

    def markdown(self) -> list[str]:
        """The lines as GitHub reads them."""
        lines = [self.columns, ("---",) * len(self.columns)]
        lines += [tuple(cell_text(cell).replace("|", "\\|") for cell in row) for row in self.rows]
        return [f"| {' | '.join(line)} |" for line in lines]

    def print(self, console: Console) -> None:
        shown = RichTable(
            *self.columns, title=self.title, title_justify="left", box=None, pad_edge=False
        )
        for row in self.rows:
            shown.add_row(*map(cell_text, row))
        console.print()
        console.print(shown)
        if self.note:
            console.print(self.note, style="dim", markup=False, soft_wrap=True)


@dataclass(frozen=True, slots=True)
class Report:
    """What a benchmark found."""

    title: str
    facts: Mapping[str, str]
    """Machine, versions, date, command, model: whatever the figures depend on."""
    tables: tuple[Table, ...]
    figures: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the JSON, for programs."""

    def markdown(self) -> str:
        lines = [f"# {self.title}", ""]
        lines += [f"- {name}: {value}" for name, value in self.facts.items()]
        for table in self.tables:
            lines += ["", f"## {table.title}", "", table.note, "", *table.markdown()]
        return "\n".join(lines) + "\n"

    def json(self) -> str:
        tables = []
        for table in self.tables:
            rows = [[_json_cell(cell) for cell in row] for row in table.rows]
            tables.append(
                {"title": table.title, "note": table.note, "columns": table.columns, "rows": rows}
            )
        whole = {"title": self.title, "facts": dict(self.facts), **self.figures, "tables": tables}
        return json.dumps(whole, indent=1, ensure_ascii=False)

    def print(self) -> None:
        """On the terminal."""
        # A pipe has no width of its own; a table that is cut to 80 columns helps nobody there.
        console = Console(highlight=False, width=None if sys.stdout.isatty() else _PIPE_WIDTH)
        for name, value in self.facts.items():
            console.print(f"{name}: {value}", style="dim", markup=False, soft_wrap=True)
        for table in self.tables:
            table.print(console)

    def write(self, markdown: Path | None, json_file: Path | None) -> None:
        """Into files, where asked for; folders are made."""
        for path, text in ((markdown, self.markdown), (json_file, self.json)):
            if path is not None:
                try:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_text(text(), encoding="utf-8")
                except OSError as error:
                    raise QuireError(f"the report can't be written: {error}") from None


def cell_text(cell: Cell) -> str:
    """A cell for people. The spread of several repeats stands behind their median."""
    if isinstance(cell, Spread):
        text = f"{number_text(cell.median)} {cell.unit}"
        if len(cell.values) == 1:
            return text
        return f"{text} ({number_text(cell.low)} to {number_text(cell.high)})"
    if isinstance(cell, Factor):
        return f"{number_text(cell.value)} ×"
    if isinstance(cell, Bytes):
        return format_bytes(cell.value)
    if isinstance(cell, Number):
        return f"{_four_digits(cell.value)} {cell.unit}".rstrip()
    return str(cell)


def number_text(value: float) -> str:
    """Three significant digits, and no exponents."""
    if value == 0:
        return "0"
    decimals = sum(abs(value) < bound for bound in (100, 10, 1))
    return f"{value:,.{decimals}f}"


def _four_digits(value: float) -> str:
    """Four significant digits, and no exponents."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    decimals = 3 - math.floor(math.log10(abs(value)))
    return f"{value:,.{min(max(decimals, 0), 9)}f}"


def _json_cell(cell: Cell) -> dict[str, Any]:
    values: dict[str, Any] = {"text": cell_text(cell)}
    if isinstance(cell, Spread):
        values |= {"values": cell.values, "unit": cell.unit}
    elif isinstance(cell, Factor | Bytes | Number):
        values["value"] = cell.value
    return values
