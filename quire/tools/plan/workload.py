"""Requests of different lengths: drawn from ranges, or read from a file."""

from __future__ import annotations

import json
import random
import re
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from quire.errors import InvalidRequestError
from quire.tools.bench.jobs import Lengths

_LONGEST = 2**31
_MOST_REQUESTS = 100_000
"""Of a workload that is played step by step."""


class StepSeconds(Protocol):
    """How long steps take (`quire.tools.plan.estimate.PlannedTimes`)."""

    def prompt(self, *lengths: int) -> float: ...

    def step(self, rows: int, context: int) -> float: ...


class RequestLengths(NamedTuple):
    """One request, in tokens."""

    prompt: int
    answer: int


def draw_jobs(count: int, prompts: Lengths, answers: Lengths) -> tuple[RequestLengths, ...]:
    """So many, always the same."""
    source = random.Random(0)
    return tuple(RequestLengths(prompts.draw(source), answers.draw(source)) for _ in range(count))


def read_jobs(path: Path) -> tuple[RequestLengths, ...]:
    """A request a line: two numbers (prompt and answer), or JSON with `input_tokens` and
    `output_tokens`.
    """
    jobs: list[RequestLengths] = []
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip() or line.startswith("#"):
                    continue
                try:
                    jobs.append(_read_job(line))
                except (ValueError, RecursionError) as error:
                    raise InvalidRequestError(
                        "--workload", f"{path}, line {number}: {error}"
                    ) from None
                if len(jobs) > _MOST_REQUESTS:
                    raise InvalidRequestError(
                        "--workload", f"{path} has more than {_MOST_REQUESTS:,} requests"
                    )
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequestError("--workload", f"{path} can't be read: {error}") from error
    if not jobs:
        raise InvalidRequestError("--workload", f"{path} has no requests")
    return tuple(jobs)


def _read_job(line: str) -> RequestLengths:
    if line.lstrip().startswith("{"):
        data = json.loads(line)
        numbers = [data.get("input_tokens"), data.get("output_tokens")]
    else:
        words = re.split(r"[\s,;]+", line.strip())
        numbers = [
            int(word) if re.fullmatch(r"\d{1,10}", word, re.ASCII) else word for word in words
        ]
    if len(numbers) != 2 or not all(type(one) is int and 1 <= one < _LONGEST for one in numbers):
        raise ValueError(
            f"expected the tokens of a prompt and of its answer, such as 500 100, got {line.strip()[:60]!r}"
        )
    return RequestLengths(*numbers)


def workload_seconds(
    times: StepSeconds, jobs: Sequence[tuple[int, int]], at_once: int | None = None
) -> float:
    """Of requests that come all at once: each prompt is computed as soon as there is a place
    (`at_once` in all; None: one for each), then every step gives each answer a token.
    """
    waiting = deque(RequestLengths(*job) for job in jobs)
    running: list[list[int]] = []
    """Of each request its context and the tokens that it still wants."""
    total = 0.0
    while waiting or running:
        admitted: list[RequestLengths] = []
        while waiting and (at_once is None or len(running) + len(admitted) < max(1, at_once)):
            admitted.append(waiting.popleft())
        if admitted:
            total += times.prompt(*[job.prompt for job in admitted])
            running += [[job.prompt, job.answer - 1] for job in admitted if job.answer > 1]
        if running:
            # Until the next answer ends every step has the same requests: the one in the middle
            # stands for all.
            steps = min(left for _, left in running) if not waiting or at_once is None else 1
            context = sum(context for context, _ in running) // len(running) + (steps + 1) // 2
            total += steps * times.step(len(running), context)
            running = [[context + steps, left - steps] for context, left in running if left > steps]
    return total
