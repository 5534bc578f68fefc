"""Products of experts that have many rows each, as in steps of long prompts, on Hopper: `experts.cu`.

They have the bits of those in `triton/tile_product.py`: the same instructions walk the inner dimension
in the same order. Both products of a layer take tiles of WIDTH pairs.
"""

from __future__ import annotations

import ctypes
import logging
from ctypes import c_int, c_int64, c_uint64, c_void_p
from functools import cache, lru_cache

import torch
from torch import Tensor

from quire.backends.cuda import build, driver
from quire.backends.triton.grouping import GROUPED, Tiles
from quire.backends.triton.launch import USE_PDL, num_multiprocessors
from quire.backends.triton.linear import Tile
from quire.backends.triton.shapes import ALIGNMENT, cdiv, row_stride
from quire.backends.triton.tested import is_exact, random_numbers
from quire.backends.triton.tile_product import tile_product
from quire.kernels.ops import Activation, ExpertWeights
from quire.kernels.weights import Weight
from quire.process.compile_together import only_compiles

logger = logging.getLogger(__name__)

_GROUPS, _STAGES, _CLUSTER = 2, 4, 2
"""Of a block: groups of 64 rows, and turns of the inner dimension that are copied ahead; and how many
blocks share weights.
"""
WIDTH = 64 * _GROUPS * _CLUSTER
"""Pairs of a tile."""
_FENCE = 1
_OUTPUTS, _INNER = 256, 64
_MANY = 128
"""Pairs that an expert has on average."""
_NUMBERS = {torch.float16: 1, torch.bfloat16: 2}
_SHARED = 1024 + _STAGES * (_GROUPS * 8192 + 32768) + _GROUPS * 16384 + 256
"""Bytes: alignment, rows and weights, staged outputs, items and barriers."""


class Call(ctypes.Structure):
    """`Call` of experts.cu."""

    _fields_ = (
        ("weight", c_uint64 * 16),
        *((name, c_void_p) for name in ("x", "experts", "counts", "order", "taken", "out")),
        ("row_bytes", c_int64),
        *((name, c_int) for name in ("bound", "inner", "outer", "pairs_of_row")),
        ("padding", c_int * 14),
    )


def constants(dtype: torch.dtype, pdl: bool) -> dict[str, int]:
    return {
        "GROUPS": _GROUPS,
        "STAGES": _STAGES,
        "CLUSTER": _CLUSTER,
        "FENCE": _FENCE,
        "NUMBER": _NUMBERS[dtype],
        "PDL": int(pdl),
    }


@cache
def _module(dtype: torch.dtype, device: torch.device) -> driver.Module:
    with torch.cuda.device(device):
        code = build.build("experts.cu", constants(dtype, USE_PDL), "sm_90a")
        sizes = dict.fromkeys(("gated_product", "plain_product"), _SHARED)
        return driver.Module(code, sizes, USE_PDL)


def takes(x: Tensor, experts: ExpertWeights, activation: Activation, pairs: int) -> bool:
    """Whether these are the products of many rows of x with plain weights that the kernels can
    compute.
    """
    gate_up, down = experts.gate_up, experts.down
    if not (gate_up.is_dense and down.is_dense):
        return False
    num_experts, hidden, _ = down.shape
    return (
        pairs >= _MANY * num_experts
        and activation is Activation.SILU
        and experts.gate_up_bias is None
        and experts.down_bias is None
        and hidden % _OUTPUTS == 0
        and all(
            one.tensor.dtype == x.dtype
            and x.dtype in _NUMBERS
            and one.shape[1] % _OUTPUTS == 0
            and one.shape[2] % _INNER == 0
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
    """Tests both kernels, once."""
    return (
        device.type == "cuda"
        and torch.cuda.get_device_capability(device)[0] == 9
        and driver.find_driver() is not None
        and bool(build.compiler_version())
        and is_exact("prompts through experts", lambda: _same_products(device, dtype))
    )


def _same_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether each form has the bits of the kernel for all: tiles with all numbers of 64 rows, experts
    without any, rows of zeros (whose products are negative zeros, too), and blocks that take more
    items than they know ahead.
    """
    inner, outer, top_k = 192, 512, 2
    counts = [1, 64, 0, 65, 128, 300, 256, 511, 193]
    many = 40 * num_multiprocessors(device) - sum(counts) % 2
    counts.append(many + (sum(counts) + many) % top_k)
    pairs = sum(counts)
    by_expert = torch.arange(len(counts), dtype=torch.int32).repeat_interleave(torch.tensor(counts))
    generator = torch.Generator().manual_seed(0)
    expert_ids = by_expert[torch.randperm(pairs, generator=generator)]
    few, many_rows = (tiles_of(expert_ids, counts, width, device) for width in (128, WIDTH))
    tile = Tile(128, 64, 64, 3, 8)
    found = []
    for activation, rows in ((Activation.SILU, pairs // top_k), (None, pairs)):
        x = random_numbers(rows, inner, device=device, dtype=dtype)
        x[::5] = 0.0
        weight = random_numbers(len(counts), 2 * outer, inner, device=device, dtype=dtype)
        each = top_k if activation else 1
        expected = tile_product(x, Weight.dense(weight), None, few, tile, dtype, each, activation)
        for _ in range(2):  # the second time with what the first one has left of the counters
            own = experts_product(x, weight, many_rows, each, is_gated=activation is not None)
            found.append(torch.equal(own.view(torch.int16), expected.view(torch.int16)))
    return all(found)


def tiles_of(expert_ids: Tensor, counts: list[int], width: int, device: torch.device) -> Tiles:
    """`group_pairs`, but made on the host: tests are run where Triton kernels are only compiled, too."""
    experts, of_tile, order = [], [], []
    for expert, count in enumerate(counts):
        pairs = (expert_ids == expert).nonzero()[:, 0].tolist()
        assert len(pairs) == count
        for first in range(0, count, width):
            experts.append(expert)
            own = pairs[first : first + width]
            of_tile.append(len(own))
            order += own + [0] * (width - len(own))
    of_tile += [len(experts), 0, 0]
    listed, known, pairs_of_tiles = (
        torch.tensor(each, dtype=torch.int32).to(device) for each in (experts, of_tile, order)
    )
    number = len(experts)
    return Tiles(listed, known, pairs_of_tiles, len(expert_ids), number, width, GROUPED.value)


@lru_cache(maxsize=1024)
def _weight_map(address: int, dtype: torch.dtype, rows: int, inner: int) -> bytes:
    return driver.tensor_map(driver.Rows(address, dtype, rows, inner), _OUTPUTS // 2)


def experts_product(x: Tensor, weight: Tensor, tiles: Tiles, top_k: int, is_gated: bool) -> Tensor:
    """[pairs, outputs]: `tile_product` of what `takes` says yes to, with SiLU if it is gated."""
    experts, size, inner = weight.shape
    outer = size // 2 if is_gated else size
    out = torch.empty(tiles.pairs, outer, dtype=x.dtype, device=x.device)
    module = _module(x.dtype, x.device)
    if only_compiles():  # so the lists are noise
        return out
    counts = tiles.counts.data_ptr()
    call = Call(
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
    described = _weight_map(weight.data_ptr(), weight.dtype, experts * size, inner)
    ctypes.memmove(ctypes.addressof(call), described, len(described))
    items = tiles.bound * cdiv(size, _OUTPUTS)
    clusters = min(items, num_multiprocessors(x.device) // _CLUSTER)
    name = "gated_product" if is_gated else "plain_product"
    module.launch(name, (_CLUSTER * clusters, 1), 128 * (_GROUPS + 1), call, x.device)
    return out
