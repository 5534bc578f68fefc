"""The Triton backend: meets `quire.kernels.ops.Kernels` on NVIDIA GPUs.

Matrix products of half-precision weights go to cuBLAS, with its splitting of the inner dimension
turned off and small batches padded to 16 rows. Whether cuBLAS then gives a row the same bits in any
batch is not documented, so it is checked for each shape of weight when it is loaded; a shape that
fails is computed by our own kernel.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.backends.cuda import experts, recurrent
from quire.backends.triton import (
    adapters,
    convolution,
    cublas,
    filters,
    gated_norm,
    heads,
    inputs,
    linear_pair,
    logprobs,
    quantized,
    repeats,
    router_linear,
    rowwise,
    sampling,
    shared_experts,
)
from quire.backends.triton import latent as latent_kernels
from quire.backends.triton import moe as experts_kernels
from quire.backends.triton.adapter_table import TritonLowRank, TritonTable
from quire.backends.triton.attention_kernels import TritonAttention
from quire.backends.triton.exact_products import (
    forbid_split_sums,
    heads_are_exact,
    rows_are_exact,
)
from quire.backends.triton.grouping import Tiles
from quire.backends.triton.launch import HAS_GLUON
from quire.backends.triton.linear import (
    SMALLEST_BATCH,
    is_quicker_than_cublas,
    linear,
    room_for,
)
from quire.backends.triton.packed_size import packed_bytes
from quire.backends.triton.shapes import as_rows
from quire.backends.triton.small_batches import are_exact
from quire.kernels.formats import Format
from quire.kernels.low_rank import ExpertAdapters, LowRank, LowRankTable, PackedLowRank
from quire.kernels.ops import (
    Activation,
    AttentionSpec,
    ExpertWeights,
    LatentNorm,
    LayerCache,
    MoeSpec,
    Router,
    SharedExpert,
    TransformActivated,
)
from quire.kernels.recurrent import ConvolutionSpec, RecurrentSpec
from quire.kernels.weights import Weight
from quire.process.compile_together import compile_together

if HAS_GLUON:
    from quire.backends.triton import single_row_linear

logger = logging.getLogger(__name__)


class TritonKernels(TritonAttention):
    """Kernels for one GPU and a model's dtype; the rest, such as products in float32, is the
    reference's.
    """

    name = "triton"
    rms_norm = staticmethod(rowwise.rms_norm)
    add_rms_norm = staticmethod(rowwise.add_rms_norm)
    layer_norm = staticmethod(rowwise.layer_norm)
    gate = staticmethod(rowwise.gate)
    soft_cap_ = staticmethod(rowwise.soft_cap_)
    clamp_ = staticmethod(rowwise.clamp_)
    qkv_to_cache_ = staticmethod(heads.qkv_to_cache_)
    latent_to_cache_ = staticmethod(latent_kernels.latent_to_cache_)
    sigmoid_mul = staticmethod(rowwise.sigmoid_mul)
    sigmoid_mul_add = staticmethod(rowwise.sigmoid_mul_add)
    convolve_ = staticmethod(convolution.convolve_)
    recur_ = staticmethod(recurrent.recur_)
    gated_norm = staticmethod(gated_norm.gated_norm)
    gather_inputs = staticmethod(inputs.gather_inputs)
    gumbel_argmax = staticmethod(sampling.gumbel_argmax)
    sample_rows = staticmethod(sampling.sample_rows)
    filter_rows_ = staticmethod(filters.filter_rows_)
    compile_together = staticmethod(compile_together)
    match_lengths = staticmethod(repeats.match_lengths)
    gather_logprobs = staticmethod(logprobs.gather_logprobs)

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__(dtype)
        forbid_split_sums()
        self._quantized = quantized.QuantizedProducts(self.linear)
        self._is_exact: dict[tuple[torch.Size, torch.dtype, bool], bool] = {}
        self._exact_heads: dict[tuple[int, ...], bool] = {}
        self._row_tiles = adapters.RowTiles()
        if self._device.type == "cuda" and not recurrent.has_compiler(self._device):
            # It gives other bits: the engine's fingerprint says so.
            self.name = "triton without CUDA C++"

    def computes(self, format: Format) -> bool:
        return self._dtype != torch.float32 and quantized.computes(format)

    def captures(self, part: object) -> bool:
        if isinstance(part, MoeSpec):
            return _has_own_experts(part)
        return isinstance(part, (ConvolutionSpec, RecurrentSpec)) or super().captures(part)

    def pack(self, weight: Weight) -> Weight:
        if len(weight.shape) > 1 and any(self.computes(part.format) for part in weight.parts):
            weight = quantized.pack(weight, self._dtype)
            self._quantized.check(weight, self._dtype)
        if weight.device.type == "cuda":
            self._test_kernels(weight)
        return weight

    def _test_kernels(self, weight: Weight) -> None:
        """Whether kernels for such a weight are exact here: this can't be tested during a graph
        capture.
        """
        device = weight.device
        if len(weight.shape) == 3 and self._dtype != torch.float32:  # a router goes with experts
            for of_rows in (self._dtype, torch.float32):
                router_linear.many_rows_are_exact(device, of_rows)
        if not weight.is_dense or weight.tensor.dtype == torch.float32:
            return
        dtype = weight.tensor.dtype
        if len(weight.shape) == 2:
            for has_bias in (False, True):
                self._check(weight.tensor, has_bias)
            are_exact(device, dtype)
        elif len(weight.shape) == 3:  # experts, or heads
            experts.are_exact(device, dtype)
            if weight.shape not in self._exact_heads:
                self._exact_heads[weight.shape] = heads_are_exact(weight)

    def packed_bytes(self, parts: Sequence[tuple[Format, tuple[int, ...]]]) -> int:
        return packed_bytes(parts, self._dtype, quantized.capability())

    def linear(
        self, x: Tensor, weight: Weight, bias: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        if x.dtype == torch.float32 and weight.is_dense and len(weight.shape) == 2:
            if self._dtype != torch.float32 and weight.shape[1] <= router_linear.MAX_INNER:
                result = router_linear.router_linear(x, weight.tensor, bias)
                return result if out is None else out.copy_(result)
            # The order in which kernels for experts add, so that rows without adapters have the same
            # bits beside some that have them.
            result = linear(x, weight.tensor.to(x.dtype), bias)
            return result if out is None else out.copy_(result)
        if x.dtype == torch.float32 or weight.format is None:
            return super().linear(x, weight, bias, out)
        if not weight.is_dense:
            return self._quantized.linear(x, weight, bias, out, silu_mul=False)
        rows, matrix = x.shape[0], weight.tensor
        own = self._own_linear(x, weight, bias)
        if own is not None:
            return own(x, matrix, bias, out, False)
        x = x.contiguous()
        if rows < SMALLEST_BATCH:
            x = _padded(x)
            result = cublas.product(x, matrix, room_for(x, matrix.shape[0]), bias)[:rows]
        elif out is not None and out.is_contiguous():
            return cublas.product(x, matrix, out, bias)
        else:
            result = cublas.product(x, matrix, room_for(x, matrix.shape[0]), bias)
        return result if out is None else out.copy_(result)

    def _own_linear(
        self, x: Tensor, weight: Weight, bias: Tensor | None
    ) -> Callable[..., Tensor] | None:
        """Our own kernel for a product of a dense weight in half precision, where cuBLAS is slower or
        not exact.
        """
        if x.dtype == torch.float32:
            return None
        own = _own_product(x, weight.tensor, silu_mul=False)
        return own or (None if self._check(weight.tensor, bias is not None) else linear)

    def linear_pair(
        self,
        x: Tensor,
        first: Weight,
        first_bias: Tensor | None,
        second: Weight,
        second_bias: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        if second_bias is None and linear_pair.takes(x, first, second):
            weights = first.tensor, second.tensor
            is_exact = first_bias is None and are_exact(x.device, x.dtype)
            if is_exact and single_row_linear.takes_pair(len(x), *weights):
                return single_row_linear.single_row_pair(x, *weights)
            return linear_pair.linear_pair(x, first, second, first_bias)
        return super().linear_pair(x, first, first_bias, second, second_bias)

    def linear_heads(self, x: Tensor, weight: Weight) -> Tensor:
        return latent_kernels.linear_heads(x, weight, self._exact_heads.get(weight.shape, False))

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
        return latent_kernels.latent_queries_(
            plain,
            rotated,
            key_up,
            latent,
            norm,
            positions,
            cos_sin,
            cache,
            slot_mapping,
            self._exact_heads.get(key_up.shape, False),
        )

    def linear_gated(
        self, x: Tensor, weight: Weight, bias: Tensor | None, activation: Activation
    ) -> Tensor:
        is_fused = activation is Activation.SILU and x.dtype != torch.float32 and weight.is_dense
        own = _own_product(x, weight.tensor, silu_mul=True) if is_fused else None
        if own is not None:
            return own(x, weight.tensor, bias, None, True)
        if activation is Activation.SILU and self._quantized.fuses(x.shape[0], weight):
            return self._quantized.linear(x, weight, bias, None, silu_mul=True)
        return self.gate(self.linear(x, weight, bias), activation)

    def pack_low_rank(self, low_rank: LowRank) -> PackedLowRank:
        return TritonLowRank(low_rank)

    def low_rank_table(self, num_slots: int) -> LowRankTable:
        table = TritonTable(num_slots, self._device)
        adapters.outputs_are_exact(table.slots.device, self._dtype)  # not first during a capture
        return table

    def adapted_linear(
        self,
        x: Tensor,
        weight: Weight,
        bias: Tensor | None,
        slots: Tensor,
        table: LowRankTable,
        out: Tensor | None = None,
    ) -> Tensor:
        tiles, table = self._adapted(x, slots, table)
        out, sums = self._linear_and_shrink(x, weight, bias, tiles, table, out)
        adapters.expand_(out, sums, tiles, table)
        return out

    def adapted_linear_gated(
        self,
        x: Tensor,
        weight: Weight,
        bias: Tensor | None,
        activation: Activation,
        slots: Tensor,
        table: LowRankTable,
    ) -> Tensor:
        tiles, table = self._adapted(x, slots, table)
        out, sums = self._linear_and_shrink(x, weight, bias, tiles, table)
        return adapters.expand_gated(out, sums, tiles, table, activation)

    def _linear_and_shrink(
        self,
        x: Tensor,
        weight: Weight,
        bias: Tensor | None,
        tiles: Tiles,
        table: TritonTable,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The product with the weight, and the sums that `adapters.expand_` takes."""
        x = as_rows(x)
        own = self._own_linear(x, weight, bias) if weight.is_dense else None
        if own is not None:  # the product with A beside that with the weight
            out = own(x, weight.tensor, bias, out, False, shares_input=True)
            return out, adapters.shrink(x, tiles, table, is_beside=True)
        out = self.linear(x, weight, bias, out)
        # Behind it: then the product with B begins early beside this small one, and asks for B.
        return out, adapters.shrink(x, tiles, table)

    def add_low_rank_(self, out: Tensor, x: Tensor, slots: Tensor, table: LowRankTable) -> None:
        tiles, table = self._adapted(x, slots, table)
        adapters.expand_(out, adapters.shrink(x, tiles, table), tiles, table)

    def _adapted(self, x: Tensor, slots: Tensor, table: LowRankTable) -> tuple[Tiles, TritonTable]:
        assert isinstance(table, TritonTable)
        if table.dtype not in (None, x.dtype):
            raise ValueError(f"adapters are in {table.dtype}, x is in {x.dtype}")
        return self._row_tiles.of(slots, len(table.slots)), table

    def activate(self, x: Tensor, activation: Activation) -> Tensor:
        if activation in rowwise.NUMBERS:
            return rowwise.activate(x, activation)
        return super().activate(x, activation)

    def moe(
        self,
        x: Tensor,
        router_logits: Tensor,
        experts: ExpertWeights,
        spec: MoeSpec,
        transform_activated: TransformActivated | None = None,
        adapters: ExpertAdapters | None = None,
    ) -> Tensor:
        if _has_own_experts(spec) and adapters is None:
            return experts_kernels.moe(x, router_logits, experts, spec, transform_activated)
        return super().moe(x, router_logits, experts, spec, transform_activated, adapters)

    def routed_experts(
        self,
        x: Tensor,
        router: Router,
        experts: ExpertWeights,
        spec: MoeSpec,
        shared: SharedExpert | None,
    ) -> Tensor:
        if shared is None or not _has_own_experts(spec):
            return super().routed_experts(x, router, experts, spec, shared)
        if shared_experts.joins(x, router, experts, spec, shared):
            return shared_experts.routed_experts(x, router, experts, spec, shared)
        if spec.has_float32_router and shared_experts.widens(x, router):
            logits = router_linear.router_linear(x, router.weight.tensor, router.bias)
        else:
            logits = self.linear(x.float() if spec.has_float32_router else x, *router)
        hidden = self.linear_gated(x, shared.up, None, spec.activation)
        output = self.linear(hidden, shared.down)
        gate = None if shared.gate is None else self.linear(x, shared.gate)
        return experts_kernels.moe(x, logits, experts, spec, None, output, gate)

    def route(
        self, router_logits: Tensor, spec: MoeSpec, choice_bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        if not _has_own_experts(spec):
            return super().route(router_logits, spec, choice_bias)
        chosen, weights = experts_kernels.route(router_logits, spec, choice_bias)
        return weights.view(-1, spec.top_k), chosen.view(-1, spec.top_k).long()

    def embedding(self, token_ids: Tensor, weight: Weight) -> Tensor:
        return (
            rowwise.embedding(token_ids, weight.tensor)
            if weight.is_dense
            else super().embedding(token_ids, weight)
        )

    def has_kernels_for(self, mixer: object) -> bool:
        if isinstance(mixer, RecurrentSpec):
            return not (mixer.gate_rank or mixer.norm.sigmoid)
        return not isinstance(mixer, AttentionSpec) or mixer.chunk is None

    def _check(self, weight: Tensor, has_bias: bool) -> bool:
        """Whether cuBLAS gives a row the same bits in batches of any size, for weights of this
        shape.
        """
        key = weight.shape, weight.dtype, has_bias
        if key not in self._is_exact:
            self._is_exact[key] = rows_are_exact(weight, has_bias)
            if not self._is_exact[key]:
                kind = f"{tuple(weight.shape)} of {weight.dtype}{' that have a bias' if has_bias else ''}"
                logger.warning(
                    "cuBLAS has no exact product for weights %s: using our own kernel", kind
                )
        return self._is_exact[key]


def _has_own_experts(spec: MoeSpec) -> bool:
    """Experts without gates, and other ways to weigh them, have no kernel of their own yet."""
    return spec.gated and not spec.expert_scales and not spec.scales_inputs


def _own_product(x: Tensor, weight: Tensor, silu_mul: bool) -> Callable[..., Tensor] | None:
    """Our own kernel, where it is quicker than cuBLAS."""
    if (
        x.shape[0] == 1
        and are_exact(x.device, x.dtype)
        and single_row_linear.takes(1, weight, silu_mul)
    ):
        return single_row_linear.single_row_linear
    return linear if is_quicker_than_cublas(x.shape[0], weight) else None


def _padded(x: Tensor) -> Tensor:
    """Few rows as SMALLEST_BATCH of them, without a copy where their memory has room for more: the
    added rows may hold anything, as they don't affect the others.
    """
    rows, size = x.shape
    if x.untyped_storage().nbytes() >= (x.storage_offset() + SMALLEST_BATCH * size) * x.itemsize:
        return x.as_strided((SMALLEST_BATCH, size), (size, 1))
    return F.pad(x, (0, 0, 0, SMALLEST_BATCH - rows))
