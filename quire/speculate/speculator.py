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
"""About so many searches in vain a step are made, and no more than one in a millisecond: with many requests or short
steps they add up."""
_LONGEST_PAUSE = 64
"""In steps, after searches in vain: what begins to repeat itself is noticed after that."""
_LONGEST_REST = 16
"""In steps, where guesses don't pay: other requests may end meanwhile, and then they do."""
_MAX_INDEXED = 8192
"""Tokens that are taken into an index at once: a long prompt is spread over the steps that compute it."""


class DraftedRequest(Protocol):
    """What is to be known of a request; the engine's own has it all."""

    token_ids: list[int]
    num_placeholders: int
    draft_state: Any
    """Kept here between calls."""
    guess_pause: int
    """For so many steps `guess` is not called again; -1: ever."""

    params: SamplingParams
    resolved: ResolvedTokens
    drafts: Sequence[int]
    accepted_tokens: int
    num_rejections: int
    stop_ids: frozenset[int]

    @property
    def num_prompt_tokens(self) -> int: ...


class _DraftState:
    __slots__ = ("acceptance", "asks_runner", "index", "num_missed", "prediction")

    def __init__(self, prediction: tuple[int, ...], chance: float, num_missed: int, asks_runner: bool) -> None:
        self.asks_runner = asks_runner
        """Whether there may be guesses at any time, wherever else nothing is found: then there is no pause."""
        self.num_missed = num_missed
        """Searches in vain one after the other."""
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
        self._num_missed = 0.0
        """Searches in vain one after the other, likewise."""
        self._longest_pause = 0
        """After those, in steps."""

    def observe(self, entry: StepLogEntry) -> None:
        """Listens to the steps, to know what they cost."""
        costs = self._costs
        costs.observe(entry)
        searches = max(min(_SEARCHES, 1e3 * costs.seconds), 0.01)
        self._longest_pause = min(int(costs.num_requests / searches), _LONGEST_PAUSE)

    def guess(self, request: DraftedRequest, most: int) -> Sequence[int]:
        """At most so many tokens that may follow all of a request's tokens, those in flight included but for the one
        that is about to be drawn; as if those had all come as guessed."""
        state = request.draft_state or self._state(request)
        if state is None:
            return ()
        token_ids, ahead = request.token_ids, request.num_placeholders - 1
        drafted = len(request.drafts) - ahead  # as many as were worth it
        most = min(most, drafted) if drafted > 0 else self._count(request, state, most)
        if not most:
            if not state.asks_runner:
                request.guess_pause = state.acceptance.rest(_LONGEST_REST)
            return ()
        found: Sequence[int] = ()
        if state.prediction is not None:
            found = state.prediction.guess(token_ids[request.num_prompt_tokens :], ahead + most)
            if found and max(found) >= self._vocab_size:  # tokenizers know more tokens than some models
                found = ()
        if len(found) <= ahead:
            found = request.drafts
        if len(found) <= ahead and self._ngrams:
            place = state.index.follow(token_ids)
            if place < 0:
                place = self._search(request, state)
            if place >= 0:
                state.num_missed = 0
                found = continuation(token_ids, place, ahead + most)
        if not request.stop_ids.isdisjoint(found):  # nothing comes after the end
            found = found[: 1 + min(found.index(token) for token in request.stop_ids if token in found)]
        return found[ahead : ahead + most]

    def num_drafts(self, request: DraftedRequest) -> int:
        """How many tokens the runner should draft behind those that the step about to be made draws."""
        state = request.draft_state or self._state(request)
        return self._count(request, state, MAX_GUESSES) if state is not None and state.asks_runner else 0

    def _state(self, request: DraftedRequest) -> _DraftState | None:
        """None where there can be no guesses for a request at all."""
        prediction, params = request.resolved.prediction_ids, request.params
        has_source = self._ngrams or self._runner_drafts or prediction
        # A request's own functions are called once for every token of the answer, and for no other.
        if not has_source or not params.speculation or params.logits_processors:
            request.guess_pause = -1
            return None
        asks_runner = self._runner_drafts or (self._ngrams and params.structured is not None)
        request.draft_state = state = _DraftState(prediction, self._chance, round(self._num_missed), asks_runner)
        return state

    def _search(self, request: DraftedRequest, state: _DraftState) -> int:
        """Where the text goes on as it has before, -1 if nowhere; then there is none for a while, longer each time."""
        if not state.index.extend(request.token_ids, _MAX_INDEXED):
            return -1
        place = state.index.find(request.token_ids)
        if place < 0:
            state.num_missed = min(state.num_missed + 1, 6)
            if not state.asks_runner:
                request.guess_pause = min(1 << state.num_missed, self._longest_pause)
        self._num_missed += 0.05 * (state.num_missed * (place < 0) - self._num_missed)
        return place

    def _count(self, request: DraftedRequest, state: _DraftState, most: int) -> int:
        if not self._adaptive:
            return min(most, MAX_GUESSES)
        acceptance = state.acceptance
        if request.accepted_tokens != acceptance.num_right or request.num_rejections != acceptance.num_wrong:
            acceptance.learn(request.accepted_tokens, request.num_rejections)
            self._chance += 0.05 * (acceptance.chance - self._chance)
        return acceptance.count(self._costs, min(most, MAX_GUESSES))
