"""Long contexts: decode steps of every batch and context, and prompts of every length, beside what
the card could do.

    python -m quire.tools.bench.gpu.long_contexts  # everything up to 131,072 tokens: four minutes
    python -m quire.tools.bench.gpu.long_contexts --short  # the cells peers were measured at: one minute
    python -m quire.tools.bench.gpu.long_contexts --batches 1,16 --contexts 8000,32000 --prompts 8192
    python -m quire.tools.bench.gpu.long_contexts --shape tiny --batches 1,2 --contexts 100,600 --prompts 64  # on a CPU

Random weights, and random keys and values: contexts are not computed, a cell of decode is some
steps of the runner (two in flight, as in an engine) on requests that are said to have them in the
cache. Prompts are computed in the steps an engine would make of them. A percentage is the ceiling's
share: the bytes that must be read at 4.5 TB/s, or for prompts the products that must be computed at
790 TFLOP/s, over the time it took.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import torch

from quire.assemble import Engine, assemble
from quire.backends.select import pick_device, select_kernels
from quire.config import EngineConfig
from quire.kernels.ops import LayerCache
from quire.runner.dtypes import pick_dtype
from quire.runner.runner import Runner
from quire.sampling_params import SamplingParams
from quire.step import AdmittedRequest, ScheduledRequest, Step
from quire.tools.bench.gpu.ceiling import Rates, decode_work, prompt_work
from quire.tools.bench.gpu.peers import LONG_DECODES, LONG_PROMPTS
from quire.tools.bench.random_engine import capture_graphs, random_decoder
from quire.tools.bench.shapes import CONFIGS, spec_of

CARD = Rates(4.5e12, 790e12)
"""An H200, as measured: see docs/performance.md."""
PARAMS = SamplingParams(temperature=0.6, max_tokens=1 << 20, ignore_eos=True)


def admissions(engine: Engine, count: int, tokens: int, cached: int) -> tuple[AdmittedRequest, ...]:
    """Requests of so many tokens, of which some are said to be cached, with blocks for all of them."""
    each = -(-tokens // engine.plan.block_size)
    return tuple(
        AdmittedRequest(
            request_id=f"request-{row}",
            row=row,
            token_ids=tuple((row * 7919 + i) % 10_000 for i in range(cached + 1)),
            num_prompt_tokens=cached + 1,
            block_ids=tuple(range(1 + row * each, 1 + (row + 1) * each)),
            num_cached_tokens=cached,
            num_host_tokens=0,
            params=PARAMS,
            seed=row,
            eos_token_ids=(),
            arrival=0.0,
        )
        for row in range(count)
    )


def times_of(engine: Engine, steps: Iterator[Step]) -> list[float]:
    """When each step's result was there; two are in flight."""
    times: list[float] = []
    pending = []
    for step in steps:
        pending.append(engine.runner.submit(step))
        if len(pending) == 2:
            pending.pop(0).result()
            times.append(time.perf_counter())
    pending.pop().result()
    return [*times, time.perf_counter()]


def decode_seconds(engine: Engine, batch: int, context: int, steps: int) -> float:
    """Of a step in which so many requests of this context compute a token each."""
    admitted = admissions(engine, batch, context + steps, context - 1)

    def made() -> Iterator[Step]:
        for i in range(steps):
            entries = (
                ScheduledRequest(each.request_id, each.row, context - 1 + i, 1, True, ())
                for each in admitted
            )
            yield Step(i, 0.0, tuple(entries), admitted if i == 0 else (), num_decodes=batch)

    times = times_of(engine, made())
    return statistics.median(after - before for before, after in pairwise(times[1:]))


def prompt_seconds(engine: Engine, count: int, length: int, most: int) -> float:
    """Of all steps that so many prompts of this length take, `most` tokens each at most."""
    admitted = tuple(
        replace(each, num_cached_tokens=0, num_prompt_tokens=length)
        for each in admissions(engine, count, length, length - 1)
    )

    def made() -> Iterator[Step]:
        todo = [(each, start) for each in admitted for start in range(0, length, most)]
        at_once = max(1, most // length)
        for i in range(0, len(todo), at_once):
            entries = []
            for each, start in todo[i : i + at_once]:
                end = min(start + most, length)
                entries.append(
                    ScheduledRequest(
                        each.request_id, each.row, start, end - start, end == length, ()
                    )
                )
            yield Step(i, 0.0, tuple(entries), admitted if i == 0 else ())

    torch.zeros(1, device=engine.decoder.device).item()  # what came before is done
    began = time.perf_counter()
    return times_of(engine, made())[-1] - began


def open_engine(options: argparse.Namespace, longest: int, batch: int) -> Engine:
    found = pick_device("auto")
    device, dtype = found.torch_device, pick_dtype("auto", found)
    spec = replace(spec_of(options.shape), max_position=longest)
    decoder = random_decoder(
        spec, select_kernels(device, dtype, "auto"), dtype, device, max_position=longest
    )
    config = EngineConfig(device=str(device), max_model_len=longest, max_num_seqs=batch)
    engine = assemble(decoder, config, name=options.shape)
    print(engine.description, flush=True)
    assert isinstance(engine.runner, Runner)
    for cache in engine.runner._kv_cache.layers:  # memory as it comes may be full of NaN
        assert isinstance(cache, LayerCache)
        cache.keys.normal_()
        cache.values.normal_()
    capture_graphs(engine.core)
    return engine


def decode_rows(engine: Engine, cells: list[tuple[int, int]], steps: int) -> Iterator[str]:
    spec, itemsize = engine.decoder.spec, engine.decoder.dtype.itemsize
    for batch, context in cells:
        needed = batch * engine.plan.blocks_at(context + steps)
        if needed >= engine.plan.num_blocks:
            continue  # does not fit
        decode_seconds(engine, batch, context, 4)
        took = decode_seconds(engine, batch, context, steps)
        ceiling = CARD.seconds(decode_work(spec, [context] * batch, itemsize))
        peer = LONG_DECODES.get((batch, context))
        limit = f"{1e3 * ceiling:.2f} ({ceiling / took:.0%})"
        yield f"| {batch} at {context:,} | {1e3 * took:.2f} | {limit} | {peer or ''} |"


def prompt_rows(engine: Engine, lengths: list[int], repeats: int) -> Iterator[str]:
    spec, itemsize = engine.decoder.spec, engine.decoder.dtype.itemsize
    scheduler = engine.core.scheduler.config
    most = scheduler.max_batched_tokens
    for length in lengths:
        count = max(1, min(2 * most // length, scheduler.max_num_seqs))
        took = min(prompt_seconds(engine, count, length, most) for _ in range(repeats + 1))
        ceiling = CARD.seconds(prompt_work(spec, [length] * count, itemsize))
        rate, peer = count * length / took, LONG_PROMPTS.get(length)
        limit = f"{count * length / ceiling:,.0f} ({ceiling / took:.0%})"
        yield f"| {count} × {length:,} | {rate:,.0f} | {limit} | {f'{peer:,}' if peer else ''} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=list(CONFIGS), default="qwen3-8b")
    parser.add_argument(
        "--batches", default="1,4,16,32,64", help="numbers of requests, separated by commas"
    )
    parser.add_argument("--contexts", default="2000,8000,32000,128000", help="tokens of each")
    parser.add_argument(
        "--prompts", default="2048,8192,32768,131072", help="lengths of prompts, or nothing"
    )
    parser.add_argument(
        "--short", action="store_true", help="the cells peers were measured at, instead of all"
    )
    parser.add_argument("--steps", type=int, default=16, help="decode steps of each cell")
    parser.add_argument(
        "--repeats",
        type=int,
        default=1,
        help="runs of each prompt after a first one; the best counts",
    )
    options = parser.parse_args()
    if options.steps < 4:
        parser.error("--steps must be 4 at least")
    batches, contexts, prompts = (
        [int(number) for number in text.split(",") if number]
        for text in (options.batches, options.contexts, options.prompts)
    )
    cells = [(batch, context) for batch in batches for context in contexts]
    if options.short:
        cells, prompts = list(LONG_DECODES), list(LONG_PROMPTS)
    longest = max([context + options.steps for _, context in cells] + prompts)
    engine = open_engine(options, longest, max(batch for batch, _ in cells))
    with torch.inference_mode():
        print("\n| requests at context | ms a step | ceiling | vLLM 0.26 |\n|---|---|---|---|")
        for row in decode_rows(engine, cells, options.steps):
            print(row, flush=True)
        print("\n| prompts | tokens/s | ceiling | vLLM 0.26 |\n|---|---|---|---|")
        for row in prompt_rows(engine, prompts, options.repeats):
            print(row, flush=True)


if __name__ == "__main__":
    main()
