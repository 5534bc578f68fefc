"""The engine process's side of somebody watching: frames made of steps, while there is somebody."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterable, Iterator

import msgspec

from quire.engine import SchedulerConfig
from quire.observe.live_view import FRAME_SECONDS, LiveView
from quire.server.link.messages import Watched
from quire.step import StepLogEntry

_STEPS_AT_ONCE = 16
"""Of the log, looked at between two steps: when somebody begins to watch, the engine must not stop
for them.
"""
_SHARE = 0.01
"""Of a step's time, for which more of them are looked at: where steps take long, the past would."""
_encode = msgspec.json.encode


class EngineWatch:
    """Begins with the steps that the log remembers, and goes on with those that come."""

    def __init__(self, log: Iterable[StepLogEntry], config: SchedulerConfig) -> None:
        self._past = iter(log)
        """Its entries are made one by one: a full log takes longer than a step."""
        self._next = next(self._past, None)
        self._new: deque[StepLogEntry] = deque()
        self._view = LiveView(
            config, is_complete=self._next is None or self._next.step.step_id == 0
        )
        self._wall = time.time() - time.monotonic()
        self._last_frame = 0.0
        self._has_begun = False
        self._step_seconds = 0.0
        """Of the last step."""

    def observe(self, entry: StepLogEntry) -> None:
        self._new.append(entry)
        self._step_seconds = entry.committed - entry.step.now

    def note_memory(self, memory: dict[str, int]) -> None:
        self._view.memory |= memory

    def wait_seconds(self, now: float) -> float | None:
        """How long an engine without work may sleep, as far as watching is concerned; None: for
        ever.
        """
        if self._has_steps or not self._has_begun:
            return 0.0
        return max(0.0, self._last_frame + FRAME_SECONDS - now) if self._view.has_news else None

    def take_frames(self, now: float, is_idle: bool) -> Iterator[Watched]:
        """The frames that are due. While there is work the next step brings the rest; without, it
        is due soon.
        """
        if not self._has_begun and not self._has_steps:
            yield self._frame(now)
        until = time.monotonic() + _SHARE * self._step_seconds
        for count in itertools.count():
            if not self._has_steps or (count >= _STEPS_AT_ONCE and time.monotonic() > until):
                break
            self._view.observe(self._take_step())
            if self._view.is_due:
                yield self._frame(now)
        if is_idle and self.wait_seconds(now) == 0.0 and not self._has_steps:
            yield self._frame(now)

    @property
    def _has_steps(self) -> bool:
        return self._next is not None or bool(self._new)

    @property
    def _is_behind(self) -> bool:
        return self._next is not None or len(self._new) > _STEPS_AT_ONCE

    def _take_step(self) -> StepLogEntry:
        if self._next is None:
            return self._new.popleft()
        entry = self._next
        self._next = next(self._past, None)
        return entry

    def _frame(self, now: float) -> Watched:
        self._last_frame = now
        self._has_begun = True
        frame, is_key = self._view.take_frame(now, self._wall)
        return Watched(_encode(frame), is_key, frame["time"], self._is_behind)
