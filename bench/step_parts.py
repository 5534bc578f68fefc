"""Where the time of a step goes that checks guesses on a CPU, by the number of its rows.

    python bench/step_parts.py                            # SmolLM2, one request behind 600 tokens
    python bench/step_parts.py --threads 1 --cpu-time     # of one thread on its core, which neighbours hardly change
    python bench/step_parts.py --requests 32 --rows 32 64 128 256 512 --context 200

Calls to C++ are timed one by one while a step is recorded, best of all rounds; `step` is the median
of a whole recorded step, from `submit` to its tokens, and `Python` what of it is not C++.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

# so that it runs where nothing is installed
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from quire import LLM, SamplingParams
from quire.backends.cpu.recording import Calls
from quire.step import ScheduledRequest, Step

PARTS = (
    "layers' products",
    "head",
    "attention",
    "norms, rotation, activation",
    "cache, inputs",
    "drawing",
)


class CallTimes:
    """Seconds in C++ by part, of all calls since the last `take`."""

    def __init__(self, clock: Callable[[], float], vocab_size: int) -> None:
        self._clock, self._vocab_size = clock, vocab_size
        self._seconds: dict[str, float] = defaultdict(float)

    def take(self) -> dict[str, float]:
        found, self._seconds = self._seconds, defaultdict(float)
        return found

    def timed_function(self) -> Callable[..., Callable[..., None]]:
        """Stands for `Calls.function`. The microsecond in which arguments are packed counts as C++."""
        make = Calls.function

        def function(
            calls: Calls, declared: Callable[..., None], name: str | None = None
        ) -> Callable[..., None]:
            return self._timed(make(calls, declared, name), name or declared.__name__)

        return function

    def _timed(self, inner: Callable[..., None], name: str) -> Callable[..., None]:
        def call(**values: Any) -> None:
            began = self._clock()
            inner(**values)
            self._seconds[self._part(name, values)] += self._clock() - began

        return call

    def _part(self, symbol: str, values: dict[str, Any]) -> str:
        if "linear" in symbol:
            return "head" if values["out"].shape[-1] == self._vocab_size else PARTS[0]
        if "attention" in symbol:
            return "attention"
        if "norm" in symbol or "rope" in symbol or "activate" in symbol:
            return PARTS[3]
        return "drawing" if "sample" in symbol else PARTS[4]


def measure(options: argparse.Namespace) -> None:
    clock = time.thread_time if options.cpu_time else time.perf_counter
    if options.threads:
        torch.set_num_threads(options.threads)
    times = CallTimes(clock, 0)
    with patch.object(Calls, "function", times.timed_function()):
        llm = LLM(
            options.model, speculation="ngram", device="cpu", max_model_len=2048, max_num_seqs=64
        )
    engine = llm.engine
    times._vocab_size = engine.decoder.spec.vocab_size
    prompts = [[5 + i] * options.context for i in range(options.requests)]
    # Requests that have ended leave rows and blocks behind, which is all that these steps need.
    llm.generate(
        prompts, SamplingParams(temperature=0, max_tokens=2, ignore_eos=True), progress=False
    )
    graphs = engine.runner._graphs
    assert graphs is not None
    best: dict[int, dict[str, float]] = {rows: defaultdict(lambda: 1e9) for rows in options.rows}
    for number in range(options.rounds + 1):
        for rows in options.rows:
            each = rows // options.requests
            scheduled = tuple(
                ScheduledRequest(
                    f"r{row}", row, options.context - 1, each, True, (), (7,) * (each - 1)
                )
                for row in range(options.requests)
            )
            graphs._recordings.pop(rows, None)
            times.take()
            engine.runner.submit(Step(10**6, 0.0, scheduled)).result()  # recorded, call by call
            found = times.take()
            if number:
                for part, seconds in found.items():
                    best[rows][part] = min(best[rows][part], 1e3 * seconds)
            steps = []
            for _ in range(4):
                began = clock()
                engine.runner.submit(Step(10**6, 0.0, scheduled)).result()
                steps.append(1e3 * (clock() - began))
            inside = times.take()  # the replay is one call
            if number:
                best[rows]["step"] = min(best[rows]["step"], statistics.median(steps))
                best[rows]["calls"] = min(best[rows]["calls"], 250 * sum(inside.values()))
    llm.close()
    report(best)


def report(best: dict[int, dict[str, float]]) -> None:
    """As Markdown, milliseconds."""
    print("| rows |", *(f" {rows} |" for rows in best), sep="")
    print("|---|", *("---|" for _ in best), sep="")
    for part in PARTS:
        print(f"| {part} |", *(f" {one[part]:.2f} |" for one in best.values()), sep="")
    print("| Python |", *(f" {one['step'] - one['calls']:.2f} |" for one in best.values()), sep="")
    print("| step |", *(f" {one['step']:.2f} |" for one in best.values()), sep="")
    print(
        "| step, a row |", *(f" {one['step'] / rows:.2f} |" for rows, one in best.items()), sep=""
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument(
        "--rows", type=int, nargs="+", default=[1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 24, 32, 48]
    )
    parser.add_argument(
        "--requests", type=int, default=1, help="the rows are divided evenly among so many"
    )
    parser.add_argument("--context", type=int, default=600, help="tokens before the step")
    parser.add_argument("--threads", type=int, help="default: torch's")
    parser.add_argument(
        "--cpu-time", action="store_true", help="of this thread alone, for --threads 1"
    )
    parser.add_argument(
        "--rounds", type=int, default=5, help="a first one that does not count comes before them"
    )
    measure(parser.parse_args())


if __name__ == "__main__":
    main()
