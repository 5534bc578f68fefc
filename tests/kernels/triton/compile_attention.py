"""Compiles attention for several kinds of GPU, which needs none. Called by `compile_kernels`."""

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from quire.backends.triton.attention import _decode_kernel, _prefill_kernel, fitting_tiles
from tests.kernels.triton.compile_small_batches import ATTENTION_TYPES
from tests.long_runs import IS_LONG

LIMITS = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10}
"""By compute capability: what one program can have."""


def shared_memory(
    kernel: Any, constants: dict[str, Any], capability: int, num_warps: int, cache: str = "*bf16"
) -> int:
    names, types = kernel.arg_names, ATTENTION_TYPES | {"keys": cache, "values": cache}
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
    options = {"num_warps": num_warps, "enable_fp_fusion": False}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    # Where threads have 4 neighbours of 16 bits, a product does not take 16 neighbours at a time,
    # as all others do.
    assert "kWidth = 4" not in compiled.asm["ttgir"]
    return int(compiled.metadata.shared)


def attention_kernels() -> dict[str, tuple[int, int]]:
    """The shared memory each takes, and what there is."""
    found = {}
    cases = [*((capability, 256) for capability in LIMITS), (86, 128)] if IS_LONG else [(86, 256)]
    fp8 = [(89, 256), (90, 128), (90, 256)] if IS_LONG else []
    for capability, head_dim, cache in [
        *((*case, "*bf16") for case in cases),
        *((*case, "*i16") for case in fp8),
    ]:
        keys, rows = fitting_tiles(2 * head_dim, LIMITS[capability])
        flags = dict.fromkeys(("WINDOW", "CAP", "SLOPES", "SINKS", "SCALED", "WIDE"), True)
        constants = {
            "GROUP": 4,
            "D": head_dim,
            "D_PAD": head_dim,
            "BLOCK_SIZE": 16,
            "ROWS": 16,
            "KEYS": keys,
        }
        constants |= {"TILES": 512 // keys, "ONES": 16, "STAGES": 2, "PDL": False} | flags
        used = shared_memory(_decode_kernel, constants, capability, 4, cache)
        found[f"decode {capability} {head_dim} {cache}"] = used, LIMITS[capability]
        constants |= {"ROWS": rows, "PARTS": 128 // rows, "AGAIN": True}
        used = shared_memory(
            _prefill_kernel, constants, capability, 4 if head_dim <= 128 else 8, cache
        )
        found[f"prefill {capability} {head_dim} {cache}"] = used, LIMITS[capability]
    return found
