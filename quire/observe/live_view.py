"""The engine as somebody sees it who watches: requests, blocks and steps, told from steps alone and
as differences.

Costs little per step: the decodes of a step, which are most of it, are looked through for new
blocks only. How far each request has come is read off the last step when a frame is made, a few
times a second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from quire.engine import SchedulerConfig
from quire.observe.block_map import BlockMap
from quire.step import (
    AdmittedRequest,
    BlockCopy,
    Finished,
    Preemption,
    ScheduledRequest,
    Step,
    StepLogEntry,
)

FRAME_SECONDS = 0.2
"""From one frame to the next, at least: in the time of the steps."""
KEY_SECONDS = 60.0
"""From one frame that tells everything to the next."""
_MOST_COLUMNS = 32
"""Of a frame; where there were more steps, neighbours are told together."""
_PROGRESS_SECONDS = 1.0
_FEW_REQUESTS = 32
"""So many are told of in every frame, more once in a while."""


class Column(NamedTuple):
    """One step, or several in a row, in numbers."""

    step_id: int
    time: float
    """When its results were there."""
    seconds: float
    steps: int
    prompt_tokens: int
    """Computed in chunks: of prompts, or again after a preemption."""
    decodes: int
    """Requests that computed one token and drew the next."""
    accepted: int
    refused: int
    """Draft tokens."""
    sampled: int
    running: int
    waiting: int
    free_blocks: int
    cached_tokens: int
    """Found in the cache by those who were admitted,"""
    admitted_tokens: int
    """out of so many that they had."""
    preempted: int
    failed: int
    planned_seconds: float
    """Where token times are promised: what it was expected to take at most; else 0."""
    late: int
    """Whether a target gave way."""


_ADDED = (
    *("steps", "prompt_tokens", "decodes", "accepted", "refused", "sampled"),
    *("cached_tokens", "admitted_tokens", "preempted", "failed", "late"),
)
"""Fields that several steps have the sum of."""


@dataclass(slots=True)
class WatchedRequest:
    """What steps have said of an answer that has not ended."""

    index: int
    name: str
    arrival: float | None = None
    """None, like the next, if its admission was before the log begins."""
    prompt_tokens: int | None = None
    cached_tokens: int = 0
    preemptions: int = 0
    is_running: bool = True
    computed: int = 0
    output: int = 0
    table: list[int] = field(default_factory=list)
    """Block 0 stands where there is none: what it held has left the window."""
    num_published: int = 0
    """Full blocks of its tokens, of each group of layers."""
    num_left: dict[int, int] = field(default_factory=dict)
    """By group of layers that gives blocks up: how many of its first ones it gave up."""
    states: list[int] = field(default_factory=list)
    """The blocks of its recurrent layers' states."""

    def describe(self) -> list[Any]:
        about = [
            self.index,
            self.name,
            self.arrival,
            self.prompt_tokens,
            self.cached_tokens,
            self.preemptions,
        ]
        return [*about, int(self.is_running), self.computed, self.output, len(self.table)]


class LiveView:
    """Feed it entries in order; `take_frame` tells what changed since the last one."""

    def __init__(self, config: SchedulerConfig, is_complete: bool) -> None:
        """`is_complete`: the first entry will be the engine's first."""
        self._config = config
        self.blocks = BlockMap(config.num_blocks, is_complete)
        self.requests: dict[str, WatchedRequest] = {}
        """By name: running ones, and preempted ones that wait."""
        self._names: dict[int, str] = {}
        """Of all whose tokens may be in a block."""
        self._host_owners: dict[int, int] = {}
        """By slot of the host tier: who computed what it holds."""
        self._num_requests = 0
        self._columns: list[Column] = []
        self._changed: dict[str, WatchedRequest] = {}
        self._ended: list[list[Any]] = []
        self._last: StepLogEntry | None = None
        self._frame_time: float | None = None
        self._key_time: float | None = None
        self._progress_time = 0.0
        self.memory: dict[str, int] = {}
        """Bytes by name, told with the next frame."""

    @property
    def has_news(self) -> bool:
        return bool(self._columns)

    @property
    def is_due(self) -> bool:
        """Whether the steps since the last frame took long enough for another."""
        if self._last is None or not self._columns:
            return False
        return self._frame_time is None or self._last.committed - self._frame_time >= FRAME_SECONDS

    def observe(self, entry: StepLogEntry) -> None:
        step = entry.step
        for preemption in step.preempted:
            self._preempt(preemption)
        for finished in step.finished:
            self._end(finished)
        for admission in step.admitted:
            self._admit(admission)
        for copy in step.copies:
            self._copy(copy, entry.error is not None)
        for one in step.scheduled[: step.num_decodes]:
            if one.new_block_ids:
                self._gain(self._request(one.request_id), one.new_block_ids)
        prompt_tokens = 0
        decodes = step.num_decodes
        accepted = 0
        refused = 0
        for one in step.scheduled[step.num_decodes :]:
            real = self._schedule(one)
            if one.samples and real == 1:
                decodes += 1
            else:
                prompt_tokens += real
            if one.draft_tokens and entry.result is not None:
                right = max(0, len(entry.result.tokens.get(one.request_id, ())) - 1)
                accepted += right
                refused += len(one.draft_tokens) - right
        if self._config.leaving_groups and entry.result is not None:
            for one in step.scheduled:
                self._leave_blocks(one, len(entry.result.tokens.get(one.request_id, ())))
        sampled = len(entry.result.tokens) + accepted if entry.result is not None else 0
        self._columns.append(_column(entry, prompt_tokens, decodes, accepted, refused, sampled))
        self._last = entry

    def take_frame(self, now: float = 0.0, wall: float = 0.0) -> tuple[dict[str, Any], bool]:
        """All that changed, in plain types; and whether it is a key frame, which tells everything.
        It is of the time of the last step, of `now` if there was none; `wall` is what to add for
        the clock on the wall.
        """
        now = now if self._last is None else self._last.committed
        is_key = self._key_time is None or now - self._key_time >= KEY_SECONDS
        frame: dict[str, Any] = {
            "time": round(now, 4),
            "steps": [list(one) for one in _merged(self._columns)],
        }
        if (
            is_key
            or len(self.requests) <= _FEW_REQUESTS
            or now - self._progress_time >= _PROGRESS_SECONDS
        ):
            self._progress_time = now
            progress = self._progress()
            if progress and not is_key:
                frame["progress"] = progress
        if is_key:
            frame["key"] = self._everything(wall) | {"begins": self._key_time is None}
            self._key_time = now
            self.blocks.take_changes()
        else:
            frame["blocks"] = self.blocks.take_changes()
            if self._changed:
                frame["requests"] = [request.describe() for request in self._changed.values()]
        if self._ended:
            frame["ended"] = self._ended
        if self.memory:
            frame["memory"], self.memory = self.memory, {}
        self._columns = []
        self._changed = {}
        self._ended = []
        self._frame_time = now
        return frame, is_key

    # What steps tell

    def _request(self, name: str) -> WatchedRequest:
        """A live request; one that was admitted before the log begins is met here."""
        request = self.requests.get(name)
        if request is None:
            self._num_requests += 1
            request = self.requests[name] = WatchedRequest(self._num_requests, name)
            self._names[request.index] = name
            self._changed[name] = request
        return request

    def _admit(self, admission: AdmittedRequest) -> None:
        request = self._request(admission.request_id)
        request.arrival = admission.arrival
        request.prompt_tokens = admission.num_prompt_tokens
        request.cached_tokens += admission.num_cached_tokens + admission.num_host_tokens
        request.computed = admission.num_cached_tokens + admission.num_host_tokens
        request.output = len(admission.token_ids) - admission.num_prompt_tokens
        request.is_running = True
        for block in filter(None, admission.block_ids):
            self.blocks.share(block)
        request.table = list(admission.block_ids)
        request.num_published = request.computed // self._config.block_size
        kept = request.num_published * self._config.block_size
        request.num_left = {
            group: self._config.first_kept(group, kept) for group in self._config.leaving_groups
        }
        request.states = [block for state in admission.state_ids for block in state]
        for block in request.states:
            self.blocks.take(block, request.index)
        self._changed[request.name] = request

    def _copy(self, copy: BlockCopy, has_failed: bool) -> None:
        if copy.kind == "device_to_host":
            self._host_owners[copy.target] = self.blocks.owner(copy.source)
        elif has_failed:
            self.blocks.forget(copy.target)
        elif copy.kind == "host_to_device":
            self.blocks.fill(copy.target, self._host_owners.get(copy.source, 0))
        else:
            self.blocks.fill(copy.target, self.blocks.owner(copy.source))

    def _gain(self, request: WatchedRequest, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.blocks.take(block, request.index)
        request.table.extend(blocks)

    def _schedule(self, one: ScheduledRequest) -> int:
        """An entry that is no plain decode; returns how many known tokens it computes."""
        request = self._request(one.request_id)
        if one.new_block_ids:
            self._gain(request, one.new_block_ids)
        real = one.num_tokens - len(one.draft_tokens)
        request.computed = one.start + real
        return real

    def _preempt(self, preemption: Preemption) -> None:
        request = self._request(preemption.request_id)
        self._give_up(request, preemption.num_computed_tokens)
        request.preemptions += 1
        request.is_running = False
        self._changed[request.name] = request

    def _end(self, finished: Finished) -> None:
        request = self.requests.pop(finished.request_id, None)
        if request is None:
            return  # it never ran
        self._changed.pop(request.name, None)
        # All tokens but the last were computed, if there are any; else the prompt as far as it got.
        computed = finished.num_prompt_tokens + finished.num_output_tokens - 1
        self._give_up(request, computed if finished.num_output_tokens else request.computed)
        about: list[Any] = [
            request.index,
            request.name,
            finished.arrival,
            finished.time,
            finished.reason,
        ]
        counts = [
            finished.num_prompt_tokens,
            finished.num_output_tokens,
            request.cached_tokens,
            request.preemptions,
        ]
        self._ended.append([*about, *counts])

    def _give_up(self, request: WatchedRequest, num_computed: int) -> None:
        num_full = num_computed // self._config.block_size if self._config.prefix_caching else 0
        for place in range(len(request.table) - 1, -1, -1):
            if request.table[place]:
                self.blocks.give_up(
                    request.table[place], place < num_full * self._config.num_groups
                )
        for block in request.states:
            self.blocks.give_up(block, False)
        request.table = []
        request.states = []
        request.num_published = 0
        request.num_left = {}

    def _leave_blocks(self, one: ScheduledRequest, num_sampled: int) -> None:
        """When blocks have been filled, layers that don't look at all tokens give up those they
        will not see again.
        """
        request = self.requests.get(one.request_id)
        config = self._config
        if request is None or not request.table:
            return
        computed = one.start + one.num_tokens - len(one.draft_tokens) + max(0, num_sampled - 1)
        if computed // config.block_size <= request.num_published:
            return
        request.num_published = computed // config.block_size
        for group in config.leaving_groups:
            kept = config.first_kept(group, computed)
            is_cached = config.prefix_caching and config.groups[group].keeps != "records"
            own = range(group, len(request.table), config.num_groups)
            for place in own[request.num_left.get(group, 0) : kept]:
                if request.table[place]:
                    self.blocks.give_up(request.table[place], is_cached)
                    request.table[place] = 0
            request.num_left[group] = kept

    # What is told

    def _progress(self) -> list[int]:
        """Request, computed tokens, tokens of the answer, blocks, request, … of those in the last
        step.
        """
        flat: list[int] = []
        if self._last is None:
            return flat
        for one in self._last.step.scheduled:
            request = self.requests.get(one.request_id)
            if request is None:
                continue
            request.computed = one.start + one.num_tokens - len(one.draft_tokens)
            if one.samples and request.prompt_tokens is not None:
                request.output = max(request.output, request.computed + 1 - request.prompt_tokens)
            flat += (request.index, request.computed, request.output, len(request.table))
        return flat

    def _everything(self, wall: float) -> dict[str, Any]:
        owners = self.blocks.owners()
        live = {request.index for request in self.requests.values()}
        kept = owners | live | set(self._host_owners.values())
        self._names = {index: name for index, name in self._names.items() if index in kept}
        return {
            "wall": round(wall, 3),
            "block_size": self._config.block_size,
            "bytes_per_block": self._config.bytes_per_block,
            "max_num_seqs": self._config.max_num_seqs,
            "blocks": self.blocks.runs(),
            "names": [[index, self._names[index]] for index in sorted(owners & self._names.keys())],
            "requests": [request.describe() for request in self.requests.values()],
        }


def _column(
    entry: StepLogEntry, prompt: int, decodes: int, accepted: int, refused: int, sampled: int
) -> Column:
    step: Step = entry.step
    return Column(
        step_id=step.step_id,
        time=round(entry.committed, 4),
        seconds=round(entry.committed - step.now, 6),
        steps=1,
        prompt_tokens=prompt,
        decodes=decodes,
        accepted=accepted,
        refused=refused,
        sampled=sampled,
        running=step.num_running,
        waiting=step.num_waiting,
        free_blocks=step.num_free_blocks,
        cached_tokens=sum(one.num_cached_tokens + one.num_host_tokens for one in step.admitted),
        admitted_tokens=sum(len(one.token_ids) for one in step.admitted),
        preempted=len(step.preempted),
        failed=int(entry.error is not None),
        planned_seconds=0.0 if step.promise is None else round(step.promise.seconds, 6),
        late=int(step.promise is not None and step.promise.gave_way is not None),
    )


def _merged(columns: Sequence[Column]) -> list[Column]:
    """At most `_MOST_COLUMNS`: neighbours are added up; queues and blocks are as they were at the
    last of them.
    """
    size = -(-len(columns) // _MOST_COLUMNS)
    return [_sum(columns[first : first + size]) for first in range(0, len(columns), max(1, size))]


def _sum(columns: Sequence[Column]) -> Column:
    if len(columns) == 1:
        return columns[0]
    added = {name: sum(getattr(one, name) for one in columns) for name in _ADDED}
    for name in ("seconds", "planned_seconds"):
        added[name] = round(sum(getattr(one, name) for one in columns), 6)
    return columns[-1]._replace(**added)
