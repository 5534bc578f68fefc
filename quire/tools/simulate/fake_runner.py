"""A runner for the fake model that keeps its states in blocks as a real one does.

They are read from wherever the row's block table says they lie. So a wrong block, a missed copy or
a block reused too early changes the answer, and `solo_run`, which knows no blocks, tells.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from quire.engine.block_key import KeyPart
from quire.engine.config import SchedulerConfig
from quire.errors import EngineError
from quire.step import AdmittedRequest, PromptLogprobs, ScheduledRequest, Step, StepResult
from quire.tools.simulate.fake_model import (
    Memory,
    choose_token,
    fake_score,
    fake_vector,
    salts_of,
    token_state,
)

StepFault = Literal["submit", "result"]


@dataclass(slots=True)
class _Row:
    """A row as the device has it."""

    admission: AdmittedRequest
    token_ids: list[int]
    """All that are certain: a step that runs ahead may count on more."""
    block_ids: list[int]
    num_computed: int
    salts: list[int]
    """By position."""
    weights_version: int
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
    """What no step should have asked for. Kept here, since an exception would be an ordinary step
    failure.
    """
    num_computed_tokens: int = 0
    key_parts: dict[str, tuple[KeyPart, ...]] = field(default_factory=dict)
    """What requests depend on besides their tokens, by name: as a real runner knows their adapters."""
    weights_version: int = 0
    """Of the weights it computes with."""

    def __post_init__(self) -> None:
        size = self.config.block_size
        # What a slot holds before anything is written to it: different everywhere.
        self._device = [
            [-(1 + block * size + i) for i in range(size)]
            for block in range(self.config.num_blocks)
        ]
        self._host: list[list[int]] = [
            [-(10**6)] * size for _ in range(self.config.num_host_blocks)
        ]
        self._rows: dict[int, _Row] = {}
        self._has_failed = False
        self._num_restoring_steps = 0

    def update(self, weights_version: int) -> None:
        """Other weights, from the next step on."""
        self._require_no_rows("weights are replaced")
        self.weights_version = weights_version

    def sleep(self) -> None:
        """And awake again: what blocks held is gone, on the device and on the host."""
        self._require_no_rows("it is put to sleep")
        for number, block in enumerate((*self._device, *self._host)):
            block[:] = [-(10**8) - number] * len(block)

    def _require_no_rows(self, what: str) -> None:
        if self._rows and not self._has_failed:
            names = sorted(row.admission.request_id for row in self._rows.values())
            self.violations.append(f"{what} while {names} have rows")

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
        logprobs: dict[str, PromptLogprobs] = {}
        pooled: dict[str, bytes] = {}
        drafts: dict[str, tuple[int, ...]] = {}
        for index, entry in enumerate(step.scheduled):
            row = self._rows[entry.row]
            row.block_ids.extend(entry.new_block_ids)
            start = row.num_computed
            drawn = self._compute(row, entry, broken=index == failing or fault is not None)
            found = self._score_prompt(row, start, entry.num_tokens)
            if found is not None and index != failing:
                logprobs[entry.request_id] = found
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
                errors[entry.request_id] = (
                    f"injected: {entry.request_id} failed in step {step.step_id}"
                )
        if fault is not None:
            return FakePending(EngineError(f"injected: step {step.step_id} failed"))
        return FakePending(
            StepResult(step.step_id, tokens, errors, {}, logprobs, frozenset(), pooled, drafts)
        )

    def _change_rows(self, step: Step) -> None:
        given_up = [(notice.request_id, notice.row) for notice in step.preempted]
        given_up += [
            (notice.request_id, notice.row) for notice in step.finished if notice.row is not None
        ]
        for request_id, number in given_up:
            row = self._rows.get(number)
            if row is not None and row.admission.request_id == request_id:
                del self._rows[number]
            elif not self._has_failed:
                self.violations.append(
                    f"step {step.step_id}: {request_id} gives up a row it hasn't got"
                )
        for admission in step.admitted:
            if admission.row in self._rows and not self._has_failed:
                self.violations.append(f"step {step.step_id}: row {admission.row} is given twice")
            num_ready = admission.num_cached_tokens + admission.num_host_tokens
            parts = self.key_parts.get(admission.request_id, ())
            if admission.weights_version != self.weights_version:
                self.violations.append(
                    f"step {step.step_id}: {admission.request_id} is admitted for weights "
                    f"{admission.weights_version}, the runner has {self.weights_version}"
                )
            self._rows[admission.row] = _Row(
                admission=admission,
                token_ids=list(admission.token_ids),
                block_ids=list(admission.block_ids),
                num_computed=num_ready,
                salts=salts_of(
                    admission.params, parts, self.config.max_model_len + 1, self.weights_version
                ),
                weights_version=self.weights_version,
            )

    def _check(self, step: Step) -> None:
        """What every step must keep to, whatever it is for."""
        problems = []
        if step.num_tokens > self.config.max_batched_tokens:
            problems.append(f"computes {step.num_tokens} tokens")
        if len({entry.row for entry in step.scheduled}) != len(step.scheduled):
            problems.append("schedules a row twice")
        if any(
            (e.num_tokens, e.samples, e.draft_tokens) != (1, True, ())
            for e in step.scheduled[: step.num_decodes]
        ):
            problems.append(f"has fewer than {step.num_decodes} decodes")
        written: set[int] = set()
        for entry in step.scheduled:
            row = self._rows[entry.row]
            if row.weights_version != self.weights_version:
                problems.append(f"row {entry.row} was begun with weights {row.weights_version}")
            if row.admission.request_id != entry.request_id:
                problems.append(f"row {entry.row} belongs to {row.admission.request_id}")
            late = entry.start - row.num_computed
            if (
                late < 0
                or (late and not entry.runs_ahead)
                or entry.num_tokens <= len(entry.draft_tokens)
            ):
                problems.append(f"{entry} does not continue at {row.num_computed}")
            known = row.num_computed + entry.num_tokens - len(entry.draft_tokens)
            if known > len(row.token_ids) or entry.samples != (known == len(row.token_ids)):
                problems.append(f"{entry} on {len(row.token_ids)} tokens")
            if entry.draft_tokens and not entry.samples:
                problems.append(f"{entry} has draft tokens in the middle of a prompt")
            size, groups = self.config.block_size, self.config.num_groups
            held = row.block_ids + list(entry.new_block_ids)
            end = entry.start + entry.num_tokens + entry.num_drafts
            blocks = held[row.num_computed // size * groups : -(-end // size) * groups]
            if end * groups > size * len(held):
                problems.append(f"{entry} has no blocks for all of its tokens")
            if 0 in blocks or written & set(blocks):
                problems.append(f"{entry} writes to blocks {blocks}, which are not its own")
            kept = [self.config.first_kept(group, row.num_computed) for group in range(groups)]
            lacking = (place for place, block in enumerate(held) if block == 0)
            if any(place // groups >= kept[place % groups] for place in lacking):
                problems.append(f"{entry} lacks blocks that it looks at: {held}")
            written.update(blocks)
            owned = [block for state in row.admission.state_ids for block in state]
            if (
                0 in owned
                or written & set(owned)
                or len(set(owned)) != self.config.num_state_blocks
            ):
                problems.append(f"{entry} has the states {owned}, which are not its own")
            written.update(owned)
        self.violations.extend(f"step {step.step_id}: {problem}" for problem in problems)

    def _compute(self, row: _Row, entry: ScheduledRequest, broken: bool) -> list[int]:
        """Computes an entry's tokens from where the row stands; returns those drawn after the last
        real one and after every draft token that was right.
        """
        start = row.num_computed
        memory = self._memory(row)
        context = memory.states[0]
        num_known = start + entry.num_tokens - len(entry.draft_tokens)
        given = [*row.token_ids[start:num_known], *entry.draft_tokens]
        for position, token_id in enumerate(given, start=start):
            seen = memory.visible(position)
            state = 0 if broken else token_state(position, token_id, seen, row.salts[position])
            self._write(row, position, state)
            memory.add(state)
        for chunk in sorted(memory.made)[-2:]:
            self._write_state(row.admission.state_ids[chunk % 2], memory.made[chunk])
        self.num_computed_tokens += len(given)
        row.sum_of_states += sum(context[start:num_known])
        row.last_state = context[num_known - 1]
        drawn = [self._draw(row, context, num_known)]
        for position, draft_token in enumerate(entry.draft_tokens, start=num_known):
            if drawn[-1] != draft_token:
                break
            drawn.append(self._draw(row, context, position + 1))
        row.num_computed = num_known + len(drawn) - 1
        return drawn

    def _memory(self, row: _Row) -> Memory:
        """What the row's blocks hold of the tokens computed so far; whatever lies there where one
        was given up.
        """
        groups, spec = self.config.num_groups, self.config.state
        lanes = (row.block_ids[group::groups] for group in range(groups))
        states = [
            [state for block in lane for state in self._device[block]][: row.num_computed]
            for lane in lanes
        ]
        if spec is None or row.num_computed < spec.chunk:
            return Memory(self.config, states)
        return Memory(
            self.config,
            states,
            self._read_state(row.admission.state_ids[row.num_computed // spec.chunk % 2]),
        )

    def _write_state(self, blocks: Sequence[int], state: int) -> None:
        """Each block has a part of it."""
        for number, block in enumerate(blocks):
            self._device[block] = [state + number] * self.config.block_size

    def _read_state(self, blocks: Sequence[int]) -> int:
        parts = [self._device[block][0] - number for number, block in enumerate(blocks)]
        return parts[0] if len(set(parts)) == 1 else hash(tuple(parts))

    def _write(self, row: _Row, position: int, state: int) -> None:
        size, groups = self.config.block_size, self.config.num_groups
        for block in row.block_ids[position // size * groups : (position // size + 1) * groups]:
            self._device[block][position % size] = state

    def _draft(self, row: _Row, count: int) -> list[int]:
        """Tokens that may follow, some of them wrong. As a model that drafts on the same cache
        does, it writes what is no good to the places of the drawn token and of all drafts but the
        last.
        """
        memory = self._memory(row)
        context, token_id = memory.states[0], row.token_ids[-1]
        # the state of a chunk that begins with drafts has no place
        if self.config.state is not None:
            count = min(
                count, self.config.state.chunk - 1 - row.num_computed % self.config.state.chunk
            )
        drafts = []
        for position in range(row.num_computed, row.num_computed + count):
            memory.add(
                token_state(position, token_id, memory.visible(position), row.salts[position])
            )
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

    def _score_prompt(self, row: _Row, start: int, num_tokens: int) -> PromptLogprobs | None:
        """The positions that the tokens just computed predict, as far as they are in the prompt and
        wanted.
        """
        admission = row.admission
        if admission.score_prompt_from is None:
            return None
        first = max(start + 1, admission.score_prompt_from)
        end = min(start + num_tokens + 1, admission.num_prompt_tokens)
        if first >= end:
            return None
        size, groups = self.config.block_size, self.config.num_groups
        states = [
            self._device[row.block_ids[p // size * groups]][p % size]
            for p in range(first - 1, end - 1)
        ]
        tokens = admission.token_ids[first:end]
        return PromptLogprobs(first, tuple(map(fake_score, states, tokens)))
