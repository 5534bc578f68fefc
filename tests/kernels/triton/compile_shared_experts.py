"""Compiles the kernels of shared experts, and of routers of many rows, for an H200, which needs none.
Called by `compile_kernels`.
"""

from __future__ import annotations

from quire.backends.triton import router_rows
from quire.backends.triton.linear_pair import _pair_kernel
from quire.backends.triton.tile_product import _product_kernel
from tests.kernels.triton import compile_recurrent
from tests.kernels.triton.compile_small_batches import resources, stack_size
from tests.long_runs import IS_LONG

_PAIR = ("x", "first", "first_bias", "second", "first_out", "second_out")
TYPES = {
    **dict.fromkeys((*_PAIR, "weight", "shared", "bias", "out"), "*bf16"),
    **dict.fromkeys(("x_scales", "scales", "others"), "*bf16"),
    **dict.fromkeys(("tile_experts", "tile_counts", "order"), "*i32"),
}


def shared_experts_kernels() -> dict[str, dict[str, int]]:
    """Qwen3.5-35B-A3B's: bytes of shared memory, and of registers that did not fit."""
    router = {"FIRST": 256, "SECOND": 1, "K": 2048, "BIAS": False, "PDL": True}
    router |= {"BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": 256}
    cases = {"router": (_pair_kernel, router, 4)}
    plain = dict.fromkeys(("KIND", "ACTIVATION", "GROUP", "ZERO", "OTHER"), 0)
    plain |= dict.fromkeys(("BIAS", "NIBBLES", "FP4"), False)
    plain |= {"EXPERTS": 256, "TOP_K": 9, "SHARED": True, "BLOCK": 64, "LINES": 16, "PDL": True}
    for is_gated in (True, False) if IS_LONG else (False,):
        sides = {"INNER": 2048, "OUTER": 512} if is_gated else {"INNER": 512, "OUTER": 2048}
        for listed, width in ((0, 16), (1, 32)) if IS_LONG else ((1, 32),):
            more = {"GATED": is_gated, "LISTED": listed, "LOOPED": listed == 1 and not is_gated}
            more |= sides | {"TILE": width, "BLOCK_K": 128}
            stages = 5 if width == 16 else 4
            cases[f"product {is_gated} {width}"] = _product_kernel, plain | more, stages
    found = {}
    for name, (kernel, constants, stages) in cases.items():
        done = compile_recurrent.compiled(kernel, constants, types=TYPES, num_stages=stages)
        # weights and rows come 16 bytes at a time
        assert "cp.async.cg.shared.global" in done.asm["ptx"]
        found[name] = {
            "shared": done.metadata.shared,
            "stack": stack_size(done.asm["cubin"]),
        }
    return found


def router_rows_kernel() -> dict[str, int]:
    """The same model's, of prompts."""
    router = {"K": 2048, "HAS_BIAS": True, "OUT": 8, "BLOCK": 2048, "PDL": True}
    types = TYPES | dict.fromkeys(("weight", "bias", "out"), "*fp32")
    return resources(router_rows._router_rows_kernel, types, router, 4)
