"""The engine's own Python work per step: schedule and commit, with a model that costs nothing.

    python -m quire.tools.bench.engine.scheduler  # 256 running decodes
    python -m quire.tools.bench.engine.scheduler --requests 1024 --host-blocks 4096
    python -m quire.tools.bench.engine.scheduler --steps 4000 --usual-collector  # without ours
    python -m quire.tools.bench.engine.scheduler --targets  # with targets and shares and without, in turn

Prints the median and the 99th percentile in milliseconds, over steps in which every request
decodes, and the pauses that garbage collection made.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import statistics
import time
from collections.abc import Iterator
from typing import Any

from quire.engine import Scheduler, SchedulerConfig, make_requests
from quire.observe.step_log import StepLog
from quire.process.gc_pauses import full_collections_put_off
from quire.sampling_params import SamplingParams
from quire.step import Step, StepLogEntry, StepResult


def fake_result(step: Step) -> StepResult:
    """A token for everyone who samples, no two rows the same."""
    tokens = {
        entry.request_id: ((entry.start * 7919 + entry.row) % 50_000,)
        for entry in step.scheduled
        if entry.samples
    }
    return StepResult(step.step_id, tokens)


@contextlib.contextmanager
def collections_timed() -> Iterator[list[float]]:
    """Gives a list that the seconds of every garbage collection inside are added to."""
    pauses: list[float] = []
    began = 0.0

    def note(phase: str, _info: dict[str, Any]) -> None:
        nonlocal began
        if phase == "start":
            began = time.perf_counter()
        else:
            pauses.append(time.perf_counter() - began)

    gc.callbacks.append(note)
    try:
        yield pauses
    finally:
        gc.callbacks.remove(note)


def measure(
    num_requests: int, prompt_len: int, num_steps: int, depth: int, num_host_blocks: int
) -> dict[str, list[float]]:
    """Seconds spent per step, by part."""
    max_len = prompt_len + num_steps + 80
    config = SchedulerConfig(
        num_blocks=num_requests * -(-max_len // 16) + 1,
        max_num_seqs=num_requests,
        max_batched_tokens=max(8192, num_requests),
        max_model_len=max_len,
        num_host_blocks=num_host_blocks,
    )
    scheduler = Scheduler(config)
    log = StepLog()
    params = SamplingParams(max_tokens=None, ignore_eos=True, stop_token_ids=(50_001,))
    for i in range(num_requests):
        # Lengths differ, so that block boundaries fall on all steps alike.
        prompt = [(i * 31 + position) % 50_000 for position in range(prompt_len + i % 16)]
        for request in make_requests(f"request-{i}", prompt, params, seed=i):
            scheduler.add(request, 0.0)
    times: dict[str, list[float]] = {"schedule": [], "commit": [], "both": []}
    in_flight: list[Step] = []
    while len(times["both"]) < num_steps:
        began = time.perf_counter()
        in_flight.append(scheduler.schedule(0.0))
        scheduled = time.perf_counter()
        if len(in_flight) < depth:
            continue
        step = in_flight.pop(0)
        result = fake_result(step)
        before_commit = time.perf_counter()
        scheduler.commit(step, result, 0.0)
        log.append(StepLogEntry(step, result, None, 0.0))
        done = time.perf_counter()
        if len(step.scheduled) == num_requests == step.num_tokens:
            times["schedule"].append(scheduled - began)
            times["commit"].append(done - before_commit)
            times["both"].append(scheduled - began + done - before_commit)
    return times


TENANTS = "abcd"
BLOCK_SIZE = 16


class DrivenScheduler:
    """All rows decode and one more request waits; with a `chunk`, the last row is at a prompt of
    which each step computes so many tokens. Steps take 10 ms and a little by a clock of their own.

    The requests come one by one, with prompts of one token: so whatever the settings, each row
    needs its next block in the same step.
    """

    def __init__(self, num_requests: int, num_steps: int, chunk: int, **settings: Any) -> None:
        max_len = 2 * (num_requests + 2 * num_steps + chunk * (2 * num_steps + 10))
        config = SchedulerConfig(
            num_blocks=num_requests * -(-max_len // 16) + 1,
            max_num_seqs=num_requests,
            max_batched_tokens=num_requests - 1 + chunk if chunk else 8192,
            max_model_len=max_len,
            block_size=BLOCK_SIZE,
            **settings,
        )
        self._scheduler = Scheduler(config)
        self._num_decodes = num_requests - bool(chunk)
        self._now = 0.0
        for i in range(num_requests + 1):
            tenant = TENANTS[i % len(TENANTS)] if config.policy == "fair" else ""
            params = SamplingParams(max_tokens=None, ignore_eos=True, tenant=tenant)
            length = max_len // 2 if chunk and i == num_requests - 1 else 1
            prompt = [(i * 31 + position) % 50_000 for position in range(length)]
            (request,) = make_requests(f"request-{i}", prompt, params, seed=i)
            self._scheduler.add(request, self._now)
            self.step()

    def step(self) -> tuple[float, bool]:
        """Seconds of Python, and whether all rows were in the step."""
        began = time.perf_counter()
        step = self._scheduler.schedule(self._now)
        scheduled = time.perf_counter()
        result = fake_result(step)
        self._now += 0.01 + 1e-5 * (step.step_id % 7)
        before_commit = time.perf_counter()
        self._scheduler.commit(step, result, self._now)
        seconds = scheduled - began + time.perf_counter() - before_commit
        rows = self._scheduler.config.max_num_seqs
        return seconds, step.num_decodes == self._num_decodes and len(step.scheduled) == rows


def compare(num_requests: int, num_steps: int, chunk: int, **settings: Any) -> tuple[float, float]:
    """Median seconds of a step, and that of steps with these settings by those without beside
    them: the two take turns, so that whatever else the machine does hits both. As many steps are
    added up as a block has tokens: in these each row fills a block once, whenever that is.
    """
    plain = DrivenScheduler(num_requests, num_steps, chunk)
    other = DrivenScheduler(num_requests, num_steps, chunk, **settings)
    without: list[float] = []
    own: list[float] = []
    for number in range(2 * num_steps):
        first, second = (plain, other) if number % 2 else (other, plain)
        (one, one_full), (two, two_full) = first.step(), second.step()
        if one_full and two_full:
            without.append(one if first is plain else two)
            own.append(two if first is plain else one)
    if len(own) < num_steps:
        raise RuntimeError(f"only {len(own)} of {2 * num_steps} steps had all rows")
    ratios = [
        sum(own[start : start + BLOCK_SIZE]) / sum(without[start : start + BLOCK_SIZE])
        for start in range(0, len(own) - BLOCK_SIZE + 1, BLOCK_SIZE)
    ]
    return statistics.median(without), statistics.median(ratios)


def print_comparisons(num_requests: int, num_steps: int) -> None:
    target = {"target_token_time": 1.0}  # which is kept, so both compute the same
    print(f"{num_requests} rows, {num_steps} steps or more each, in turn; medians")
    for chunk, what in ((0, "all decode, one waits"), (64, "one is at a prompt, 64 tokens a step")):
        for name, settings in (
            ("a target", target),
            ("shares", {"policy": "fair"}),
            ("both", {**target, "policy": "fair"}),
        ):
            plain, ratio = compare(num_requests, num_steps, chunk, **settings)
            print(f"{what}: {1e3 * plain:.3f} ms a step, with {name} {ratio:.3f} of it", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=200, help="prompt tokens of each request")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--host-blocks", type=int, default=0)
    parser.add_argument(
        "--usual-collector", action="store_true", help="put no full collections off"
    )
    parser.add_argument(
        "--targets",
        action="store_true",
        help="what targets of token times and shares add to a step",
    )
    options = parser.parse_args()
    if options.targets:
        with full_collections_put_off():
            print_comparisons(options.requests, options.steps)
        print(f"load at the end: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
        return
    print(f"{options.requests} running decodes, {options.steps} steps, milliseconds per step")
    print(f"{'':>8} {'':>10} {'median':>8} {'p99':>8}")
    for depth in (1, 2):
        gc.collect()
        policy = contextlib.nullcontext() if options.usual_collector else full_collections_put_off()
        with policy, collections_timed() as pauses:
            times = measure(
                options.requests, options.prompt, options.steps, depth, options.host_blocks
            )
        for part, seconds in times.items():
            median = 1e3 * statistics.median(seconds)
            p99 = 1e3 * statistics.quantiles(seconds, n=100)[98]
            print(f"depth {depth:>2} {part:>10} {median:8.3f} {p99:8.3f}")
        longest, total = (1e3 * figure for figure in (max(pauses, default=0.0), sum(pauses)))
        print(
            f"depth {depth:>2} garbage: {len(pauses)} collections, longest {longest:.1f} ms, together {total:.0f} ms"
        )


if __name__ == "__main__":
    main()
