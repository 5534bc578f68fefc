"""What it costs to watch: the same requests to `quire serve` with nobody at the page and with somebody, in alternating
rounds; and what a step and a frame cost the engine process, measured alone.

    python bench/watch_cost.py
    python bench/watch_cost.py --requests 200 --repeats 5 -- --model Qwen/Qwen3-0.6B --max-num-seqs 256

Behind `--` stand options of `quire serve`. The goal is less than 2% of the throughput. The watcher reads what a page is
sent and throws it away: a browser has a machine of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # started as a script, only its own folder is there

from bench.server import served
from quire.bench.jobs import Job, Lengths, TokenSource, random_jobs
from quire.engine import SchedulerConfig
from quire.observe.live_view import LiveView
from quire.sampling_params import SamplingParams
from quire.step import Admission, ScheduledRequest, Step, StepLogEntry, StepResult

ROOT = Path(__file__).parents[1]
GRACE = 6.0
"""Seconds after which the engine is told that nobody watches."""


@contextlib.contextmanager
def server(options: list[str]) -> Iterator[str]:
    """Its address."""
    command = [sys.executable, "-m", "quire.cli.main", "serve", "--port=0", "--no-prefix-caching", *options]
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, cwd=ROOT, stderr=output)
        try:
            found = None
            while found is None:
                time.sleep(0.2)
                output.seek(0)
                found = re.search(r"http://\S+:\d+", output.read())
                if process.poll() is not None:
                    raise SystemExit("the server did not start")
            yield found[0]
        finally:
            process.terminate()
            process.wait()


@contextlib.contextmanager
def watcher(url: str, read: list[int]) -> Iterator[None]:
    """Somebody who watches; the bytes of each piece are added to `read`."""
    response = urllib.request.urlopen(f"{url}/page/watch")

    def drain() -> None:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            while piece := response.read1(65536):
                read.append(len(piece))

    thread = threading.Thread(target=drain, daemon=True)
    thread.start()
    try:
        yield
    finally:
        response.close()
        thread.join(2)


def compare(url: str, jobs: list[Job], repeats: int) -> None:
    served(url, jobs[:2], [])
    shares = []
    for number in range(repeats):
        alone, _ = served(url, jobs, [])
        read: list[int] = []
        with watcher(url, read):
            start = time.monotonic()
            watched, _ = served(url, jobs, [])
            seconds = time.monotonic() - start
        shares.append(watched / alone)
        sizes = f"{len(read) / seconds:.1f} messages and {sum(read) / seconds / 1024:.1f} KiB a second"
        print(f"round {number + 1}: alone {alone:.1f} tok/s, watched {watched:.1f} tok/s ({sizes})", flush=True)
        time.sleep(GRACE)
    spread = f"{min(shares):.1%} to {max(shares):.1%}"
    print(f"watched: {statistics.median(shares):.1%} of the throughput (median of {repeats} rounds, {spread})")


def measure_view(num_requests: int) -> None:
    """Microseconds that the engine process spends on a step of so many decodes, and on a frame."""
    num_blocks = num_requests * 64
    config = SchedulerConfig(num_blocks + 1, num_requests, max(num_requests, 8192), 4096)
    view = LiveView(config, is_complete=True)
    names = [f"chatcmpl-{number:024d}" for number in range(num_requests)]
    admitted = tuple(
        Admission(name, row, (1,) * 512, 512, (), 0, 0, SamplingParams(), 0, (), 0.0) for row, name in enumerate(names)
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
            ScheduledRequest(name, row, 511 + number, 1, True, (next(blocks),) if (row + number) % 16 == 0 else ())
            for row, name in enumerate(names)
        )
        step = Step(number, number / 100, scheduled, num_decodes=num_requests, num_running=num_requests)
        entry = StepLogEntry(step, result, None, number / 100 + 0.01)
        start = time.perf_counter()
        view.observe(entry)
        steps.append(time.perf_counter() - start)
        if view.is_due:
            start = time.perf_counter()
            view.take_frame()
            frames.append(time.perf_counter() - start)
    step_us, frame_us = 1e6 * statistics.median(steps), 1e6 * statistics.median(frames)
    print(f"the engine process, {num_requests} requests: {step_us:.0f} µs a step, {frame_us:.0f} µs a frame (medians)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--vocab-size", type=int, default=49152, help="of the model: prompts are random tokens")
    parser.add_argument("serve", nargs="*", help="options of quire serve")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the server must not be left behind
    measure_view(256)
    prompts = Lengths.around("--input-len", options.input_len, 0.3)
    answers = Lengths.around("--output-len", options.output_len, 0.3)
    jobs = random_jobs(options.requests, prompts, answers, TokenSource(0, options.vocab_size))
    with server(options.serve) as url:
        compare(url, jobs, options.repeats)


if __name__ == "__main__":
    main()
