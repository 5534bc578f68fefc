"""What a step will have found: tensors that are still being computed, their way to the host, and how to read them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from quire.constrain.masks import Advanced
from quire.sampling.logprobs import PromptPart, ScoredDraws, ScoreTensors, read_scores
from quire.sampling.sampler import NOT_NUMBERS, SampledTokens
from quire.step import PromptScores, ScheduledRequest, StepResult, TokenScore

Reader = Callable[[Sequence[Tensor]], None]


class StepOutputs:
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

    def add_tokens(
        self,
        drawn_for: Sequence[ScheduledRequest],
        sampled: SampledTokens,
        advance_grammars: Callable[[Sequence[int]], Advanced] | None = None,
    ) -> None:
        """The tokens of a step's draws, and for each draw the request it is for."""

        def read(tensors: Sequence[Tensor]) -> None:
            tokens: list[int] = tensors[0][0].tolist()
            failures = sampled.failures(tensors[0])
            for index, (entry, token) in enumerate(zip(drawn_for, tokens, strict=True)):
                before = self.tokens.get(entry.request_id, ())
                if before and before[-1] != entry.guesses[len(before) - 1]:
                    continue  # it was drawn after a guess that is wrong
                self.tokens[entry.request_id] = (*before, token)
                if index in failures:
                    self.errors[entry.request_id] = failures[index]
            if advance_grammars is not None:
                advanced = advance_grammars(tokens)
                for entry in drawn_for:
                    if entry.row in advanced.errors:
                        self.errors[entry.request_id] = advanced.errors[entry.row]
                    if entry.row in advanced.ended:
                        self.ended.add(entry.request_id)

        self.add((sampled.tensor,), read)

    def add_scores(self, drawn_for: Sequence[ScheduledRequest], draws: ScoredDraws, scores: ScoreTensors) -> None:
        """The scores of some of the tokens, in the order of the draws."""
        request_ids, num_top = [drawn_for[index].request_id for index in draws.which], draws.num_top

        def read(tensors: Sequence[Tensor]) -> None:
            found = read_scores(ScoreTensors(*tensors), num_top)
            for request_id, score in zip(request_ids, found, strict=True):
                self.scores[request_id] = (*self.scores.get(request_id, ()), score)

        self.add(scores, read)

    def add_prompt_scores(self, part: PromptPart, scores: ScoreTensors) -> None:
        def read(tensors: Sequence[Tensor]) -> None:
            found = read_scores(ScoreTensors(*tensors), [part.num_top] * len(tensors[0]))
            if any(math.isnan(score.logprob) for score in found):
                self.errors[part.request_id] = NOT_NUMBERS
            else:
                self.prompt_scores[part.request_id] = PromptScores(part.start, tuple(found))

        self.add(scores, read)

    def read(self, tensors: Sequence[Tensor]) -> StepResult:
        """The result, from `self.tensors` copied to the host."""
        begin = 0
        for count, read in self._readers:
            read(tensors[begin : begin + count])
            begin += count
        self._readers.clear()  # they know this object; without them it is freed, tensors and all, once it is let go
        for request_id, scores in self.scores.items():
            self.scores[request_id] = scores[: len(self.tokens.get(request_id, ()))]
        for request_id in self.errors:
            self.tokens.pop(request_id, None)
            self.pooled.pop(request_id, None)
        return StepResult(
            self._step_id, self.tokens, self.errors, self.scores, self.prompt_scores, frozenset(self.ended), self.pooled
        )


class PendingStep:
    """A step that was sent off: its results come back by themselves, and are read when somebody asks."""

    def __init__(self, outputs: StepOutputs, stream: torch.cuda.Stream | None) -> None:
        """Brings the tensors to the host on a `stream` of its own, so that the next step's work need not wait for it.
        None: they are there."""
        self._outputs: StepOutputs | None = outputs
        """Holds the device's memory while it is being copied from."""
        self._result: StepResult | None = None
        self._host = outputs.tensors
        self._arrived: torch.cuda.Event | None = None
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._host = [
                    torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
                    for tensor in outputs.tensors
                ]
                self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
                self._arrived.record()

    @property
    def is_read(self) -> bool:
        """Whether somebody has waited for it already."""
        return self._result is not None

    def result(self) -> StepResult:
        if self._result is None:
            assert self._outputs is not None
            if self._arrived is not None:
                self._arrived.synchronize()
            self._result = self._outputs.read(self._host)
            self._outputs = None
        return self._result
