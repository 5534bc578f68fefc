"""The engine's source of guesses: what the scheduler asks for each request that is about to draw a token.

Guesses come from, in this order: the client's prediction, what the runner has found (a draft model, a grammar that
leaves no choice), and the text itself (n-grams). Whether a guess is right is decided by the runner, which draws every
token as ever; so an answer never depends on anything here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from quire.sampling_params import ResolvedTokens, SamplingParams
from quire.speculate.adaptive import MAX_GUESSES, Acceptance, StepCosts
from quire.speculate.ngram import NgramIndex, continuation
from quire.speculate.prediction import PredictedAnswer
from quire.step import StepLogEntry

_SEARCHES = 24
"""About so many searches in vain a step are made."""
_MAX_INDEXED = 8192
"""Tokens that are taken into an index at once: a long prompt is spread over the steps that compute it."""


class DraftedRequest(Protocol):
    """What is to be known of a request; the engine's own has it all."""

    token_ids: list[int]
    num_placeholders: int
    draft_state: Any
    """Kept here between calls; False where nothing is ever guessed."""

    params: SamplingParams
    resolved: ResolvedTokens
    drafts: Sequence[int]
    accepted_tokens: int
    num_rejections: int
    stop_ids: frozenset[int]

    @property
    def num_prompt_tokens(self) -> int: ...


class _DraftState:
    __slots__ = ("acceptance", "index", "num_missed", "pause", "prediction")

    def __init__(self, prediction: tuple[int, ...], chance: float) -> None:
        self.num_missed = self.pause = 0
        """Searches in vain, and how many times there is no search because of them."""
        self.acceptance = Acceptance(chance)
        self.index = NgramIndex()
        self.prediction = PredictedAnswer(prediction) if prediction else None


class Speculator:
    """Guesses for all requests of an engine."""

    def __init__(
        self, vocab_size: int, ngrams: bool = False, runner_drafts: bool = False, adaptive: bool = True
    ) -> None:
        """`ngrams`: look for repetitions; `runner_drafts`: the runner is asked for drafts; without both only the
        predictions of clients count. Not `adaptive`: all guesses there can be, whatever comes of them."""
        self._vocab_size = vocab_size
        self._ngrams = ngrams
        self._runner_drafts = runner_drafts
        self._adaptive = adaptive
        self._costs = StepCosts()
        self._chance = 0.7
        """Of guesses to be right, over all requests: what is expected of a new one."""

    def observe(self, entry: StepLogEntry) -> None:
        """Listens to the steps, to know what they cost."""
        self._costs.observe(entry)

    def guess(self, request: DraftedRequest, most: int) -> Sequence[int]:
        """At most so many tokens that may follow all of a request's tokens, those in flight included but for the one
        that is about to be drawn; as if those had all come as guessed."""
        state = request.draft_state or self._state(request)
        if state is None:
            return ()
        if state.pause and not request.drafts:
            state.pause -= 1
            return ()
        token_ids, ahead = request.token_ids, request.num_placeholders - 1
        drafted = len(request.drafts) - ahead  # as many as were worth it
        most = min(most, drafted) if drafted > 0 else self._count(request, state, most)
        if not most:
            return ()
        found: Sequence[int] = ()
        if state.prediction is not None:
            found = state.prediction.guess(token_ids[request.num_prompt_tokens :], ahead + most)
            if found and max(found) >= self._vocab_size:  # tokenizers know more tokens than some models
                found = ()
        if len(found) <= ahead:
            found = request.drafts
        if len(found) <= ahead and self._ngrams:
            index = state.index
            place = index.follow(token_ids)
            if place < 0 and index.extend(token_ids, _MAX_INDEXED):
                place = index.find(token_ids)
                # With many requests the searches of those who find nothing add up.
                state.num_missed = 0 if place >= 0 else state.num_missed + 1
                state.pause = min(state.num_missed, self._costs.num_requests // _SEARCHES)
            if place >= 0:
                found = continuation(token_ids, place, ahead + most)
        if not request.stop_ids.isdisjoint(found):  # nothing comes after the end
            found = found[: 1 + min(found.index(token) for token in request.stop_ids if token in found)]
        return found[ahead : ahead + most]

    def num_drafts(self, request: DraftedRequest) -> int:
        """How many tokens the runner should draft behind those that the step about to be made draws."""
        if not self._runner_drafts and (not self._ngrams or request.params.structured is None):
            return 0
        state = self._state(request)
        return 0 if state is None else self._count(request, state, MAX_GUESSES)

    def _state(self, request: DraftedRequest) -> _DraftState | None:
        """None where there can be no guesses for a request at all."""
        if request.draft_state is None:
            can = self._ngrams or self._runner_drafts or bool(request.resolved.prediction_ids)
            # A request's own functions are called once for every token of the answer, and for no other.
            is_used = can and request.params.speculation and not request.params.logits_processors
            request.draft_state = _DraftState(request.resolved.prediction_ids, self._chance) if is_used else False
        return request.draft_state or None

    def _count(self, request: DraftedRequest, state: _DraftState, most: int) -> int:
        if not self._adaptive:
            return min(most, MAX_GUESSES)
        acceptance = state.acceptance
        if request.accepted_tokens != acceptance.num_right or request.num_rejections != acceptance.num_wrong:
            acceptance.learn(request.accepted_tokens, request.num_rejections)
            self._chance += 0.05 * (acceptance.chance - self._chance)
        return acceptance.count(self._costs, min(most, MAX_GUESSES))
