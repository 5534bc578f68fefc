"""The Triton backend: meets `quire.kernels.ops.Kernels` on NVIDIA GPUs.

Matrix products of half-precision weights go to cuBLAS, with its splitting of the inner dimension turned off and
small batches padded to 16 rows. Whether cuBLAS then gives a row the same bits in any batch is not documented, so
it is checked for each shape of weight when it is loaded; a shape that fails is computed by our own kernel.
"""

from __future__ import annotations

import logging
import os

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.ops import ExpertWeights, HeadShape, Int32Array, LayerCache, PagedBatch
from quire.kernels.reference import ReferenceKernels
from quire.kernels.triton import attention as paged_attention
from quire.kernels.triton import moe as experts_kernels
from quire.kernels.triton.activations import sigmoid_mul, silu_mul
from quire.kernels.triton.embedding import embedding
from quire.kernels.triton.heads import qkv_to_cache
from quire.kernels.triton.inputs import gather_inputs
from quire.kernels.triton.launch import HAS_GLUON
from quire.kernels.triton.linear import SMALLEST_BATCH, is_quicker_than_cublas, linear, room_for
from quire.kernels.triton.norms import add_rms_norm, rms_norm
from quire.kernels.triton.sampler_ops import SamplerKernels
from quire.kernels.triton.small_batches import are_exact

if HAS_GLUON:
    from quire.kernels.triton import few_sequences, one_row

logger = logging.getLogger(__name__)

_CHECKED_ROWS = (SMALLEST_BATCH, 17, 64, 255, 256, 1000, 2048)
_HEAD = 65536
"""A weight with so many outputs is taken for the vocabulary's: it is applied to the rows that sample only."""


def forbid_split_sums() -> None:
    """Leaves cuBLAS no memory for partial sums, so that it can't split the inner dimension. It reads these when
    it is first used in a process; a value somebody set is kept, and the check of each weight decides."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    os.environ.setdefault("CUBLASLT_WORKSPACE_SIZE", "1")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


class TritonKernels(SamplerKernels):
    """Kernels for one GPU process."""

    name = "triton"

    def __init__(self) -> None:
        forbid_split_sums()
        self._reference = ReferenceKernels()
        self._is_exact: dict[tuple[torch.Size, torch.dtype], bool] = {}
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._num_multiprocessors = paged_attention.num_multiprocessors(device)
        self._num_programs = paged_attention.most_programs(device)

    def pack_linear(self, weight: Tensor) -> Tensor:
        if weight.dim() == 2 and weight.is_cuda and weight.dtype != torch.float32:
            self._check(weight)
            are_exact(weight.device, weight.dtype)  # tried here, as it can't be while a graph is captured
        return weight

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        rows = x.shape[0]
        if x.dtype == torch.float32:
            result = self._reference.linear(x, weight, bias)  # tiles of a fixed number of rows
        elif is_quicker_than_cublas(rows, weight) or not self._check(weight):
            return self._own_linear(x, weight, bias, out)
        elif out is not None and bias is None and rows >= SMALLEST_BATCH:
            return torch.mm(x, weight.t(), out=out)
        else:
            result = F.linear(_padded(x), weight, bias)[:rows]
        return result if out is None else out.copy_(result)

    def embedding(self, token_ids: Tensor, weight: Tensor) -> Tensor:
        return embedding(token_ids, weight)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return add_rms_norm(x, residual, weight, eps)

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
        query_norm, key_norm = (None, None) if norms is None else norms
        return qkv_to_cache(
            qkv,
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            query_norm,
            key_norm,
            eps,
            None if cos_sin is None else positions,
            qkv if cos_sin is None else cos_sin,
            cache.keys,
            cache.values,
            slot_mapping,
        )

    def linear_silu_mul(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if x.dtype != torch.float32 and is_quicker_than_cublas(x.shape[0], weight):
            return self._own_linear(x, weight, bias, silu_mul=True)
        return silu_mul(self.linear(x, weight, bias))

    def _own_linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None, silu_mul: bool = False
    ) -> Tensor:
        if not are_exact(x.device, x.dtype) or not one_row.takes(x.shape[0], weight, silu_mul):
            return linear(x, weight, bias, out, silu_mul)
        if out is None:
            out = room_for(x, weight.shape[0] // 2 if silu_mul else weight.shape[0])
        one_row.one_row_linear(x.contiguous(), weight, bias, out, silu_mul)
        return out

    def sigmoid_mul(self, gate: Tensor, x: Tensor) -> Tensor:
        return sigmoid_mul(gate, x)

    def gather_inputs(
        self, token_rows: Tensor, positions: Tensor, token_ids: Tensor, block_tables: Tensor, block_size: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        return gather_inputs(token_rows, positions, token_ids, block_tables, block_size)

    def attention_work(
        self, query_lens: Int32Array, context_lens: Int32Array, table_rows: Int32Array, shape: HeadShape
    ) -> dict[str, Int32Array]:
        return paged_attention.attention_work(query_lens, context_lens, table_rows, shape, self._num_programs)

    def attention(
        self,
        query: Tensor,
        cache: LayerCache,
        batch: PagedBatch,
        scale: float,
        sliding_window: int | None,
    ) -> Tensor:
        work = batch.work
        if work is None:  # outside an engine; inside, it was made before the step was sent off
            shape = HeadShape(query.shape[1], cache.keys.shape[1], query.shape[2])
            lists = self.attention_work(
                batch.query_start.diff().cpu().numpy(),
                batch.context_lens.cpu().numpy(),
                batch.table_rows.cpu().numpy(),
                shape,
            )
            work = {name: torch.from_numpy(values).to(query.device) for name, values in lists.items()}
        few = work.get("few")
        num_partials = 0 if few is None or batch.max_context_len <= paged_attention.SPLIT else len(few) - 1
        arguments = query, cache, batch.block_tables, work, num_partials, scale, sliding_window
        programs = self._num_multiprocessors
        if are_exact(query.device, query.dtype) and few_sequences.takes(query, cache, batch.max_query_len, programs):
            return few_sequences.few_sequences_attention(*arguments, programs)
        return paged_attention.attention(*arguments)

    def moe(
        self, x: Tensor, router_logits: Tensor, experts: ExpertWeights, top_k: int, normalize_weights: bool
    ) -> Tensor:
        return experts_kernels.moe(x, router_logits, experts.gate_up, experts.down, top_k, normalize_weights)

    def _check(self, weight: Tensor) -> bool:
        """Whether cuBLAS gives a row the same bits in batches of any size, for weights of this shape."""
        key = weight.shape, weight.dtype
        if key not in self._is_exact:
            self._is_exact[key] = rows_are_exact(weight)
            if not self._is_exact[key]:
                logger.warning("cuBLAS changes bits with the batch for weights %s: using our own kernel", key)
        return self._is_exact[key]


def _padded(x: Tensor) -> Tensor:
    """x with at least SMALLEST_BATCH rows, in place where its memory has room: whatever they hold, no other row
    sees them."""
    rows, size = x.shape
    if rows >= SMALLEST_BATCH:
        return x
    if x.is_contiguous() and x.untyped_storage().nbytes() >= (x.storage_offset() + SMALLEST_BATCH * size) * x.itemsize:
        return x.as_strided((SMALLEST_BATCH, size), (size, 1))
    return F.pad(x, (0, 0, 0, SMALLEST_BATCH - rows))


def rows_are_exact(weight: Tensor) -> bool:
    """Tries it: rows of random numbers, in batches of several sizes, against our own kernel."""
    generator = torch.Generator(device=weight.device).manual_seed(0)
    most = max(_CHECKED_ROWS) if weight.shape[0] < _HEAD else 256  # the head scores few rows at a time
    x = torch.randn(most, weight.shape[1], device=weight.device, generator=generator).to(weight.dtype)
    expected = linear(x, weight)
    return all(torch.equal(F.linear(x[:rows], weight), expected[:rows]) for rows in _CHECKED_ROWS if rows <= most)
