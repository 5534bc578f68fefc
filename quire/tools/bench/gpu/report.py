"""What the GPU benchmarks share: a frame around their measuring, and a report of our figures beside
the ceiling, the goal and the peers.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from quire.tools.bench.gpu.peers import GOAL, NANO_VLLM, VLLM, VLLM_EXACT, compare, times_better
from quire.tools.bench.machine import report_facts, this_command
from quire.tools.bench.random_engine import Machine, add_options, open_machine
from quire.tools.bench.report import Report, Table, number_text
from quire.tools.bench.spread import Spread

UNITS = {"throughput": "tok/s", "prefill": "tok/s", "decode": "ms", "first": "ms", "startup": "s"}
COLUMNS = (GOAL, VLLM, VLLM_EXACT, NANO_VLLM)


@dataclass(frozen=True, slots=True)
class Measurement:
    """One figure."""

    shape: str
    measure: str
    """`throughput`, `decode N`, `prefill` or `startup`, as in `gpu_peers`; `first ...` is of first
    tokens.
    """
    value: float
    ceiling: float | None = None
    """The best this device could do, in the same unit."""
    detail: str = ""
    comparable: bool = True
    """Whether this is the workload of the peers' figures."""

    def row(self) -> tuple[str | Spread, ...]:
        found = compare(self.shape, self.measure, self.value) if self.comparable else []
        others = dict.fromkeys(COLUMNS, "-")
        for other in found:
            better = (
                f"{other.times_better:.0%}" if other.name == GOAL else f"{other.times_better:.2f}x"
            )
            others[other.name] = f"{number_text(other.value)} ({better})"
        ceiling = "-"
        if self.ceiling is not None:
            reached = 1 / times_better(self.measure, self.ceiling, self.value)
            ceiling = f"{number_text(self.ceiling)} ({reached:.0%})"
        value = Spread((self.value,), UNITS[self.measure.split()[0]])
        return self.shape, self.measure, value, ceiling, *others.values(), self.detail


def report(
    results: Sequence[Measurement], engine: str, device: torch.device | None = None
) -> Report:
    """`engine` says which one, on which device."""
    note = "Percentages say how much of the ceiling or goal is reached, factors how much faster than a peer we are."
    columns = ("shape", "measure", "quire", "ceiling", *COLUMNS, "")
    table = Table("Quire on this device", note, columns, tuple(result.row() for result in results))
    facts = report_facts(device, this_command()) | {"engine": engine}
    return Report(table.title, facts, (table,), {"results": [asdict(result) for result in results]})


def read_results(path: Path) -> list[Measurement]:
    return [Measurement(**entry) for entry in json.loads(path.read_text())["results"]]


def run(
    about: str,
    add: Callable[[argparse.ArgumentParser], None],
    measure: Callable[[Machine, argparse.Namespace], Iterator[Measurement]],
) -> None:
    """A benchmark's `main`: its options beside the usual ones, an engine, its figures, a report of
    them.
    """
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser)
    add(parser)
    options = parser.parse_args()
    machine = open_machine(options)
    device = machine.engine.decoder.device
    results: list[Measurement] = []
    for result in measure(machine, options):
        results.append(result)
        # After each, so that what was measured is there should time run out.
        report(results, machine.engine.description, device).write(
            None, options.json and Path(options.json)
        )
    report(results, machine.engine.description, device).print()
