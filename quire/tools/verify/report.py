"""What `quire verify` says: a table, the smallest case, and the same for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from quire.observe.step_lines import encode_params
from quire.tools.verify.check import AxisResult, Verdict

_PIPE_WIDTH = 160
_MOST_SHOWN = 40
"""Tokens of a prompt."""


def print_verdict(verdict: Verdict, facts: Mapping[str, str], what: str = "alone") -> None:
    """For people. `what` the answers were compared with."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else _PIPE_WIDTH)
    for name, value in facts.items():
        console.print(f"{name}: {value}", style="dim", markup=False, soft_wrap=True)
    console.print()
    table = Table("axis", "what changes", box=None, pad_edge=False)
    for column in ("requests", "numbers compared", "differences"):
        table.add_column(column, justify="right")
    table.add_column("what happened")
    for axis in verdict.axes:
        table.add_row(axis.name, axis.about, *_cells(axis))
    console.print(table)
    console.print()
    for note in verdict.notes:
        console.print(note, style="dim", markup=False, soft_wrap=True)
    console.print(summary(verdict, what), markup=False, soft_wrap=True)
    if verdict.smallest is not None:
        console.print("\n".join(["", *_smallest_lines(verdict)]), markup=False, soft_wrap=True)


def summary(verdict: Verdict, what: str = "alone") -> str:
    """The last line."""
    different = [axis.name for axis in verdict.axes if axis.state == "different"]
    tried = [axis for axis in verdict.axes if axis.state in ("equal", "different")]
    values = sum(axis.values for axis in tried)
    if different:
        return f"NOT EXACT: answers differ from those {what} on {', '.join(different)} ({verdict.seconds:.1f} s)."
    open_axes = [
        axis.name for axis in verdict.axes if axis.state in ("not reached", "did not happen")
    ]
    if open_axes:
        return (
            f"No difference in {values:,} numbers on {len(tried)} axes, but {', '.join(open_axes)} could not be tried "
            f"in {verdict.seconds:.1f} s: give more --seconds."
        )
    return (
        f"EXACT: {values:,} numbers on {len(tried)} axes are those {what}, bit for bit "
        f"({verdict.rounds} round{'s' * (verdict.rounds != 1)}, {verdict.seconds:.1f} s)."
    )


def as_json(verdict: Verdict, facts: Mapping[str, str]) -> str:
    """For programs."""
    smallest = verdict.smallest
    case: dict[str, Any] | None = None
    if smallest is not None:
        case = {
            "axis": verdict.smallest_axis,
            "reproduced": smallest.is_reproduced,
            "tries": smallest.num_tries,
            "difference": smallest.difference.as_json(),
            "requests": [one.as_json() for one in smallest.cases],
        }
    whole = {
        "exact": verdict.is_exact,
        "seconds": round(verdict.seconds, 3),
        "rounds": verdict.rounds,
        "facts": dict(facts),
        "axes": [axis.as_json() for axis in verdict.axes],
        "notes": verdict.notes,
        "smallest": case,
    }
    return json.dumps(whole, indent=1, ensure_ascii=False)


def _cells(axis: AxisResult) -> tuple[str, str, str, str]:
    if axis.state in ("not applicable", "not reached"):
        note = (
            f"not applicable: {axis.note}" if axis.state == "not applicable" else "no time was left"
        )
        return "–", "–", "–", note
    note = axis.note if axis.state != "did not happen" else f"did not happen ({axis.note})"
    found = (
        f"{axis.differences:,} in {axis.different_requests} requests" if axis.differences else "0"
    )
    return str(axis.requests), f"{axis.values:,}", found, note


def _smallest_lines(verdict: Verdict) -> list[str]:
    smallest = verdict.smallest
    assert smallest is not None
    if smallest.is_reproduced:
        lines = [
            f"The smallest case found ({smallest.num_tries} tries), on {verdict.smallest_axis}:"
        ]
    else:
        lines = [f"It did not show again; these were the requests on {verdict.smallest_axis}:"]
    for number, case in enumerate(smallest.cases):
        shown = ", ".join(map(str, case.prompt[:_MOST_SHOWN]))
        more = f", … ({len(case.prompt)} tokens)" if len(case.prompt) > _MOST_SHOWN else ""
        lines.append(f"  request {number}: prompt [{shown}{more}], {encode_params(case.params)}")
    return [*lines, f"  {smallest.difference.describe()}"]
