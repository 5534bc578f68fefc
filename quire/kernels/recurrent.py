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
beta_i v_i.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from quire.kernels.layer_state import CarriedPart, LayerState, StoredPart

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

    def layer_state(self, cache_dtype: torch.dtype, dtype: torch.dtype) -> LayerState:
        """For a layer that is nothing else: the inputs of the last few tokens."""
        inputs = StoredPart(1, (self.channels,), dtype)
        return LayerState((inputs,), "window", self.taps)

    def layer_cache(
        self, parts: Sequence[Tensor], group: int, carried: Sequence[CarriedPart]
    ) -> ConvolutionCache:
        (inputs,) = parts
        return ConvolutionCache(inputs, None, group)


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

    def layer_state(self, cache_dtype: torch.dtype, dtype: torch.dtype) -> LayerState:
        """A record of each token since the chunk's begin, and the state there with the last inputs
        of the convolution. Sums over time are kept in float32, whatever the cache's dtype is.
        """
        channels = self.convolution.channels
        records = (
            StoredPart(1, (channels,), dtype),
            StoredPart(self.num_key_heads, (self.key_dim,), torch.float32),
            StoredPart(self.num_value_heads, (self.value_dim,), torch.float32),
            StoredPart(self.num_value_heads, (), torch.float32),
        )
        carried = (
            StoredPart(self.num_value_heads, (self.key_dim, self.value_dim), torch.float32),
            StoredPart(self.taps - 1, (channels,), dtype),
        )
        return LayerState(records, "records", CHUNK, carried=carried)

    def layer_cache(
        self, parts: Sequence[Tensor], group: int, carried: Sequence[CarriedPart]
    ) -> RecurrentCache:
        inputs, keys, changes, decays = parts
        state, tail = carried
        convolution = ConvolutionCache(inputs, tail, group)
        return RecurrentCache(convolution, keys, changes, decays, state, group)


class RecurrentWeights(NamedTuple):
    """One layer's numbers for each value head, float32."""

    rate: Tensor
    """Of decay: negative; a log-decay is this times the time step softplus(gate + time_bias)."""
    time_bias: Tensor
    skip: Tensor | None = None
    """State spaces: how much of a value goes into its own output."""


@dataclass(frozen=True, slots=True)
class GatedNormSpec:
    """How a recurrent layer's output is normed and gated."""

    group_size: int
    """The mean is taken over so many numbers; 0: there is no norm."""
    gate_first: bool = False
    """Whether the gate is applied before the norm."""


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
    """The sum of log-decays from the chunk's begin to the token, its own included."""
    state: CarriedPart
    """[value heads, key_dim, value_dim] at a chunk's begin."""
    group: int

    @property
    def block_size(self) -> int:
        return self.keys.shape[2]
