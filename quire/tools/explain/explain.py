"""Where one request's time went, told from steps alone: every moment between its arrival and its
end belongs to one part, so the parts add up to the whole. `quire explain` and `GET
/v1/requests/{id}/explain` show it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

from quire.engine import SchedulerConfig
from quire.observe.request_records import belongs_to
from quire.step import (
    AdmittedRequest,
    Finished,
    Preemption,
    ScheduledRequest,
    Step,
    StepLogEntry,
    add_version,
)
from quire.tools.explain.block_origins import cached_from

PARTS = ("queue", "prompt", "decode", "preempted", "recompute", "turn", "between", "ending")
"""In the order they are shown: waiting to be admitted; computing its prompt; its answer; waiting to
be admitted again; computing again what it had; running, but in no step; between two steps; after
its last step.
"""
_MOST_NAMES = 8
_MOST_CHUNKS = 200
_MOST_COMPANIONS = 50
_MOST_STEPS = 1000
"""Steps looked at for company: an engine waits while one of its requests is explained."""
_MOST_ANSWERS = 16


class Segment(NamedTuple):
    """A stretch of time, in seconds after the arrival."""

    part: str
    start: float
    end: float
    step: int | None = None


class SchedulerLimits(NamedTuple):
    """What requests wait for. A log does not say it; the most that was seen is as near as one
    comes.
    """

    max_num_seqs: int
    max_batched_tokens: int

    @classmethod
    def of(cls, log: Sequence[StepLogEntry], config: SchedulerConfig | None) -> SchedulerLimits:
        if config is not None:
            return cls(config.max_num_seqs, config.max_batched_tokens)
        crowded = [entry.step for entry in log if entry.step.num_waiting] or [
            entry.step for entry in log
        ]
        return cls(
            max(step.num_running for step in crowded), max(step.num_tokens for step in crowded)
        )


@dataclass(slots=True)
class _Life:
    """What a log says of one answer."""

    name: str
    arrival: float
    num_prompt_tokens: int = 0
    admissions: list[tuple[Step, AdmittedRequest]] = field(default_factory=list)
    preemptions: list[tuple[Step, Preemption]] = field(default_factory=list)
    finished: Finished | None = None
    first_token: float | None = None


def explain_request(
    log: Sequence[StepLogEntry],
    request_id: str,
    config: SchedulerConfig | None = None,
    before: Sequence[StepLogEntry] = (),
) -> dict[str, Any] | None:
    """All there is to say about a request and its answers (`request_id/0`, …); None if the log does
    not name it. The log may begin with its arrival; what was computed earlier is then looked for in
    `before`.
    """
    lives = _find(log, request_id)
    if not lives:
        return None
    limits = SchedulerLimits.of(log, config)
    shown = sorted(lives.items())[:_MOST_ANSWERS]
    answers = [_Explanation(log, life, limits, before, config).describe() for _, life in shown]
    return {
        "request_id": request_id,
        "answers": answers,
        "answers_left_out": len(lives) - len(shown),
    }


def request_names(log: Sequence[StepLogEntry]) -> list[str]:
    """All requests a log names, in the order they were admitted."""
    return list(
        dict.fromkeys(admission.request_id for entry in log for admission in entry.step.admitted)
    )


def _find(log: Sequence[StepLogEntry], request_id: str) -> dict[str, _Life]:
    """The last request of each name that belongs to it: names are used again."""
    lives: dict[str, _Life] = {}
    for entry in log:
        step = entry.step
        for preemption in step.preempted:
            if preemption.request_id in lives:
                lives[preemption.request_id].preemptions.append((step, preemption))
        for finished in step.finished:
            if belongs_to(finished.request_id, request_id):
                life = lives.get(finished.request_id)
                if life is None or life.finished is not None or life.arrival != finished.arrival:
                    life = lives[finished.request_id] = _Life(finished.request_id, finished.arrival)
                life.finished = finished
                life.num_prompt_tokens = finished.num_prompt_tokens
        for admission in step.admitted:
            if belongs_to(admission.request_id, request_id):
                life = lives.get(admission.request_id)
                if life is None or life.finished is not None:
                    life = _Life(
                        admission.request_id, admission.arrival, admission.num_prompt_tokens
                    )
                    lives[admission.request_id] = life
                life.admissions.append((step, admission))
        if lives and entry.result is not None:
            for name, life in lives.items():
                if (
                    life.first_token is None
                    and life.finished is None
                    and entry.result.tokens.get(name)
                ):
                    life.first_token = entry.committed
    return lives


class _Explanation:
    """Follows one answer through the log once, with a cursor that never goes back."""

    def __init__(
        self,
        log: Sequence[StepLogEntry],
        life: _Life,
        limits: SchedulerLimits,
        before: Sequence[StepLogEntry],
        config: SchedulerConfig | None,
    ) -> None:
        self._log = log
        self._before = before
        self._config = config
        self._life = life
        self._limits = limits
        self.segments: list[Segment] = []
        self._cursor = life.arrival
        self._end = life.finished.time if life.finished is not None else float("inf")
        self._waits: dict[str, dict[str, Any]] = {}
        self._chunks: list[dict[str, Any]] = []
        self._company: Counter[str] = Counter()
        self._company_seconds: defaultdict[str, float] = defaultdict(float)
        self._num_waits = self._num_steps = self._num_computed = self._num_recomputed = (
            self._num_tokens
        ) = 0
        self._decodes: dict[str, Any] = {"steps": 0, "tokens": 0}
        self._decodes |= {"slowest_seconds": 0.0, "slowest_step": None, "slowest_tokens": 0}
        self._plain_seconds: list[float] = []
        """Of its tokens' steps that computed nobody's prompt."""
        self._beside_prompts: list[tuple[float, dict[str, int]]] = []
        """Of its other tokens' steps: seconds, and whose prompts, with tokens."""
        self._gave_way: Counter[str] = Counter()
        self._drafted = self._accepted = 0
        self._computed_before = 0
        self._num_blocks = self._most_blocks = 0
        self._row: int | None = None
        self._failure: str | None = None
        self._walk()

    # Through the log

    def _walk(self) -> None:
        life = self._life
        preempted = {step.step_id: preemption for step, preemption in life.preemptions}
        admitted = {step.step_id: admission for step, admission in life.admissions}
        for entry in self._log:
            step = entry.step
            if entry.committed <= life.arrival and step.step_id not in admitted:
                continue
            if life.finished is not None and step.now > self._end and self._row is None:
                break
            if step.step_id in preempted:
                self._row = None
                self._computed_before = max(
                    self._computed_before, preempted[step.step_id].num_computed_tokens
                )
            if step.step_id in admitted:
                self._advance(self._waiting_part, step.now)
                self._row = 0
                self._num_blocks = _blocks_at_first(admitted[step.step_id])
            if self._row is None:
                self._wait(entry)
            else:
                self._run(entry)
            if step.now > self._end:
                break
        if life.finished is not None:
            self._advance("ending" if life.admissions else "queue", self._end)

    @property
    def _waiting_part(self) -> str:
        return "queue" if not self._num_steps else "preempted"

    def _advance(self, part: str, until: float, step: int | None = None) -> float:
        """Gives the time up to then to a part; returns how long it was."""
        until = min(until, self._end)
        if until <= self._cursor:
            return 0.0
        seconds = until - self._cursor
        start = self._cursor - self._life.arrival
        self.segments.append(Segment(part, start, until - self._life.arrival, step))
        self._cursor = until
        return seconds

    def _wait(self, entry: StepLogEntry) -> None:
        """A step it had no part in, because it had no place."""
        step = entry.step
        if self._cursor >= self._end:
            return
        before = self._advance(self._waiting_part, step.now)
        why = (
            "the step under way when it came" if step.now < self._life.arrival else self._why(step)
        )
        # Steps may overlap: it may have a place before this one's result is there.
        placed = (later.now for later, _ in self._life.admissions if later.step_id > step.step_id)
        until = min(entry.committed, next(placed, entry.committed))
        seconds = self._advance(self._waiting_part, until, step.step_id)
        if before > 0:
            self._note_wait("the next step", before, ())
        if seconds > 0:
            self._num_waits += 1
            self._note_wait(why, seconds, [one.request_id for one in step.scheduled])

    def _why(self, step: Step) -> str:
        if step.preempted:
            return "blocks: running requests needed them"
        base, _, index = self._life.name.rpartition("/")
        siblings = (one for one in step.scheduled if base and one.request_id.startswith(f"{base}/"))
        if (
            index.isdigit()
            and not self._num_steps
            and any(one.start + one.num_tokens for one in siblings)
        ):
            return "the first answer to the same prompt, which computes it"
        own = {one.resolved.adapter_name for _, one in self._life.admissions} - {""}
        if step.adapters is not None and own.intersection(step.adapters.waiting):
            return "room for its adapter: running requests had all of max_loras"
        if step.num_running >= self._limits.max_num_seqs:
            return "a row: all were taken"
        if step.num_tokens >= self._limits.max_batched_tokens:
            return "room in the step: others filled it"
        return "blocks, or its turn among those who waited"

    def _note_wait(self, why: str, seconds: float, whom: Sequence[str]) -> None:
        wait = self._waits.setdefault(
            why, {"steps": 0, "seconds": 0.0, "because_of": defaultdict(float)}
        )
        wait["steps"] += bool(whom)
        wait["seconds"] += seconds
        for name in whom if self._num_waits <= _MOST_STEPS else ():
            wait["because_of"][name] += seconds

    def _run(self, entry: StepLogEntry) -> None:
        """A step while it had a row."""
        step = entry.step
        own = next((one for one in step.scheduled if one.request_id == self._life.name), None)
        if step.now > self._end:
            return
        self._advance("between", step.now)
        if own is None:
            self._advance("turn", entry.committed, step.step_id)
            return
        part = self._part(own)
        seconds = self._advance(part, entry.committed, step.step_id)
        self._num_steps += 1
        self._num_blocks += len(own.new_block_ids)
        self._most_blocks = max(self._most_blocks, self._num_blocks)
        self._num_computed += own.num_tokens
        real = own.start + own.num_tokens - len(own.draft_tokens)
        again = max(0, min(real, self._computed_before) - own.start)
        self._num_recomputed += again
        self._failure = entry.error or self._failure
        got = 0 if entry.result is None else len(entry.result.tokens.get(own.request_id, ()))
        self._num_tokens += got
        if own.draft_tokens:
            self._drafted += len(own.draft_tokens)
            self._accepted += max(0, got - 1)
        for other in step.scheduled if self._num_steps <= _MOST_STEPS else ():
            if other.request_id != own.request_id:
                self._company[other.request_id] += 1
                self._company_seconds[other.request_id] += seconds
        if part == "decode":
            self._note_decode(step, got, seconds)
        elif len(self._chunks) < _MOST_CHUNKS:
            self._chunks.append(
                {
                    "step": step.step_id,
                    "part": part,
                    "start": own.start,
                    "tokens": own.num_tokens,
                    "seconds": seconds,
                    "step_tokens": step.num_tokens,
                }
            )

    def _part(self, own: ScheduledRequest) -> str:
        if own.start < self._computed_before:
            return "recompute"
        return "prompt" if own.start < self._life.num_prompt_tokens else "decode"

    def _note_decode(self, step: Step, got: int, seconds: float) -> None:
        decodes = self._decodes
        decodes["steps"] += 1
        decodes["tokens"] += got
        if seconds > decodes["slowest_seconds"]:
            decodes.update(
                slowest_seconds=seconds, slowest_step=step.step_id, slowest_tokens=step.num_tokens
            )
        if step.promise is not None and step.promise.gave_way is not None:
            self._gave_way[step.promise.gave_way] += 1
        prompts = {
            one.request_id: one.num_tokens
            for one in step.scheduled[step.num_decodes :]
            if not one.draft_tokens and one.request_id != self._life.name
        }
        if prompts:
            self._beside_prompts.append((seconds, prompts))
        else:
            self._plain_seconds.append(seconds)

    # What came of it

    def describe(self) -> dict[str, Any]:
        life = self._life
        parts = dict.fromkeys(PARTS, 0.0)
        for segment in self.segments:
            parts[segment.part] += segment.end - segment.start
        end = self._end if life.finished is not None else self._cursor
        drafted = self._drafted
        accepted = self._accepted
        if life.finished is not None:
            drafted = life.finished.drafted_tokens
            accepted = life.finished.accepted_tokens
        return {
            "name": life.name,
            "arrival": life.arrival,
            "seconds_after_first_step": life.arrival - self._log[0].step.now,
            "total_seconds": end - life.arrival,
            "parts": parts,
            "first_token_seconds": None
            if life.first_token is None
            else life.first_token - life.arrival,
            "prompt_tokens": life.num_prompt_tokens,
            "weights_versions": _versions(life.admissions),
            "adapter": next((one.resolved.adapter_name for _, one in life.admissions), ""),
            "output_tokens": None if life.finished is None else life.finished.num_output_tokens,
            "tokens_so_far": self._num_tokens,
            "waited_for": {why: self._describe_wait(wait) for why, wait in self._waits.items()},
            "admissions": [
                self._describe_admission(step, admission) for step, admission in life.admissions
            ],
            "preemptions": [self._describe_preemption(step, one) for step, one in life.preemptions],
            "chunks": self._chunks,
            "decodes": self._decodes,
            "later_for": self._later_for(),
            "gave_way": dict(self._gave_way),
            "steps": self._num_steps,
            "cache": self._describe_cache(),
            "computed_tokens": self._num_computed,
            "recomputed_tokens": self._num_recomputed,
            "drafted_tokens": drafted,
            "accepted_tokens": accepted,
            "shared_steps_with": {
                name: {"steps": count, "seconds": self._company_seconds[name]}
                for name, count in self._company.most_common(_MOST_COMPANIONS)
            },
            "failed_step": self._failure is not None,
            "finish_reason": None if life.finished is None else life.finished.reason,
            "segments": [segment._asdict() for segment in _joined(self.segments)],
        }

    def _later_for(self) -> dict[str, dict[str, Any]]:
        """Whose prompts its tokens came later for, and by how much: what steps took beyond its
        usual one that computed no prompt, divided by tokens. Nothing, if there was no such step.
        """
        steps: Counter[str] = Counter()
        later: defaultdict[str, float] = defaultdict(float)
        usual = median(self._plain_seconds) if self._plain_seconds else float("inf")
        for seconds, prompts in self._beside_prompts:
            for name, count in prompts.items() if seconds > usual else ():
                steps[name] += 1
                later[name] += (seconds - usual) * count / sum(prompts.values())
        most = sorted(later, key=lambda name: (-later[name], name))[:_MOST_COMPANIONS]
        return {name: {"steps": steps[name], "seconds": later[name]} for name in most}

    def _describe_cache(self) -> dict[str, int | None]:
        """What it took of the cache, blocks that it gave up on its way included."""
        states = max((_state_blocks(one) for _, one in self._life.admissions), default=0)
        each = None if self._config is None else self._config.bytes_per_block or None
        return {
            "blocks": self._most_blocks,
            "state_blocks": states,
            "bytes": None if each is None else each * self._most_blocks,
        }

    def _describe_wait(self, wait: dict[str, Any]) -> dict[str, Any]:
        by_time = sorted(wait["because_of"].items(), key=lambda item: -item[1])
        return {**wait, "because_of": [name for name, _ in by_time[:_MOST_NAMES]]}

    def _describe_admission(self, step: Step, admission: AdmittedRequest) -> dict[str, Any]:
        return {
            "step": step.step_id,
            "seconds": step.now - admission.arrival,
            "row": admission.row,
            "cached_tokens": admission.num_cached_tokens,
            "host_tokens": admission.num_host_tokens,
            "computed_by": cached_from(self._log, step, admission, self._before, self._config),
        }

    def _describe_preemption(self, step: Step, preemption: Preemption) -> dict[str, Any]:
        """With what it cost: waiting until its next admission, and computing again."""
        back = next(
            (later for later, _ in self._life.admissions if later.step_id > step.step_id), None
        )
        until = self._end if back is None else back.now
        following = (
            later.step_id for later, _ in self._life.preemptions if later.step_id > step.step_id
        )
        last = min(following, default=None)
        own = [
            segment
            for segment in self.segments
            if segment.step is not None
            and segment.step >= step.step_id
            and (last is None or segment.step < last)
        ]
        return {
            "step": step.step_id,
            "seconds": step.now - self._life.arrival,
            "kind": preemption.kind,
            "why": preemption.why,
            "computed_tokens": preemption.num_computed_tokens,
            "waited_seconds": max(0.0, min(until, self._end) - step.now)
            if until != float("inf")
            else None,
            "recompute_seconds": sum(one.end - one.start for one in own if one.part == "recompute"),
        }


def _state_blocks(admission: AdmittedRequest) -> int:
    return sum(map(len, admission.state_ids))


def _blocks_at_first(admission: AdmittedRequest) -> int:
    """Those of cached tokens, and of the states of recurrent layers."""
    return sum(map(bool, admission.block_ids)) + _state_blocks(admission)


def _joined(segments: Sequence[Segment]) -> list[Segment]:
    """Neighbours of one part as one: a long answer has thousands of steps."""
    joined: list[Segment] = []
    for segment in segments:
        if joined and joined[-1].part == segment.part and joined[-1].end == segment.start:
            joined[-1] = joined[-1]._replace(end=segment.end)
        else:
            joined.append(segment)
    return joined


def _versions(admissions: Sequence[tuple[Step, AdmittedRequest]]) -> list[tuple[int, int]]:
    """As `RequestMetrics.weights_versions`."""
    found: tuple[tuple[int, int], ...] = ()
    for _, one in admissions:
        found = add_version(found, len(one.token_ids) - one.num_prompt_tokens, one.weights_version)
    return list(found)
