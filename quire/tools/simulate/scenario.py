"""Random workloads for the simulator: everything a run depends on, drawn from one seed."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Literal

from quire.block_groups import BlockGroup, StateSpec
from quire.engine.block_key import KeyPart
from quire.engine.block_pool import Block, BlockPool
from quire.engine.config import SchedulerConfig
from quire.engine.request import Request
from quire.errors import CapacityError
from quire.sampling_params import SamplingParams
from quire.step import Pooling
from quire.tools.simulate.fake_runner import StepFault

Drafter = Literal["answers", "ngram", "runner", "both"]


@dataclass(frozen=True, slots=True)
class Arrival:
    """One call of a user: it may stand for several answers."""

    turn: int
    name: str
    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int
    pooling: Pooling | None = None
    key_parts: tuple[KeyPart, ...] = ()


@dataclass(frozen=True, slots=True)
class Scenario:
    """A configuration, a workload and the faults it meets."""

    seed: int
    config: SchedulerConfig
    max_depth: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    arrivals: tuple[Arrival, ...]
    abort_chance: float
    preempt_chance: float
    reprioritize_chance: float
    follow_chance: float
    """Per turn, that a request comes whose prompt begins with another's tokens, as beams and
    conversations do.
    """
    pause_chance: float = 0.0
    """Per turn, that the engine is paused; then its weights may be replaced, or it sleeps."""
    draft_chance: float = 0.0
    """Of a request that samples, to have some of its next tokens drafted."""
    right_chance: float = 0.5
    """Of a draft token, to be right."""
    drafter: Drafter = "answers"
    """Where draft tokens come from: the answers, known in advance, or what an engine has: n-grams, the
    runner's drafts.
    """
    adapts: bool = True
    step_faults: dict[int, StepFault] = field(default_factory=dict)
    copy_faults: frozenset[int] = frozenset()
    request_faults: dict[int, int] = field(default_factory=dict)
    refused_takes: frozenset[int] = frozenset()
    broken_takes: frozenset[int] = frozenset()

    @property
    def has_faults(self) -> bool:
        return bool(
            self.step_faults or self.copy_faults or self.request_faults or self.broken_takes
        )


class FaultyPool(BlockPool):
    """A block pool whose Nth `take` finds nothing, or raises."""

    def __init__(self, num_blocks: int, refused: frozenset[int], broken: frozenset[int]) -> None:
        super().__init__(num_blocks)
        self._refused = refused
        self._broken = broken
        self._num_takes = 0

    def take(self) -> Block | None:
        self._num_takes += 1
        if self._num_takes in self._broken:
            raise CapacityError(f"injected: allocation {self._num_takes} failed")
        return None if self._num_takes in self._refused else super().take()


def make_scenario(seed: int) -> Scenario:
    """The scenario of a seed: small pools, so that everything runs out all the time."""
    rng = random.Random(seed)
    config = _make_config(rng)
    vocab_size = rng.randint(2, 12)
    prefixes = [
        tuple(rng.choices(range(vocab_size), k=rng.randint(1, 24)))
        for _ in range(rng.randint(1, 3))
    ]
    eos = tuple(rng.sample(range(vocab_size), k=rng.choice([0, 1, 1, 2])))
    arrivals = []
    turn = 0
    for _ in range(rng.randint(1, 9)):
        turn += rng.choice([0, 0, 1, 2, 7])
        arrivals.append(_make_arrival(rng, config, vocab_size, prefixes, turn))
    if seed % 3 == 1:
        config = _with_groups(random.Random(-7 - seed), config)
    if seed % 6 in (2, 4):
        config = _with_states(random.Random(-11 - seed), config)
    if seed % 7 in (1, 4):
        arrivals = _with_parts(random.Random(-13 - seed), arrivals)
    if seed % 5 == 2:
        config = replace(
            config, max_checked_tokens=random.Random(-9 - seed).choice([1, 2, 5, 12, 30])
        )
    if seed % 8 in (1, 6):
        config, arrivals = _with_tenants(random.Random(-17 - seed), config, arrivals)
    if seed % 9 in (2, 5, 7):
        config = _with_targets(random.Random(-19 - seed), config)
    if seed % 4 == 3:
        arrivals = _pool_some(random.Random(-1 - seed), arrivals)
    with_faults = rng.random() < 0.4
    faults = rng.choice(["steps", "copies", "requests", "broken", "all"]) if with_faults else ""
    step_faults: dict[int, StepFault] = {}
    if faults in ("steps", "all"):
        step_faults = {
            rng.randint(0, 40): rng.choice(["submit", "result"]) for _ in range(rng.randint(1, 3))
        }
    request_faults: dict[int, int] = {}
    if faults in ("requests", "all"):
        request_faults = {rng.randint(0, 40): rng.randint(0, 5) for _ in range(rng.randint(1, 4))}
    return Scenario(
        seed=seed,
        config=config,
        max_depth=rng.choice([1, 1, 2, 2, 3]),
        vocab_size=vocab_size,
        eos_token_ids=eos,
        arrivals=tuple(arrivals),
        abort_chance=rng.choice([0.0, 0.0, 0.03, 0.15]),
        preempt_chance=rng.choice([0.0, 0.0, 0.05, 0.2]),
        reprioritize_chance=rng.choice([0.0, 0.1]) if config.policy != "fcfs" else 0.0,
        step_faults=step_faults,
        copy_faults=frozenset(rng.sample(range(1, 8), k=2))
        if faults in ("copies", "all")
        else frozenset(),
        request_faults=request_faults,
        refused_takes=_some_takes(rng) if rng.random() < 0.3 else frozenset(),
        broken_takes=_some_takes(rng) if faults in ("broken", "all") else frozenset(),
        follow_chance=rng.choice([0.0, 0.1, 0.4]),
        draft_chance=rng.choice([0.0, 0.3, 0.9]),
        right_chance=rng.choice([0.0, 0.5, 0.9, 1.0]),
        drafter=rng.choice(["answers", "answers", "ngram", "runner", "both"]),
        adapts=rng.random() < 0.5,
        pause_chance=random.Random(-23 - seed).choice([0.03, 0.1, 0.4])
        if seed % 10 in (3, 5, 8, 9)
        else 0.0,
    )


def make_follower(rng: random.Random, scenario: Scenario, leader: Request) -> Arrival:
    """A request that goes on from another's tokens, from anywhere in them, with some of its own."""
    tokens = leader.token_ids
    position = rng.choice([len(tokens), max(1, len(tokens) - 1), rng.randint(1, len(tokens))])
    own = rng.choices(range(scenario.vocab_size), k=rng.choice([0, 1, 1, 2, 5]))
    arrival = _arrival_of(
        rng, scenario.config, scenario.vocab_size, (*tokens[:position], *own), turn=0
    )
    parts = leader.key_parts if rng.random() < 0.9 or not leader.key_parts else draw_parts(rng)
    return replace(
        arrival,
        params=replace(arrival.params, cache_salt=leader.params.cache_salt),
        key_parts=parts,
    )


def _pool_some(rng: random.Random, arrivals: list[Arrival]) -> list[Arrival]:
    """Some of the callers want hidden states instead of an answer."""
    kinds: list[Pooling | None] = [None, "mean", "last"]
    return [
        replace(one, pooling=rng.choice(kinds)) if one.params.n == 1 else one for one in arrivals
    ]


def _some_takes(rng: random.Random) -> frozenset[int]:
    return frozenset(rng.randint(1, 60) for _ in range(rng.randint(1, 4)))


def _make_config(rng: random.Random) -> SchedulerConfig:
    max_num_seqs = rng.randint(1, 6)
    caching = rng.random() < 0.85
    return SchedulerConfig(
        num_blocks=rng.randint(3, 24),
        max_num_seqs=max_num_seqs,
        max_batched_tokens=max_num_seqs + rng.choice([0, 1, 3, 8, 40]),
        max_model_len=rng.choice([8, 24, 48]),
        block_size=rng.choice([1, 2, 3, 4, 8]),
        policy=rng.choice(["fcfs", "priority"]),
        num_host_blocks=rng.choice([0, 1, 3, 12]) if caching else 0,
        prefix_caching=caching,
    )


def _with_groups(rng: random.Random, config: SchedulerConfig) -> SchedulerConfig:
    """Layers in groups, with windows or chunks on some of them or on all."""
    groups = rng.randint(1, 3)
    kinds = [
        BlockGroup(),
        BlockGroup("window", rng.choice([1, 2, 5, 9])),
        BlockGroup("window", rng.choice([1, 4, 12])),
    ]
    kinds.append(BlockGroup("chunk", rng.choice([1, 3, 8])))
    return replace(
        config,
        num_blocks=1 + (config.num_blocks - 1) * groups,
        num_host_blocks=config.num_host_blocks * groups,
        groups=tuple(rng.choices(kinds, k=groups)),
    )


def _with_states(rng: random.Random, config: SchedulerConfig) -> SchedulerConfig:
    """Recurrent layers beside others, or alone."""
    chunk = config.block_size * rng.choice([1, 1, 2, 3])
    state = StateSpec(chunk, num_blocks=rng.randint(1, 3), interval=chunk * rng.choice([1, 2, 5]))
    groups = [
        *rng.choice([(), (BlockGroup(),), (BlockGroup(), BlockGroup("window", 5))]),
        BlockGroup("records", chunk),
    ]
    groups += [BlockGroup("records", chunk)] * rng.choice([0, 0, 1])
    rng.shuffle(groups)
    # Room for the states of one request at least, or of nearly all.
    extra = 2 * state.num_blocks * rng.randint(1, config.max_num_seqs + 1)
    return replace(
        config,
        num_blocks=1 + (config.num_blocks - 1) * len(groups) + extra,
        num_host_blocks=config.num_host_blocks * (len(groups) + state.num_blocks),
        groups=tuple(groups),
        state=state,
    )


def _with_parts(rng: random.Random, arrivals: list[Arrival]) -> list[Arrival]:
    """Some answers depend on more than tokens, from the start on or on a stretch, as with adapters
    and images.
    """
    return [replace(one, key_parts=draw_parts(rng)) for one in arrivals]


def _with_tenants(
    rng: random.Random, config: SchedulerConfig, arrivals: list[Arrival]
) -> tuple[SchedulerConfig, list[Arrival]]:
    """Requests of several tenants, which get their shares."""
    tenants = ["", "a", "b", "c"][: rng.randint(1, 4)]
    weights = tuple((one, rng.choice([0.1, 1.0, 3.0])) for one in tenants if rng.random() < 0.5)
    theirs = [
        replace(one, params=replace(one.params, tenant=rng.choice(tenants))) for one in arrivals
    ]
    return replace(config, policy="fair", tenant_weights=weights), theirs


def _with_targets(rng: random.Random, config: SchedulerConfig) -> SchedulerConfig:
    """Promises of time, by a clock that tells nothing about the work."""
    return replace(
        config,
        target_token_time=rng.choice([0.01, 0.4, 1.0, 3.0]),
        target_first_token=rng.choice([None, 0.5, 4.0]),
        gives_way=rng.choice(["first_token", "token_time"]),
    )


def draw_parts(rng: random.Random) -> tuple[KeyPart, ...]:
    starts = rng.choices([0, 0, 1, 4, 9], k=rng.choice([0, 1, 1, 2]))
    ends = [rng.choice([None, start + 1, start + 6]) for start in starts]
    return tuple(
        KeyPart(rng.choice("xy"), start, end) for start, end in zip(starts, ends, strict=True)
    )


def _make_arrival(
    rng: random.Random,
    config: SchedulerConfig,
    vocab_size: int,
    prefixes: list[tuple[int, ...]],
    turn: int,
) -> Arrival:
    prefix = rng.choice(prefixes)
    prompt = prefix[: rng.randint(0, len(prefix))]
    prompt += tuple(rng.choices(range(vocab_size), k=rng.choice([0, 1, 2, 5])))
    return _arrival_of(rng, config, vocab_size, prompt, turn)


def _arrival_of(
    rng: random.Random, config: SchedulerConfig, vocab_size: int, prompt: tuple[int, ...], turn: int
) -> Arrival:
    max_tokens: int | None
    if rng.random() < 0.95:
        # Mostly something that fits: the rest checks that refusals come when they should.
        capacity = min(config.max_model_len, config.num_tokens + 1)
        prompt = (prompt or (0,))[: max(1, capacity - 1)]
        most = max(1, capacity - len(prompt))
        max_tokens = rng.choice([rng.randint(1, most), min(most, rng.randint(1, 4)), most])
    else:
        max_tokens = rng.choice([None, rng.randint(1, 40)])
    params = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=rng.choice([0, 0, 0, min(3, max_tokens or 3)]),
        ignore_eos=rng.random() < 0.3,
        stop_token_ids=tuple(rng.sample(range(vocab_size), k=rng.choice([0, 0, 1]))),
        n=rng.choice([1, 1, 1, 2, 4]),
        priority=rng.choice([0, 0, 1, -1]),
        deadline=rng.choice([None, None, None, rng.uniform(0.5, 40.0)]),
        cache_salt=rng.choice([None, None, "a", "b"]),
        prompt_logprobs=rng.choice([None, None, 0]),
    )
    # Few names, so that they are used again while results of their last owner are still in flight.
    return Arrival(
        turn, f"r{rng.randint(0, 5)}", prompt, params, rng.choice([rng.randint(0, 3), 2**64 - 1])
    )
