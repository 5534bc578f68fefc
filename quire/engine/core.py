"""The loop: schedule, submit, wait for the oldest step, commit."""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Protocol, get_args

from quire.engine.idle_check import IdleCheck
from quire.engine.invariants import InvariantError
from quire.engine.request import Request
from quire.engine.scheduler import Scheduler
from quire.errors import EngineError, InvalidRequestError, QuireError
from quire.step import (
    FinishReason,
    PauseMode,
    RequestMetrics,
    RequestUpdate,
    Step,
    StepLogEntry,
    StepResult,
)

logger = logging.getLogger(__name__)


class Pending(Protocol):
    """A submitted step."""

    def result(self) -> StepResult:
        """Waits for the step and returns what it gave; raises EngineError if it could not be
        computed.

        Called once, or again if a signal interrupted the wait.
        """


class Runner(Protocol):
    """Whatever computes steps."""

    def submit(self, step: Step) -> Pending:
        """Starts a step. Steps are computed in the order of submission, each after all before it."""


class HeldRows(Protocol):
    """Whoever knows requests that can't be computed yet without keeping the others of their step
    waiting.
    """

    def held_rows(self) -> frozenset[int]:
        """Their request rows: what is scheduled leaves them out until they can be computed."""

    def wait_for_held(self) -> None:
        """Waits for a moment, or until there is one less of them."""


class EngineCore:
    """Keeps up to `depth` steps in flight. Reads no clock: callers pass the time, or a `clock` that
    tells it when results arrive (without one, they count as arrived at the `now` of the call that
    waited for them).
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        depth: int = 1,
        on_step: Callable[[StepLogEntry], None] | None = None,
        clock: Callable[[], float] | None = None,
        held: HeldRows | None = None,
    ) -> None:
        if depth < 1:
            raise InvalidRequestError("depth", f"must be at least 1, not {depth}")
        self.scheduler = scheduler
        self.runner = runner
        self.depth = depth
        self._on_step = on_step
        self.clock = clock
        self.refusal: str | None = None
        """Why no request is taken now; None: all are."""
        self._held = held
        self._in_flight: deque[tuple[Step, Pending, float | None]] = deque()
        """Submitted and not committed yet, oldest first, each with the time of submission if there
        is a clock.
        """
        self._updates: list[RequestUpdate] = []
        self._idle_check = IdleCheck(scheduler)
        self._contradiction: Exception | None = None
        """What the idle check found wrong; from then on the engine computes nothing more."""

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do or to report, a contradiction found while idle
        included.
        """
        return self._contradiction is not None or bool(self._updates) or self.scheduler.has_work

    # Between two steps

    def pause(self, mode: PauseMode, now: float) -> None:
        """Has nobody computed from the next step on, but with "wait" those who have begun. Requests
        are still taken, and wait. `is_drained` says when `settle` and what needs it can follow.
        """
        if mode not in get_args(PauseMode):
            known = ", ".join(get_args(PauseMode))
            raise InvalidRequestError("mode", f"must be one of {known}, not {mode!r}")
        self.scheduler.pauses.begin(mode, now)

    def resume(self) -> None:
        """Ends a pause; raises EngineError while the engine could not compute (`refusal`)."""
        if self.refusal is not None:
            raise EngineError(self.refusal)
        self.scheduler.pauses.end()

    @property
    def is_paused(self) -> bool:
        return self.scheduler.pauses.mode is not None

    @property
    def is_drained(self) -> bool:
        """Whether nobody is computed: there is nobody, or a pause has come to where it wants to be."""
        scheduler = self.scheduler
        return not (self._in_flight or scheduler.in_flight or scheduler.pauses.may_compute)

    @property
    def weights_version(self) -> int:
        """Of the weights that compute now; 0 are those that were loaded."""
        return self.scheduler.table.weights_version

    def settle(self, wanted: str, now: float) -> None:
        """Waits for the steps in flight, and takes the rows of requests that a pause keeps: they
        are computed again from their tokens. Raises EngineError if requests run that no pause has
        stopped, or if without a pause there is news that nobody has read, as these are not ready
        for `wanted`.
        """
        scheduler, table = self.scheduler, self.scheduler.table
        has_news = bool(table.updates or self._updates) and not self.is_paused
        if self._contradiction is not None or scheduler.pauses.may_compute or has_news:
            raise EngineError(
                f"{wanted} has to wait until no request runs: let them finish, abort them and step, or pause"
            )
        news: list[RequestUpdate] = []
        while self._in_flight:
            news += self.step(now)
        scheduler.pauses.give_up_rows(wanted)
        while self._in_flight or table.finished or table.preempted:
            news += self.step(now)
        self._updates = news + self._updates

    def reset_prefix_cache(self, now: float) -> None:
        """Forgets all cached prefixes, on the device and on the host tier; raises EngineError while
        requests run.
        """
        self.settle("forgetting the prefix cache", now)
        self.scheduler.blocks.reset()

    def next_version(self, wanted: int | None) -> int:
        """Of weights that will be replaced: higher than all before it, as blocks and answers are
        told apart by it.
        """
        least = self.weights_version + 1
        if wanted is None:
            return least
        if isinstance(wanted, bool) or not isinstance(wanted, int) or not least <= wanted < 2**63:
            raise InvalidRequestError(
                "version", f"must be a whole number from {least} to 2**63-1, not {wanted!r}"
            )
        return wanted

    def change_weights(self, version: int, now: float) -> None:
        """What is computed from here on is computed by other weights; after `settle`."""
        if self._in_flight or self.scheduler.table.running:
            raise EngineError("weights are changed between two steps, while no request has a row")
        self.scheduler.pauses.change_weights(version, now)

    def add_request(self, request: Request, now: float) -> None:
        """Takes a request in; raises InvalidRequestError or CapacityError if it can never run, and
        EngineError while the engine takes none (`refusal`).
        """
        if self.refusal is not None:
            raise EngineError(self.refusal)
        self.scheduler.add(request, now)

    def add_requests(self, requests: Iterable[Request], now: float) -> None:
        """Takes several requests in, or none of them."""
        added: list[str] = []
        try:
            for request in requests:
                self.add_request(request, now)
                added.append(request.request_id)
        except QuireError:
            for name in added:
                self.end(name, "abort", now)
            raise

    def abort(self, request_ids: Iterable[str], now: float) -> None:
        """Ends requests by name or group name; their last update comes with the next step."""
        self.scheduler.abort(request_ids, now)

    def end(self, request_id: str, reason: FinishReason, now: float) -> RequestMetrics:
        """Ends a live request for a reason its owner found; no further update about it comes."""
        return self.scheduler.end(request_id, reason, now)

    def step(self, now: float) -> list[RequestUpdate]:
        """One turn of the loop: submits a step if fewer than `depth` are in flight, then waits for
        the oldest one if `depth` are or there was nothing to submit. Returns what became of the
        requests.
        """
        if self.is_paused:
            self.scheduler.table.expire(now)
        if not self.has_work:
            return []
        if self._contradiction is not None:
            raise InvariantError(_explain(self._contradiction)) from self._contradiction
        submitted = len(self._in_flight) < self.depth and self._submit(now)
        if self._in_flight and (not submitted or len(self._in_flight) >= self.depth):
            self._commit_oldest(now)
        elif not submitted and self._held is not None and self.scheduler.pauses.may_compute:
            self._held.wait_for_held()
        updates = self._updates + self.scheduler.take_updates()
        self._updates = []
        if not self.scheduler.has_work and not self.scheduler.table.requests:
            self._check_idle()
        return updates

    def _submit(self, now: float) -> bool:
        held = frozenset() if self._held is None else self._held.held_rows()
        step = self.scheduler.schedule(now, held)
        if step.is_empty:
            return False
        try:
            pending = self.runner.submit(step)
        except BaseException as error:
            # Steps submitted before this one are not affected: they are committed first, then this
            # one fails.
            failure, failed = EngineError(_describe(error)), Future[StepResult]()
            failure.__cause__ = error
            failed.set_exception(failure)
            self._in_flight.append((step, failed, None))
            if not isinstance(error, Exception):
                raise
            while self._in_flight:
                self._commit_oldest(now)
            return True
        self._in_flight.append((step, pending, self.clock() if self.clock is not None else None))
        return True

    def _commit_oldest(self, now: float) -> None:
        step, pending, submitted = self._in_flight[0]
        try:
            result = pending.result()
        except Exception as error:
            self._fail(step, error, now)
            return
        self._in_flight.popleft()
        now = self.clock() if self.clock is not None else now
        self._updates += self.scheduler.commit(step, result, now)
        if self._on_step is not None:
            self._on_step(StepLogEntry(step, result, None, now, submitted))

    def _fail(self, step: Step, error: Exception, now: float) -> None:
        """Ends the requests of a failed step and of those behind it; everyone else goes on."""
        self._in_flight.popleft()
        while self._in_flight:
            # the result is dropped, but the device must be done with the step
            with contextlib.suppress(Exception):
                self._in_flight.popleft()[1].result()
        now = self.clock() if self.clock is not None else now
        message = _describe(error)
        # A QuireError or Ctrl-C explains itself; anything else is a bug, which needs its stack
        # trace in the log.
        cause = error.__cause__ or error
        expected = isinstance(cause, QuireError) or not isinstance(cause, Exception)
        logger.error(
            "step %d failed: %s", step.step_id, message, exc_info=None if expected else cause
        )
        for failed in self.scheduler.fail(step, message, now):
            if self._on_step is not None:
                self._on_step(StepLogEntry(failed, None, message, now))

    def _check_idle(self) -> None:
        """Looks for contradictions in the scheduler's state. The step that found one still returns
        its updates, so that requests which have just ended are told so; every later call of `step`
        raises.
        """
        try:
            self._idle_check.check()
        except Exception as error:  # a check that crashes has met a wrong state too
            self._contradiction = error
            logger.critical("%s", _explain(error))


def _describe(error: BaseException) -> str:
    return str(error) if isinstance(error, QuireError) else f"{type(error).__name__}: {error}"


def _explain(contradiction: Exception) -> str:
    return (
        f"the engine's books contradict themselves: {_describe(contradiction)}. This is a bug in Quire, please report "
        "it; this engine computes nothing more, start a new one"
    )
