"""A step in a few numbers: what the engine process tells of every step to whoever counts (metrics) and logs."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import NamedTuple

from quire.step import StepLogEntry


class StepSummary(NamedTuple):
    """What one step was, for counters and logs."""

    step_id: int
    now: float
    num_scheduled: int
    num_tokens: int
    num_waiting: int
    num_running: int
    num_free_blocks: int
    num_preempted: int
    seconds: float
    """From its being scheduled to its results' arrival."""
    error: str | None = None


def summarize(entry: StepLogEntry) -> StepSummary:
    step = entry.step
    return StepSummary(
        step_id=step.step_id,
        now=step.now,
        num_scheduled=len(step.scheduled),
        num_tokens=step.num_tokens,
        num_waiting=step.num_waiting,
        num_running=step.num_running,
        num_free_blocks=step.num_free_blocks,
        num_preempted=len(step.preempted),
        seconds=entry.committed - step.now,
        error=entry.error,
    )


def describe_steps(steps: Iterable[StepSummary]) -> str:
    """For the log."""
    return json.dumps([step._asdict() for step in steps])
