"""Compiles the kernels for small batches and prompts for an H200, which needs no GPU. Called by
`compile_kernels`.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from quire.backends.triton.expert_layouts import BYTES, MINIMA, ZEROS
from quire.backends.triton.few_rows_int4 import _few_rows_kernel, chunks_of
from quire.backends.triton.prompt_attention import _REGISTERS, _prompt_kernel
from quire.backends.triton.prompt_merge import LARGE_SHARED
from quire.backends.triton.shapes import next_power_of_2
from quire.backends.triton.single_row_linear import _single_row_kernel
from quire.backends.triton.small_batch_attention import _small_batch_kernel
from quire.backends.triton.streamed_experts import (
    BLOCKS,
    INTEGER_BLOCKS,
    _experts_kernel,
    blocks_of,
    pieces_together,
)
from quire.backends.triton.streamed_linear import _int4_kernel, expanding_asm
from tests.long_runs import IS_LONG

ATTENTION_TYPES = {
    **dict.fromkeys(("query", "out", "keys", "values"), "*bf16"),
    **dict.fromkeys(("block_tables", "work", "arrived", "failed"), "*i32"),
    **dict.fromkeys(("partial_output", "partial_state", "sinks", "slopes", "stored"), "*fp32"),
    **dict.fromkeys(("scale", "value_scale", "cap"), "fp32"),
}
BOX = f"tensordesc<bf16[16, 64],{gl.NVMMASharedLayout.get_default_for([16, 64], gl.bfloat16)!r}>"
PROMPT_TYPES = ATTENTION_TYPES | {"keys": BOX, "values": BOX}
FOUR_BITS_TYPES = {
    **dict.fromkeys(("x", "bias", "out"), "*bf16"),
    **dict.fromkeys(("codes", "scales"), "*i32"),
}
EXPERTS_TYPES = {
    **dict.fromkeys(("x", "bias", "out"), "*bf16"),
    **dict.fromkeys(("codes", "tile_experts", "tile_counts", "order"), "*i32"),
}
PRODUCT_TYPES = dict.fromkeys(("x", "weight", "second", "bias", "out", "second_out"), "*bf16")


def resources(
    kernel: Any, types: dict[str, str], constants: dict[str, Any], num_warps: int, **options: int
) -> dict[str, int]:
    """Bytes of shared memory, and of registers that did not fit, of a kernel compiled so."""
    names = kernel.arg_names
    signature = {
        name: "constexpr" if name in constants else types.get(name, "i32") for name in names
    }
    aligned = [
        i
        for i, name in enumerate(names)
        if signature[name].startswith("*") or name.endswith("stride")
    ]
    source = GluonASTSource(
        kernel,
        signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i in aligned},
    )
    compiled = triton.compile(
        source,
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": num_warps, "enable_fp_fusion": False, "launch_pdl": True, **options},
    )
    return {"shared": compiled.metadata.shared, "stack": stack_size(compiled.asm["cubin"])}


def stack_size(binary: bytes) -> int:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        report = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    return int(re.findall(r"STACK:(\d+)", report)[0])


def small_batch_kernels() -> dict[str, dict[str, int]]:
    """What each takes; in the short form, of two variants the one that does more."""
    found = {}
    first = 0 if IS_LONG else 1
    for head_dim, group, window, wide in ((128, 2, False, False), (64, 16, True, True))[first:]:
        constants = {"GROUP": group, "D": head_dim, "BLOCK_SIZE": 16, "KEYS": 64, "SPLIT": 512}
        constants |= {"WINDOW": window, "SINKS": window, "WIDE": wide, "PDL": True}
        found[f"attention {head_dim}"] = resources(
            _small_batch_kernel, ATTENTION_TYPES, constants, 8
        )
    prompts = (64, 128, True), (128, 64, False), (128, 128, True), (256, 64, False), (256, 64, True)
    for head_dim, keys, window in prompts if IS_LONG else prompts[2:4]:
        constants = {"GROUP": 4, "D": head_dim, "BLOCK_SIZE": 16, "ROWS": 128, "KEYS": keys}
        constants |= {"SHARED": LARGE_SHARED if head_dim > 128 else head_dim}
        constants |= {"TILES": 512 // keys, "STAGES": 2, "WINDOW": window, "PDL": True}
        constants |= {"SINKS": head_dim == 64}
        found[f"prompt {head_dim} {keys} {window}"] = resources(
            _prompt_kernel, PROMPT_TYPES, constants, 4, maxnreg=_REGISTERS
        )
    for inner, silu_mul, number in ((3072, False, "bf16"), (12288, True, "fp8e4nv"))[first:]:
        constants = {
            "K": inner,
            "PADDED": next_power_of_2(inner),
            "HAS_BIAS": True,
            "SILU_MUL": silu_mul,
            "PAIR": not silu_mul,
            "OUT": 32,
            "STAGES": 8 if silu_mul else 6,
        }
        constants |= {"TILE": 512 if number != "bf16" else 256, "SHARES_INPUT": False, "PDL": True}
        types = PRODUCT_TYPES | {"scales": "*fp32"}
        types |= dict.fromkeys(("weight", "second"), f"*{number}")
        found[f"product {inner}"] = resources(_single_row_kernel, types, constants, 4)
    low, high = (expanding_asm(torch.bfloat16, shift, has_minimum=True) for shift in (0, 4))
    for group, rows, ahead, warps in ((128, 8, 8, 4), (32, 128, 4, 8))[first:]:
        constants = {
            "K": 4096,
            "GROUP": group,
            "HAS_BIAS": True,
            "LOW": low,
            "HIGH": high,
            "BLOCK_M": rows,
        }
        constants |= {"AHEAD": ahead, "CHUNK": 1, "STAGES": 4, "WARPS": warps, "PDL": True}
        found[f"four bits {group}"] = resources(_int4_kernel, FOUR_BITS_TYPES, constants, warps)
    for group in (128, 32)[first:]:
        constants = {"K": 4096, "GROUP": group, "HAS_BIAS": True, "LOW": low, "HIGH": high}
        chunks = chunks_of(32)
        constants |= {
            "BLOCK_M": chunks.rows,
            "CHUNK": chunks.tiles,
            "STAGES": chunks.stages,
            "REPEATED": group == 32,
            "PDL": True,
        }
        found[f"four bits, few rows {group}"] = resources(
            _few_rows_kernel, FOUR_BITS_TYPES, constants, 4
        )
    cases = [(0, 32, width) for width in (BLOCKS if IS_LONG else (128,))]
    kinds = (ZEROS, 128), (ZEROS, 32), (MINIMA, 32), (BYTES, 32), (BYTES, 16)
    cases += [(*kind, width) for kind in kinds for width in INTEGER_BLOCKS][:: 1 if IS_LONG else 25]
    for kind, group, width in cases:
        blocks = blocks_of(kind, width)
        inner, outer = (2048, 768) if kind else (2880, 2880)
        constants = {"INNER": inner, "OUTER": outer, "TOP_K": 4, "GATED": True}
        constants |= {"ACTIVATION": 2, "BIAS": True, "CODING": kind, "GROUP": group}
        constants |= {"LISTED": 1, "BLOCK_M": width, "STAGES": blocks.stages, "PDL": True}
        constants |= {"EACH": pieces_together(blocks, inner // 64), "WARPS": blocks.warps}
        constants |= {"IN_REGISTERS": blocks.in_registers, "ASYNC": blocks.is_async}
        limit = {} if blocks.registers is None else {"maxnreg": blocks.registers}
        name = f"experts {width}" + (f", kind {kind}, groups of {group}" if kind else "")
        found[name] = resources(_experts_kernel, EXPERTS_TYPES, constants, blocks.warps, **limit)
    return found
