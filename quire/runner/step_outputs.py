"""The results of a step: tensors that are still being computed, their copy to the host, and how to
read them there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from quire.constrain.masks import Advanced
from quire.kernels.device import CopyStream, Event
from quire.sampling.logprobs import LogprobsMetadata, PromptPart, read_logprobs
from quire.sampling.sampler import NOT_NUMBERS, SampledTokens
from quire.step import PromptLogprobs, ScheduledRequest, StepResult, TokenLogprob

Reader = Callable[[Sequence[Tensor]], None]
GrammarAdvance = Callable[[Sequence[int], Sequence[int], Sequence[bool]], Advanced]
"""Takes the indices of the samples that count, their tokens, and for each whether forced tokens
after it are wanted.
"""


class StepOutputs:
    """Collects a step's results. Each kind of result is added as device tensors with a function
    that reads them; the functions are called in the order of adding, with copies of their tensors
    on the host.
    """

    def __init__(self, step_id: int) -> None:
        self._step_id = step_id
        self._readers: list[tuple[int, Reader]] = []
        self.tensors: list[Tensor] = []
        self.tokens: dict[str, tuple[int, ...]] = {}
        self.errors: dict[str, str] = {}
        self.logprobs: dict[str, tuple[TokenLogprob, ...]] = {}
        self.prompt_logprobs: dict[str, PromptLogprobs] = {}
        self.ended: set[str] = set()
        self.pooled: dict[str, bytes] = {}
        self.drafts: dict[str, tuple[int, ...]] = {}

    def add(self, tensors: Sequence[Tensor], read: Reader) -> None:
        """Has tensors copied to the host with the others; `read` gets them when they are there."""
        self.tensors.extend(tensors)
        self._readers.append((len(tensors), read))

    def add_tokens(
        self,
        sampled_for: Sequence[ScheduledRequest],
        sampled: SampledTokens,
        undefined: Collection[int] = (),
        advance_grammars: GrammarAdvance | None = None,
    ) -> None:
        """The sampled tokens; `sampled_for` has each sample's request. A sample after draft tokens
        counts if all of them are right. If it is `undefined` (its grammar allows nothing after the
        draft token) or fails, it is dropped: the next step samples it again, as its first sample.
        """

        def read(tensors: Sequence[Tensor]) -> None:
            tokens, flags = tensors[0].tolist()
            failures = sampled.failures(flags)
            taken: list[int] = []
            offset = 0
            for index, (entry, token) in enumerate(zip(sampled_for, tokens, strict=True)):
                offset = offset + 1 if index and sampled_for[index - 1] is entry else 0
                if offset:
                    before = self.tokens[entry.request_id]
                    if len(before) < offset or before[-1] != entry.draft_tokens[offset - 1]:
                        continue  # it was sampled after a wrong draft token
                    if index in undefined or index in failures:
                        continue
                    self.tokens[entry.request_id] = (*before, token)
                else:
                    self.tokens[entry.request_id] = (token,)
                    if index in failures:
                        self.errors[entry.request_id] = failures[index]
                taken.append(index)
            if advance_grammars is not None:
                self._advance(sampled_for, tokens, taken, advance_grammars)

        self.add((sampled.tensor,), read)

    def _advance(
        self,
        sampled_for: Sequence[ScheduledRequest],
        tokens: Sequence[int],
        taken: Sequence[int],
        advance_grammars: GrammarAdvance,
    ) -> None:
        """Advances the grammars by the sampled tokens; notes errors, ends, and forced tokens (as
        drafts).
        """
        # Forced tokens are wanted after a request's last token only.
        is_last = [
            i + 1 == len(taken) or sampled_for[taken[i + 1]] is not sampled_for[one]
            for i, one in enumerate(taken)
        ]
        asks = [
            last and sampled_for[one].num_drafts > 0
            for last, one in zip(is_last, taken, strict=True)
        ]
        advanced = advance_grammars(taken, [tokens[one] for one in taken], asks)
        for one in taken:
            entry = sampled_for[one]
            if entry.row in advanced.errors:
                self.errors[entry.request_id] = advanced.errors[entry.row]
            if entry.row in advanced.ended:
                self.ended.add(entry.request_id)
            if advanced.forced.get(entry.row):
                self.drafts[entry.request_id] = tuple(
                    advanced.forced[entry.row][: entry.num_drafts]
                )

    def add_logprobs(
        self,
        sampled_for: Sequence[ScheduledRequest],
        wanted: LogprobsMetadata,
        logprobs: list[Tensor],
    ) -> None:
        """The logprobs of some of the sampled tokens, in the order of the samples."""
        request_ids = [sampled_for[index].request_id for index in wanted.which]

        def read(tensors: Sequence[Tensor]) -> None:
            for request_id, score in zip(request_ids, wanted.read(tensors), strict=True):
                self.logprobs[request_id] = (*self.logprobs.get(request_id, ()), score)

        self.add(logprobs, read)

    def add_prompt_logprobs(self, part: PromptPart, logprobs: list[Tensor]) -> None:
        """Has a part of a prompt's logprobs read; those that are no numbers fail the request."""

        def read(tensors: Sequence[Tensor]) -> None:
            found = read_logprobs(tensors, [part.num_top] * len(tensors[0]))
            if any(math.isnan(score.logprob) for score in found):
                self.errors[part.request_id] = NOT_NUMBERS
            else:
                self.prompt_logprobs[part.request_id] = PromptLogprobs(part.start, tuple(found))

        self.add(logprobs, read)

    def read(self, tensors: Sequence[Tensor]) -> StepResult:
        """The result, from `self.tensors` copied to the host."""
        begin = 0
        for count, read in self._readers:
            read(tensors[begin : begin + count])
            begin += count
        # they refer to this object: without this cycle its tensors are freed at once
        self._readers.clear()
        for request_id, logprobs in self.logprobs.items():
            self.logprobs[request_id] = logprobs[: len(self.tokens.get(request_id, ()))]
        for request_id in self.errors:
            self.tokens.pop(request_id, None)
            self.pooled.pop(request_id, None)
        found = self.tokens, self.errors, self.logprobs, self.prompt_logprobs
        return StepResult(self._step_id, *found, frozenset(self.ended), self.pooled, self.drafts)


class PendingStep:
    """A submitted step: its results are copied to the host in the background, and read when
    `result` is called.
    """

    def __init__(self, outputs: StepOutputs, stream: CopyStream | None) -> None:
        """Copies the tensors to the host on a `stream` of its own, so that the next step need not
        wait for the copy. None on a CPU, where they are read at once.
        """
        self._outputs: StepOutputs | None = outputs
        """Keeps the device tensors alive while they are copied."""
        self._result: StepResult | None = None
        self._host = outputs.tensors
        self._arrived: Event | None = None
        if stream is None:
            self.result()  # the next step may compute in the same memory
        else:
            self._host, self._arrived = stream.to_host(outputs.tensors)

    @property
    def is_read(self) -> bool:
        """Whether `result` was called already."""
        return self._result is not None

    def add_drafts(self, drafts: Mapping[str, tuple[int, ...]]) -> None:
        """Adds tokens drafted after the step's own, once its result was read."""
        assert self._result is not None
        self._result = replace(self._result, drafts={**drafts, **self._result.drafts})

    def result(self) -> StepResult:
        """Waits for the device, and reads the result once."""
        if self._result is None:
            assert self._outputs is not None
            if self._arrived is not None:
                self._arrived.synchronize()
            self._result = self._outputs.read(self._host)
            self._outputs = None
        return self._result
