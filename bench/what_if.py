"""`quire replay --what-if` against what a second run measures: the goal is 10% on medians and 95th percentiles.

    python bench/what_if.py                                  # SmolLM2: 2 rows to 8, 8 to 2, smaller steps, more load
    python bench/what_if.py --requests 100 --rate 1.5 --settings max_num_seqs=4 max_num_seqs=16
    python bench/what_if.py --clock wall                     # on a quiet machine

Each setting is run for real, with the same requests at the same times; what-if predicts it from the logs of the others.
The clock is the processor's time of one thread: it stands still while other programs run, and waiting for the next
request takes none, so a busy machine measures what a quiet one would.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs where nothing is installed

import torch

from quire.assemble import Engine, assemble, build_engine
from quire.checkpoints.sources import resolve
from quire.config import EngineConfig
from quire.engine import make_requests
from quire.observe.engine_metrics import derive_metrics
from quire.observe.head_share import head_share
from quire.observe.step_log import StepLog
from quire.process.gc_pauses import full_collections_put_off
from quire.sampling_params import SamplingParams
from quire.simulate.recorded import recorded_requests
from quire.simulate.step_times import fit_step_times
from quire.simulate.what_if import Setting, Summary, parse_changes, play
from quire.step import StepLogEntry

SETTINGS = ("max_num_seqs=2", "max_num_seqs=8", "max_num_seqs=8,max_batched_tokens=32")
LIMITS = {"max_num_seqs": 8, "max_batched_tokens": 512}
LONGEST = 512
FIGURES = (("ttft", "time to first token"), ("per_token", "time per token"), ("latency", "latency"))
GOAL = 0.10


Jobs = list[tuple[float, list[int], SamplingParams]]
"""When, what, how; the last one first."""


class Clock:
    """Seconds of the processor, and those it was moved on by."""

    def __init__(self, is_wall: bool) -> None:
        self._read = time.perf_counter if is_wall else time.process_time
        self._offset = -self._read()

    def __call__(self) -> float:
        return self._read() + self._offset

    def move_to(self, moment: float) -> None:
        self._offset += max(0.0, moment - self())


def make_jobs(count: int, rate: float, vocab_size: int, seed: int = 1) -> Jobs:
    """Requests that come at random."""
    source = random.Random(seed)
    due, jobs = 0.0, []
    for _ in range(count):
        due += source.expovariate(rate)
        prompt = [source.randrange(vocab_size) for _ in range(source.choice((8, 40, 120)))]
        jobs.append((due, prompt, SamplingParams(max_tokens=source.choice((8, 24, 64)), ignore_eos=True)))
    return jobs[::-1]


def limits_of(changes: str) -> dict[str, int]:
    """All of them, as a log of another setting needs to be told."""
    return LIMITS | {name: int(value) for name, _, value in (part.partition("=") for part in changes.split(","))}


def drive(engine: Engine, clock: Clock, jobs: Jobs) -> None:
    """Requests, each when it is due, for real."""
    core = engine.core
    core.clock = clock
    with full_collections_put_off():
        while jobs or core.has_work:
            if not core.has_work:
                clock.move_to(jobs[-1][0])
            while jobs and jobs[-1][0] <= clock():
                arrival, prompt, params = jobs.pop()
                for request in make_requests(f"r{len(jobs)}", prompt, params, len(jobs)):
                    core.add_request(request, arrival)
            core.step(clock())


def measure(first: Engine, changes: str, options: argparse.Namespace) -> tuple[Setting, list[StepLogEntry]]:
    """All requests with a setting, after a few that warm it up."""
    limits = limits_of(changes)
    memory = 2**20 * 64 * limits["max_num_seqs"]
    config = EngineConfig(device="cpu", max_model_len=LONGEST, kv_cache_memory=memory, prefix_caching=False, **limits)
    engine = assemble(first.decoder, config, name="what-if", tokenizer=first.tokenizer, grammars=first.grammars)
    core, vocab_size, is_wall = engine.core, first.spec.vocab_size, options.clock == "wall"
    drive(engine, Clock(is_wall), make_jobs(12, 10.0, vocab_size, seed=2))
    about = {"depth": core.depth, "head_share": head_share(first.spec), **asdict(core.scheduler.config)}
    path = None if options.save is None else options.save / f"{changes}.jsonl"
    log = StepLog(capacity=10**7, path=path, engine=about)
    core._on_step = log.append
    drive(engine, Clock(is_wall), make_jobs(options.requests, options.rate, vocab_size))
    log.close()
    return Setting(core.scheduler.config, core.depth), list(log)


def errors(predicted: Summary, measured: Summary) -> dict[str, float]:
    """By how much each figure is off."""
    found = {}
    for name, title in FIGURES:
        for index, which in enumerate(("median", "p95")):
            found[f"{title}, {which}"] = getattr(predicted, name)[index] / getattr(measured, name)[index] - 1
    found["answer tokens/s"] = predicted.tokens_per_second / measured.tokens_per_second - 1
    return found


def told(changes: str) -> str:
    return ",".join(f"{name}={value}" for name, value in limits_of(changes).items())


def print_table(titles: Sequence[str], columns: Sequence[dict[str, float]]) -> None:
    print(f"{'':28}" + "".join(f"{title:>40}" for title in titles))
    for name in columns[0]:
        print(f"{name:28}" + "".join(f"{column[name]:>+40.1%}" for column in columns))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--rate", type=float, default=1.1, help="requests a second")
    parser.add_argument("--clock", choices=("cpu", "wall"), default="cpu")
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS))
    parser.add_argument("--save", type=Path, help="a folder for the logs, as `quire replay` reads them")
    options = parser.parse_args()
    if options.save is not None:
        options.save.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    loading = EngineConfig(device="cpu", max_num_seqs=1, max_model_len=LONGEST, kv_cache_memory="64MiB")
    first = build_engine(resolve(options.model), loading)
    runs = {}
    for changes in options.settings:
        runs[changes] = measure(first, changes, options)
        run = Summary.of(derive_metrics(runs[changes][1]))
        print(
            f"{changes}: measured {run.steps} steps in {run.seconds:.1f} s, {run.tokens_per_second:.1f} tokens/s, "
            f"time to first token {run.ttft[0]:.3f} / {run.ttft[1]:.3f} s, per token {1e3 * run.per_token[0]:.1f} / "
            f"{1e3 * run.per_token[1]:.1f} ms (median / p95)",
            flush=True,
        )
    worst = 0.0
    for changes, (base, entries) in runs.items():
        times = fit_step_times(entries, head_share(first.spec))
        columns, titles = [], []
        for other, (_, measured) in runs.items():
            times.restart()
            played, _ = play(recorded_requests(entries), parse_changes(told(other), base), times)
            columns.append(errors(Summary.of(played), Summary.of(derive_metrics(measured))))
            titles.append("replayed" if other == changes else other)
            worst = max(worst, *map(abs, columns[-1].values()))
        print(f"\nfrom the log of {changes} (steps held out: {times.quality.median_error:.1%} off in the median)")
        print_table(titles, columns)
    print(f"\nthe worst figure is {worst:.1%} off; the goal is {GOAL:.0%}")


if __name__ == "__main__":
    main()
