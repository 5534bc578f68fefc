"""Counters and per-request timings, derived from the step log's entries and nothing else."""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from quire.step import (
    AdmittedRequest,
    Finished,
    Preemption,
    RequestMetrics,
    ScheduledRequest,
    StepLogEntry,
    add_version,
)


@dataclass(slots=True)
class _Live:
    """What the log has said so far about a request that was admitted."""

    first_scheduled: float | None
    first_token: float | None = None
    cached_tokens: int = 0
    host_tokens: int = 0
    recomputed_tokens: int = 0
    preemptions: int = 0
    computed_before: int = 0
    weights_versions: tuple[tuple[int, int], ...] = ()


@dataclass(slots=True)
class EngineCounters:
    """Totals since the first entry."""

    steps: int = 0
    failed_steps: int = 0
    computed_tokens: int = 0
    sampled_tokens: int = 0
    """Tokens runners returned, those of requests that had ended meanwhile included."""
    output_tokens: int = 0
    """Tokens of finished requests."""
    admissions: int = 0
    cached_tokens: int = 0
    host_tokens: int = 0
    recomputed_tokens: int = 0
    preemptions: Counter[str] = field(default_factory=Counter)
    """By kind."""
    finished: Counter[str] = field(default_factory=Counter)
    """By reason."""
    copies: Counter[str] = field(default_factory=Counter)
    """Blocks, by kind."""
    gave_way: Counter[str] = field(default_factory=Counter)
    """Steps in which a target of time could not be held, by the target."""


class EngineMetrics:
    """Feed it entries in order, by hand or as a listener of the step log."""

    def __init__(self, keep: int = 4096) -> None:
        self.counters = EngineCounters()
        self.finished: deque[RequestMetrics] = deque(maxlen=keep)
        """The last `keep` requests that ended, oldest first."""
        self._live: dict[str, _Live] = {}

    def observe(self, entry: StepLogEntry) -> None:
        step = entry.step
        counters = self.counters
        counters.steps += 1
        counters.failed_steps += entry.error is not None
        if step.promise is not None and step.promise.gave_way is not None:
            counters.gave_way[step.promise.gave_way] += 1
        # A request may have been preempted and then ended; its name may have been admitted again
        # since.
        for preemption in step.preempted:
            self._observe_preemption(preemption)
        for finished in step.finished:
            self._observe_finished(finished)
        for admission in step.admitted:
            self._observe_admission(admission, step.now)
        for copy in step.copies:
            counters.copies[copy.kind] += 1
        for scheduled in step.scheduled:
            self._observe_scheduled(scheduled)
        if entry.result is not None:
            for request_id, tokens in entry.result.tokens.items():
                counters.sampled_tokens += len(tokens)
                live = self._live.get(request_id)
                if live is not None and live.first_token is None and tokens:
                    live.first_token = entry.committed

    def _observe_finished(self, finished: Finished) -> None:
        self.counters.finished[finished.reason] += 1
        self.counters.output_tokens += finished.num_output_tokens
        live = self._live.pop(finished.request_id, None) or _Live(first_scheduled=None)
        self.finished.append(
            RequestMetrics(
                request_id=finished.request_id,
                arrival=finished.arrival,
                first_scheduled=live.first_scheduled,
                # A first token that came after the request's end was dropped.
                first_token=live.first_token if finished.num_output_tokens else None,
                finished=finished.time,
                num_prompt_tokens=finished.num_prompt_tokens,
                num_output_tokens=finished.num_output_tokens,
                cached_tokens=live.cached_tokens,
                host_tokens=live.host_tokens,
                recomputed_tokens=live.recomputed_tokens,
                preemptions=live.preemptions,
                drafted_tokens=finished.drafted_tokens,
                accepted_tokens=finished.accepted_tokens,
                weights_versions=live.weights_versions,
            )
        )

    def _observe_preemption(self, preemption: Preemption) -> None:
        self.counters.preemptions[preemption.kind] += 1
        live = self._live.get(preemption.request_id)
        if live is not None:
            live.preemptions += 1
            live.computed_before = max(live.computed_before, preemption.num_computed_tokens)

    def _observe_admission(self, admission: AdmittedRequest, now: float) -> None:
        live = self._live.setdefault(admission.request_id, _Live(first_scheduled=now))
        live.cached_tokens += admission.num_cached_tokens
        live.host_tokens += admission.num_host_tokens
        num_output_tokens = len(admission.token_ids) - admission.num_prompt_tokens
        live.weights_versions = add_version(
            live.weights_versions, num_output_tokens, admission.weights_version
        )
        self.counters.admissions += 1
        self.counters.cached_tokens += admission.num_cached_tokens
        self.counters.host_tokens += admission.num_host_tokens

    def _observe_scheduled(self, scheduled: ScheduledRequest) -> None:
        self.counters.computed_tokens += scheduled.num_tokens
        live = self._live.get(scheduled.request_id)
        if live is not None and scheduled.start < live.computed_before:
            end = min(
                scheduled.start + scheduled.num_tokens - len(scheduled.draft_tokens),
                live.computed_before,
            )
            live.recomputed_tokens += end - scheduled.start
            self.counters.recomputed_tokens += end - scheduled.start


def derive_metrics(entries: Iterable[StepLogEntry]) -> EngineMetrics:
    """The metrics of a whole log, such as `read_step_log` returns, with all its requests."""
    metrics = EngineMetrics(keep=sys.maxsize)
    for entry in entries:
        metrics.observe(entry)
    return metrics
