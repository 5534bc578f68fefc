"""A beam search while it runs: its beams are requests of the engine, one for every token of each beam.

Every beam is a request for one token, of which only the likeliest ones and their logprobs matter. The beams that go
on from it are requests whose prompt is its own and one token more; they find what it has computed in the prefix cache,
its last, partly filled block included, so each computes one token (without prefix caching: all of them).
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.engine import EngineCore, RequestUpdate, make_requests
from quire.errors import QuireError
from quire.frontend.beam_search import Beam, BeamSearchParams, Continuations, beam_steps
from quire.sampling_params import SamplingParams


class LiveBeams:
    """Feed it the updates of its requests (`names`) until `is_done`; then there are `beams`, or an `error`."""

    def __init__(
        self, core: EngineCore, search_id: str, prompt: Sequence[int], params: BeamSearchParams, now: float
    ) -> None:
        """Starts the search; raises what `EngineCore.add_request` does if the prompt can't be computed."""
        self.beams: list[Beam] = []
        self.error: QuireError | None = None
        self.is_done = False
        self.names: list[str] = []
        """The requests that are running for it, in the order of their beams; they change with every step."""
        self._core = core
        self._search_id = search_id
        self._prompt = tuple(prompt)
        self._started = now
        # The token drawn is nothing to the search, so the cheapest way to draw one.
        self._params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, logprobs=params.num_continuations)
        self._steps = beam_steps(params)
        self._num_requests = 0
        self._found: dict[str, Continuations] = {}
        self._start_beams(next(self._steps), now)

    def take(self, update: RequestUpdate, now: float) -> None:
        """What became of one of its requests. With the last one of a step, the next beams start."""
        if self.is_done:
            return
        if update.scores:
            self._found[update.request_id] = update.scores[0].top
        elif update.finish_reason is not None:
            self._fail(QuireError(f"the beam search failed: {update.error or update.finish_reason}"), now)
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
            (request,) = make_requests(name, (*self._prompt, *token_ids), self._params, seed=0)
            request.caches_partial_block = True
            request.queued_since = self._started  # each step of a search has its place in the queue
            self._core.add_request(request, now)
            self.names.append(name)
