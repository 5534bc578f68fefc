"""How fast a model runs with one thread and with several, on quiet cores and beside others who use
the same ones.

    python bench/shared_cores.py                    # SmolLM2, one thread and as many as there are cores
    python bench/shared_cores.py --busy 40 70 --model path/to/model

The neighbours are processes, one on each core, that work for a share of every 20 milliseconds.
Everything is measured in turn, several times in one run, and the medians are compared: ratios hold
also where absolute numbers don't. Goals: more threads are never slower than one beside neighbours
(within 5%), and faster on quiet cores.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

# so that it runs where nothing is installed
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from quire import LLM, SamplingParams

PERIOD = 0.02
NEVER_SLOWER = 0.95
LOADS = {"16 requests": (16, 32, "tokens/s"), "4 tokens": (1, 4, "answers/s")}


def neighbour(core: int, share: float) -> None:
    """Works for a share of the time, on one core."""
    os.sched_setaffinity(0, {core})
    while os.getppid() != 1:
        end = time.perf_counter() + share * PERIOD
        while time.perf_counter() < end:
            pass
        time.sleep((1 - share) * PERIOD)


@contextlib.contextmanager
def neighbours(percent: int) -> Iterator[None]:
    cores = os.sched_getaffinity(0) if percent else ()
    context = multiprocessing.get_context("spawn")
    started = [
        context.Process(target=neighbour, args=(core, percent / 100), daemon=True) for core in cores
    ]
    for one in started:
        one.start()
    try:
        time.sleep(1.0 if started else 0.0)  # so that they are at work
        yield
    finally:
        for one in started:
            one.kill()
            one.join()


def measure(llm: LLM, requests: int, tokens: int) -> float:
    """Tokens a second of several requests, or answers a second of one."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    prompts = [[100 + i, *range(200, 216)] for i in range(requests)]
    began = time.perf_counter()
    llm.generate(prompts, params, progress=False)
    seconds = time.perf_counter() - began
    return requests * tokens / seconds if requests > 1 else 1 / seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument(
        "--busy", type=int, nargs="*", default=[0, 40, 70], help="percent of each core"
    )
    parser.add_argument("--threads", type=int, nargs="*", default=[1, len(os.sched_getaffinity(0))])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    slower = []
    print(
        f"{'neighbours':>10}  {'':11}  "
        + "  ".join(f"{count:2} threads" for count in options.threads)
        + "   ratio"
    )
    for percent in options.busy:
        found: dict[tuple[str, int], list[float]] = {}
        with neighbours(percent), contextlib.ExitStack() as opened:
            llms = {}
            for count in options.threads:
                torch.set_num_threads(count)
                size = {"kv_cache_memory": "256MiB", "max_model_len": 1024, "prefix_caching": False}
                llms[count] = opened.enter_context(LLM(options.model, device="cpu", **size))
            for number in range(options.rounds + 1):  # the first makes everything ready
                for count, llm in llms.items():
                    torch.set_num_threads(count)
                    for name, (requests, tokens, _) in LOADS.items():
                        rate = measure(llm, requests, tokens)
                        if number:
                            found.setdefault((name, count), []).append(rate)
        for name, (_, _, unit) in LOADS.items():
            rates = [statistics.median(found[name, count]) for count in options.threads]
            ratio = rates[-1] / rates[0]
            if ratio < NEVER_SLOWER:
                slower.append(f"{name} beside {percent}%")
            shown = "  ".join(f"{rate:10.1f}" for rate in rates)
            print(f"{percent:9}%  {name:11}  {shown}  {ratio:5.2f}x  {unit}", flush=True)
    if slower:
        sys.exit(
            f"slower with {options.threads[-1]} threads than with {options.threads[0]}: {', '.join(slower)}"
        )


if __name__ == "__main__":
    main()
