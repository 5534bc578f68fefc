"""Prefill: prompt tokens per second for 32 prompts of 2048 tokens, one new token each.

    python -m quire.tools.bench.gpu.prefill --shape qwen3-0.6b
    python -m quire.tools.bench.gpu.prefill --shape tiny --prompts 4  # to try it on a CPU

Random weights. The ceiling is the matrix products and attention of those tokens at the rate this
device multiplies large matrices (or the weights at the rate it reads, if that takes longer).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from quire.tools.bench.gpu.ceiling import prompt_work
from quire.tools.bench.gpu.profiling import profile
from quire.tools.bench.gpu.report import Measurement, run
from quire.tools.bench.random_engine import Machine, drive, random_prompts, requests_for


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--length", type=int, default=2048, help="tokens of each prompt")


def measure(machine: Machine, options: argparse.Namespace) -> Iterator[Measurement]:
    count, length = options.prompts, options.length
    rates = []
    for i in range(options.repeats + 1):  # a first one to see these sizes
        done = drive(
            machine.core,
            requests_for(random_prompts(count, length, seed=i), [1] * count, f"run-{i}"),
        )
        rates.append(count * length / done.seconds)
        print(
            f"run {i}: {done.seconds:.3f} s, {len(done.times)} steps, {rates[-1]:,.0f} tok/s",
            flush=True,
        )
    work = prompt_work(machine.spec, [length] * count, machine.itemsize)
    yield Measurement(
        machine.shape,
        "prefill",
        max(rates[1:]),
        count * length / machine.rates.seconds(work),
        f"{work.flops / 1e12:,.1f} TFLOP",
        comparable=(count, length) == (32, 2048),
    )
    if options.profile:
        print("\nMore prompts of the same length:")
        steps = max(1, count * length // machine.core.scheduler.config.max_batched_tokens)
        more = random_prompts(3 * count, length, seed=-2)
        print(
            profile(
                machine,
                requests_for(more, [1] * len(more), "profile"),
                skip=steps // 2,
                steps=steps,
            )
        )


def main() -> None:
    run(__doc__, add, measure)


if __name__ == "__main__":
    main()
