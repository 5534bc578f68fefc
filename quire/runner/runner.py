"""Computes steps, one after the other, and knows nothing of queues or of which blocks are free.

`submit` sends a step off and returns; nothing in it waits for the device. The tokens a step samples
are written to the request rows on the device, where the next step finds them, and travel to the
host on a stream of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from quire.backends.select import device_of
from quire.constrain.masks import Constrainer
from quire.constrain.step_grammars import StepGrammars
from quire.errors import CapacityError, EngineError
from quire.kernels.ops import Int32Array
from quire.kernels.weights import Weight
from quire.models.adapters import Adapter
from quire.models.decoder import Decoder
from quire.models.linear import NOT_LISTED
from quire.models.parameters import SleepLevel
from quire.runner.adapters import NO_ADAPTER, NO_ADAPTERS, AdapterSlots
from quire.runner.batch import (
    BatchShape,
    InputBatch,
    build_batch,
    lag_of,
    note_accepted,
    write_draft_tokens,
)
from quire.runner.drafting import ModelDrafter
from quire.runner.graphs import DecodeGraphs, DecodeOutput
from quire.runner.kv_cache import KVCache
from quire.runner.pooling import PoolingRows
from quire.runner.prediction import PredictingDrafter
from quire.runner.recorded import RecordedSteps
from quire.runner.request_rows import RequestRows
from quire.runner.step_outputs import PendingStep, StepOutputs
from quire.sampling.logprobs import Logprobs
from quire.sampling.metadata import Indices, SamplingMetadata
from quire.sampling.sampler import UNDEFINED, SampledTokens, Sampler
from quire.step import ScheduledRequest, Step

LogitsObserver = Callable[[Sequence[ScheduledRequest], Indices, Tensor], None]
"""Called with the request, the position and the unmasked logits of each sampled token; for tests
and tools.
"""


class Runner:
    """Owns the device state: the request rows and the memory of the cache."""

    broken: str | None = None
    broken_fd: int | None = None
    """Why it can compute nothing more, and a file that becomes readable then; set by
    `quire.parallel` only.
    """

    def __init__(
        self,
        decoder: Decoder,
        kv_cache: KVCache,
        request_rows: RequestRows,
        constrainer: Constrainer | None = None,
        graphs: DecodeGraphs | RecordedSteps | None = None,
        drafter: ModelDrafter | PredictingDrafter | None = None,
        rejects: bool = False,
        adapters: AdapterSlots | None = None,
    ) -> None:
        """The `constrainer` is needed for structured output only. `graphs` compute small steps in
        one launch. With a `drafter`, `submit` waits for the step's tokens, to draft after them.
        `rejects`: draft tokens are accepted by rejection sampling, which keeps the tokens'
        probabilities but not the same answers. `adapters` are those that requests may have.
        """
        spec, kernels = decoder.spec, decoder.kernels
        max_num_seqs, device = len(request_rows.token_ids), request_rows.token_ids.device
        self._decoder = decoder
        self._kv_cache = kv_cache
        self._request_rows = request_rows
        self._upload = request_rows.uploader.upload
        self._sampler = Sampler(max_num_seqs, spec.vocab_size, kernels, device)
        self._logprobs = Logprobs(device)
        self._pooling = PoolingRows(device)
        self._grammars = StepGrammars(constrainer)
        self._device = device_of(device)
        self._copy_stream = self._device.copy_stream()
        self._graphs = graphs
        self._drafter = drafter
        self._rejects = rejects
        self.adapters = adapters
        self.is_asleep = False
        self.observe_logits: LogitsObserver | None = None

    @torch.inference_mode()
    def submit(self, step: Step) -> PendingStep:
        """Starts the step. On the CPU it is done when this returns."""
        if self.is_asleep:
            raise EngineError("the model is asleep: wake it before it computes")
        self._apply(step)
        outputs = StepOutputs(step.step_id)
        if step.scheduled:
            self._compute(step, outputs)
        pending = PendingStep(outputs, self._copy_stream)
        self._grammars.submitted(pending)
        if self._graphs is not None and step.scheduled:
            self._graphs.capture_next()
        if self._drafter is not None and any(entry.num_drafts for entry in step.scheduled):
            # A request with a grammar gets its drafts from the grammar (see
            # `StepOutputs._advance`).
            free = [entry for entry in step.scheduled if not self._grammars.constrains(entry.row)]
            pending.add_drafts(self._drafter.draft(free, pending.result().tokens, self._sampler))
        return pending

    @torch.inference_mode()
    def read_adapter(self, folder: Path) -> Adapter:
        """Reads an adapter for `load_adapter`, in any thread."""
        if self.adapters is None:
            raise EngineError(NO_ADAPTERS)
        return self.adapters.loader.load(folder)

    @torch.inference_mode()
    def load_adapter(self, folder: Path, adapter: Adapter | None = None) -> Adapter:
        """Reads an adapter, unless that was done before; requests may name it by its digest until
        it is removed.
        """
        if self.adapters is None:
            raise EngineError(NO_ADAPTERS)
        return self.adapters.load(folder, adapter)

    def remove_adapter(self, digest: str) -> None:
        """Lets go of an adapter that no request has."""
        if self.adapters is not None:
            self.adapters.remove(digest)

    @torch.inference_mode()
    def update(self, weights: Mapping[str, Weight]) -> None:
        """Replaces weights between two steps, none of which is in flight: see `Parameters.update`.
        What the cache holds is of the old ones.
        """
        self._decoder.update(weights)

    @torch.inference_mode()
    def sleep(self, level: SleepLevel) -> None:
        """Gives the memory of weights and cache back; no step may be in flight, and none is taken
        before `wake`. If there is no host memory to keep the weights in (level 1), it raises, and
        is awake as before.
        """
        try:
            self._decoder.sleep(level)
            if self._drafter is not None:
                self._drafter.sleep()
            self._kv_cache.sleep()
            if self._graphs is not None:
                self._graphs.sleep()
        except BaseException:
            self.wake()
            raise
        self.is_asleep = True
        self._device.return_freed_memory()

    @torch.inference_mode()
    def wake(self) -> None:
        """Takes the memory again. With too little of it free, it stays asleep, and this can be
        tried again.
        """
        try:
            self._decoder.wake()
            self._kv_cache.wake()
            if self._drafter is not None:
                self._drafter.wake()
            if self._graphs is not None:
                self._graphs.wake()
        except torch.OutOfMemoryError as error:
            self.sleep(1)  # what is awake by now; the rest sleeps as it did
            raise CapacityError(
                f"There is too little free memory to wake up: free some, and try again. {error}"
            ) from error
        self.is_asleep = False

    def held_rows(self) -> frozenset[int]:
        """Request rows that would keep a step waiting for their masks (see
        `quire.constrain.ahead`).
        """
        return self._grammars.held_rows()

    def wait_for_held(self) -> None:
        """For a moment, or until one of them would not."""
        self._grammars.wait_for_held()

    def release(self) -> None:
        """Frees weights and cache, even if this object lives on: it sleeps for good."""
        self.sleep(2)
        self._graphs = None
        if self._drafter is not None:
            self._drafter.release()
        self._decoder.release()
        self._kv_cache.release()
        self._grammars.close()
        self._device.return_freed_memory()

    def _apply(self, step: Step) -> None:
        """Brings the device state up to date: copied blocks, finished and admitted requests, new
        blocks.
        """
        if self.adapters is not None:
            # first: rows that are given up lose their slots even if something else fails
            self.adapters.apply(step)
        self._kv_cache.copy_blocks(step.copies)
        if self._drafter is not None:
            self._drafter.apply(step)
        self._grammars.apply(step)
        for admission in step.admitted:
            self._sampler.admit(admission)
            self._logprobs.admit(admission)
            self._pooling.admit(admission)
        self._request_rows.apply(step)

    def _slots_of(self, shape: BatchShape) -> Int32Array | None:
        """Those of its requests' adapters; None if none has one."""
        return None if self.adapters is None else self.adapters.of_rows(shape.request_rows)

    def _compute(self, step: Step, outputs: StepOutputs) -> None:
        """Runs the model and samples; also scores prompts and pools hidden states for the requests
        that ask for it.
        """
        shape = BatchShape.of(step)
        lag = lag_of(shape, self._request_rows)
        if shape.has_draft_tokens:
            write_draft_tokens(shape, self._request_rows, lag)
        decoded = self._run_graph(shape, lag)
        hidden = None if decoded is None else decoded.hidden
        batch: InputBatch | None = None
        kernels, sampled_for = self._decoder.kernels, shape.sampled_for(step.scheduled)
        metadata = self._special_metadata(shape, sampled_for, lag)
        if metadata is not None:
            self._grammars.start(metadata.request_rows)  # masks are computed while the model runs
        sampled: SampledTokens | None = None
        if decoded is not None and metadata is None:  # a graph has computed the step and sampled
            if sampled_for:
                sampled = SampledTokens(decoded.sampled)
                outputs.add_tokens(sampled_for, sampled)
        elif decoded is not None and metadata is not None:
            # its logits are used, its tokens are not
            if shape.has_draft_tokens:
                # The graph has sampled plain tokens over the draft tokens, which are the history of
                # the samples after them.
                write_draft_tokens(shape, self._request_rows, lag)
            sampled = self._sample(outputs, sampled_for, shape, metadata, decoded.logits.float())
        else:  # there is no graph for this step
            batch = build_batch(
                shape,
                self._request_rows,
                self._decoder,
                lag,
                self._slots_of(shape),
                () if self.adapters is None else self.adapters.not_captured,
            )
            hidden = self._decoder(
                batch.token_ids,
                batch.positions,
                batch.paged,
                self._kv_cache.layers,
                batch.adapters,
                batch.by_slot,
            )
            if sampled_for:
                logits = self._decoder.logits(
                    hidden[batch.logits_indices],
                    adapters=batch.sample_adapters,
                    by_slot=batch.sample_by_slot,
                )
                if metadata is None:
                    places = batch.sample_request_rows, batch.sample_positions
                    sampled = SampledTokens(self._request_rows.sample(kernels, logits, *places))
                    outputs.add_tokens(sampled_for, sampled)
                else:
                    sampled = self._sample(outputs, sampled_for, shape, metadata, logits.float())
            for part in self._logprobs.prompt_parts(step.scheduled):
                tokens = self._request_rows.token_ids
                head = partial(self._prompt_logits, part.request_row)
                outputs.add_prompt_logprobs(part, part.score(hidden, head, tokens, kernels))
            self._pooling.add(outputs, step.scheduled, hidden)
        if self._drafter is not None:
            self._drafter.follow(shape, batch, hidden, lag)
        if sampled is not None and (shape.has_draft_tokens or shape.is_ahead):
            note_accepted(shape, self._request_rows, sampled.tensor, lag)

    def _prompt_logits(self, request_row: int, hidden: Tensor) -> Tensor:
        """Of some hidden states of one request."""
        slot = NO_ADAPTER if self.adapters is None else self.adapters.of_row(request_row)
        if self.adapters is None or slot == NO_ADAPTER:
            return self._decoder.logits(hidden)
        slots = torch.full((len(hidden),), slot, dtype=torch.int32, device=hidden.device)
        by_slot = NOT_LISTED
        if slot in self.adapters.not_captured:
            by_slot = {slot: torch.arange(len(hidden), device=hidden.device)}
        return self._decoder.logits(hidden, adapters=slots, by_slot=by_slot)

    def _special_metadata(
        self, shape: BatchShape, sampled_for: Sequence[ScheduledRequest], lag: Tensor | None
    ) -> SamplingMetadata | None:
        """The step's samples for the `Sampler`; None if `Kernels.sample_rows` (temperature and seed
        only) is enough.
        """
        is_watched = self.observe_logits is not None or (self._rejects and shape.has_draft_tokens)
        may_be_plain = not is_watched and self._decoder.kernels.sample_rows is not None
        rows = [entry.row for entry in sampled_for]
        if (
            may_be_plain
            and self._sampler.asks_nothing(rows)
            and not self._logprobs.are_wanted(rows)
        ):
            # whatever the positions are, which for requests that run ahead are not known here
            return None
        metadata = self._sampler.metadata(
            shape.sample_request_rows, shape.sample_positions, self._request_rows.token_ids
        )
        if self._rejects and shape.has_draft_tokens:
            metadata = replace(metadata, draft_tokens=shape.compared_draft_tokens)
        if lag is not None:
            # The sampler needs the positions on the host: here, and only here, a GPU's step before
            # is waited for.
            metadata = replace(
                metadata, positions=metadata.positions - lag.cpu().numpy()[shape.sample_owners]
            )
        is_plain = (
            may_be_plain
            and self._sampler.is_plain(metadata)
            and not self._logprobs.are_wanted(rows)
        )
        return None if is_plain else metadata

    def _run_graph(self, shape: BatchShape, lag: Tensor | None) -> DecodeOutput | None:
        """Computes a small step with a graph, if there is one for it. Not where hidden states are
        needed, which graphs don't return, nor for prompts beside a draft model, which needs their
        batch.
        """
        graphs, is_sampled = self._graphs, shape.is_sampled_everywhere
        needs_hidden = self._logprobs.scores_prompts or self._pooling.has_rows
        if self._drafter is not None and self._drafter.takes_hidden:
            needs_hidden = needs_hidden or not isinstance(graphs, RecordedSteps)
        if (
            graphs is None
            or needs_hidden
            or not (is_sampled or (graphs.takes_prompts and self._drafter is None))
        ):
            return None
        if lag is not None and not shape.is_decode:
            lag = lag[self._upload(shape.token_owners)[0]]
        shape_of_rows = shape if shape.is_decode else shape.by_token()
        slots = self._slots_of(shape_of_rows)
        if (
            slots is not None
            and self.adapters is not None
            and not self.adapters.are_captured(slots)
        ):
            return None
        decoded = graphs.run(shape_of_rows, lag, slots)
        if decoded is None or is_sampled:
            return decoded
        (sampled_rows,) = self._upload(shape.logits_indices)
        return replace(
            decoded,
            sampled=decoded.sampled[:, sampled_rows],
            logits=decoded.logits[sampled_rows],
        )

    def _sample(
        self,
        outputs: StepOutputs,
        sampled_for: Sequence[ScheduledRequest],
        shape: BatchShape,
        metadata: SamplingMetadata,
        logits: Tensor,
    ) -> SampledTokens:
        """Samples from float32 logits with all the requests' parameters, and computes the logprobs
        they ask for.
        """
        if self.observe_logits is not None:
            self.observe_logits(sampled_for, metadata.positions, logits)
        scored = self._logprobs.keep(logits, metadata)
        masks = self._grammars.masks(
            metadata.request_rows, shape.sample_follows if shape.has_draft_tokens else None
        )
        undefined: list[int] = []
        if masks is not None:
            undefined = np.flatnonzero(masks.undefined).tolist()
            metadata = replace(metadata, masks=masks.words, only_ends=masks.only_ends)
        sampled = self._sampler.sample(logits, metadata)
        self._request_rows.write_tokens(
            metadata.request_rows, metadata.positions, sampled.token_ids
        )
        if undefined:  # for `note_accepted`: the draft token before such a sample counts as wrong
            (index,) = self._upload(np.array(undefined))
            sampled.tensor[1].index_fill_(0, index, UNDEFINED)
        advance = None if masks is None else partial(self._grammars.advance, masks)
        outputs.add_tokens(sampled_for, sampled, undefined, advance)
        if scored is not None:
            outputs.add_logprobs(
                sampled_for, scored, scored.score(sampled.token_ids, self._decoder.kernels)
            )
        return sampled
