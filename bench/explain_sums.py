"""Do the parts that `quire explain` tells add up to what was measured, request by request?

    python bench/explain_sums.py                            # 1,000 requests with preemptions, on SmolLM2
    python bench/explain_sums.py --model path --requests 5000
    python bench/explain_sums.py --server                   # through HTTP, against the server's clock and a client's

Offline the parts, which are told from the step log, are held against the engine's own record of
each request (arrival and end). With `--server` they are held against the time from a request's
first byte to its answer's last one as the server measures it, and shown beside a client's. The exit
status is 1 if one is off by more than a millisecond.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# so that it runs where nothing is installed
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.server import serving
from quire.assemble import Engine, build_engine
from quire.checkpoints.sources import resolve
from quire.config import EngineConfig
from quire.engine import make_requests
from quire.observe.step_log import StepLog
from quire.sampling_params import SamplingParams
from quire.step import RequestMetrics
from quire.tools.bench.http_client import HttpClient
from quire.tools.explain.explain import explain_request

MOST = 1e-3
"""Seconds."""
ROWS = 16
LONGEST = 256


def drive(engine: Engine, count: int, rate: float) -> list[RequestMetrics]:
    """Requests that come at random; the cache is too small for all that run."""
    source, core, vocab_size = random.Random(0), engine.core, engine.spec.vocab_size
    begin = due = time.monotonic()
    jobs = []
    for _ in range(count):
        due += source.expovariate(rate)
        common = [number % vocab_size for number in range(source.choice((0, 0, 48)))]
        prompt = common + [source.randrange(vocab_size) for _ in range(source.randint(4, 60))]
        jobs.append(
            (due, prompt, SamplingParams(max_tokens=source.randint(1, 60), ignore_eos=True))
        )
    jobs.reverse()
    ended: list[RequestMetrics] = []
    shown = begin
    while jobs or core.has_work:
        if not core.has_work:
            time.sleep(max(0.0, jobs[-1][0] - time.monotonic()))
        while jobs and jobs[-1][0] <= time.monotonic():
            _, prompt, params = jobs.pop()
            for request in make_requests(f"r{len(jobs):06d}", prompt, params, len(jobs)):
                core.add_request(request, time.monotonic())
        ended += [
            update.metrics for update in core.step(time.monotonic()) if update.metrics is not None
        ]
        if time.monotonic() - shown > 10:
            shown = time.monotonic()
            print(
                f"  {len(ended)} of {count} after {shown - begin:.0f} s",
                file=sys.stderr,
                flush=True,
            )
    return ended


def offline(options: argparse.Namespace) -> list[float]:
    """By how much the parts of each request are off."""
    config = EngineConfig(
        device="cpu",
        max_num_seqs=ROWS,
        max_model_len=LONGEST,
        max_batched_tokens=64,
        kv_cache_memory=options.kv_cache_memory,
    )
    engine = build_engine(resolve(options.model), config)
    print(engine.description)
    log = StepLog(capacity=10**7, max_tokens=10**9)
    engine.core._on_step = log.append
    ended = drive(engine, options.requests, options.rate)
    # ends are told by the step after
    (request,) = make_requests("last", [1], SamplingParams(max_tokens=1), 0)
    engine.core.add_request(request, time.monotonic())
    while engine.core.has_work:
        engine.core.step(time.monotonic())
    preempted = [one for one in ended if one.preemptions]
    print(
        f"{len(ended)} requests, {len(log):,} steps, {sum(one.preemptions for one in preempted):,} preemptions of "
        f"{len(preempted)} requests; the longest took {max(one.finished - one.arrival for one in ended):.3f} s"
    )
    found = []
    for one in ended:
        entries, before = log.about(one.request_id)
        told = explain_request(entries, one.request_id, engine.core.scheduler.config, before)
        assert told is not None, one.request_id
        (answer,) = told["answers"]
        assert len(answer["preemptions"]) == one.preemptions
        found.append(sum(answer["parts"].values()) - (one.finished - one.arrival))
    return found


async def ask(
    client: HttpClient, number: int, source: random.Random, gate: asyncio.Semaphore
) -> tuple[float, float]:
    """By how much a request's parts are off, and a client's time from the server's."""
    body: dict[str, Any] = {
        "prompt": [source.randrange(400) for _ in range(source.randint(4, 60))],
        "max_tokens": source.randint(1, 60),
        "ignore_eos": True,
        "stream": number % 2 == 0,
    }
    if number % 5 == 0:
        del body["ignore_eos"]
        body["structured_outputs"] = {"regex": f"[a-f]{{{1 + number % 40}}}"}
    async with gate:
        began = time.monotonic()
        if body["stream"]:
            name = ""
            async for event in client.events("/v1/completions", body):
                name = name or event.split(b'"id":"', 1)[1].split(b'"', 1)[0].decode()
        else:
            name = (await client.post_json("/v1/completions", body))["id"]
        seconds = time.monotonic() - began
        # Before others come: the log remembers a few seconds of a small model, and the server
        # explains a few a second.
        told = await client.get_json(f"/v1/requests/{name}/explain")
    (answer,) = told["answers"]
    return sum(answer["parts"].values()) - told["timings"]["answered"], seconds - told["timings"][
        "answered"
    ]


async def ask_all(url: str, count: int) -> list[tuple[float, float]]:
    client, source, gate = HttpClient(url), random.Random(0), asyncio.Semaphore(4 * ROWS)
    return await asyncio.gather(*(ask(client, number, source, gate) for number in range(count)))


def through_http(options: argparse.Namespace) -> list[float]:
    """By how much the parts of each request are off."""
    limits = [f"--max-num-seqs={ROWS}", f"--max-model-len={LONGEST}"]
    with serving(
        f"--model={options.model}", f"--kv-cache-memory={options.kv_cache_memory}", *limits
    ) as url:
        found = asyncio.run(ask_all(url, options.requests))
    _show("a client's clock against the server's", [other for _, other in found])
    return [own for own, _ in found]


def _show(title: str, found: Sequence[float]) -> None:
    worst = max(found, key=abs)
    print(
        f"{title}: median {1e3 * statistics.median(found):+.4f} ms, worst {1e3 * worst:+.4f} ms off ({len(found)})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--rate", type=float, default=50.0, help="requests a second, offline")
    parser.add_argument("--kv-cache-memory", default="48MiB")
    parser.add_argument("--server", action="store_true")
    options = parser.parse_args()
    found = through_http(options) if options.server else offline(options)
    _show("the parts' sum against what was measured", found)
    sys.exit(any(abs(one) > MOST for one in found))


if __name__ == "__main__":
    main()
