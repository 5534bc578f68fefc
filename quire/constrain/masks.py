"""Masks of allowed tokens for the requests of a runner, computed while the model runs.

The order of calls (`step_grammars` makes them): a request row is admitted with its grammar; for
each step the masks of the request rows that draw are started, taken when the logits are there
(which sends them to the device without waiting for it), and, when the sampled tokens have arrived,
the grammars advance by them, with the epochs the masks came with. A step without constrained
requests costs one look at an array of flags.

A runner that is a step ahead learns the tokens of a step late: before it starts the masks of the
next one, but maybe after it has dropped a request row or given it to another request. Tokens of an
earlier epoch are nobody's and are left out. Masks that were started too early, before a token they
depend on was known, are computed again when they are taken.

Where it meets other controls:
- Only tokens of text are ever allowed, and the end-of-sequence tokens where the text may end. So a
  grammar can't have the model write control tokens, not even a Lark grammar that names one, unless
  the request says so (`StructuredOutput.control_tokens`).
- The request ends when nothing can follow, or with an end-of-sequence token, `ignore_eos` or not.
- `min_tokens` forbids ends where the text could also go on. Where only an end can follow, the
  grammar wins.
- Stop strings and stop tokens end an answer as ever, so possibly before its text is a whole one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.constrain.ahead import AheadMask, MasksAhead
from quire.constrain.grammar import Grammar, GrammarCompiler, GrammarState, Vocabulary
from quire.constrain.guidance import import_llguidance
from quire.errors import QuireError
from quire.sampling.metadata import Indices
from quire.sampling.upload import Uploader
from quire.sampling_params import StructuredOutput

if TYPE_CHECKING:
    import llguidance

Words = npt.NDArray[np.int32]
_MAX_THREADS = 4


@dataclass(frozen=True, slots=True)
class GrammarMasks:
    """What the samples of one step may choose from, in the order of the request rows they were
    asked for.
    """

    request_rows: Indices
    words: Tensor
    """int32 [samples, ceil(vocab / 32)]; bit i % 32 of word i // 32 says whether token i is
    allowed.
    """
    masked: npt.NDArray[np.bool_]
    """Which samples have a grammar; the words of the others allow everything."""
    only_ends: npt.NDArray[np.bool_]
    """Samples whose grammar leaves nothing but what `min_tokens` forbids: there it must not be
    forbidden.
    """
    errors: dict[int, str]
    """Request rows whose requests fail, and why."""
    epochs: Indices
    """Whose turn the request rows were, for `Constrainer.advance`."""
    undefined: npt.NDArray[np.bool_]
    """Samples that follow a draft token after which the grammar has no say: it forbids the draft
    token, or has ended with it, or came to a limit on this way. Nothing may be sampled there.
    """


@dataclass(frozen=True, slots=True)
class Advanced:
    """What became of the request rows that took a token."""

    ended: frozenset[int] = frozenset()
    """Those whose grammar has come to its end with this token."""
    errors: dict[int, str] = field(default_factory=dict)
    forced: dict[int, list[int]] = field(default_factory=dict)
    """Tokens that spell what must follow, where that was asked for; the text may yet be cut into
    others.
    """


class Constrainer:
    """The grammars of request rows. Used by one thread; masks are computed in others."""

    def __init__(
        self, compiler: GrammarCompiler, max_num_seqs: int, vocab_size: int, device: torch.device
    ) -> None:
        self._compiler = compiler
        self._uploader = Uploader(device)
        self._num_words = -(-vocab_size // 32)
        self._max_num_seqs = max_num_seqs
        self._states: dict[int, GrammarState] = {}
        self._is_constrained = np.zeros(max_num_seqs, dtype=np.bool_)
        self._broken: dict[int, str] = {}
        """Rows that can't have their grammar, and why."""
        self._ends: dict[int, Words] = {}
        """By row, the tokens that `min_tokens` forbids; rows without it are not here."""
        self._epochs = np.zeros(max_num_seqs, dtype=np.int64)
        """Counts a row's admissions and departures, so that a late token finds its request or
        nobody.
        """
        self._worker: _MaskWorker | None = None
        self._started: tuple[dict[int, GrammarState], Future[dict[int, str]]] | None = None
        """Masks in the making: of which states, and what will be wrong with them."""
        self._ahead = MasksAhead()

    def admit(
        self,
        row: int,
        structured: StructuredOutput,
        output_token_ids: Sequence[int] = (),
        end_token_ids: Sequence[int] = (),
    ) -> None:
        """Gives a row its grammar, which was compiled once at the border already.

        `output_token_ids` is the answer so far, after a preemption; `end_token_ids` is what
        `min_tokens` forbids, empty without it.
        """
        self.drop(row)
        self._epochs[row] += 1
        self._is_constrained[row] = True
        try:
            grammar = self._compiler.compile(structured)
        except (
            QuireError
        ) as error:  # it was good at the border, so this is bad luck: only this request's
            self._broken[row] = str(error)
            return
        if self._worker is None:
            self._worker = _MaskWorker(grammar.vocabulary, self._max_num_seqs)
        self._states[row] = GrammarState(grammar, output_token_ids)
        if end_token_ids:
            self._ends[row] = _packed(end_token_ids, self._num_words)

    def drop(self, row: int) -> None:
        """The row's request has left it, constrained or not."""
        if self._is_constrained[row]:
            self._epochs[row] += 1
            self._ahead.drop(row)
            for by_row in (self._states, self._broken, self._ends):
                by_row.pop(row, None)
            self._is_constrained[row] = False

    def constrains(self, request_rows: Indices) -> bool:
        """Whether one of `request_rows` has a grammar."""
        return bool(self._is_constrained[request_rows].any())

    def start(self, request_rows: Indices) -> None:
        """Begins with the masks of those of `request_rows` that have a grammar."""
        self._settle()
        states = self._started_in_step(request_rows)
        if states:
            assert self._worker is not None
            self._started = (
                states,
                self._worker.thread.submit(self._worker.compute, states, self._worker.words),
            )

    def masks(self, request_rows: Indices, follows: Indices | None = None) -> GrammarMasks | None:
        """The masks of `request_rows`; None if none of them has a grammar. Waits for those that
        were started. A row may stand here several times in a row: then `follows` has the draft
        token that each sample comes after, -1 for the first.
        """
        masked = self._is_constrained[request_rows]
        if not masked.any():
            return None
        errors = {row: self._broken[row] for row in request_rows.tolist() if row in self._broken}
        words = np.full((len(request_rows), self._num_words), -1, dtype=np.int32)
        states = self._states_of(request_rows)
        in_step = self._started_in_step(request_rows)
        if in_step:
            if self._started is None or self._started[0] != in_step:
                self.start(request_rows)
            assert self._started is not None
            assert self._worker is not None
            errors |= self._started[1].result()
            self._started = None
            computed = np.fromiter(
                (row in in_step for row in request_rows.tolist()), np.bool_, len(request_rows)
            )
            words[computed] = self._worker.words[request_rows[computed]]
        for row, state in states.items():
            if row not in in_step:
                words[request_rows == row], error = self._ahead.take(row)
                errors |= {row: error} if error else {}
            if not state.grammar.costs.is_cheap:
                self._ahead.samples(row)
        undefined = np.zeros(len(request_rows), dtype=np.bool_)
        if follows is not None and states:
            self._follow_draft_tokens(request_rows, follows, words, undefined)
        only_ends = np.zeros(len(request_rows), dtype=np.bool_)
        for i in np.flatnonzero(masked).tolist() if self._ends else ():
            ends = self._ends.get(int(request_rows[i]))
            only_ends[i] = ends is not None and not (words[i] & ~ends).any()
        (sent,) = self._uploader.upload(words)
        return GrammarMasks(
            request_rows, sent, masked, only_ends, errors, self._epochs[request_rows], undefined
        )

    def _follow_draft_tokens(
        self,
        request_rows: Indices,
        follows: Indices,
        words: Words,
        undefined: npt.NDArray[np.bool_],
    ) -> None:
        """Fills the words of samples behind draft tokens, from copies of the states that go on
        with these. All rows' first draft tokens at once, then their second ones, and so on.
        """
        assert self._worker is not None
        places = np.flatnonzero(follows >= 0)
        undefined[places] = self._is_constrained[request_rows[places]]
        walking: dict[int, llguidance.LLMatcher] = {}
        """By sample, a copy that has taken all draft tokens before it."""
        for place in places[follows[places - 1] < 0].tolist():
            state = self._states.get(int(request_rows[place]))
            # A state with an automaton of its own must not have it filled by what is perhaps never
            # said. What is expensive for one sample is so for every draft token.
            may_walk = (
                state is not None
                and not state.is_private
                and state.grammar.costs.allows_draft_tokens
            )
            if (
                state is not None
                and may_walk
                and not state.is_finished
                and not state.matcher.is_error()
            ):
                walking[place] = state.matcher.deep_copy()
        while walking:
            there: dict[int, llguidance.LLMatcher] = {}
            for place, matcher in walking.items():
                draft_token = int(follows[place])
                is_allowed = bool(words[place - 1, draft_token // 32] >> draft_token % 32 & 1)
                if is_allowed and matcher.consume_token(draft_token) and not matcher.is_stopped():
                    there[place] = matcher
            grammars = {place: self._states[int(request_rows[place])].grammar for place in there}
            found = self._worker.fill_ahead(there, grammars, words)
            for place in found:
                undefined[place] = False
            walking = {
                place + 1: there[place]
                for place in found
                if place + 1 < len(follows)
                and follows[place + 1] >= 0
                and request_rows[place + 1] == request_rows[place]
            }

    def advance(
        self,
        request_rows: Indices,
        tokens: Sequence[int],
        epochs: Indices | None = None,
        asks_forced: Sequence[bool] = (),
    ) -> Advanced:
        """Tells the grammars which tokens their request rows drew. `epochs` are those of the masks
        they were sampled with: a row that was dropped or admitted since is passed over. None: no
        row was. `asks_forced` says behind which tokens it is to be found what must follow.
        """
        due = self._is_constrained[request_rows]
        if epochs is not None:
            due &= self._epochs[request_rows] == epochs
        if not due.any():
            return Advanced()
        # masks that were started before this are of no use, and read what is changed here
        self._settle()
        ended: set[int] = set()
        errors: dict[int, str] = {}
        forced: dict[int, list[int]] = {}
        expensive: dict[int, GrammarState] = {}
        for place, (row, token, is_due) in enumerate(
            zip(request_rows.tolist(), tokens, due.tolist(), strict=True)
        ):
            state = self._states.get(row) if is_due else None
            self._ahead.drew(row)
            expensive.pop(row, None)
            # sampled before that was known: nobody's
            is_over = state is not None and state.is_finished
            if state is None or is_over:
                continue
            if not state.advance(token):
                errors[row] = _explain(state.error)
            elif state.is_finished:
                ended.add(row)
            else:
                if asks_forced and asks_forced[place] and state.grammar.costs.allows_draft_tokens:
                    forced[row] = state.forced_tokens()
                if not state.grammar.costs.is_cheap:
                    expensive[row] = state
        # Not before: a row may have taken several tokens, and while its mask is computed nobody
        # else may touch its state.
        for row, state in expensive.items():
            assert self._worker is not None
            self._ahead.begin(row, partial(self._worker.compute_one, state))
        return Advanced(frozenset(ended), errors, forced)

    def held_rows(self) -> frozenset[int]:
        """Rows whose masks take long and are not there yet: they can't draw without keeping others
        waiting.
        """
        return self._ahead.held_rows()

    def wait_for_held(self) -> None:
        """For whoever has nothing else to do."""
        self._ahead.wait()

    def close(self) -> None:
        """Ends the threads."""
        self._settle()
        self._ahead.close()
        if self._worker is not None:
            self._worker.thread.shutdown()

    def _states_of(self, request_rows: Indices) -> dict[int, GrammarState]:
        constrained = request_rows[self._is_constrained[request_rows]].tolist()
        return {row: self._states[row] for row in constrained if row in self._states}

    def _started_in_step(self, request_rows: Indices) -> dict[int, GrammarState]:
        """Those whose masks were not begun ahead."""
        return {
            row: state
            for row, state in self._states_of(request_rows).items()
            if row not in self._ahead
        }

    def _settle(self) -> None:
        """Waits for masks that nobody took, as after an error in the model: they use the same
        memory.
        """
        if self._started is not None:
            self._started[1].exception()
            self._started = None


class _MaskWorker:
    """Computes masks into memory of its own, one row of words for each of the runner's rows."""

    def __init__(self, vocabulary: Vocabulary, max_num_seqs: int) -> None:
        num_words = -(-vocabulary.size // 32)
        self.words: Words = np.zeros((max_num_seqs, num_words), dtype=np.int32)
        self._text = _packed(vocabulary.text_token_ids, num_words)
        self._text_and_ends = self._text | _packed(vocabulary.eos_token_ids, num_words)
        threads = min(_MAX_THREADS, os.cpu_count() or 1)
        self._num_threads = threads
        self._executor: llguidance.LLExecutor = import_llguidance().LLExecutor(num_threads=threads)
        # One thread waits for llguidance's own ones, so that the caller need not.
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="quire-masks")

    def compute_one(self, state: GrammarState) -> AheadMask:
        """The words of one row, in memory of their own: the row may have gone to another request by
        then.
        """
        words: Words = np.zeros((1, self.words.shape[1]), dtype=np.int32)
        errors = self.compute({0: state}, words)
        return AheadMask(words[0], errors.get(0, ""))

    def compute(self, states: Mapping[int, GrammarState], out: Words) -> dict[int, str]:
        """Fills the rows' words in `out`; returns the rows that can't go on, and why. Notes what
        each grammar took, but for first masks, which are there already.
        """
        computed = [state for state in states.values() if not state.is_at_start]
        started = time.monotonic()
        errors = self._compute(states, out)
        if computed:
            count = len(computed)
            seconds = (time.monotonic() - started) * min(self._num_threads, count) / count
            for grammar in {id(state.grammar): state.grammar for state in computed}.values():
                grammar.costs.note(seconds)
        return errors

    def _compute(self, states: Mapping[int, GrammarState], out: Words) -> dict[int, str]:
        self._fill(states, out)
        # Whoever stumbled over an automaton that others filled up gets one of its own and tries
        # again.
        again = {
            row: state
            for row, state in states.items()
            if state.matcher.is_error() and state.start_over()
        }
        if again:
            self._fill(again, out)
        rows = np.fromiter(states, np.int64, len(states))
        may_end = np.fromiter((state.may_end for state in states.values()), np.bool_, len(states))
        # llguidance lets a complement (~) or a token wildcard match control tokens, ends included.
        allowed = np.where(may_end[:, None], self._text_and_ends, self._text)
        for place, state in enumerate(states.values()):
            if state.grammar.control_token_ids:
                allowed[place] |= self._control(state.grammar)
        words = out[rows] & allowed
        out[rows] = words
        is_empty: list[bool] = (words == 0).all(axis=1).tolist()
        errors: dict[int, str] = {}
        for (row, state), nothing_left in zip(states.items(), is_empty, strict=True):
            if state.is_finished:
                # its end was not known when it was scheduled again: nobody will see it
                out[row] = self._text
            elif nothing_left or state.matcher.is_error():
                errors[row] = _explain(state.error or "it leaves no token to choose")
                out[row] = self._text
        return errors

    def _control(self, grammar: Grammar) -> Words:
        return _packed(grammar.control_token_ids, self.words.shape[1])

    def fill_ahead(
        self,
        matchers: Mapping[int, llguidance.LLMatcher],
        grammars: Mapping[int, Grammar],
        words: Words,
    ) -> list[int]:
        """Fills some rows of words of the caller's own; returns those that allow anything."""
        if not matchers:
            return []
        count, num_words = words.shape
        pairs = [(matcher, place) for place, matcher in matchers.items()]
        self._executor.unsafe_compute_mask_ptr(pairs, words.ctypes.data, num_words * 4, count)
        found = []
        for place, matcher in matchers.items():
            allowed = self._text_and_ends if matcher.is_accepting() else self._text
            words[place] &= allowed | self._control(grammars[place])
            if not matcher.is_error() and words[place].any():
                found.append(place)
            else:
                words[place] = -1
        return found

    def _fill(self, states: Mapping[int, GrammarState], out: Words) -> None:
        count, num_words = out.shape
        matchers = []
        for row, state in states.items():
            if state.is_at_start:
                # llguidance adds a word where the vocabulary fills all of them
                out[row] = np.frombuffer(state.grammar.first_mask, np.int32, num_words)
            else:
                matchers.append((state.matcher, row))
        if matchers:
            self._executor.unsafe_compute_mask_ptr(matchers, out.ctypes.data, num_words * 4, count)


def _explain(error: str) -> str:
    return f"structured: the grammar failed on this answer: {error}"


def _packed(token_ids: Sequence[int], num_words: int) -> Words:
    bits = np.zeros(num_words * 32, dtype=np.uint8)
    bits[list(token_ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)
