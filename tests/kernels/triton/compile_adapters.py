"""Compiles the kernels of adapters for an H200, which needs none. Called by `compile_kernels`."""

from __future__ import annotations

from quire.backends.triton.adapter_outputs import _outputs_kernel
from quire.backends.triton.adapters import (
    _OUT_WARPS,
    _OWN,
    _REGISTERS,
    _STRIDE,
    _expand_kernel,
    _shrink_kernel,
)
from tests.kernels.triton.compile_latent import compiled
from tests.kernels.triton.compile_small_batches import resources
from tests.long_runs import IS_LONG

_TYPES = {
    **dict.fromkeys(("x", "out", "hidden"), "*bf16"),
    **dict.fromkeys(("tile_slots", "tile_counts", "order"), "*i32"),
    "table": "*i64",
    "sums": "*fp32",
}


def adapter_kernels() -> dict[str, dict[str, int]]:
    """What each takes; in the short form nothing."""
    found = {}
    for tile in (16, 64) if IS_LONG else ():
        constants = {
            "NUM_SLOTS": 32,
            "IS_SINGLE": False,
            "TILE": tile,
            "STRIDE": _STRIDE,
            "PDL": True,
        }
        more = {"K": 4096, "RANKS": 64, "BLOCK_K": 128, "SEGMENT": 1024}
        more |= {"SEGMENTS": 1 if tile == 16 else 4, "IS_BESIDE": tile == 16, "TURNED": False}
        found[f"shrink {tile}"] = compiled(
            _shrink_kernel, constants | more, 4, _TYPES, num_stages=4
        )
        more = {"N": 4096, "BLOCK_N": 128, "RANK_TILE": 16, "PARTS": 4 if tile == 16 else 1}
        more["ACTIVATION"] = -1
        found[f"expand {tile}"] = compiled(_expand_kernel, constants | more, 4, _TYPES)
        for activation in (-1, 0):
            more = {"N": 4096, "OWN": _OWN, "TOGETHER": 4 if tile == 16 else 1}
            more["ACTIVATION"] = activation
            found[f"outputs {tile} {activation}"] = resources(
                _outputs_kernel, _TYPES, constants | more, _OUT_WARPS, maxnreg=_REGISTERS
            )
    return found
