"""Launches of Triton kernels, read from the sources: most can't run without a GPU, and a launch has
up to thirty arguments, of which Triton would take one for another without a word.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import quire

FOLDER = Path(quire.__file__).parent / "backends" / "triton"
PACKAGE = "quire.backends.triton."
OPTIONS = {"num_warps", "num_stages", "maxnreg"}
FILES = sorted(path.name for path in FOLDER.glob("*.py"))


def kernels_and_launches(source: str) -> tuple[dict[str, set[str]], list[ast.Call]]:
    """The parameters of each function, also of those from another file here, and the calls of what
    is named `..._kernel[grid]`.
    """
    nodes = list(ast.walk(ast.parse(source)))
    parameters = {
        node.name: {arg.arg for arg in node.args.args}
        for node in nodes
        if isinstance(node, ast.FunctionDef)
    }
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith(PACKAGE):
            names = [one.name for one in node.names if one.name.endswith("_kernel")]
            if names:
                file = FOLDER / f"{str(node.module).removeprefix(PACKAGE)}.py"
                others, _ = kernels_and_launches(file.read_text())
                parameters |= {name: others[name] for name in names}
    calls = [
        node
        for node in nodes
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript)
    ]
    return parameters, [call for call in calls if _name(call).endswith("_kernel")]


def _name(call: ast.Call) -> str:
    assert isinstance(call.func, ast.Subscript)
    return call.func.value.id if isinstance(call.func.value, ast.Name) else ""


def wrong_arguments(source: str) -> list[str]:
    """What a launch gives by position, what its kernel does not have, and what it leaves out."""
    parameters, launches = kernels_and_launches(source)
    found = []
    for call in launches:
        name = _name(call)
        given = {keyword.arg for keyword in call.keywords if keyword.arg is not None} - OPTIONS
        unpacked = [ast.unparse(keyword.value) for keyword in call.keywords if keyword.arg is None]
        takes_more = any(one not in ("LAUNCH", "ROUND_ALWAYS") for one in unpacked)
        missing = set() if takes_more else parameters[name] - given
        found += [f"{name}: {one}" for one in (given - parameters[name]) | missing]
        found += [f"{name}: by position {ast.unparse(one)}" for one in call.args]
    return found


@pytest.mark.parametrize("name", FILES)
def test_launches_give_each_argument_by_its_name(name: str) -> None:
    assert wrong_arguments((FOLDER / name).read_text()) == []


def test_launches_are_found() -> None:
    counts = {name: len(kernels_and_launches((FOLDER / name).read_text())[1]) for name in FILES}
    assert {name: count for name, count in counts.items() if count} == {
        "adapter_outputs.py": 1,
        "adapters.py": 2,
        "attention.py": 2,
        "convolution.py": 1,
        "few_rows_int4.py": 1,
        "filters.py": 4,
        "gated_norm.py": 1,
        "grouping.py": 4,
        "heads.py": 1,
        "inputs.py": 1,
        "latent.py": 3,
        "latent_attention.py": 1,
        "linear.py": 1,
        "linear_pair.py": 1,
        "moe.py": 2,
        "prompt_attention.py": 1,
        "prompt_latent.py": 1,
        "recurrent.py": 2,
        "repeats.py": 1,
        "router_linear.py": 1,
        "router_rows.py": 1,
        "rowwise.py": 1,
        "sampling.py": 2,
        "logprobs.py": 1,
        "single_latent.py": 1,
        "single_row_linear.py": 2,
        "small_batch_attention.py": 1,
        "small_batch_latent.py": 2,
        "streamed_experts.py": 1,
        "streamed_linear.py": 2,
        "tile_product.py": 3,
    }


def test_a_wrong_launch_is_noticed() -> None:
    kernel = "def _a_kernel(x, y): ...\n"
    assert wrong_arguments(kernel + "_a_kernel[(1,)](x=1, y=2, num_warps=4, **LAUNCH)") == []
    assert wrong_arguments(kernel + "_a_kernel[(1,)](1, y=2, x=1)") == ["_a_kernel: by position 1"]
    assert wrong_arguments(kernel + "_a_kernel[(1,)](x=1)") == ["_a_kernel: y"]
    assert wrong_arguments(kernel + "_a_kernel[(1,)](x=1, y=2, z=3)") == ["_a_kernel: z"]
