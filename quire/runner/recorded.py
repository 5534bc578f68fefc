"""Decode steps on the CPU as recorded calls: what CUDA graphs are on a GPU.

A recording has fixed memory and a fixed number of rows; it is made by the first step with that many
rows. Replaying it makes the same calls as the decoder made then, so the bits are those of a step
without a recording.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.kernels.ops import Int32Array, MixerCache
from quire.kernels.recurrent import RecurrentSpec
from quire.models.decoder import Decoder
from quire.models.spec import MlpSpec
from quire.runner.batch import BatchShape
from quire.runner.graphs import DecodeOutput
from quire.runner.request_rows import RequestRows

_MOST_ROWS = 512
"""A recording has at most this many rows (or all request rows): in larger steps Python's time does
not matter.
"""


class _Recording(NamedTuple):
    inputs: Int32Array
    """[7, rows + 1]. For each token: request row, position, position + 1. Then for each run of
    consecutive tokens of a request: index of its first token, context length, request row. There
    are as many runs as tokens, some empty. Last the slot of each token's adapter.
    """
    output: DecodeOutput
    replay: Callable[[], None]


class RecordedSteps:
    """Records decode steps and replays them."""

    takes_prompts = False
    """A recording computes logits for every token: for prompts more work than it saves in Python
    (an estimate).
    """

    def __init__(self, decoder: Decoder, caches: list[MixerCache], rows: RequestRows) -> None:
        assert decoder.kernels.record is not None
        self._record = decoder.kernels.record
        self._decoder = decoder
        self._caches = caches
        self._rows = rows
        self._most_rows = max(_MOST_ROWS, len(rows.token_ids))
        self._recordings: dict[tuple[int, bool], _Recording | None] = {}
        """By the number of rows, and whether some have adapters: without any, a step makes the calls
        of an engine that knows none.
        """

    @staticmethod
    def fit(decoder: Decoder) -> bool:
        """Whether all that the decoder computes can be recorded: not a mixture of experts, which
        Python chooses.
        """
        layers = decoder.spec.layers
        is_plain = all(
            isinstance(layer.mlp, MlpSpec) and layer.reads_layer is None and not layer.value_norm
            for layer in layers
        )
        # tables that are looked up, and rows that are put together, by torch
        is_plain = is_plain and not decoder.spec.per_layer_size
        is_plain = is_plain and not any(
            isinstance(one, RecurrentSpec) and one.input_scales for one in decoder.spec.mixers
        )
        is_plain = is_plain and len(decoder.spec.head_shapes) == 1
        is_plain = is_plain and all(map(decoder.kernels.captures, decoder.spec.mixers))
        stored = decoder.weights["embedding"].parts[0].tensors[0].dtype
        keeps_dtype = decoder.dtype in (torch.float32, stored)
        return decoder.kernels.record is not None and is_plain and keeps_dtype

    def run(
        self, shape: BatchShape, lag: Tensor | None = None, adapters: Int32Array | None = None
    ) -> DecodeOutput | None:
        """Computes a step of decodes, whose positions are `lag` less than in `shape`; None if it is
        too large. `adapters`: the slots of the rows' adapters, if some have one.
        """
        count = len(shape.request_rows)
        if count > self._most_rows:
            return None
        kind = count, adapters is not None
        if kind not in self._recordings:
            inputs = torch.arange(count + 1, dtype=torch.int32).repeat(7, 1)
            self._fill(inputs.numpy(), shape, lag, adapters)
            self._recordings[kind] = recording = self._make(inputs, count, adapters is not None)
        else:
            recording = self._recordings[kind]
            if recording is not None:
                self._fill(recording.inputs, shape, lag, adapters)
                recording.replay()
        return None if recording is None else recording.output

    def capture_next(self) -> None:
        """Recordings are made by the steps themselves, never in advance."""

    def sleep(self) -> None:
        """Recordings stay: host memory that is given back has the same addresses when it is taken
        again.
        """

    def wake(self) -> None:
        """There is nothing to take."""

    def _fill(
        self,
        inputs: Int32Array,
        shape: BatchShape,
        lag: Tensor | None,
        adapters: Int32Array | None,
    ) -> None:
        if adapters is not None:
            inputs[6, :-1] = adapters
        starts = shape.starts if lag is None else shape.starts - lag.numpy()
        inputs[0, :-1] = rows = shape.request_rows
        inputs[1, :-1] = starts
        inputs[2, :-1] = starts + 1
        if len(rows) == 1:
            inputs[4:6, 0] = inputs[2, 0], rows[0]
            return
        # Consecutive tokens of a request (draft tokens) attend as one run, so that their keys are
        # read once. If there are only a few runs, each is divided into an even number of parts, so
        # that there is work for all threads.
        is_last = np.append((rows[1:] != rows[:-1]) | (starts[1:] != starts[:-1] + 1), True)
        num_runs = int(np.count_nonzero(is_last))
        size = (
            len(rows)
            if num_runs > 4
            else -(-len(rows) // (2 * num_runs * -(-len(rows) // (16 * num_runs))))
        )
        ends = np.flatnonzero(is_last | (np.arange(1, len(rows) + 1) % size == 0)) + 1
        inputs[3, 1 : len(ends) + 1], inputs[3, len(ends) + 1 :] = ends, len(rows)
        inputs[4:6, : len(ends)] = starts[ends - 1] + 1, rows[ends - 1]
        inputs[4:6, len(ends) :] = 0

    def _make(self, inputs: Tensor, count: int, has_adapters: bool) -> _Recording | None:
        """Records a step while computing it; None where that takes too much memory."""
        rows, positions, lengths, _, run_lengths, run_rows, slots = inputs[:, :count].unbind()
        adapters = slots if has_adapters else None
        found: list[DecodeOutput] = []
        request_rows, places = self._rows, (rows.long(), lengths.long())
        draft_tokens = request_rows.token_ids[places]

        def compute() -> None:
            token_ids, places, paged = request_rows.inputs(
                self._decoder.kernels,
                rows,
                positions,
                query_start=inputs[3],
                context_lens=run_lengths,
                table_rows=run_rows,
                max_context_len=int(lengths.max()),
            )
            hidden = self._decoder(token_ids, places, paged, self._caches, adapters)
            logits = self._decoder.logits(hidden, adapters=adapters)
            sampled = request_rows.sample(self._decoder.kernels, logits, rows, lengths)
            found.append(DecodeOutput(sampled, logits, hidden))

        replay = self._record(compute)
        if replay is None:
            # sampling has overwritten them; the step is computed again
            request_rows.token_ids[places] = draft_tokens
            return None
        return _Recording(inputs.numpy(), found[-1], replay)
