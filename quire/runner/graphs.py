"""Steps of few tokens as graphs: one launch for a whole step, from the request rows to the sampled
tokens.

A graph treats every token as a decode of its own, also a draft token or a token of a prompt. It
has fixed memory and a fixed number of rows. So there are graphs of a series of sizes; a step takes
the smallest one that is large enough, and the rows it does not need are padding, whose results are
not stored. A backend with several attention kernels picks one by the kind of work list it made for
the step (`Kernels.attention_work`), so there is a graph for each size and kind of list. All share
one memory pool. The largest is captured first, so that the others fit into its memory; then the one
that the last step lacked; then the rest. A capture takes tens of milliseconds, so only one is made
after each step.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.kernels.device import GraphPool
from quire.kernels.ops import Int32Array, MixerCache
from quire.kernels.tensor_memory import TensorMemory
from quire.models.decoder import Decoder
from quire.process.life import sign_of_life
from quire.runner.batch import BatchShape
from quire.runner.request_rows import RequestRows
from quire.sampling.upload import Uploader

_MAX_WORK = 4096
"""Items of the attention work list in one graph; a step with more (many long sequences) is computed
without a graph.
"""
_MAX_PROMPT_KEYS = 1 << 17
"""In a graph every prompt token reads the keys before it by itself. With more reads than this in a
step, the prompt kernel, which reads a key once for many tokens, should be quicker even without a
graph (an estimate).
"""


Kind = tuple[int, str, bool]
"""A graph: its number of rows, the kind of its work list, and whether rows may have adapters."""


@dataclass(frozen=True, slots=True)
class DecodeOutput:
    """What a decode step left on the device."""

    sampled: Tensor
    """int64 [2, rows]: token ids and flags (see `sample_rows`); on the CPU the next step overwrites
    it.
    """
    logits: Tensor
    """[rows, vocab] in the model's dtype, not changed by sampling; the next step overwrites it."""
    hidden: Tensor | None = None
    """[rows, hidden]: final hidden states, of recorded steps; the next step overwrites them."""


class DecodeGraphs:
    """Captures the graphs and replays them."""

    takes_prompts = True

    def __init__(
        self,
        decoder: Decoder,
        caches: list[MixerCache],
        rows: RequestRows,
        most_tokens: int,
        pool: GraphPool,
    ) -> None:
        spec, device = decoder.spec, rows.token_ids.device
        self._decoder = decoder
        self._caches = caches
        self._rows = rows
        self._kernels = decoder.kernels
        self._uploader = Uploader(device)
        (self._heads,) = spec.head_shapes
        self._max_context_len = rows.token_ids.shape[1] - 1
        self._sizes = graph_sizes(most_tokens)
        self._most_work: dict[tuple[int, str], int] = {}
        """By graph (size, kind of work list): how many items its work list has room for."""
        for size, before in zip(self._sizes, [0, *self._sizes], strict=False):
            lists = self._kernels.decode_lists(before + 1, size, self._max_context_len, self._heads)
            self._most_work |= {
                (size, name): max(min(_MAX_WORK, most), 512) for name, most in lists.items()
            }
        self._to_capture = list(self._most_work)
        """Graphs not captured yet. The largest is last and captured first. Those for steps in which
        some rows have adapters are captured when a step lacks them.
        """
        self._wanted: Kind = (*self._to_capture[-1], False)
        """The graph that the last step lacked: captured next."""
        # each part of the inputs begins at a multiple of 16
        self._largest = largest = -(-self._sizes[-1] // 16) * 16
        self._replays: dict[Kind, Callable[[], None]] = {}
        self._inputs = torch.zeros(
            3 * largest + 8 * (1 + _MAX_WORK), dtype=torch.int32, device=device
        )
        self._slots = torch.full((largest,), -1, dtype=torch.int32, device=device)
        """Of the rows' adapters."""
        self._sampled = torch.zeros(2, largest, dtype=torch.int64, device=device)
        self._logits = torch.zeros(largest, spec.vocab_size, dtype=decoder.dtype, device=device)
        self._pool = pool
        self._buffers = TensorMemory((self._inputs, self._slots, self._sampled, self._logits))

    def sleep(self) -> None:
        """Gives the graphs and their memory back. They know the addresses of weights and cache,
        which are others when these wake: graphs are captured anew then, one after each step, as in
        the beginning.
        """
        self._replays.clear()
        self._pool.reset()
        self._to_capture = list(self._most_work)
        self._wanted = (*self._to_capture[-1], False)
        self._buffers.sleep(keep=False)

    def wake(self) -> None:
        """Takes the memory again."""
        self._buffers.wake()

    def run(
        self, shape: BatchShape, lag: Tensor | None = None, adapters: Int32Array | None = None
    ) -> DecodeOutput | None:
        """Computes a step of decodes, whose positions are `lag` less than `shape` says, if there is
        a graph for it. `adapters`: the slots of the rows' adapters, if some have one. The tokens in
        the output for rows that don't sample mean nothing.
        """
        count, are_sampled = len(shape.request_rows), shape.samples
        if count > self._sizes[-1] or shape.starts[~are_sampled].sum() > _MAX_PROMPT_KEYS:
            return None
        lists = self._kernels.attention_work(
            shape.counts, shape.starts + 1, shape.request_rows, self._heads
        )
        ((name, work),) = lists.items()
        size = self._sizes[bisect_left(self._sizes, count)]
        kind = size, name, adapters is not None
        replay = self._replays.get(kind)
        if replay is None or len(work) > 1 + self._most_work[size, name]:
            self._wanted = kind
            return None
        if adapters is not None:
            self._uploader.upload_into(self._slots, self._padded(adapters, -1))
        self._uploader.upload_into(
            self._inputs,
            self._padded(shape.request_rows, -1),
            self._padded(shape.starts, 0),
            # Rows that don't sample write their token to the last column of the request rows, which
            # is never read.
            self._padded(np.where(are_sampled, shape.starts + 1, self._max_context_len), 0),
            work,
        )
        if lag is not None:
            places = self._inputs[: 3 * self._largest].view(3, -1)[:, :count]
            places[1:] -= lag
            by_row = torch.zeros_like(self._rows.num_computed_tokens)
            by_row[places[0].long()] = lag
            listed = self._inputs[3 * self._largest :].view(-1, 8)[: len(work)]
            self._kernels.shorten_attention_work_({name: listed}, by_row)
        replay()
        return DecodeOutput(self._sampled[:, :count].clone(), self._logits[:count])

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Computes steps of padding only, so that the kernels of all sizes are compiled and loaded:
        kernels are made for ranges of sizes, which end at powers of two.
        """
        self._inputs.zero_()
        self._inputs[: self._largest] = -1

        def compute(has_inputs: bool) -> None:
            for size, name in self._most_work:
                if size.bit_count() == 1 or size == self._sizes[-1]:
                    self._compute(size, name, has_inputs)
                    sign_of_life()

        self._kernels.compile_together(lambda: compute(has_inputs=False))
        compute(has_inputs=True)

    @torch.inference_mode()
    def capture_next(self) -> None:
        """Captures one of the missing graphs, if any, while the device goes on computing."""
        size, name, has_adapters = self._wanted
        if has_adapters and self._replays and self._wanted not in self._replays:
            # Padding only, before: kernels that only such steps run are loaded then.
            self._inputs.zero_()
            self._inputs[: self._largest] = -1
            self._slots.fill_(-1)
            self._compute(size, name, has_adapters=True)
            compute = partial(self._compute, size, name, has_adapters=True)
            self._replays[self._wanted] = self._pool.capture(compute)
            return
        if not self._to_capture:
            return
        is_wanted = bool(self._replays) and (size, name) in self._to_capture
        index = self._to_capture.index((size, name)) if is_wanted else -1
        size, name = self._to_capture.pop(index)
        self._replays[size, name, False] = self._pool.capture(partial(self._compute, size, name))

    def _compute(
        self, size: int, name: str, has_inputs: bool = True, has_adapters: bool = False
    ) -> None:
        rows, positions, next_positions = (
            self._inputs[: 3 * self._largest].view(3, -1)[:, :size].unbind()
        )
        work = self._inputs[3 * self._largest :].view(-1, 8)[: 1 + self._most_work[size, name]]
        token_ids, places, paged = self._rows.inputs(
            self._kernels,
            rows,
            positions,
            query_start=rows,  # this and the next two are not read: `work` has the same
            context_lens=positions,
            table_rows=rows,
            max_context_len=self._max_context_len,
            work={self._heads: {name: work}},
        )
        if not has_inputs:  # kernels are compiled and not run, so these tensors were not written
            token_ids, places = torch.zeros_like(token_ids), torch.zeros_like(places)
        adapters = self._slots[:size] if has_adapters else None
        hidden = self._decoder(token_ids, places, paged, self._caches, adapters)
        logits = self._decoder.logits(hidden, out=self._logits[:size], adapters=adapters)
        self._rows.sample(self._kernels, logits, rows, next_positions, self._sampled[:, :size])

    def _padded(self, values: npt.NDArray[np.int32], filler: int) -> npt.NDArray[np.int32]:
        result = np.full(self._largest, filler, np.int32)
        result[: len(values)] = values
        return result


def graph_sizes(most: int) -> list[int]:
    """Rows of the graphs: close together at small batches, where padding costs most (it makes
    experts be read).
    """
    sizes = [
        *range(1, 8),
        *range(8, 16, 2),
        *range(16, 32, 4),
        *range(32, 64, 8),
        *range(64, 256, 16),
    ]
    sizes += range(256, most, 64)
    return [size for size in sizes if size < most] + [most]
