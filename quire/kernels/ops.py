"""The contract every kernel backend meets.

A backend is an object with the methods of `Kernels`; the decoder gets one as an argument and never
asks which it is. `reference.py` defines what each method computes; other backends are tested
against it and against float64.

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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor, dtype, float32, int8

from quire.errors import InvalidRequestError
from quire.kernels.formats import Format
from quire.kernels.layer_state import CacheMemory, LayerState, StoredPart
from quire.kernels.low_rank import (
    ExpertAdapters,
    ExpertTables,
    LowRank,
    LowRankTable,
    PackedLowRank,
)
from quire.kernels.recurrent import (
    ConvolutionCache,
    ConvolutionSpec,
    GatedNormSpec,
    RecurrentCache,
    RecurrentSpec,
    RecurrentWeights,
)
from quire.kernels.shares import MixerShare, length, share_of, times
from quire.kernels.weights import Weight

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """Which sequences a step's rows belong to and where their keys and values lie.

    Rows of the step are the sequences' new tokens one after the other: sequence i owns rows
    `query_start[i] : query_start[i + 1]`, and they are the last ones of its `context_lens[i]`
    tokens.
    """

    query_start: Tensor
    """int32 [num_sequences + 1], from 0 to the number of rows."""
    context_lens: Tensor
    """int32 [num_sequences]: tokens of the sequence after this step, the new ones included."""
    block_tables: Tensor
    """int32 [tables, max_blocks]: token t lies in block `block_tables[table_rows[i], t //
    block_size]`.
    """
    table_rows: Tensor
    """int32 [num_sequences]: the row of `block_tables` that belongs to each sequence."""
    slot_mapping: Tensor
    """int64 [rows]: where each row's key and value go, `block * block_size + offset`."""
    max_context_len: int
    """The longest of `context_lens` (a bound for grids; results don't depend on it)."""
    state_tables: Tensor | None = None
    """int32 [2, tables, blocks of a state], where layers have states: of even chunks, of odd ones."""
    token_rows: Tensor | None = None
    """int32 [rows]: the row of `block_tables` of each row of the step, negative where it is padding;
    None outside an engine: it follows from the lists above. In a graph those are not set, this is.
    """
    positions: Tensor | None = None
    """int32 [rows]: where in its sequence each row stands; set where `token_rows` is."""
    work: Mapping[str, Tensor] | None = None
    """The lists that the backend's `attention_work` made of the batch, on the device; None:
    `attention` makes them.
    """


Batches = tuple[PagedBatch, ...]
"""A `PagedBatch` for each group of layers; they differ in block tables, slots and lists of work
only.
"""


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's keys and values: [num_blocks, num_kv_heads, block_size, head_dim] each, in the
    model's dtype, in FP8, or in int8 with scales. In memory each lies as its shape says, or the
    keys' last two dimensions are exchanged. Values may be the first numbers of the keys, in the
    same memory (latent attention).
    """

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None = None
    """float32 [num_blocks, num_kv_heads, block_size]: the scale of a token's int8 keys in one head.
    It is 1/127 of their largest magnitude, and NaN where not all of them are finite.
    """
    value_scales: Tensor | None = None
    fp8_scales: tuple[float, float] = (1.0, 1.0)
    """The scale of all FP8 keys, and of all FP8 values: stored numbers times the scale are the real
    ones.
    """
    group: int = 0
    """The layer's group: its index in `Batches`."""

    @property
    def scales(self) -> tuple[Tensor | None, Tensor | None]:
        return self.key_scales, self.value_scales

    @property
    def block_size(self) -> int:
        return self.keys.shape[2]

    @property
    def keys_by_dimension(self) -> bool:
        """Whether in memory a block's keys are [head_dim, block_size]."""
        return self.keys.stride(3) != 1


MixerCache = LayerCache | ConvolutionCache | RecurrentCache
"""What one mixer reads and writes; each says its `group`."""


@dataclass(frozen=True, slots=True)
class HeadShape:
    """The heads of a packed query, key and value row."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    def share(self, rank: int, size: int) -> HeadShare:
        """Those of one rank. Where there are fewer key heads than ranks, several of them keep the
        same one, and each takes some of the query heads that look at it.
        """
        if size > self.num_heads:
            raise InvalidRequestError(
                "tensor_parallel_size",
                f"is {size}, but the model has only {self.num_heads} query heads to divide",
            )
        group = self.num_heads // self.num_kv_heads
        if size <= self.num_kv_heads:
            own = share_of(self.num_kv_heads, size, rank)
            shape = replace(self, num_heads=length(own) * group, num_kv_heads=length(own))
            return HeadShare(own.start * group, own.start, shape)
        sharers = [share_of(size, self.num_kv_heads, head) for head in range(self.num_kv_heads)]
        kv_head = next(head for head, ranks in enumerate(sharers) if rank < ranks.stop)
        ranks = sharers[kv_head]
        if length(ranks) > group:
            raise InvalidRequestError(
                "tensor_parallel_size",
                f"is {size}, but each of the model's {self.num_kv_heads} key heads has only {group} query heads "
                "to divide",
            )
        own = share_of(group, length(ranks), rank - ranks.start)
        shape = replace(self, num_heads=length(own), num_kv_heads=1)
        return HeadShare(kv_head * group + own.start, kv_head, shape)


@dataclass(frozen=True, slots=True)
class HeadShare:
    """The heads of one rank: some key heads, and the query heads that look at them."""

    first: int
    first_kv: int
    shape: HeadShape

    @property
    def query(self) -> slice:
        """Its query heads among all."""
        return slice(self.first, self.first + self.shape.num_heads)

    @property
    def kv(self) -> slice:
        """Its key and value heads among all."""
        return slice(self.first_kv, self.first_kv + self.shape.num_kv_heads)


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """A mixer that attends: what every mixer says of itself (`quire.models.spec.Mixer`), it says
    from its heads.
    """

    heads: HeadShape
    scale: float
    """Factor of the products of queries and keys."""
    sliding_window: int | None = None
    """A query sees this many most recent keys, its own included; None: all."""
    soft_cap: float = 0.0
    """Scaled products become cap * tanh(product / cap); 0: no cap."""
    chunk: int | None = None
    """A query sees the keys of its own chunk of so many tokens, counted from the sequence's begin,
    up to itself; None: of all chunks. Not beside a window.
    """
    slopes: tuple[float, ...] = ()
    """ALiBi: each head adds its slope times the distance of a key, a negative number of tokens, to
    the scaled (and capped) product; (): none does.
    """

    @property
    def input_size(self) -> int:
        """Of a packed row of queries, keys and values."""
        return (self.heads.num_heads + 2 * self.heads.num_kv_heads) * self.heads.head_dim

    @property
    def output_size(self) -> int:
        """Of what the output's product takes."""
        return self.heads.num_heads * self.heads.head_dim

    @property
    def rotary_size(self) -> int:
        """Numbers of a head in the tables of rope."""
        return self.heads.head_dim

    def layer_state(self, cache_dtype: dtype, model_dtype: dtype) -> LayerState:
        """Keys and values of every token, or of those in the window; with int8, the scales of both."""
        heads = self.heads.num_kv_heads
        sides = (StoredPart(heads, (self.heads.head_dim,), cache_dtype),) * 2
        scales = (StoredPart(heads, (), float32),) * 2 if cache_dtype == int8 else ()
        keeps: Literal["all", "window", "chunk"] = "all"
        if self.sliding_window or self.chunk:
            keeps = "window" if self.sliding_window else "chunk"
        size = self.sliding_window or self.chunk or 0
        return LayerState((*sides, *scales), keeps, size, self.heads.num_heads)

    def layer_cache(self, memory: CacheMemory) -> LayerCache:
        """What kernels read and write."""
        keys, values, key_scales, value_scales = (*memory.parts, None, None)[:4]
        assert keys is not None
        assert values is not None
        if memory.keys_by_dimension:
            keys = keys.view(*keys.shape[:2], keys.shape[3], keys.shape[2]).mT
        return LayerCache(keys, values, key_scales, value_scales, memory.fp8_scales, memory.group)

    def share(self, rank: int, size: int) -> MixerShare[AttentionSpec]:
        """By heads. Behind queries, keys and values are the gates of the output, where it has some."""
        own, each = self.heads.share(rank, size), self.heads.head_dim
        query, kv = times(own.query, each), times(own.kv, each)
        rows = {"qkv": (query, kv, kv, query), "sinks": (own.query,)}
        mixer = replace(self, heads=own.shape, slopes=self.slopes[own.query])
        return MixerShare(mixer, rows, query, self.output_size)

    def bytes_read(self, context: int, itemsize: float) -> float:
        """Of the cache, by a token that is the last of so many; `itemsize` is a key's."""
        seen = self._num_seen(context)
        return 2 * seen * self.heads.num_kv_heads * self.heads.head_dim * itemsize

    def flops(self, context: int) -> float:
        """Of a token that is the last of so many: products with keys, and with values."""
        return 4.0 * self._num_seen(context) * self.output_size

    def _num_seen(self, context: int) -> int:
        """Keys that the last of so many tokens sees."""
        if self.chunk:
            return (context - 1) % self.chunk + 1 if context else 0
        return min(context, self.sliding_window or context)

    def prompt_flops(self, length: int) -> float:
        """Of all tokens of a sequence: token i sees i keys, up to the window."""
        if self.chunk:
            full, rest = divmod(length, self.chunk)
            seen = full * self.chunk * (self.chunk + 1) // 2 + rest * (rest + 1) // 2
            return 4.0 * seen * self.output_size
        growing = min(length, self.sliding_window or length)
        seen = growing * (growing + 1) // 2 + (length - growing) * growing
        return 4.0 * seen * self.output_size


class HeadNorms(NamedTuple):
    """RMSNorm of queries and keys: of each head if a weight has head_dim numbers, else of all heads
    together.
    """

    query: Tensor
    key: Tensor
    eps: float
    offset: float = 0.0
    """Added to the weights."""
    after_rope: bool = False


class LatentNorm(NamedTuple):
    """RMSNorm of latents."""

    weight: Tensor
    eps: float


class Activation(Enum):
    """What an MLP applies to its gate, or to its only projection."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"
    """GELU as approximated with tanh."""
    CLAMPED_SWIGLU = "clamped_swiglu"
    """gate * sigmoid(1.702 * gate) * (up + 1), the gate at most 7 and up between -7 and 7; for
    gates only.
    """
    RELU2 = "relu2"
    """The square of what is positive, 0 elsewhere."""
    RELU = "relu"
    GELU = "gelu"
    """GELU by the error function, as `quire.kernels.elementwise.gelu` approximates it."""


@dataclass(frozen=True, slots=True)
class MoeSpec:
    """A mixture of experts: each token goes to `top_k` of `num_experts`, and perhaps to one that
    all tokens share.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    normalize_weights: bool
    """Whether the chosen experts' probabilities are rescaled to sum to one."""
    shared_intermediate_size: int = 0
    """Size of an expert every token goes through; 0 for none."""
    activation: Activation = Activation.SILU
    shared_gate: bool = True
    """Whether the shared expert's output is multiplied by a sigmoid gate of its own."""
    sigmoid_scores: bool = False
    """Probabilities are sigmoids of the router's logits, not their softmax."""
    choice_bias: bool = False
    """`ExpertWeights.choice_bias` is added to the probabilities to choose experts, not to weigh
    them.
    """
    weight_scale: float = 1.0
    """Factor of the experts' weights, applied last."""
    bias: bool = False
    """Whether the router and the experts' products have biases."""
    gated: bool = True
    """If not, an expert is activation(up), then down; the shared one, too."""
    num_groups: int = 1
    """Experts are in so many groups of neighbours; a token's are of its best `top_groups` groups. A
    group is as good as the sum of its `group_scores` best scores, with the choice bias.
    """
    top_groups: int = 1
    group_scores: int = 2
    float32_router: bool = False
    """Whether the router's logits are computed in float32, though its scores don't ask for it."""
    expert_scales: bool = False
    """Each expert's weight is multiplied by a number of its own (`ExpertWeights.scales`)."""
    scales_inputs: bool = False
    """Weights multiply what experts take, not what they give."""

    @property
    def has_float32_router(self) -> bool:
        """Whether the router's logits are computed in float32: a choice bias is made for that."""
        return self.sigmoid_scores or self.choice_bias or self.float32_router


class ExpertWeights(NamedTuple):
    """One layer's experts, stacked, as the backend's `pack` returned them."""

    gate_up: Weight
    """[num_experts, 2 * intermediate, hidden]: gate rows first, then up rows; up rows alone where
    experts have no gate.
    """
    down: Weight
    """[num_experts, hidden, intermediate]."""
    gate_up_bias: Tensor | None = None
    """[num_experts, 2 * intermediate]."""
    down_bias: Tensor | None = None
    """[num_experts, hidden]."""
    choice_bias: Tensor | None = None
    """[num_experts]."""
    scales: Tensor | None = None
    """[num_experts]."""


class Router(NamedTuple):
    """The product whose logits choose a layer's experts."""

    weight: Weight
    """[num_experts, hidden]."""
    bias: Tensor | None


class SharedExpert(NamedTuple):
    """The expert that all tokens share."""

    up: Weight
    """[2 * intermediate, hidden]: gate rows first, then up rows; up rows alone where experts have
    no gate.
    """
    down: Weight
    """[hidden, intermediate]."""
    gate: Weight | None
    """[1, hidden]: the output is multiplied by the sigmoid of this product."""


HAS_NAN = 1
NOTHING_LEFT = 2
"""Flags of a row that could not choose a token: not all of its scores are numbers, or all are minus
infinity.
"""

FILTERS = (
    "temperature",
    "top_n_sigma",
    "top_k",
    "top_p",
    "log_min_p",
    "typical_p",
    "xtc_threshold",
)
"""The columns of `limits` in `Kernels.filter_rows_`, in the order in which they are applied. A
filter is off with a sigma of 0, a k of 0, a p of 1, a log of minus infinity and a threshold of
infinity.
"""


class LogprobsTensors(NamedTuple):
    """How likely tokens are, and which are the likeliest."""

    logprobs: Tensor
    """float32 [rows]; NaN where the row's logits are not numbers."""
    ranks: Tensor
    """int64 [rows], from 1: by descending logit, and by ascending id among equals."""
    top_ids: Tensor
    """int64 [rows, num_top]: the tokens of ranks 1 to num_top."""
    top_logprobs: Tensor
    """float32 [rows, num_top]."""


class SampleRows(Protocol):
    """Samples tokens and writes them into their request rows: see
    `quire.backends.triton.sampling.sample_rows`.
    """

    def __call__(
        self,
        logits: Tensor,
        row_index: Tensor,
        seeds: Tensor,
        temperatures: Tensor,
        positions: Tensor,
        token_ids: Tensor,
        out: Tensor | None = None,
    ) -> Tensor: ...


TransformActivated = Callable[[Tensor], Tensor]


class Kernels(Protocol):
    """The methods of a backend. Rows are the first dimension; only methods whose names end in _
    change their inputs.
    """

    @property
    def name(self) -> str: ...

    @property
    def sample_rows(self) -> SampleRows | None:
        """Sampling by temperature and seed, with the tokens written to the request rows; None if
        there is no kernel.
        """

    @property
    def keys_at_once(self) -> int:
        """Attention may read keys before a sliding window, back to a multiple of this number of
        tokens.
        """

    def computes(self, format: Format) -> bool:
        """Whether the backend computes with weights stored in this format; others are expanded when
        loaded.
        """

    @property
    def record(self) -> Callable[[Callable[[], None]], Callable[[], None] | None] | None:
        """Where calls can be recorded (CPU): runs a function that calls this object's methods only,
        and returns one that repeats these calls on the same memory, without Python; None if that
        takes too much memory.
        """

    def captures(self, part: object) -> bool:
        """Whether steps with such a mixer, or such experts, can be captured or recorded: if their
        kernels read nothing on the host. A recorder looks for experts itself.
        """

    def has_kernels_for(self, mixer: object) -> bool:
        """Whether the backend computes such a mixer at all; models with others are refused."""

    def compile_together(self, call: Callable[[], object]) -> None:
        """Compiles the kernels that `call` runs, several at once, where they are compiled on first
        use.
        """

    def pack(self, weight: Weight) -> Weight:
        """A loaded matrix, or a stack of them, in the layout that the other methods want; vectors
        are not packed.
        """

    def pack_into(self, packed: Weight, loaded: Weight) -> None:
        """Replaces what `pack` made of a matrix by what it makes of another, loaded in the same
        formats, in the same memory: graphs and recordings that know its addresses compute with the
        new numbers. Raises ValueError, with nothing changed, if it would not fit.
        """

    def packed_bytes(self, parts: Sequence[tuple[Format, tuple[int, ...]]]) -> int:
        """What `pack` makes of a weight whose parts have these formats and shapes, in bytes."""

    def linear(
        self, x: Tensor, weight: Weight, bias: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        """x [rows, in] times weight [out, in] transposed, plus bias, in x's dtype with float32
        accumulation; into `out` if there is one. With a quantised weight a backend may round x to
        8-bit integers first, each row by itself (`cpu/quantized.h`).
        """

    def linear_pair(
        self,
        x: Tensor,
        first: Weight,
        first_bias: Tensor | None,
        second: Weight,
        second_bias: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """`linear` of the same rows with two weights."""

    def linear_gated(
        self, x: Tensor, weight: Weight, bias: Tensor | None, activation: Activation
    ) -> Tensor:
        """activation(gate) * up of gate_up = linear(x, weight, bias) [rows, 2 * size]; gate is the
        first half.
        """

    @property
    def takes_adapters(self) -> bool:
        """Whether the next four methods are to be used: exact, and as quick as they should be."""

    def pack_low_rank(self, low_rank: LowRank) -> PackedLowRank:
        """An adapter's part of a product in the layout that the next methods want."""

    def low_rank_table(self, num_slots: int) -> LowRankTable:
        """An empty table of what adapters add to one product."""

    def adapted_linear(
        self,
        x: Tensor,
        weight: Weight,
        bias: Tensor | None,
        slots: Tensor,
        table: LowRankTable,
        out: Tensor | None = None,
    ) -> Tensor:
        """`linear`, and what the adapters in int32 slots [rows] of the table add to it: (x A') * scale
        B' in float32, added to the rounded product, the sum rounded once more. A row's additions
        have one order whichever adapters the others have. Rows with slot -1, and outputs of no
        part, have the bits of `linear`.
        """

    def adapted_linear_gated(
        self,
        x: Tensor,
        weight: Weight,
        bias: Tensor | None,
        activation: Activation,
        slots: Tensor,
        table: LowRankTable,
    ) -> Tensor:
        """`linear_gated` of `adapted_linear`; rows with slot -1 have the bits of `linear_gated`."""

    def activate(self, x: Tensor, activation: Activation) -> Tensor:
        """activation(x)."""

    def xielu(self, x: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        """The activation that has two numbers of its own for each layer, in float32:
        p x² + x / 2 where x is positive, (n + 1/2) (exp(x) - 1 - x) + x / 2 elsewhere, where p and n
        are log(1 + e^a) of the float32 numbers a [1].
        """

    def embedding(self, token_ids: Tensor, weight: Weight) -> Tensor:
        """Rows of weight [vocab, hidden] by int64 token_ids [rows], as plain numbers (float32 if
        the weight is quantised). A weight that is also the head is packed.
        """

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
        """x / sqrt(mean(x²) + eps) * (weight + offset) over the last dimension, the mean in
        float32; rounded before the product where there is no offset.
        """

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        """(rms_norm(x + residual), x + residual): the sum is rounded to the model's dtype first."""

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        """(x - mean(x)) / sqrt(variance(x) + eps) * weight + bias over the last dimension, in
        float32.
        """

    def scale_add(self, x: Tensor, scale: float, other: Tensor | None = None) -> Tensor:
        """x * scale, rounded, + other, of [rows, size]."""

    def scale_rows(self, x: Tensor, factors: Tensor, which: Tensor | None = None) -> Tensor:
        """Each row of x [rows, size] times one of the float32 factors: the one that int64 `which`
        [rows] says, or the only one there is.
        """

    def soft_cap_(self, x: Tensor, cap: float) -> None:
        """Numbers of x [rows, size] become cap * tanh(x / cap)."""

    def clamp_(self, x: Tensor, limit: float) -> None:
        """Numbers of x [rows, size] that are above the limit, or below its negative, become it; NaN
        stays.
        """

    def qkv_to_cache_(
        self,
        qkv: Tensor,
        shape: HeadShape,
        norms: HeadNorms | None,
        positions: Tensor,
        cos_sin: Tensor | None,
        cache: LayerCache,
        slot_mapping: Tensor,
    ) -> Tensor:
        """Takes packed projections [rows, query heads | key heads | value heads] apart: norms the
        query and key heads, rotates both by `cos_sin[positions]` [max_position, head_dim] (cosines
        in the first half, sines in the second; dimension i pairs with i + head_dim / 2; None: no
        rotation), stores keys and values into their slots (none where the slot is negative) and
        returns queries [rows, heads, head_dim].
        """

    def query_heads(
        self,
        query: Tensor,
        shape: HeadShape,
        norms: HeadNorms | None,
        positions: Tensor,
        cos_sin: Tensor | None,
    ) -> Tensor:
        """What `qkv_to_cache_` makes of queries [rows, query heads] alone, in layers that read
        another's keys.
        """

    def sigmoid_mul(self, gate: Tensor, x: Tensor) -> Tensor:
        """sigmoid(gate) * x of [rows, 1] or [rows, size], and [rows, size]."""

    def sigmoid_mul_add(self, gate: Tensor, x: Tensor, other: Tensor) -> Tensor:
        """other + sigmoid_mul(gate, x); the product is rounded before it is added."""

    def multiply(self, x: Tensor, other: Tensor) -> Tensor:
        """x * other of [rows, size] both."""

    def gather_inputs(
        self,
        token_rows: Tensor,
        positions: Tensor,
        token_ids: Tensor,
        block_tables: Tensor,
        block_size: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """For each token of a step, given by int32 row and position [tokens]: its id
        `token_ids[row, position]`, its position and the slot of its key and value, int64 each. A
        row of -1 is padding: token 0, slot -1.
        """

    def attention_work(
        self,
        query_lens: Int32Array,
        context_lens: Int32Array,
        table_rows: Int32Array,
        shape: HeadShape,
    ) -> dict[str, Int32Array]:
        """Lists that divide a step's attention into items of work for the kernels' programs. Made
        on the host, where the lengths are known; the runner uploads them and hands them back as
        `PagedBatch.work`.
        """

    def decode_lists(
        self, fewest: int, most: int, max_context_len: int, shape: HeadShape
    ) -> dict[str, int]:
        """For CUDA graphs: the names of the lists that `attention_work` may make for a step of
        `fewest` to `most` decodes, and the most items of each. Empty where steps can't be captured.
        """

    def shorten_attention_work_(self, work: Mapping[str, Tensor], lag: Tensor) -> None:
        """Corrects the lists of `attention_work` for sequences that are shorter than it was told,
        since draft tokens were wrong: by int32 lag [tables], for each row of the block tables.
        """

    def keys_by_dimension(self, cache_dtype: dtype, block_size: int) -> bool:
        """Whether attention wants the keys of such a cache as [head_dim, block_size] in memory (see
        `LayerCache`).
        """

    def attention(
        self,
        query: Tensor,
        cache: LayerCache,
        batch: PagedBatch,
        spec: AttentionSpec,
        sinks: Tensor | None = None,
        slopes: Tensor | None = None,
    ) -> Tensor:
        """Causal attention of query [rows, num_heads, head_dim] over the cached keys and values
        (those of this step are already written); grouped heads; a window counts the query's own
        position. Each head's softmax has one more score, of sinks [num_heads], which adds nothing
        to the output. `slopes` are `spec.slopes` in float32, where it has some. The output has as
        many numbers in a head as the values have.
        """

    def linear_heads(self, x: Tensor, weight: Weight) -> Tensor:
        """[rows, heads, out] of x [rows, heads, in]: each head's product with its own matrix of the
        stack weight [heads, out, in], as `linear` computes it.
        """

    def adapted_linear_heads(
        self, x: Tensor, weight: Weight, slots: Tensor, tables: ExpertTables
    ) -> Tensor:
        """`linear_heads`, and what the adapters in int32 slots [rows] of each head's table add to it."""

    def latent_to_cache_(
        self,
        absorbed: Tensor,
        rotated: Tensor,
        latent: Tensor,
        norm: LatentNorm,
        positions: Tensor,
        cos_sin: Tensor | None,
        cache: LayerCache,
        slot_mapping: Tensor,
    ) -> Tensor:
        """Norms the first numbers of latents [rows, rank + rope], rotates the others by
        `cos_sin[positions]` [max_position, rope], if it is given, and stores both into their slots as keys. Returns
        queries [rows, heads, rank + rope]: absorbed [rows, heads, rank] beside what becomes of
        `rotated` [rows, heads, rope].
        """

    def latent_queries_(
        self,
        plain: Tensor,
        rotated: Tensor,
        key_up: Weight,
        latent: Tensor,
        norm: LatentNorm,
        positions: Tensor,
        cos_sin: Tensor | None,
        cache: LayerCache,
        slot_mapping: Tensor,
    ) -> Tensor:
        """`latent_to_cache_` of linear_heads(plain, key_up)."""

    def convolve_(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        spec: ConvolutionSpec,
        cache: ConvolutionCache,
        batch: PagedBatch,
    ) -> Tensor:
        """The convolution over time of x [rows, channels] with weight [channels, taps], whose last
        tap is the token's own; sums in float32 from the earliest input on. Inputs are kept in
        their slots, and the last ones of each chunk that ends in the step in the next one's state.
        """

    def recur_(
        self,
        mixed: Tensor,
        gates: Tensor,
        weights: RecurrentWeights,
        spec: RecurrentSpec,
        cache: RecurrentCache,
        batch: PagedBatch,
        decay_gates: Tensor | None = None,
    ) -> Tensor:
        """The recurrence of `recurrent.py` over mixed [rows, query heads | key heads | value heads]
        (query and key groups are shared by value heads): [rows, value heads * value_dim]. `gates`
        are the rows' numbers for each value head from which decays (and the delta rule's betas,
        behind them) are made; with `decay_gates` [rows, value heads * key_dim], from which each
        channel's decays are made, they are those of betas only. Records and the states of chunks
        that end in the step are kept.
        """

    def gated_norm(
        self, x: Tensor, gate: Tensor, weight: Tensor | None, eps: float, spec: GatedNormSpec
    ) -> Tensor:
        """RMSNorm of x [rows, size] in groups, times weight, with the SiLU or sigmoid of gate [rows,
        size].
        """

    def moe(
        self,
        x: Tensor,
        router_logits: Tensor,
        experts: ExpertWeights,
        spec: MoeSpec,
        transform_activated: TransformActivated | None = None,
        adapters: ExpertAdapters | None = None,
    ) -> Tensor:
        """Probabilities of router_logits [rows, experts] in float32, the top_k (lowest index first
        among equals), weights renormalised if `spec` says so, experts added in ascending order.
        `transform_activated` is applied to the activated gate and up products [pairs of row and expert,
        intermediate], before the down products. `adapters` add to each expert's products what they
        add to any (`adapted_linear`).
        """

    def routed_experts(
        self,
        x: Tensor,
        router: Router,
        experts: ExpertWeights,
        spec: MoeSpec,
        shared: SharedExpert | None,
    ) -> Tensor:
        """`moe` by the router's product with x, plus the output of the shared expert, if there is
        one: see `quire.kernels.routed_experts`.
        """

    def choose_experts(
        self, router_logits: Tensor, spec: MoeSpec, choice_bias: Tensor | None
    ) -> Tensor:
        """int64 [rows, top_k]: the experts that `moe` takes for each row, in any order."""

    def gumbel_argmax(
        self, logits: Tensor, temperature: Tensor, keys: Tensor
    ) -> tuple[Tensor, Tensor]:
        """int64 [rows]: the argmax of float32 logits [rows, vocab] / temperature [rows] + Gumbel
        noise of the int32 keys [rows, 2] (`noise.py`), and of the logits alone in rows of
        temperature 0. The lowest id wins among equals. And int32 [rows] of flags: HAS_NAN or
        NOTHING_LEFT, where the token is 0, or none.
        """

    def filter_rows_(self, logits: Tensor, rows: Tensor, limits: Tensor) -> None:
        """Divides some rows (int64 [n], ascending) of float32 logits [rows, vocab] by their
        temperature, and sets what the filters of float32 limits [n, FILTERS] exclude to minus
        infinity (defined in `filters.py`).
        """

    def match_lengths(
        self, tokens: Tensor, lengths: Tensor, breaks: Tensor | None, most: int
    ) -> Tensor:
        """int32 [rows, size]: for each position of int64 tokens [rows, size], how many tokens up to
        it equal the last ones of the row, which has int64 `lengths` [rows] tokens. Counting ends at
        a token that `breaks` (bool [rows, size]) marks, and at `most`. 0 from the row's last token
        on.
        """

    def gather_logprobs(self, logits: Tensor, token_ids: Tensor, num_top: int) -> LogprobsTensors:
        """Scores of int64 token_ids [rows], and the `num_top` likeliest tokens, by float32 logits
        [rows, vocab].
        """

    def top_values(self, x: Tensor, k: int) -> Tensor:
        """The k largest numbers of each row of float32 x [rows, size], descending, [rows, k]."""

    def keep_between_(self, x: Tensor, low: Tensor, high: Tensor) -> None:
        """Numbers of float32 x [rows, size] below their row's low [rows] or above its high [rows]
        become minus infinity. A limit that is NaN is none.
        """
