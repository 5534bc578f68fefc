"""The definition of every kernel, in plain torch, on any device.

Written to be read and to be exact (see the rules in `ops.py`), not to be fast. torch's own matrix product
picks its algorithm by the number of rows, so bits would change with the batch. Here every product has a
shape fixed by the model: rows go in tiles of ROW_TILE, queries in tiles of QUERY_TILE, keys in tiles of
KEY_TILE, the last tile filled up with zeros.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.filters import filter_rows_
from quire.kernels.noise import gumbel_noise
from quire.kernels.ops import (
    HAS_NAN,
    NOTHING_LEFT,
    ExpertWeights,
    HeadShape,
    Int32Array,
    LayerCache,
    PagedBatch,
    TokenScores,
)
from quire.kernels.repeats import match_lengths
from quire.kernels.scores import score_tokens

ROW_TILE = 32
QUERY_TILE = 16
KEY_TILE = 64


class ReferenceKernels:
    """Plain torch. Meets `quire.kernels.ops.Kernels`."""

    name = "reference"

    def pack_linear(self, weight: Tensor) -> Tensor:
        return weight

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        rows = x.shape[0]
        padded = F.pad(x, (0, 0, 0, -rows % ROW_TILE))
        output = x.new_empty(padded.shape[0], weight.shape[0])
        for row in range(0, rows, ROW_TILE):
            output[row : row + ROW_TILE] = F.linear(padded[row : row + ROW_TILE], weight, bias)
        return output[:rows]

    def embedding(self, token_ids: Tensor, weight: Tensor) -> Tensor:
        return F.embedding(token_ids, weight)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        return normed.to(x.dtype) * weight

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = x + residual
        return self.rms_norm(total, weight, eps), total

    def rope(self, x: Tensor, positions: Tensor, cos_sin: Tensor) -> Tensor:
        cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
        first, second = x.float().chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)

    def qkv_to_cache_(
        self,
        qkv: Tensor,
        shape: HeadShape,
        norms: tuple[Tensor, Tensor] | None,
        eps: float,
        positions: Tensor,
        cos_sin: Tensor | None,
        cache: LayerCache,
        slot_mapping: Tensor,
    ) -> Tensor:
        return qkv_to_cache_(self, qkv, shape, norms, eps, positions, cos_sin, cache, slot_mapping)

    def linear_silu_mul(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.silu_mul(self.linear(x, weight, bias))

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return (gate.float() * sigmoid(gate)).to(gate.dtype) * up

    def sigmoid_mul(self, gate: Tensor, x: Tensor) -> Tensor:
        return sigmoid(gate).to(x.dtype) * x

    def write_kv_(self, keys: Tensor, values: Tensor, cache: LayerCache, slot_mapping: Tensor) -> None:
        # Padding goes to block 0, which is nobody's.
        slots = slot_mapping.clamp_min(0)
        block, offset = slots // cache.block_size, slots % cache.block_size
        cache.keys[block, :, offset] = keys
        cache.values[block, :, offset] = values

    def gather_inputs(
        self, token_rows: Tensor, positions: Tensor, token_ids: Tensor, block_tables: Tensor, block_size: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        return gather_inputs(token_rows, positions, token_ids, block_tables, block_size)

    def attention_work(
        self, query_lens: Int32Array, context_lens: Int32Array, table_rows: Int32Array, shape: HeadShape
    ) -> dict[str, Int32Array]:
        return {}

    def attention(
        self,
        query: Tensor,
        cache: LayerCache,
        batch: PagedBatch,
        scale: float,
        sliding_window: int | None,
    ) -> Tensor:
        output = torch.empty_like(query)
        starts, context_lens = batch.query_start.tolist(), batch.context_lens.tolist()
        tables = batch.table_rows.tolist()
        for i, context_len in enumerate(context_lens):
            first_row, end_row = starts[i], starts[i + 1]
            keys, values = _gather_tiles(cache, batch.block_tables[tables[i]], context_len)
            for row in range(first_row, end_row, QUERY_TILE):
                tile_rows = slice(row, min(row + QUERY_TILE, end_row))
                position = context_len - (end_row - row)
                output[tile_rows] = _attend(query[tile_rows], position, keys, values, scale, sliding_window)
        return output

    def moe(
        self, x: Tensor, router_logits: Tensor, experts: ExpertWeights, top_k: int, normalize_weights: bool
    ) -> Tensor:
        weights, chosen = route(router_logits, top_k, normalize_weights)
        output = torch.zeros_like(x, dtype=torch.float32)
        for expert in sorted(set(chosen.flatten().tolist())):  # ascending: the order of additions in every row
            row, rank = (chosen == expert).nonzero(as_tuple=True)
            hidden = self.silu_mul(self.linear(x[row], experts.gate_up[expert]))
            output[row] += self.linear(hidden, experts.down[expert]).float() * weights[row, rank, None]
        return output.to(x.dtype)

    def gumbel_argmax(self, logits: Tensor, temperature: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        scores = logits
        if (temperature > 0).any():
            drawn = (temperature > 0).unsqueeze(1)
            scores = logits / temperature.unsqueeze(1).where(drawn, 1.0)
            scores = torch.where(drawn, scores + gumbel_noise(keys, logits.shape[1]), logits)
        token_ids = scores.argmax(-1)
        best = scores.gather(1, token_ids.unsqueeze(1))[:, 0]  # NaN if there is one
        flags = HAS_NAN * best.isnan().int() + NOTHING_LEFT * (best == float("-inf")).int()
        return token_ids.masked_fill_(flags > 0, 0), flags

    def filter_rows_(self, logits: Tensor, rows: Tensor, limits: Tensor) -> None:
        filter_rows_(self, logits, rows, limits)

    def match_lengths(self, tokens: Tensor, lengths: Tensor, breaks: Tensor | None, most: int) -> Tensor:
        return match_lengths(tokens, lengths, breaks, most)

    def score_tokens(self, logits: Tensor, token_ids: Tensor, num_top: int) -> TokenScores:
        return score_tokens(logits, token_ids, num_top)

    def top_values(self, x: Tensor, k: int) -> Tensor:
        return x.topk(k, sorted=True).values

    def keep_between_(self, x: Tensor, low: Tensor, high: Tensor) -> None:
        x.masked_fill_((x < low.unsqueeze(1)) | (x > high.unsqueeze(1)), float("-inf"))


class _HeadKernels(Protocol):
    """The steps of `qkv_to_cache_`."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def rope(self, x: Tensor, positions: Tensor, cos_sin: Tensor) -> Tensor: ...

    def write_kv_(self, keys: Tensor, values: Tensor, cache: LayerCache, slot_mapping: Tensor) -> None: ...


def qkv_to_cache_(
    kernels: _HeadKernels,
    qkv: Tensor,
    shape: HeadShape,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    positions: Tensor,
    cos_sin: Tensor | None,
    cache: LayerCache,
    slot_mapping: Tensor,
) -> Tensor:
    """`Kernels.qkv_to_cache_` step by step."""
    packed = qkv.view(qkv.shape[0], -1, shape.head_dim)
    query, key, value = packed.split_with_sizes((shape.num_heads, shape.num_kv_heads, shape.num_kv_heads), dim=1)
    if norms is not None:
        query = kernels.rms_norm(query, norms[0], eps)
        key = kernels.rms_norm(key, norms[1], eps)
    if cos_sin is not None:
        query = kernels.rope(query, positions, cos_sin)
        key = kernels.rope(key, positions, cos_sin)
    kernels.write_kv_(key, value, cache, slot_mapping)
    return query


def gather_inputs(
    token_rows: Tensor, positions: Tensor, token_ids: Tensor, block_tables: Tensor, block_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """`Kernels.gather_inputs`."""
    rows, places = token_rows.long(), positions.long()
    padding = rows < 0
    rows = rows.clamp_min(0)
    blocks = block_tables[rows, places // block_size].long()
    slots = blocks * block_size + places % block_size
    return token_ids[rows, places].masked_fill(padding, 0), places, slots.masked_fill(padding, -1)


def route(router_logits: Tensor, top_k: int, normalize_weights: bool) -> tuple[Tensor, Tensor]:
    """Each row's experts and their weights, [rows, top_k] both, the heaviest first."""
    # A stable sort, because topk leaves the order of equal values open.
    weights, chosen = router_logits.float().softmax(-1).sort(dim=-1, descending=True, stable=True)
    weights, chosen = weights[:, :top_k], chosen[:, :top_k]
    if normalize_weights:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, chosen


def sigmoid(x: Tensor) -> Tensor:
    """In float32, by exp: torch.sigmoid computes the last few elements of a tensor in another way than the
    rest, so its bits would depend on the number of rows."""
    return 1 / (1 + (-x.float()).exp())


def _gather_tiles(cache: LayerCache, block_table: Tensor, context_len: int) -> tuple[Tensor, Tensor]:
    """A sequence's keys and values in float32 as [kv_heads, tiles, KEY_TILE, head_dim], zeros past its end.

    What lies past the end belongs to nobody and may be NaN, so it is replaced, not multiplied by zero.
    """
    block_size = cache.block_size
    num_slots = -(-context_len // KEY_TILE) * KEY_TILE
    blocks = block_table[: -(-context_len // block_size)].long()

    def gather(side: Tensor) -> Tensor:
        heads, head_dim = side.shape[1], side.shape[3]
        flat = side[blocks].transpose(0, 1).reshape(heads, -1, head_dim)[:, :context_len].float()
        return F.pad(flat, (0, 0, 0, num_slots - context_len)).view(heads, -1, KEY_TILE, head_dim)

    return gather(cache.keys), gather(cache.values)


def _attend(
    query: Tensor, position: int, keys: Tensor, values: Tensor, scale: float, sliding_window: int | None
) -> Tensor:
    """Up to QUERY_TILE queries of one sequence, the first of them at `position`, over its key tiles.

    The maximum is the same in any order; every sum is taken within a tile of fixed size and then tile by
    tile from the first, and a tile that a query may not see adds exactly zero.
    """
    rows, num_heads, head_dim = query.shape
    kv_heads, tiles = keys.shape[:2]
    group = num_heads // kv_heads
    wide = F.pad(query.float(), (0, 0, 0, 0, 0, QUERY_TILE - rows))
    wide = wide.view(QUERY_TILE, kv_heads, group, head_dim).permute(1, 0, 2, 3)
    wide = wide.reshape(kv_heads, 1, QUERY_TILE * group, head_dim).expand(-1, tiles, -1, -1)
    scores = (wide @ keys.transpose(-1, -2) * scale).view(kv_heads, tiles, QUERY_TILE, group, KEY_TILE)

    query_position = position + torch.arange(QUERY_TILE, device=query.device).view(1, 1, -1, 1, 1)
    key_position = torch.arange(tiles * KEY_TILE, device=query.device).view(1, tiles, 1, 1, KEY_TILE)
    visible = key_position <= query_position
    if sliding_window is not None:
        visible = visible & (key_position > query_position - sliding_window)
    scores = scores.masked_fill(~visible, float("-inf"))

    # A padded query past the window of every key sees nothing: keep its maximum finite, the row is dropped.
    highest = scores.amax((1, 4), keepdim=True).clamp_min(torch.finfo(torch.float32).min)
    weights = (scores - highest).exp()
    tile_sums = weights.sum(-1)
    tile_outputs = weights.view(kv_heads, tiles, -1, KEY_TILE) @ values
    total, output = tile_sums[:, 0], tile_outputs[:, 0]
    for tile in range(1, tiles):
        total = total + tile_sums[:, tile]
        output = output + tile_outputs[:, tile]
    output = output.view(kv_heads, QUERY_TILE, group, head_dim) / total.unsqueeze(-1)
    return output.permute(1, 0, 2, 3).reshape(QUERY_TILE, num_heads, head_dim)[:rows].to(query.dtype)
