"""Conversations over replicas in virtual time: what choosing by prefix gains over round robin.

The real scheduler, prefix cache and router; a step takes 10 ms and 0.1 ms for each token. Run by
`python -m quire.tools.bench.server_costs.router chat`.
"""

from __future__ import annotations

import heapq
import itertools
import random
import statistics
from dataclasses import dataclass, field

from quire.engine import Request, Scheduler, SchedulerConfig
from quire.observe.block_names import BlockNamer
from quire.observe.cache_events import CacheEvents
from quire.sampling_params import SamplingParams
from quire.server.link.messages import pack_tokens
from quire.server.link.replicas.router import Assignment, PrefixRouter
from quire.step import Step, StepResult

STEP_SECONDS, TOKEN_SECONDS = 10e-3, 100e-6
BLOCKS = 2400
"""Of one replica; a single engine has those of all."""


@dataclass
class Conversation:
    """Grows by an answer and a question each turn."""

    number: int
    tokens: list[int]
    turns: int
    source: random.Random

    def ask(self) -> None:
        self.tokens += [self.source.randrange(30_000) for _ in range(self.source.randint(30, 200))]


@dataclass
class ChatRun:
    """What came of it."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    ttft: list[float] = field(default_factory=list)
    each: list[int] = field(default_factory=list)
    """Requests that each replica got."""

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / self.prompt_tokens

    def quantile(self, part: float) -> float:
        return sorted(self.ttft)[int(part * (len(self.ttft) - 1))]


class SimulatedReplica:
    """An engine whose steps take as long as is said above."""

    def __init__(self, num_blocks: int, max_num_seqs: int) -> None:
        self.scheduler = Scheduler(
            SchedulerConfig(
                num_blocks=num_blocks + 1,
                max_num_seqs=max_num_seqs,
                max_batched_tokens=2048,
                max_model_len=8192,
            )
        )
        self.events = CacheEvents(self.scheduler.blocks)
        self.is_busy = False

    def begin(self, now: float) -> tuple[Step, float] | None:
        """The next step and when it is over."""
        step = self.scheduler.schedule(now)
        self.is_busy = not step.is_empty
        return (
            (step, now + STEP_SECONDS + TOKEN_SECONDS * step.num_tokens) if self.is_busy else None
        )


Event = Conversation | tuple[int, Step]
"""A conversation that asks, or a replica's step that is over."""


class Chat:
    """Conversations over some replicas, each of which asks when it has thought about the last
    answer.
    """

    def __init__(
        self, num_replicas: int, by_prefix: bool, conversations: int, turns: int, seed: int = 0
    ) -> None:
        shared = BLOCKS * 3 // num_replicas
        self._replicas = [
            SimulatedReplica(shared, 64 * 3 // num_replicas) for _ in range(num_replicas)
        ]
        self._router = PrefixRouter(num_replicas)
        for number in range(num_replicas):
            self._router.join(number, 16, shared, 64 * 3 // num_replicas)
        self._namer = BlockNamer(16)
        self._by_prefix = by_prefix
        self._turn = itertools.cycle(range(num_replicas))
        self._ids = itertools.count()
        self._source = random.Random(seed)
        self._queue: list[tuple[float, int, Event]] = []
        self._running: dict[str, tuple[Conversation, float, Assignment | None, list[int]]] = {}
        self.run = ChatRun(each=[0] * num_replicas)
        system = [self._source.randrange(30_000) for _ in range(300)]
        for number in range(conversations):
            one = Conversation(number, list(system), turns, random.Random(seed * 1000 + number))
            one.ask()
            self._at(self._source.uniform(0, 10), one)

    def play(self) -> ChatRun:
        while self._queue:
            now, _, event = heapq.heappop(self._queue)
            if isinstance(event, Conversation):
                self._send(event, now)
            else:
                number, step = event
                self._commit(number, step, now)
        return self.run

    def _at(self, when: float, event: Event) -> None:
        heapq.heappush(self._queue, (when, next(self._ids), event))

    def _send(self, conversation: Conversation, now: float) -> None:
        prompt = tuple(conversation.tokens)
        assignment = None
        if self._by_prefix:
            every = range(len(self._replicas))
            assignment = self._router.place(
                self._namer.names(pack_tokens(prompt)), len(prompt), 1, every
            )
            number = assignment.replica
        else:
            number = next(self._turn)
        name = f"c{conversation.number}.{conversation.turns}"
        length = conversation.source.randint(20, 150)
        params = SamplingParams(max_tokens=length, ignore_eos=True)
        self._running[name] = (conversation, now, assignment, [])
        self._replicas[number].scheduler.add(Request(name, prompt, params, seed=0), now)
        self.run.prompt_tokens += len(prompt)
        self.run.each[number] += 1
        if not self._replicas[number].is_busy:
            self._begin(number, now)

    def _begin(self, number: int, now: float) -> None:
        begun = self._replicas[number].begin(now)
        if begun is not None:
            step, end = begun
            self._at(end, (number, step))

    def _commit(self, number: int, step: Step, now: float) -> None:
        replica = self._replicas[number]
        self.run.cached_tokens += sum(admission.num_cached_tokens for admission in step.admitted)
        tokens = {
            one.request_id: (hash((one.request_id, one.start)) % 30_000,)
            for one in step.scheduled
            if one.samples
        }
        updates = replica.scheduler.commit(step, StepResult(step.step_id, tokens), now)
        self._router.note_blocks(number, *replica.events.take())
        for update in updates:
            conversation, arrival, assignment, answer = self._running[update.request_id]
            if update.new_token_ids and not answer:
                self.run.ttft.append(now - arrival)
                if assignment is not None:
                    self._router.computed(assignment)
            answer.extend(update.new_token_ids)
            if update.finish_reason is not None:
                del self._running[update.request_id]
                if assignment is not None:
                    self._router.close(assignment)
                self._callbacks(conversation, answer, now)
        self._begin(number, now)

    def _callbacks(self, conversation: Conversation, answer: list[int], now: float) -> None:
        conversation.turns -= 1
        if conversation.turns:
            conversation.tokens += answer
            conversation.ask()
            self._at(now + self._source.expovariate(0.5), conversation)


def chat_runs(conversations: int = 50, turns: int = 8) -> dict[str, ChatRun]:
    """The same conversations, three ways."""
    settings = {"one engine": (1, True), "router": (3, True), "round robin": (3, False)}
    return {name: Chat(*setting, conversations, turns).play() for name, setting in settings.items()}


def show_chat() -> None:
    runs = chat_runs()
    single = runs["one engine"].hit_rate
    print(
        "50 conversations of 8 turns, 300 tokens shared; prompt tokens found in the cache, time to first token (ms)"
    )
    print(f"{'':14}{'hit rate':>10}{'of single':>11}{'p50':>8}{'p95':>8}{'mean':>8}   requests")
    for name, run in runs.items():
        times = [
            1000 * one for one in (run.quantile(0.5), run.quantile(0.95), statistics.mean(run.ttft))
        ]
        shown = "".join(f"{one:>8.1f}" for one in times)
        print(f"{name:14}{run.hit_rate:>10.3f}{run.hit_rate / single:>11.3f}{shown}   {run.each}")
