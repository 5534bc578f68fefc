"""Between rungs 3 and 4, static batching: requests are collected into a batch, and the batch runs
to its end.

It shares the cost of reading the weights among its requests, but nobody leaves before the longest
answer is done and nobody joins. Continuous batching (`quire/engine/scheduler.py`) lifts both
limits.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quire.models.decoder import Decoder
from quire.tools.ladder.contiguous import ContiguousCache, next_tokens


@dataclass(frozen=True, slots=True)
class StaticAnswer:
    """A request's tokens, and when its batch started and ended (everybody's answer comes at the
    end).
    """

    tokens: tuple[int, ...]
    started: float
    finished: float


def batch_start(
    arrivals: Sequence[float], free_from: float, max_batch_size: int, max_wait_ms: float
) -> float:
    """When the next batch starts: once it is full, or once its first request has waited long
    enough.

    `arrivals` are those of the requests still waiting, in order; the machine is busy until
    `free_from`.
    """
    give_up = arrivals[0] + max_wait_ms / 1000
    full = arrivals[max_batch_size - 1] if len(arrivals) >= max_batch_size else give_up
    return max(free_from, min(full, give_up))


def generate_static_batch(
    decoder: Decoder, prompts: Sequence[Sequence[int]], max_new_tokens: Sequence[int]
) -> list[tuple[int, ...]]:
    """Greedy answers to all prompts, computed together until the longest is done.

    A request that is done keeps its place, and what is computed for it is thrown away.
    """
    longest = max(max_new_tokens)
    cache = ContiguousCache(decoder, len(prompts), max(map(len, prompts)) + longest)
    answers: list[list[int]] = [[] for _ in prompts]
    new = dict(enumerate(prompts))
    for _ in range(longest):
        for i, token in next_tokens(decoder, cache, new).items():
            answers[i].append(token)
            new[i] = [token]
    return [tuple(answer[:count]) for answer, count in zip(answers, max_new_tokens, strict=True)]


def serve_static_batches(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: Sequence[int],
    arrivals: Sequence[float],
    max_batch_size: int,
    max_wait_ms: float,
    clock: Callable[[], float] = time.perf_counter,
) -> list[StaticAnswer]:
    """Serves requests, given in order of arrival, in static batches. Computing takes the time it
    takes; waiting for arrivals is only added up, so nothing sleeps.
    """
    answers: list[StaticAnswer] = []
    now = 0.0
    while (first := len(answers)) < len(prompts):
        now = batch_start(arrivals[first:], now, max_batch_size, max_wait_ms)
        end = min(bisect_right(arrivals, now), first + max_batch_size)
        began = clock()
        tokens = generate_static_batch(decoder, prompts[first:end], max_new_tokens[first:end])
        finished = now + clock() - began
        answers += [StaticAnswer(answer, now, finished) for answer in tokens]
        now = finished
    return answers
