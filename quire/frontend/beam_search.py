"""Beam search: the likeliest continuations, found by following the best few at once.

At every step each live beam is followed by every token. From the likeliest of all these downwards,
those that end with an end token are finished, and the others go on, until there are `beam_width` of
them. The answer are the `beam_width` best of what is finished, by `cumulative_logprob / length **
length_penalty`, where the length counts the new tokens, the end token among them; what is still
live after `max_tokens` counts as finished. The search ends early only when nothing live can get
among the best any more.

In the engine every beam is a request for one token, of which only the likeliest ones and their
logprobs matter. The beams that go on from it are requests whose prompt is its own and one token
more; they find what it has computed in the prefix cache, its last, partly filled block included, so
each computes one token (without prefix caching: all of them).
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from quire.engine import EngineCore, make_requests
from quire.errors import InvalidRequestError, QuireError
from quire.field_checks import check_bool, check_int, check_real, checked_ids
from quire.frontend.detokenizer import IncrementalDetokenizer
from quire.frontend.tokenizer import Tokenizer
from quire.sampling_params import MAX_LOGPROBS, ResolvedTokens, SamplingParams
from quire.step import RequestUpdate

Continuations = Sequence[tuple[int, float]]
"""(token id, logprob) of the most likely next tokens, the likeliest first."""


@dataclass(frozen=True, slots=True)
class BeamSearchParams:
    """How to search; checked once."""

    beam_width: int
    max_tokens: int
    length_penalty: float
    end_token_ids: frozenset[int]

    def __post_init__(self) -> None:
        check_int("beam_width", self.beam_width, 1, MAX_LOGPROBS)
        check_int("max_tokens", self.max_tokens, 1, 2**31 - 1)
        check_real("length_penalty", self.length_penalty, -10.0, 10.0)
        if self.num_continuations > MAX_LOGPROBS:
            raise InvalidRequestError(
                "beam_width",
                f"and the number of end tokens ({len(self.end_token_ids)}) must be at most {MAX_LOGPROBS} together",
            )

    def within(self, longest: int) -> BeamSearchParams:
        """With beams of at most so many tokens: the model has no room for more."""
        return replace(self, max_tokens=max(1, min(self.max_tokens, longest)))

    @property
    def num_continuations(self) -> int:
        """Of one beam, at most this many can matter: as many as go on, and every end token."""
        return self.beam_width + len(self.end_token_ids)

    def score(self, cumulative_logprob: float, length: int) -> float:
        return cumulative_logprob / math.pow(length, self.length_penalty)

    def best_score(self, cumulative_logprob: float, length: int) -> float:
        """The most a beam of that many tokens can come to: no further token makes it likelier."""
        return self.score(
            cumulative_logprob, self.max_tokens if self.length_penalty > 0 else length
        )


@dataclass(frozen=True, slots=True)
class Beam:
    """A continuation that was followed to its end."""

    token_ids: tuple[int, ...]
    cumulative_logprob: float
    score: float
    finish_reason: Literal["stop", "length"]
    text: str = ""

    @property
    def stop_token_id(self) -> int | None:
        """The token that ended it; it is the last of `token_ids` and not part of `text`."""
        return self.token_ids[-1] if self.finish_reason == "stop" else None

    def with_text(self, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> Beam:
        """With the text of its tokens, which continue those of the prompt."""
        detokenizer = IncrementalDetokenizer(tokenizer, prompt_ids=prompt_ids)
        shown = self.token_ids if self.stop_token_id is None else self.token_ids[:-1]
        return replace(self, text="".join(map(detokenizer.push, shown)) + detokenizer.finish())


@dataclass(frozen=True, slots=True)
class BeamSearchOutput:
    """The beams found, the best first."""

    prompt: str | None
    """As text, if it came as text."""
    prompt_token_ids: tuple[int, ...]
    beams: tuple[Beam, ...]

    @property
    def text(self) -> str:
        return self.beams[0].text


def check_choices(ignore_eos: bool, stop_token_ids: Sequence[int], vocab_size: int) -> None:
    """Refuses what can't say how beams end."""
    check_bool("ignore_eos", ignore_eos)
    for token_id in checked_ids("stop_token_ids", stop_token_ids, vocab_size):
        check_int("stop_token_ids", token_id, 0, vocab_size - 1)


def beam_steps(
    params: BeamSearchParams,
) -> Generator[list[tuple[int, ...]], Sequence[Continuations], list[Beam]]:
    """The search, step by step: yields the new tokens of every live beam, is sent each one's
    `num_continuations` likeliest next ones, and returns the best beams, the best first; equally
    good ones in the order in which they were found.
    """
    live: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    finished: list[Beam] = []
    for length in range(1, params.max_tokens + 1):
        found = yield [token_ids for token_ids, _ in live]
        extended = [
            (total + logprob, index, token_id)
            for index, ((_, total), continuations) in enumerate(zip(live, found, strict=True))
            for token_id, logprob in continuations
        ]
        extended.sort(key=lambda item: (-item[0], item[1], item[2]))
        going_on: list[tuple[tuple[int, ...], float]] = []
        for total, index, token_id in extended:
            token_ids = (*live[index][0], token_id)
            if token_id in params.end_token_ids:
                finished.append(Beam(token_ids, total, params.score(total, length), "stop"))
            else:
                going_on.append((token_ids, total))
            if len(going_on) == params.beam_width:
                break
        live = going_on
        finished = _best(finished, params.beam_width)
        if not live:
            break
        if (
            len(finished) == params.beam_width
            and params.best_score(live[0][1], length) < finished[-1].score
        ):
            return finished
    finished += [Beam(ids, total, params.score(total, len(ids)), "length") for ids, total in live]
    return _best(finished, params.beam_width)


def _best(beams: list[Beam], count: int) -> list[Beam]:
    return sorted(beams, key=lambda beam: -beam.score)[:count]


class LiveBeams:
    """Feed it the updates of its requests (`names`) until `is_done`; then there are `beams`, or an
    `error`.
    """

    def __init__(
        self,
        core: EngineCore,
        search_id: str,
        prompt: Sequence[int],
        params: BeamSearchParams,
        now: float,
        resolved: ResolvedTokens | None = None,
    ) -> None:
        """Starts the search; raises what `EngineCore.add_request` does if the prompt can't be
        computed.
        """
        self.beams: list[Beam] = []
        self.error: QuireError | None = None
        self.is_done = False
        self.names: list[str] = []
        """The requests that are running for it, in the order of their beams; they change with every
        step.
        """
        self._core = core
        self._search_id = search_id
        self._prompt = tuple(prompt)
        self._started = now
        # The token drawn is nothing to the search, so the cheapest way to draw one.
        self._params = SamplingParams(
            temperature=0, max_tokens=1, ignore_eos=True, logprobs=params.num_continuations
        )
        self._steps = beam_steps(params)
        self._resolved = resolved
        self._num_requests = 0
        self._found: dict[str, Continuations] = {}
        self._start_beams(next(self._steps), now)

    def take(self, update: RequestUpdate, now: float) -> None:
        """What became of one of its requests. With the last one of a step, the next beams start."""
        if self.is_done:
            return
        if update.logprobs:
            self._found[update.request_id] = update.logprobs[0].top
        elif update.finish_reason is not None:
            self._fail(
                QuireError(f"the beam search failed: {update.error or update.finish_reason}"), now
            )
        if self.is_done or len(self._found) < len(self.names):
            return
        try:
            beams = self._steps.send([self._found[name] for name in self.names])
        except StopIteration as end:
            self.beams = end.value
            self.close(now)
            return
        try:
            self._start_beams(beams, now)
        except QuireError as error:  # they have become too long for the cache
            self._fail(error, now)

    def close(self, now: float) -> None:
        """Ends the search, wherever it is: nothing of it runs on in the engine."""
        self.is_done = True
        self._steps.close()
        self._core.abort(self.names, now)

    def _fail(self, error: QuireError, now: float) -> None:
        self.error = error
        self.close(now)

    def _start_beams(self, beams: Sequence[tuple[int, ...]], now: float) -> None:
        self.names, self._found = [], {}
        for token_ids in beams:
            name = f"{self._search_id}/{self._num_requests}"
            self._num_requests += 1
            tokens = (*self._prompt, *token_ids)
            (request,) = make_requests(name, tokens, self._params, seed=0, resolved=self._resolved)
            request.caches_partial_block = True
            request.queued_since = self._started  # each step of a search has its place in the queue
            self._core.add_request(request, now)
            self.names.append(name)
