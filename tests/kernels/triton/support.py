"""What the tests of the Triton kernels share: they run on the GPU if there is one, else in the
interpreter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import settings
from torch import Tensor

from tests.quick_interpreter import quicken

pytest.importorskip("triton", reason="Triton is not installed")

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    quicken()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
MARKS = [pytest.mark.gpu] if ON_GPU else []
"""For `pytestmark`, so that `pytest -m gpu` takes these tests along."""

# The interpreter cuts numbers off where the GPU rounds them to bfloat16.
DTYPES = (
    [torch.float32, torch.float16, torch.bfloat16] if ON_GPU else [torch.float32, torch.float16]
)
ROW_COUNTS = (1, 2, 3, 8, 16, 17, 64, 255, 256, 1000, 2048) if ON_GPU else (1, 2, 3, 8)
NAN = float("nan")

drawn = settings(deadline=None, max_examples=60 if ON_GPU else 5)


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    numbers = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), device="cpu")
    return numbers.to(dtype).to(DEVICE)


def assert_close(
    got: Tensor, truth: Tensor, roundings: int = 1, size: Tensor | None = None
) -> None:
    """Each number within `roundings` units in the last place of the float64 truth, plus what
    float32 arithmetic may lose. `size` is the magnitude behind each number, where that is more than
    the number itself.
    """
    unit = torch.finfo(got.dtype).eps
    allowed = (
        (truth.abs() if size is None else size) * unit * roundings + truth.abs().max() * 1e-6 + 1e-6
    )
    excess = ((got.double() - truth).abs() - allowed).max().item()
    assert excess <= 0, f"{excess} above the tolerance"  # NaN fails too


def assert_rows_alone(
    function: Callable[..., Tensor | tuple[Tensor, ...]],
    inputs: Sequence[Tensor],
    counts: Sequence[int] = ROW_COUNTS,
) -> None:
    """A row of the outputs has the same bits for any number of rows, at any place, beside any
    neighbours.

    `inputs` have as many rows as the largest of `counts`.
    """

    def outputs(rows: Sequence[Tensor]) -> tuple[Tensor, ...]:
        found = function(*rows)
        return (found,) if isinstance(found, Tensor) else found

    whole = outputs(inputs)
    last = inputs[0].shape[0]
    for count in counts:
        for start in {0, last - count}:
            part = outputs([x[start : start + count] for x in inputs])
            for got, expected in zip(part, whole, strict=True):
                assert torch.equal(got, expected[start : start + count]), (count, start)
    poisoned = [x.clone() for x in inputs]
    for x in poisoned:
        if x.is_floating_point():
            x[1::2] = NAN
    for got, expected in zip(outputs(poisoned), whole, strict=True):
        assert torch.equal(got[::2], expected[::2])


def in_graph(function: Callable[[], Tensor]) -> Tensor:
    """What the function returns when it is captured in a CUDA graph and replayed; it must not wait
    for the host.
    """
    function()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = function()
    out.zero_()
    graph.replay()
    return out
