"""Products of experts that have many rows each, as in steps of long prompts, on Hopper: `experts.cu`.

They have the bits of those in `triton/tile_product.py`: the same instructions walk the inner dimension
in the same order. Those compute what these don't take, and everything where these can't be compiled or
give other bits (`are_exact`).
"""

from __future__ import annotations

import ctypes
from ctypes import c_int, c_int64, c_void_p
from functools import cache

import torch
from torch import Tensor

from quire.backends.cuda import build, driver
from quire.backends.cuda.tensor_maps import COLUMN, TensorMap, tensor_map
from quire.backends.triton.grouping import GROUPED, Tiles
from quire.backends.triton.launch import USE_PDL, num_multiprocessors
from quire.backends.triton.linear import Tile
from quire.backends.triton.shapes import ALIGNMENT, row_stride
from quire.backends.triton.tested import is_exact, random_numbers
from quire.backends.triton.tile_product import tile_product
from quire.kernels.ops import Activation, ExpertWeights
from quire.kernels.weights import Weight
from quire.process.compile_together import only_compiles

_GROUPS, _STAGES = 2, 4
"""Of a block: groups of 64 rows, and turns of the inner dimension that are copied ahead."""
_BLOCK = 64 * _GROUPS
"""Pairs of a block."""
WIDTHS = _BLOCK, 2 * _BLOCK
"""Pairs of a tile: of one block, or of two that share weights (a cluster)."""
_FEWEST, _WIDE = 64, 128
"""Pairs that an expert has on average: from the first on these kernels are quicker than others on an
H200, from the second on with two blocks (docs/performance.md, attempt 69).
"""
_OUTPUTS = 256
_NUMBERS = {torch.float16: 1, torch.bfloat16: 2}
_THREADS = 128 * (_GROUPS + 1)
_SHARED_BYTES = 1024 + _STAGES * (_GROUPS * 8192 + 32768) + _GROUPS * 16384 + 256
"""Of a block: alignment, rows and weights, staged outputs, items and barriers."""


class Call(ctypes.Structure):
    """`Call` of experts.cu."""

    _fields_ = (
        ("weight", TensorMap),
        *((name, c_void_p) for name in ("x", "experts", "counts", "order", "taken", "out")),
        ("row_bytes", c_int64),
        *((name, c_int) for name in ("bound", "inner", "outer", "pairs_of_row")),
        ("padding", c_int * 14),
    )


def constants(dtype: torch.dtype, width: int, pdl: bool) -> dict[str, int]:
    """What the kernels for tiles of this width are compiled for."""
    return {
        "CLUSTER": width // _BLOCK,
        "GROUPS": _GROUPS,
        "STAGES": _STAGES,
        "CALL_BYTES": ctypes.sizeof(Call),
        "SHARED_BYTES": _SHARED_BYTES,
        "NUMBER": _NUMBERS[dtype],
        "PDL": int(pdl),
    }


@cache
def _module(dtype: torch.dtype, width: int, device: torch.device) -> driver.Module:
    with torch.cuda.device(device):
        code = build.build("experts.cu", constants(dtype, width, USE_PDL), "sm_90a")
        sizes = dict.fromkeys(("gated_product", "plain_product"), _SHARED_BYTES)
        return driver.Module(code, sizes, USE_PDL)


def tile_width(pairs: int, num_experts: int) -> int:
    """How many pairs share a tile; bits don't depend on it."""
    return WIDTHS[pairs >= _WIDE * num_experts]


def takes(x: Tensor, experts: ExpertWeights, activation: Activation, pairs: int) -> bool:
    """Whether these are the products of many rows of x with plain weights that the kernels can
    compute.
    """
    gate_up, down = experts.gate_up, experts.down
    if not (gate_up.is_dense and down.is_dense):
        return False
    return (
        pairs >= _FEWEST * down.shape[0]
        and activation is Activation.SILU
        and experts.gate_up_bias is None
        and experts.down_bias is None
        and all(
            one.tensor.dtype == x.dtype
            and x.dtype in _NUMBERS
            and one.shape[1] % _OUTPUTS == 0
            and one.shape[2] % COLUMN == 0
            and one.tensor.is_contiguous()
            and one.tensor.data_ptr() % ALIGNMENT == 0
            for one in (gate_up, down)
        )
        and x.data_ptr() % ALIGNMENT == 0
        and row_stride(x) * x.itemsize % ALIGNMENT == 0
        and are_exact(x.device, x.dtype)
    )


@cache
def are_exact(device: torch.device, dtype: torch.dtype) -> bool:
    """Tests the kernels, once; says so where there is no compiler for them."""
    return (
        device.type == "cuda"
        and torch.cuda.get_device_capability(device)[0] == 9
        and is_exact("prompts through experts", lambda: _same_products(device, dtype))
    )


def _same_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether each form has the bits of the kernel for all: tiles with all numbers of 64 rows, experts
    without any, rows of zeros (whose products are negative zeros, too), and blocks that take more
    items than they know ahead.
    """
    inner, outer, top_k = 192, 512, 2
    counts = [1, 64, 0, 65, 128, 300, 256, 511, 193]
    counts.append(40 * num_multiprocessors(device) + sum(counts) % top_k)
    pairs = sum(counts)
    by_expert = torch.arange(len(counts), dtype=torch.int32).repeat_interleave(torch.tensor(counts))
    generator = torch.Generator().manual_seed(0)
    expert_ids = by_expert[torch.randperm(pairs, generator=generator)]
    listed = [tiles_of(expert_ids, counts, width, device) for width in WIDTHS]
    tile = Tile(_BLOCK, 64, 64, 3, 8)
    found = []
    for activation, rows in ((Activation.SILU, pairs // top_k), (None, pairs)):
        x = random_numbers(rows, inner, device=device, dtype=dtype)
        x[::5] = 0.0
        weight = random_numbers(len(counts), 2 * outer, inner, device=device, dtype=dtype)
        each = top_k if activation else 1
        packed = Weight.dense(weight)
        expected = tile_product(x, packed, None, listed[0], tile, dtype, each, activation)
        for tiles in listed * 2:  # the second time with the counters that the first one has left
            own = experts_product(x, weight, tiles, each, is_gated=activation is not None)
            found.append(torch.equal(own.view(torch.int16), expected.view(torch.int16)))
    return all(found)


def tiles_of(expert_ids: Tensor, counts: list[int], width: int, device: torch.device) -> Tiles:
    """`group_pairs`, made on the host: there it does not depend on a kernel, whose launch may be one that
    only compiles (`only_compiles`).
    """
    experts, of_tile, order = [], [], []
    for expert, count in enumerate(counts):
        pairs = (expert_ids == expert).nonzero()[:, 0].tolist()
        for first in range(0, count, width):
            experts.append(expert)
            own = pairs[first : first + width]
            of_tile.append(len(own))
            order += own + [0] * (width - len(own))
    of_tile += [len(experts), 0, 0]
    listed, known, pairs_of_tiles = (
        torch.tensor(each, dtype=torch.int32).to(device) for each in (experts, of_tile, order)
    )
    bound = len(experts)
    return Tiles(listed, known, pairs_of_tiles, len(expert_ids), bound, width, GROUPED.value)


def experts_product(x: Tensor, weight: Tensor, tiles: Tiles, top_k: int, is_gated: bool) -> Tensor:
    """[pairs, outputs]: `tile_product` of what `takes` says yes to, with SiLU if it is gated."""
    experts, size, inner = weight.shape
    outer = size // 2 if is_gated else size
    out = torch.empty(tiles.pairs, outer, dtype=x.dtype, device=x.device)
    module = _module(x.dtype, tiles.width, x.device)
    if only_compiles():  # then the lists of tiles are noise
        return out
    counts = tiles.counts.data_ptr()
    call = Call(
        weight=tensor_map(
            weight.data_ptr(),
            weight.dtype,
            (inner, experts * size),
            (inner,),
            (COLUMN, _OUTPUTS // 2),
        ),
        x=x.data_ptr(),
        experts=tiles.experts.data_ptr(),
        counts=counts,
        order=tiles.order.data_ptr(),
        taken=counts + 4 * (tiles.bound + 1),
        out=out.data_ptr(),
        row_bytes=row_stride(x) * x.itemsize,
        bound=tiles.bound,
        inner=inner,
        outer=outer,
        pairs_of_row=top_k,
    )
    cluster = tiles.width // _BLOCK
    items = tiles.bound * (size // _OUTPUTS)
    clusters = min(items, num_multiprocessors(x.device) // cluster)
    name = "gated_product" if is_gated else "plain_product"
    module.launch(name, (cluster * clusters, 1), _THREADS, call, x.device)
    return out
