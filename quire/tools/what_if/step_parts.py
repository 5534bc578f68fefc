"""The steps of a log as times: what the host does, what the device does, and what is between two
turns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from quire.step import Step, StepLogEntry

_WAITED = 0.1
"""Of a device's time for a step: if the host came for the result by less earlier than it was there,
nobody knows since when it was there.
"""


class TimedStep(NamedTuple):
    """A step, and how long it took."""

    step: Step
    seconds: float
    """Of the device, from when it could begin; of all, where one step ends before the next is
    decided.
    """
    host: float = 0.0
    """Before that: deciding and launching, in which the host does nothing else."""
    is_bound: bool = False
    """The device took at most that long: the host came for the result when it was there."""


class Timeline(NamedTuple):
    """A log's steps that succeeded and computed something, and what was between them."""

    steps: list[TimedStep]
    has_parts: bool
    """Several steps were in flight, and the log says when the host had launched each."""
    pause: float
    """From a result to the next turn, usually."""
    empty_steps: list[TimedStep]
    """Steps in which nothing was computed: somebody had ended. Only the host's time counts; with
    parts only.
    """
    pauses: list[tuple[float, float]]
    """When, and how long: from a result to the next turn; with parts only."""
    turn: float = 0.0
    """From a turn that waited for no result to the next, usually."""
    fetch: float = 0.0
    """What it takes to get a result that is there."""


def is_split(step: Step, graph_tokens: int) -> bool:
    """Whether a step is too large for a graph: its kernels are launched one by one, and the first
    run meanwhile.
    """
    return step.num_tokens > graph_tokens


def was_idle(step: Step) -> bool:
    """Whether the engine had waited for requests before this step."""
    return len(step.admitted) == len(step.scheduled)


def timed_steps(entries: Sequence[StepLogEntry], graph_tokens: int = 0) -> Timeline:
    """`graph_tokens`: of the largest step that is launched as a whole."""
    has_parts = any(
        one.submitted is not None
        and other.submitted is not None
        and other.submitted < one.committed
        for one, other in pairwise(entries)
    )
    if not has_parts:
        return timed_as_a_whole(entries)
    found = _with_parts(entries, graph_tokens, {})
    known: dict[int, list[float]] = {}
    for one in found.steps:
        if not one.is_bound and not is_split(one.step, graph_tokens):
            known.setdefault(one.step.num_tokens, []).append(one.seconds)
    return _with_parts(
        entries, graph_tokens, {tokens: _median(seconds) for tokens, seconds in known.items()}
    )


def timed_as_a_whole(entries: Sequence[StepLogEntry]) -> Timeline:
    """Each from when it was decided or the one before was over."""
    steps: list[TimedStep] = []
    pauses: list[float] = []
    last = float("-inf")
    for entry in entries:
        step = entry.step
        if step.now > last and last > float("-inf") and not was_idle(step):
            pauses.append(step.now - last)
        seconds = entry.committed - max(step.now, last)
        last = entry.committed
        if entry.result is not None and step.scheduled and seconds > 0:
            steps.append(TimedStep(step, seconds))
    return Timeline(steps, False, _median(pauses), [], [])


def _with_parts(
    entries: Sequence[StepLogEntry], graph_tokens: int, usual: Mapping[int, float]
) -> Timeline:
    """The host decides and launches a step, then waits for the one before it, whose result may have
    been there for long. The device begins once it has the step (of a large one: its first kernels)
    and is done with the one before. `usual`: what steps of so many tokens take that are launched as
    a whole, to know when one was done that nobody waited for.
    """
    steps: list[TimedStep] = []
    empty_steps: list[TimedStep] = []
    pauses: list[tuple[float, float]] = []
    turns: list[float] = []
    fetches: list[float] = []
    first_in_flight = 0
    last = float("-inf")
    done = float("-inf")
    is_sure = True
    for place, entry in enumerate(entries):
        step = entry.step
        submitted = entry.submitted
        # What the host did before this turn.
        while first_in_flight < place and entries[first_in_flight].committed <= step.now:
            first_in_flight += 1
        back = entries[first_in_flight - 1].committed if first_in_flight else float("-inf")
        launched = entries[place - 1].submitted if place else None
        if launched is not None and launched > back:
            turns.append(step.now - launched)
        elif first_in_flight and not (first_in_flight == place and was_idle(step)):
            pauses.append((back, step.now - back))
        before = last
        last = entry.committed
        if entry.result is None or submitted is None:
            done = entry.committed
            is_sure = True
            continue
        host = submitted - step.now
        if not step.scheduled:
            empty_steps.append(TimedStep(step, 0.0, host))
            continue
        could_begin = step.now if is_split(step, graph_tokens) else submitted
        begun = could_begin if not is_sure else max(could_begin, done)
        seconds = entry.committed - begun
        # Since when the host waited for it: since it launched the last step behind it.
        asked = max(submitted, before)
        behind = place + 1
        while (
            behind < len(entries)
            and (moment := entries[behind].submitted) is not None
            and moment <= entry.committed
        ):
            asked = max(asked, moment)
            behind += 1
        waited = entry.committed - asked
        if seconds <= 0:
            continue
        if waited >= _WAITED * seconds:
            steps.append(
                TimedStep(step, seconds, host, is_bound=not is_sure and done > could_begin)
            )
            done = entry.committed
            is_sure = True
        else:
            fetches.append(waited)
            steps.append(TimedStep(step, seconds, host, is_bound=True))
            takes = None if is_split(step, graph_tokens) else usual.get(step.num_tokens)
            done = min(asked, begun + (takes or asked))
            is_sure = takes is not None
    return Timeline(
        steps,
        True,
        _median([one[1] for one in pauses]),
        empty_steps,
        pauses,
        _median(turns),
        _median(fetches),
    )


def _median(values: Sequence[float]) -> float:
    return float(np.median(values)) if values else 0.0
