"""Decode: milliseconds per step while 1, 8, 32, 128 or 256 requests compute one token each.

    python -m quire.tools.bench.gpu.decode --shape qwen3-0.6b
    python -m quire.tools.bench.gpu.decode --shape gpt-oss-20b --expert-format MXFP4
    python -m quire.tools.bench.gpu.decode --shape tiny --batches 1,8 --steps 32  # to try it on a CPU
    python -m quire.tools.bench.gpu.decode --shape qwen3-8b --batches 32,256 --lora 1,8,32

Prompts of 128 tokens, 256 steps, random weights. Steps count while all requests of the batch gain a
token. The figure is the mean of the best run; the median stands beside it.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence

from quire.tools.bench.gpu.adapters import adapted_requests, make_adapters
from quire.tools.bench.gpu.ceiling import Work, decode_work
from quire.tools.bench.gpu.profiling import profile
from quire.tools.bench.gpu.report import Measurement, run
from quire.tools.bench.random_engine import DrivenRun, Machine, drive, random_prompts


def steady_times(run: DrivenRun, batch: int) -> list[float]:
    """Seconds between neighbouring steps that both brought a token for every request. The first of
    them may still have waited for the prompts, so it is left out.
    """
    times = [
        run.times[i] - run.times[i - 1]
        for i in range(1, len(run.times))
        if run.new_tokens[i] == run.new_tokens[i - 1] == batch
    ]
    if len(times) < 2:
        raise RuntimeError(f"no two steps in a row brought {batch} tokens: ask for more steps")
    return times[1:]


def measure_batch(
    machine: Machine,
    batch: int,
    prompt_len: int,
    steps: int,
    repeats: int,
    digests: Sequence[str] = (),
) -> Measurement:
    """`digests`: of the adapters that the requests have in turn."""
    runs = []
    for i in range(repeats):
        prompts = random_prompts(batch, prompt_len, seed=1000 * batch + i)
        name = f"batch-{batch}-run-{i}-{len(digests)}"
        done = drive(machine.core, adapted_requests(prompts, steps, name, digests))
        runs.append(steady_times(done, batch))
    fastest = min(runs, key=statistics.mean)
    work = Work()
    for step in range(1, steps):
        work += decode_work(machine.spec, [prompt_len + step] * batch, machine.itemsize)
    return Measurement(
        machine.shape,
        f"decode {batch}" + (f", {len(digests)} adapters" if digests else ""),
        1e3 * statistics.mean(fastest),
        1e3 * machine.rates.seconds(work) / (steps - 1),
        f"median {1e3 * statistics.median(fastest):.3f} over {len(fastest)} steps",
        comparable=(prompt_len, steps) == (128, 256) and not digests,
    )


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--batches", default="1,8,32,128,256", help="numbers of requests, separated by commas"
    )
    parser.add_argument("--prompt", type=int, default=128, help="prompt tokens of each request")
    parser.add_argument("--steps", type=int, default=256, help="new tokens of each request")
    parser.add_argument("--lora", default="", help="numbers of adapters, separated by commas")
    parser.add_argument("--lora-rank", type=int, default=16, help="rank of the adapters")
    parser.add_argument(
        "--lora-of", default="all", choices=("all", "attention"), help="which products they change"
    )


def measure(machine: Machine, options: argparse.Namespace) -> Iterator[Measurement]:
    counts = [int(count) for count in options.lora.split(",") if count]
    digests = make_adapters(machine, max(counts, default=0), options.lora_rank, options.lora_of)
    sizes = options.prompt, options.steps, options.repeats
    for batch in map(int, options.batches.split(",")):
        result = measure_batch(machine, batch, *sizes)
        print(f"{result.measure}: {result.value:.3f} ms, {result.detail}", flush=True)
        yield result
        _profile(machine, batch, options, ())
        for count in counts:
            adapted = measure_batch(machine, batch, *sizes, digests[:count])
            more = f"{100 * (adapted.value / result.value - 1):.1f}% more than without"
            print(f"{adapted.measure}: {adapted.value:.3f} ms, {more}", flush=True)
            yield adapted
            _profile(machine, batch, options, digests[:count])


def _profile(
    machine: Machine, batch: int, options: argparse.Namespace, digests: Sequence[str]
) -> None:
    """Prints where the time of one more run goes, where that is asked for."""
    if not options.profile:
        return
    prompts = random_prompts(batch, options.prompt, seed=1000 * batch + options.repeats)
    name = f"profile-{batch}-{len(digests)}"
    requests = adapted_requests(prompts, options.steps, name, digests)
    steps = min(options.profile_steps, (options.steps - 32) // 2)
    print(profile(machine, requests, skip=16, steps=steps) + "\n", flush=True)


def main() -> None:
    run(__doc__, add, measure)


if __name__ == "__main__":
    main()
