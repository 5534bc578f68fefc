"""Several benchmarks of one model in one process: its weights are made and its kernels loaded once.

python -m quire.tools.bench.gpu.model decode prefill --shape qwen3.5-35b-a3b
python -m quire.tools.bench.gpu.model decode throughput --shape tiny --batches 1 --steps 32 --requests 4
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from quire.tools.bench.gpu import decode, prefill, throughput
from quire.tools.bench.gpu.report import Measurement, run
from quire.tools.bench.random_engine import Machine

BENCHMARKS = {"decode": decode, "throughput": throughput, "prefill": prefill}


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("benchmarks", nargs="+", choices=list(BENCHMARKS), metavar="BENCHMARK")
    for benchmark in BENCHMARKS.values():
        benchmark.add(parser)


def measure(machine: Machine, options: argparse.Namespace) -> Iterator[Measurement]:
    for name in options.benchmarks:
        yield from BENCHMARKS[name].measure(machine, options)


def main() -> None:
    run(__doc__, add, measure)


if __name__ == "__main__":
    main()
