"""Two replicas with one thread each against one engine with two threads, on the same cores.

    python bench/replicas.py
    python bench/replicas.py --model Qwen/Qwen3-0.6B --requests 32 --repeats 5 --quantization int8
    python bench/replicas.py --cores 8 --replicas 4

Both servers run at the same time and take turns, so that a busy moment hits both alike; the one
whose turn it is not does nothing. Requests come all at once: greedy, end tokens ignored, prompts
that share nothing. Throughput counts new tokens. Needs a quiet machine.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import statistics
import sys
from contextlib import AbstractContextManager
from pathlib import Path

# so that it runs where nothing is installed
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.server import serving
from quire.tools.bench.http_client import HttpClient
from quire.tools.bench.jobs import Job, Lengths, TokenSource, random_jobs
from quire.tools.bench.serve.load import Load, measure


def server(
    model: str, replicas: int, threads: int, options: list[str]
) -> AbstractContextManager[str]:
    """Its address."""
    own = (f"--model={model}", "--device=cpu", f"--replicas={replicas}", "--served-model-name=m")
    return serving(*own, *options, OMP_NUM_THREADS=str(threads))


def measured(url: str, jobs: list[Job]) -> tuple[float, float]:
    """New tokens per second, and the median time to the first one."""

    async def run() -> tuple[float, float]:
        async with HttpClient(url) as client:
            results, seconds = await measure(client, jobs, Load(ignore_eos=True, temperature=0))
        failed = [result.error for result in results if not result.is_success]
        if failed:
            raise SystemExit(f"{len(failed)} requests failed: {failed[0]}")
        first = statistics.median(result.ttft for result in results if result.ttft is not None)
        return sum(job.max_tokens for job in jobs) / seconds, first

    return asyncio.run(run())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument(
        "--cores",
        type=int,
        default=2,
        help="threads of the one engine, and of all replicas together",
    )
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quantization", default="auto")
    parser.add_argument(
        "--vocabulary", type=int, default=30_000, help="prompts are drawn from so many tokens"
    )
    chosen = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the servers must not be left behind
    options = [
        "--kv-cache-memory=256MiB",
        "--max-model-len=1024",
        f"--quantization={chosen.quantization}",
    ]
    each = max(1, chosen.cores // chosen.replicas)
    names = f"one engine, {chosen.cores} threads", f"{chosen.replicas} replicas, {each} each"
    rates: dict[str, list[float]] = {name: [] for name in names}
    firsts: dict[str, list[float]] = {name: [] for name in names}
    prompts = Lengths.around("--input-len", chosen.input_len, 0.3)
    answers = Lengths.around("--output-len", chosen.output_len, 0.3)
    with (
        server(chosen.model, 1, chosen.cores, options) as one,
        server(chosen.model, chosen.replicas, each, options) as several,
    ):
        for number in range(chosen.repeats + 1):
            # Other prompts each time: nothing of them is cached.
            jobs = random_jobs(
                chosen.requests, prompts, answers, TokenSource(number, chosen.vocabulary)
            )
            for name, url in zip(names, (one, several), strict=True):
                rate, first = measured(url, jobs)
                if number:  # the first round warms up
                    rates[name].append(rate)
                    firsts[name].append(first)
            if number:
                print(
                    ", ".join(f"{name}: {rates[name][-1]:.1f} tok/s" for name in names), flush=True
                )
    print(f"\n{'':26}{'out tok/s':>10}{'ttft ms':>10}   (medians of {chosen.repeats} rounds)")
    for name in names:
        print(
            f"{name:26}{statistics.median(rates[name]):>10.1f}{1000 * statistics.median(firsts[name]):>10.1f}"
        )
    ratios = [
        after / before for before, after in zip(rates[names[0]], rates[names[1]], strict=True)
    ]
    print(
        f"replicas: {statistics.median(ratios):.2f} times the throughput of one engine (median of each round's own)"
    )


if __name__ == "__main__":
    main()
