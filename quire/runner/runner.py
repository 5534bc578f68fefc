"""Computes steps, one after the other, and knows nothing of queues, blocks' owners or why."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from quire.models.decoder import Decoder
from quire.runner.batch import InputBatch, build_batch
from quire.runner.device import return_freed_memory
from quire.runner.kv_cache import KVCache
from quire.runner.rows import Rows
from quire.runner.sampler import SamplingBatch, sample
from quire.step import ScheduledRequest, Step, StepResult

LogitsObserver = Callable[[Sequence[ScheduledRequest], Tensor], None]
"""Sees the requests that sample and their logits before anything is masked; for tests and tools."""


class Runner:
    """Owns the device state: the rows and the memory of the cache."""

    def __init__(self, decoder: Decoder, kv_cache: KVCache, rows: Rows, block_size: int) -> None:
        self._decoder = decoder
        self._kv_cache = kv_cache
        self._rows = rows
        self._block_size = block_size
        self.observe_logits: LogitsObserver | None = None

    @torch.inference_mode()
    def submit(self, step: Step) -> FinishedStep:
        """Computes the step. On the CPU it is done when this returns."""
        self._kv_cache.copy_blocks(step.copies)
        for admission in step.admitted:
            self._rows.admit(admission)
        for scheduled in step.scheduled:
            self._rows.extend(scheduled)
        if not step.scheduled:
            return FinishedStep(StepResult(step.step_id, {}, {}))
        batch = build_batch(step.scheduled, self._rows, self._block_size)
        hidden = self._decoder(batch.token_ids, batch.positions, batch.paged, self._kv_cache.layers)
        sampling = [scheduled for scheduled in step.scheduled if scheduled.samples]
        if not sampling:
            return FinishedStep(StepResult(step.step_id, {}, {}))
        return FinishedStep(self._sample(step.step_id, sampling, batch, hidden))

    def release(self) -> None:
        """Lets go of weights and cache, whoever else still holds this runner."""
        self._decoder.to("meta")
        self._kv_cache.release()
        return_freed_memory()

    def _sample(
        self, step_id: int, sampling: Sequence[ScheduledRequest], batch: InputBatch, hidden: Tensor
    ) -> StepResult:
        logits = self._decoder.logits(hidden[batch.sampling_indices])
        if self.observe_logits is not None:
            self.observe_logits(sampling, logits)
        broken = logits.sum(-1).isnan()  # a NaN anywhere in the row
        rows = batch.sampling_rows
        tokens = sample(logits, self._sampling_batch(batch))
        device = tokens.device
        self._rows.token_ids[
            torch.from_numpy(rows).to(device), torch.from_numpy(batch.sampling_positions).to(device)
        ] = tokens
        results: dict[str, tuple[int, ...]] = {}
        errors: dict[str, str] = {}
        for scheduled, token, is_broken in zip(sampling, tokens.tolist(), broken.tolist(), strict=True):
            if is_broken:
                errors[scheduled.request_id] = "the model's scores are not numbers (NaN)"
            else:
                results[scheduled.request_id] = (token,)
        return StepResult(step_id, results, errors)

    def _sampling_batch(self, batch: InputBatch) -> SamplingBatch:
        rows, position = batch.sampling_rows, batch.sampling_positions
        state = self._rows
        forbidden = tuple(
            state.end_token_ids[row] if too_short else ()
            for row, too_short in zip(rows, position < state.min_length[rows], strict=True)
        )
        return SamplingBatch(
            temperature=state.temperature[rows],
            top_k=state.top_k[rows],
            top_p=state.top_p[rows],
            seed=state.seed[rows],
            position=position,
            forbidden=forbidden,
        )


class FinishedStep:
    """The pending result of a runner that does not run ahead."""

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def result(self) -> StepResult:
        return self._result
