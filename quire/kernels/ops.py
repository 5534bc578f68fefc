"""The contract every kernel backend meets.

A backend is an object with the methods of `Kernels`; the decoder gets one as an argument and never asks
which it is. `reference.py` defines what each method computes; other backends are tested against it and
against float64.

The rules of exactness, which tests check with `torch.equal`:

- R1  The order of additions behind an output row is fixed by the model's shapes. It never depends on how
      many rows there are, where in the batch a row stands, or what the other rows hold.
- R2  A token's row has the same bits whether it was computed in a whole prompt, a chunk, a single step or
      a recompute. So attention walks a sequence's keys in the same tiles and merges them in the same
      order for one query or a thousand, wherever the blocks lie in the cache.
- R3  What is computed for one request never reads another's rows, not even to multiply them by zero:
      a NaN in a neighbour (or in a block nobody owns) changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """Which sequences a step's rows belong to and where their keys and values lie.

    Rows of the step are the sequences' new tokens one after the other: sequence i owns rows
    `query_start[i] : query_start[i + 1]`, and they are the last ones of its `context_lens[i]` tokens.
    """

    query_start: Tensor
    """int32 [num_sequences + 1], from 0 to the number of rows."""
    context_lens: Tensor
    """int32 [num_sequences]: tokens of the sequence after this step, the new ones included."""
    block_tables: Tensor
    """int32 [num_sequences, max_blocks]: token t lies in block `block_tables[i, t // block_size]`."""
    slot_mapping: Tensor
    """int64 [rows]: where each row's key and value go, `block * block_size + offset`."""
    max_query_len: int
    """The most rows any one sequence has here (a bound for grids; results don't depend on it)."""
    max_context_len: int
    """The longest of `context_lens` (likewise a bound only)."""


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's keys and values: [num_blocks, num_kv_heads, block_size, head_dim] each."""

    keys: Tensor
    values: Tensor

    @property
    def block_size(self) -> int:
        return self.keys.shape[2]


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """One layer's experts, stacked, each as the backend's `pack_linear` returned it."""

    gate_up: Tensor
    """[num_experts, 2 * intermediate, hidden]: gate rows first, then up rows."""
    down: Tensor
    """[num_experts, hidden, intermediate]."""


class Kernels(Protocol):
    """What a backend offers. Rows are always the first dimension; no method changes its inputs unless
    its name ends in an underscore."""

    @property
    def name(self) -> str: ...

    def pack_linear(self, weight: Tensor) -> Tensor:
        """Brings a loaded weight [out, in], or a stack of them, into the layout `linear` and `moe` want
        (often: returns it as it is)."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [rows, in] times weight transposed, plus bias, in x's dtype with float32 accumulation."""

    def embedding(self, token_ids: Tensor, weight: Tensor) -> Tensor:
        """Rows of weight [vocab, hidden], by int64 [rows]. A weight that is also the head comes packed."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / sqrt(mean(x²) + eps) * weight over the last dimension, the mean in float32."""

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(rms_norm(x + residual), x + residual): the sum is rounded to the model's dtype first."""

    def rope(self, x: Tensor, positions: Tensor, cos_sin: Tensor) -> Tensor:
        """Rotates x [rows, heads, head_dim] by `cos_sin[positions]` [max_position, head_dim]:
        cosines in the first half, sines in the second; dimension i pairs with i + head_dim / 2."""

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up of [rows, 2 * size] -> [rows, size]; gate is the first half."""

    def sigmoid_mul(self, gate: Tensor, x: Tensor) -> Tensor:
        """sigmoid(gate) * x of [rows, 1] and [rows, size]."""

    def write_kv_(self, keys: Tensor, values: Tensor, cache: LayerCache, slot_mapping: Tensor) -> None:
        """Stores [rows, num_kv_heads, head_dim] keys and values into their slots."""

    def attention(
        self,
        query: Tensor,
        cache: LayerCache,
        batch: PagedBatch,
        scale: float,
        sliding_window: int | None,
    ) -> Tensor:
        """Causal attention of query [rows, num_heads, head_dim] over the cached keys and values (those of
        this step are already written); grouped heads; a window counts the query's own position."""

    def moe(
        self, x: Tensor, router_logits: Tensor, experts: ExpertWeights, top_k: int, normalize_weights: bool
    ) -> Tensor:
        """Softmax over router_logits [rows, experts] in float32, the top_k (lowest index first among
        equals), weights renormalised on request, experts applied in ascending expert index."""

    def gumbel_argmax(self, logits: Tensor, temperature: Tensor, keys: Tensor) -> Tensor:
        """int64 [rows]: the argmax of float32 logits [rows, vocab] / temperature [rows] + Gumbel noise of the
        int32 keys [rows, 2] (`noise.py`), and of the logits alone in rows of temperature 0. The lowest id wins
        among equals; rows of nothing but minus infinity give 0."""

    def top_values(self, x: Tensor, k: int) -> Tensor:
        """The k largest numbers of each row of float32 x [rows, size], descending, [rows, k]."""

    def keep_between_(self, x: Tensor, low: Tensor, high: Tensor) -> None:
        """Numbers of float32 x [rows, size] below their row's low [rows] or above its high [rows] become minus
        infinity. A limit that is NaN is none."""
