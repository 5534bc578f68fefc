"""A rank's kernels: those of its device, which compute its own outputs, and gather everybody's
where all are needed.

Four gathers per layer: before and behind the product of a mixer's output, and between and behind the
two products of the MLP. What a mixer computes of its heads or channels is never gathered (but for
models that norm all of them together).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quire.errors import UnsupportedModelError
from quire.kernels.low_rank import ExpertAdapters, LowRankTable
from quire.kernels.ops import (
    Activation,
    ExpertWeights,
    HeadNorms,
    HeadShape,
    Kernels,
    LayerCache,
    MoeSpec,
    TransformActivated,
)
from quire.kernels.recurrent import GatedNormSpec
from quire.kernels.routed_experts import routed_experts
from quire.kernels.weights import Weight
from quire.models.parameters import WeightSource
from quire.parallel.division import Division
from quire.parallel.group import Group


@dataclass(frozen=True, eq=False)
class DividedWeight(Weight):
    """A rank's rows of a weight whose products are gathered."""

    own: Weight
    """The same as the rank's kernels see it."""
    widths: tuple[int, ...]
    """Of all ranks' parts of a product."""
    input_widths: tuple[int, ...] | None = None
    """Of all ranks' parts of what is multiplied with it; None: every rank has that whole."""

    def to(self, device: torch.device) -> DividedWeight:
        own = self.own.to(device)
        return replace(self, parts=own.parts, own=own)


class DividedSource:
    """Weights on their way into a rank's decoder: notes which of them give parts of products only."""

    def __init__(self, loaded: WeightSource, division: Division) -> None:
        self._loaded = loaded
        parameters = division.spec.parameters()
        self._widths = {
            name: (division.gathered(name, parameter), division.gathered_inputs(name))
            for name, parameter in parameters.items()
        }

    def __contains__(self, name: object) -> bool:
        return name in self._loaded

    def pop(self, name: str) -> Weight:
        weight, (widths, input_widths) = self._loaded.pop(name), self._widths[name]
        if widths is None:
            return weight
        return DividedWeight(weight.shape, weight.parts, weight, widths, input_widths)


def parallel_kernels(kernels: Kernels, group: Group, division: Division) -> Kernels:
    return ParallelKernels(kernels, group, division)


class ParallelKernels:
    """Meets `quire.kernels.ops.Kernels`. Each of its operations is named here once: as the device's
    own, which `__init__` takes over, or as a method that gathers, divides or declines. A new one is
    a decision to make: an operation that gave a rank's part where all is expected would be wrong
    without a word.
    """

    record = None
    """Declined: gathers can't be recorded."""

    def __init__(self, kernels: Kernels, group: Group, division: Division) -> None:
        self._own = kernels
        # What the backend is and how it stores things; ranks have the same one.
        self.name = kernels.name
        self.computes = kernels.computes
        self.packed_bytes = kernels.packed_bytes
        self.takes_adapters = kernels.takes_adapters
        self.pack_low_rank = kernels.pack_low_rank
        self.low_rank_table = kernels.low_rank_table
        self.keys_at_once = kernels.keys_at_once
        self.keys_by_dimension = kernels.keys_by_dimension
        # Every rank has these inputs whole, and so the same result: activations between products
        # are gathered, the tokens of a step were sent to all.
        self.rms_norm = kernels.rms_norm
        self.add_rms_norm = kernels.add_rms_norm
        self.layer_norm = kernels.layer_norm
        self.scale_add = kernels.scale_add
        self.scale_rows = kernels.scale_rows
        self.activate = kernels.activate
        self.xielu = kernels.xielu
        self.sigmoid_mul = kernels.sigmoid_mul
        self.sigmoid_mul_add = kernels.sigmoid_mul_add
        self.multiply = kernels.multiply
        self.clamp_ = kernels.clamp_
        self.choose_experts = kernels.choose_experts
        self.captures = kernels.captures
        self.has_kernels_for = kernels.has_kernels_for
        # Of the rank's own heads and channels; the product behind them gathers.
        self.attention = kernels.attention
        self.linear_heads = kernels.linear_heads
        self.adapted_linear_heads = kernels.adapted_linear_heads
        self.latent_to_cache_ = kernels.latent_to_cache_
        self.latent_queries_ = kernels.latent_queries_
        self.convolve_ = kernels.convolve_
        self.recur_ = kernels.recur_
        self.gather_inputs = kernels.gather_inputs
        # Of logits, which the head's product has gathered.
        self.soft_cap_ = kernels.soft_cap_
        self.gumbel_argmax = kernels.gumbel_argmax
        self.sample_rows = kernels.sample_rows
        self.filter_rows_ = kernels.filter_rows_
        self.match_lengths = kernels.match_lengths
        self.gather_logprobs = kernels.gather_logprobs
        self.top_values = kernels.top_values
        self.keep_between_ = kernels.keep_between_
        # Lists for the rank's own heads, whose shape the caller gives.
        self.attention_work = kernels.attention_work
        self.shorten_attention_work_ = kernels.shorten_attention_work_
        self._group = group
        self._division = division
        shapes = division.spec.head_shapes
        self._heads = {heads.share(group.rank, group.size).shape: heads for heads in shapes}
        """By a rank's own heads: those of the whole layer."""
        if len(self._heads) < len(shapes):
            raise UnsupportedModelError(
                "layers with different heads have the same on a rank: use another number of them"
            )
        starts = [
            division.rows(division.spec.vocab_size, rank).start for rank in range(1, division.size)
        ]
        self._first_tokens = torch.tensor(starts, dtype=torch.int64)
        """Of the ranks after the first."""

    def compile_together(self, call: Callable[[], object]) -> None:
        """Declined: ranks that differ in what is missing would wait for each other within `call`."""

    def pack(self, weight: Weight) -> Weight:
        if not isinstance(weight, DividedWeight):
            return self._own.pack(weight)
        packed = self._own.pack(weight.own)
        return replace(weight, shape=packed.shape, parts=packed.parts, own=packed)

    def pack_into(self, packed: Weight, loaded: Weight) -> None:
        """Of a divided weight, `loaded` are this rank's rows."""
        self._own.pack_into(
            packed.own if isinstance(packed, DividedWeight) else packed,
            loaded.own if isinstance(loaded, DividedWeight) else loaded,
        )

    def linear(
        self, x: Tensor, weight: Weight, bias: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        if not isinstance(weight, DividedWeight):
            return self._own.linear(x, weight, bias, out)
        inputs = weight.input_widths
        if inputs is not None and x.shape[1] < sum(inputs):
            x = self._gather(x, inputs)
        return self._gather(self._own.linear(x, weight.own, bias), weight.widths, out)

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
        assert isinstance(weight, DividedWeight)
        return self._gather(self._own.linear_gated(x, weight.own, bias, activation), weight.widths)

    def adapted_linear(
        self,
        x: Tensor,
        weight: Weight,
        bias: Tensor | None,
        slots: Tensor,
        table: LowRankTable,
        out: Tensor | None = None,
    ) -> Tensor:
        """The table has what adapters add to this rank's own outputs, of all of the inputs."""
        if not isinstance(weight, DividedWeight):
            return self._own.adapted_linear(x, weight, bias, slots, table, out)
        inputs = weight.input_widths
        if inputs is not None and x.shape[1] < sum(inputs):
            x = self._gather(x, inputs)
        own = self._own.adapted_linear(x, weight.own, bias, slots, table)
        return self._gather(own, weight.widths, out)

    def adapted_linear_gated(
        self,
        x: Tensor,
        weight: Weight,
        bias: Tensor | None,
        activation: Activation,
        slots: Tensor,
        table: LowRankTable,
    ) -> Tensor:
        assert isinstance(weight, DividedWeight)
        own = self._own.adapted_linear_gated(x, weight.own, bias, activation, slots, table)
        return self._gather(own, weight.widths)

    def embedding(self, token_ids: Tensor, weight: Weight) -> Tensor:
        """Every rank looks all tokens up, those of others in a row of its own, and takes what their
        owners found.
        """
        if not isinstance(weight, DividedWeight):  # of positions, which every rank has whole
            return self._own.embedding(token_ids, weight)
        rows = self._division.rows(self._division.spec.vocab_size)
        found = self._own.embedding(
            (token_ids - rows.start).clamp(0, rows.stop - rows.start - 1), weight.own
        )
        self._first_tokens = self._first_tokens.to(token_ids.device)
        owners = torch.searchsorted(self._first_tokens, token_ids, right=True)
        everybodys = self._group.all_gather(found)
        return everybodys[owners, torch.arange(len(token_ids), device=token_ids.device)]

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
        if norms is not None and len(norms.query) != shape.head_dim:
            qkv, norms = self._normed_whole(qkv, self._heads[shape], norms), None
        return self._own.qkv_to_cache_(qkv, shape, norms, positions, cos_sin, cache, slot_mapping)

    def query_heads(
        self,
        query: Tensor,
        shape: HeadShape,
        norms: HeadNorms | None,
        positions: Tensor,
        cos_sin: Tensor | None,
    ) -> Tensor:
        if norms is not None and len(norms.query) != shape.head_dim:
            raise UnsupportedModelError(
                "a norm over all heads in a layer that reads another's keys, on several ranks"
            )
        return self._own.query_heads(query, shape, norms, positions, cos_sin)

    def gated_norm(
        self, x: Tensor, gate: Tensor, weight: Tensor | None, eps: float, spec: GatedNormSpec
    ) -> Tensor:
        """Of a rank's own values; of everybody's, where they are normed together."""
        width = x.shape[1]
        if spec.group_size and width % spec.group_size:
            both = self._group.all_gather(torch.cat((x, gate), 1)).transpose(0, 1)
            x, gate = both[..., :width].flatten(1), both[..., width:].flatten(1)
        return self._own.gated_norm(x, gate, weight, eps, spec)

    def moe(
        self,
        x: Tensor,
        router_logits: Tensor,
        experts: ExpertWeights,
        spec: MoeSpec,
        transform_activated: TransformActivated | None = None,
        adapters: ExpertAdapters | None = None,
    ) -> Tensor:
        """The tables have what adapters add to this rank's own outputs."""
        gate_up, down = experts.gate_up, experts.down
        assert isinstance(gate_up, DividedWeight)
        assert isinstance(down, DividedWeight)

        def gathered(hidden: Tensor) -> Tensor:
            whole = self._gather(hidden, gate_up.widths)
            return whole if transform_activated is None else transform_activated(whole)

        divided = experts._replace(gate_up=gate_up.own, down=down.own)
        own = self._own.moe(x, router_logits, divided, spec, gathered, adapters)
        return self._gather(own, down.widths)

    routed_experts = routed_experts

    def decode_lists(
        self, fewest: int, most: int, max_context_len: int, shape: HeadShape
    ) -> dict[str, int]:
        """Only where gathers can be captured, and where every rank finds the same graphs large
        enough for a step.
        """
        can_capture = self._group.can_capture and self._division.has_equal_mixers
        return self._own.decode_lists(fewest, most, max_context_len, shape) if can_capture else {}

    def _gather(self, own: Tensor, widths: tuple[int, ...], out: Tensor | None = None) -> Tensor:
        """Everybody's [rows, width] side by side, in the order of the ranks."""
        rows, most = own.shape[0], max(widths)
        if own.shape[1] < most:  # all send as much
            own = torch.nn.functional.pad(own, (0, most - own.shape[1]))
        parts = self._group.all_gather(own)
        if min(widths) < most:
            side_by_side = torch.cat(
                [part[:, :width] for part, width in zip(parts, widths, strict=True)], 1
            )
        else:
            side_by_side = parts.transpose(0, 1).reshape(rows, -1)
        return side_by_side if out is None else out.copy_(side_by_side)

    def _normed_whole(self, qkv: Tensor, heads: HeadShape, norms: HeadNorms) -> Tensor:
        """A rank's projections with the heads of all ranks normed together: the one case in which
        they are gathered.
        """
        if norms.after_rope:
            raise UnsupportedModelError("a norm over all heads comes before rope")
        division = self._division
        others = [heads.share(rank, division.size) for rank in range(division.size)]
        share, size = others[division.rank], heads.head_dim
        local = share.shape
        query, key, value = qkv.split_with_sizes(
            [count * size for count in (local.num_heads, local.num_kv_heads, local.num_kv_heads)], 1
        )
        queries = self._gather(query, tuple(one.shape.num_heads * size for one in others))
        gathered = self._gather(key, tuple(one.shape.num_kv_heads * size for one in others))
        # Ranks that share a key head have sent the same: one of them is enough.
        places = {
            head: place
            for place, head in enumerate(
                h for one in others for h in range(one.kv.start, one.kv.stop)
            )
        }
        by_head = gathered.view(len(gathered), -1, size)
        keys = by_head[:, [places[head] for head in sorted(places)]].flatten(1)
        queries = self._own.rms_norm(queries, norms.query, norms.eps, norms.offset)
        keys = self._own.rms_norm(keys, norms.key, norms.eps, norms.offset)
        own = queries[:, share.query.start * size : share.query.stop * size]
        return torch.cat((own, keys[:, share.kv.start * size : share.kv.stop * size], value), 1)
