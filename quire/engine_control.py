"""What a caller of the offline API can do with an engine between two of its steps: give its memory
back, pause it, replace its weights.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import AbstractContextManager

from torch import Tensor

from quire.assemble import Engine
from quire.errors import EngineError
from quire.outputs import RequestDelta
from quire.step import PauseMode, RequestUpdate


class EngineControl(ABC):
    """The part of `quire.LLM` that controls its engine."""

    _unread: list[RequestDelta]
    """What requests gained while a pause waited for them: the next `step` tells it."""

    @property
    @abstractmethod
    def engine(self) -> Engine: ...

    @abstractmethod
    def _drive(self) -> AbstractContextManager[Engine]: ...

    @abstractmethod
    def _deltas(self, updates: list[RequestUpdate]) -> list[RequestDelta]: ...

    def sleep(self, level: int = 1) -> None:
        """Gives the memory of weights and cache back; requests, of which none may run now, are
        refused until `wake_up`. Level 1 keeps the weights in host memory; with level 2 `wake_up`
        reads the model's files again.
        """
        with self._drive() as engine:
            engine.sleep(level)

    def pause(self, mode: PauseMode = "wait") -> None:
        """Has nobody computed until `resume`, so that weights can be replaced while there are
        requests. Those that have begun are computed to their end first ("wait"), end with
        finish_reason "abort" ("abort"), or stay where they are ("keep"); others wait, as do those
        that are added now. What requests gained meanwhile comes with the next `step`.
        """
        with self._drive() as engine:
            engine.core.pause(mode, time.monotonic())
            while not engine.core.is_drained:
                self._unread += self._deltas(engine.core.step(time.monotonic()))

    def resume(self) -> None:
        """Ends a pause. Requests that were kept while weights were replaced are computed again from
        their tokens so far.
        """
        with self._drive() as engine:
            engine.core.resume()

    @property
    def is_paused(self) -> bool:
        return self.engine.core.is_paused

    @property
    def weights_version(self) -> int:
        """Of the weights that compute now: 0 as loaded, higher with every update."""
        return self.engine.weights_version

    def wake_up(self) -> None:
        """Takes the memory again; answers are what they were, bit for bit."""
        with self._drive() as engine:
            engine.wake_up()

    def update_weights(
        self,
        weights: Iterable[tuple[str, Tensor]],
        *,
        mode: PauseMode | None = None,
        version: int | None = None,
    ) -> None:
        """Replaces weights where they lie, from pairs of a name and a tensor, as a trainer has them:
        names as in the model's safetensors, any floating dtype, any order, all of them or some.
        They are quantised if the model was while loading. The prefix cache is forgotten.

        Requests are paused before and go on after it, as `mode` says (see `pause`); without one,
        none may run now. `version` is what answers are told to be computed by, by default one more
        than before.

        With an unknown name, another shape or a missing part of a matrix nothing changes.
        """
        with self._drive() as engine:
            engine.core.next_version(version)
            named = engine.new_weights(weights)
            was_paused = engine.core.is_paused
            try:
                if mode is not None:
                    self.pause(mode)
                engine.update_weights(named, version)
            finally:
                engine.abandon_weights()
                # after an update that failed halfway, nobody may go on
                if mode is not None and not was_paused and engine.core.refusal is None:
                    engine.core.resume()

    def reset_prefix_cache(self) -> None:
        """Forgets all cached prefixes; refused while requests run."""
        with self._drive() as engine:
            engine.core.reset_prefix_cache(time.monotonic())

    def _check_computes(self) -> None:
        """Nobody may wait for an answer that does not come."""
        core = self.engine.core
        if core.is_paused:
            raise EngineError(core.refusal or "the engine is paused: resume it first")
