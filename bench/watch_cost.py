"""What it costs to watch: the same requests to `quire serve` with nobody at the page and with
somebody, in alternating rounds; and what a step and a frame cost the engine process, measured
alone.

    python bench/watch_cost.py
    python bench/watch_cost.py --requests 200 --repeats 5 -- --model Qwen/Qwen3-0.6B --max-num-seqs 256

Behind `--` stand options of `quire serve`. The goal is less than 2% of the throughput. The watcher
reads what a page is sent and throws it away: a browser has a machine of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import statistics
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

# so that it runs where nothing is installed
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.server import served, serving
from quire.engine import SchedulerConfig
from quire.observe.live_view import LiveView
from quire.sampling_params import SamplingParams
from quire.step import Admission, ScheduledRequest, Step, StepLogEntry, StepResult
from quire.tools.bench.jobs import Job, Lengths, TokenSource, random_jobs

CATCHING_UP = 1.5
"""Seconds in which a watcher is told of the steps that the log remembers."""
GRACE = 6.0
"""Seconds after which the engine is told that nobody watches."""


@contextlib.contextmanager
def watcher(url: str, read: list[bytes]) -> Iterator[None]:
    """Somebody who watches; the lines that come are added to `read`."""
    response = urllib.request.urlopen(f"{url}/page/watch")

    def drain() -> None:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            read.extend(response)

    thread = threading.Thread(target=drain, daemon=True)
    thread.start()
    try:
        yield
    finally:
        response.close()
        thread.join(2)


def cpu_seconds() -> float:
    """What all processes below this one have taken so far: the server's, which a busy machine makes
    no longer.
    """
    found, pids = 0.0, [os.getpid()]
    while pids:
        pid = pids.pop()
        children = [
            Path(f"/proc/{pid}/task/{thread}/children")
            for thread in os.listdir(f"/proc/{pid}/task")
        ]
        below = [int(child) for file in children for child in file.read_text().split()]
        pids += below
        for child in below:
            fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
            found += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return found


def measured(url: str, jobs: list[Job]) -> tuple[float, float]:
    """Tokens a second, and the seconds of processor time they took the server."""
    before = cpu_seconds()
    rate, _ = served(url, jobs, [])
    return rate, cpu_seconds() - before


def compare(url: str, jobs: list[Job], repeats: int) -> None:
    served(url, jobs[:2], [])
    shares, costs, begun = [], [], []
    for number in range(repeats):
        alone, alone_cpu = measured(url, jobs)
        read: list[bytes] = []
        with watcher(url, read):
            before = cpu_seconds()
            time.sleep(CATCHING_UP)
            begun.append(cpu_seconds() - before)
            read.clear()
            start = time.monotonic()
            watched, watched_cpu = measured(url, jobs)
            seconds = time.monotonic() - start
        shares.append(watched / alone)
        costs.append(watched_cpu / alone_cpu)
        frames = sum(line.startswith(b"event: frame") for line in read)
        sizes = f"{frames / seconds:.1f} frames and {sum(map(len, read)) / seconds / 1024:.1f} KiB a second"
        took = f"{alone_cpu:.2f} and {watched_cpu:.2f} s of processor time"
        print(
            f"round {number + 1}: alone {alone:.1f} tok/s, watched {watched:.1f} tok/s ({took}; {sizes})",
            flush=True,
        )
        time.sleep(GRACE)
    print(
        f"to begin with, the steps of the log take {statistics.median(begun):.2f} s of processor time, once"
    )
    for what, found in (("throughput", shares), ("processor time", costs)):
        spread = f"{min(found):.1%} to {max(found):.1%}"
        print(
            f"watched: {statistics.median(found):.1%} of the {what} (median of {repeats} rounds, {spread})"
        )


def measure_view(num_requests: int) -> None:
    """Microseconds that the engine process spends on a step of so many decodes, and on a frame."""
    num_blocks = num_requests * 64
    config = SchedulerConfig(num_blocks + 1, num_requests, max(num_requests, 8192), 4096)
    view = LiveView(config, is_complete=True)
    names = [f"chatcmpl-{number:024d}" for number in range(num_requests)]
    admitted = tuple(
        Admission(name, row, (1,) * 512, 512, (), 0, 0, SamplingParams(), 0, (), 0.0)
        for row, name in enumerate(names)
    )
    blocks = iter(range(1, num_blocks + 1))
    first = tuple(
        ScheduledRequest(name, row, 0, 512, True, tuple(next(blocks) for _ in range(32)))
        for row, name in enumerate(names)
    )
    result = StepResult(0, dict.fromkeys(names, (1,)))
    view.observe(StepLogEntry(Step(0, 0.0, first, admitted), result, None, 0.01))
    view.take_frame()
    steps, frames = [], []
    for number in range(1, 401):
        scheduled = tuple(
            ScheduledRequest(
                name,
                row,
                511 + number,
                1,
                True,
                (next(blocks),) if (row + number) % 16 == 0 else (),
            )
            for row, name in enumerate(names)
        )
        step = Step(
            number, number / 100, scheduled, num_decodes=num_requests, num_running=num_requests
        )
        entry = StepLogEntry(step, result, None, number / 100 + 0.01)
        start = time.perf_counter()
        view.observe(entry)
        steps.append(time.perf_counter() - start)
        if view.is_due:
            start = time.perf_counter()
            view.take_frame()
            frames.append(time.perf_counter() - start)
    step_us, frame_us = 1e6 * statistics.median(steps), 1e6 * statistics.median(frames)
    print(
        f"the engine process, {num_requests} requests: {step_us:.0f} µs a step, {frame_us:.0f} µs a frame (medians)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--vocab-size", type=int, default=49152, help="of the model: prompts are random tokens"
    )
    parser.add_argument("serve", nargs="*", help="options of quire serve")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the server must not be left behind
    measure_view(256)
    prompts = Lengths.around("--input-len", options.input_len, 0.3)
    answers = Lengths.around("--output-len", options.output_len, 0.3)
    jobs = random_jobs(options.requests, prompts, answers, TokenSource(0, options.vocab_size))
    with serving("--no-prefix-caching", *options.serve) as url:
        compare(url, jobs, options.repeats)


if __name__ == "__main__":
    main()
