"""A model made of hashes, and a runner that keeps its keys and values in blocks as a real one does.

A token's state is the hash of its position, its value and the states of all tokens before it (in groups of layers with
a window, of those in it), read from wherever the row's block table says they lie. So a wrong block, a missed copy or a
block reused too early changes the answer, and `solo_run`, which knows no blocks, tells.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from quire.engine.config import SchedulerConfig
from quire.errors import EngineError
from quire.sampling_params import SamplingParams
from quire.step import Admission, PromptScores, ScheduledRequest, Step, StepResult, TokenScore

StepFault = Literal["submit", "result"]


def token_state(position: int, token_id: int, context: Sequence[int], salt: int) -> int:
    """The fake model's keys and values of one token. They depend on the salt, as they would on an adapter, so
    sharing across salts shows."""
    return hash((position, token_id, salt, tuple(context)))


def windows_of(config: SchedulerConfig) -> tuple[int, ...]:
    """How far back each group of layers looks; 0: to the beginning."""
    return (0,) * (config.num_groups - config.num_windowed) + (config.window,) * config.num_windowed


def visible(states: Sequence[Sequence[int]], windows: Sequence[int], position: int) -> list[int]:
    """What a token sees: by group, the states of the tokens before it."""
    seen: list[int] = []
    for own, window in zip(states, windows, strict=True):
        seen += own[max(0, position - window + 1) if window else 0 : position]
    return seen


def salt_number(params: SamplingParams) -> int:
    """The cache salt as a number that is the same in every process."""
    return -1 if params.cache_salt is None else zlib.crc32(params.cache_salt.encode())


def choose_token(
    state: int, seed: int, position: int, vocab_size: int, params: SamplingParams, eos: Sequence[int], num_output: int
) -> int:
    """The token that follows, as a sampler would: a function of state, seed and position, with end and stop
    tokens masked below `min_tokens`."""
    allowed: Sequence[int] = range(vocab_size)
    if num_output < params.min_tokens:
        stops = params.end_token_ids(tuple(eos))
        allowed = [token for token in allowed if token not in stops] or allowed
    return allowed[hash((state, seed, position)) % len(allowed)]


def fake_score(state: int, token_id: int) -> TokenScore:
    """How likely the fake model holds a token to follow one of that state."""
    mixed = hash((state, token_id, 1))
    return TokenScore(token_id, -(mixed % 4096) / 64, 1 + mixed % 7)


def fake_vector(state: int) -> bytes:
    """What pooling gives with the fake model: the sum of the states, or the last one."""
    return str(state).encode()


def solo_states(prompt: Sequence[int], params: SamplingParams, windows: Sequence[int] = (0,)) -> list[int]:
    """The states of a prompt's tokens, without any engine."""
    salt = salt_number(params)
    states: list[int] = []
    for position, token_id in enumerate(prompt):
        states.append(token_state(position, token_id, visible([states] * len(windows), windows, position), salt))
    return states


def solo_prompt_scores(
    prompt: Sequence[int], params: SamplingParams, windows: Sequence[int] = (0,)
) -> list[TokenScore]:
    """The scores of a prompt's tokens from the second on, without any engine."""
    states = solo_states(prompt, params, windows)
    return [fake_score(state, token_id) for state, token_id in zip(states, prompt[1:], strict=False)]


def solo_run(
    prompt: Sequence[int],
    params: SamplingParams,
    seed: int,
    eos: Sequence[int],
    vocab_size: int,
    max_model_len: int,
    windows: Sequence[int] = (0,),
) -> tuple[list[int], str]:
    """A request all by itself, without any engine: its answer and why it ended."""
    limit = max_model_len
    if params.max_tokens is not None:
        limit = min(limit, len(prompt) + params.max_tokens)
    stops = params.end_token_ids(tuple(eos))
    salt = salt_number(params)
    states: list[int] = []
    tokens = list(prompt)
    while True:
        for position in range(len(states), len(tokens)):
            seen = visible([states] * len(windows), windows, position)
            states.append(token_state(position, tokens[position], seen, salt))
        num_output = len(tokens) - len(prompt)
        token = choose_token(states[-1], seed, len(tokens), vocab_size, params, eos, num_output)
        tokens.append(token)
        if token in stops and num_output >= params.min_tokens:
            return tokens[len(prompt) :], "stop"
        if len(tokens) >= limit:
            return tokens[len(prompt) :], "length"


@dataclass(slots=True)
class _Row:
    """A row as the device has it."""

    admission: Admission
    token_ids: list[int]
    """All that are certain: a step that runs ahead may count on more."""
    block_ids: list[int]
    num_computed: int
    sum_of_states: int = 0
    """Of the tokens computed in this row since its admission."""
    last_state: int = 0


@dataclass(slots=True)
class FakePending:
    """A step that has been computed; whoever asks gets its result."""

    outcome: StepResult | EngineError

    def result(self) -> StepResult:
        if isinstance(self.outcome, EngineError):
            raise self.outcome
        return self.outcome


@dataclass
class FakeRunner:
    """Computes steps in order of submission, and fails where it is told to."""

    config: SchedulerConfig
    vocab_size: int
    step_faults: dict[int, StepFault] = field(default_factory=dict)
    """Steps that fail: when submitted, before anything was done, or later, with anything half done."""
    copy_faults: frozenset[int] = frozenset()
    """Of the steps that bring blocks back from the host, these (counted from 1) fail half done."""
    request_faults: dict[int, int] = field(default_factory=dict)
    """In these steps the scheduled request of that index (modulo their number) fails alone."""
    right_chance: float = 0.5
    """Of a token it drafts, to be the one that will be drawn."""
    violations: list[str] = field(default_factory=list)
    """What no step should have asked for. Kept here, since an exception would be an ordinary step failure."""
    num_computed_tokens: int = 0

    def __post_init__(self) -> None:
        size = self.config.block_size
        # What a slot holds before anything is written to it: different everywhere.
        self._device = [[-(1 + block * size + i) for i in range(size)] for block in range(self.config.num_blocks)]
        self._host: list[list[int]] = [[-(10**6)] * size for _ in range(self.config.num_host_blocks)]
        self._rows: dict[int, _Row] = {}
        self._windows = windows_of(self.config)
        self._has_failed = False
        self._num_restoring_steps = 0

    def submit(self, step: Step) -> FakePending:
        fault = self.step_faults.get(step.step_id)
        if any(copy.kind == "host_to_device" for copy in step.copies):
            self._num_restoring_steps += 1
            if self._num_restoring_steps in self.copy_faults:
                fault = fault or "result"
        if fault is not None:
            self._has_failed = True
        if fault == "submit":
            raise EngineError(f"injected: step {step.step_id} could not be submitted")
        self._change_rows(step)
        copies = step.copies if fault is None else step.copies[: len(step.copies) // 2]
        for copy in copies:
            source = self._host if copy.kind == "host_to_device" else self._device
            target = self._host if copy.kind == "device_to_host" else self._device
            target[copy.target] = source[copy.source].copy()
        self._check(step)
        failing = -1
        if step.step_id in self.request_faults and step.scheduled:
            failing = self.request_faults[step.step_id] % len(step.scheduled)
        tokens: dict[str, tuple[int, ...]] = {}
        errors: dict[str, str] = {}
        scores: dict[str, PromptScores] = {}
        pooled: dict[str, bytes] = {}
        drafts: dict[str, tuple[int, ...]] = {}
        for index, entry in enumerate(step.scheduled):
            row = self._rows[entry.row]
            row.block_ids.extend(entry.new_block_ids)
            start = row.num_computed
            drawn = self._compute(row, entry, broken=index == failing or fault is not None)
            found = self._score_prompt(row, start, entry.num_tokens)
            if found is not None and index != failing:
                scores[entry.request_id] = found
            if entry.samples:
                # Also where it failed: a step may be in flight already that goes on from there.
                row.token_ids += drawn
                tokens[entry.request_id] = tuple(drawn)
                if row.admission.pooling is not None:
                    pooled[entry.request_id] = fake_vector(
                        row.sum_of_states if row.admission.pooling == "mean" else row.last_state
                    )
                drafts[entry.request_id] = tuple(self._draft(row, entry.num_drafts))
            if index == failing:
                tokens.pop(entry.request_id, None)
                errors[entry.request_id] = f"injected: {entry.request_id} failed in step {step.step_id}"
        if fault is not None:
            return FakePending(EngineError(f"injected: step {step.step_id} failed"))
        return FakePending(StepResult(step.step_id, tokens, errors, {}, scores, frozenset(), pooled, drafts))

    def _change_rows(self, step: Step) -> None:
        given_up = [(notice.request_id, notice.row) for notice in step.preempted]
        given_up += [(notice.request_id, notice.row) for notice in step.finished if notice.row is not None]
        for request_id, number in given_up:
            row = self._rows.get(number)
            if row is not None and row.admission.request_id == request_id:
                del self._rows[number]
            elif not self._has_failed:
                self.violations.append(f"step {step.step_id}: {request_id} gives up a row it hasn't got")
        for admission in step.admitted:
            if admission.row in self._rows and not self._has_failed:
                self.violations.append(f"step {step.step_id}: row {admission.row} is given twice")
            num_ready = admission.num_cached_tokens + admission.num_host_tokens
            tokens, blocks = list(admission.token_ids), list(admission.block_ids)
            self._rows[admission.row] = _Row(admission, tokens, blocks, num_ready)

    def _check(self, step: Step) -> None:
        """What every step must keep to, whatever it is for."""
        problems = []
        if step.num_tokens > self.config.max_batched_tokens:
            problems.append(f"computes {step.num_tokens} tokens")
        if len({entry.row for entry in step.scheduled}) != len(step.scheduled):
            problems.append("schedules a row twice")
        if any((e.num_tokens, e.samples, e.guesses) != (1, True, ()) for e in step.scheduled[: step.num_decodes]):
            problems.append(f"has fewer than {step.num_decodes} decodes")
        written: set[int] = set()
        for entry in step.scheduled:
            row = self._rows[entry.row]
            if row.admission.request_id != entry.request_id:
                problems.append(f"row {entry.row} belongs to {row.admission.request_id}")
            late = entry.start - row.num_computed
            if late < 0 or (late and not entry.runs_ahead) or entry.num_tokens <= len(entry.guesses):
                problems.append(f"{entry} does not continue at {row.num_computed}")
            known = row.num_computed + entry.num_tokens - len(entry.guesses)
            if known > len(row.token_ids) or entry.samples != (known == len(row.token_ids)):
                problems.append(f"{entry} on {len(row.token_ids)} tokens")
            if entry.guesses and not entry.samples:
                problems.append(f"{entry} guesses in the middle of a prompt")
            size, groups = self.config.block_size, self.config.num_groups
            held = row.block_ids + list(entry.new_block_ids)
            end = entry.start + entry.num_tokens + entry.num_drafts
            blocks = held[row.num_computed // size * groups : -(-end // size) * groups]
            if end * groups > size * len(held):
                problems.append(f"{entry} has no blocks for all of its tokens")
            if 0 in blocks or written & set(blocks):
                problems.append(f"{entry} writes to blocks {blocks}, which are not its own")
            kept = self.config.first_kept(row.num_computed)
            lacking = (place for place, block in enumerate(held) if block == 0)
            if any(place // groups >= kept or not self._windows[place % groups] for place in lacking):
                problems.append(f"{entry} lacks blocks that it looks at: {held}")
            written.update(blocks)
        self.violations.extend(f"step {step.step_id}: {problem}" for problem in problems)

    def _compute(self, row: _Row, entry: ScheduledRequest, broken: bool) -> list[int]:
        """Computes an entry's tokens from where the row stands; returns those drawn after the last real one and after
        every guess that was right."""
        start = row.num_computed
        states = self._states(row)
        context = states[0]
        salt = salt_number(row.admission.params)
        num_known = start + entry.num_tokens - len(entry.guesses)
        given = [*row.token_ids[start:num_known], *entry.guesses]
        for position, token_id in enumerate(given, start=start):
            seen = visible(states, self._windows, position)
            state = 0 if broken else token_state(position, token_id, seen, salt)
            self._write(row, position, state)
            for own in states:
                own.append(state)
        self.num_computed_tokens += len(given)
        row.sum_of_states += sum(context[start:num_known])
        row.last_state = context[num_known - 1]
        drawn = [self._draw(row, context, num_known)]
        for position, guess in enumerate(entry.guesses, start=num_known):
            if drawn[-1] != guess:
                break
            drawn.append(self._draw(row, context, position + 1))
        row.num_computed = num_known + len(drawn) - 1
        return drawn

    def _states(self, row: _Row) -> list[list[int]]:
        """By group, those of the tokens computed so far; whatever lies there where a block was given up."""
        groups = len(self._windows)
        lanes = (row.block_ids[group::groups] for group in range(groups))
        return [[state for block in lane for state in self._device[block]][: row.num_computed] for lane in lanes]

    def _write(self, row: _Row, position: int, state: int) -> None:
        size, groups = self.config.block_size, len(self._windows)
        for block in row.block_ids[position // size * groups : (position // size + 1) * groups]:
            self._device[block][position % size] = state

    def _draft(self, row: _Row, count: int) -> list[int]:
        """Tokens that may follow, some of them wrong. As a model that drafts on the same cache does, it writes what is
        no good to the places of the drawn token and of all drafts but the last."""
        states = self._states(row)
        context = states[0]
        salt, token_id = salt_number(row.admission.params), row.token_ids[-1]
        drafts = []
        for position in range(row.num_computed, row.num_computed + count):
            state = token_state(position, token_id, visible(states, self._windows, position), salt)
            for own in states:
                own.append(state)
            self._write(row, position, -(10**7) - position)
            token_id = self._draw(row, context, position + 1)
            if hash((context[-1], 2)) % 1000 >= 1000 * self.right_chance:
                token_id = hash((context[-1], 3)) % self.vocab_size
            drafts.append(token_id)
        return drafts

    def _draw(self, row: _Row, states: list[int], position: int) -> int:
        """The token at a position, from the state of the one before it."""
        admission = row.admission
        return choose_token(
            states[position - 1],
            admission.seed,
            position,
            self.vocab_size,
            admission.params,
            admission.eos_token_ids,
            position - admission.num_prompt_tokens,
        )

    def _score_prompt(self, row: _Row, start: int, num_tokens: int) -> PromptScores | None:
        """The positions that the tokens just computed predict, as far as they are in the prompt and wanted."""
        admission = row.admission
        if admission.score_prompt_from is None:
            return None
        first = max(start + 1, admission.score_prompt_from)
        end = min(start + num_tokens + 1, admission.num_prompt_tokens)
        if first >= end:
            return None
        size, groups = self.config.block_size, len(self._windows)
        states = [self._device[row.block_ids[p // size * groups]][p % size] for p in range(first - 1, end - 1)]
        tokens = admission.token_ids[first:end]
        return PromptScores(first, tuple(map(fake_score, states, tokens)))
