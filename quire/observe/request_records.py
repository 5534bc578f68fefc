"""What happened to a request: told from the step log (in the engine process), and kept in outline
(in the HTTP process) for longer than the log remembers.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from quire.engine import SchedulerConfig
from quire.step import StepLogEntry

_MOST_STEPS = 1000
"""Steps looked at for company: the engine waits while one is described."""
_MOST_COMPANIONS = 50


def describe_request(
    log: Sequence[StepLogEntry], request_id: str, config: SchedulerConfig
) -> dict[str, Any] | None:
    """What the log says about a request and its answers (`request_id/0`, …); None if it is not
    there.
    """
    trails: dict[str, _Trail] = {}
    for entry in log:
        step = entry.step
        for admission in step.admitted:
            if belongs_to(admission.request_id, request_id):
                trail = trails.setdefault(
                    admission.request_id, _Trail(admission.arrival, admission.num_prompt_tokens)
                )
                trail.admissions.append(
                    {
                        "step": step.step_id,
                        "time": round(step.now - admission.arrival, 6),
                        "row": admission.row,
                        "cached_tokens": admission.num_cached_tokens,
                        "host_tokens": admission.num_host_tokens,
                    }
                )
        for preemption in step.preempted:
            if preemption.request_id in trails:
                what = {"step": step.step_id, "kind": preemption.kind, "why": preemption.why}
                trails[preemption.request_id].preemptions.append(what)
        for finished in step.finished:
            if finished.request_id in trails:
                end = {
                    "reason": finished.reason,
                    "time": round(finished.time - finished.arrival, 6),
                }
                trails[finished.request_id].finish = end
        if trails:
            _follow(entry, trails)
    for trail in trails.values():
        trail.explain_wait(log, config)
    if not trails:
        return None
    return {
        "request_id": request_id,
        "answers": [trail.describe(name) for name, trail in sorted(trails.items())],
    }


@dataclass(slots=True)
class _Trail:
    """What one answer left in the log."""

    arrival: float
    num_prompt_tokens: int
    admissions: list[dict[str, Any]] = field(default_factory=list)
    preemptions: list[dict[str, Any]] = field(default_factory=list)
    waited_for: dict[str, dict[str, float]] = field(default_factory=dict)
    finish: dict[str, Any] | None = None
    num_steps: int = 0
    computed_tokens: int = 0
    step_seconds: float = 0.0
    first_token: float | None = None
    failure: str | None = None
    companions: Counter[str] = field(default_factory=Counter)

    def explain_wait(self, entries: Sequence[StepLogEntry], config: SchedulerConfig) -> None:
        """What it waited for in the steps between its arrival and its first admission."""
        first: int = self.admissions[0]["step"]
        for entry in entries:
            step = entry.step
            if step.now < self.arrival or step.step_id >= first:
                continue
            if step.num_running >= config.max_num_seqs:
                why = "rows"
            elif step.num_tokens >= config.max_batched_tokens:
                why = "tokens in the step"
            else:
                why = "blocks, or its turn"
            waited = self.waited_for.setdefault(why, {"steps": 0, "seconds": 0.0})
            waited["steps"] += 1
            waited["seconds"] = round(waited["seconds"] + entry.committed - step.now, 6)

    def describe(self, name: str) -> dict[str, Any]:
        return {
            "name": name,
            "prompt_tokens": self.num_prompt_tokens,
            "waited_seconds": self.admissions[0]["time"],
            "waited_for": self.waited_for,
            "first_token_seconds": self.first_token,
            "admissions": self.admissions,
            "preemptions": self.preemptions,
            "steps": self.num_steps,
            "computed_tokens": self.computed_tokens,
            "seconds_in_steps": round(self.step_seconds, 6),
            "shared_steps_with": dict(self.companions.most_common(_MOST_COMPANIONS)),
            "failed_step": self.failure is not None,
            "finished": self.finish,
        }


def belongs_to(name: str, request_id: str) -> bool:
    """Whether an answer is one of the request's: names are `id`, `id/0` and, for batches, `id.1/0`."""
    return name == request_id or (name.startswith(request_id) and name[len(request_id)] in "./")


def _follow(entry: StepLogEntry, trails: dict[str, _Trail]) -> None:
    """Notes a step that computed something for one of the answers."""
    scheduled = [one for one in entry.step.scheduled if one.request_id in trails]
    for one in scheduled:
        trail = trails[one.request_id]
        trail.num_steps += 1
        trail.computed_tokens += one.num_tokens
        trail.step_seconds += entry.committed - entry.step.now
        trail.failure = entry.error or trail.failure
        if (
            trail.first_token is None
            and entry.result is not None
            and entry.result.tokens.get(one.request_id)
        ):
            trail.first_token = round(entry.committed - trail.arrival, 6)
        if trail.num_steps <= _MOST_STEPS:
            others = (
                other.request_id for other in entry.step.scheduled if other.request_id not in trails
            )
            trail.companions.update(islice(others, 512))


@dataclass(slots=True)
class RequestRecord:
    """What the HTTP process knows about a request."""

    response_id: str
    request_id: str
    endpoint: str
    created: float
    """By the clock on the wall."""
    state: str = "queued"
    """queued, running, finished, aborted or failed."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    finish_reasons: list[str] = field(default_factory=list)
    error: str | None = None
    timings: dict[str, float | None] = field(default_factory=dict)
    """Seconds since arrival."""
    started: float = 0.0
    """When it came, by this machine's monotonic clock, which its engine has, too."""
    notes: dict[str, Any] = field(default_factory=dict)
    owner: str = ""
    """Whose key it came with, which nobody is told."""

    def describe(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__ if name != "owner"}

    def answered(self, seconds: float, reading: float, moment: float, started: float = 0.0) -> None:
        """The last byte has been handed over, then and so long after the request came; reading its
        body has taken so long. What was sent while the engine still computed took nobody's time.
        """
        total = self.timings.get("total")
        if total is not None:
            self.started = started
            self.timings["reading"] = round(reading, 6)
            self.timings["network"] = round(reading + max(0.0, moment - self.created - total), 6)
            self.timings["answered"] = round(seconds, 6)

    def attributes(self) -> dict[str, int | list[str]]:
        """Of the request's span, under the names tools know."""
        return {
            "gen_ai.usage.prompt_tokens": self.prompt_tokens,
            "gen_ai.usage.completion_tokens": self.completion_tokens,
            "quire.cached_tokens": self.cached_tokens,
            "gen_ai.response.finish_reasons": list(self.finish_reasons),
        }


class RecordBook:
    """The last requests, found by the id of their response or of their HTTP request. Clients choose
    the latter, so two of them may be the same: each key finds its own.
    """

    def __init__(self, keep: int = 2048) -> None:
        self._keep = keep
        self._records: OrderedDict[str, RequestRecord] = OrderedDict()
        self._by_request_id: dict[tuple[str | None, str], str] = {}
        """By owner, or None for all of them, and the id: the newest response."""

    def add(self, record: RequestRecord) -> None:
        self._records[record.response_id] = record
        for owner in (record.owner, None):
            self._by_request_id[owner, record.request_id] = record.response_id
        while len(self._records) > self._keep:
            _, old = self._records.popitem(last=False)
            for owner in (old.owner, None):
                if self._by_request_id.get((owner, old.request_id)) == old.response_id:
                    del self._by_request_id[owner, old.request_id]

    def waiting(self) -> list[RequestRecord]:
        """Those that have not begun, oldest first."""
        return [record for record in self._records.values() if record.state == "queued"]

    def newest(self, count: int, owner: str | None) -> list[RequestRecord]:
        """The last ones of this owner, or with None of anybody, newest first."""
        own = (one for one in reversed(self._records.values()) if owner in (None, one.owner))
        return list(islice(own, count))

    def find(self, name: str, owner: str | None) -> RequestRecord | None:
        """One of this owner's, or with None of anybody's."""
        found = self._records.get(self._by_request_id.get((owner, name), name))
        return found if found is not None and owner in (None, found.owner) else None
