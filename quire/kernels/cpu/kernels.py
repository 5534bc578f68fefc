"""CpuKernels: the kernel contract on C++ code, for float32 and bfloat16.

Everything here only checks shapes and hands over addresses; what is computed, and in which order, is in the
`.cpp` files beside this one. Calls are many and short (about a dozen per layer and step), so the functions
are looked up once and get their arguments as one packed string: handing over a dozen one by one takes longer.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from struct import Struct

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.errors import DeviceError, UnsupportedModelError
from quire.kernels.cpu.build import load_library
from quire.kernels.filters import filter_rows_
from quire.kernels.ops import ExpertWeights, HeadShape, Int32Array, LayerCache, PagedBatch, TokenScores
from quire.kernels.reference import gather_inputs, qkv_to_cache_, route, sigmoid
from quire.kernels.repeats import match_lengths
from quire.kernels.scores import score_tokens

_MAX_HEAD_DIM = 256
_LOG2_E = math.log2(math.e)
_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}

# The fields of each function's struct in C++: P pointer, q int64, f float, i int.
_pack_arguments = Struct("PPqqi").pack
_unpack_rows_arguments = Struct("PPPqqqi").pack
_linear_arguments = Struct("PqPPPqqqi").pack
_rms_norm_arguments = Struct("PqqPPqqfi").pack
_add_rms_norm_arguments = Struct("PPPPPqqfi").pack
_rope_arguments = Struct("PqPPPqqqi").pack
_silu_mul_arguments = Struct("PqPqqi").pack
_write_kv_arguments = Struct("PqPqPPPqqqqi").pack
_attention_arguments = Struct("PqPPPPPPPqqqqqqqfi").pack
_gumbel_argmax_arguments = Struct("PqPPPPqqi").pack
_top_values_arguments = Struct("PqPqqqi").pack
_keep_between_arguments = Struct("PqPPqqi").pack

_Function = Callable[[bytes], None]
_threads = torch.get_num_threads


class CpuKernels:
    """C++ kernels on torch's threads. Meets `quire.kernels.ops.Kernels`.

    A packed weight is a tensor [out, in / 2, 2] in bfloat16 and [out, in, 1] in float32: as many numbers as
    the loaded one, in another order. `embedding` takes such a weight too, so tied ones need to be held once.
    """

    name = "cpu"

    def __init__(self, architecture: str = "native", use_amx: bool = True) -> None:
        """Compiles or loads the kernels. Without `use_amx` bfloat16 runs on vector instructions everywhere,
        as it does on CPUs that have no AMX."""
        library = load_library(architecture)
        library.quire_has_amx.argtypes, library.quire_has_amx.restype = [], ctypes.c_int
        self.has_amx = use_amx and bool(library.quire_has_amx())
        self._pack = _functions(library, "pack")
        self._unpack_rows = _functions(library, "unpack_rows")
        self._linear = _functions(library, "linear")
        self._rms_norm = _functions(library, "rms_norm")
        self._add_rms_norm = _functions(library, "add_rms_norm")
        self._rope = _functions(library, "rope")
        self._silu_mul = _functions(library, "silu_mul")
        self._attention = _functions(library, "attention")
        self._write_kv = _function(library, "quire_write_kv")
        self._gumbel_argmax = _function(library, "quire_gumbel_argmax")
        self._top_values = _function(library, "quire_top_values")
        self._keep_between = _function(library, "quire_keep_between")
        if self.has_amx:
            self._linear[torch.bfloat16] = _function(library, "quire_linear_amx")
            self._attention[torch.bfloat16] = _function(library, "quire_attention_amx")

    def pack_linear(self, weight: Tensor) -> Tensor:
        """[out, in] as above; stacked weights [experts, out, in] become one such tensor per expert, stacked."""
        *experts, columns, depth = weight.shape
        step = 2 if weight.dtype == torch.bfloat16 else 1
        if depth % step:
            raise UnsupportedModelError(f"A bfloat16 weight on the CPU needs an even input size, not {depth}.")
        weight = weight.contiguous()
        packed = weight.new_empty(*experts, columns, depth // step, step)
        pack = self._pack[weight.dtype]
        for plain, target in zip(weight.view(-1, columns, depth), packed.view(-1, columns, depth), strict=True):
            pack(_pack_arguments(plain.data_ptr(), target.data_ptr(), columns, depth, _threads()))
        return packed

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        shape, dtype = weight.shape, x.dtype
        rows, depth = x.shape
        if len(shape) != 3 or shape[1] * shape[2] != depth or weight.dtype != dtype:
            raise ValueError(f"weight {tuple(shape)} {weight.dtype} was not packed for x {tuple(x.shape)} {dtype}")
        columns = shape[0]
        stride, inner = x.stride()
        if inner != 1:
            x = x.contiguous()
            stride = depth
        out = x.new_empty(rows, columns)
        bias_address = 0 if bias is None else bias.data_ptr()
        self._linear[dtype](
            _linear_arguments(
                x.data_ptr(), stride, weight.data_ptr(), bias_address, out.data_ptr(), rows, columns, depth, _threads()
            )
        )
        return out

    def embedding(self, token_ids: Tensor, weight: Tensor) -> Tensor:
        if weight.dim() == 2:
            return F.embedding(token_ids, weight)
        columns, steps, step = weight.shape
        rows, depth = token_ids.shape[0], steps * step
        ids = token_ids.long().contiguous()
        if rows and not 0 <= int(ids.min()) <= int(ids.max()) < columns:
            raise IndexError(f"a token id is outside the vocabulary of {columns}")
        out = weight.new_empty(rows, depth)
        self._unpack_rows[weight.dtype](
            _unpack_rows_arguments(weight.data_ptr(), ids.data_ptr(), out.data_ptr(), rows, columns, depth, _threads())
        )
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = _with_whole_rows(x)
        shape = x.shape
        out = x.new_empty(shape)
        inner = shape[1] if len(shape) == 3 else 1
        self._rms_norm[x.dtype](
            _rms_norm_arguments(
                x.data_ptr(),
                x.stride(0),
                inner,
                weight.data_ptr(),
                out.data_ptr(),
                shape[0] * inner,
                shape[-1],
                eps,
                _threads(),
            )
        )
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        x, residual = x.contiguous(), residual.contiguous()
        out, total = torch.empty_like(x), torch.empty_like(x)
        rows, size = x.shape
        self._add_rms_norm[x.dtype](
            _add_rms_norm_arguments(
                x.data_ptr(),
                residual.data_ptr(),
                weight.data_ptr(),
                out.data_ptr(),
                total.data_ptr(),
                rows,
                size,
                eps,
                _threads(),
            )
        )
        return out, total

    def rope(self, x: Tensor, positions: Tensor, cos_sin: Tensor) -> Tensor:
        rows, heads, head_dim = x.shape
        x = _with_whole_rows(x)
        positions = positions.long().contiguous()
        out = x.new_empty(rows, heads, head_dim)
        self._rope[x.dtype](
            _rope_arguments(
                x.data_ptr(),
                x.stride(0),
                positions.data_ptr(),
                cos_sin.data_ptr(),
                out.data_ptr(),
                rows,
                heads,
                head_dim,
                _threads(),
            )
        )
        return out

    def linear_silu_mul(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.silu_mul(self.linear(x, weight, bias))

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        rows, width = gate_up.shape
        gate_up = _with_whole_rows(gate_up)
        out = gate_up.new_empty(rows, width // 2)
        self._silu_mul[gate_up.dtype](
            _silu_mul_arguments(gate_up.data_ptr(), gate_up.stride(0), out.data_ptr(), rows, width // 2, _threads())
        )
        return out

    def sigmoid_mul(self, gate: Tensor, x: Tensor) -> Tensor:
        return sigmoid(gate).to(x.dtype) * x

    def write_kv_(self, keys: Tensor, values: Tensor, cache: LayerCache, slot_mapping: Tensor) -> None:
        rows, heads, head_dim = keys.shape
        keys, values = _with_whole_rows(keys), _with_whole_rows(values)
        item = keys.element_size()
        self._write_kv(
            _write_kv_arguments(
                keys.data_ptr(),
                keys.stride(0) * item,
                values.data_ptr(),
                values.stride(0) * item,
                cache.keys.data_ptr(),
                cache.values.data_ptr(),
                slot_mapping.data_ptr(),
                rows,
                heads,
                cache.keys.shape[2],
                head_dim * item,
                _threads(),
            )
        )

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
        rows, num_heads, head_dim = query.shape
        if head_dim % 8 or head_dim > _MAX_HEAD_DIM:
            raise UnsupportedModelError(
                f"The CPU kernels take head sizes that are multiples of 8 up to {_MAX_HEAD_DIM}, not {head_dim}."
            )
        query = _with_whole_rows(query)
        keys = cache.keys
        _, kv_heads, block_size, _ = keys.shape
        block_tables = batch.block_tables.contiguous()
        num_sequences, max_blocks = len(batch.table_rows), block_tables.shape[1]
        out = query.new_empty(rows, num_heads, head_dim)
        self._attention[query.dtype](
            _attention_arguments(
                query.data_ptr(),
                query.stride(0),
                keys.data_ptr(),
                cache.values.data_ptr(),
                batch.query_start.data_ptr(),
                batch.context_lens.data_ptr(),
                block_tables.data_ptr(),
                batch.table_rows.data_ptr(),
                out.data_ptr(),
                num_sequences,
                max_blocks,
                num_heads,
                kv_heads,
                head_dim,
                block_size,
                sliding_window or 0,
                scale * _LOG2_E,
                _threads(),
            )
        )
        return out

    def moe(
        self, x: Tensor, router_logits: Tensor, experts: ExpertWeights, top_k: int, normalize_weights: bool
    ) -> Tensor:
        weights, chosen = route(router_logits, top_k, normalize_weights)
        # One sort groups the rows by expert; stable, so an expert's rows stay in their order.
        by_expert = chosen.flatten().sort(stable=True)
        rows = by_expert.indices // top_k
        weights = weights.flatten()[by_expert.indices].unsqueeze(1)
        counts = torch.bincount(by_expert.values, minlength=router_logits.shape[1]).tolist()
        gathered = x[rows]
        output = torch.zeros_like(x, dtype=torch.float32)
        start = 0
        for expert, count in enumerate(counts):  # ascending: the order of additions in every row
            if count:
                part = slice(start, start + count)
                hidden = self.silu_mul(self.linear(gathered[part], experts.gate_up[expert]))
                output[rows[part]] += self.linear(hidden, experts.down[expert]).float() * weights[part]
                start += count
        return output.to(x.dtype)

    def gumbel_argmax(self, logits: Tensor, temperature: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        rows, size = logits.shape
        if logits.dtype != torch.float32 or temperature.dtype != torch.float32 or keys.dtype != torch.int32:
            raise TypeError(f"logits {logits.dtype}, temperature {temperature.dtype}, keys {keys.dtype}")
        logits, temperature, keys = _with_whole_rows(logits), temperature.contiguous(), keys.contiguous()
        out, flags = torch.empty(rows, dtype=torch.int64), torch.empty(rows, dtype=torch.int32)
        self._gumbel_argmax(
            _gumbel_argmax_arguments(
                logits.data_ptr(),
                logits.stride(0),
                temperature.data_ptr(),
                keys.data_ptr(),
                out.data_ptr(),
                flags.data_ptr(),
                rows,
                size,
                _threads(),
            )
        )
        return out, flags

    def filter_rows_(self, logits: Tensor, rows: Tensor, limits: Tensor) -> None:
        filter_rows_(self, logits, rows, limits)

    def match_lengths(self, tokens: Tensor, lengths: Tensor, breaks: Tensor | None, most: int) -> Tensor:
        return match_lengths(tokens, lengths, breaks, most)

    def score_tokens(self, logits: Tensor, token_ids: Tensor, num_top: int) -> TokenScores:
        return score_tokens(logits, token_ids, num_top)

    def top_values(self, x: Tensor, k: int) -> Tensor:
        rows, size = x.shape
        if x.dtype != torch.float32 or not 1 <= k <= size:
            raise ValueError(f"there are no {k} largest of {x.dtype} rows of {size}")
        x = _with_whole_rows(x)
        out = x.new_empty(rows, k)
        self._top_values(_top_values_arguments(x.data_ptr(), x.stride(0), out.data_ptr(), rows, size, k, _threads()))
        return out

    def keep_between_(self, x: Tensor, low: Tensor, high: Tensor) -> None:
        rows, size = x.shape
        if {x.dtype, low.dtype, high.dtype} != {torch.float32} or x.stride(1) != 1:
            raise ValueError(f"x {x.dtype} with strides {x.stride()}, limits {low.dtype} and {high.dtype}")
        low, high = low.contiguous(), high.contiguous()
        self._keep_between(
            _keep_between_arguments(x.data_ptr(), x.stride(0), low.data_ptr(), high.data_ptr(), rows, size, _threads())
        )


class _ByDtype(dict[torch.dtype, _Function]):
    """A function for each dtype the kernels compute in."""

    def __missing__(self, dtype: torch.dtype) -> _Function:
        raise DeviceError(f"The CPU kernels compute in float32 and bfloat16, not {dtype}.")


def _function(library: ctypes.CDLL, symbol: str) -> _Function:
    function = library[symbol]
    function.argtypes, function.restype = [ctypes.c_char_p], None
    return function


def _functions(library: ctypes.CDLL, kind: str) -> _ByDtype:
    return _ByDtype({dtype: _function(library, f"quire_{kind}_{suffix}") for dtype, suffix in _DTYPES.items()})


def _with_whole_rows(x: Tensor) -> Tensor:
    """x itself where each row [of heads] lies in one piece, as a slice of a packed projection does."""
    inner = x.stride()[1:]
    return x if inner == (1,) or inner == (x.shape[-1], 1) else x.contiguous()
