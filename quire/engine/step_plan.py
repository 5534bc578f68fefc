"""A step while the scheduler puts it together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from quire.engine.request import Request
from quire.step import AdmittedRequest, ScheduledRequest, StepAdapters, StepPromise


@dataclass(slots=True)
class StepPlan:
    """The step being put together."""

    step_id: int
    now: float
    budget: int
    """Tokens that may still be scheduled."""
    left_out: int = 0
    """Tokens of the step's budget that are given to nobody, to keep a promise of time."""
    scheduled: list[ScheduledRequest] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    admitted: list[AdmittedRequest] = field(default_factory=list)
    computing_groups: set[str] = field(default_factory=set)
    """Groups (n answers to one prompt) of which one request is computing the prompt: the others
    wait for it.
    """
    preempting: bool = False
    num_decodes: int = 0
    recomputed_decodes: list[str] = field(default_factory=list)
    """Tenants of decodes that compute a token a second time."""
    promise: StepPromise | None = None
    waiting_adapters: list[str] = field(default_factory=list)
    """The adapter's name of each request that was passed over for want of room for it."""
    num_charged: int = 0
    """Entries that their tenants were charged for."""

    def adapters(self, running: Mapping[str, str]) -> StepAdapters | None:
        """`running`: names of running requests' adapters, by their digests."""
        if not running and not self.waiting_adapters:
            return None
        waiting = self.waiting_adapters
        return StepAdapters(
            tuple(sorted(running.values())), tuple(sorted(set(waiting))), len(waiting)
        )

    def limit(self, budget: int) -> None:
        """Leaves at most so many tokens to be scheduled from here on."""
        self.left_out += max(0, self.budget - budget)
        self.budget = min(self.budget, budget)
