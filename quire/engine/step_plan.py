"""A step while the scheduler puts it together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
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

    def adapters(self, running: Mapping[str, str]) -> StepAdapters | None:
        """`running`: names of running requests' adapters, by their digests."""
        if not running and not self.waiting_adapters:
            return None
        waiting = self.waiting_adapters
        return StepAdapters(
            tuple(sorted(running.values())), tuple(sorted(set(waiting))), len(waiting)
        )

    def waits_for_prompt(
        self, request: Request, members: Callable[[str], Iterable[Request]]
    ) -> bool:
        """Whether another of the n answers (`members` has all of a group) computes the prompt now:
        this one waits, to find it in the prefix cache.
        """
        group_id = request.group_id
        if group_id is None or request.first_scheduled is not None:
            return False
        if group_id not in self.computing_groups:
            running = (member for member in members(group_id) if member.row is not None)
            if any(member.num_committed_tokens < member.num_prompt_tokens for member in running):
                self.computing_groups.add(group_id)
        return group_id in self.computing_groups

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
