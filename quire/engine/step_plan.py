"""A step while the scheduler puts it together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from quire.engine.config import SchedulerConfig
from quire.engine.fair_shares import FairShares
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
        if budget < self.budget:
            self.left_out += self.budget - budget
            self.budget = budget

    def keep(self, promise: StepPromise) -> None:
        """Leaves what it allows of prompts."""
        self.promise = promise
        self.limit(promise.prompt_tokens)

    def charge(self, shares: FairShares | None) -> None:
        """Counts what is scheduled for the first time to the tenants whose requests it is for."""
        if shares is None or self.num_charged == len(self.scheduled):
            return
        for index in range(self.num_charged, len(self.scheduled)):
            entry, request = self.scheduled[index], self.requests[index]
            end = entry.start + entry.num_tokens
            shares.charge(request.tenant, max(0, end - max(entry.start, request.computed_before)))
        self.num_charged = len(self.scheduled)

    def cut_to_graph(self, config: SchedulerConfig, shares: FairShares | None) -> None:
        """Leaves the end of prompts to the next step where this one is a little larger than a CUDA
        graph: two graphs take less time than one step that is launched kernel by kernel, and
        decodes wait for half of it only.
        """
        most = config.max_checked_tokens
        excess = config.max_batched_tokens - self.left_out - self.budget - most
        if most == 0 or not 0 < excess <= most // 2:
            return
        for index in range(len(self.scheduled) - 1, self.num_decodes - 1, -1):
            entry, request = self.scheduled[index], self.requests[index]
            count = min(excess, entry.num_tokens - 1)
            if count > 0:
                end = request.num_computed_tokens = request.num_computed_tokens - count
                request.num_placeholders -= entry.samples
                request.recomputed_tokens -= min(count, max(0, request.computed_before - end))
                self.scheduled[index] = entry._replace(
                    num_tokens=entry.num_tokens - count, samples=False
                )
                self.budget += count
                excess -= count
                if shares is not None:
                    again = min(count, max(0, request.computed_before - end))
                    shares.charge(request.tenant, again - count)
