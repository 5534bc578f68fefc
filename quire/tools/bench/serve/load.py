"""Sends requests when they are due and notes what comes back when."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from quire.errors import InvalidRequestError
from quire.frontend.progress import BenchmarkBar
from quire.tools.bench.http_client import HttpClient, HttpError
from quire.tools.bench.jobs import Job, check_least

BACKENDS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}


@dataclass(frozen=True, slots=True)
class Load:
    """When requests are sent, and what they say beside the prompt."""

    backend: str = "openai"
    endpoint: str | None = None
    """The path; None: the backend's own."""
    model: str | None = None
    request_rate: float = math.inf
    """Requests a second; infinite: all at once."""
    burstiness: float = 1.0
    """1: arrivals are a Poisson process; less: in bursts; more: evenly spread. (The shape of a
    gamma distribution.)
    """
    max_concurrency: int | None = None
    """Requests under way at a time; those that are due wait."""
    ignore_eos: bool = False
    temperature: float | None = None
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise InvalidRequestError(
                "--backend", f"must be one of {', '.join(BACKENDS)}, not {self.backend!r}"
            )
        if not self.request_rate > 0:
            raise InvalidRequestError("--request-rate", f"must be above 0, not {self.request_rate}")
        if not 0 < self.burstiness < math.inf:
            raise InvalidRequestError("--burstiness", f"must be above 0, not {self.burstiness}")
        if self.max_concurrency is not None:
            check_least("--max-concurrency", self.max_concurrency)

    @property
    def path(self) -> str:
        return self.endpoint or BACKENDS[self.backend]

    def body(self, job: Job) -> dict[str, Any]:
        """The request's JSON."""
        body: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
        is_messages = isinstance(job.prompt, list)
        if self.backend == "openai-chat":
            if isinstance(job.prompt, tuple):
                raise InvalidRequestError(
                    "--vocab-size", "chats are text: leave it out, or use --backend openai"
                )
            body["messages"] = (
                job.prompt if is_messages else [{"role": "user", "content": job.prompt}]
            )
            body["max_completion_tokens"] = job.max_tokens
        else:
            if is_messages:
                raise InvalidRequestError(
                    "--dataset-path", "has messages: use --backend openai-chat"
                )
            body["prompt"] = job.prompt
            body["max_tokens"] = job.max_tokens
        if self.model is not None:
            body["model"] = self.model
        if self.temperature is not None:
            body["temperature"] = self.temperature
        if self.ignore_eos:
            body["ignore_eos"] = True
        return {**body, **self.extra_body}

    def pauses(self, count: int) -> list[float]:
        """Seconds before each request is due after the one before it."""
        if math.isinf(self.request_rate):
            return [0.0] * count
        source = random.Random(self.seed)
        mean = 1 / self.request_rate
        pauses = [
            source.gammavariate(self.burstiness, mean / self.burstiness) for _ in range(count)
        ]
        # A few draws may miss the rate by far; the run as a whole should not.
        scale = count * mean / sum(pauses)
        return [pause * scale for pause in pauses]


@dataclass(slots=True)
class Result:
    """What a client saw of one request. Times are in seconds of the monotonic clock."""

    start: float
    """When it was sent."""
    chunks: list[float] = field(default_factory=list)
    """When each piece of the answer came."""
    end: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None

    @property
    def is_success(self) -> bool:
        return self.error is None

    @property
    def ttft(self) -> float:
        """Time to the first piece."""
        return self.chunks[0] - self.start

    @property
    def itls(self) -> list[float]:
        """Times between pieces; a piece is one token for most servers, most of the time."""
        return [later - earlier for earlier, later in pairwise(self.chunks)]

    @property
    def latency(self) -> float:
        """End to end."""
        return self.end - self.start

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first; None for an answer of one."""
        return (
            None
            if self.output_tokens < 2
            else (self.chunks[-1] - self.chunks[0]) / (self.output_tokens - 1)
        )


async def measure_server(
    base_url: str, api_key: str | None, load: Load, jobs: Sequence[Job], num_warmups: int
) -> tuple[Load, list[Result], float]:
    """The load with the model's name in it (the server's first, if it had none), and what `measure`
    returns.
    """
    async with HttpClient(base_url, api_key) as client:
        if load.model is None:
            models = await client.get_json("/v1/models")
            try:
                load = replace(load, model=str(models["data"][0]["id"]))
            except (KeyError, IndexError, TypeError):
                raise HttpError(
                    "/v1/models: the server names no model; say which with --model"
                ) from None
        if num_warmups:
            await measure(client, [jobs[i % len(jobs)] for i in range(num_warmups)], load)
        with BenchmarkBar(len(jobs)) as bar:
            results, duration = await measure(client, jobs, load, bar.advance)
    return load, results, duration


async def measure(
    client: HttpClient, jobs: Sequence[Job], load: Load, on_done: Callable[[], None] = lambda: None
) -> tuple[list[Result], float]:
    """Sends all jobs; returns their results in the same order, and how long it took."""
    bodies = [load.body(job) for job in jobs]  # made before the clock runs
    slots = (
        asyncio.Semaphore(load.max_concurrency)
        if load.max_concurrency is not None
        else contextlib.nullcontext()
    )

    async def send(body: Mapping[str, Any]) -> Result:
        async with slots:
            result = await request(client, load.path, body)
        on_done()
        return result

    due = started = time.monotonic()
    tasks = []
    async with asyncio.TaskGroup() as group:
        for body, pause in zip(bodies, load.pauses(len(bodies)), strict=True):
            due += pause
            if due > time.monotonic():
                await asyncio.sleep(due - time.monotonic())
            tasks.append(group.create_task(send(body)))
    return [task.result() for task in tasks], time.monotonic() - started


async def request(client: HttpClient, path: str, body: Mapping[str, Any]) -> Result:
    """Sends one request and follows its answer."""
    result = Result(time.monotonic())
    try:
        async for data in client.events(path, body):
            now = time.monotonic()
            if data != b"[DONE]":
                _take(result, json.loads(data), now)
    except (HttpError, ValueError) as error:
        result.error = str(error)
    result.end = time.monotonic()
    if result.is_success and not result.chunks:
        result.error = "the answer was empty"
    elif not result.output_tokens:
        result.output_tokens = len(result.chunks)  # a server that does not tell
    return result


def _take(result: Result, event: Any, now: float) -> None:
    if not isinstance(event, dict):
        return
    if event.get("error"):
        error = event["error"]
        result.error = str(error.get("message", error) if isinstance(error, dict) else error)
    if event.get("usage"):
        result.prompt_tokens = event["usage"].get("prompt_tokens", 0)
        result.output_tokens = event["usage"].get("completion_tokens", 0)
    if any(_has_news(choice) for choice in event.get("choices") or ()):
        result.chunks.append(now)


def _has_news(choice: Mapping[str, Any]) -> bool:
    """The first piece of a chat has a role and nothing else, the last one only says why it ends."""
    delta = choice.get("delta") or choice
    return any(
        delta.get(name)
        for name in ("text", "content", "reasoning_content", "reasoning", "tool_calls")
    )
