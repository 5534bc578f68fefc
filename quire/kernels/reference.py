"""The definition of every kernel, in plain torch, on any device.

Written to be read and to be exact (see the rules in `ops.py`), not to be fast. torch's own matrix
product picks its algorithm by the number of rows, so bits would change with the batch. Here every
product has a shape fixed by the model: rows go in tiles of ROW_TILE, queries in tiles of
QUERY_TILE, keys in tiles of KEY_TILE, the last tile filled up with zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.adapted_products import AdaptedProducts
from quire.kernels.elementwise import ACTIVATIONS, sigmoid, soft_capped, xielu
from quire.kernels.filters import filter_rows_
from quire.kernels.formats import Format
from quire.kernels.latent import latent_queries_, latent_to_cache_, linear_heads
from quire.kernels.logprobs import gather_logprobs
from quire.kernels.low_rank import ExpertAdapters
from quire.kernels.noise import gumbel_noise
from quire.kernels.ops import (
    HAS_NAN,
    NOTHING_LEFT,
    Activation,
    AttentionSpec,
    ExpertWeights,
    HeadNorms,
    HeadShape,
    Int32Array,
    LayerCache,
    MoeSpec,
    PagedBatch,
    SampleRows,
    TransformActivated,
)
from quire.kernels.quantize import LARGEST_FP8
from quire.kernels.reference_recurrent import convolve, gated_norm, recur
from quire.kernels.repeats import match_lengths
from quire.kernels.routed_experts import routed_experts
from quire.kernels.routing import route
from quire.kernels.tiled_linear import ROW_TILE as ROW_TILE
from quire.kernels.tiled_linear import tiled_linear as tiled_linear
from quire.kernels.weights import Weight

QUERY_TILE = 16
KEY_TILE = 64
SWIGLU_LIMIT = 7.0


class ReferenceKernels(AdaptedProducts):
    """Plain torch. Meets `quire.kernels.ops.Kernels`; other backends inherit what they don't
    replace.
    """

    name = "reference"
    keys_at_once = 1
    sample_rows: SampleRows | None = None
    record: Callable[[Callable[[], None]], Callable[[], None] | None] | None = None

    def computes(self, format: Format) -> bool:
        # it could, by expanding the weight at every product; expanding it once, at loading, is
        # better
        return False

    def captures(self, part: object) -> bool:
        return isinstance(part, AttentionSpec)

    def has_kernels_for(self, mixer: object) -> bool:
        return True

    def compile_together(self, call: Callable[[], object]) -> None:
        """There is nothing to compile."""

    def pack(self, weight: Weight) -> Weight:
        return weight

    def pack_into(self, packed: Weight, loaded: Weight) -> None:
        # Packed beside the old one and then copied, so that whatever fails while packing leaves the
        # old one whole.
        packed.copy_(self.pack(loaded))

    def packed_bytes(self, parts: Sequence[tuple[Format, tuple[int, ...]]]) -> int:
        return sum(format.nbytes(shape) for format, shape in parts)

    def linear(
        self, x: Tensor, weight: Weight, bias: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        if weight.format is None:
            result = torch.cat(
                [self.linear(x, part, added) for part, added in weight.split(bias)], 1
            )
        else:
            result = tiled_linear(
                x, weight.format.expand(*weight.parts[0].tensors).to(x.dtype), bias
            )
        return result if out is None else out.copy_(result)

    def linear_pair(
        self,
        x: Tensor,
        first: Weight,
        first_bias: Tensor | None,
        second: Weight,
        second_bias: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        return self.linear(x, first, first_bias), self.linear(x, second, second_bias)

    def linear_gated(
        self, x: Tensor, weight: Weight, bias: Tensor | None, activation: Activation
    ) -> Tensor:
        return self.gate(self.linear(x, weight, bias), activation)

    def gate(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """activation(gate) * up of [rows, 2 * size]."""
        gate, up = gate_up.chunk(2, dim=-1)
        if activation is Activation.CLAMPED_SWIGLU:
            gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT) + 1
        return self.activate(gate, activation) * up

    def activate(self, x: Tensor, activation: Activation) -> Tensor:
        return ACTIVATIONS[activation.value](x.float()).to(x.dtype)

    def xielu(self, x: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        return xielu(x.float(), positive, negative).to(x.dtype)

    def embedding(self, token_ids: Tensor, weight: Weight) -> Tensor:
        if weight.is_dense:
            return F.embedding(token_ids, weight.tensor)
        part = weight.parts[0]
        return part.format.expand(*(tensor[token_ids] for tensor in part.tensors))

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
        x32 = x.float()
        normed = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)
        return (
            (normed * (weight.float() + offset)).to(x.dtype)
            if offset
            else normed.to(x.dtype) * weight
        )

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        total = x + residual
        return self.rms_norm(total, weight, eps, offset), total

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        x32 = x.float() - x.float().mean(-1, keepdim=True)
        normed = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps) * weight.float()
        return (normed if bias is None else normed + bias.float()).to(x.dtype)

    def scale_add(self, x: Tensor, scale: float, other: Tensor | None = None) -> Tensor:
        scaled = x if scale == 1 else x * scale
        return scaled if other is None else scaled + other

    def scale_rows(self, x: Tensor, factors: Tensor, which: Tensor | None = None) -> Tensor:
        own = factors if which is None else factors[which]
        return (x.float() * own.unsqueeze(1)).to(x.dtype)

    def soft_cap_(self, x: Tensor, cap: float) -> None:
        x.copy_(soft_capped(x.float(), cap))

    def clamp_(self, x: Tensor, limit: float) -> None:
        x.clamp_(-limit, limit)

    def rope(self, x: Tensor, positions: Tensor, cos_sin: Tensor) -> Tensor:
        cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
        first, second = x.float().chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(
            x.dtype
        )

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
        packed = qkv.view(qkv.shape[0], -1, shape.head_dim)
        query, key, value = packed.split_with_sizes(
            (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads), dim=1
        )
        if norms is not None and not norms.after_rope:
            query, key = self.norm_heads(query, key, norms)
        if cos_sin is not None:
            query = self.rope(query, positions, cos_sin)
            key = self.rope(key, positions, cos_sin)
        if norms is not None and norms.after_rope:
            query, key = self.norm_heads(query, key, norms)
        self.write_kv_(key, value, cache, slot_mapping)
        return query

    def query_heads(
        self,
        query: Tensor,
        shape: HeadShape,
        norms: HeadNorms | None,
        positions: Tensor,
        cos_sin: Tensor | None,
    ) -> Tensor:
        query = query.view(query.shape[0], -1, shape.head_dim)
        if norms is not None and not norms.after_rope:
            query, _ = self.norm_heads(query, query, norms)
        if cos_sin is not None:
            query = self.rope(query, positions, cos_sin)
        if norms is not None and norms.after_rope:
            query, _ = self.norm_heads(query, query, norms)
        return query

    def norm_heads(self, query: Tensor, key: Tensor, norms: HeadNorms) -> tuple[Tensor, Tensor]:
        """Norms queries and keys [rows, heads, head_dim], head by head or all heads of a row
        together.
        """

        def normed(x: Tensor, weight: Tensor) -> Tensor:
            source = x if weight.shape[0] == x.shape[2] else x.flatten(1)
            return self.rms_norm(source, weight, norms.eps, norms.offset).view(x.shape)

        return normed(query, norms.query), normed(key, norms.key)

    def sigmoid_mul(self, gate: Tensor, x: Tensor) -> Tensor:
        return sigmoid(gate).to(x.dtype) * x

    def sigmoid_mul_add(self, gate: Tensor, x: Tensor, other: Tensor) -> Tensor:
        return other + self.sigmoid_mul(gate, x)

    def multiply(self, x: Tensor, other: Tensor) -> Tensor:
        return x * other

    def write_kv_(
        self, keys: Tensor, values: Tensor, cache: LayerCache, slot_mapping: Tensor
    ) -> None:
        # Padding is written to block 0, which belongs to no request.
        slots = slot_mapping.clamp_min(0)
        block, offset = slots // cache.block_size, slots % cache.block_size
        sides = (keys, values), (cache.keys, cache.values), cache.scales, cache.fp8_scales
        for new, side, scales, scale in zip(*sides, strict=True):
            if scales is not None:
                new, scales[block, :, offset] = quantize_heads(new)
            elif (
                side.dtype == torch.float8_e4m3fn
            ):  # clamped to FP8's range; stored as bytes, which can be indexed
                fitting = (new.float() / scale).clamp(-LARGEST_FP8, LARGEST_FP8)
                new, side = fitting.to(side.dtype).view(torch.uint8), side.view(torch.uint8)
            side[block, :, offset] = new

    def keys_by_dimension(self, cache_dtype: torch.dtype, block_size: int) -> bool:
        return False

    def gather_inputs(
        self,
        token_rows: Tensor,
        positions: Tensor,
        token_ids: Tensor,
        block_tables: Tensor,
        block_size: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows, places = token_rows.long(), positions.long()
        padding = rows < 0
        rows = rows.clamp_min(0)
        blocks = block_tables[rows, places // block_size].long()
        slots = blocks * block_size + places % block_size
        return (
            token_ids[rows, places].masked_fill(padding, 0),
            places,
            slots.masked_fill(padding, -1),
        )

    def attention_work(
        self,
        query_lens: Int32Array,
        context_lens: Int32Array,
        table_rows: Int32Array,
        shape: HeadShape,
    ) -> dict[str, Int32Array]:
        return {}

    def decode_lists(
        self, fewest: int, most: int, max_context_len: int, shape: HeadShape
    ) -> dict[str, int]:
        return {}

    def shorten_attention_work_(self, work: Mapping[str, Tensor], lag: Tensor) -> None:
        assert not work  # there are no lists: attention goes by the batch's lengths

    def attention(
        self,
        query: Tensor,
        cache: LayerCache,
        batch: PagedBatch,
        spec: AttentionSpec,
        sinks: Tensor | None = None,
        slopes: Tensor | None = None,
    ) -> Tensor:
        output = query.new_empty(*query.shape[:2], cache.values.shape[3])
        starts, context_lens = batch.query_start.tolist(), batch.context_lens.tolist()
        tables = batch.table_rows.tolist()
        for i, context_len in enumerate(context_lens):
            first_row, end_row = starts[i], starts[i + 1]
            start, first = context_len - (end_row - first_row), 0
            if spec.sliding_window:
                first = max(0, start - spec.sliding_window + 1)
            elif spec.chunk:
                first = start // spec.chunk * spec.chunk
            keys, values = _gather_tiles(cache, batch.block_tables[tables[i]], first, context_len)
            for row in range(first_row, end_row, QUERY_TILE):
                tile_rows = slice(row, min(row + QUERY_TILE, end_row))
                position = context_len - (end_row - row)
                output[tile_rows] = _attend(
                    query[tile_rows], position, keys, values, spec, sinks, slopes
                )
        return output

    def moe(
        self,
        x: Tensor,
        router_logits: Tensor,
        experts: ExpertWeights,
        spec: MoeSpec,
        transform_activated: TransformActivated | None = None,
        adapters: ExpertAdapters | None = None,
    ) -> Tensor:
        weights, chosen = self.route(router_logits, spec, experts.choice_bias)
        # One sort groups the rows by expert; stable, so an expert's rows stay in their order.
        by_expert = chosen.flatten().sort(stable=True)
        rows = by_expert.indices // spec.top_k
        if experts.scales is not None:
            weights = weights * experts.scales[chosen]
        weights = weights.flatten()[by_expert.indices].unsqueeze(1)
        counts = torch.bincount(by_expert.values, minlength=router_logits.shape[1]).tolist()
        # ascending: the order of additions in a row
        used = [expert for expert, count in enumerate(counts) if count]
        sizes = [counts[expert] for expert in used]
        parts, scales = rows.split_with_sizes(sizes), weights.split_with_sizes(sizes)
        slots = (adapters.slots[rows] if adapters else rows).split_with_sizes(sizes)
        hidden = []
        for i, (expert, part, scale) in enumerate(zip(used, parts, scales, strict=True)):
            added = _row(experts.gate_up_bias, expert)
            own, weight = x[part], experts.gate_up.experts[expert]
            if spec.scales_inputs:
                own = (own.float() * scale).to(x.dtype)
            table = None if adapters is None else adapters.gate_up[expert]
            hidden.append(self.activated_of(own, weight, added, spec, slots[i], table))
        if transform_activated is not None:
            hidden = list(transform_activated(torch.cat(hidden)).split_with_sizes(sizes))
        output = torch.zeros(
            x.shape[0], experts.down.shape[1], dtype=torch.float32, device=x.device
        )
        for i, (expert, part, scale, own) in enumerate(
            zip(used, parts, scales, hidden, strict=True)
        ):
            product = self.linear_of(
                own,
                experts.down.experts[expert],
                _row(experts.down_bias, expert),
                slots[i],
                None if adapters is None else adapters.down[expert],
            )
            output[part] += product.float() if spec.scales_inputs else product.float() * scale
        return output.to(x.dtype)

    routed_experts = routed_experts

    def choose_experts(
        self, router_logits: Tensor, spec: MoeSpec, choice_bias: Tensor | None
    ) -> Tensor:
        return self.route(router_logits, spec, choice_bias)[1]

    def route(
        self, router_logits: Tensor, spec: MoeSpec, choice_bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Weights and numbers of each row's experts, both [rows, top_k]."""
        return route(router_logits, spec, choice_bias)

    def gumbel_argmax(
        self, logits: Tensor, temperature: Tensor, keys: Tensor
    ) -> tuple[Tensor, Tensor]:
        scores = logits
        if (temperature > 0).any():
            drawn = (temperature > 0).unsqueeze(1)
            scores = logits / temperature.unsqueeze(1).where(drawn, 1.0)
            scores = torch.where(drawn, scores + gumbel_noise(keys, logits.shape[1]), logits)
        token_ids = scores.argmax(-1)
        best = scores.gather(1, token_ids.unsqueeze(1))[:, 0]  # NaN if there is one
        flags = HAS_NAN * best.isnan().int() + NOTHING_LEFT * (best == float("-inf")).int()
        return token_ids.masked_fill_(flags > 0, 0), flags

    linear_heads = linear_heads
    latent_to_cache_ = latent_to_cache_
    latent_queries_ = latent_queries_
    convolve_ = staticmethod(convolve)
    recur_ = staticmethod(recur)
    gated_norm = staticmethod(gated_norm)
    filter_rows_ = filter_rows_
    match_lengths = staticmethod(match_lengths)
    gather_logprobs = staticmethod(gather_logprobs)

    def top_values(self, x: Tensor, k: int) -> Tensor:
        if k > x.shape[1]:
            raise ValueError(f"A row of {x.shape[1]} numbers has no {k} largest.")
        return x.topk(k, sorted=True).values

    def keep_between_(self, x: Tensor, low: Tensor, high: Tensor) -> None:
        x.masked_fill_((x < low.unsqueeze(1)) | (x > high.unsqueeze(1)), float("-inf"))


def _row(biases: Tensor | None, index: int) -> Tensor | None:
    return None if biases is None else biases[index]


def quantize_heads(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., head_dim] as int8, and the float32 scale [...] of each head, which is NaN if not all
    its numbers are finite, so that attention to it gives NaN.
    """
    highest = x.float().abs().amax(-1, keepdim=True)
    scales = (highest / 127).where(highest.isfinite(), float("nan"))
    whole = (x.float() / scales.where(scales > 0, 1.0)).round().clamp(-127, 127)
    return whole.where(scales.isfinite(), 0.0).to(torch.int8), scales.squeeze(-1)


def _gather_tiles(
    cache: LayerCache, block_table: Tensor, first: int, context_len: int
) -> tuple[Tensor, Tensor]:
    """A sequence's keys and values in float32 as [kv_heads, tiles, KEY_TILE, …], with zeros
    after its end and before the `first` key that is seen: what the cache holds there may be NaN, so
    multiplying by zero won't do.
    """
    block_size = cache.block_size
    num_slots = -(-context_len // KEY_TILE) * KEY_TILE
    blocks = block_table[: -(-context_len // block_size)].long()

    def gather(side: Tensor, scales: Tensor | None, scale: float) -> Tensor:
        heads, head_dim = side.shape[1], side.shape[3]
        bits = side.view(torch.uint8) if side.dtype == torch.float8_e4m3fn else side
        found = bits[blocks].view(side.dtype).float()
        found = found if scale == 1 else found * scale
        numbers = found if scales is None else found * scales[blocks].unsqueeze(-1)
        flat = numbers.transpose(0, 1).reshape(heads, -1, head_dim)[:, first:context_len]
        return F.pad(flat, (0, 0, first, num_slots - context_len)).view(
            heads, -1, KEY_TILE, head_dim
        )

    sides = (cache.keys, cache.values), cache.scales, cache.fp8_scales
    keys, values = (gather(*side) for side in zip(*sides, strict=True))
    return keys, values


def _attend(
    query: Tensor,
    position: int,
    keys: Tensor,
    values: Tensor,
    spec: AttentionSpec,
    sinks: Tensor | None,
    slopes: Tensor | None,
) -> Tensor:
    """Attention of up to QUERY_TILE queries of one sequence, the first at `position`, over the
    sequence's key tiles.

    A maximum is the same in any order. Sums are taken within a tile of fixed size, and then over
    the tiles from the first on; a tile that a query may not see adds exactly zero. So the bits
    don't depend on the number of queries.
    """
    rows, num_heads, head_dim = query.shape
    kv_heads, tiles = keys.shape[:2]
    group = num_heads // kv_heads
    queries = F.pad(query.float(), (0, 0, 0, 0, 0, QUERY_TILE - rows))
    queries = queries.view(QUERY_TILE, kv_heads, group, head_dim).permute(1, 0, 2, 3)
    queries = queries.reshape(kv_heads, 1, QUERY_TILE * group, head_dim).expand(-1, tiles, -1, -1)
    scores = (queries @ keys.transpose(-1, -2) * spec.scale).view(
        kv_heads, tiles, QUERY_TILE, group, KEY_TILE
    )
    if spec.soft_cap:
        scores = soft_capped(scores, spec.soft_cap)

    query_position = position + torch.arange(QUERY_TILE, device=query.device).view(1, 1, -1, 1, 1)
    key_position = torch.arange(tiles * KEY_TILE, device=query.device).view(
        1, tiles, 1, 1, KEY_TILE
    )
    if slopes is not None:
        scores = scores + slopes.view(kv_heads, 1, 1, group, 1) * (key_position - query_position)
    visible = key_position <= query_position
    if spec.sliding_window is not None:
        visible = visible & (key_position > query_position - spec.sliding_window)
    if spec.chunk is not None:
        visible = visible & (key_position >= query_position // spec.chunk * spec.chunk)
    scores = scores.masked_fill(~visible, float("-inf"))

    # A padded query may see no key at all: its maximum is kept finite, and its row is dropped at
    # the end.
    highest = scores.amax((1, 4), keepdim=True).clamp_min(torch.finfo(torch.float32).min)
    if sinks is not None:
        sinks = sinks.float().view(kv_heads, 1, 1, group, 1)
        highest = highest.maximum(sinks)
    weights = (scores - highest).exp()
    tile_sums = weights.sum(-1)
    tile_outputs = weights.view(kv_heads, tiles, -1, KEY_TILE) @ values
    total, output = tile_sums[:, 0], tile_outputs[:, 0]
    for tile in range(1, tiles):
        total = total + tile_sums[:, tile]
        output = output + tile_outputs[:, tile]
    if sinks is not None:
        total = total + (sinks - highest).exp()[:, 0, :, :, 0]
    output = output.view(kv_heads, QUERY_TILE, group, -1) / total.unsqueeze(-1)
    return output.permute(1, 0, 2, 3).reshape(QUERY_TILE, num_heads, -1)[:rows].to(query.dtype)
