"""Computes steps, one after the other, and knows nothing of queues, blocks' owners or why.

`submit` sends a step off and returns; nothing in it waits for the device. The tokens a step samples are written to
the rows on the device, where the next step finds them, and travel to the host on a stream of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.constrain.masks import Constrainer, RowMasks
from quire.errors import EngineError
from quire.models.decoder import Decoder
from quire.runner.batch import InputBatch, StepShape, build_batch
from quire.runner.device import return_freed_memory
from quire.runner.graphs import DecodeGraphs
from quire.runner.kv_cache import KVCache
from quire.runner.logprobs import (
    LogprobRows,
    PromptRows,
    ScoreTensors,
    read_prompt_scores,
    read_scores,
    score_on_device,
    score_prompt_on_device,
)
from quire.runner.outcome import Outcome
from quire.runner.pending import PendingStep, Results
from quire.runner.pooling import PoolingRows
from quire.runner.rows import Rows
from quire.runner.sampler import describe_flags, sample
from quire.runner.staging import StagingRing
from quire.runner.upload import upload_all
from quire.step import Admission, ScheduledRequest, Step, StepResult

LogitsObserver = Callable[[Sequence[ScheduledRequest], Tensor], None]
"""Sees the requests that sample and their logits before anything is masked; for tests and tools."""

_NOT_NUMBERS = "the model's scores are not numbers (NaN)"


class Runner:
    """Owns the device state: the rows and the memory of the cache."""

    def __init__(
        self,
        decoder: Decoder,
        kv_cache: KVCache,
        rows: Rows,
        block_size: int,
        constrainer: Constrainer | None = None,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        """The `constrainer` is needed for requests with structured output only. The `graphs` make steps quicker in
        which nobody asks for more than a temperature."""
        device = rows.token_ids.device
        self._decoder = decoder
        self._constrainer = constrainer
        self._kv_cache = kv_cache
        self._rows = rows
        self._logprobs = LogprobRows(len(rows.token_ids))
        self._pooling = PoolingRows(device)
        self._block_size = block_size
        self._heads = decoder.spec.heads
        self._staging = StagingRing(device)
        self._results = Results(device)
        self._sample_rows = decoder.kernels.sample_rows
        self._graphs = graphs
        self._untold: PendingStep | None = None
        """The last step that sampled under grammars, which may not know its tokens yet."""
        self.observe_logits: LogitsObserver | None = None

    @torch.inference_mode()
    def submit(self, step: Step) -> PendingStep:
        """Sends the step off. On the CPU it is done when this returns."""
        self._kv_cache.copy_blocks(step.copies)
        self._drop_grammars(step)
        for admission in step.admitted:
            self._logprobs.admit(admission)
            self._pooling.admit(admission)
            self._admit_grammar(admission)
        self._rows.apply(step)
        if not step.scheduled:
            return self._results.pending((), lambda _: StepResult(step.step_id, {}))
        pending = self._compute(step)
        if self._graphs is not None and not self._graphs.is_complete:
            self._graphs.capture_next()
        return pending

    def release(self) -> None:
        """Lets go of weights and cache, whoever else still holds this runner."""
        self._graphs = None
        self._decoder.release()
        self._kv_cache.release()
        if self._constrainer is not None:
            self._constrainer.close()
        return_freed_memory()

    def _compute(self, step: Step) -> PendingStep:
        shape = StepShape.of(step.scheduled)
        outcome = Outcome(step.step_id)
        sampling = [scheduled for scheduled in step.scheduled if scheduled.samples]
        decoded = None
        needs_hidden = self._logprobs.scores_prompts or self._pooling.has_rows
        if self._graphs is not None and shape.is_decode and not needs_hidden:
            decoded = self._graphs.run(shape)
        if decoded is not None and self._are_plain(shape):
            _read_sampled(outcome, sampling, decoded.sampled.clone())
        elif decoded is not None:
            self._start_masks(shape)
            self._sample(outcome, sampling, shape, decoded.logits.float())
        else:
            self._start_masks(shape)  # they are computed while the model runs
            batch = build_batch(shape, self._rows, self._decoder.kernels, self._staging, self._block_size, self._heads)
            hidden = self._decoder(batch.token_ids, batch.positions, batch.paged, self._kv_cache.layers)
            if sampling and self._sample_rows is not None and self._are_plain(shape):
                _read_sampled(outcome, sampling, self._draw_plain(batch, hidden))
            elif sampling:
                logits = self._decoder.logits(hidden[batch.sampling_indices])
                self._sample(outcome, sampling, shape, logits.float())
            self._score_prompts(outcome, step.scheduled, hidden)
            self._pooling.add(outcome, step.scheduled, hidden)
        pending = self._results.pending(outcome.tensors, outcome.read)
        if self._constrainer is not None and self._constrainer.constrains(shape.sampling_rows):
            self._untold = pending
        return pending

    def _draw_plain(self, batch: InputBatch, hidden: Tensor) -> Tensor:
        """What a graph does at its end."""
        assert self._sample_rows is not None
        rows = self._rows
        logits = self._decoder.logits(hidden[batch.sampling_indices])
        drawn = self._sample_rows(
            logits, batch.sampling_rows, rows.seeds, rows.temperatures, batch.sampling_positions, rows.token_ids
        )
        return torch.stack((drawn[0], drawn[1].long()))

    def _are_plain(self, shape: StepShape) -> bool:
        """Whether the tokens of a graph are all that is asked for."""
        rows = shape.sampling_rows
        return self.observe_logits is None and self._rows.are_plain(rows) and not len(self._logprobs.asking(rows))

    def _start_masks(self, shape: StepShape) -> None:
        """Begins with the masks, if they don't wait for tokens of the step before."""
        if self._constrainer is not None and (self._untold is None or self._untold.is_read):
            self._constrainer.start(shape.sampling_rows)

    def _masks(self, rows: npt.NDArray[np.int64]) -> RowMasks | None:
        """The masks of rows that are about to sample. Tokens that were drawn a step before and have not been read
        yet are read now: the grammars need them. The device computes this step's scores meanwhile."""
        if self._constrainer is None or not self._constrainer.constrains(rows):
            return None
        self._tell_grammars()
        return self._constrainer.masks(rows)

    def _tell_grammars(self) -> None:
        if self._untold is not None:
            self._untold.result()
            self._untold = None

    def _drop_grammars(self, step: Step) -> None:
        if self._constrainer is None:
            return
        preempted = np.array([gone.row for gone in step.preempted], np.int64)
        if self._constrainer.constrains(preempted):
            self._tell_grammars()  # its last token may be the end, and no other copy of the grammar would notice
        rows = (*(gone.row for gone in step.finished), *(gone.row for gone in step.preempted))
        for row in rows:
            if row is not None:
                self._constrainer.drop(row)

    def _admit_grammar(self, admission: Admission) -> None:
        params = admission.params
        if params.structured is None:
            return
        if self._constrainer is None:
            raise EngineError("structured: this runner was made without grammars")
        ends = (*(() if params.ignore_eos else admission.eos_token_ids), *params.stop_token_ids)
        answer = admission.token_ids[admission.num_prompt_tokens :]
        self._constrainer.admit(admission.row, params.structured, answer, ends if params.min_tokens else ())

    def _sample(self, outcome: Outcome, sampling: Sequence[ScheduledRequest], shape: StepShape, logits: Tensor) -> None:
        """Draws a token for each of these requests and scores it for those that ask."""
        rows, positions = shape.sampling_rows, shape.sampling_positions
        if self.observe_logits is not None:
            self.observe_logits(sampling, logits)
        asking = self._logprobs.asking(rows)
        where, at, scored = upload_all(logits.device, rows, positions, asking)
        # Sampling changes the logits; whoever asks for logprobs gets those of the model.
        unchanged = logits[scored] if len(asking) else None
        masks = self._masks(rows)
        sampling_batch = self._rows.sampling_batch(rows, positions, None if masks is None else masks.words)
        if masks is not None:
            sampling_batch.parameters["min_length"][masks.only_ends] = 0  # where only an end can follow, it may
        sampled = sample(logits, sampling_batch, self._decoder.kernels)
        self._rows.token_ids[where, at] = sampled.token_ids

        def read_tokens(tensors: Sequence[Tensor]) -> None:
            tokens = tensors[0].tolist()
            outcome.tokens |= {s.request_id: (token,) for s, token in zip(sampling, tokens, strict=True)}
            failures = sampled.with_tensors(*tensors).failures()
            outcome.errors |= {sampling[i].request_id: message for i, message in failures.items()}
            if masks is not None and self._constrainer is not None:
                advanced = self._constrainer.advance(rows, tokens, masks.epochs)
                broken_rows = masks.errors | advanced.errors
                outcome.errors |= {s.request_id: broken_rows[s.row] for s in sampling if s.row in broken_rows}
                outcome.ended.update(s.request_id for s in sampling if s.row in advanced.ended)

        outcome.add(sampled.tensors(), read_tokens)
        if unchanged is not None:
            num_top = self._logprobs.num_top(rows[asking])
            names = [sampling[i].request_id for i in asking.tolist()]
            scores = score_on_device(unchanged, sampled.token_ids[scored], num_top, self._decoder.kernels)

            def read(tensors: Sequence[Tensor]) -> None:
                found = read_scores(ScoreTensors(*tensors), num_top)
                outcome.scores |= {name: (score,) for name, score in zip(names, found, strict=True)}

            outcome.add(scores, read)

    def _score_prompts(self, outcome: Outcome, scheduled: Sequence[ScheduledRequest], hidden: Tensor) -> None:
        kernels = self._decoder.kernels
        for part in self._logprobs.prompt_rows(scheduled):
            scores = score_prompt_on_device(part, hidden, self._decoder.logits, self._rows.token_ids, kernels)

            def read(tensors: Sequence[Tensor], part: PromptRows = part) -> None:
                found = read_prompt_scores(part, ScoreTensors(*tensors))
                if found is None:
                    outcome.errors[part.request_id] = _NOT_NUMBERS
                else:
                    outcome.prompt_scores[part.request_id] = found

            outcome.add(scores, read)


def _read_sampled(outcome: Outcome, sampling: Sequence[ScheduledRequest], sampled: Tensor) -> None:
    """`sampled` int64 [2, requests]: tokens and flags."""

    def read(tensors: Sequence[Tensor]) -> None:
        tokens, flags = tensors[0].tolist()
        outcome.tokens |= {s.request_id: (token,) for s, token in zip(sampling, tokens, strict=True)}
        outcome.errors |= {sampling[i].request_id: message for i, message in describe_flags(flags).items()}

    outcome.add((sampled,), read)
