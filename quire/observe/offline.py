"""What an offline engine tells of itself: counters, and spans of its requests where somebody
collects them.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from quire.observe.engine_metrics import EngineCounters, EngineMetrics
from quire.observe.tracing import Tracing
from quire.step import RequestMetrics, StepLogEntry


class OfflineObserver:
    """Listens to the step log of an `LLM`, and hears of every answer's end, which the log has one
    step later. `traces` is where spans go: a collector's address (OTLP over HTTP), or a `Tracing`
    made by hand.
    """

    def __init__(self, model: str, traces: str | Tracing | None = None) -> None:
        self._model = model
        self._own_tracing = Tracing.to_endpoint(traces) if isinstance(traces, str) else None
        self._tracing = self._own_tracing if isinstance(traces, str) else traces
        self._metrics = EngineMetrics(keep=0)
        self._finished: Counter[str] = Counter()
        self._output_tokens = 0

    @property
    def counters(self) -> EngineCounters:
        """As they are now."""
        counted = copy.deepcopy(self._metrics.counters)
        return replace(counted, finished=Counter(self._finished), output_tokens=self._output_tokens)

    def observe(self, entry: StepLogEntry) -> None:
        self._metrics.observe(entry)

    def ended(self, reason: str, metrics: RequestMetrics) -> None:
        """An answer is complete, or was given up."""
        self._finished[reason] += 1
        self._output_tokens += metrics.num_output_tokens
        if self._tracing is None:
            return
        about = {"gen_ai.request.id": metrics.request_id, "gen_ai.response.model": self._model}
        trace = self._tracing.begin(metrics.arrival, about, {})
        trace.answered(metrics.request_id, metrics)
        usage: dict[str, str | int | float | Sequence[str]] = {
            "gen_ai.usage.prompt_tokens": metrics.num_prompt_tokens,
            "gen_ai.usage.completion_tokens": metrics.num_output_tokens,
            "quire.cached_tokens": metrics.cached_tokens,
            "gen_ai.response.finish_reasons": [reason],
        }
        trace.ended("failed" if reason == "error" else "finished", usage, now=metrics.finished)

    def close(self) -> None:
        """Sends what has not been sent; a `Tracing` that was given is its giver's to close."""
        if self._own_tracing is not None:
            self._own_tracing.close()
