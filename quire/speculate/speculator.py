"""The engine's source of draft tokens: the scheduler asks it for each request that is about to
sample a token.

Draft tokens come from, in this order: the client's prediction, the runner's drafts (a draft model,
or the only text that a grammar allows), and the text itself (n-grams). The runner samples every
token as it would without draft tokens and keeps those that equal it, so no answer depends on
anything here.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.engine.request import Request
from quire.speculate.adaptive import MAX_DRAFT_TOKENS, Acceptance, StepTimeModel
from quire.speculate.ngram import NgramIndex, continuation
from quire.speculate.prediction import PredictedAnswer
from quire.step import StepLogEntry

_SEARCHES = 24
"""About this many failed n-gram searches are made per step, and at most one per millisecond of its
time.
"""
_LONGEST_PAUSE = 64
"""The most steps without a search after failed ones: a text that begins to repeat itself is noticed
then.
"""
_LONGEST_REST = 16
"""The most steps without draft tokens where they don't pay: when other requests end they may."""
_MAX_INDEXED = 8192
"""The most tokens that one search indexes: the work for a long prompt is spread over several steps."""


class _DraftState:
    __slots__ = ("acceptance", "asks_runner", "index", "num_missed", "prediction")

    def __init__(
        self, prediction: tuple[int, ...], chance: float, num_missed: int, asks_runner: bool
    ) -> None:
        self.asks_runner = asks_runner
        """Whether the runner may have drafts at any step: then `propose` is called at every step,
        without pauses.
        """
        self.num_missed = num_missed
        """How many searches in a row have failed."""
        self.acceptance = Acceptance(chance)
        self.index = NgramIndex()
        self.prediction = PredictedAnswer(prediction) if prediction else None


class Speculator:
    """Draft tokens for all requests of an engine."""

    def __init__(
        self,
        vocab_size: int,
        ngrams: bool = False,
        runner_drafts: bool = False,
        adaptive: bool = True,
        num_tokens: int | None = None,
    ) -> None:
        """`ngrams`: look for repetitions in the text; `runner_drafts`: ask the runner for drafts.
        Without both, only clients' predictions are used. Without `adaptive`, always as many draft
        tokens as possible, right or wrong; with `num_tokens`, always so many.
        """
        self._vocab_size = vocab_size
        self._ngrams = ngrams
        self._runner_drafts = runner_drafts
        self._adaptive = adaptive and num_tokens is None
        self._most = MAX_DRAFT_TOKENS if num_tokens is None else num_tokens
        self._costs = StepTimeModel()
        self._chance = 0.7
        """How often draft tokens are right, over all requests: the first estimate for a new one."""
        self._num_missed = 0.0
        """How many searches in a row fail, over all requests: the first value for a new one."""
        self._longest_pause = 0
        """The most steps without a search after failed ones."""

    def observe(self, entry: StepLogEntry) -> None:
        """Takes in the time of a step that is over."""
        self._costs.observe(entry)
        searches = max(min(_SEARCHES, 1e3 * self._costs.seconds), 0.01)
        self._longest_pause = min(int(self._costs.num_requests / searches), _LONGEST_PAUSE)

    def propose(self, request: Request, most: int) -> Sequence[int]:
        """At most `most` draft tokens for the step being scheduled, to follow the request's tokens
        and those that steps in flight sample, on the assumption that these turn out as drafted.
        """
        state = request.draft_state or self._state(request)
        if state is None:
            return ()
        token_ids, ahead = request.token_ids, request.num_placeholders - 1
        drafted = len(request.drafts) - ahead  # as many as `num_drafts` found worthwhile
        most = min(most, drafted) if drafted > 0 else self._count(request, state, most)
        if not most:
            if not state.asks_runner:
                request.draft_pause = state.acceptance.rest(_LONGEST_REST)
            return ()
        found: Sequence[int] = ()
        if state.prediction is not None:
            found = state.prediction.propose(token_ids[request.num_prompt_tokens :], ahead + most)
            # some tokenizers have more tokens than the model
            if found and max(found) >= self._vocab_size:
                found = ()
        if len(found) <= ahead and len(found := request.drafts) <= ahead and self._ngrams:
            place = state.index.follow(token_ids)
            if place < 0:
                place = self._search(request, state)
            if place >= 0:
                state.num_missed = 0
                found = continuation(token_ids, place, ahead + most)
        if not request.stop_ids.isdisjoint(found):  # nothing comes after the end
            found = found[
                : 1 + min(found.index(token) for token in request.stop_ids if token in found)
            ]
        return found[ahead : ahead + most]

    def num_drafts(self, request: Request) -> int:
        """How many tokens the runner should draft after those that the step being scheduled
        samples.
        """
        state = request.draft_state or self._state(request)
        return (
            self._count(request, state, self._most)
            if state is not None and state.asks_runner
            else 0
        )

    def _state(self, request: Request) -> _DraftState | None:
        """Makes a request's state; None where it can't have draft tokens at all."""
        prediction, params = request.resolved.prediction_ids, request.params
        has_source = self._ngrams or self._runner_drafts or prediction
        # Logits processors must be called exactly once per token of the answer, not for draft
        # tokens.
        if not has_source or not params.speculation or params.logits_processors:
            request.draft_pause = -1
            return None
        asks_runner = self._runner_drafts or (self._ngrams and params.structured is not None)
        request.draft_state = state = _DraftState(
            prediction, self._chance, round(self._num_missed), asks_runner
        )
        return state

    def _search(self, request: Request, state: _DraftState) -> int:
        """The position of the next draft token by an n-gram search. -1 if it fails, and then a
        pause, longer each time.
        """
        if not state.index.extend(request.token_ids, _MAX_INDEXED):
            return -1
        place = state.index.find(request.token_ids)
        if place < 0:
            state.num_missed = min(state.num_missed + 1, 6)
            if not state.asks_runner:
                request.draft_pause = min(1 << state.num_missed, self._longest_pause)
        self._num_missed += 0.05 * (state.num_missed * (place < 0) - self._num_missed)
        return place

    def _count(self, request: Request, state: _DraftState, most: int) -> int:
        if not self._adaptive:
            return min(most, self._most)
        acceptance = state.acceptance
        if (
            request.accepted_tokens != acceptance.num_right
            or request.num_rejections != acceptance.num_wrong
        ):
            acceptance.learn(request.accepted_tokens, request.num_rejections)
            self._chance += 0.05 * (acceptance.chance - self._chance)
        return acceptance.count(self._costs, min(most, MAX_DRAFT_TOKENS))
