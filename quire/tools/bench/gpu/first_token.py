"""First tokens: milliseconds from a prompt's arrival to its first token, alone and beside others
that decode.

    python -m quire.tools.bench.gpu.first_token --shape qwen3-0.6b
    python -m quire.tools.bench.gpu.first_token --shape qwen3-8b --lengths 100,250 --beside 64
    python -m quire.tools.bench.gpu.first_token --shape tiny --lengths 20 --beside 2 --repeats 3  # to try it on a CPU

Prompts of which none is cached, one after the other; medians. Beside others it is also shown how
long those wait for their next token when a prompt comes, and what a step takes them otherwise.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator

from quire.engine import EngineCore
from quire.process.gc_pauses import full_collections_put_off
from quire.tools.bench.gpu.ceiling import prompt_work
from quire.tools.bench.gpu.report import Result, run
from quire.tools.bench.random_engine import Machine, random_prompts, requests_for

_BETWEEN = 6
"""Steps between two prompts."""


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--lengths", default="16,60,120,250,500", help="prompt tokens, separated by commas"
    )
    parser.add_argument("--beside", type=int, default=32, help="requests that decode meanwhile")
    parser.add_argument("--prompts", type=int, default=15, help="of each length")


def first_tokens(
    core: EngineCore, length: int, count: int, beside: int, seed: int
) -> tuple[list[float], list[float], list[float]]:
    """Seconds to the first token of each prompt; seconds between tokens of the others, with and
    without a prompt.
    """
    clock = time.perf_counter
    others = requests_for(
        random_prompts(beside, 100, seed), [100 + 3 * _BETWEEN * count] * beside, f"others-{seed}"
    )
    for request in others:
        core.add_request(request, clock())
    waits: list[float] = []
    with_prompt: list[float] = []
    without: list[float] = []
    while others and len(without) < 10:  # all decode
        began = clock()
        updates = core.step(began)
        without += [clock() - began] if len(updates) == beside else []
    without.clear()
    for number, prompt in enumerate(random_prompts(count, length, seed + 1)):
        (request,) = requests_for([prompt], [2], f"prompt-{seed}-{number}")
        came = clock()
        core.add_request(request, came)
        last, steps, is_there, is_over = came, 0, False, False
        while not is_over or (others and steps < _BETWEEN):
            updates = core.step(clock())
            now, steps = clock(), steps + 1
            own = [update for update in updates if update.request_id == request.request_id]
            if own and own[0].new_token_ids and not is_there:
                waits.append(now - came)
                is_there = True
            is_over = is_over or any(update.finish_reason is not None for update in own)
            if len(updates) > len(own):
                (without if is_over else with_prompt).append(now - last)
                last = now
    core.abort([request.request_id for request in others], clock())
    while core.has_work:
        core.step(clock())
    return waits, with_prompt, without


def measure(machine: Machine, options: argparse.Namespace) -> Iterator[Result]:
    core = machine.core
    for length in map(int, options.lengths.split(",")):
        ceiling = 1e3 * machine.rates.seconds(prompt_work(machine.spec, [length], machine.itemsize))
        for beside in (0, options.beside):
            with full_collections_put_off():
                first_tokens(core, length, 5, beside, seed=-length - 10_000 * beside)
                waits, with_prompt, without = first_tokens(
                    core, length, options.prompts, beside, seed=length + 10_000 * beside
                )
            detail = ""
            if beside:
                longest = 1e3 * statistics.quantiles(with_prompt, n=20)[-1]
                detail = f"the others wait {longest:.2f} ms at p95, else {1e3 * statistics.median(without):.2f}"
            value = 1e3 * statistics.median(waits)
            print(f"{length} tokens beside {beside}: {value:.2f} ms {detail}", flush=True)
            yield Result(
                machine.shape,
                f"first token of {length} beside {beside}",
                value,
                ceiling,
                detail,
                False,
            )


def main() -> None:
    run(__doc__, add, measure)


if __name__ == "__main__":
    main()
