"""The engine under a virtual clock, a fake model and a random workload: thousands of seeds a
minute.

    python -m quire.tools.simulate --seeds 100000
    python -m quire.tools.simulate --seed 4711      # replays one, step by step
    python -m quire.tools.simulate --timed          # promises of time and shares (timed.py)

Every finished request, drafted or not, must equal its solo run, every cut one a beginning of it;
nothing may leak, the invariants hold after every step, and nobody waits forever. What a seed does
is fixed by the seed. Some engines are paused at any moment, get other weights, sleep and wake: what
an answer was computed by is kept beside it, and what each version makes of it alone is known.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from quire.engine.block_manager import BlockManager
from quire.engine.core import EngineCore
from quire.engine.draft_tokens import Propose
from quire.engine.invariants import check_invariants
from quire.engine.request import PromptProgress, Request, make_requests
from quire.engine.scheduler import Scheduler
from quire.errors import CapacityError, EngineError, InvalidRequestError
from quire.observe.engine_metrics import EngineMetrics
from quire.observe.step_log import StepLog
from quire.sampling_params import ResolvedTokens
from quire.speculate.speculator import Speculator
from quire.step import PauseMode, RequestMetrics, RequestUpdate, StepLogEntry, TokenLogprob
from quire.tools.simulate.fake_model import fake_vector, solo_prompt_logprobs, solo_run, solo_states
from quire.tools.simulate.fake_runner import FakeRunner
from quire.tools.simulate.scenario import (
    Arrival,
    FaultyPool,
    Scenario,
    make_follower,
    make_scenario,
)
from quire.tools.simulate.timed import TimedError, run_timed_seed

MAX_FOLLOWERS = 12
MAX_DRAFT_TOKENS = 6
_PAUSE_MODES: tuple[PauseMode, ...] = ("wait", "keep", "wait", "keep", "wait", "keep", "abort")
_LAST_DISTURBED_TURN = 150
"""Not for ever: someone preempted again and again gets nowhere, and rightly so."""


class SimulationError(AssertionError):
    """A seed found a bug."""


@dataclass(slots=True)
class Simulation:
    """One scenario being played."""

    scenario: Scenario
    verbose: bool = False
    rng: random.Random = field(init=False)
    speculator: Speculator = field(init=False)
    scheduler: Scheduler = field(init=False)
    runner: FakeRunner = field(init=False)
    core: EngineCore = field(init=False)
    metrics: EngineMetrics = field(init=False)
    now: float = 0.0
    live: dict[str, tuple[Request, list[int]]] = field(default_factory=dict)
    """Requests that have not ended, with the tokens their updates brought."""
    prompt_logprobs: dict[PromptProgress, dict[int, TokenLogprob]] = field(default_factory=dict)
    """By what the answers to one prompt share, and position."""
    ended: list[RequestMetrics] = field(default_factory=list)
    everyone: list[Request] = field(default_factory=list)
    num_followers: int = 0
    solo_runs: dict[tuple[Request, tuple[tuple[int, int], ...]], tuple[list[int], str]] = field(
        default_factory=dict
    )
    pauses: random.Random = field(init=False)
    """Draws pauses and updates, so that seeds without any play as they always did."""
    versions: dict[Request, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    """Of the weights that computed it: the first token of the answer, and the version."""
    scored_by: dict[PromptProgress, int] = field(default_factory=dict)
    """The version of the weights when the first token of an answer to a prompt was drawn."""
    num_updates: int = 0
    work: int = 0
    """Tokens all requests together could need."""

    def __post_init__(self) -> None:
        scenario, config = self.scenario, self.scenario.config
        self.rng = random.Random(scenario.seed + 1)
        self.pauses = random.Random(-29 - scenario.seed)
        pool = FaultyPool(config.num_blocks, scenario.refused_takes, scenario.broken_takes)
        self.speculator = Speculator(
            scenario.vocab_size,
            ngrams=scenario.drafter != "runner",
            runner_drafts=scenario.drafter in ("runner", "both"),
            adaptive=scenario.adapts,
        )
        propose: Propose = (
            self._propose if scenario.drafter == "answers" else self.speculator.propose
        )
        drafts = self.speculator.num_drafts if scenario.drafter in ("runner", "both") else None
        blocks = BlockManager(config, pool=pool)
        self.scheduler = (
            Scheduler(config, blocks, propose, drafts)
            if scenario.draft_chance
            else Scheduler(config, blocks)
        )
        self.runner = FakeRunner(
            config,
            scenario.vocab_size,
            step_faults=scenario.step_faults,
            copy_faults=scenario.copy_faults,
            request_faults=scenario.request_faults,
            right_chance=scenario.right_chance,
        )
        self.metrics = EngineMetrics()
        log = StepLog(
            capacity=16, listeners=(self.metrics.observe, self.speculator.observe, self._show)
        )
        self.core = EngineCore(self.scheduler, self.runner, scenario.max_depth, log.append)

    def run(self) -> int:
        """Plays the scenario to its end; returns the number of steps."""
        arrivals = list(self.scenario.arrivals)
        turn = 0
        while arrivals or self.core.has_work or self.live:
            while arrivals and arrivals[0].turn <= turn:
                self._arrive(arrivals.pop(0))
            if turn < _LAST_DISTURBED_TURN:
                self._disturb()
            if self.scenario.pause_chance:
                self._pause(self.scenario.pause_chance if turn < _LAST_DISTURBED_TURN else 0.0)
            # A pipe of changing depth is a runner that is late at random.
            self.core.depth = self.rng.randint(1, self.scenario.max_depth)
            self.now += self.rng.choice([0.0, 0.5, 1.0])
            for update in self.core.step(self.now):
                self._receive(update)
            check_invariants(self.scheduler)
            self._require(not self.runner.violations, "; ".join(self.runner.violations))
            turn += 1
            self._require(
                turn < 200 + 20 * self.work, f"no end after {turn} turns: {sorted(self.live)} wait"
            )
        self._check_end()
        return self.metrics.counters.steps

    def _arrive(self, arrival: Arrival) -> None:
        config = self.scenario.config
        name = arrival.name
        while any(key == name or key.startswith(f"{name}/") for key in self.live):
            name += "'"
        eos = self.scenario.eos_token_ids
        for request in make_requests(
            name,
            arrival.prompt,
            arrival.params,
            arrival.seed,
            eos,
            pooling=arrival.pooling,
            key_parts=arrival.key_parts,
        ):
            num_prompt = len(arrival.prompt)
            total = min(
                config.max_model_len,
                num_prompt + (arrival.params.max_tokens or config.max_model_len),
            )
            fits = 0 < num_prompt < config.max_model_len
            fits = fits and total - 1 <= config.num_tokens
            if (
                config.block_size % 2 and fits and arrival.pooling is None
            ):  # the client has an idea, which is not always right
                propose = [token if token % 3 else 0 for token in self._solo(request)[0]]
                request.resolved = ResolvedTokens(prediction_ids=tuple(propose[arrival.seed % 2 :]))
            request.caches_partial_block = self.rng.random() < self.scenario.follow_chance
            try:
                self.core.add_request(request, self.now)
            except (InvalidRequestError, CapacityError) as error:
                self._require(not fits, f"{name} was refused, though it fits: {error}")
            else:
                self._require(fits, f"{name} was taken in, though it can't fit")
                self.runner.key_parts[request.request_id] = request.key_parts
                self.live[request.request_id] = (request, [])
                self.versions[request] = ((0, self.core.weights_version),)
                self.everyone.append(request)
                self.prompt_logprobs.setdefault(request.prompt_progress, {})
                self.work += total

    def _disturb(self) -> None:
        """Aborts, preemptions, changes of priority and followers, at any moment."""
        scenario, rng = self.scenario, self.rng
        for chance, act in (
            (
                scenario.abort_chance,
                lambda name: self.core.abort([rng.choice([name, name.split("/")[0]])], self.now),
            ),
            (scenario.preempt_chance, self.scheduler.preempt),
            (
                scenario.reprioritize_chance,
                lambda name: self.scheduler.set_priority(name, rng.randint(-2, 2)),
            ),
        ):
            names = sorted(self.scheduler.table.requests)
            if names and rng.random() < chance:
                act(rng.choice(names))
                check_invariants(self.scheduler)
        if (
            self.everyone
            and self.num_followers < MAX_FOLLOWERS
            and rng.random() < scenario.follow_chance
        ):
            self.num_followers += 1
            leader = rng.choice(self.everyone)
            self._arrive(make_follower(rng, scenario, leader))

    def _pause(self, chance: float) -> None:
        """Pauses, and what needs one, at any moment."""
        core, rng = self.core, self.pauses
        if not core.is_paused:
            if rng.random() < chance:
                core.pause(rng.choice(_PAUSE_MODES), self.now)
        elif not chance or rng.random() < 0.25:
            core.resume()
        elif rng.random() < 0.1:
            core.pause(rng.choice(_PAUSE_MODES), self.now)
        elif rng.random() < 0.5:
            self._between_steps(rng.choice(["update", "update", "fails", "forget", "sleep"]))
        check_invariants(self.scheduler)

    def _between_steps(self, what: str) -> None:
        may_compute = self.scheduler.pauses.may_compute
        try:
            self.core.settle(what, self.now)
        except EngineError as error:
            self._require(may_compute, f"{what} was refused, though nobody runs: {error}")
            return
        self._require(not may_compute, f"{what} was begun, though somebody runs")
        self._require(self.core.is_drained, f"{what} was begun with steps in flight")
        if self.scheduler.pauses.mode == "wait":
            begun = {
                one.prompt_progress for one in self.everyone if one.first_scheduled is not None
            }
            cut = [
                one.request_id
                for one, _ in self.live.values()
                if one.prompt_progress in begun and one.finish_reason is None
            ]
            self._require(not cut, f"{what} did not wait for {cut}")
        if what == "forget":
            self.core.reset_prefix_cache(self.now)
        elif what == "sleep":
            self.core.reset_prefix_cache(self.now)
            self.runner.sleep()
        elif what == "update":
            old = self.core.weights_version
            version = self.core.next_version(self.pauses.choice([None, old + 7]))
            self.runner.update(version)
            self.core.change_weights(version, self.now)
            self.num_updates += 1
            for request in self.everyone:
                # a first token that is a stop token counts as none
                if request.num_output_tokens or request.finish_reason == "stop":
                    self.scored_by.setdefault(request.prompt_progress, old)
            for request, _ in self.live.values():
                if request.finish_reason is None:
                    first = request.num_output_tokens
                    kept = [one for one in self.versions[request] if one[0] < first]
                    self.versions[request] = (*kept, (first, version))

    def _propose(self, request: Request, most: int) -> list[int]:
        """What may follow a request, right or wrong, as if all draft tokens in flight were right."""
        rng, scenario = self.rng, self.scenario
        if rng.random() >= scenario.draft_chance:
            return []
        first = request.num_tokens - 1 - request.num_prompt_tokens
        right = self._solo(request)[0][first : first + rng.randint(1, MAX_DRAFT_TOKENS)]
        return [
            token if rng.random() < scenario.right_chance else rng.randrange(scenario.vocab_size)
            for token in [*right, 0][:most]
        ]

    def _receive(self, update: RequestUpdate) -> None:
        self._require(
            update.request_id in self.live, f"{update.request_id} was updated after its end"
        )
        request, tokens = self.live[update.request_id]
        tokens.extend(update.new_token_ids)
        if update.prompt_logprobs is not None:
            start, logprobs = update.prompt_logprobs
            known = self.prompt_logprobs[request.prompt_progress]
            known.update(zip(range(start, start + len(logprobs)), logprobs, strict=True))
        if update.finish_reason is None:
            return
        del self.live[update.request_id]
        scenario = self.scenario
        expected, reason = self._solo(request)
        complete = update.finish_reason in ("stop", "length")
        right = (
            (tokens, update.finish_reason) == (expected, reason)
            if complete
            else tokens == expected[: len(tokens)]
        )
        self._require(
            right,
            f"{update.request_id} ended by {update.finish_reason} with {tokens}, alone {reason} {expected}",
        )
        if complete:
            self._check_prompt_logprobs(request)
            self._check_pooled(request, update.pooled)
            told = None if update.metrics is None else update.metrics.weights_versions
            self._require(
                told == self.versions[request],
                f"{update.request_id} is said to be of weights {told}, it is of {self.versions[request]}",
            )
        answer = request.token_ids[request.num_prompt_tokens :]
        self._require(tokens == answer, f"{update.request_id}: updates and tokens differ")
        self._require(
            update.finish_reason != "error" or scenario.has_faults,
            f"{update.request_id} failed without an injected fault: {update.error}",
        )
        assert update.metrics is not None
        self.ended.append(update.metrics)

    def _solo(self, request: Request) -> tuple[list[int], str]:
        if request.pooling is not None:
            return [], "stop"
        versions = self.versions.get(request, ((0, self.core.weights_version),))
        if (request, versions) not in self.solo_runs:
            self.solo_runs[request, versions] = solo_run(
                request.prompt_token_ids,
                request.params,
                request.seed,
                request.eos_token_ids,
                self.scenario.vocab_size,
                self.scenario.config,
                request.key_parts,
                versions,
            )
        return self.solo_runs[request, versions]

    def _check_pooled(self, request: Request, found: bytes | None) -> None:
        expected = None
        if request.pooling is not None:
            states = solo_states(
                request.prompt_token_ids,
                request.params,
                self.scenario.config,
                request.key_parts,
                self.versions[request][-1][1],
            )
            expected = fake_vector(sum(states) if request.pooling == "mean" else states[-1])
        self._require(
            found == expected, f"{request.request_id}: pooled {found!r}, alone {expected!r}"
        )

    def _check_prompt_logprobs(self, request: Request) -> None:
        """Once one answer is complete, its prompt is scored, whoever computed it."""
        found = self.prompt_logprobs[request.prompt_progress]
        expected = {}
        if request.params.prompt_logprobs is not None:
            logprobs = solo_prompt_logprobs(
                request.prompt_token_ids,
                request.params,
                self.scenario.config,
                request.key_parts,
                self.scored_by.get(request.prompt_progress, self.core.weights_version),
            )
            expected = dict(enumerate(logprobs, start=1))
        self._require(
            found == expected,
            f"{request.request_id}: the prompt's scores are {found}, alone {expected}",
        )

    def _check_end(self) -> None:
        self._require(not self.live, f"{sorted(self.live)} never ended")
        check_invariants(self.scheduler)
        pool = self.scheduler.blocks.pool
        self._require(
            pool.num_free == len(pool.blocks) - 1, f"{pool.num_free} blocks are free at the end"
        )
        reported = sorted(self.ended, key=str)
        logged = sorted(self.metrics.finished, key=str)
        only_logged = [item for item in logged if item not in reported]
        only_reported = [item for item in reported if item not in logged]
        self._require(
            reported == logged, f"the log says {only_logged}, the updates say {only_reported}"
        )
        computed = self.metrics.counters.computed_tokens
        self._require(
            computed == self.runner.num_computed_tokens
            or "submit" in self.scenario.step_faults.values(),
            f"the log counts {computed} computed tokens, the runner {self.runner.num_computed_tokens}",
        )

    def _show(self, entry: StepLogEntry) -> None:
        if self.verbose:
            step = entry.step
            print(
                f"step {step.step_id} at {step.now:g}: {step.num_free_blocks} blocks free, ", end=""
            )
            print(f"{step.num_running} running, {step.num_waiting} waiting")
            for items in (
                step.preempted,
                step.finished,
                step.admitted,
                step.copies,
                step.scheduled,
            ):
                for item in items:
                    print(f"    {item}")
            print(f"  -> {entry.result.tokens if entry.result else entry.error}")

    def _require(self, condition: bool, message: str) -> None:
        if not condition:
            raise SimulationError(message)


def run_seed(seed: int, verbose: bool = False) -> int:
    """Plays one seed; raises SimulationError with the command that replays it if anything is wrong."""
    simulation = Simulation(make_scenario(seed), verbose)
    try:
        return simulation.run()
    except Exception as error:
        replay = f"python -m quire.tools.simulate --seed {seed}"
        raise SimulationError(
            f"seed {seed}: {type(error).__name__}: {error}\nreplay: {replay}"
        ) from error


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m quire.tools.simulate", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--seeds", type=int, default=1000, help="how many seeds to play")
    parser.add_argument("--start", type=int, default=0, help="the first of them")
    parser.add_argument("--seed", type=int, help="play this one alone and show every step")
    parser.add_argument(
        "--timed", action="store_true", help="token times and shares, on a device that takes time"
    )
    parser.add_argument(
        "--paused",
        action="store_true",
        help="only seeds whose engine is paused at any moment, gets other weights and sleeps",
    )
    options = parser.parse_args(arguments)
    if options.paused and (options.timed or options.seed is not None):
        parser.error("--paused chooses seeds of the engine: not with --timed or --seed")
    play: Callable[[int], int] = run_timed_seed if options.timed else run_seed
    if options.seed is not None:
        return _play([options.seed], play if options.timed else partial(run_seed, verbose=True))
    seeds = (
        seed
        for seed in itertools.count(options.start)
        if not options.paused or make_scenario(seed).pause_chance
    )
    logger = logging.getLogger("quire")
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # thousands of failures are meant to happen
    try:
        return _play(list(itertools.islice(seeds, options.seeds)), play)
    finally:
        logger.setLevel(level)


def _play(seeds: Sequence[int], play: Callable[[int], int]) -> int:
    began = shown = time.monotonic()
    steps = 0
    for count, seed in enumerate(seeds, start=1):
        try:
            steps += play(seed)
        except (SimulationError, TimedError) as error:
            print(error, file=sys.stderr)
            return 1
        if time.monotonic() - shown > 5 or count == len(seeds):
            shown = time.monotonic()
            print(
                f"{count} of {len(seeds)} seeds, {steps} steps, {count / (shown - began):.0f} seeds/s",
                flush=True,
            )
    return 0
