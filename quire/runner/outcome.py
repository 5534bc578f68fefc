"""What a step will have found: tensors that are still being computed, and how to read them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from quire.step import PromptScores, StepResult, TokenScore

Reader = Callable[[Sequence[Tensor]], None]


class Outcome:
    """Collects a step's results. Whoever computes something adds its tensors together with a function that notes
    what they say; the functions are called in the order they were added, with the tensors on the host."""

    def __init__(self, step_id: int) -> None:
        self._step_id = step_id
        self._readers: list[tuple[int, Reader]] = []
        self.tensors: list[Tensor] = []
        self.tokens: dict[str, tuple[int, ...]] = {}
        self.errors: dict[str, str] = {}
        self.scores: dict[str, tuple[TokenScore, ...]] = {}
        self.prompt_scores: dict[str, PromptScores] = {}
        self.ended: set[str] = set()
        self.pooled: dict[str, bytes] = {}

    def add(self, tensors: Sequence[Tensor], read: Reader) -> None:
        self.tensors.extend(tensors)
        self._readers.append((len(tensors), read))

    def read(self, tensors: Sequence[Tensor]) -> StepResult:
        """The result, from `self.tensors` copied to the host."""
        begin = 0
        for count, read in self._readers:
            read(tensors[begin : begin + count])
            begin += count
        self._readers.clear()  # they know this object; without them it is freed, tensors and all, once it is let go
        for request_id in self.errors:
            self.tokens.pop(request_id, None)
            self.pooled.pop(request_id, None)
        return StepResult(
            self._step_id,
            self.tokens,
            self.errors,
            self.scores,
            self.prompt_scores,
            frozenset(self.ended),
            self.pooled,
        )
