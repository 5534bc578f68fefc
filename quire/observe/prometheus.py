"""Prometheus metrics, under vLLM's names so that its dashboards work, and under our own where we know more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

from quire.observe.step_summary import StepSummary
from quire.step import RequestMetrics

_SECONDS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0)
_LONG_SECONDS = (
    0.1,
    0.3,
    0.5,
    0.8,
    1.0,
    1.5,
    2.0,
    2.5,
    5.0,
    10.0,
    15.0,
    20.0,
    30.0,
    40.0,
    50.0,
    60.0,
    120.0,
    240.0,
    480.0,
)
_COUNTS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
_NS = (1, 2, 5, 10, 20, 50, 100)


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """What a request that came to its end was."""

    total: float
    num_prompt_tokens: int
    num_completion_tokens: int
    num_longest_tokens: int
    """Of the longest answer."""
    n: int
    max_tokens: int | None


class ServerMetrics:
    """All the numbers of one server."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)  # memory, descriptors and time of the HTTP process
        self._labels = {"model_name": model_name, "engine": "0"}
        self._running = self._gauge("vllm:num_requests_running", "Requests in the running batch.")
        self._waiting = self._gauge("vllm:num_requests_waiting", "Requests that wait.")
        self._usage = self._gauge("vllm:kv_cache_usage_perc", "Part of the cache's blocks in use; 1 is all.")
        self._preemptions = self._counter("vllm:num_preemptions", "Times a request gave way to another.")
        self._queries = self._counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self._hits = self._counter("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self._prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens of requests that began to run.")
        self._tokens = self._counter("vllm:generation_tokens", "Tokens generated.")
        self._finished = Counter(
            "vllm:request_success",
            "Answers that came to an end, by reason.",
            [*self._labels, "finished_reason"],
            registry=self.registry,
        )
        self._first = self._histogram("vllm:time_to_first_token_seconds", "From arrival to the first token.", _SECONDS)
        self._between = self._histogram("vllm:inter_token_latency_seconds", "Between two tokens.", _TOKEN_SECONDS)
        self._between_old = self._histogram(
            "vllm:time_per_output_token_seconds", "The former name of vllm:inter_token_latency_seconds.", _TOKEN_SECONDS
        )
        self._per_token = self._histogram(
            "vllm:request_time_per_output_token_seconds", "Mean time between an answer's tokens.", _TOKEN_SECONDS
        )
        self._total = self._histogram("vllm:e2e_request_latency_seconds", "From arrival to the end.", _LONG_SECONDS)
        self._queue = self._histogram("vllm:request_queue_time_seconds", "Time in the queue.", _LONG_SECONDS)
        self._inference = self._histogram("vllm:request_inference_time_seconds", "Time running.", _LONG_SECONDS)
        self._prefill = self._histogram(
            "vllm:request_prefill_time_seconds", "From leaving the queue to the first token.", _LONG_SECONDS
        )
        self._decode = self._histogram(
            "vllm:request_decode_time_seconds", "From the first token to the last.", _LONG_SECONDS
        )
        self._request_prompt = self._histogram("vllm:request_prompt_tokens", "Prompt tokens of a request.", _COUNTS)
        self._request_tokens = self._histogram(
            "vllm:request_generation_tokens", "Tokens generated for a request.", _COUNTS
        )
        self._request_longest = self._histogram(
            "vllm:request_max_num_generation_tokens", "Tokens of the longest answer to a request.", _COUNTS
        )
        self._request_n = self._histogram("vllm:request_params_n", "The parameter n.", _NS)
        self._request_max = self._histogram("vllm:request_params_max_tokens", "The parameter max_tokens.", _COUNTS)
        self._step_tokens = self._histogram("vllm:iteration_tokens_total", "Tokens computed in a step.", _COUNTS)
        self._cache_config = Gauge(
            "vllm:cache_config_info",
            "The cache of keys and values: always 1, with its sizes as labels.",
            ["block_size", "num_gpu_blocks", "engine"],
            registry=self.registry,
        )
        self._step_seconds = self._histogram("quire_step_seconds", "Time of a step.", _TOKEN_SECONDS)
        self._failed_steps = self._counter("quire_failed_steps", "Steps that could not be computed.")
        self._restarts = self._counter("quire_engine_restarts", "Times the engine process was replaced.")
        self._http = Counter(
            "quire_http_requests", "HTTP requests answered.", ["path", "status"], registry=self.registry
        )
        self._aborted = Counter(
            "quire_answers_not_finished", "Answers that never came to an end.", ["why"], registry=self.registry
        )
        # Counters that are there from the start can be told from those that were never asked for.
        for reason in ("stop", "length"):
            self._finished.labels(**self._labels, finished_reason=reason)
        for why in ("aborted", "failed"):
            self._aborted.labels(why=why)
        self._num_blocks = 1

    def text(self) -> bytes:
        """The page Prometheus reads."""
        return generate_latest(self.registry)

    def set_cache(self, num_blocks: int, block_size: int) -> None:
        """What the engine said about its cache when it started."""
        self._num_blocks = max(1, num_blocks)
        self._cache_config.clear()
        self._cache_config.labels(str(block_size), str(num_blocks), "0").set(1)

    # What the engine client tells

    def steps(self, steps: Sequence[StepSummary], num_free_blocks: int) -> None:
        for step in steps:
            self._preemptions.inc(step.num_preempted)
            if step.num_scheduled:
                self._step_tokens.observe(step.num_tokens)
                self._step_seconds.observe(step.seconds)
            self._failed_steps.inc(step.error is not None)
        self._running.set(steps[-1].num_running)
        self._waiting.set(steps[-1].num_waiting)
        self._usage.set(1 - num_free_blocks / self._num_blocks)

    def restarted(self) -> None:
        self._restarts.inc()
        for gauge in (self._running, self._waiting, self._usage):
            gauge.set(0)

    # What generations tell

    def prompt_started(self, num_tokens: int, num_cached: int) -> None:
        self._prompt_tokens.inc(num_tokens)
        self._queries.inc(num_tokens)
        self._hits.inc(num_cached)

    def first_token(self, seconds: float) -> None:
        self._first.observe(seconds)

    def next_tokens(self, seconds: float, count: int) -> None:
        for _ in range(count):
            self._between.observe(seconds)
            self._between_old.observe(seconds)

    def tokens(self, count: int) -> None:
        self._tokens.inc(count)

    def answer_finished(self, metrics: RequestMetrics, reason: str) -> None:
        self._finished.labels(**self._labels, finished_reason=reason).inc()
        if metrics.queue_time is not None and metrics.first_scheduled is not None:
            self._queue.observe(metrics.queue_time)
            self._inference.observe(metrics.finished - metrics.first_scheduled)
            if metrics.first_token is not None:
                self._prefill.observe(metrics.first_token - metrics.first_scheduled)
                self._decode.observe(metrics.finished - metrics.first_token)
        if metrics.time_per_output_token is not None:
            self._per_token.observe(metrics.time_per_output_token)

    def request_finished(self, times: RequestTimes) -> None:
        self._total.observe(times.total)
        self._request_prompt.observe(times.num_prompt_tokens)
        self._request_tokens.observe(times.num_completion_tokens)
        self._request_longest.observe(times.num_longest_tokens)
        self._request_n.observe(times.n)
        if times.max_tokens is not None:
            self._request_max.observe(times.max_tokens)

    def requests_failed(self, why: str, count: int) -> None:
        self._aborted.labels(why=why).inc(count)

    # What the HTTP side tells

    def http_request(self, path: str, status: int) -> None:
        self._http.labels(path=path, status=str(status)).inc()

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, list(self._labels), registry=self.registry).labels(**self._labels)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, list(self._labels), registry=self.registry).labels(**self._labels)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(name, text, list(self._labels), buckets=buckets, registry=self.registry).labels(**self._labels)
