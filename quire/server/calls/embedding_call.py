"""A call for embeddings: each prompt goes in, its pooled hidden states come out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from quire.server.calls.engine_call import EngineCall, failure
from quire.server.calls.generation import GenerationEvent
from quire.step import RequestUpdate


class EmbeddingCall(EngineCall):
    """A call whose prompts are answered with one vector each."""

    AT_ONCE: ClassVar[int] = 32  # a long list of texts must not fill the engine's queue

    def _prepare(self, number: int, request_id: str) -> Sequence[str]:
        return (request_id,)

    def _take(self, update: RequestUpdate) -> None:
        if update.finish_reason is None:
            return
        if update.pooled is None:
            self.fail(failure(update))
            return
        self._unfinished.discard(update.request_id)
        if update.metrics is not None:
            self._trace.answered(update.request_id, update.metrics)
        self._emit(GenerationEvent(self._prompt_of[update.request_id], vector=update.pooled))

    def _count_finished(self) -> None:
        """The histograms are about answers, which this has none of."""
