"""From requests that show a difference to the fewest and shortest that do, within a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace

from quire.errors import QuireError
from quire.sampling_params import SamplingParams
from quire.tools.verify.answers import Difference
from quire.tools.verify.cases import Case

FirstDifference = Callable[[Sequence[Case]], Difference | None]
"""Runs requests alone and on the axis in question."""

_NEUTRAL = SamplingParams()
_KEEP = {"max_tokens", "seed", "ignore_eos", "logprobs", "prompt_logprobs", "temperature"}


@dataclass(frozen=True, slots=True)
class Smallest:
    """The smallest requests found that show a difference."""

    cases: list[Case]
    difference: Difference
    is_reproduced: bool
    """False where it did not show again: then these are the requests it was seen with."""
    num_tries: int


def shrink(
    cases: Sequence[Case], seen: Difference, first_difference: FirstDifference, seconds: float
) -> Smallest:
    """Tries ever smaller sets of requests for `seconds`, keeping what still differs."""
    deadline = time.monotonic() + seconds
    tries = 0

    def find(some: Sequence[Case]) -> Difference | None:
        nonlocal tries
        tries += 1
        try:
            return first_difference(some)
        except QuireError:  # requests that are too small for something are no smaller case of this
            return None

    best = list(cases)
    found = seen
    again = find(best)
    if again is None:
        return Smallest(best, seen, False, tries)
    found = again
    is_smaller = True
    while is_smaller and time.monotonic() < deadline:
        is_smaller = False
        for smaller in _candidates(best, found):
            if time.monotonic() > deadline:
                break
            difference = find(smaller)
            if difference is not None:
                best = smaller
                found = difference
                is_smaller = True
                break
    return Smallest(best, found, True, tries)


def _candidates(cases: list[Case], difference: Difference) -> Iterator[list[Case]]:
    """Smaller ones, those that would gain most first."""
    target = difference.case
    if len(cases) > 1:
        yield [cases[target]]
        others = [number for number in range(len(cases)) if number != target]
        size = len(others) // 2
        while size:
            for start in range(0, len(others), size):
                gone = set(others[start : start + size])
                yield [case for number, case in enumerate(cases) if number not in gone]
            size //= 2
        if len(others) == 1:
            yield [cases[target]]
    for number, case in enumerate(cases):
        for smaller in _smaller(case):
            yield [*cases[:number], smaller, *cases[number + 1 :]]


def _smaller(case: Case) -> Iterator[Case]:
    """The same request with a shorter answer, a shorter prompt, or asking for less."""
    most = case.params.max_tokens or 1
    for shorter in sorted({1, most // 2, most - 1}):
        if 1 <= shorter < most:
            yield replace(case, params=replace(case.params, max_tokens=shorter, min_tokens=0))
    length = len(case.prompt)
    for shorter in sorted({1, length // 2, length - 16, length - 1}):
        if 1 <= shorter < length:
            yield replace(case, prompt=case.prompt[:shorter])
    if case.params.n > 1:
        yield replace(case, params=replace(case.params, n=1))
    asked = [field.name for field in fields(SamplingParams) if field.name not in _KEEP]
    plain = {
        name: getattr(_NEUTRAL, name) for name in asked if name not in ("n", "cache_salt", "stop")
    }
    if any(getattr(case.params, name) != value for name, value in plain.items()):
        yield replace(case, kind="plain", params=replace(case.params, **plain))
    if case.params.temperature:
        yield replace(case, params=replace(case.params, temperature=0.0))
