"""Decode steps on the CPU as recorded calls: what CUDA graphs are on a GPU.

A recording has fixed memory and a fixed number of rows; one is made when a step has that many rows for the first time.
It makes the calls that the decoder made then, so its bits are those of a step without.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.kernels.ops import Int32Array, LayerCache
from quire.models.decoder import Decoder
from quire.models.spec import MlpSpec
from quire.runner.batch import StepShape
from quire.runner.graphs import DecodeOutput
from quire.runner.request_rows import RequestRows

_MOST_ROWS = 128
"""Of a step that checks guesses: with more, Python takes no time to speak of."""


class _Recording(NamedTuple):
    inputs: Int32Array
    """[6, rows + 1]: of each token its request row, position and length; then of each run of tokens of one request
    where its queries begin, its length and its request row. There are as many runs as tokens, the last ones empty."""
    output: DecodeOutput
    replay: Callable[[], None]


class RecordedSteps:
    """Records and replays them."""

    takes_prompts = False
    """All their tokens would be scored: more work than what Python takes, by estimate."""

    def __init__(self, decoder: Decoder, caches: list[LayerCache], rows: RequestRows) -> None:
        assert decoder.kernels.record is not None
        self._record = decoder.kernels.record
        self._decoder = decoder
        self._caches = caches
        self._rows = rows
        self._most_rows = max(_MOST_ROWS, len(rows.token_ids))
        self._recordings: dict[int, _Recording | None] = {}

    @staticmethod
    def fit(decoder: Decoder) -> bool:
        """Whether all that the decoder computes are calls that can be recorded: experts are chosen in Python."""
        is_plain = all(isinstance(layer.mlp, MlpSpec) for layer in decoder.spec.layers)
        keeps_dtype = decoder.dtype == torch.float32 or decoder.embedding.parts[0].tensors[0].dtype == decoder.dtype
        return decoder.kernels.record is not None and is_plain and keeps_dtype

    def run(self, shape: StepShape, lag: Tensor | None = None) -> DecodeOutput | None:
        """Computes a decode step, whose rows begin `lag` earlier; None where it takes too much memory to keep."""
        count = len(shape.request_rows)
        if count > self._most_rows:
            return None
        if count not in self._recordings:
            inputs = torch.arange(count + 1, dtype=torch.int32).repeat(6, 1)
            self._fill(inputs.numpy(), shape, lag)
            self._recordings[count] = recording = self._make(inputs, count)
        else:
            recording = self._recordings[count]
            if recording is not None:
                self._fill(recording.inputs, shape, lag)
                recording.replay()
        return None if recording is None else recording.output

    def capture_next(self) -> None:
        """Nothing is made in advance."""

    def _fill(self, inputs: Int32Array, shape: StepShape, lag: Tensor | None) -> None:
        starts = shape.starts if lag is None else shape.starts - lag.numpy()
        inputs[0, :-1] = rows = shape.request_rows
        inputs[1, :-1] = starts
        inputs[2, :-1] = starts + 1
        if len(rows) == 1:
            inputs[4:, 0] = inputs[2, 0], rows[0]
            return
        # Tokens that follow each other, as guesses do, attend together: keys are read once for all of them. A few runs
        # are cut into an even number of parts, so that there is work for all threads.
        is_last = np.append((rows[1:] != rows[:-1]) | (starts[1:] != starts[:-1] + 1), True)
        num_runs = int(np.count_nonzero(is_last))
        size = len(rows) if num_runs > 4 else -(-len(rows) // (2 * num_runs * -(-len(rows) // (16 * num_runs))))
        ends = np.flatnonzero(is_last | (np.arange(1, len(rows) + 1) % size == 0)) + 1
        inputs[3, 1 : len(ends) + 1], inputs[3, len(ends) + 1 :] = ends, len(rows)
        inputs[4:, : len(ends)], inputs[4:, len(ends) :] = (starts[ends - 1] + 1, rows[ends - 1]), 0

    def _make(self, inputs: Tensor, count: int) -> _Recording | None:
        """Records a step, which computes it."""
        rows, positions, lengths, _, run_lengths, run_rows = inputs[:, :count].unbind()
        found: list[DecodeOutput] = []
        of, drawn = self._rows, (rows.long(), lengths.long())
        guesses = of.token_ids[drawn]

        def compute() -> None:
            token_ids, places, paged = of.inputs(
                self._decoder.kernels,
                rows,
                positions,
                query_start=inputs[3],
                context_lens=run_lengths,
                table_rows=run_rows,
                max_context_len=int(lengths.max()),
            )
            hidden = self._decoder(token_ids, places, paged, self._caches)
            logits = self._decoder.logits(hidden)
            found.append(DecodeOutput(of.draw(self._decoder.kernels, logits, rows, lengths), logits))

        replay = self._record(compute)
        if replay is None:
            of.token_ids[drawn] = guesses  # for whoever computes the step instead
            return None
        return _Recording(inputs.numpy(), found[-1], replay)
