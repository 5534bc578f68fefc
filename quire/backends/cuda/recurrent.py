"""The recurrences of layers with a state by CUDA kernels: which are launched, and with what.
`recurrent.h` has the order of all sums.

Steps have runs of few tokens (decoded ones, drafts) and of many (prompts). For each kind there is a
kernel of scores and one of the recurrence, and both kinds give the same bits; a step that may have
both launches all four, each of which leaves the other kind's runs alone.
"""

from __future__ import annotations

import ctypes
import logging
from ctypes import c_float, c_int64, c_void_p
from functools import cache

import torch
from torch import Tensor

from quire.backends.cuda import build, driver
from quire.backends.triton import recurrent as by_tiles
from quire.backends.triton.launch import USE_PDL
from quire.backends.triton.sequences import TILE, rows_of
from quire.backends.triton.shapes import as_rows, cdiv, row_stride
from quire.errors import DeviceError
from quire.kernels.ops import PagedBatch
from quire.kernels.recurrent import CHUNK, RecurrentCache, RecurrentSpec, RecurrentWeights

logger = logging.getLogger(__name__)

_NUMBERS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
FEW_TOKENS = 8
"""A run of up to so many tokens is one of few; all are where each row is a sequence (graphs)."""
MANY_PROGRAMS = 8192
"""From so many programs of 128 columns on, a lane has 4 columns and not 2: 256 requests with 32 heads.
On an H200 that is 1% faster there, 2 columns are 1% to 8% faster before.
"""
ahead_programs = 528
"""Up to so many programs of 64 columns copy the state before the kernel before them is done: four on
each multiprocessor of an H200, as many as have the memory at once.
"""
columns_of_a_lane = 0
"""1, 2 or 4 for benchmarks, none of which copy; 0: by the number of programs. The bits are the same."""
columns_of_a_program = 0
"""32, 64 or 128 in the kernel for prompts, for benchmarks and tests; 0: the kernel chooses, by the
number of prompts. The bits are the same.
"""
_FEW_THREADS, _MANY_THREADS, _LANES = 128, 256, 32
WIDTHS = 32, 64, 128
ALIGNED_ONLY = "few_tokens_2", "few_tokens_4", "few_tokens_ahead"
_QUERIES_AT_ONCE = 8
_STATIC_SHARED = 2560
"""Bytes at most, of a kernel that takes dynamic memory, too."""


class Call(ctypes.Structure):
    """`Call` of recurrent.h."""

    _fields_ = (
        *(
            (name, c_void_p)
            for name in (
                *("mixed", "gates", "log_rate", "time_bias", "skip", "out", "queries", "scores"),
                *("keys", "changes", "decays", "inputs", "tail_places", "state_places"),
                *("starts", "tables", "positions", "block_tables", "state_tables"),
            )
        ),
        *(
            (name, c_int64)
            for name in (
                *("rows", "single", "limit", "mixed_stride", "gates_stride", "table_stride"),
                *("key_stride", "change_stride", "decay_stride", "input_stride"),
                *("state_stride", "state_width"),
                *("least_columns", "most_columns", "multiprocessors"),
            )
        ),
        *((name, c_float) for name in ("least_step", "largest_step", "beta_scale", "query_scale")),
    )


def _many_tokens_size(spec: RecurrentSpec, columns: int) -> int:
    """Bytes of shared memory of a program for prompts with so many columns."""
    chunk = int(CHUNK)
    vectors = 2 * chunk * cdiv(spec.key_dim, 32) * 32
    scores = (2 if spec.is_delta else 1) * chunk * chunk
    return 4 * (vectors + scores + (spec.key_dim + 2 * chunk) * columns)


def widest(spec: RecurrentSpec, most_shared: int) -> int:
    """The most columns that a program for prompts can have."""
    sizes = {columns: _many_tokens_size(spec, columns) for columns in WIDTHS}
    return max((one for one in WIDTHS if sizes[one] + _STATIC_SHARED <= most_shared), default=32)


def shared_sizes(spec: RecurrentSpec, most_shared: int) -> dict[str, int]:
    """Bytes of dynamic shared memory of each kernel, where a block may have `most_shared`."""
    chunk = int(CHUNK)
    row = cdiv(spec.key_dim, 4) * 4 + 4
    keys = chunk * row + chunk // 8 * 16
    few = {f"few_tokens_{columns}": 0 for columns in (1, 2, 4)}
    few["few_tokens_ahead"] = 4 * (spec.key_dim + chunk) * 2 * _LANES
    return {
        "few_scores": 4 * (keys + _QUERIES_AT_ONCE * row),
        "many_scores": 4 * 2 * keys,
        "many_tokens": _many_tokens_size(spec, widest(spec, most_shared)),
        **few,
    }


def _fits(spec: RecurrentSpec, device: torch.device) -> bool:
    """Whether heads of this size fit into a multiprocessor's memory."""
    most = driver.most_shared_bytes(device)
    return max(shared_sizes(spec, most).values()) + _STATIC_SHARED <= most


def constants(
    spec: RecurrentSpec,
    block_size: int,
    dtype: torch.dtype,
    has_skip: bool,
    aligned: bool,
    pdl: bool,
) -> dict[str, int]:
    """What the kernels are compiled for."""
    return {
        "KEY_HEADS": spec.num_key_heads,
        "VALUE_HEADS": spec.num_value_heads,
        "KEY_DIM": spec.key_dim,
        "VALUE_DIM": spec.value_dim,
        "BLOCK_SIZE": block_size,
        "TAPS": spec.taps,
        "DELTA": int(spec.is_delta),
        "SKIP": int(has_skip),
        "NUMBER": _NUMBERS[dtype],
        "ALIGNED": int(aligned),
        "PDL": int(pdl),
    }


@cache
def has_compiler(device: torch.device) -> bool:
    """Whether kernels can be compiled and launched here at all; what is missing is said once."""
    if device.type != "cuda":
        return False
    if torch.cuda.get_device_capability(device) < (8, 0):
        return False
    reason = ""
    if driver.find_driver() is None:
        reason = "the CUDA driver's library was not found, or it is older than 11.8"
    elif not build.compiler_version():
        reason = "neither NVRTC (nvidia-cuda-nvrtc) nor nvcc was found"
    if reason:
        logger.warning("%s: layers with a state are computed by slower kernels", reason)
    return not reason


@cache
def _module(
    spec: RecurrentSpec,
    block_size: int,
    dtype: torch.dtype,
    has_skip: bool,
    aligned: bool,
    device: torch.device,
) -> driver.Module:
    major, minor = torch.cuda.get_device_capability(device)
    given = constants(spec, block_size, dtype, has_skip, aligned, USE_PDL)
    with torch.cuda.device(device):
        sizes = shared_sizes(spec, driver.most_shared_bytes(device))
        if not aligned:
            sizes = {name: size for name, size in sizes.items() if name not in ALIGNED_ONLY}
        code = build.build("recurrent.cu", given, f"sm_{major}{minor}")
        return driver.Module(code, sizes, USE_PDL)


@cache
def is_used(spec: RecurrentSpec, device: torch.device) -> bool:
    """Whether these kernels compute layers of this kind: in all steps, as others give other bits."""
    return not spec.gate_rank and has_compiler(device) and _fits(spec, device)


def recur_(
    mixed: Tensor,
    gates: Tensor,
    weights: RecurrentWeights,
    spec: RecurrentSpec,
    cache: RecurrentCache,
    batch: PagedBatch,
    decay_gates: Tensor | None = None,
) -> Tensor:
    """`Kernels.recur_`; it keeps the last inputs of the convolution, too."""
    if not is_used(spec, mixed.device):
        return by_tiles.recur_(mixed, gates, weights, spec, cache, batch, decay_gates)
    return Launches(mixed, gates, weights, spec, cache, batch).run()


class Launches:
    """Of one layer in one step."""

    def __init__(
        self,
        mixed: Tensor,
        gates: Tensor,
        weights: RecurrentWeights,
        spec: RecurrentSpec,
        cache: RecurrentCache,
        batch: PagedBatch,
    ) -> None:
        tail, states = cache.convolution.tail, batch.state_tables
        if states is None or tail is None:
            raise ValueError("A recurrent layer needs the tables of its states.")
        if cache.block_size % int(TILE):
            raise DeviceError(
                f"block_size is {cache.block_size}, but must be a multiple of {int(TILE)} for layers with "
                f"a state on a GPU."
            )
        if gates.dtype != mixed.dtype or cache.convolution.inputs.dtype != mixed.dtype:
            raise TypeError(
                f"values are {mixed.dtype}, gates {gates.dtype}, kept inputs {cache.convolution.inputs.dtype}"
            )
        self.spec, self.block_size, self.device = spec, cache.block_size, mixed.device
        self.aligned = _is_aligned(spec, cache)
        source, gates = as_rows(mixed), as_rows(gates)
        if (source.data_ptr() | row_stride(source) * source.itemsize) % 16:
            source = source.clone(memory_format=torch.contiguous_format)
        tables, positions = rows_of(batch)
        self.dtype, self.rows = mixed.dtype, source.shape[0]
        self.count = len(batch.context_lens)
        self.has_skip = weights.skip is not None
        least, largest = spec.time_limits
        most_shared, multiprocessors = self.limits()
        most_columns = widest(spec, most_shared)
        if columns_of_a_program:
            most_columns = min(columns_of_a_program, most_columns)
        empty = torch.empty
        out = empty(self.rows, spec.value_size, dtype=mixed.dtype, device=mixed.device)
        queries = empty(self.rows, spec.query_size, device=mixed.device)
        scores = empty(self.rows, spec.num_key_heads, 2, int(CHUNK), device=mixed.device)
        tensors = {
            "mixed": source,
            "gates": gates,
            "log_rate": weights.log_rate.float(),
            "time_bias": weights.time_bias.float(),
            "skip": None if weights.skip is None else weights.skip.float(),
            "out": out,
            "queries": queries,
            "scores": scores,
            "keys": cache.keys,
            "changes": cache.changes,
            "decays": cache.decays,
            "inputs": cache.convolution.inputs,
            "tail_places": tail.places,
            "state_places": cache.state.places,
            "starts": batch.query_start,
            "tables": tables,
            "positions": positions,
            "block_tables": batch.block_tables,
            "state_tables": states,
        }
        for name in ("starts", "tables", "positions", "block_tables", "state_tables"):
            found = tensors[name]
            if found is not None and found.dtype != torch.int32:
                raise TypeError(f"{name} are {found.dtype}, not int32")
        self.tensors = tensors  # kept until the launches are queued
        self.out = out
        self.call = Call(
            rows=self.rows,
            single=int(self.count == self.rows),
            limit=0,
            mixed_stride=row_stride(source),
            gates_stride=row_stride(gates),
            table_stride=batch.block_tables.stride(0),
            key_stride=cache.keys.stride(0),
            change_stride=cache.changes.stride(0),
            decay_stride=cache.decays.stride(0),
            input_stride=cache.convolution.inputs.stride(0),
            state_stride=states.stride(0),
            state_width=states.stride(1),
            least_columns=most_columns if columns_of_a_program else 0,
            most_columns=most_columns,
            multiprocessors=multiprocessors,
            least_step=least,
            largest_step=min(largest, torch.finfo(torch.float32).max),
            beta_scale=spec.beta_scale,
            query_scale=spec.key_dim**-0.5,
            **{name: None if one is None else one.data_ptr() for name, one in tensors.items()},
        )

    def run(self) -> Tensor:
        if self.rows == 0:
            return self.out
        has_few = self.call.single or self.count > 1 or self.rows <= FEW_TOKENS
        has_many = not self.call.single and (self.count > 1 or not has_few)
        self.call.limit = int(CHUNK) if not has_many else FEW_TOKENS if has_few else 0
        heads = self.spec.num_key_heads + 1
        if has_few:
            self._launch("few_scores", self.count, heads, _FEW_THREADS)
        if has_many:
            self._launch("many_scores", cdiv(self.rows, int(CHUNK)), heads, _MANY_THREADS)
        if has_few:
            columns = self._columns()
            parts = cdiv(self.spec.value_dim, columns * _LANES)
            programs = self.spec.num_value_heads * parts
            is_ahead = columns == 2 and self.count * programs <= ahead_programs
            is_ahead = is_ahead and not columns_of_a_lane
            name = "few_tokens_ahead" if is_ahead else f"few_tokens_{columns}"
            self._launch(name, self.count, programs, _LANES)
        if has_many:
            parts = cdiv(self.spec.value_dim, min(WIDTHS))  # wider ones leave some to do nothing
            programs = self.spec.num_value_heads * parts
            self._launch("many_tokens", self.count, programs, _MANY_THREADS)
        return self.out

    def _columns(self) -> int:
        """Of a lane in the kernel for few tokens."""
        if not self.aligned:
            return 1
        if columns_of_a_lane:
            return columns_of_a_lane
        parts = cdiv(self.spec.value_dim, 4 * _LANES)
        programs = self.count * self.spec.num_value_heads * parts
        return 4 if programs >= MANY_PROGRAMS else 2

    def limits(self) -> tuple[int, int]:
        """Bytes of shared memory that a block can have, and how many multiprocessors there are."""
        properties = torch.cuda.get_device_properties(self.device)
        return driver.most_shared_bytes(self.device), properties.multi_processor_count

    def module(self) -> driver.Module:
        return _module(
            self.spec, self.block_size, self.dtype, self.has_skip, self.aligned, self.device
        )

    def _launch(self, name: str, programs: int, others: int, threads: int) -> None:
        self.module().launch(name, (programs, others), threads, self.call, self.device)


def _is_aligned(spec: RecurrentSpec, cache: RecurrentCache) -> bool:
    """Whether all vectors of keys, changes and states begin at multiples of 16 bytes."""
    places = [spec.key_dim * 4, spec.value_dim * 4]
    for side in (cache.keys, cache.changes):
        places += [side.data_ptr(), side.stride(0) * 4]
    return cache.state.alignment == 16 and all(place % 16 == 0 for place in places)
