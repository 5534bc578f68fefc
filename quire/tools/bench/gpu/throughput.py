"""Throughput: 256 requests at once, prompts and answers of 100 to 1024 tokens (the workload of
nano-vllm's bench.py).

    python -m quire.tools.bench.gpu.throughput --shape qwen3-0.6b
    python -m quire.tools.bench.gpu.throughput --shape tiny --requests 8  # to try it on a CPU

Random weights; temperature 0.6, end tokens ignored. The ceiling is the bytes that must be read
(weights once a step, each request's keys and values once a token) at the rate this device reads.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator

from quire.tools.bench.gpu.ceiling import workload_work
from quire.tools.bench.gpu.profiling import profile
from quire.tools.bench.gpu.report import Measurement, run
from quire.tools.bench.random_engine import Machine, drive, requests_for


def nano_workload(
    count: int = 256, shortest: int = 100, longest: int = 1024
) -> tuple[list[list[int]], list[int]]:
    """Prompts and numbers of new tokens, drawn in that script's order: 133,966 new tokens in all."""
    source = random.Random(0)
    prompts = [
        [source.randint(0, 10_000) for _ in range(source.randint(shortest, longest))]
        for _ in range(count)
    ]
    return prompts, [source.randint(shortest, longest) for _ in range(count)]


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument(
        "--longest", type=int, default=1024, help="the longest prompt and answer (100 the shortest)"
    )


def measure(machine: Machine, options: argparse.Namespace) -> Iterator[Measurement]:
    prompts, new_tokens = nano_workload(options.requests, longest=options.longest)
    total = sum(new_tokens)

    def fresh(i: int) -> list[list[int]]:
        """Every run has prompts of its own, so that none finds the last one's in the prefix cache."""
        return [[(token + i) % 10_001 for token in prompt] for prompt in prompts]

    print(f"{len(prompts)} requests: {sum(map(len, prompts)):,} prompt tokens, {total:,} new ones")
    rates = []
    for i in range(options.repeats):
        done = drive(machine.core, requests_for(fresh(i), new_tokens, f"run-{i}"))
        rates.append(total / done.seconds)
        print(
            f"run {i + 1}: {done.seconds:.3f} s, {len(done.times)} steps, {rates[-1]:,.0f} tok/s",
            flush=True,
        )
    work = workload_work(
        machine.spec, list(zip(map(len, prompts), new_tokens, strict=True)), machine.itemsize
    )
    yield Measurement(
        machine.shape,
        "throughput",
        max(rates),
        total / machine.rates.seconds(work),
        f"must read {work.bytes_read / 1e12:.2f} TB",
        comparable=(options.requests, options.longest) == (256, 1024),
    )
    if options.profile:
        print("\nFrom the middle of one more run:")
        skip = max(0, min(150, max(new_tokens) - 2 * options.profile_steps - 8))
        requests = requests_for(fresh(options.repeats), new_tokens, "profile")
        print(profile(machine, requests, skip, options.profile_steps))


def main() -> None:
    run(__doc__, add, measure)


if __name__ == "__main__":
    main()
