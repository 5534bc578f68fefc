"""CpuKernels: the kernel contract on C++ code, for float32 and bfloat16.

The methods here only check shapes and pass addresses on; what is computed, and in which order, is in the `.cpp`
files beside this one. There are many short calls (about a dozen per layer and step), so functions are looked up once
and get their arguments as one packed struct, which takes less time than a dozen ctypes arguments.
"""

from __future__ import annotations

import ctypes
import math
from functools import cached_property, partial
from itertools import repeat
from struct import Struct

import torch
from torch import Tensor

from quire.errors import DeviceError, UnsupportedModelError
from quire.kernels.cpu.build import load_library
from quire.kernels.cpu.recording import Calls, Function
from quire.kernels.formats import Format
from quire.kernels.ops import Activation, AttentionSpec, LayerCache, PagedBatch
from quire.kernels.reference import ReferenceKernels
from quire.kernels.weights import Part, Weight

_MAX_HEAD_DIM = 256
_KEY_RUN = 16
_LOG2_E = math.log2(math.e)
_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
_CACHES = {None: "", torch.int8: "_int8", torch.float8_e4m3fn: "_fp8"}
"""Suffixes of the attention functions: None is a cache in the model's dtype."""
_PACKED = {dtype: Format(f"cpu_packed_{name}", 1, dtype.itemsize) for dtype, name in _DTYPES.items()}
"""Formats of packed plain matrices: the same numbers in the order in which `linear` reads them."""
_QUANTIZED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "INT8", "MXFP4")
"""Formats that matrix products take without expanding them, in the order of `with_format` in quantized.h."""
_PACKED_BLOCKS = {name: Format(f"cpu_packed_{name}", 1, 0) for name in _QUANTIZED}
_FORMAT_NUMBERS = {format: number for number, format in enumerate(_PACKED_BLOCKS.values())}
_ACTIVATIONS = {Activation.SILU: 0, Activation.GELU_TANH: 1, Activation.CLAMPED_SWIGLU: 2}

_part = Struct("Pqq").pack

_threads = torch.get_num_threads


class PackedWeight(Weight):
    """A weight in the layout of the C++ kernels."""

    @cached_property
    def quantized_parts(self) -> ctypes.Array[ctypes.c_char] | None:
        """Address, outputs and format of each part, for `linear_quantized`; None if a part is not quantised."""
        numbers = [_FORMAT_NUMBERS.get(part.format) for part in self.parts]
        if None in numbers:
            return None
        described = zip(self.parts, numbers, strict=True)
        return ctypes.create_string_buffer(
            b"".join(_part(part.tensors[0].data_ptr(), part.rows, number) for part, number in described)
        )


class CpuKernels(ReferenceKernels):
    """C++ kernels on as many threads as torch has. Meets `quire.kernels.ops.Kernels`."""

    name = "cpu"

    def __init__(self, architecture: str = "native", use_amx: bool = True) -> None:
        """Compiles or loads the kernels. Without `use_amx`, bfloat16 runs as on CPUs that have no AMX."""
        library = load_library(architecture)
        library.quire_has_amx.argtypes, library.quire_has_amx.restype = [], ctypes.c_int
        self.has_amx = use_amx and bool(library.quire_has_amx())
        calls = Calls(library)
        self._empty = calls.empty
        self.record = calls.record
        by_dtype = partial(_functions, calls)
        self._pack, self._unpack_rows = by_dtype("pack", "PPqqi"), by_dtype("unpack_rows", "PPPqqqi")
        self._linear = by_dtype("linear", "PqPPPqqqqi")
        self._linear_quantized = by_dtype("linear_quantized", "PqPqPPqqqii")
        self._packed_size = calls.function("quire_packed_size", "qqqP")
        self._pack_quantized = calls.function("quire_pack_quantized", "PPPqqqi")
        self._unpack_quantized = calls.function("quire_unpack_quantized", "PPPqqqi")
        self._rms_norm, self._add_rms_norm = by_dtype("rms_norm", "PqqPPqqffi"), by_dtype("add_rms_norm", "PPPPPqqffi")
        self._rope = by_dtype("rope", "PqPPPqqqi")
        self._layer_norm, self._scale_add = by_dtype("layer_norm", "PPPPqqfi"), by_dtype("scale_add", "PPPqqfi")
        self._soft_cap, self._activate = by_dtype("soft_cap", "Pqqqfi"), by_dtype("activate", "PqPqqqqi")
        attention, write_kv = "PqPPPPPPPPPqqqqqqqqPfffi", "PqPqPPPPffPqqqqqi"
        self._attention = {kind: by_dtype(f"attention{name}", attention) for kind, name in _CACHES.items()}
        self._attention_amx = calls.function("quire_attention_amx", attention) if self.has_amx else None
        self._write_kv = {kind: by_dtype(f"write_kv{name}", write_kv) for kind, name in _CACHES.items()}
        self._gather_inputs = calls.function("quire_gather_inputs", "PPPqPqPPPqq")
        self._gumbel_argmax = calls.function("quire_gumbel_argmax", "PqPPPPqqi")
        self._sample_rows = by_dtype("sample_rows", "PqPPPPPqPPqqi")
        self._top_values = calls.function("quire_top_values", "PqPqqqi")
        self._keep_between = calls.function("quire_keep_between", "PqPPqqi")
        if self.has_amx:
            self._linear[torch.bfloat16] = calls.function("quire_linear_amx", "PqPPPqqqqi")

    def keys_by_dimension(self, cache_dtype: torch.dtype, block_size: int) -> bool:
        """For vector instructions, with one key per lane. AMX kernels, and those for FP8, transpose keys themselves."""
        is_turned = cache_dtype == torch.float8_e4m3fn or (self.has_amx and cache_dtype == torch.bfloat16)
        return block_size % _KEY_RUN == 0 and not is_turned

    def computes(self, format: Format) -> bool:
        return format.name in _QUANTIZED

    def pack(self, weight: Weight) -> Weight:
        """Plain numbers and formats of `_QUANTIZED` get the layouts of `linear`; parts in other formats stay."""
        return PackedWeight(weight.shape, tuple(self._packed(part) for part in weight.parts))

    def pack_into(self, packed: Weight, loaded: Weight) -> None:
        """Straight into its place: memory for a copy would be had from the system page by page, which takes longer than
        packing. Checked before, as nothing of it can fail."""
        made = [(_packed_format(part), part.rows) for part in loaded.parts]
        if loaded.shape != packed.shape or made != [(part.format, part.rows) for part in packed.parts]:
            raise ValueError(f"a weight {loaded.shape} of {made} does not fit into {packed.layout}")
        for part, place in zip(loaded.parts, packed.parts, strict=True):
            self._packed(part, place)

    def _packed(self, part: Part, place: Part | None = None) -> Part:
        if part.format.name in _QUANTIZED and part.tensors[0].shape[-1] % part.format.num_bytes == 0:
            return self._packed_blocks(part, place)
        if part.format.dtype is None:
            if place is not None:
                for target, numbers in zip(place.tensors, part.tensors, strict=True):
                    target.copy_(numbers)
            return part
        stored = part.tensors[0].contiguous()
        columns, depth = stored.shape[-2:]
        if stored.dtype == torch.bfloat16 and depth % 2:
            raise UnsupportedModelError(f"A bfloat16 weight on the CPU needs an even input size, not {depth}.")
        packed = torch.empty_like(stored)
        pack = self._pack[stored.dtype]
        packed = packed if place is None else place.tensors[0]
        for plain, target in zip(stored.view(-1, columns, depth), packed.view(-1, columns, depth), strict=True):
            pack(plain, target, columns, depth, _threads())
        return Part(_PACKED[stored.dtype], (packed,), part.rows)

    def _packed_blocks(self, part: Part, place: Part | None) -> Part:
        stored, *scales = (tensor.contiguous() for tensor in part.tensors)
        *outer, columns, num_bytes = stored.shape
        depth = num_bytes // part.format.num_bytes * part.format.num_elements
        format = _PACKED_BLOCKS[part.format.name]
        size = ctypes.c_int64()
        number = _FORMAT_NUMBERS[format]
        self._packed_size(columns, depth, number, ctypes.addressof(size))
        packed = torch.empty(*outer, size.value, dtype=torch.uint8)
        factors = scales[0].view(-1, columns) if scales else repeat(None)
        packed = packed if place is None else place.tensors[0]
        matrices = zip(stored.view(-1, columns, num_bytes), factors, packed.view(-1, size.value), strict=False)
        for plain, factor, target in matrices:
            self._pack_quantized(plain, factor, target, columns, depth, number, _threads())
        return Part(format, (packed,), part.rows)

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        dtype = x.dtype
        function = self._linear[dtype]
        rows, depth = x.shape
        columns, inner_size = weight.shape
        if not isinstance(weight, PackedWeight) and not weight.is_dense:
            return super().linear(x, weight, bias, out)
        if not isinstance(weight, PackedWeight) or inner_size != depth:
            raise ValueError(f"the weight {weight.shape} was not packed for x {tuple(x.shape)} {dtype}")
        x = _with_whole_rows(x)
        if out is None:
            out = self._empty(rows, columns, dtype=dtype)
        parts = weight.quantized_parts
        if parts is not None:
            self._linear_quantized[dtype](
                x, x.stride(0), ctypes.addressof(parts), len(weight.parts), bias, out, out.stride(0), rows, depth,
                _threads(), self.has_amx,
            )  # fmt: skip
        elif weight.format is _PACKED[dtype]:
            function(x, x.stride(0), weight.tensor, bias, out, out.stride(0), rows, columns, depth, _threads())
        elif weight.format is None:
            targets = out.split_with_sizes([part.rows for part in weight.parts], 1)
            for (part, added), target in zip(weight.split(bias), targets, strict=True):
                self.linear(x, part, added, target)
        else:
            return super().linear(x, weight, bias, out)
        return out

    def embedding(self, token_ids: Tensor, weight: Weight) -> Tensor:
        number = None if weight.format is None else _FORMAT_NUMBERS.get(weight.format)
        if number is None and weight.format not in _PACKED.values():
            return super().embedding(token_ids, weight)
        table = weight.tensor
        columns, depth = weight.shape
        rows = token_ids.shape[0]
        ids = token_ids.long().contiguous()
        if rows and not 0 <= int(ids.min()) <= int(ids.max()) < columns:
            raise IndexError(f"a token id is outside the vocabulary of {columns}")
        if number is not None:
            out = self._empty(rows, depth, dtype=torch.float32)
            self._unpack_quantized(table, ids, out, rows, depth, number, _threads())
        else:
            out = self._empty(rows, depth, dtype=table.dtype)
            self._unpack_rows[table.dtype](table, ids, out, rows, columns, depth, _threads())
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
        x = _with_whole_rows(x)
        shape = x.shape
        out = self._empty(*shape, dtype=x.dtype)
        inner = shape[1] if len(shape) == 3 else 1
        self._rms_norm[x.dtype](
            x, x.stride(0), inner, weight, out, shape[0] * inner, shape[-1], eps, offset, _threads()
        )
        return out

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        x, residual = x.contiguous(), residual.contiguous()
        rows, size = x.shape
        out, total = self._empty(rows, size, dtype=x.dtype), self._empty(rows, size, dtype=x.dtype)
        self._add_rms_norm[x.dtype](x, residual, weight, out, total, rows, size, eps, offset, _threads())
        return out, total

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        x, (rows, size) = x.contiguous(), x.shape
        out = self._empty(rows, size, dtype=x.dtype)
        self._layer_norm[x.dtype](x, weight, bias, out, rows, size, eps, _threads())
        return out

    def scale_add(self, x: Tensor, scale: float, other: Tensor | None = None) -> Tensor:
        x, (rows, size) = x.contiguous(), x.shape
        added = None if other is None else other.contiguous()
        out = self._empty(rows, size, dtype=x.dtype)
        self._scale_add[x.dtype](x, added, out, rows, size, scale, _threads())
        return out

    def soft_cap_(self, x: Tensor, cap: float) -> None:
        if x.stride(1) != 1:
            raise ValueError(f"x has strides {x.stride()}")
        self._soft_cap[x.dtype](x, x.stride(0), *x.shape, cap, _threads())

    def rope(self, x: Tensor, positions: Tensor, cos_sin: Tensor) -> Tensor:
        rows, heads, head_dim = x.shape
        x = _with_whole_rows(x)
        positions = positions.long().contiguous()
        out = self._empty(rows, heads, head_dim, dtype=x.dtype)
        self._rope[x.dtype](x, x.stride(0), positions, cos_sin, out, rows, heads, head_dim, _threads())
        return out

    def gate(self, gate_up: Tensor, activation: Activation) -> Tensor:
        return self._activated(gate_up, activation, gate_up.shape[1] // 2)

    def activate(self, x: Tensor, activation: Activation) -> Tensor:
        return self._activated(x, activation, x.shape[1])

    def _activated(self, x: Tensor, activation: Activation, size: int) -> Tensor:
        rows, width = x.shape
        x = _with_whole_rows(x)
        out = self._empty(rows, size, dtype=x.dtype)
        self._activate[x.dtype](x, x.stride(0), out, rows, size, _ACTIVATIONS[activation], width > size, _threads())
        return out

    def write_kv_(self, keys: Tensor, values: Tensor, cache: LayerCache, slot_mapping: Tensor) -> None:
        rows, heads, head_dim = keys.shape
        keys, values = _with_whole_rows(keys), _with_whole_rows(values)
        self._write_kv[_kind(cache)][keys.dtype](
            keys, keys.stride(0), values, values.stride(0), cache.keys, cache.values, *cache.scales, *cache.fp8_scales,
            slot_mapping, rows, heads, cache.block_size, head_dim, cache.keys_by_dimension, _threads(),
        )  # fmt: skip

    def gather_inputs(
        self, token_rows: Tensor, positions: Tensor, token_ids: Tensor, block_tables: Tensor, block_size: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        count = len(token_rows)
        if {token_rows.dtype, positions.dtype, block_tables.dtype} != {torch.int32} or token_ids.dtype != torch.int64:
            raise TypeError("rows, positions and block tables are int32, token ids int64")
        ids, places, slots = (self._empty(count, dtype=torch.int64) for _ in range(3))
        self._gather_inputs(
            token_rows.contiguous(), positions.contiguous(), token_ids, token_ids.stride(0), block_tables,
            block_tables.stride(0), ids, places, slots, count, block_size,
        )  # fmt: skip
        return ids, places, slots

    def attention(
        self, query: Tensor, cache: LayerCache, batch: PagedBatch, spec: AttentionSpec, sinks: Tensor | None = None
    ) -> Tensor:
        rows, num_heads, head_dim = query.shape
        if head_dim % 8 or head_dim > _MAX_HEAD_DIM:
            raise UnsupportedModelError(
                f"The CPU kernels take head sizes that are multiples of 8 up to {_MAX_HEAD_DIM}, not {head_dim}: "
                'use kernels="reference".'
            )
        query = _with_whole_rows(query)
        _, kv_heads, block_size, _ = cache.keys.shape
        key_scale, value_scale = cache.fp8_scales
        if self._attention_amx is not None and cache.keys.dtype == torch.bfloat16 and not cache.keys_by_dimension:
            function = self._attention_amx
        else:
            function = self._attention[_kind(cache)][query.dtype]
        block_tables = batch.block_tables.contiguous()
        out = self._empty(rows, num_heads, head_dim, dtype=query.dtype)
        function(
            query, query.stride(0), cache.keys, cache.values, *cache.scales, batch.query_start,
            batch.context_lens, block_tables, batch.table_rows, out, len(batch.table_rows), block_tables.shape[1],
            num_heads, kv_heads, head_dim, block_size, spec.sliding_window or 0, cache.keys_by_dimension, sinks,
            spec.scale * key_scale * _LOG2_E, spec.soft_cap * _LOG2_E, value_scale, _threads(),
        )  # fmt: skip
        return out

    def gumbel_argmax(self, logits: Tensor, temperature: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        rows, size = logits.shape
        if logits.dtype != torch.float32 or temperature.dtype != torch.float32 or keys.dtype != torch.int32:
            raise TypeError(f"logits {logits.dtype}, temperature {temperature.dtype}, keys {keys.dtype}")
        logits, temperature, keys = _with_whole_rows(logits), temperature.contiguous(), keys.contiguous()
        out, flags = torch.empty(rows, dtype=torch.int64), torch.empty(rows, dtype=torch.int32)
        self._gumbel_argmax(logits, logits.stride(0), temperature, keys, out, flags, rows, size, _threads())
        return out, flags

    def sample_rows(
        self, logits: Tensor, row_index: Tensor, seeds: Tensor, temperatures: Tensor, positions: Tensor,
        token_ids: Tensor, out: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        logits, (rows, size) = _with_whole_rows(logits), logits.shape
        out = self._empty(2, rows, dtype=torch.int64) if out is None else out
        tokens, flags = out
        self._sample_rows[logits.dtype](
            logits, logits.stride(0), row_index, seeds, temperatures, positions, token_ids, token_ids.stride(0), tokens,
            flags, rows, size, _threads(),
        )  # fmt: skip
        return out

    def top_values(self, x: Tensor, k: int) -> Tensor:
        rows, size = x.shape
        if x.dtype != torch.float32 or not 1 <= k <= size:
            raise ValueError(f"there are no {k} largest of {x.dtype} rows of {size}")
        x = _with_whole_rows(x)
        out = x.new_empty(rows, k)
        self._top_values(x, x.stride(0), out, rows, size, k, _threads())
        return out

    def keep_between_(self, x: Tensor, low: Tensor, high: Tensor) -> None:
        rows, size = x.shape
        if {x.dtype, low.dtype, high.dtype} != {torch.float32} or x.stride(1) != 1:
            raise ValueError(f"x {x.dtype} with strides {x.stride()}, limits {low.dtype} and {high.dtype}")
        low, high = low.contiguous(), high.contiguous()
        self._keep_between(x, x.stride(0), low, high, rows, size, _threads())


class _ByDtype(dict[torch.dtype, Function]):
    """A function for each dtype the kernels compute in."""

    def __missing__(self, dtype: torch.dtype) -> Function:
        raise DeviceError(f"The CPU kernels compute in float32 and bfloat16, not {dtype}.")


def _functions(calls: Calls, kind: str, fields: str) -> _ByDtype:
    return _ByDtype({dtype: calls.function(f"quire_{kind}_{suffix}", fields) for dtype, suffix in _DTYPES.items()})


def _packed_format(part: Part) -> Format | None:
    """What `pack` makes of a part; None: it refuses it."""
    if part.format.name in _QUANTIZED and part.tensors[0].shape[-1] % part.format.num_bytes == 0:
        return _PACKED_BLOCKS[part.format.name]
    return part.format if part.format.dtype is None else _PACKED.get(part.tensors[0].dtype)


def _kind(cache: LayerCache) -> torch.dtype | None:
    return cache.keys.dtype if cache.keys.dtype in _CACHES else None


def _with_whole_rows(x: Tensor) -> Tensor:
    """x, or a copy if a row is not contiguous; rows may be apart from each other, as in a slice of a projection."""
    inner = x.stride()[1:]
    return x if inner == (1,) or inner == (x.shape[-1], 1) else x.contiguous()
