"""Prometheus metrics, under vLLM's names so that its dashboards work, and under our own where we
know more.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from typing import Any

from prometheus_client import ProcessCollector, generate_latest

from quire.observe.shared_metrics import Counter, Gauge, Histogram, Info, Numbers, Registry
from quire.observe.step_log import NO_ADAPTERS, StepSummary
from quire.step import RequestMetrics, StepAdapters

ALL_ENGINES = "all"
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
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
)
_TOKEN_SECONDS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
)
_LONG_SECONDS = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480)
_COUNTS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
_NS = (1, 2, 5, 10, 20, 50, 100)

_GAUGES = {
    "vllm:num_requests_running": "Requests in the running batch.",
    "vllm:num_requests_waiting": "Requests that wait.",
    "vllm:kv_cache_usage_perc": "Part of the cache's blocks in use; 1 is all.",
    "quire_kv_cache_used_bytes": "The cache's blocks in use, in bytes.",
}
_MEMORY = {
    "engine_resident_memory": "Memory the engine process holds.",
    "gpu_memory_used": "Memory in use on the engine's GPU, by whomever.",
    "gpu_memory_total": "Memory of the engine's GPU.",
    "gpu_memory_allocated": "Memory on its GPU that the engine uses: weights, cache, activations.",
}
_COUNTERS = {
    "vllm:num_preemptions": "Times a request gave way to another.",
    "vllm:prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
    "vllm:prefix_cache_hits": "Prompt tokens found in the prefix cache.",
    "vllm:prompt_tokens": "Prompt tokens of requests that began to run.",
    "vllm:generation_tokens": "Tokens generated.",
    "vllm:spec_decode_num_drafts": "Times draft tokens of a request were checked.",
    "vllm:spec_decode_num_draft_tokens": "Draft tokens that were checked.",
    "vllm:spec_decode_num_accepted_tokens": "Draft tokens that were right.",
    "quire_failed_steps": "Steps that could not be computed.",
    "quire_late_token_steps": "Steps that could not keep the target of token times.",
    "quire_late_first_token_steps": "Steps that could not keep the target of first tokens.",
    "quire_engine_restarts": "Times the engine process was replaced.",
    "quire_http_worker_restarts": "Times an HTTP worker was replaced.",
}
_LATE = {
    "token_time": "quire_late_token_steps",
    "first_token": "quire_late_first_token_steps",
}
_HISTOGRAMS: dict[str, tuple[str, Sequence[float]]] = {
    "vllm:time_to_first_token_seconds": ("From arrival to the first token.", _SECONDS),
    "vllm:inter_token_latency_seconds": ("Between two tokens.", _TOKEN_SECONDS),
    "vllm:time_per_output_token_seconds": (
        "The former name of vllm:inter_token_latency_seconds.",
        _TOKEN_SECONDS,
    ),
    "vllm:request_time_per_output_token_seconds": (
        "Mean time between an answer's tokens.",
        _TOKEN_SECONDS,
    ),
    "vllm:e2e_request_latency_seconds": ("From arrival to the end.", _LONG_SECONDS),
    "vllm:request_queue_time_seconds": ("Time in the queue.", _LONG_SECONDS),
    "vllm:request_inference_time_seconds": ("Time running.", _LONG_SECONDS),
    "vllm:request_prefill_time_seconds": (
        "From leaving the queue to the first token.",
        _LONG_SECONDS,
    ),
    "vllm:request_decode_time_seconds": ("From the first token to the last.", _LONG_SECONDS),
    "vllm:request_prompt_tokens": ("Prompt tokens of a request.", _COUNTS),
    "vllm:request_generation_tokens": ("Tokens generated for a request.", _COUNTS),
    "vllm:request_max_num_generation_tokens": (
        "Tokens of the longest answer to a request.",
        _COUNTS,
    ),
    "vllm:request_params_n": ("The parameter n.", _NS),
    "vllm:request_params_max_tokens": ("The parameter max_tokens.", _COUNTS),
    "vllm:iteration_tokens_total": ("Tokens computed in a step.", _COUNTS),
    "quire_step_seconds": ("Time of a step.", _TOKEN_SECONDS),
}
_OF_STEPS = {
    *_GAUGES,
    *_MEMORY,
    "vllm:num_preemptions",
    "vllm:spec_decode_num_drafts",
    "vllm:spec_decode_num_draft_tokens",
    "vllm:spec_decode_num_accepted_tokens",
    "quire_failed_steps",
    "quire_late_token_steps",
    "quire_late_first_token_steps",
    "quire_engine_restarts",
    "vllm:iteration_tokens_total",
    "quire_step_seconds",
}
"""What an engine's steps and its process tell; the rest is told by calls, whichever engine they
went to.
"""


class ServerMetrics:
    """All the numbers of one server."""

    def __init__(self, model_name: str, engine: str = "0", numbers: Numbers | None = None) -> None:
        """`engine` is the label of what is counted here; with several, ALL_ENGINES, and each counts
        its own (`of_engine`). `numbers`: where this process counts, so that another can read it.
        """
        registry = Registry(numbers)
        self.show = registry.show
        """Adds what other processes count to the page."""
        self.registry = registry.prometheus
        ProcessCollector(registry=self.registry)  # memory, descriptors and time of the HTTP process
        self._labels = labels = {"model_name": model_name, "engine": engine}
        names = list(labels)
        common: dict[str, Any] = {"labelnames": names, "registry": registry}
        self._families: dict[str, dict[str, Any]] = {
            "gauges": {name: Gauge(name, text, **common) for name, text in _GAUGES.items()},
            "memory": {
                name: Gauge(f"quire_{name}_bytes", text, **common) for name, text in _MEMORY.items()
            },
            "counters": {name: Counter(name, text, **common) for name, text in _COUNTERS.items()},
            "histograms": {
                name: Histogram(name, text, buckets=buckets, **common)
                for name, (text, buckets) in _HISTOGRAMS.items()
            },
        }
        self._take_labels()
        text = "Answers that came to an end, by reason."
        self._finished = Counter(
            "vllm:request_success", text, [*names, "finished_reason"], registry=registry
        )
        text = "Draft tokens that were right, by their place among a request's draft tokens."
        per_place = "vllm:spec_decode_num_accepted_tokens_per_pos"
        self._accepted = Counter(per_place, text, [*names, "position"], registry=registry)
        text = "Requests that wait, by what for: room in the batch or in the cache (capacity), or for an adapter."
        self._waiting = Gauge(
            "vllm:num_requests_waiting_by_reason", text, [*names, "reason"], registry=registry
        )
        text = "Adapters of running requests, and those others wait for room for: when that was so last."
        self._lora = Info(
            "vllm:lora_requests_info",
            text,
            [*names, "running_lora_adapters", "waiting_lora_adapters"],
            registry=registry,
        )
        text = "All blocks that requests can use, in bytes."
        self._cache_bytes = Gauge("quire_kv_cache_bytes", text, names, registry=registry)
        text = "The cache of keys and values: always 1, with its sizes as labels."
        cache_labels = ["engine", "block_size", "num_gpu_blocks"]
        self._cache_config = Info("vllm:cache_config_info", text, cache_labels, registry=registry)
        self._http = Counter(
            "quire_http_requests", "HTTP requests answered.", ["path", "status"], registry=registry
        )
        text = "Answers that never came to an end."
        self._aborted = Counter("quire_answers_not_finished", text, ["why"], registry=registry)
        # Counters that are there from the start can be told from those that were never asked for.
        for reason in ("stop", "length"):
            self._finished.labels(**labels, finished_reason=reason)
        for why in ("aborted", "failed"):
            self._aborted.labels(why=why)
        self._num_blocks = 1
        self._bytes_per_block = 0
        # Every token comes by here.
        self._generated = self._counters["vllm:generation_tokens"]
        self._between_tokens = self._histograms["vllm:inter_token_latency_seconds"]
        self.gaps: dict[float, int] = {}
        """Seconds between two tokens of an answer, and how many times, that `count_gaps` is to
        count: what a step gave to all who got the one before, too, is one number.
        """
        registry.show_as("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds")

    def text(self) -> bytes:
        """The page Prometheus reads."""
        return generate_latest(self.registry)

    def of_engine(self, engine: str) -> ServerMetrics:
        """For one of several engines: the same metrics, under its own label."""
        other = copy.copy(self)
        other._labels = {**self._labels, "engine": engine}
        other._take_labels(of_calls=False)
        return other

    def _take_labels(self, of_calls: bool = True) -> None:
        """Finds the metrics under the labels: those that an engine's steps tell, those that calls
        tell, or both.
        """
        of_steps = self._labels["engine"] != ALL_ENGINES

        def labelled(kind: str) -> dict[str, Any]:
            return {
                name: family.labels(**self._labels)
                for name, family in self._families[kind].items()
                if (of_steps if name in _OF_STEPS else of_calls)
            }

        self._gauges, self._memory = labelled("gauges"), labelled("memory")
        self._counters, self._histograms = labelled("counters"), labelled("histograms")

    def set_cache(self, num_blocks: int, block_size: int, bytes_per_block: int) -> None:
        """What the engine said about its cache when it started."""
        self._num_blocks = max(1, num_blocks)
        self._bytes_per_block = bytes_per_block
        self._cache_bytes.labels(**self._labels).set(num_blocks * bytes_per_block)
        sizes = (str(block_size), str(num_blocks))
        self._cache_config.show((self._labels["engine"],), sizes, 1)

    # What the engine client tells

    def steps(self, steps: Sequence[StepSummary], num_free_blocks: int) -> None:
        for step in steps:
            self._counters["vllm:num_preemptions"].inc(step.num_preempted)
            self._counters["quire_failed_steps"].inc(step.error is not None)
            if step.gave_way is not None:
                self._counters[_LATE[step.gave_way]].inc()
            if step.num_scheduled:
                self._observe("vllm:iteration_tokens_total", step.num_tokens)
                self._observe("quire_step_seconds", step.seconds)
            if step.num_drafts_checked:
                self._counters["vllm:spec_decode_num_drafts"].inc(step.num_drafts_checked)
                self._counters["vllm:spec_decode_num_draft_tokens"].inc(step.num_draft_tokens)
                self._counters["vllm:spec_decode_num_accepted_tokens"].inc(sum(step.accepted))
                for place, count in enumerate(step.accepted):
                    self._accepted.labels(**self._labels, position=str(place)).inc(count)
        self._gauges["vllm:num_requests_running"].set(steps[-1].num_running)
        self._gauges["vllm:num_requests_waiting"].set(steps[-1].num_waiting)
        adapters = steps[-1].adapters
        others = steps[-1].num_waiting - adapters.num_waiting
        self._waiting.labels(**self._labels, reason="capacity").set(others)
        self._waiting.labels(**self._labels, reason="adapter").set(adapters.num_waiting)
        self._show_adapters(adapters)
        self._gauges["vllm:kv_cache_usage_perc"].set(1 - num_free_blocks / self._num_blocks)
        num_used = self._num_blocks - num_free_blocks
        self._gauges["quire_kv_cache_used_bytes"].set(num_used * self._bytes_per_block)

    def _show_adapters(self, adapters: StepAdapters) -> None:
        """One line, which is there while somebody has or waits for an adapter."""
        shown = (",".join(adapters.running), ",".join(adapters.waiting))
        texts = shown if any(shown) else ()
        self._lora.show(tuple(self._labels.values()), texts, time.time())

    def memory(self, found: Mapping[str, int]) -> None:
        """What the engine process takes, by the names of `_MEMORY`; those of a GPU stay 0 where
        there is none.
        """
        for name, size in found.items():
            self._memory[name].set(size)

    def restarted(self) -> None:
        self._counters["quire_engine_restarts"].inc()
        for gauge in self._gauges.values():
            gauge.set(0)
        for reason in ("capacity", "adapter"):
            self._waiting.labels(**self._labels, reason=reason).set(0)
        self._show_adapters(NO_ADAPTERS)

    def worker_restarted(self, num_answers: int) -> None:
        """An HTTP worker was replaced, and so many answers ended with it."""
        self._counters["quire_http_worker_restarts"].inc()
        self.requests_failed("failed", num_answers)

    # What calls tell

    def prompt_started(self, num_tokens: int, num_cached: int) -> None:
        self._counters["vllm:prompt_tokens"].inc(num_tokens)
        self._counters["vllm:prefix_cache_queries"].inc(num_tokens)
        self._counters["vllm:prefix_cache_hits"].inc(num_cached)

    def tokens(self, count: int, seconds: float, is_first: bool) -> None:
        """An answer gained tokens; `seconds` after its arrival if they are the first, else after
        those before.
        """
        self._generated.inc(count)
        if is_first:
            self._observe("vllm:time_to_first_token_seconds", seconds)
        else:
            self._between_tokens.observe(seconds / count, count)

    def count_gaps(self) -> None:
        """Counts tokens that were not the first of their answers, and came one by one."""
        for seconds, count in self.gaps.items():
            self._generated.inc(count)
            self._between_tokens.observe(seconds, count)
        self.gaps.clear()

    def answer_finished(self, metrics: RequestMetrics, reason: str) -> None:
        self._finished.labels(**self._labels, finished_reason=reason).inc()
        if metrics.queue_time is not None and metrics.first_scheduled is not None:
            self._observe("vllm:request_queue_time_seconds", metrics.queue_time)
            self._observe(
                "vllm:request_inference_time_seconds", metrics.finished - metrics.first_scheduled
            )
            if metrics.first_token is not None:
                self._observe(
                    "vllm:request_prefill_time_seconds",
                    metrics.first_token - metrics.first_scheduled,
                )
                self._observe(
                    "vllm:request_decode_time_seconds", metrics.finished - metrics.first_token
                )
        if metrics.time_per_output_token is not None:
            self._observe(
                "vllm:request_time_per_output_token_seconds", metrics.time_per_output_token
            )

    def request_finished(
        self,
        seconds: float,
        num_prompt_tokens: int,
        num_tokens: Sequence[int],
        n: int,
        max_tokens: int | None,
    ) -> None:
        """`num_tokens`: of each of its answers."""
        self._observe("vllm:e2e_request_latency_seconds", seconds)
        self._observe("vllm:request_prompt_tokens", num_prompt_tokens)
        self._observe("vllm:request_generation_tokens", sum(num_tokens))
        self._observe("vllm:request_max_num_generation_tokens", max(num_tokens))
        self._observe("vllm:request_params_n", n)
        if max_tokens is not None:
            self._observe("vllm:request_params_max_tokens", max_tokens)

    def requests_failed(self, why: str, count: int) -> None:
        self._aborted.labels(why=why).inc(count)

    # What the HTTP side tells

    def http_request(self, path: str, status: int) -> None:
        self._http.labels(path=path, status=str(status)).inc()

    def _observe(self, name: str, value: float) -> None:
        self._histograms[name].observe(value)
