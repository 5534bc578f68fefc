"""Layers with a state on C++ code: checks, and addresses passed on to `recurrent.cpp`."""

from __future__ import annotations

from typing import TypedDict

import torch
from torch import Tensor

from quire.backends.cpu import functions
from quire.backends.cpu.recording import Calls
from quire.backends.cpu.strided import takes_head_dim, with_whole_rows
from quire.kernels.ops import AttentionSpec, PagedBatch
from quire.kernels.recurrent import (
    ConvolutionCache,
    ConvolutionSpec,
    GatedNormSpec,
    RecurrentCache,
    RecurrentSpec,
    RecurrentWeights,
)
from quire.kernels.reference import ReferenceKernels

_threads = torch.get_num_threads


class _Sequences(TypedDict):
    """What both functions are told of a batch."""

    query_start: Tensor
    context_lens: Tensor
    block_tables: Tensor
    table_rows: Tensor
    slots: Tensor
    state_tables: Tensor | None
    num_sequences: int
    max_blocks: int
    num_tables: int
    state_blocks: int


def _sequences(batch: PagedBatch) -> _Sequences:
    tables = batch.block_tables.contiguous()
    states = None if batch.state_tables is None else batch.state_tables.contiguous()
    return {
        "query_start": batch.query_start,
        "context_lens": batch.context_lens,
        "block_tables": tables,
        "table_rows": batch.table_rows,
        "slots": batch.slot_mapping,
        "state_tables": states,
        "num_sequences": len(batch.table_rows),
        "max_blocks": tables.shape[1],
        "num_tables": 0 if states is None else states.shape[1],
        "state_blocks": 0 if states is None else states.shape[2],
    }


def _check_float32(**tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is not None and not (tensor.dtype == torch.float32 and tensor.is_contiguous()):
            raise TypeError(f"{name} is {tensor.dtype}; it must be float32, in one piece")


class RecurrentKernels(ReferenceKernels):
    """The kernels of layers with a state."""

    def __init__(self, calls: Calls) -> None:
        self._empty = calls.empty
        self._convolve = calls.by_dtype(functions.convolve)
        self._recur = calls.by_dtype(functions.recur)
        self._gated_norm = calls.by_dtype(functions.gated_norm)
        self._xielu = calls.by_dtype(functions.xielu)
        self._scale_rows = calls.by_dtype(functions.scale_rows)
        self._multiply = calls.by_dtype(functions.multiply)
        self._sigmoid_mul = calls.by_dtype(functions.sigmoid_mul)

    def captures(self, part: object) -> bool:
        if isinstance(part, AttentionSpec):
            return takes_head_dim(part.heads.head_dim)
        return isinstance(part, (ConvolutionSpec, RecurrentSpec))

    def convolve_(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        spec: ConvolutionSpec,
        cache: ConvolutionCache,
        batch: PagedBatch,
    ) -> Tensor:
        rows, channels = x.shape
        _check_float32(weight=weight, bias=bias)
        if cache.inputs.dtype != x.dtype or weight.shape != (channels, spec.taps):
            raise ValueError(
                f"inputs {x.dtype}, kept as {cache.inputs.dtype}, with a weight {tuple(weight.shape)}"
            )
        x = with_whole_rows(x)
        out = self._empty(rows, channels, dtype=x.dtype)
        self._convolve[x.dtype](
            x=x,
            x_stride=x.stride(0),
            weight=weight,
            bias=bias,
            out=out,
            inputs=cache.inputs,
            tail_places=None if cache.tail is None else cache.tail.places,
            rows=rows,
            channels=channels,
            taps=spec.taps,
            block_size=cache.block_size,
            block_stride=cache.inputs.stride(0),
            silu=spec.silu,
            num_threads=_threads(),
            **_sequences(batch),
        )
        return out

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
        _check_float32(log_rate=weights.log_rate, time_bias=weights.time_bias, skip=weights.skip)
        mixed, gates = with_whole_rows(mixed), with_whole_rows(gates)
        if gates.dtype != mixed.dtype:
            raise TypeError(f"gates are {gates.dtype}, values {mixed.dtype}")
        rows = mixed.shape[0]
        if decay_gates is not None:
            decay_gates = with_whole_rows(decay_gates)
        given = (mixed.dtype, rows, spec.decay_size) if spec.gate_rank else None
        found = None if decay_gates is None else (decay_gates.dtype, *decay_gates.shape)
        if found != given:
            raise ValueError(f"gates of decays are {found}, not {given}")
        least, largest = spec.time_limits
        out = self._empty(rows, spec.value_size, dtype=mixed.dtype)
        self._recur[mixed.dtype](
            mixed=mixed,
            mixed_stride=mixed.stride(0),
            gates=gates,
            gates_stride=gates.stride(0),
            decay_gates=decay_gates,
            decay_gates_stride=0 if decay_gates is None else decay_gates.stride(0),
            log_rate=weights.log_rate,
            time_bias=weights.time_bias,
            skip=weights.skip,
            out=out,
            keys=cache.keys,
            changes=cache.changes,
            decays=cache.decays,
            state_places=cache.state.places,
            rows=rows,
            num_key_heads=spec.num_key_heads,
            num_value_heads=spec.num_value_heads,
            key_dim=spec.key_dim,
            value_dim=spec.value_dim,
            block_size=cache.block_size,
            key_stride=cache.keys.stride(0),
            change_stride=cache.changes.stride(0),
            decay_stride=cache.decays.stride(0),
            is_delta=spec.is_delta,
            least_step=least,
            largest_step=largest,
            beta_scale=spec.beta_scale,
            num_threads=_threads(),
            **_sequences(batch),
        )
        return out

    def gated_norm(
        self, x: Tensor, gate: Tensor, weight: Tensor | None, eps: float, spec: GatedNormSpec
    ) -> Tensor:
        rows, size = x.shape
        group = spec.group_size or size
        weight_size = size if weight is None else weight.shape[0]
        if size % group or weight_size % group or size % weight_size:
            raise ValueError(f"rows of {size} in groups of {group} with a weight of {weight_size}")
        x, gate = with_whole_rows(x), with_whole_rows(gate)
        out = self._empty(rows, size, dtype=x.dtype)
        self._gated_norm[x.dtype](
            x=x,
            x_stride=x.stride(0),
            gate=gate,
            gate_stride=gate.stride(0),
            weight=weight,
            weight_size=weight_size,
            out=out,
            rows=rows,
            size=size,
            group_size=group,
            has_norm=spec.group_size > 0,
            gate_first=spec.gate_first,
            sigmoid_only=spec.sigmoid,
            eps=eps,
            num_threads=_threads(),
        )
        return out

    def xielu(self, x: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        _check_float32(positive=positive, negative=negative)
        x, (rows, size) = with_whole_rows(x), x.shape
        out = self._empty(rows, size, dtype=x.dtype)
        self._xielu[x.dtype](
            x=x,
            stride=x.stride(0),
            positive=positive,
            negative=negative,
            out=out,
            rows=rows,
            size=size,
            num_threads=_threads(),
        )
        return out

    def scale_rows(self, x: Tensor, factors: Tensor, which: Tensor | None = None) -> Tensor:
        _check_float32(factors=factors)
        if which is not None and which.dtype != torch.int64:
            raise TypeError(f"which of the factors is {which.dtype}; it must be int64")
        x, (rows, size) = with_whole_rows(x), x.shape
        out = self._empty(rows, size, dtype=x.dtype)
        self._scale_rows[x.dtype](
            x=x,
            stride=x.stride(0),
            factors=factors,
            which=which,
            out=out,
            rows=rows,
            size=size,
            num_threads=_threads(),
        )
        return out

    def multiply(self, x: Tensor, other: Tensor) -> Tensor:
        x, other = with_whole_rows(x), with_whole_rows(other)
        rows, size = x.shape
        out = self._empty(rows, size, dtype=x.dtype)
        self._multiply[x.dtype](
            x=x,
            x_stride=x.stride(0),
            other=other,
            other_stride=other.stride(0),
            out=out,
            rows=rows,
            size=size,
            num_threads=_threads(),
        )
        return out

    def sigmoid_mul(self, gate: Tensor, x: Tensor) -> Tensor:
        gate, x = with_whole_rows(gate), with_whole_rows(x)
        rows, size = x.shape
        out = self._empty(rows, size, dtype=x.dtype)
        self._sigmoid_mul[x.dtype](
            gate=gate,
            gate_stride=gate.stride(0),
            gate_size=gate.shape[1],
            x=x,
            x_stride=x.stride(0),
            out=out,
            rows=rows,
            size=size,
            num_threads=_threads(),
        )
        return out
