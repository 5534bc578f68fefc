"""Compiles the kernels of layers with a state for an H200, which needs no GPU. Called by
`compile_kernels`.
"""

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from quire.backends.triton.convolution import _convolve_kernel
from quire.backends.triton.gated_norm import _gated_norm_kernel
from quire.backends.triton.recurrent import FORMS, _recur_kernel
from quire.backends.triton.recurrent_scores import scores_kernel
from tests.kernels.triton.compile_small_batches import stack_size
from tests.long_runs import IS_LONG

_TYPES = {
    **dict.fromkeys(("x", "mixed", "gates", "gate", "out", "inputs"), "*bf16"),
    **dict.fromkeys(("log_rate", "time_bias", "skip", "queries", "scores"), "*fp32"),
    **dict.fromkeys(("keys", "changes", "decays", "weight", "bias"), "*fp32"),
    **dict.fromkeys(("tail_places", "state_places"), "*i64"),
    **dict.fromkeys(("starts", "tables", "positions", "block_tables", "state_tables"), "*i32"),
    **dict.fromkeys(("least_step", "largest_step", "beta_scale", "eps"), "fp32"),
}
_DELTA = {"KEY_HEADS": 16, "VALUE_HEADS": 32, "KEY_DIM": 128, "VALUE_DIM": 128, "DELTA": True}
"""Qwen3.5's, of 9B and of 35B with 3B active."""
_MAMBA = {"KEY_HEADS": 1, "VALUE_HEADS": 48, "KEY_DIM": 128, "VALUE_DIM": 64, "DELTA": False}
"""Granite 4's."""


def compiled(
    kernel: Any,
    constants: dict[str, Any],
    num_warps: int = 4,
    types: dict[str, str] = _TYPES,
    **options: Any,
) -> Any:
    names = kernel.arg_names
    constants = {name: value for name, value in constants.items() if name in names}
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
    options = {"num_warps": num_warps, "enable_fp_fusion": False, "launch_pdl": True, **options}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def _resources(done: Any) -> dict[str, int]:
    # All products are of one instruction, whose tiles are narrow enough for it.
    assert "versionMajor = 3" not in done.asm["ttgir"]
    return {"shared": done.metadata.shared, "stack": stack_size(done.asm["cubin"])}


def recurrent_kernels() -> dict[str, dict[str, int]]:
    """Of each: bytes of shared memory, and of registers that did not fit."""
    found = {}
    common = {
        "BLOCK_SIZE": 16,
        "TAPS": 4,
        "PDL": True,
        "INTERPRETED": False,
        "ALIGNMENT": 16,
    }
    for name, shape in {"delta": _DELTA, **({"mamba": _MAMBA} if IS_LONG else {})}.items():
        channels = (
            2 * shape["KEY_HEADS"] * shape["KEY_DIM"] + shape["VALUE_HEADS"] * shape["VALUE_DIM"]
        )
        shared = common | shape | {"PIECES": shape["KEY_DIM"] // 32, "CHANNELS": channels}
        shared |= {"SKIP": not shape["DELTA"], "HEADS_PAD": 64}
        shared |= {"BIAS": False, "SILU": True, "TAIL": True, "BLOCK": 512, "IN_WORDS": True}
        cases = {
            "scores": (scores_kernel, {"ROWS": 1}),
            "convolution": (_convolve_kernel, {"ROWS": 1, "STRETCHES": 0}),
        }
        for columns in (32, 64) if IS_LONG else (64,):
            for single in (True, False) if IS_LONG else (True,):
                more = {"COLUMNS": columns, "SINGLE": single, "STAGES": FORMS[columns][0]}
                cases[f"recurrence {columns} {single}"] = _recur_kernel, more
        if IS_LONG:
            cases["scores of prompts"] = scores_kernel, {"ROWS": 16}
            many = {"ROWS": 8, "STRETCHES": 2, "BLOCK": 1024}
            cases["convolution of prompts"] = _convolve_kernel, many
        for case, (kernel, more) in cases.items():
            options: dict[str, Any] = {}
            if kernel is _recur_kernel:
                options = {"num_stages": 1, "maxnreg": FORMS[more["COLUMNS"]][1]}
            elif kernel is _convolve_kernel:
                options = {"types": _TYPES | {"weight": "*bf16"}}
            done = compiled(kernel, shared | more, **options)
            found[f"{name} {case}"] = _resources(done)
    norm = {"SIZE": 4096, "GROUP": 128, "WEIGHT_SIZE": 128, "GROUPS": 8, "BLOCK": 128}
    norm |= {"NORM": True, "GATE_FIRST": False, "PDL": True}
    done = compiled(_gated_norm_kernel, norm)
    found["norm"] = _resources(done)
    return found
