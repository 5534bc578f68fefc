"""Direct launches on a GPU: the bits of Triton's own, on every stream, in graphs too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.jit import JITFunction, KernelInterface

from quire.backends.triton.direct_launch import KNOWS_LAUNCHERS, jit
from quire.models.decoder import Decoder
from tests.gpu.support import DEVICE, Answers, assert_same, mixed_jobs, run_jobs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not KNOWS_LAUNCHERS, reason="another version of Triton"),
]


@jit(do_not_specialize=["free"])
def _scale_kernel(x, out, number, free, factor, BLOCK: tl.constexpr):  # noqa: N803
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + place, tl.load(x + place) * factor + number + free)


@pytest.fixture
def ordinary(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Any]], Any]:
    """Calls a function while launches go Triton's way."""
    plain = KernelInterface.__getitem__

    def launch(kernel: Any, grid: Any) -> Any:
        return plain(kernel, grid)

    def call(function: Callable[[], Any]) -> Any:
        with monkeypatch.context() as changes:
            changes.setattr(KernelInterface, "__getitem__", launch)
            return function()

    return call


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The kernels that were launched Triton's way, from now on."""
    found: list[object] = []
    plain = JITFunction.run

    def run(self: Any, *arguments: Any, **options: Any) -> Any:
        found.append(self)
        return plain(self, *arguments, **options)

    monkeypatch.setattr(JITFunction, "run", run)
    return found


def scaled(x: Tensor, number: int, free: int, factor: float, block: int = 64) -> Tensor:
    out = torch.full_like(x, -1)
    _scale_kernel[(2,)](
        x=x, out=out, number=number, free=free, factor=factor, BLOCK=block, num_warps=1
    )
    return out


def test_each_form_computes_what_triton_does(
    ordinary: Callable[[Callable[[], Any]], Any], runs: list[object]
) -> None:
    whole = torch.arange(1024, device=DEVICE) % 50
    for dtype in (torch.float32, torch.bfloat16, torch.int32):
        x = whole.to(dtype)
        for number in (1, 16, 17, -3, 2**31 - 1):
            for free in (1, 16, 2**31 - 1):
                for some in (x[:128], x[1:129]):
                    case = some, number, free, 2.0
                    expected = ordinary(partial(scaled, *case))
                    assert torch.equal(scaled(*case), expected)
                    before = len(runs)
                    assert torch.equal(scaled(*case), expected)
                    assert len(runs) == before


def test_a_direct_launch_is_on_the_current_stream_and_in_graphs(runs: list[object]) -> None:
    x = torch.arange(128, device=DEVICE, dtype=torch.float32)
    scaled(x, 5, 7, 3.0)
    torch.cuda.synchronize()
    other = torch.cuda.Stream()
    before = len(runs)
    with torch.cuda.stream(other):
        torch.cuda._sleep(20_000_000)
        x.add_(1)
        found = scaled(x, 5, 7, 3.0)
    other.synchronize()
    assert torch.equal(found, x * 3 + 12)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = scaled(x, 5, 7, 3.0)
    for _ in range(2):
        x.add_(1)
        graph.replay()
        assert torch.equal(out, x * 3 + 12)
    assert len(runs) == before


def test_a_profiler_is_told_of_launches() -> None:
    x = torch.arange(128, device=DEVICE, dtype=torch.float32)
    scaled(x, 5, 7, 3.0)
    told: list[object] = []
    hook = triton.knobs.runtime.launch_enter_hook
    hook.add(told.append)
    try:
        scaled(x, 5, 7, 3.0)
    finally:
        hook.remove(told.append)
    scaled(x, 5, 7, 3.0)
    assert len(told) == 1


def test_an_engine_without_graphs_answers_as_with_launches_of_triton(
    qwen: Decoder, ordinary: Callable[[Callable[[], Any]], Any], runs: list[object]
) -> None:
    jobs = mixed_jobs(48, qwen.spec.vocab_size, seed=3)

    def answered() -> Answers:
        return run_jobs(qwen, jobs, cuda_graphs=False, max_batched_tokens=300)

    expected = ordinary(answered)
    by_triton = len(runs)
    assert_same(answered(), expected, range(48))
    runs.clear()
    assert_same(answered(), expected, range(48))  # at other addresses
    assert len(runs) < by_triton / 50, Counter(str(kernel) for kernel in runs)
