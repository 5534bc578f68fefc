"""CpuKernels: the kernel contract on C++ code, for float32 and bfloat16.

The methods here only check shapes and pass addresses on; what is computed, and in which order, is
in the `.cpp` files beside this one. There are many short calls (about a dozen per layer and step),
so functions are looked up once and get their arguments as one packed struct (`functions.py`), which
takes less time than a dozen ctypes arguments.
"""

from __future__ import annotations

import ctypes
import math
from functools import cached_property
from itertools import repeat

import torch
from torch import Tensor

from quire.backends.cpu import functions
from quire.backends.cpu.adapters import CpuLowRank, CpuTable, low_rank_arguments
from quire.backends.cpu.arguments import check_names, check_packer, packer
from quire.backends.cpu.build import load_library
from quire.backends.cpu.functions import ACTIVATIONS, FORMATS, Address
from quire.backends.cpu.latent import LatentKernels
from quire.backends.cpu.recording import DTYPES, Calls
from quire.backends.cpu.strided import block_stride, with_whole_rows
from quire.errors import UnsupportedModelError
from quire.kernels.formats import Format
from quire.kernels.low_rank import LowRank, LowRankTable, PackedLowRank
from quire.kernels.ops import Activation, AttentionSpec, LayerCache, PagedBatch
from quire.kernels.weights import Part, Weight

_KEY_RUN = 16
_LOG2_E = math.log2(math.e)
_CACHES = {None: "", torch.int8: "_int8", torch.float8_e4m3fn: "_fp8"}
"""Suffixes of the attention functions: None is a cache in the model's dtype."""
_PACKED = {dtype: Format(f"cpu_packed_{name}", 1, dtype.itemsize) for dtype, name in DTYPES.items()}
"""Formats of packed plain matrices: the same numbers in the order in which `linear` reads them."""
_PACKED_BLOCKS = {name: Format(f"cpu_packed_{name}", 1, 0) for name in FORMATS}
_FORMAT_NUMBERS = {format: number for number, format in enumerate(_PACKED_BLOCKS.values())}
_ACTIVATION_NUMBERS = {activation: number for number, activation in enumerate(ACTIVATIONS)}
_pack_part = packer(functions.quantized_part)
_threads = torch.get_num_threads


class PackedWeight(Weight):
    """A weight in the layout of the C++ kernels."""

    @cached_property
    def quantized_parts(self) -> ctypes.Array[ctypes.c_char] | None:
        """Its parts as `linear_quantized` reads them; None if one is not quantised."""
        described: list[bytes] = []
        for part in self.parts:
            number = _FORMAT_NUMBERS.get(part.format)
            if number is None:
                return None
            described.append(_pack_part(packed=part.tensors[0], columns=part.rows, format=number))
        return ctypes.create_string_buffer(b"".join(described))


class CpuKernels(LatentKernels):
    """C++ kernels on as many threads as torch has. Meets `quire.kernels.ops.Kernels`."""

    name = "cpu"

    def __init__(self, architecture: str = "native", use_amx: bool = True) -> None:
        """Compiles or loads the kernels. Without `use_amx`, bfloat16 runs as on CPUs that have no
        AMX.
        """
        library = load_library(architecture)
        library.quire_has_amx.argtypes, library.quire_has_amx.restype = [], ctypes.c_int
        self.has_amx = use_amx and bool(library.quire_has_amx())
        check_names(library, "quire_formats", FORMATS)
        check_names(library, "quire_activations", [activation.name for activation in ACTIVATIONS])
        calls = Calls(library)
        super().__init__(calls)
        self.record = calls.record
        check_packer(library, functions.quantized_part)
        self._packed_size = calls.function(functions.packed_size)
        self._pack_quantized = calls.function(functions.pack_quantized)
        self._unpack_quantized = calls.function(functions.unpack_quantized)
        self._gather_inputs = calls.function(functions.gather_inputs)
        self._gumbel_argmax = calls.function(functions.gumbel_argmax)
        self._top_values = calls.function(functions.top_values)
        self._keep_between = calls.function(functions.keep_between)
        self._pack = calls.by_dtype(functions.pack)
        self._unpack_rows = calls.by_dtype(functions.unpack_rows)
        self._linear = calls.by_dtype(functions.linear)
        self._linear_quantized = calls.by_dtype(functions.linear_quantized)
        self._add_low_rank = calls.by_dtype(functions.add_low_rank)
        self._rms_norm = calls.by_dtype(functions.rms_norm)
        self._add_rms_norm = calls.by_dtype(functions.add_rms_norm)
        self._layer_norm = calls.by_dtype(functions.layer_norm)
        self._scale_add = calls.by_dtype(functions.scale_add)
        self._soft_cap = calls.by_dtype(functions.soft_cap)
        self._clamp = calls.by_dtype(functions.clamp)
        self._rope = calls.by_dtype(functions.rope)
        self._activate = calls.by_dtype(functions.activate)
        self._sample_rows = calls.by_dtype(functions.sample_rows)
        self._attention = {
            kind: calls.by_dtype(functions.attention, suffix) for kind, suffix in _CACHES.items()
        }
        self._write_kv = {
            kind: calls.by_dtype(functions.write_kv, suffix) for kind, suffix in _CACHES.items()
        }
        self._attention_amx = (
            calls.function(functions.attention, "attention_amx") if self.has_amx else None
        )
        if self.has_amx:
            self._linear[torch.bfloat16] = calls.function(functions.linear, "linear_amx")

    def keys_by_dimension(self, cache_dtype: torch.dtype, block_size: int) -> bool:
        """For vector instructions, with one key per lane. AMX kernels, and those for FP8, transpose
        keys themselves.
        """
        is_turned = cache_dtype == torch.float8_e4m3fn or (
            self.has_amx and cache_dtype == torch.bfloat16
        )
        return block_size % _KEY_RUN == 0 and not is_turned

    def computes(self, format: Format) -> bool:
        return format.name in FORMATS

    def pack(self, weight: Weight) -> Weight:
        """Plain numbers and formats of `FORMATS` get the layouts of `linear`; parts in other
        formats stay.
        """
        return PackedWeight(weight.shape, tuple(self._packed(part) for part in weight.parts))

    def pack_into(self, packed: Weight, loaded: Weight) -> None:
        """Straight into its place: memory for a copy would be had from the system page by page,
        which takes longer than packing. Checked before, as nothing of it can fail.
        """
        made = [(_packed_format(part), part.rows) for part in loaded.parts]
        if loaded.shape != packed.shape or made != [
            (part.format, part.rows) for part in packed.parts
        ]:
            raise ValueError(f"a weight {loaded.shape} of {made} does not fit into {packed.layout}")
        for part, place in zip(loaded.parts, packed.parts, strict=True):
            self._packed(part, place)

    def _packed(self, part: Part, place: Part | None = None) -> Part:
        if part.format.name in FORMATS and part.tensors[0].shape[-1] % part.format.num_bytes == 0:
            return self._packed_blocks(part, place)
        if part.format.dtype is None:
            if place is not None:
                for target, numbers in zip(place.tensors, part.tensors, strict=True):
                    target.copy_(numbers)
            return part
        stored = part.tensors[0].contiguous()
        columns, depth = stored.shape[-2:]
        if stored.dtype == torch.bfloat16 and depth % 2:
            raise UnsupportedModelError(
                f"A bfloat16 weight on the CPU needs an even input size, not {depth}."
            )
        packed = torch.empty_like(stored)
        pack = self._pack[stored.dtype]
        packed = packed if place is None else place.tensors[0]
        for plain, target in zip(
            stored.view(-1, columns, depth), packed.view(-1, columns, depth), strict=True
        ):
            pack(weight=plain, packed=target, columns=columns, depth=depth, num_threads=_threads())
        return Part(_PACKED[stored.dtype], (packed,), part.rows)

    def _packed_blocks(self, part: Part, place: Part | None) -> Part:
        stored, *scales = (tensor.contiguous() for tensor in part.tensors)
        *outer, columns, num_bytes = stored.shape
        depth = num_bytes // part.format.num_bytes * part.format.num_elements
        format = _PACKED_BLOCKS[part.format.name]
        size = ctypes.c_int64()
        number = _FORMAT_NUMBERS[format]
        self._packed_size(
            columns=columns, depth=depth, format=number, bytes=Address(ctypes.addressof(size))
        )
        packed = torch.empty(*outer, size.value, dtype=torch.uint8)
        factors = scales[0].view(-1, columns) if scales else repeat(None)
        packed = packed if place is None else place.tensors[0]
        matrices = zip(
            stored.view(-1, columns, num_bytes), factors, packed.view(-1, size.value), strict=False
        )
        for plain, factor, target in matrices:
            self._pack_quantized(
                stored=plain,
                channel_scales=factor,
                packed=target,
                columns=columns,
                depth=depth,
                format=number,
                num_threads=_threads(),
            )
        return Part(format, (packed,), part.rows)

    def linear(
        self, x: Tensor, weight: Weight, bias: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        dtype = x.dtype
        function = self._linear[dtype]
        rows, depth = x.shape
        columns, inner_size = weight.shape
        if not isinstance(weight, PackedWeight) and not weight.is_dense:
            return super().linear(x, weight, bias, out)
        if not isinstance(weight, PackedWeight) or inner_size != depth:
            raise ValueError(
                f"the weight {weight.shape} was not packed for x {tuple(x.shape)} {dtype}"
            )
        x = with_whole_rows(x)
        if out is None:
            out = self._empty(rows, columns, dtype=dtype)
        parts = weight.quantized_parts
        if parts is not None:
            self._linear_quantized[dtype](
                x=x,
                x_stride=x.stride(0),
                parts=Address(ctypes.addressof(parts)),
                num_parts=len(weight.parts),
                bias=bias,
                out=out,
                out_stride=out.stride(0),
                rows=rows,
                depth=depth,
                num_threads=_threads(),
                use_amx=self.has_amx,
            )
        elif weight.format is _PACKED[dtype]:
            function(
                x=x,
                x_stride=x.stride(0),
                weight=weight.tensor,
                bias=bias,
                out=out,
                out_stride=out.stride(0),
                rows=rows,
                columns=columns,
                depth=depth,
                num_threads=_threads(),
            )
        elif weight.format is None:
            targets = out.split_with_sizes([part.rows for part in weight.parts], 1)
            for (part, added), target in zip(weight.split(bias), targets, strict=True):
                self.linear(x, part, added, target)
        else:
            return super().linear(x, weight, bias, out)
        return out

    def pack_low_rank(self, low_rank: LowRank) -> PackedLowRank:
        return CpuLowRank(low_rank)

    def low_rank_table(self, num_slots: int) -> LowRankTable:
        return CpuTable(num_slots)

    def add_low_rank_(self, out: Tensor, x: Tensor, slots: Tensor, table: LowRankTable) -> None:
        x, slots, packed = low_rank_arguments(out, x, slots, table)
        self._add_low_rank[x.dtype](
            x=x,
            x_stride=x.stride(0),
            out=out,
            out_stride=out.stride(0),
            slots=slots,
            table=packed.slots,
            num_slots=len(packed.slots),
            rows=x.shape[0],
            columns=out.shape[1],
            depth=x.shape[1],
            num_threads=_threads(),
        )

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
            self._unpack_quantized(
                packed=table,
                ids=ids,
                out=out,
                rows=rows,
                depth=depth,
                format=number,
                num_threads=_threads(),
            )
        else:
            out = self._empty(rows, depth, dtype=table.dtype)
            self._unpack_rows[table.dtype](
                packed=table,
                ids=ids,
                out=out,
                rows=rows,
                columns=columns,
                depth=depth,
                num_threads=_threads(),
            )
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
        x = with_whole_rows(x)
        shape = x.shape
        out = self._empty(*shape, dtype=x.dtype)
        inner = shape[1] if len(shape) == 3 else 1
        self._rms_norm[x.dtype](
            x=x,
            stride=x.stride(0),
            inner=inner,
            weight=weight,
            out=out,
            rows=shape[0] * inner,
            size=shape[-1],
            eps=eps,
            offset=offset,
            num_threads=_threads(),
        )
        return out

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        x, residual = x.contiguous(), residual.contiguous()
        rows, size = x.shape
        out, total = self._empty(rows, size, dtype=x.dtype), self._empty(rows, size, dtype=x.dtype)
        self._add_rms_norm[x.dtype](
            x=x,
            residual=residual,
            weight=weight,
            out=out,
            total=total,
            rows=rows,
            size=size,
            eps=eps,
            offset=offset,
            num_threads=_threads(),
        )
        return out, total

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        x, (rows, size) = x.contiguous(), x.shape
        out = self._empty(rows, size, dtype=x.dtype)
        self._layer_norm[x.dtype](
            x=x,
            weight=weight,
            bias=bias,
            out=out,
            rows=rows,
            size=size,
            eps=eps,
            num_threads=_threads(),
        )
        return out

    def scale_add(self, x: Tensor, scale: float, other: Tensor | None = None) -> Tensor:
        x, (rows, size) = x.contiguous(), x.shape
        added = None if other is None else other.contiguous()
        out = self._empty(rows, size, dtype=x.dtype)
        self._scale_add[x.dtype](
            x=x, other=added, out=out, rows=rows, size=size, scale=scale, num_threads=_threads()
        )
        return out

    def soft_cap_(self, x: Tensor, cap: float) -> None:
        if x.stride(1) != 1:
            raise ValueError(f"x has strides {x.stride()}")
        rows, size = x.shape
        self._soft_cap[x.dtype](
            x=x, stride=x.stride(0), rows=rows, size=size, cap=cap, num_threads=_threads()
        )

    def clamp_(self, x: Tensor, limit: float) -> None:
        if x.stride(1) != 1:
            raise ValueError(f"x has strides {x.stride()}")
        rows, size = x.shape
        self._clamp[x.dtype](
            x=x, stride=x.stride(0), rows=rows, size=size, limit=limit, num_threads=_threads()
        )

    def rope(self, x: Tensor, positions: Tensor, cos_sin: Tensor) -> Tensor:
        rows, heads, head_dim = x.shape
        x = with_whole_rows(x)
        positions = positions.long().contiguous()
        out = self._empty(rows, heads, head_dim, dtype=x.dtype)
        self._rope[x.dtype](
            x=x,
            stride=x.stride(0),
            positions=positions,
            cos_sin=cos_sin,
            out=out,
            rows=rows,
            heads=heads,
            head_dim=head_dim,
            num_threads=_threads(),
        )
        return out

    def gate(self, gate_up: Tensor, activation: Activation) -> Tensor:
        return self._activated(gate_up, activation, gate_up.shape[1] // 2)

    def activate(self, x: Tensor, activation: Activation) -> Tensor:
        return self._activated(x, activation, x.shape[1])

    def _activated(self, x: Tensor, activation: Activation, size: int) -> Tensor:
        rows, width = x.shape
        x = with_whole_rows(x)
        out = self._empty(rows, size, dtype=x.dtype)
        self._activate[x.dtype](
            x=x,
            stride=x.stride(0),
            out=out,
            rows=rows,
            size=size,
            activation=_ACTIVATION_NUMBERS[activation],
            gated=width > size,
            num_threads=_threads(),
        )
        return out

    def write_kv_(
        self, keys: Tensor, values: Tensor, cache: LayerCache, slot_mapping: Tensor
    ) -> None:
        rows, heads, head_dim = keys.shape
        keys, values = with_whole_rows(keys), with_whole_rows(values)
        key_scale, value_scale = cache.fp8_scales
        self._write_kv[_kind(cache)][keys.dtype](
            keys=keys,
            keys_stride=keys.stride(0),
            values=values,
            values_stride=values.stride(0),
            key_cache=cache.keys,
            value_cache=cache.values,
            key_scales=cache.key_scales,
            value_scales=cache.value_scales,
            key_scale=key_scale,
            value_scale=value_scale,
            slots=slot_mapping,
            rows=rows,
            heads=heads,
            block_size=cache.block_size,
            head_dim=head_dim,
            block_stride=block_stride(cache.keys, cache.values),
            scale_stride=block_stride(*cache.scales),
            keys_by_dimension=cache.keys_by_dimension,
            num_threads=_threads(),
        )

    def gather_inputs(
        self,
        token_rows: Tensor,
        positions: Tensor,
        token_ids: Tensor,
        block_tables: Tensor,
        block_size: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        count = len(token_rows)
        if {token_rows.dtype, positions.dtype, block_tables.dtype} != {
            torch.int32
        } or token_ids.dtype != torch.int64:
            raise TypeError("rows, positions and block tables are int32, token ids int64")
        ids, places, slots = (self._empty(count, dtype=torch.int64) for _ in range(3))
        self._gather_inputs(
            rows=token_rows.contiguous(),
            positions=positions.contiguous(),
            token_ids=token_ids,
            tokens_stride=token_ids.stride(0),
            block_tables=block_tables,
            tables_stride=block_tables.stride(0),
            ids=ids,
            places=places,
            slots=slots,
            count=count,
            block_size=block_size,
        )
        return ids, places, slots

    def attention(
        self,
        query: Tensor,
        cache: LayerCache,
        batch: PagedBatch,
        spec: AttentionSpec,
        sinks: Tensor | None = None,
        slopes: Tensor | None = None,
    ) -> Tensor:
        if not self.captures(spec):
            return super().attention(query, cache, batch, spec, sinks, slopes)
        rows, num_heads, head_dim = query.shape
        query = with_whole_rows(query)
        _, kv_heads, block_size, _ = cache.keys.shape
        key_scale, value_scale = cache.fp8_scales
        if (
            self._attention_amx is not None
            and cache.keys.dtype == torch.bfloat16
            and not cache.keys_by_dimension
        ):
            function = self._attention_amx
        else:
            function = self._attention[_kind(cache)][query.dtype]
        block_tables = batch.block_tables.contiguous()
        value_dim = cache.values.shape[3]
        out = self._empty(rows, num_heads, value_dim, dtype=query.dtype)
        function(
            query=query,
            query_stride=query.stride(0),
            keys=cache.keys,
            values=cache.values,
            key_scales=cache.key_scales,
            value_scales=cache.value_scales,
            query_start=batch.query_start,
            context_lens=batch.context_lens,
            block_tables=block_tables,
            table_rows=batch.table_rows,
            out=out,
            num_sequences=len(batch.table_rows),
            max_blocks=block_tables.shape[1],
            num_heads=num_heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            value_dim=value_dim,
            block_size=block_size,
            block_stride=block_stride(cache.keys, cache.values),
            scale_stride=block_stride(*cache.scales),
            window=spec.sliding_window or 0,
            chunk=spec.chunk or 0,
            keys_by_dimension=cache.keys_by_dimension,
            sinks=sinks,
            slopes=slopes,
            scale=spec.scale * key_scale * _LOG2_E,
            cap=spec.soft_cap * _LOG2_E,
            value_scale=value_scale,
            num_threads=_threads(),
        )
        return out

    def gumbel_argmax(
        self, logits: Tensor, temperature: Tensor, keys: Tensor
    ) -> tuple[Tensor, Tensor]:
        rows, size = logits.shape
        if (
            logits.dtype != torch.float32
            or temperature.dtype != torch.float32
            or keys.dtype != torch.int32
        ):
            raise TypeError(
                f"logits {logits.dtype}, temperature {temperature.dtype}, keys {keys.dtype}"
            )
        logits, temperature, keys = (
            with_whole_rows(logits),
            temperature.contiguous(),
            keys.contiguous(),
        )
        out, flags = torch.empty(rows, dtype=torch.int64), torch.empty(rows, dtype=torch.int32)
        self._gumbel_argmax(
            logits=logits,
            stride=logits.stride(0),
            temperature=temperature,
            keys=keys,
            out=out,
            flags=flags,
            rows=rows,
            size=size,
            num_threads=_threads(),
        )
        return out, flags

    def sample_rows(
        self,
        logits: Tensor,
        row_index: Tensor,
        seeds: Tensor,
        temperatures: Tensor,
        positions: Tensor,
        token_ids: Tensor,
        out: Tensor | None = None,
    ) -> Tensor:
        logits, (rows, size) = with_whole_rows(logits), logits.shape
        out = self._empty(2, rows, dtype=torch.int64) if out is None else out
        tokens, flags = out
        self._sample_rows[logits.dtype](
            logits=logits,
            stride=logits.stride(0),
            row_index=row_index,
            seeds=seeds,
            temperatures=temperatures,
            positions=positions,
            token_ids=token_ids,
            tokens_stride=token_ids.stride(0),
            out=tokens,
            flags=flags,
            rows=rows,
            size=size,
            num_threads=_threads(),
        )
        return out

    def top_values(self, x: Tensor, k: int) -> Tensor:
        rows, size = x.shape
        if x.dtype != torch.float32 or not 1 <= k <= size:
            raise ValueError(f"there are no {k} largest of {x.dtype} rows of {size}")
        x = with_whole_rows(x)
        out = x.new_empty(rows, k)
        self._top_values(
            x=x, stride=x.stride(0), out=out, rows=rows, size=size, k=k, num_threads=_threads()
        )
        return out

    def keep_between_(self, x: Tensor, low: Tensor, high: Tensor) -> None:
        rows, size = x.shape
        if {x.dtype, low.dtype, high.dtype} != {torch.float32} or x.stride(1) != 1:
            raise ValueError(
                f"x {x.dtype} with strides {x.stride()}, limits {low.dtype} and {high.dtype}"
            )
        low, high = low.contiguous(), high.contiguous()
        self._keep_between(
            x=x,
            stride=x.stride(0),
            low=low,
            high=high,
            rows=rows,
            size=size,
            num_threads=_threads(),
        )


def _packed_format(part: Part) -> Format | None:
    """What `pack` makes of a part; None: it refuses it."""
    if part.format.name in FORMATS and part.tensors[0].shape[-1] % part.format.num_bytes == 0:
        return _PACKED_BLOCKS[part.format.name]
    return part.format if part.format.dtype is None else _PACKED.get(part.tensors[0].dtype)


def _kind(cache: LayerCache) -> torch.dtype | None:
    return cache.keys.dtype if cache.keys.dtype in _CACHES else None
