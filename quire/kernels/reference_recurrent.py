"""The definition of the kernels for layers with a state, in plain torch; see `recurrent.py`.

A chunk is computed in matrices of fixed shapes, filled up with zeros, as everything in
`reference.py` is: so a token has the same bits whether it comes with a prompt or alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.elementwise import sigmoid, silu, softplus
from quire.kernels.ops import PagedBatch
from quire.kernels.recurrent import (
    CHUNK,
    ConvolutionCache,
    ConvolutionSpec,
    GatedNormSpec,
    RecurrentCache,
    RecurrentSpec,
    RecurrentWeights,
)

_EPSILON = 1e-6
"""Of the norm of queries and keys in the delta rule."""


class _Sequence(NamedTuple):
    """One sequence of a step: its rows, the position of the first, and where it lies."""

    rows: slice
    start: int
    blocks: Tensor
    """int64 [blocks]: its row of the block table."""
    states: Tensor | None
    """int64 [2, blocks of a state]."""

    @property
    def end(self) -> int:
        return self.start + int(self.rows.stop - self.rows.start)

    def chunks(self) -> Iterator[tuple[int, int, int]]:
        """The begin of each chunk it computes in, and the positions in it that it computes."""
        for begin in range(self.start // CHUNK * CHUNK, self.end, CHUNK):
            yield begin, max(self.start, begin), min(self.end, begin + CHUNK)

    def state_blocks(self, begin: int) -> Tensor:
        """The blocks of the state at a chunk's begin."""
        assert self.states is not None
        return self.states[begin // CHUNK % 2]

    def stored(self, side: Tensor, first: int, end: int) -> Tensor:
        """What [num_blocks, heads, block_size, ...] keeps of the tokens from `first` to `end`:
        [heads, tokens, ...].
        """
        size = side.shape[2]
        numbers = side[self.blocks[first // size : -(-end // size)]].transpose(0, 1).flatten(1, 2)
        skipped = first // size * size
        return numbers[:, first - skipped : end - skipped]


def sequences(batch: PagedBatch) -> Iterator[_Sequence]:
    """The sequences of a batch that have new tokens: rows, first position, blocks and states."""
    starts, lengths = batch.query_start.tolist(), batch.context_lens.tolist()
    for i, (length, table) in enumerate(zip(lengths, batch.table_rows.tolist(), strict=True)):
        rows = slice(starts[i], starts[i + 1])
        states = None if batch.state_tables is None else batch.state_tables[:, table].long()
        if rows.start < rows.stop:
            start = length - (rows.stop - rows.start)
            yield _Sequence(rows, start, batch.block_tables[table].long(), states)


def write_records_(side: Tensor, new: Tensor, slot_mapping: Tensor) -> None:
    """Puts new [rows, heads, ...] into its slots; padding goes to block 0, which nobody owns."""
    slots, size = slot_mapping.clamp_min(0), side.shape[2]
    side[slots // size, :, slots % size] = new.to(side.dtype)


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    spec: ConvolutionSpec,
    cache: ConvolutionCache,
    batch: PagedBatch,
) -> Tensor:
    """See `Kernels.convolve_`."""
    write_records_(cache.inputs, x.unsqueeze(1), batch.slot_mapping)
    earlier = spec.taps - 1
    output = torch.zeros_like(x)
    for sequence in sequences(batch):
        inputs = _inputs_before(sequence, cache, earlier, x)
        inputs = torch.cat([inputs, x[sequence.rows]]).float()
        count = sequence.end - sequence.start
        total = torch.zeros(count, x.shape[1], device=x.device)
        for tap in range(spec.taps):
            total = total + inputs[tap : tap + count] * weight[:, tap].float()
        if bias is not None:
            total = total + bias.float()
        output[sequence.rows] = (silu(total) if spec.silu else total).to(x.dtype)
        if cache.tail is not None:
            _carry_inputs(sequence, cache, earlier, inputs)
    return output


def _inputs_before(
    sequence: _Sequence, cache: ConvolutionCache, count: int, like: Tensor
) -> Tensor:
    """The last `count` inputs before the sequence's first row, with zeros before its begin."""
    first = max(0, sequence.start - count)
    begin = sequence.start // CHUNK * CHUNK if cache.tail is not None else 0
    found = sequence.stored(cache.inputs, max(first, begin), sequence.start)[0]
    if first < begin:
        assert cache.tail is not None
        carried = cache.tail.read(sequence.state_blocks(begin))
        found = torch.cat([carried[carried.shape[0] - (begin - first) :], found])
    return F.pad(found, (0, 0, count - found.shape[0], 0)).to(like.dtype)


def _carry_inputs(sequence: _Sequence, cache: ConvolutionCache, count: int, inputs: Tensor) -> None:
    """`inputs` begin `count` before the sequence's first row."""
    assert cache.tail is not None
    for begin, _, end in sequence.chunks():
        if end == begin + CHUNK:
            last = end - sequence.start + count
            cache.tail.write(sequence.state_blocks(end), inputs[last - count : last])


def decays_and_betas(
    gates: Tensor, weights: RecurrentWeights, spec: RecurrentSpec, decay_gates: Tensor | None
) -> tuple[Tensor, Tensor]:
    """float32 [rows, value heads] both; decays [rows, value heads, key_dim], if channels have their
    own.
    """
    heads, rate = spec.num_value_heads, -weights.log_rate.float().exp()
    if decay_gates is not None:
        steps = softplus(decay_gates + weights.time_bias).view(len(gates), heads, -1)
        return rate.unsqueeze(1) * steps, sigmoid(gates) * spec.beta_scale
    steps = softplus(gates[:, :heads] + weights.time_bias)
    if spec.is_delta:
        return rate * steps, sigmoid(gates[:, heads:]) * spec.beta_scale
    steps = steps.clamp(*spec.time_limits)
    return rate * steps, steps


def gated_norm(
    x: Tensor, gate: Tensor, weight: Tensor | None, eps: float, spec: GatedNormSpec
) -> Tensor:
    """See `Kernels.gated_norm`."""
    x32, gates = x.float(), sigmoid(gate) if spec.sigmoid else silu(gate)
    if spec.gate_first:
        x32 = x32 * gates
    if spec.group_size:
        grouped = x32.view(len(x32), -1, spec.group_size)
        normed = grouped * torch.rsqrt(grouped.pow(2).mean(-1, keepdim=True) + eps)
        x32 = normed.flatten(1).to(x.dtype).float()
    if weight is not None:
        repeated = weight.float().repeat(x32.shape[1] // weight.shape[0])
        x32 = x32 * repeated
    return (x32 if spec.gate_first else x32 * gates).to(x.dtype)


def recur(
    mixed: Tensor,
    gates: Tensor,
    weights: RecurrentWeights,
    spec: RecurrentSpec,
    cache: RecurrentCache,
    batch: PagedBatch,
    decay_gates: Tensor | None = None,
) -> Tensor:
    """See `Kernels.recur_`."""
    decay, beta = decays_and_betas(gates, weights, spec, decay_gates)
    sizes = (spec.query_size, spec.query_size, spec.value_size)
    query, key, value = mixed.float().split_with_sizes(sizes, 1)
    query, key = (x.reshape(len(x), -1, spec.key_dim) for x in (query, key))
    if spec.is_delta:
        query, key = _normed(query) * spec.key_dim**-0.5, _normed(key)
    value = value.reshape(len(value), -1, spec.value_dim)
    output = torch.zeros_like(value)
    for sequence in sequences(batch):
        carried: Tensor | None = None
        for begin, first, end in sequence.chunks():
            rows = slice(
                sequence.rows.start + first - sequence.start,
                sequence.rows.start + end - sequence.start,
            )
            if carried is None and begin:
                carried = cache.state.read(sequence.state_blocks(begin))
            kind = _ChannelChunk if spec.gate_rank else _Chunk
            chunk = kind(sequence, begin, first, end, cache, carried, spec, mixed.device)
            output[rows] = chunk.compute(
                query[rows], key[rows], value[rows], decay[rows], beta[rows]
            )
            chunk.store(cache, batch.slot_mapping[rows])
            if end == begin + CHUNK:
                carried = chunk.state_after()
                cache.state.write(sequence.state_blocks(end), carried)
    if weights.skip is not None:
        output = output + weights.skip.unsqueeze(1) * value
    return output.flatten(1).to(mixed.dtype)


def _normed(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + _EPSILON)


class _Faded(NamedTuple):
    """Of a chunk's tokens, in each value head."""

    overlaps: Tensor
    """[heads, tokens, tokens]: products of keys with keys up to them, faded since then."""
    scores: Tensor
    """The same of queries with keys."""
    said: Tensor
    """[heads, tokens, value_dim]: what the state, faded since the chunk's begin, says of keys."""
    asked: Tensor
    """And of queries."""


class _Chunk:
    """The tokens of one chunk: earlier ones from their records, new ones to be computed. Every
    matrix has a row for each token a chunk can have.
    """

    def __init__(
        self,
        sequence: _Sequence,
        begin: int,
        first: int,
        end: int,
        cache: RecurrentCache,
        state: Tensor | None,
        spec: RecurrentSpec,
        device: torch.device,
    ) -> None:
        self.known, self.count = first - begin, end - begin
        self.spec = spec
        self.keys = torch.zeros(spec.num_key_heads, CHUNK, spec.key_dim, device=device)
        self.changes = torch.zeros(spec.num_value_heads, CHUNK, spec.value_dim, device=device)
        self.decays = torch.zeros(spec.num_value_heads, CHUNK, *spec.decay_shape, device=device)
        if self.known:
            for target, side in (
                (self.keys, cache.keys),
                (self.changes, cache.changes),
                (self.decays, cache.decays),
            ):
                target[:, : self.known] = sequence.stored(side, begin, first)
        shape = (spec.num_value_heads, spec.key_dim, spec.value_dim)
        self.state = torch.zeros(shape, device=device) if state is None else state

    def compute(
        self, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor
    ) -> Tensor:
        """The outputs [rows, value heads, value_dim] of the new tokens, whose records are kept here."""
        new = slice(self.known, self.count)
        self.keys[:, new] = key.transpose(0, 1)
        queries = torch.zeros_like(self.keys)
        queries[:, new] = query.transpose(0, 1)
        self.set_decays(decay)
        shared = self.spec.num_value_heads // self.spec.num_key_heads
        keys, queries = (x.repeat_interleave(shared, 0) for x in (self.keys, queries))
        faded = self.faded(keys, queries)
        order = torch.arange(CHUNK, device=keys.device)
        values = value.transpose(0, 1)
        if self.spec.is_delta:
            overlaps = faded.overlaps.where(order.unsqueeze(1) > order, 0.0)
            for row in range(new.start, new.stop):
                earlier = (overlaps[:, row : row + 1] @ self.changes)[:, 0]
                change = values[:, row - self.known] - faded.said[:, row] - earlier
                self.changes[:, row] = beta[row - self.known].unsqueeze(1) * change
        else:
            self.changes[:, new] = values * beta.transpose(0, 1).unsqueeze(2)
        output = faded.asked + faded.scores @ self.changes
        return output[:, new].transpose(0, 1)

    def set_decays(self, decay: Tensor) -> None:
        """Those of the new tokens, as they are recorded."""
        total = self.decays[:, self.known - 1] if self.known else torch.zeros_like(decay[0])
        for row in range(len(decay)):  # one after the other: a step has the same sums
            total = total + decay[row]
            self.decays[:, self.known + row] = total

    def faded(self, keys: Tensor, queries: Tensor) -> _Faded:
        """What keys and queries have in common with earlier keys and with the state."""
        order = torch.arange(CHUNK, device=keys.device)
        fading = (self.decays.unsqueeze(2) - self.decays.unsqueeze(1)).exp()
        fading = fading.where(order.unsqueeze(1) >= order, 0.0)
        from_begin = self.decays.exp().unsqueeze(2)
        return _Faded(
            keys @ keys.mT * fading,
            queries @ keys.mT * fading,
            keys @ self.state * from_begin,
            queries @ self.state * from_begin,
        )

    def to_end(self) -> tuple[Tensor, Tensor]:
        """How much of each token's key, and of the state, is left at the chunk's end."""
        last = self.decays[:, -1:]
        return (last - self.decays).exp().unsqueeze(2), last.exp().unsqueeze(2)

    def store(self, cache: RecurrentCache, slots: Tensor) -> None:
        """Writes the new tokens' records."""
        new = slice(self.known, self.count)
        for side, numbers in (
            (cache.keys, self.keys),
            (cache.changes, self.changes),
            (cache.decays, self.decays),
        ):
            write_records_(side, numbers[:, new].transpose(0, 1), slots)

    def state_after(self) -> Tensor:
        """The next chunk's state; this one is whole."""
        shared = self.spec.num_value_heads // self.spec.num_key_heads
        keys = self.keys.repeat_interleave(shared, 0)
        fading, left = self.to_end()
        return self.state * left + (keys * fading).mT @ self.changes


class _ChannelChunk(_Chunk):
    """The same where each channel of a key has a decay of its own. Records have a token's own decays,
    and what lies between two tokens is summed from the later one backwards.
    """

    def set_decays(self, decay: Tensor) -> None:
        self.decays[:, self.known : self.count] = decay.transpose(0, 1)

    def faded(self, keys: Tensor, queries: Tensor) -> _Faded:
        overlaps, scores = torch.zeros(2, *keys.shape[:2], CHUNK, device=keys.device)
        from_begin = torch.zeros_like(self.decays)
        for row in range(self.known, self.count):
            apart = _apart(self.decays[:, : row + 1])
            both = torch.stack((keys[:, row], queries[:, row]), 2)
            products = keys[:, : row + 1] * apart.exp() @ both
            overlaps[:, row, : row + 1], scores[:, row, : row + 1] = products.unbind(2)
            from_begin[:, row] = (apart[:, 0] + self.decays[:, 0]).exp()
        said, asked = (x * from_begin @ self.state for x in (keys, queries))
        return _Faded(overlaps, scores, said, asked)

    def to_end(self) -> tuple[Tensor, Tensor]:
        apart = _apart(self.decays)
        return apart.exp(), (apart[:, 0] + self.decays[:, 0]).exp().unsqueeze(2)


def _apart(decays: Tensor) -> Tensor:
    """The sums of what comes behind each of [heads, tokens, channels], the last ones first."""
    return F.pad(decays[:, 1:].flip(1).cumsum(1).flip(1), (0, 0, 0, 1))
