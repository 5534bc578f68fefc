"""Promises of time and shares, played by a clock: a device whose steps take a known time and a
noisy one, tenants that always have something waiting, others that come in bursts, one that floods.

What must hold is written in docs/promises.md: shares as the weights, the estimate of step times
near the truth, prompts that get on, short ones that pass long ones. Answers are not looked at here
(the other seeds do that), so a step costs little.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

from quire.engine.config import SchedulerConfig
from quire.engine.invariants import check_invariants
from quire.engine.request import make_requests
from quire.engine.scheduler import Scheduler
from quire.engine.token_times import (
    FIT_EVERY,
    LEAST_PART,
    LEAST_PROMPT_TOKENS,
    MOST_ALONE,
    work_of,
)
from quire.sampling_params import SamplingParams
from quire.step import Step, StepResult

NUM_STEPS = 420
WINDOW = 200
"""Steps in a row over which shares are compared with weights."""
SHARE_ERROR = 0.1
ESTIMATE_ERROR = 0.15
LEARN_STEPS = 50
"""After the first step, and after all steps have become slower, until the estimate must be right."""
_CHECKED_TOGETHER = 50
"""Steps whose estimates are added up: single ones have their noise."""
_USUAL_NOISE = 0.05
"""Of a step that was not disturbed, at most."""
_MUCH_LARGER = 2.0
"""So many times the tokens: what smaller steps tell about such a one is their noise, enlarged. Its
estimate is compared once a step of half of its size or more was undisturbed, and learnt from.
"""


class TimedError(AssertionError):
    """A promise was broken."""


class StepTimes(NamedTuple):
    """Seconds that a step really takes, but for noise."""

    base: float
    per_token: float
    per_pair: float

    def of(self, num_tokens: int, num_pairs: float) -> float:
        return self.base + self.per_token * num_tokens + self.per_pair * num_pairs


@dataclass(frozen=True, slots=True)
class TimedScenario:
    """What is drawn from a seed."""

    config: SchedulerConfig
    times: StepTimes
    slower_from: int
    """From this step on all take twice as long."""
    disturbed: float
    """Of the steps: a part that takes up to five times as long, or as short."""
    busy: tuple[str, ...]
    """Tenants that always have requests waiting."""
    flood: str | None
    """One more tenant, which sends very many at once."""
    flood_from: int
    bursts: bool
    """One more tenant, which sends a few at a time."""
    prompt_tokens: int
    """At most, but for long prompts."""
    answer_tokens: int
    long_prompts: float
    """Of the requests: a part whose prompts are ten times as long."""


def make_timed_scenario(seed: int) -> TimedScenario:
    """Targets and shares always, the rest now and then."""
    rng = random.Random(seed)
    rows = rng.choice([4, 6, 8, 12])
    times = StepTimes(
        rng.uniform(0.001, 0.02), rng.uniform(2e-5, 5e-4), rng.choice([0, 1e-8, 5e-8])
    )
    decodes = times.of(rows, rows * 100.0)
    has_targets = rng.random() < 0.85
    busy = ("a", "b", "c")[: rng.choice([2, 2, 3])]
    first_token = rng.random() < 0.5
    config = SchedulerConfig(
        num_blocks=1 + rows * 40,
        max_num_seqs=rows,
        max_batched_tokens=rows + rng.choice([16, 48, 256]),
        max_model_len=512,
        block_size=16,
        policy="fair",
        tenant_weights=tuple(
            (one, rng.choice([1.0, 2.0, 3.0])) for one in busy if rng.random() < 0.6
        ),
        target_token_time=decodes * rng.choice([0.5, 1.2, 2.0, 4.0]) if has_targets else None,
        target_first_token=decodes * rng.choice([10, 100]) if has_targets and first_token else None,
        gives_way=rng.choice(["first_token", "token_time"]) if has_targets else "first_token",
    )
    return TimedScenario(
        config=config,
        times=times,
        slower_from=rng.choice([NUM_STEPS, 150, 250]),
        disturbed=rng.choice([0.0, 0.05, 0.1]),
        busy=busy,
        flood=rng.choice([None, "flood"]),
        flood_from=rng.randint(0, NUM_STEPS // 2),
        bursts=rng.random() < 0.5,
        prompt_tokens=rng.choice([4, 12, 20]),
        answer_tokens=rng.choice([4, 8, 12]),
        long_prompts=rng.choice([0.0, 0.0, 0.1]),
    )


@dataclass(slots=True)
class TimedSimulation:
    """One scenario being played; steps are two at a time, as on a GPU."""

    seed: int
    scenario: TimedScenario = field(init=False)
    scheduler: Scheduler = field(init=False)
    now: float = 0.0
    tenants: dict[str, str] = field(default_factory=dict)
    served: deque[dict[str, int]] = field(default_factory=deque)
    """Tokens of each tenant in each of the last steps, ..."""
    served_together: Counter[str] = field(default_factory=Counter)
    """...and in all of these."""
    busy_since: dict[str, int] = field(default_factory=dict)
    """Since which step a tenant has had requests waiting in every step."""
    without_row: Counter[str] = field(default_factory=Counter)
    """For how many steps in a row a tenant has waited without having any."""
    estimated: float = 0.0
    """Seconds of the last steps, by what was known before each; and what they took."""
    true: float = 0.0
    undisturbed: list[int] = field(default_factory=list)
    """Of each committed step: the most tokens of an undisturbed one so far."""
    num_compared: int = 0
    """Steps whose estimates were compared with their times, ..."""
    num_unknown: int = 0
    """...and that were not because they were much larger than undisturbed ones."""
    num_passed: int = 0
    """Steps in which a prompt was computed beside an earlier and longer one that went on."""
    _rng: random.Random = field(init=False)
    _number: int = 0

    def __post_init__(self) -> None:
        self.scenario = make_timed_scenario(self.seed)
        self.scheduler = Scheduler(self.scenario.config)
        self._rng = random.Random(self.seed + 1)

    def run(self) -> int:
        """Plays the busy time, then lets all come to their end; returns the number of steps."""
        scheduler = self.scheduler
        in_flight: deque[Step] = deque()
        number = 0
        while number < NUM_STEPS or scheduler.has_work:
            self._require(number < 20 * NUM_STEPS, "somebody waits for ever")
            if number < NUM_STEPS:
                self._send(number)
            prompts, standings = _unfinished_prompts(scheduler), self._standings()
            step = scheduler.schedule(self.now)
            if step.scheduled:
                self._check_length(number, step)
                self._check_prompts(number, prompts, standings, step)
                self._check_shares(number, step)
                self._check_rows()
            if not step.is_empty:
                in_flight.append(step)
            if in_flight and (len(in_flight) == 2 or step.is_empty):
                self._commit(number, in_flight.popleft())
            if number % 40 == 0:
                check_invariants(scheduler)
            number += 1
        self._require(not scheduler.table.requests, "somebody was forgotten")
        return number

    def _commit(self, number: int, step: Step) -> None:
        """Its results are there: the estimate of its time, made before, is compared with it."""
        seconds = self._seconds(step, number)
        num_tokens, num_pairs = work_of(step)
        times = self.scheduler.step_times
        if times is not None and step.scheduled and self._must_be_right(number):
            known = self.undisturbed[-FIT_EVERY]
            if num_tokens <= _MUCH_LARGER * known:
                self.estimated += times.seconds(num_tokens, num_pairs)
                self.true += seconds
                self.num_compared += 1
            else:
                self.num_unknown += 1
        else:
            self.estimated = self.true = 0.0
        if number % _CHECKED_TOGETHER == _CHECKED_TOGETHER - 1 and self.true:
            self._require(
                abs(self.estimated / self.true - 1) <= ESTIMATE_ERROR,
                f"step {number}: steps were estimated at {self.estimated:.3f} s, took {self.true:.3f} s",
            )
            self.estimated = self.true = 0.0
        noise = self._noise()
        most = self.undisturbed[-1] if self.undisturbed else 0
        is_usual = abs(noise - 1) <= _USUAL_NOISE
        self.undisturbed.append(max(most, num_tokens) if is_usual else most)
        self.now = max(self.now, step.now) + seconds * noise
        self.scheduler.commit(step, _tokens_of(step), self.now)

    def _send(self, number: int) -> None:
        """Before each step: the busy ones always have three requests more than there are rows."""
        scenario, rng = self.scenario, self._rng
        shares = self.scheduler.table.shares
        assert shares is not None
        for tenant in scenario.busy:
            for _ in range(
                shares.rows[tenant] + 3 + scenario.config.max_num_seqs - shares.num_live[tenant]
            ):
                self._add(tenant)
        if scenario.flood is not None and number == scenario.flood_from:
            for _ in range(120):
                self._add(scenario.flood)
        if scenario.bursts and rng.random() < 0.03:
            for _ in range(rng.randint(1, 5)):
                self._add("sometimes")

    def _add(self, tenant: str) -> None:
        scenario, rng = self.scenario, self._rng
        length = rng.randint(1, scenario.prompt_tokens)
        if rng.random() < scenario.long_prompts:
            length *= 10
        self._number += 1
        name = f"{tenant}{self._number}"
        params = _params(tenant, rng.randint(2, scenario.answer_tokens))
        (request,) = make_requests(name, [self._number, *[1] * (length - 1)], params, seed=0)
        self.tenants[name] = tenant
        self.scheduler.add(request, self.now)

    def _seconds(self, step: Step, number: int) -> float:
        slower = 2.0 if number >= self.scenario.slower_from else 1.0
        return slower * self.scenario.times.of(*work_of(step))

    def _noise(self) -> float:
        rng = self._rng
        if rng.random() < self.scenario.disturbed:
            return float(5 ** rng.uniform(-1, 1))
        return rng.uniform(1 - _USUAL_NOISE, 1 + _USUAL_NOISE)

    def _must_be_right(self, number: int) -> bool:
        change = self.scenario.slower_from
        return number >= LEARN_STEPS and not change - 1 <= number < change + LEARN_STEPS

    def _check_length(self, number: int, step: Step) -> None:
        """Who comes waits for the end of a step, also of one that nobody decodes in: so that is not
        expected to take more than some targets, but for the least that prompts get.
        """
        times, target = self.scheduler.step_times, self.scenario.config.target_token_time
        if times is None or target is None or step.num_decodes:
            return
        promise = step.promise
        self._require(promise is not None, f"step {number} computes prompts and promises nothing")
        num_tokens, _ = work_of(step)
        most = MOST_ALONE * target
        most = max(most, times.seconds(0, 0.0) + LEAST_PART * most)
        self._require(
            num_tokens <= LEAST_PROMPT_TOKENS
            or times.seconds(num_tokens, 0.0) <= most * 1.001
            or (promise is not None and promise.gave_way == "token_time"),
            f"step {number}: {num_tokens} tokens alone, {promise}, the target is {target:.4f} s",
        )

    def _check_shares(self, number: int, step: Step) -> None:
        """Over `WINDOW` steps in which tenants had requests waiting all the time, each had its
        share of the tokens that these had together, each token counted once.
        """
        waiting = self._waiting
        for tenant in list(self.busy_since):
            if tenant not in waiting:
                del self.busy_since[tenant]
        for tenant in waiting:
            self.busy_since.setdefault(tenant, number)
        counts: dict[str, int] = {}
        requests, total = self.scheduler.table.requests, self.served_together
        for request_id, _, start, num_tokens, *_ in step.scheduled:
            # what a preemption has computed again is nobody's share
            before = requests[request_id].computed_before
            new_tokens = num_tokens if before <= start else max(0, start + num_tokens - before)
            tenant = self.tenants[request_id]
            counts[tenant] = counts.get(tenant, 0) + new_tokens
        self.served.append(counts)
        total.update(counts)
        if len(self.served) > WINDOW:
            total.subtract(self.served.popleft())
        if len(self.served) < WINDOW or number % 20 or number >= NUM_STEPS:
            return
        tenants = [one for one, since in self.busy_since.items() if since <= number - WINDOW]
        weights = dict(self.scenario.config.tenant_weights)
        together = sum(total[one] for one in tenants)
        all_weights = sum(weights.get(one, 1.0) for one in tenants)
        for tenant in tenants:
            expected = weights.get(tenant, 1.0) / all_weights * together
            self._require(
                abs(total[tenant] - expected) <= SHARE_ERROR * expected + self._granule,
                f"step {number}: tenant {tenant} had {total[tenant]} tokens in {WINDOW} steps, its share "
                f"is {expected:.0f} of {together}",
            )

    @property
    def _waiting(self) -> set[str]:
        """Tenants with more requests than run."""
        shares = self.scheduler.table.shares
        assert shares is not None
        return {one for one, count in shares.num_live.items() if count > shares.rows[one]}

    @property
    def _granule(self) -> float:
        """What one request may have too much or too little: tenants take turns by whole ones."""
        return float(self._longest_prompt + self.scenario.answer_tokens)

    @property
    def _longest_prompt(self) -> int:
        return self.scenario.prompt_tokens * (10 if self.scenario.long_prompts else 1)

    def _check_rows(self) -> None:
        shares = self.scheduler.table.shares
        assert shares is not None
        without = [one for one in self._waiting if not shares.rows[one]]
        self.without_row = Counter({one: self.without_row[one] + 1 for one in without})
        scenario = self.scenario
        one_request = 2 * self._longest_prompt / LEAST_PROMPT_TOKENS + scenario.answer_tokens + 2
        for tenant, steps in self.without_row.items():
            # whoever weighs more has so much more for each token that this one has had
            weight = shares.weight(tenant)
            turns = sum(max(1.0, shares.weight(one) / weight) for one in shares.num_live)
            most = turns * one_request
            self._require(
                steps <= most,
                f"tenant {tenant} had no row for {steps} steps; {most:.0f} are allowed",
            )

    def _standings(self) -> dict[str, float]:
        """What tenants with requests have had, as the scheduler compares it."""
        shares = self.scheduler.table.shares
        assert shares is not None
        return {tenant: shares.standing(tenant) for tenant in shares.num_live}

    def _check_prompts(
        self,
        number: int,
        prompts: Sequence[tuple[str, int]],
        standings: dict[str, float],
        step: Step,
    ) -> None:
        """The first prompt of the tenant that has had least gets half of what a step may compute,
        or of the least; the shortest of its others gets what it needs of the rest; prompts of
        tenants that have had more are computed only when it is done.
        """
        promise = step.promise
        if promise is None or not prompts or step.preempted:
            return
        shares, requests = self.scheduler.table.shares, self.scheduler.table.requests
        assert shares is not None
        for entry in step.scheduled[: step.num_decodes]:  # which are charged first
            if entry.start >= requests[entry.request_id].computed_before:
                tenant = self.tenants[entry.request_id]
                standings[tenant] += 1 / shares.weight(tenant)
        lowest = min(standings[self.tenants[name]] for name, _ in prompts)
        had = {name: _known(standings[self.tenants[name]], lowest) for name, _ in prompts}
        computed = {one.request_id: one for one in step.scheduled[step.num_decodes :]}
        first, left = min(prompts, key=lambda one: had[one[0]])
        others = [one for one in prompts if one[0] != first]
        if any(
            had[one] == had[first] and self.tenants[one] != self.tenants[first] for one, _ in others
        ):
            return  # either tenant may be first
        least = min(LEAST_PROMPT_TOKENS, self.scenario.config.max_batched_tokens - step.num_decodes)
        half = (promise.prompt_tokens + 1) // 2
        self._require(promise.prompt_tokens >= least, f"step {number} promises {promise}")
        got = computed[first].num_tokens if first in computed else 0
        self._require(
            got >= min(left, half), f"step {number}: {first} got {got} of {left}, {promise}"
        )
        table = self.scheduler.table
        now = self._standings()
        behind = {one for one in self._waiting if _known(now[one], lowest) < lowest}
        self._require(
            got <= half or not (table.free_rows and behind),
            f"step {number}: {first} got {got} of {left}, though {behind} wait behind it, {promise}",
        )
        known = {name for name, _ in prompts}
        admitted = sum(one.num_tokens for name, one in computed.items() if name not in known)
        same = [one for one in others if had[one[0]] == had[first]]
        if same:
            name, least_left = min(same, key=lambda one: one[1])
            found = computed[name].num_tokens if name in computed else 0
            rest = promise.prompt_tokens - half - admitted
            self._require(
                found >= min(least_left, rest),
                f"step {number}: {name} got {found} of {least_left} behind {first}, {promise}",
            )
            self.num_passed += found > 0 and first in computed and not computed[first].samples
        for name, _ in others:
            self._require(
                had[name] == had[first] or name not in computed or got == left,
                f"step {number}: {name} was computed before {first}, whose tenant has had less, {promise}",
            )

    def _require(self, condition: bool, message: str) -> None:
        if not condition:
            raise TimedError(message)


@cache
def _params(tenant: str, max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, tenant=tenant)


def _known(standing: float, lowest: float) -> float:
    """Sums of thirds that are equal but for their last bits count as equal."""
    return lowest if abs(standing - lowest) < 1e-6 else standing


def _unfinished_prompts(scheduler: Scheduler) -> list[tuple[str, int]]:
    """Running requests that have more than a token to compute, and how many."""
    found = []
    for request in scheduler.table.running:
        left = request.num_tokens - request.num_computed_tokens
        if left > 1:
            found.append((request.request_id, left))
    return found


def _tokens_of(step: Step) -> StepResult:
    return StepResult(step.step_id, {one.request_id: (1,) for one in step.scheduled if one.samples})


def run_timed_seed(seed: int) -> int:
    """Plays one seed; raises TimedError with the command that replays it if a promise was broken."""
    simulation = TimedSimulation(seed)
    try:
        return simulation.run()
    except Exception as error:
        replay = f"python -m quire.tools.simulate --timed --seed {seed}"
        raise TimedError(
            f"timed seed {seed}: {type(error).__name__}: {error}\n{simulation.scenario}\nreplay: {replay}"
        ) from error
