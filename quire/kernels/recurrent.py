"""Layers with a state: what they keep, and the words of their kernels.

A recurrent layer knows all earlier tokens by a matrix per head, its state. Usual kernels compute
prompts chunk by chunk and decode token by token, which are other sums with other bits. Here time is
divided into chunks at fixed positions, and whoever computes a token does the same sums (rule R2):
from the state at its chunk's begin, and from a record (key, change, decay) of each token since then.
So nothing is rolled back when drafts were wrong, and the state is written once per chunk.

With S the state at the chunk's begin, G the sum of log-decays since then, for token i of the chunk:

    change_i = beta_i (v_i - e^{G_i} Sᵀ k_i - sum_{j<i} e^{G_i-G_j} (k_i·k_j) change_j)
    output_i = e^{G_i} Sᵀ q_i + sum_{j<=i} e^{G_i-G_j} (q_i·k_j) change_j
    S_next   = e^{G_C} S + sum_j e^{G_C-G_j} k_j change_jᵀ

That is the gated delta rule. State spaces (Mamba-2) lack what is subtracted from v: a change is
beta_i v_i. In Kimi Delta Attention each channel of a key has a decay of its own: then decays are
vectors, and stand inside the sums over channels,

    change_i = beta_i (v_i - Sᵀ (e^{G_i} k_i) - sum_{j<i} (sum_c k_ic k_jc e^{G_ic-G_jc}) change_j)

No factor e^{-G_j} is ever made, which would overflow: G_i - G_j is summed for each pair from the
log-decays between them, the later ones first. So near tokens are told apart exactly, however much
has faded before them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from quire.errors import InvalidRequestError
from quire.kernels.layer_state import CacheMemory, CarriedPart, LayerState, StoredPart
from quire.kernels.shares import MixerShare, length, share_of, times

CHUNK = 64
"""Tokens of a chunk, in all models: a multiple of every block size."""


@dataclass(frozen=True, slots=True)
class ConvolutionSpec:
    """A causal convolution over time, of each channel by itself."""

    channels: int
    taps: int
    """How many inputs an output is made of: the token's own, and those before it."""
    bias: bool = False
    silu: bool = True
    """Whether the sum goes through SiLU."""

    def layer_state(self, cache_dtype: torch.dtype, model_dtype: torch.dtype) -> LayerState:
        """For a layer that is nothing else: the inputs of the last few tokens."""
        inputs = StoredPart(1, (self.channels,), model_dtype)
        return LayerState((inputs,), "window", self.taps)

    def layer_cache(self, memory: CacheMemory) -> ConvolutionCache:
        (inputs,) = memory.parts
        return ConvolutionCache(inputs, None, memory.group)

    def share(self, rank: int, size: int) -> MixerShare[ConvolutionSpec]:
        """By channels, of which none sees another."""
        if self.channels % size:
            raise InvalidRequestError(
                "tensor_parallel_size",
                f"is {size}, but must divide the {self.channels} channels of the model's convolutions",
            )
        own = share_of(self.channels, size, rank)
        rows = {"input": (own,) * 3, "convolution": (own,)}
        return MixerShare(replace(self, channels=length(own)), rows, own, self.channels)

    @property
    def input_size(self) -> int:
        """Of a row: two gates, one before and one behind the convolution, and its input."""
        return 3 * self.channels

    @property
    def output_size(self) -> int:
        return self.channels

    def bytes_read(self, context: int, itemsize: float) -> float:
        return min(context, self.taps) * self.channels * itemsize

    def flops(self, context: int) -> float:
        return 2.0 * self.taps * self.channels

    def prompt_flops(self, length: int) -> float:
        return length * self.flops(length)


@dataclass(frozen=True, slots=True)
class GatedNormSpec:
    """How a recurrent layer's output is normed and gated."""

    group_size: int
    """The mean is taken over so many numbers; 0: there is no norm."""
    gate_first: bool = False
    """Whether the gate is applied before the norm."""
    eps: float | None = None
    """None: that of the model's other norms."""
    sigmoid: bool = False
    """Whether the gate goes through a sigmoid instead of SiLU."""


@dataclass(frozen=True, slots=True)
class RecurrentSpec:
    """A recurrence behind a convolution: heads of queries and keys, which heads of values share."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    conv_bias: bool = False
    is_delta: bool = True
    """Whether a change is what a value adds to what the state already says of its key; else it is
    the value itself, times its time step.
    """
    time_limits: tuple[float, float] = (0.0, math.inf)
    """State spaces: the least and the largest time step."""
    norm: GatedNormSpec = GatedNormSpec(0)
    projection_bias: bool = False
    """Whether the product before it has a bias."""
    output_bias: bool = False
    beta_scale: float = 1.0
    """The delta rule: betas are sigmoids times this."""
    input_scales: tuple[float, ...] = ()
    """Factors of queries, keys, values, gates and time steps in a packed row; (): none."""
    gate_rank: int = 0
    """Kimi Delta Attention: each channel of a key has a decay of its own, and a row's gates of decays
    and of the output are products of so many numbers each; 0: a value head has one decay, and its
    gates are in the packed row.
    """

    @property
    def decay_shape(self) -> tuple[int, ...]:
        """Of a token's decays in one value head."""
        return (self.key_dim,) if self.gate_rank else ()

    @property
    def decay_size(self) -> int:
        """Decays of a token."""
        return self.num_value_heads * math.prod(self.decay_shape)

    @property
    def query_size(self) -> int:
        return self.num_key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        return self.num_value_heads * self.value_dim

    @property
    def convolution(self) -> ConvolutionSpec:
        """Over rows of all query, key and value heads."""
        return ConvolutionSpec(2 * self.query_size + self.value_size, self.taps, self.conv_bias)

    def layer_state(self, cache_dtype: torch.dtype, model_dtype: torch.dtype) -> LayerState:
        """A record of each token since the chunk's begin, and the state there with the last inputs
        of the convolution. Sums over time are kept in float32, whatever the cache's dtype is.
        """
        channels = self.convolution.channels
        records = (
            StoredPart(1, (channels,), model_dtype),
            StoredPart(self.num_key_heads, (self.key_dim,), torch.float32),
            StoredPart(self.num_value_heads, (self.value_dim,), torch.float32),
            StoredPart(self.num_value_heads, self.decay_shape, torch.float32),
        )
        carried = (
            StoredPart(self.num_value_heads, (self.key_dim, self.value_dim), torch.float32),
            StoredPart(self.taps - 1, (channels,), model_dtype),
        )
        return LayerState(records, "records", CHUNK, carried=carried)

    def layer_cache(self, memory: CacheMemory) -> RecurrentCache:
        inputs, keys, changes, decays = memory.parts
        state, tail = memory.carried
        convolution = ConvolutionCache(inputs, tail, memory.group)
        return RecurrentCache(convolution, keys, changes, decays, state, memory.group)

    def share(self, rank: int, size: int) -> MixerShare[RecurrentSpec]:
        """By value heads, as many for each rank; where there are fewer key heads than ranks, several
        ranks keep the same one.
        """
        keys, values = self.num_key_heads, self.num_value_heads
        if values % size or max(keys, size) % min(keys, size):
            possible = [
                n
                for n in range(1, values + 1)
                if not values % n and not max(keys, n) % min(keys, n)
            ]
            allowed = ", ".join(map(str, possible))
            raise InvalidRequestError(
                "tensor_parallel_size",
                f"is {size}, but the {keys} key heads and {values} value heads of the model's recurrent layers come "
                f"out even only with {allowed}",
            )
        value_heads = share_of(values, size, rank)
        key_heads = share_of(keys, size, rank) if size <= keys else _one(rank * keys // size)
        query, value = times(key_heads, self.key_dim), times(value_heads, self.value_dim)
        own = replace(self, num_key_heads=length(key_heads), num_value_heads=length(value_heads))
        per_head = dict.fromkeys(("log_rate", "time_bias", "skip"), (value_heads,))
        rows = {
            "input": (query, query, value, value, value_heads, value_heads),
            "convolution": (query, query, value),
            **per_head,
        }
        if self.gate_rank:  # every rank makes what its gates are made from
            whole, channels = slice(0, self.gate_rank), times(value_heads, self.key_dim)
            rows["input"] = (query, query, value, whole, whole, value_heads)
            rows |= {"decay": (channels,), "gate": (value,), "time_bias": (channels,)}
        # A norm over more than a rank's values is computed of everybody's, with their gates
        # (`ParallelKernels.gated_norm`). The delta rule's is the same for every head.
        is_own = own.value_size % max(self.norm.group_size, 1) == 0
        if is_own and not self.is_delta:
            rows["norm"] = (value,)
        return MixerShare(own, rows, value, self.value_size * (1 if is_own else 2))

    @property
    def num_gates(self) -> int:
        """Numbers of a row from which decays, and betas, are made, behind what `gate_rank` is of."""
        return self.num_value_heads * (2 if self.is_delta and not self.gate_rank else 1)

    @property
    def packed_sizes(self) -> tuple[int, ...]:
        """Of the parts of a packed row: queries, keys, values, the output's gate (or what it is made
        from, behind what decays are made from), and gates of each head.
        """
        gates = (self.gate_rank,) * 2 if self.gate_rank else (self.value_size,)
        heads = (self.num_value_heads,) * (self.num_gates // self.num_value_heads)
        return (self.query_size, self.query_size, self.value_size, *gates, *heads)

    @property
    def input_size(self) -> int:
        """Of the products of the layer's input, and of those of what gates are made from."""
        gates = self.decay_size + self.value_size if self.gate_rank else 0
        return sum(self.packed_sizes) + gates

    @property
    def output_size(self) -> int:
        return self.value_size

    def bytes_read(self, context: int, itemsize: float) -> float:
        """The state, and the records of half a chunk, which are there on average."""
        records = self.query_size + self.value_size + self.decay_size
        return 4.0 * (self.value_size * self.key_dim + min(context, CHUNK / 2) * records)

    def flops(self, context: int) -> float:
        """Products of query and key with the state and with the records, and making the state."""
        records = min(context, CHUNK / 2) * self.num_value_heads * (self.key_dim + self.value_dim)
        return 6.0 * self.value_size * self.key_dim + 4.0 * records

    def prompt_flops(self, length: int) -> float:
        return length * self.flops(length)


def _one(index: int) -> slice:
    return slice(index, index + 1)


class RecurrentWeights(NamedTuple):
    """One layer's numbers for each value head, float32."""

    log_rate: Tensor
    """A log-decay is minus e to this, times the time step softplus(gate + time_bias)."""
    time_bias: Tensor
    """For each channel of a key, where those have decays of their own."""
    skip: Tensor | None = None
    """State spaces: how much of a value goes into its own output."""


@dataclass(frozen=True, slots=True)
class ConvolutionCache:
    """One layer's inputs of a convolution."""

    inputs: Tensor
    """[num_blocks, 1, block_size, channels]."""
    tail: CarriedPart | None
    """The last inputs before a chunk, [taps - 1, channels], in layers with a state. In others no
    block of the window is given up too early.
    """
    group: int

    @property
    def block_size(self) -> int:
        return self.inputs.shape[2]


@dataclass(frozen=True, slots=True)
class RecurrentCache:
    """One layer's records [num_blocks, heads, block_size, ...] and states."""

    convolution: ConvolutionCache
    keys: Tensor
    changes: Tensor
    decays: Tensor
    """The sum of log-decays from the chunk's begin to the token, its own included; where each channel
    has its own, the token's.
    """
    state: CarriedPart
    """[value heads, key_dim, value_dim] at a chunk's begin."""
    group: int

    @property
    def block_size(self) -> int:
        return self.keys.shape[2]
