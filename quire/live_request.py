"""A request between its first and last token, on the caller's side of the engine: token ids become text."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from quire.engine import Request, RequestUpdate
from quire.frontend.detokenizer import IncrementalDetokenizer
from quire.frontend.tokenizer import Tokenizer
from quire.outputs import Completion, RequestDelta, RequestOutput


class _Answer:
    """One of the n answers, as far as it has come."""

    def __init__(self, tokenizer: Tokenizer, continued: Sequence[int], seed: int) -> None:
        self.detokenizer = IncrementalDetokenizer(tokenizer, prompt_ids=continued)
        self.seed = seed
        self.token_ids: list[int] = []
        self.pieces: list[str] = []


class LiveRequest:
    """Collects the updates of one request (all its n answers) into deltas and, at last, an output."""

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: tuple[int, ...],
        requests: Sequence[Request],
        tokenizer: Tokenizer,
        continues_prompt: bool,
    ) -> None:
        """`continues_prompt`: the answer goes on with the prompt's text, as opposed to a chat's new turn."""
        self.request_id = request_id
        self.names = [request.request_id for request in requests]
        self.unread: deque[RequestDelta] | None = None
        """Deltas in order, kept only for a request that is being streamed."""
        self._prompt = prompt
        self._prompt_token_ids = prompt_token_ids
        continued = prompt_token_ids if continues_prompt else ()
        self._answers = [_Answer(tokenizer, continued, request.seed) for request in requests]
        self._completions: list[Completion | None] = [None] * len(requests)

    def advance(self, index: int, update: RequestUpdate) -> RequestDelta:
        """Takes in what the engine reported of answer `index`."""
        answer = self._answers[index]
        answer.token_ids.extend(update.new_token_ids)
        shown = update.new_token_ids if update.stop_token_id is None else update.new_token_ids[:-1]
        text = "".join([answer.detokenizer.push(token_id) for token_id in shown])
        if update.finish_reason is not None:
            text += answer.detokenizer.finish()
        if text:
            answer.pieces.append(text)
        if update.finish_reason is not None:
            self._completions[index] = self._complete(index, answer, update)
        delta = RequestDelta(self.request_id, index, text, update.new_token_ids, update.finish_reason, self._output())
        if self.unread is not None:
            self.unread.append(delta)
        return delta

    def _complete(self, index: int, answer: _Answer, update: RequestUpdate) -> Completion:
        assert update.finish_reason is not None
        assert update.metrics is not None
        return Completion(
            index=index,
            text="".join(answer.pieces),
            token_ids=tuple(answer.token_ids),
            finish_reason=update.finish_reason,
            stop_token_id=update.stop_token_id,
            seed=answer.seed,
            error=update.error,
            metrics=update.metrics,
        )

    def _output(self) -> RequestOutput | None:
        done = [completion for completion in self._completions if completion is not None]
        if len(done) < len(self._completions):
            return None
        return RequestOutput(self.request_id, self._prompt, self._prompt_token_ids, tuple(done))
