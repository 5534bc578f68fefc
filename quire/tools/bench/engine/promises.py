"""What promises of time and shares are worth on this machine, with a real model and real time.

    python -m quire.tools.bench.engine.promises [--model smollm2] [--requests 40]

Token times: requests come at random at 60, 80 and 95% of what the engine can do (measured first),
one in ten with a long prompt; the same ones with `target_token_time` and without, in turn. The
target is twice the time of a full decode step unless it is given.

Shares: a tenant sends now and then, another twenty times its share at once. First-token times of
the first without the flood, with it under `fair`, and with it under `fcfs`.

Everything is printed with ratios, for on a busy machine nothing else can be compared.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from quire import LLM, SamplingParams
from quire.tools.bench.machine import report_facts

SHORT, LONG, ANSWER = (16, 48), 800, 24
FLOOD = 20
"""Times its share."""


class Arrival(NamedTuple):
    """A request that comes at a time, in seconds after the beginning."""

    time: float
    tenant: str
    prompt: list[int]
    max_tokens: int


@dataclass(slots=True)
class Played:
    """When each request's tokens came."""

    arrivals: Sequence[Arrival]
    token_times: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    seconds: float = 0.0

    @property
    def gaps(self) -> list[float]:
        """Between the tokens of a request."""
        times = self.token_times.values()
        return [later - one for own in times for one, later in pairwise(own)]

    @property
    def tokens_per_second(self) -> float:
        return sum(map(len, self.token_times.values())) / self.seconds

    def first_tokens(self, tenant: str) -> list[float]:
        """From arrival to the first token."""
        return [
            self.token_times[str(number)][0] - arrival.time
            for number, arrival in enumerate(self.arrivals)
            if arrival.tenant == tenant
        ]


def play(llm: LLM, arrivals: Sequence[Arrival], until: str | None = None) -> Played:
    """Sends requests when their time has come, whatever the engine does; with `until`, only till
    this tenant's are all answered.
    """
    played = Played(arrivals)
    left = {str(n) for n, one in enumerate(arrivals) if until is None or one.tenant == until}
    live: set[str] = set()
    began, sent = time.perf_counter(), 0
    while left:
        now = time.perf_counter() - began
        while sent < len(arrivals) and arrivals[sent].time <= now:
            one = arrivals[sent]
            params = SamplingParams(
                temperature=0, max_tokens=one.max_tokens, ignore_eos=True, tenant=one.tenant
            )
            live.add(llm.add_request(one.prompt, params, str(sent)))
            sent += 1
        if not llm.has_work:
            time.sleep(max(0.0, arrivals[sent].time - now))
            continue
        for delta in llm.step():
            at = time.perf_counter() - began
            played.token_times[delta.request_id] += [at] * len(delta.token_ids)
            if delta.finish_reason is not None:
                left.discard(delta.request_id)
                live.discard(delta.request_id)
    played.seconds = time.perf_counter() - began
    for request_id in live:
        llm.abort(request_id)
    while llm.has_work:
        llm.step()
    return played


def percentile(values: Sequence[float], part: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]


def some_prompt(source: random.Random, length: int) -> list[int]:
    return [source.randrange(1000, 20_000) for _ in range(length)]


def some_requests(count: int, rate: float, seed: int) -> list[Arrival]:
    """One in ten has a long prompt."""
    source = random.Random(seed)
    found, at = [], 0.0
    for number in range(count):
        length = LONG if number % 10 == 5 else source.randint(*SHORT)
        found.append(Arrival(at, "", some_prompt(source, length), ANSWER))
        at += source.expovariate(rate) if rate < float("inf") else 0.0
    return found


def compare_token_times(options: argparse.Namespace, settings: dict[str, Any]) -> None:
    with LLM(options.model, **settings) as plain:
        play(plain, some_requests(4, float("inf"), seed=1))  # what is done once
        full = play(plain, some_requests(options.requests, float("inf"), seed=2))
        capacity = options.requests / full.seconds
        target = options.target or 2 * statistics.median(full.gaps)
        print(f"capacity {capacity:.2f} requests a second, target {1e3 * target:.0f} ms")
        with LLM(options.model, target_token_time=target, **settings) as promised:
            play(promised, some_requests(options.requests, float("inf"), seed=2))
            for part in (0.6, 0.8, 0.95):
                arrivals = some_requests(options.requests, part * capacity, seed=int(100 * part))
                without, within = play(plain, arrivals), play(promised, arrivals)
                with_target, other = (percentile(one.gaps, 0.99) for one in (within, without))
                speed = within.tokens_per_second / without.tokens_per_second
                print(
                    f"{part:.0%} of capacity: 99th percentile of token gaps {with_target / target:.2f} x target "
                    f"({other / target:.2f} x without a target), throughput {speed:.2f} x"
                )


def compare_floods(options: argparse.Namespace, settings: dict[str, Any]) -> None:
    source = random.Random(4)
    with LLM(options.model, policy="fair", **settings) as llm:
        many = [Arrival(0.0, "quiet", some_prompt(source, 32), ANSWER) for _ in range(16)]
        play(llm, many[:2])
        capacity = len(many) / play(llm, many).seconds
        pause = 4 / capacity  # a quarter of what the engine can do: less than its share
        quiet = [
            Arrival(0.1 + pause * number, "quiet", some_prompt(source, 32), ANSWER)
            for number in range(options.requests // 2)
        ]
        share = capacity / 2 * quiet[-1].time
        flood = [
            Arrival(0.0, "flood", some_prompt(source, 32), ANSWER)
            for _ in range(int(FLOOD * share))
        ]
        alone = play(llm, quiet, "quiet")
        fair = play(llm, sorted([*flood, *quiet]), "quiet")
    with LLM(options.model, policy="fcfs", **settings) as llm:
        play(llm, many[:2])
        # Two are enough: they wait for the whole flood.
        fcfs = play(llm, sorted([*flood, *quiet[:2]]), "quiet")
    usual = percentile(alone.first_tokens("quiet"), 0.95)
    print(f"{len(quiet)} requests of one tenant beside {len(flood)} at once of another:")
    for name, played in (("fair", fair), ("fcfs, the first two", fcfs)):
        found = percentile(played.first_tokens("quiet"), 0.95)
        print(
            f"{name}: 95th percentile of first-token times {1e3 * found:.0f} ms, "
            f"{found / usual:.2f} x without the flood"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--requests", type=int, default=40, help="at each rate")
    parser.add_argument("--rows", type=int, default=8, help="answers at once")
    parser.add_argument("--target", type=float, help="seconds; default: two full decode steps")
    options = parser.parse_args()
    for name, value in report_facts(torch.device("cpu"), "promises").items():
        print(f"{name}: {value}")
    settings = {"max_num_seqs": options.rows, "max_model_len": 1024, "kv_cache_memory": "512MiB"}
    settings["prefix_caching"] = False  # the same prompts are played again
    compare_token_times(options, settings)
    compare_floods(options, settings)
    print(f"load at the end: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
