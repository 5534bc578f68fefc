"""One request on its way through a pool of engines: what it has gained so far is kept, so that
another engine can go on with it where the first one was lost.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import msgspec

from quire.server.errors import ApiError
from quire.server.link import messages
from quire.server.link.listeners import Grow, Listener
from quire.server.link.replicas.router import Assignment, PrefixRouter
from quire.step import RequestMetrics, RequestUpdate

ENGINE_LOST = "engine_unavailable"
"""The code of errors that mean: this engine is gone, and another one may do it."""
_MOST_LOST = 3
"""Engines that may be lost one after the other while they have a request, without its gaining a
token. It may be the reason: what kills an engine in its first step, nobody hears of.
"""


class Relay:
    """Stands between an engine and whoever waits for a request."""

    def __init__(
        self,
        message: messages.AddRequest,
        listener: Listener,
        router: PrefixRouter,
        over: Callable[[Relay], None],
        move: Callable[[Relay], None],
    ) -> None:
        """`over` is called when nothing more comes of it, `move` when its engine is gone."""
        self.message = message
        self.answer_ids = message.answer_ids
        self.listener = listener
        self.assignment: Assignment | None = None
        """None while there is no engine that could take it."""
        self.fingerprint: str | None = None
        """Of the engine that has it, or had it last."""
        self.outputs: dict[str, list[int]] = {request_id: [] for request_id in self.answer_ids}
        """The tokens so far of the answers that are not complete."""
        self._router = router
        self._over = over
        self._move = move
        self._arrival = time.monotonic()
        self._ended: dict[str, int] = {}
        """Answers that their reader has ended, while the engine has not confirmed it, with their
        number of tokens.
        """
        self._is_accepted = False
        self._is_computed = False
        self._num_lost = 0
        """Engines that were lost since its last token."""
        self._was_relieved = False
        """Whether it was taken from an engine that was only silent, since its last token."""
        self._num_tokens = 0
        """As many as it had when one of these two was looked at last."""

    @property
    def is_waiting(self) -> bool:
        """It has gained nothing where it is."""
        return not self._is_computed

    @property
    def age(self) -> float:
        return time.monotonic() - self._arrival

    def end(self, answer_id: str) -> None:
        """An answer is complete, says its reader."""
        if answer_id in self.outputs:
            self._ended[answer_id] = len(self.outputs.pop(answer_id))

    @property
    def was_relieved(self) -> bool:
        self._look_for_tokens()
        return self._was_relieved

    def relieve(self) -> None:
        """It leaves an engine that is silent, not lost: that is no sign that the request is the
        reason.
        """
        self._look_for_tokens()
        self._was_relieved = True
        self._num_lost -= 1

    def _look_for_tokens(self) -> None:
        """If it has gained some, what befell the engines before that counts no more."""
        count = sum(map(len, self.outputs.values()))
        if count != self._num_tokens:
            self._num_tokens = count
            self._num_lost = 0
            self._was_relieved = False

    def again(self) -> messages.AddRequest | ApiError:
        """What another engine is to be given, or why none is."""
        self._look_for_tokens()
        self._num_lost += 1
        if self._num_lost > _MOST_LOST:
            why = f"{self._num_lost} engines failed one after the other while they had this request"
            return ApiError(503, why, code=ENGINE_LOST, retry_after=5.0)
        self._is_computed = False
        age = self.age
        message = self.message
        params = message.params
        deadline = message.params.get("deadline")
        if deadline is not None:
            if age >= deadline:
                return ApiError(
                    504, "the request took longer than it was allowed to", code="deadline_exceeded"
                )
            params = {**params, "deadline": deadline - age}
        resume = messages.Resume(
            {answer_id: tuple(tokens) for answer_id, tokens in self.outputs.items()}, age
        )
        return msgspec.structs.replace(message, params=params, resume=resume)

    def confirm_ends(self) -> None:
        """The engine can't confirm the ends that it was told of any more; its reader waits for the
        count.
        """
        for answer_id, num_tokens in self._ended.items():
            num_prompt = self.message.num_prompt_tokens
            metrics = RequestMetrics(
                answer_id, 0.0, None, None, 0.0, num_prompt, num_tokens, 0, 0, 0, 0
            )
            self.listener.update(RequestUpdate(answer_id, (), "stop", metrics=metrics))
        self._ended.clear()

    # For the engine's client

    def accepted(self, request_id: str) -> None:
        if not self._is_accepted:
            self._is_accepted = True
            self.listener.accepted(request_id)

    def refused(self, refusal: messages.Refused) -> None:
        self._over(self)
        if self._is_accepted:
            self.listener.fail(
                ApiError(
                    503,
                    f"its engine was lost, and another one refuses the request: {refusal.message}",
                )
            )
        else:
            self.listener.refused(refusal)

    def started(self, answer_id: str, cached_tokens: int) -> None:
        self.listener.started(answer_id, cached_tokens)

    def computed(self) -> None:
        """One of its answers gains tokens where it is: the prompt is computed."""
        if not self._is_computed:
            self._is_computed = True
            if self.assignment is not None:
                self._router.computed(self.assignment)

    def update(self, update: RequestUpdate) -> None:
        answer_id = update.request_id
        if update.new_token_ids:
            self.computed()
            if answer_id in self.outputs:
                self.outputs[answer_id].extend(update.new_token_ids)
        if update.finish_reason is not None:
            self.outputs.pop(answer_id, None)
            self._ended.pop(answer_id, None)
            if not self.outputs and not self._ended:
                self._over(self)
            elif self.assignment is not None:
                self._router.answered(self.assignment)
        self.listener.update(update)

    def grower(self, answer_id: str) -> Grow:
        """Its listener's: the tokens themselves are put into `outputs` by whoever tells them."""
        return self.listener.grower(answer_id)

    def fail(self, error: ApiError) -> None:
        if error.code == ENGINE_LOST:
            self._move(self)
            return
        self._over(self)
        self.listener.fail(error)


def bind_to(relays: Iterable[Relay], fingerprint: str) -> None:
    """Their engine has other weights now, which answer what it kept: only engines with the same
    ones may go on with it.
    """
    for relay in relays:
        relay.fingerprint = fingerprint
