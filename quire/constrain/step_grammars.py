"""Grammars along the steps of a runner: when rows come and go, when masks are begun, when tokens
must be read.

A runner may be a step ahead of the tokens it knows. A grammar needs the last token before it can
say what may follow, so tokens of the step before that nobody has read yet are read here, as late as
possible: the device computes meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from quire.constrain.masks import Advanced, Constrainer, GrammarMasks
from quire.errors import EngineError
from quire.sampling.metadata import Indices
from quire.step import Step


class SubmittedStep(Protocol):
    """A step whose tokens may still be on their way."""

    @property
    def is_read(self) -> bool: ...

    def result(self) -> object:
        """Waits for the tokens and has them read, `StepGrammars.advance` included."""


class StepGrammars:
    """Everything a runner has to do for requests with structured output; without a `constrainer`
    there are none.
    """

    def __init__(self, constrainer: Constrainer | None) -> None:
        self.constrainer = constrainer
        self._last: SubmittedStep | None = None
        """The last step that drew under grammars; its tokens may not have been read."""
        self._is_sampling = False
        """Whether masks were taken for the step that is being made."""

    def apply(self, step: Step) -> None:
        """Drops the grammars of requests that left, and takes up those of admitted ones."""
        if self.constrainer is not None:
            if any(map(self.constrains, (gone.row for gone in step.preempted))):
                # a last token may be the end, and no other copy of the grammar would notice
                self._read_last()
            for row in (
                *(gone.row for gone in step.finished),
                *(gone.row for gone in step.preempted),
            ):
                if row is not None:
                    self.constrainer.drop(row)
        for admission in step.admitted:
            params = admission.params
            if params.structured is None:
                continue
            if self.constrainer is None:
                raise EngineError("structured: this runner was made without grammars")
            ends = params.end_token_ids(admission.eos_token_ids) if params.min_tokens else ()
            answer = admission.token_ids[admission.num_prompt_tokens :]
            self.constrainer.admit(admission.row, params.structured, answer, ends)

    def constrains(self, row: int) -> bool:
        """Whether a request row has a grammar."""
        return self.constrainer is not None and self.constrainer.constrains(np.array([row]))

    def start(self, request_rows: Indices) -> None:
        """Begins with the masks of these samples, if they don't wait for tokens of the step
        before.
        """
        if self.constrainer is not None and (self._last is None or self._last.is_read):
            self.constrainer.start(request_rows)

    def masks(self, request_rows: Indices, follows: Indices | None = None) -> GrammarMasks | None:
        """The masks of samples that are due now; None if none of them has a grammar. `follows`: see
        `Constrainer`.
        """
        if self.constrainer is None or not self.constrainer.constrains(request_rows):
            return None
        self._read_last()
        self._is_sampling = True
        return self.constrainer.masks(request_rows, follows)

    def submitted(self, step: SubmittedStep) -> None:
        """The step that was made last has been sent off as this one."""
        if self._is_sampling:
            self._last, self._is_sampling = step, False

    def advance(
        self,
        masks: GrammarMasks,
        places: Sequence[int],
        tokens: Sequence[int],
        asks_forced: Sequence[bool],
    ) -> Advanced:
        """Tells the grammars the tokens that came of some samples under these masks, and asks
        behind which of them it is to be found what must follow.
        """
        assert self.constrainer is not None
        which = np.array(places, np.int64)
        advanced = self.constrainer.advance(
            masks.request_rows[which], tokens, masks.epochs[which], asks_forced
        )
        return Advanced(advanced.ended, masks.errors | advanced.errors, advanced.forced)

    def held_rows(self) -> frozenset[int]:
        """Request rows that should not be scheduled now: their masks take long and are not there
        yet.
        """
        return frozenset() if self.constrainer is None else self.constrainer.held_rows()

    def wait_for_held(self) -> None:
        """Until one of them is there, or a moment has passed."""
        if self.constrainer is not None:
            self.constrainer.wait_for_held()

    def close(self) -> None:
        if self.constrainer is not None:
            self.constrainer.close()

    def _read_last(self) -> None:
        if self._last is not None:
            self._last.result()
            self._last = None
