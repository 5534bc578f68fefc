"""Compiles the kernels of adapters for an H200, which needs none. Called by `compile_kernels`."""

from __future__ import annotations

from quire.backends.triton import adapter_outputs
from quire.backends.triton.adapter_table import SUMS_STRIDE
from quire.backends.triton.adapters import _FEW_ROWS, _MORE_ROWS, _expand_kernel, _shrink_kernel
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
            "STRIDE": SUMS_STRIDE,
            "PDL": True,
        }
        blocks = _FEW_ROWS if tile == 16 else _MORE_ROWS
        more = {"K": 4096, "RANKS": blocks.ranks, "BLOCK_K": blocks.inputs, "SEGMENT": 1024}
        more |= {"SEGMENTS": 1 if tile == 16 else 4, "IS_BESIDE": tile == 16}
        found[f"shrink {tile}"] = compiled(
            _shrink_kernel,
            constants | more,
            blocks.num_warps,
            _TYPES,
            num_stages=blocks.num_stages,
        )
        more = {"BLOCK_N": 128, "RANK_TILE": 16, "PARTS": 4 if tile == 16 else 1}
        found[f"expand {tile}"] = compiled(_expand_kernel, constants | more, 4, _TYPES)
        for activation in (-1, 0):
            more = {"N": 4096, "AT_ONCE": 4 if tile == 16 else 1, "ACTIVATION": activation}
            found[f"outputs {tile} {activation}"] = resources(
                adapter_outputs._outputs_kernel,
                _TYPES,
                constants | more,
                adapter_outputs._WARPS,
                maxnreg=adapter_outputs._REGISTERS,
            )
    return found
