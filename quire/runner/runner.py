"""Computes steps, one after the other, and knows nothing of queues, blocks' owners or why."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from quire.constrain.masks import Constrainer
from quire.errors import EngineError
from quire.models.decoder import Decoder
from quire.runner.batch import InputBatch, build_batch
from quire.runner.device import return_freed_memory
from quire.runner.kv_cache import KVCache
from quire.runner.logprobs import LogprobRows, score_prompt, score_tokens
from quire.runner.pooling import PoolingRows
from quire.runner.rows import Rows
from quire.runner.sampler import sample
from quire.step import Admission, PromptScores, ScheduledRequest, Step, StepResult, TokenScore

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
    ) -> None:
        """The `constrainer` is needed for requests with structured output only."""
        self._decoder = decoder
        self._constrainer = constrainer
        self._kv_cache = kv_cache
        self._rows = rows
        self._logprobs = LogprobRows(len(rows.token_ids))
        self._pooling = PoolingRows()
        self._block_size = block_size
        self.observe_logits: LogitsObserver | None = None

    @torch.inference_mode()
    def submit(self, step: Step) -> FinishedStep:
        """Computes the step. On the CPU it is done when this returns."""
        self._kv_cache.copy_blocks(step.copies)
        for row in (*(gone.row for gone in step.finished), *(gone.row for gone in step.preempted)):
            if row is not None and self._constrainer is not None:
                self._constrainer.drop(row)
        for admission in step.admitted:
            self._rows.admit(admission)
            self._logprobs.admit(admission)
            self._pooling.admit(admission)
            self._admit_grammar(admission)
        for scheduled in step.scheduled:
            self._rows.extend(scheduled)
        errors: dict[str, str] = {}
        ended: set[str] = set()
        tokens: dict[str, tuple[int, ...]] = {}
        scores: dict[str, tuple[TokenScore, ...]] = {}
        prompt_scores: dict[str, PromptScores] = {}
        pooled: dict[str, bytes] = {}
        if step.scheduled:
            batch = build_batch(step.scheduled, self._rows, self._block_size)
            if self._constrainer is not None:
                self._constrainer.start(batch.sampling_rows)  # the masks are computed while the model runs
            hidden = self._decoder(batch.token_ids, batch.positions, batch.paged, self._kv_cache.layers)
            sampling = [scheduled for scheduled in step.scheduled if scheduled.samples]
            if sampling:
                tokens, scores = self._sample(sampling, batch, hidden, errors, ended)
            prompt_scores = self._score_prompts(step.scheduled, hidden, errors)
            pooled = self._pooling.add(step.scheduled, hidden, errors)
        return FinishedStep(StepResult(step.step_id, tokens, errors, scores, prompt_scores, frozenset(ended), pooled))

    def release(self) -> None:
        """Lets go of weights and cache, whoever else still holds this runner."""
        self._decoder.to("meta")
        self._kv_cache.release()
        if self._constrainer is not None:
            self._constrainer.close()
        return_freed_memory()

    def _admit_grammar(self, admission: Admission) -> None:
        params = admission.params
        if params.structured is None:
            return
        if self._constrainer is None:
            raise EngineError("structured: this runner was made without grammars")
        ends = (*(() if params.ignore_eos else admission.eos_token_ids), *params.stop_token_ids)
        answer = admission.token_ids[admission.num_prompt_tokens :]
        self._constrainer.admit(admission.row, params.structured, answer, ends if params.min_tokens else ())

    def _sample(
        self,
        sampling: Sequence[ScheduledRequest],
        batch: InputBatch,
        hidden: Tensor,
        errors: dict[str, str],
        ended: set[str],
    ) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[TokenScore, ...]]]:
        """Draws a token for each of these requests and scores it for those that ask; notes who failed, and
        whose grammar has ended."""
        logits = self._decoder.logits(hidden[batch.sampling_indices])
        if self.observe_logits is not None:
            self.observe_logits(sampling, logits)
        broken = logits.sum(-1).isnan()  # a NaN anywhere in the row
        asking = self._logprobs.asking(batch.sampling_rows)
        # Sampling changes the logits; whoever asks for logprobs gets those of the model.
        unchanged = logits[torch.from_numpy(asking).to(logits.device)] if len(asking) else None
        masks = None if self._constrainer is None else self._constrainer.masks(batch.sampling_rows)
        sampling_batch = self._rows.sampling_batch(
            batch.sampling_rows, batch.sampling_positions, None if masks is None else masks.words
        )
        if masks is not None:
            sampling_batch.parameters["min_length"][masks.only_ends] = 0  # where only an end can follow, it may
        sampled = sample(logits, sampling_batch, self._decoder.kernels)
        drawn = sampled.token_ids
        device = drawn.device
        self._rows.token_ids[
            torch.from_numpy(batch.sampling_rows).to(device), torch.from_numpy(batch.sampling_positions).to(device)
        ] = drawn
        tokens: dict[str, tuple[int, ...]] = {
            entry.request_id: (token,) for entry, token in zip(sampling, drawn.tolist(), strict=True)
        }
        failures = sampled.failures() | dict.fromkeys(broken.nonzero()[:, 0].tolist(), _NOT_NUMBERS)
        if self._constrainer is not None and masks is not None:
            advanced = self._constrainer.advance(batch.sampling_rows, drawn.tolist())
            broken_rows = masks.errors | advanced.errors
            failures |= {i: broken_rows[s.row] for i, s in enumerate(sampling) if s.row in broken_rows}
            ended.update(s.request_id for s in sampling if s.row in advanced.ended)
        for index, message in failures.items():
            errors[sampling[index].request_id] = message
            del tokens[sampling[index].request_id]
        scores: dict[str, tuple[TokenScore, ...]] = {}
        if unchanged is not None:
            num_top = self._logprobs.num_top(batch.sampling_rows[asking])
            found = score_tokens(unchanged, drawn[torch.from_numpy(asking).to(device)], num_top)
            scores = {sampling[i].request_id: (score,) for i, score in zip(asking, found, strict=True)}
        return tokens, scores

    def _score_prompts(
        self, scheduled: Sequence[ScheduledRequest], hidden: Tensor, errors: dict[str, str]
    ) -> dict[str, PromptScores]:
        results: dict[str, PromptScores] = {}
        for part in self._logprobs.prompt_rows(scheduled):
            found = score_prompt(part, hidden, self._decoder.logits, self._rows.token_ids)
            if found is None:
                errors[part.request_id] = _NOT_NUMBERS
            else:
                results[part.request_id] = found
        return results


class FinishedStep:
    """The pending result of a runner that does not run ahead."""

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def result(self) -> StepResult:
        return self._result
