"""Requests that come when their time has come, whatever the engine does, and when their tokens came.

Everything happens in the engine's own thread: requests are made beforehand, so that between two
steps only their names are handed over. What that takes is measured (`Played.sender`).
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from quire.engine import EngineCore, make_requests
from quire.process.gc_pauses import full_collections_put_off
from quire.sampling_params import SamplingParams

_MOST_TOKEN = 10_000
"""Token ids are below it, and below the model's vocabulary."""


class Arrival(NamedTuple):
    """A request that comes at a time, in seconds after the beginning."""

    time: float
    tenant: str
    prompt: list[int]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Mix:
    """What requests are like: lengths in tokens."""

    short: tuple[int, int]
    """Shortest and longest of nine prompts in ten."""
    long: int
    """Each tenth prompt."""
    answer: int
    vocab_size: int

    def arrivals(
        self, rate: float, seconds: float, seed: int, tenants: Sequence[str] = ("",)
    ) -> list[Arrival]:
        """At random times, `rate` a second in the mean, of tenants in turn."""
        source = random.Random(seed)
        found: list[Arrival] = []
        at = source.expovariate(rate)
        while at < seconds:
            found.append(self._request(source, len(found), at, tenants))
            at += source.expovariate(rate)
        return found

    def at_once(self, count: int, seed: int, tenant: str = "") -> list[Arrival]:
        """So many at the beginning."""
        source = random.Random(seed)
        return [self._request(source, number, 0.0, (tenant,)) for number in range(count)]

    def _request(
        self, source: random.Random, number: int, at: float, tenants: Sequence[str]
    ) -> Arrival:
        turn, each = divmod(number, len(tenants))
        length = self.long if turn % 10 == 5 else source.randint(*self.short)
        most = min(_MOST_TOKEN, self.vocab_size)
        prompt = [source.randrange(most) for _ in range(length)]
        return Arrival(at, tenants[each], prompt, self.answer)


@dataclass(slots=True)
class Played:
    """When each request's tokens came, in seconds after the beginning."""

    arrivals: Sequence[Arrival]
    token_times: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """By the arrival's place."""
    seconds: float = 0.0
    sender: float = 0.0
    """Seconds that handing requests over and noting times took, of all these."""

    @property
    def gaps(self) -> list[float]:
        """Between the tokens of a request."""
        times = self.token_times.values()
        return [later - one for own in times for one, later in pairwise(own)]

    @property
    def tokens_per_second(self) -> float:
        return sum(map(len, self.token_times.values())) / self.seconds

    def first_tokens(self, tenants: Collection[str]) -> list[float]:
        """From arrival to the first token; of those that have none, how long they have waited."""
        return [
            self.token_times.get(str(number), [self.seconds])[0] - arrival.time
            for number, arrival in enumerate(self.arrivals)
            if arrival.tenant in tenants and arrival.time < self.seconds
        ]


def play(
    core: EngineCore,
    arrivals: Sequence[Arrival],
    tenants: Collection[str] | None = None,
    limit: float = float("inf"),
) -> Played:
    """Sends requests in time until all are answered, or those of `tenants`, or `limit` seconds have
    passed. What is left then is aborted.
    """
    played = Played(arrivals)
    requests = []
    for number, (_, tenant, prompt, max_tokens) in enumerate(arrivals):
        params = SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, tenant=tenant
        )
        requests += make_requests(str(number), prompt, params, seed=number)
    awaited = {str(n) for n, one in enumerate(arrivals) if tenants is None or one.tenant in tenants}
    live: set[str] = set()
    sent, clock = 0, time.monotonic
    with full_collections_put_off():
        began = clock()
        now = 0.0
        while awaited and now < limit:
            while sent < len(arrivals) and arrivals[sent].time <= now:
                core.add_request(requests[sent], began + arrivals[sent].time)
                live.add(requests[sent].request_id)
                sent += 1
            if not core.has_work:
                time.sleep(max(0.0, arrivals[sent].time - now))
                now = clock() - began
                continue
            before = clock() - began
            played.sender += before - now
            updates = core.step(began + before)
            now = clock() - began
            for update in updates:
                if update.error is not None:
                    raise RuntimeError(f"request {update.request_id} failed: {update.error}")
                played.token_times[update.request_id] += [now] * len(update.new_token_ids)
                if update.finish_reason is not None:
                    awaited.discard(update.request_id)
                    live.discard(update.request_id)
        played.seconds = clock() - began
    core.abort(live, clock())
    while core.has_work:
        core.step(clock())
    return played


def percentile(values: Sequence[float], part: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]
