"""Figures as a table: ours, the ceiling, the goal and the peers; and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.gpu_peers import GOAL, NANO_VLLM, VLLM, VLLM_EXACT, compare, is_rate, times_better

UNITS = {"throughput": "tok/s", "prefill": "tok/s", "decode": "ms", "startup": "s"}


@dataclass(frozen=True, slots=True)
class Result:
    """One figure."""

    shape: str
    measure: str
    """`throughput`, `decode N`, `prefill` or `startup`, as in `gpu_peers`."""
    value: float
    ceiling: float | None = None
    """The best this device could do, in the same unit."""
    detail: str = ""
    comparable: bool = True
    """Whether this is the workload of the peers' figures."""


def table(results: Sequence[Result]) -> str:
    """Percentages say how much of the ceiling or goal is reached, factors how much faster than a peer we are."""
    columns = [GOAL, VLLM, VLLM_EXACT, NANO_VLLM]
    rows = [("shape", "measure", "quire", "ceiling", *columns, "")]
    for result in results:
        found = compare(result.shape, result.measure, result.value) if result.comparable else []
        others = {other.name: other for other in found}
        cells = []
        for name in columns:
            other = others.get(name)
            if other is None:
                cells.append("-")
            elif name == GOAL:
                cells.append(f"{_number(other.value)} ({other.times_better:.0%})")
            else:
                cells.append(f"{_number(other.value)} ({other.times_better:.2f}x)")
        ceiling = "-"
        if result.ceiling is not None:
            reached = 1 / times_better(result.measure, result.ceiling, result.value)
            ceiling = f"{_number(result.ceiling)} ({reached:.0%})"
        unit = UNITS[result.measure.split()[0]]
        rows.append((result.shape, f"{result.measure}, {unit}", _number(result.value), ceiling, *cells, result.detail))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(lines)


def best(measure: str, values: Sequence[float]) -> float:
    return max(values) if is_rate(measure) else min(values)


def write_json(path: str, results: Sequence[Result], about: str) -> None:
    """`about` says which engine on which device."""
    Path(path).write_text(json.dumps({"about": about, "results": [asdict(result) for result in results]}, indent=2))


def read_json(path: str | Path) -> list[Result]:
    return [Result(**entry) for entry in json.loads(Path(path).read_text())["results"]]


def _number(value: float) -> str:
    """Three or four digits that matter."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.3f}"
