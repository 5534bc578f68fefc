"""Compiles the kernels of latent attention for an H200, which needs none. Called by
`compile_kernels`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon import language as gl

from quire.backends.triton import prompt_latent, single_latent
from quire.backends.triton import small_batch_latent as small
from quire.backends.triton.latent import (
    _MANY_QUERIES,
    _heads_kernel,
    _latent_cache_kernel,
    _latent_query_kernel,
    heads_tile,
)
from quire.backends.triton.latent_attention import _latent_kernel
from tests.kernels.triton.compile_small_batches import resources, stack_size
from tests.long_runs import IS_LONG

_TYPES = {
    **dict.fromkeys(("query", "out", "keys", "x", "weight"), "*bf16"),
    **dict.fromkeys(("block_tables", "work", "failed", "arrived"), "*i32"),
    **dict.fromkeys(("stored_output", "stored_state"), "*fp32"),
    **dict.fromkeys(("scale", "value_scale"), "fp32"),
}
_LATENT = {
    "RANK": 512, "ROPE": 64, "RANK_PAD": 512, "ROPE_PAD": 64, "BLOCK_SIZE": 16, "TILE_ROWS": 64,
    "ROWS": 64, "KEYS": 64, "TILES": 8, "ONES": 16, "STAGES": 2, "OWN_SLOTS": 512, "KEPT": 5,
    "WIDE": False, "PDL": True, "AGAIN": False,
}  # fmt: skip


def compiled(
    kernel: Any, constants: dict[str, Any], num_warps: int, types: dict[str, str], **options: int
) -> dict[str, int]:
    """Bytes of shared memory, and of registers that did not fit."""
    names = kernel.arg_names
    signature = {
        name: "constexpr" if name in constants else types.get(name, "i32") for name in names
    }
    aligned = [
        i
        for i, name in enumerate(names)
        if signature[name].startswith("*") or name.endswith("stride")
    ]
    source = ASTSource(
        kernel,
        signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i in aligned},
    )
    flags = {"num_warps": num_warps, "enable_fp_fusion": False, "launch_pdl": True, **options}
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=flags)
    # Where threads have 4 neighbours of 16 bits, a product does not take 16 neighbours at a time.
    assert "kWidth = 4" not in made.asm["ttgir"]
    return {"shared": made.metadata.shared, "stack": stack_size(made.asm["cubin"])}


def _tiles(rows: int) -> str:
    """The type of a descriptor of tiles of so many rows."""
    layout = gl.NVMMASharedLayout.get_default_for([rows, 64], gl.bfloat16)
    return f"tensordesc<bf16[{rows}, 64],{layout!r}>"


def prompt_latent_kernels() -> dict[str, dict[str, int]]:
    found = {}
    for half, block_size in ((256, 16), (256, 64), (128, 32)) if IS_LONG else ((128, 32),):
        constants = {"HEADS": 20, "HALF": half, "ROPE": 64, "BLOCK_SIZE": block_size, "PDL": True}
        types = _TYPES | {"query": _tiles(64), "keys": _tiles(block_size), "stored": "*fp32"}
        found[f"prompts {half} {block_size}"] = resources(
            prompt_latent._prompt_latent_kernel,
            types,
            constants,
            4,
            maxnreg=prompt_latent._REGISTERS,
        )
    return found


def small_latent_kernels() -> dict[str, dict[str, int]]:
    found = {}
    cases = (32, 20, "*fp8e4nv"), (32, 20, "*bf16"), (16, 16, "*bf16")
    for rows, heads, cache in cases if IS_LONG else cases[:1]:
        constants = {"HEADS": heads, "RANK": 512, "ROPE": 64, "BLOCK_SIZE": 16, "ROWS": rows}
        constants |= {"CHUNK": small._CHUNK, "SPLIT": 512, "WIDE": False, "PDL": True}
        of_scores = constants | {"PIECE": small._PIECE, "WARPS": small._SCORE_WARPS}
        of_values = constants | {"COLUMNS": small._COLUMNS, "WARPS": small._VALUE_WARPS}
        of_values |= {"KEYS": 64, "SCALED": cache != "*bf16"}
        types = _TYPES | {"keys": cache, "scores": "*fp32", "highest": "*fp32"}
        found[f"scores {heads} {cache}"] = resources(
            small._small_scores_kernel, types, of_scores, small._SCORE_WARPS
        )
        found[f"values {heads} {cache}"] = resources(
            small._small_values_kernel,
            types,
            of_values,
            small._VALUE_WARPS,
            maxnreg=small._REGISTERS,
        )
    return found


def single_latent_kernels() -> dict[str, dict[str, int]]:
    found = {}
    cases = (20, "*bf16"), (20, "*fp8e4nv"), (32, "*bf16"), (16, "*bf16")
    for heads, cache in cases if IS_LONG else cases[:1]:
        constants = {"HEADS": heads, "RANK": 512, "ROPE": 64, "BLOCK_SIZE": 16, "KEYS": 64}
        constants |= {"ROWS": 16 if heads <= 16 else 32, "SPLIT": 512, "OWN_SLOTS": 512}
        constants |= {"PIECE": single_latent._PIECE, "SCALED": cache != "*bf16", "WIDE": False}
        constants |= {"PDL": True, "WARPS": single_latent._WARPS}
        found[f"single {heads} {cache}"] = resources(
            single_latent._single_latent_kernel,
            _TYPES | {"keys": cache},
            constants,
            single_latent._WARPS,
            maxnreg=single_latent._REGISTERS,
        )
    return found


def latent_kernels() -> dict[str, dict[str, int]]:
    """What each takes; in the short form one of those for few sequences, as others compile slowly."""
    found = small_latent_kernels() | single_latent_kernels() | prompt_latent_kernels()
    if not IS_LONG:
        return found
    for heads, cache in ((20, "*bf16"), (128, "*bf16"), (20, "*fp8e4nv")):
        constants = _LATENT | {"HEADS": heads, "SCALED": cache != "*bf16"}
        constants |= {"AGAIN": heads == 128}
        types = _TYPES | {"keys": cache}
        found[f"latent {heads} {cache}"] = compiled(_latent_kernel, constants, 8, types)
    for rows, inner in ((16, 192), (16, 512), (64, 192), (1000, 192)):
        tile = heads_tile(rows, torch.bfloat16)
        constants = {"OUT_STRIDE": 10240, "OUT_HEAD_STRIDE": 512, "N": 512, "K": inner, "PDL": True}
        constants |= {"BLOCK_M": tile.rows, "BLOCK_N": tile.outputs, "BLOCK_K": tile.inner}
        found[f"heads {rows} {inner}"] = compiled(
            _heads_kernel, constants, tile.warps, _TYPES, num_stages=tile.stages
        )
    for scaled, cache in ((False, "*bf16"), (True, "*fp8e4nv")):
        constants = {"HEADS": 20, "RANK": 512, "ROPE": 64, "RANK_PAD": 512, "HALF_PAD": 32}
        constants |= {"EACH": 4, "BLOCK_SIZE": 16, "SCALED": scaled, "PDL": True}
        types = dict.fromkeys(("absorbed", "rotated", "latent", "norm", "query"), "*bf16")
        types |= {"positions": "*i64", "slots": "*i64", "cos_sin": "*fp32", "keys": cache}
        types |= {"eps": "fp32", "key_scale": "fp32"}
        for copied in (True, False):
            found[f"to cache {cache} {copied}"] = compiled(
                _latent_cache_kernel, constants | {"COPIED": copied}, 4, types
            )
        types |= {"plain": "*bf16", "weight": "*bf16"}
        for each, tile in ((4, heads_tile(16, torch.bfloat16)), (32, _MANY_QUERIES)):
            constants |= {"NOPE": 192, "EACH": each, "BLOCK_M": tile.rows}
            constants |= {"BLOCK_N": tile.outputs, "BLOCK_K": tile.inner}
            found[f"queries {cache} {each}"] = compiled(
                _latent_query_kernel, constants, tile.warps, types, num_stages=tile.stages
            )
    return found
