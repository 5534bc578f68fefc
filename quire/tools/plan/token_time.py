"""What a target of token times costs: how many answers may share a step, how many prompt tokens may
be computed beside them, and what throughput is left.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.engine.token_times import AIM, LEAST_PROMPT_TOKENS
from quire.tools.plan.devices import PlannedDevice
from quire.tools.plan.estimate import Estimate, ExpectedLoad, PlannedTimes
from quire.tools.plan.model import PlannedModel


@dataclass(frozen=True, slots=True)
class TargetPlan:
    """The best that keeps a target."""

    token_time: float
    at_once: int
    """Answers in a step."""
    prompt_tokens: int
    """That fit beside them."""
    tokens_per_second: float
    share: float
    """Of the throughput without a target."""


def plan_target(
    model: PlannedModel, device: PlannedDevice, found: Estimate, load: ExpectedLoad, seconds: float
) -> TargetPlan | None:
    """None: not even one answer at a time keeps it."""
    times = PlannedTimes(model.spec, device, found.form)
    context = load.input_tokens + load.output_tokens // 2
    each = found.prompt_seconds / load.input_tokens
    planned = [
        one
        for rows in _counts(found.at_once)
        if (one := _with_rows(rows, times.step(rows, context), each, found, load, seconds))
    ]
    return max(planned, key=lambda one: one.tokens_per_second, default=None)


def _counts(most: int) -> list[int]:
    """From one to all, each a little more than the last."""
    counts = [1]
    while counts[-1] < most:
        counts.append(min(most, max(counts[-1] + 1, round(1.15 * counts[-1]))))
    return counts


def _with_rows(
    rows: int, step: float, each: float, found: Estimate, load: ExpectedLoad, seconds: float
) -> TargetPlan | None:
    """So many answers at once; `step` are a step's seconds without prompts, `each` those of one of
    their tokens.
    """
    prompt_tokens = int((AIM * seconds - step) / each)
    if prompt_tokens < LEAST_PROMPT_TOKENS:
        return None
    # As many requests begin as end: by their answers, or by what prompts get.
    requests = min(rows / load.output_tokens, prompt_tokens / load.input_tokens)
    speed = requests * load.output_tokens / (step + requests * load.input_tokens * each)
    return TargetPlan(seconds, rows, prompt_tokens, speed, speed / found.tokens_per_second)
