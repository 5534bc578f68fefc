"""`quire replay --what-if` against what a second run measures: the goal is 10% on medians and 95th
percentiles.

    python -m quire.tools.bench.engine.what_if  # SmolLM2: 2 rows to 8, 8 to 2, smaller steps, more load
    python -m quire.tools.bench.engine.what_if --requests 100 --rate 1.5 --settings max_num_seqs=4 max_num_seqs=16
    python -m quire.tools.bench.engine.what_if --clock wall  # on a quiet machine
    python -m quire.tools.bench.engine.what_if --device cuda --rate 60 --requests 200  # by the wall clock
    python -m quire.tools.bench.engine.what_if --save FOLDER  # keeps the logs
    python -m quire.tools.bench.engine.what_if --logs FOLDER  # predicts from them again: no request is run
    python -m quire.tools.bench.engine.what_if --logs FOLDER --no-calibrate  # nothing is run

Each setting is run for real, twice, with the same requests at the same times; what-if predicts it
from the first logs of the others: from the log alone and, where that leads to steps of sizes that
the log does not have, with some of those measured first, as `quire replay` does where it finds the
model. In brackets: by how much the two runs themselves differ, so that a figure can be judged. The
clock is the processor's time of one thread: it stands still while other programs run, and waiting
for the next request takes none, so a busy machine measures about what a quiet one would.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from quire.assemble import Engine, assemble, build_engine
from quire.checkpoints.sources import resolve
from quire.config import EngineConfig
from quire.engine import make_requests
from quire.observe.engine_metrics import derive_metrics
from quire.observe.measure_costs import costs_of_shapes, measured_costs
from quire.observe.row_costs import RowCosts
from quire.observe.step_log import LoggedEngine, LoggedModel, StepLog, last_run
from quire.process.gc_pauses import full_collections_put_off
from quire.sampling_params import SamplingParams
from quire.step import StepLogEntry
from quire.tools.verify.calibrate import SECONDS, SHARES
from quire.tools.what_if.calibration import Calibration, Calibrator, config_for
from quire.tools.what_if.recorded import recorded_requests
from quire.tools.what_if.step_mix import StepMix, add_seconds
from quire.tools.what_if.step_times import StepTimes, fit_step_times
from quire.tools.what_if.what_if import Setting, Summary, parse_changes, predict

SETTINGS = ("max_num_seqs=2", "max_num_seqs=8", "max_num_seqs=8,max_batched_tokens=32")
LIMITS = {"max_num_seqs": 8, "max_batched_tokens": 512}
LONGEST = 512
FIGURES = (("ttft", "time to first token"), ("per_token", "time per token"), ("latency", "latency"))
WHICH = ("median", "p95")
THROUGHPUT = "answer tokens/s"
"""Shown, but not counted: below its limit an engine answers as much as it is asked."""
GOAL = 0.10


class Off(NamedTuple):
    """By what part a figure is off; whether what-if calls it uncertain (a line below the table of
    `quire replay` gives its range); and whether a measured run lies in that range.
    """

    part: float
    is_uncertain: bool
    is_in_range: bool


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


def make_jobs(count: int, rate: float, vocab_size: int, seed: int) -> Jobs:
    """Requests that come at random."""
    source = random.Random(seed)
    due, jobs = 0.0, []
    for _ in range(count):
        due += source.expovariate(rate)
        prompt = [source.randrange(vocab_size) for _ in range(source.choice((8, 40, 120)))]
        jobs.append(
            (due, prompt, SamplingParams(max_tokens=source.choice((8, 24, 64)), ignore_eos=True))
        )
    return jobs[::-1]


def stairs(count: int) -> Jobs:
    """So many requests at once, which end one after the other: the first step of each number of
    answers, whose calls are recorded while they are computed, takes three times as long. That is
    once in an engine's life.
    """
    return [
        (0.0, [1, 2, 3], SamplingParams(max_tokens=8 + 2 * number, ignore_eos=True))
        for number in range(count)
    ]


def limits_of(changes: str) -> dict[str, int]:
    """All of them, as a log of another setting needs to be told."""
    return LIMITS | {
        name: int(value) for name, _, value in (part.partition("=") for part in changes.split(","))
    }


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


def measure(
    first: Engine, costs: RowCosts, changes: str, options: argparse.Namespace, number: int
) -> tuple[Setting, list[StepLogEntry]]:
    """All requests with a setting, after a few that warm it up; `number` of its runs so far."""
    limits = limits_of(changes)
    memory = 2**20 * 64 * limits["max_num_seqs"]
    config = EngineConfig(
        device=options.device,
        max_model_len=LONGEST,
        kv_cache_memory=memory,
        prefix_caching=False,
        max_num_seqs=limits["max_num_seqs"],
        max_batched_tokens=limits["max_batched_tokens"],
    )
    engine = assemble(
        first.decoder, config, name="what-if", tokenizer=first.tokenizer, grammars=first.grammars
    )
    core, vocab_size, is_wall = engine.core, first.spec.vocab_size, options.clock == "wall"
    drive(engine, Clock(is_wall), make_jobs(12, 10.0, vocab_size, seed=2))
    drive(engine, Clock(is_wall), stairs(limits["max_num_seqs"]))
    model = LoggedModel(options.model, options.device)._asdict()
    about = {
        "depth": core.depth,
        "costs": asdict(costs),
        "model": model,
        **asdict(core.scheduler.config),
    }
    path = (
        None
        if options.save is None
        else options.save / f"{changes}{f' again {number}' if number else ''}.jsonl"
    )
    log = StepLog(capacity=10**7, path=path, engine=about)
    core._on_step = log.append
    drive(
        engine, Clock(is_wall), make_jobs(options.requests, options.rate, vocab_size, options.seed)
    )
    log.close()
    return Setting(core.scheduler.config, core.depth), list(log)


def figures(run: Summary) -> dict[str, float]:
    """What is compared."""
    found = {}
    for name, title in FIGURES:
        for index, which in enumerate(WHICH):
            found[f"{title}, {which}"] = getattr(run, name)[index]
    found[THROUGHPUT] = run.tokens_per_second
    return found


@dataclass(frozen=True)
class Measured:
    """A setting's runs: the log of the first, and what all of them were like."""

    setting: Setting
    costs: RowCosts
    entries: Sequence[StepLogEntry]
    runs: list[dict[str, float]]

    def mean(self, name: str) -> float:
        return statistics.fmean(run[name] for run in self.runs)

    def spread(self, name: str) -> float:
        """Between the lowest and the highest run, as a part of their mean."""
        values = [run[name] for run in self.runs]
        return (max(values) - min(values)) / self.mean(name)


def all_limits(changes: str) -> str:
    return ",".join(f"{name}={value}" for name, value in limits_of(changes).items())


def print_table(columns: Sequence[tuple[str, dict[str, float], Measured]]) -> None:
    """By how much each prediction is off, and in brackets what two runs differ by."""
    print(f"{'':28}" + "".join(f"{title:>40}" for title, _, _ in columns))
    for name in columns[0][1]:
        cells = [f"{off[name]:+.1%} ({measured.spread(name):.1%})" for _, off, measured in columns]
        print(f"{name:28}" + "".join(f"{cell:>40}" for cell in cells))


def run_all(first: Engine, costs: RowCosts, options: argparse.Namespace) -> dict[str, Measured]:
    """Every setting, one after the other and then again, so that a slow minute is not one
    setting's.
    """
    runs: dict[str, Measured] = {}
    for number in range(options.repeats):
        for changes in options.settings:
            setting, entries = measure(first, costs, changes, options, number)
            run = Summary.of(derive_metrics(entries))
            runs.setdefault(changes, Measured(setting, costs, entries, [])).runs.append(
                figures(run)
            )
            print(
                f"{changes}: measured {run.steps} steps in {run.seconds:.1f} s, {run.tokens_per_second:.1f} tokens/s, "
                f"time to first token {run.ttft[0]:.3f} / {run.ttft[1]:.3f} s, per token {1e3 * run.per_token[0]:.1f} "
                f"/ {1e3 * run.per_token[1]:.1f} ms (median / p95)",
                flush=True,
            )
    return runs


def read_all(folder: Path) -> tuple[dict[str, Measured], RowCosts]:
    """What `--save` kept."""
    runs: dict[str, Measured] = {}
    costs = RowCosts()
    for path in sorted(
        folder.glob("*.jsonl"), key=lambda path: (" again " in path.stem, path.stem)
    ):
        changes = path.stem.partition(" again ")[0]
        entries, engine = last_run(path)
        assert engine is not None, path
        costs = engine.costs
        setting = Setting(engine.config, engine.depth)
        runs.setdefault(changes, Measured(setting, costs, entries, [])).runs.append(
            figures(Summary.of(derive_metrics(entries)))
        )
    return runs, costs


def load(model: str, device: str) -> Engine:
    torch.set_num_threads(1)
    return build_engine(
        resolve(model),
        EngineConfig(device=device, max_num_seqs=1, max_model_len=LONGEST, kv_cache_memory="64MiB"),
    )


def calibrator_for(
    first: Engine, log: Measured, runs: dict[str, Measured], options: argparse.Namespace
) -> Calibrator:
    """As `quire.tools.verify.calibrate` opens it, with our clock."""
    wanted = config_for([one.setting.config for one in runs.values()])
    limits = {
        name: getattr(wanted, name)
        for name in ("max_num_seqs", "max_batched_tokens", "max_model_len")
    }
    config = EngineConfig(
        device=options.device, kv_cache_memory="256MiB", prefix_caching=False, **limits
    )
    heard: list[StepLogEntry] = []
    engine = assemble(
        first.decoder, config, name="what-if", tokenizer=first.tokenizer, grammars=first.grammars
    )
    engine.core.clock, engine.core._on_step = Clock(options.clock == "wall"), heard.append
    logged = LoggedEngine(log.setting.depth, log.setting.config, log.costs)
    return Calibrator(engine.core, heard, first.spec.vocab_size, options.model, logged, log.entries)


def tell(found: Calibration) -> None:
    print(
        f"\nmeasured {found.steps} steps of {found.sizes} sizes in {found.seconds:.1f} s; steps of the log's sizes "
        f"take {found.speed:.3f} times what they took, the others are known to {found.error:.1%}"
    )


def within(all_off: Sequence[Off]) -> int:
    return sum(one.part <= GOAL for one in all_off)


def unknown(log: Measured, runs: dict[str, Measured], times: StepTimes) -> dict[StepMix, float]:
    """Seconds of steps of sizes that `times` do not know, of all settings that lead to many."""
    outside: dict[StepMix, float] = {}
    for other in runs:
        found = predict(
            recorded_requests(log.entries), parse_changes(all_limits(other), log.setting), times
        )
        outside = add_seconds(outside, found.outside) if found.is_outside else outside
    return outside


def compare(changes: str, runs: dict[str, Measured], times: StepTimes, all_off: list[Off]) -> None:
    """What is predicted from a log with all settings."""
    log, columns = runs[changes], []
    for other, measured in runs.items():
        found = predict(
            recorded_requests(log.entries), parse_changes(all_limits(other), log.setting), times
        )
        off = {name: value / measured.mean(name) - 1 for name, value in figures(found.run).items()}
        columns.append(("replayed" if other == changes else other, off, measured))
        low, high = figures(found.low), figures(found.high)
        doubtful = {(name, index) for name, index, _, _ in found.uncertain()}
        for kind, title in FIGURES:
            for index, which in enumerate(WHICH):
                name = f"{title}, {which}"
                is_in_range = any(low[name] <= run[name] <= high[name] for run in measured.runs)
                all_off.append(Off(abs(off[name]), (kind, index) in doubtful, is_in_range))
        print(
            f"{other}: {found.share_outside:.1%} of the time is in steps of sizes that were not measured"
        )
    print(
        f"\nfrom the log of {changes} (steps held out: {times.quality.median_error:.1%} off in the median)"
    )
    print_table(columns)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--rate", type=float, default=1.1, help="requests a second")
    parser.add_argument("--seed", type=int, default=1, help="of the requests")
    parser.add_argument("--repeats", type=int, default=2, help="runs of each setting")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--clock",
        choices=("cpu", "wall"),
        help="default: the processor's time, with a GPU the wall's",
    )
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS))
    parser.add_argument(
        "--save", type=Path, help="a folder for the logs, as `quire replay` reads them"
    )
    parser.add_argument("--logs", type=Path, help="a folder with such logs: nothing is run")
    parser.add_argument(
        "--no-calibrate", dest="calibrate", action="store_false", help="predict from the logs alone"
    )
    options = parser.parse_args()
    options.clock = options.clock or ("cpu" if options.device == "cpu" else "wall")
    if options.save is not None:
        options.save.mkdir(parents=True, exist_ok=True)
    first: Engine | None = None
    if options.logs is not None:
        runs, costs = read_all(options.logs)
    else:
        first = load(options.model, options.device)
        costs = measured_costs(first.decoder, costs_of_shapes(first.spec))
        runs = run_all(first, costs, options)
    if options.calibrate and first is None:
        first = load(options.model, options.device)
    all_off: dict[str, list[Off]] = {"the log alone": []}
    if options.calibrate:
        all_off["steps measured"] = []
    for changes, log in runs.items():
        times = fit_step_times(
            log.entries, costs, graph_tokens=log.setting.config.max_checked_tokens
        )
        compare(changes, runs, times, all_off["the log alone"])
        outside = unknown(log, runs, times)
        if first is not None and options.calibrate:
            if outside:
                calibrator = calibrator_for(first, log, runs, options)
                with full_collections_put_off():
                    found = calibrator.calibrate(outside, SHARES[0] * SECONDS)
                    outside = unknown(log, runs, found.times)
                    found = calibrator.calibrate(outside, SHARES[1] * SECONDS) if outside else found
                tell(found)
                compare(changes, runs, found.times, all_off["steps measured"])
            else:
                all_off["steps measured"] += all_off["the log alone"][
                    -len(runs) * 2 * len(FIGURES) :
                ]
    print()
    for how, off in all_off.items():
        certain = [one for one in off if not one.is_uncertain]
        doubtful = [one for one in off if one.is_uncertain]
        print(
            f"{how}: {within(off)} of {len(off)} figures are within {GOAL:.0%}, the worst is {max(off).part:.1%} off; "
            f"of those that what-if does not call uncertain {within(certain)} of {len(certain)}; of the "
            f"{len(doubtful)} others, {sum(one.is_in_range for one in doubtful)} were measured in the range it gives"
        )
    spread = max(measured.spread(name) for measured in runs.values() for name in measured.runs[0])
    print(f"two runs of the same setting differ by up to {spread:.1%} (in brackets)")


if __name__ == "__main__":
    main()
