"""Several models' GPU benchmarks one after the other, each model in a process of its own, and one table
of all at the end.

    python -m quire.tools.bench.gpu.all  # everything the goals name
    python -m quire.tools.bench.gpu.all decode:qwen3-0.6b throughput:qwen3-8b --minutes 9
    python -m quire.tools.bench.gpu.all decode+prefill:gpt-oss-20b:MXFP4 decode:qwen3-8b:INT4_G128  # in a format
    python -m quire.tools.bench.gpu.all decode:qwen3-0.6b --batches 1,32 --profile  # options of the benchmarks
    python -m quire.tools.bench.gpu.all decode:tiny-experts:INT4_G128 --batches 1,4 --steps 8  # on a CPU

The format is that of all matrices between embedding and head, as checkpoints in FP8, int4 or GGUF are
published; MXFP4 is that of the experts alone. What does not fit into the minutes is left out and named.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from quire.tools.bench.gpu.model import BENCHMARKS
from quire.tools.bench.gpu.report import Measurement, read_results, report

STARTUP = "startup"
"""Has a process of its own, and its own children."""
_ALL = "decode+throughput+prefill"
EVERYTHING = (
    f"{_ALL}:qwen3-0.6b",
    f"{STARTUP}:qwen3-0.6b",
    "decode:llama-3.2-1b",
    f"{_ALL}:qwen3-8b",
    "decode+throughput:qwen3-30b-a3b",
    f"{_ALL}:gpt-oss-20b:MXFP4",
    f"{_ALL}:qwen3-30b-a3b:FP8_G128",
    f"{_ALL}:qwen3-30b-a3b:INT4_G128",
    "decode:qwen3-30b-a3b:Q4_K",
    f"{_ALL}:qwen3-8b:FP8",
    f"{_ALL}:qwen3-8b:INT4_G128",
    "decode+prefill:gemma-3-4b",
    f"{_ALL}:qwen3.5-35b-a3b",
    "decode:qwen3.5-9b",
    f"{_ALL}:glm-4.7-flash",
)


def run_job(job: str, extra: list[str], seconds: float) -> tuple[list[Measurement], str]:
    """The figures (as far as it came), and what went wrong if anything did."""
    benchmarks, shape, format = (*job.split(":"), "", "")[:3]
    with TemporaryDirectory() as folder:
        figures = Path(folder) / "figures.json"
        module = STARTUP if benchmarks == STARTUP else "model"
        command = [sys.executable, "-m", f"quire.tools.bench.gpu.{module}"]
        command += benchmarks.split("+") if module == "model" else []
        command += ["--shape", shape or "qwen3-0.6b", "--json", str(figures)]
        if format:
            command += ["--expert-format" if format == "MXFP4" else "--formats", format]
        command += extra
        try:
            status = subprocess.run(command, timeout=seconds, check=False).returncode
            problem = f"ended with status {status}" if status else ""
        except subprocess.TimeoutExpired:
            problem = f"stopped after {seconds:.0f} s"
        return read_results(figures) if figures.exists() else [], problem


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "jobs",
        nargs="*",
        default=EVERYTHING,
        metavar="BENCHMARK[+BENCHMARK]:SHAPE[:FORMAT]",
        help="default: all goals",
    )
    parser.add_argument("--minutes", type=float, default=9.0, help="for all of them together")
    options, extra = parser.parse_known_args()
    for job in options.jobs:
        named = job.partition(":")[0]
        if named != STARTUP and not set(named.split("+")) <= set(BENCHMARKS):
            parser.error(
                f"{job}: there are {', '.join(BENCHMARKS)}, of which some may be joined by +, and "
                f"{STARTUP}, each with :SHAPE or :SHAPE:FORMAT"
            )
    ends = time.monotonic() + 60 * options.minutes
    results: list[Measurement] = []
    problems: list[str] = []
    for job in options.jobs:
        left = ends - time.monotonic()
        if left < 1:
            problems.append(f"{job}: no time left")
            continue
        print(f"\n== {job} ({left:.0f} s left)", flush=True)
        found, problem = run_job(job, extra, left)
        results += found
        if problem:
            problems.append(f"{job}: {problem}")
    report(results, "each model in a process of its own").print()
    for problem in problems:
        print(problem)
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
