"""Kernels are compiled at the start, many at once, and none while requests are served."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from quire.process import compile_together as module
from quire.sampling_params import SamplingParams
from tests.gpu.support import DEVICE, GpuEngine, Job, decoder_of, shape_of

pytestmark = pytest.mark.gpu


@triton.jit
def _add_kernel(x, amount: tl.constexpr):
    tl.store(x, tl.load(x) + amount)


@pytest.fixture
def compiled() -> Iterator[list[str]]:
    """The names of kernels that are compiled, or read from the disk, from now on."""
    names: list[str] = []
    with triton.knobs.compilation.scope():
        triton.knobs.compilation.listener = lambda src, **_: names.append(src.name)
        yield names


def test_kernels_compiled_together_are_not_run_and_are_there_when_they_are(
    monkeypatch: pytest.MonkeyPatch, compiled: list[str]
) -> None:
    monkeypatch.setattr(module, "_may_miss", {"kernels"})
    amounts = random.sample(range(1_000_000_000), 4)  # so that nobody has compiled them before
    x = torch.zeros(1, dtype=torch.int64, device=DEVICE)

    def add_all() -> None:
        for amount in amounts:
            _add_kernel[(1,)](x, amount)

    module.compile_together(add_all)
    assert x.item() == 0
    assert module._may_miss
    before = len(compiled)
    add_all()
    assert x.item() == sum(amounts)
    assert len(compiled) == before
    module.compile_together(lambda: None)
    assert not module._may_miss


def test_a_fault_in_what_is_to_be_compiled_leaves_launches_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_may_miss", {"kernels"})

    def fail() -> None:
        raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        module.compile_together(fail)
    x = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    _add_kernel[(1,)](x, 3)
    assert x.item() == 3


@pytest.mark.parametrize("options", [{}, {"kv_cache_dtype": "fp8"}], ids=str)
def test_nothing_is_compiled_while_requests_are_served(options: dict[str, Any], compiled: list[str]) -> None:
    """Lists of work of 1 to some dozens of entries, 1 to 64 requests, tables whose width no power of two divides."""
    decoder = decoder_of(shape_of("qwen3-0.6b", 2))
    engine = GpuEngine(decoder, max_model_len=1000, max_num_seqs=64, max_batched_tokens=2048, **options)
    source = random.Random(0)

    def jobs(lengths: list[int]) -> list[Job]:
        params = SamplingParams(temperature=0.6, max_tokens=source.randint(1, 12), ignore_eos=True)
        return [Job([source.randrange(1000) for _ in range(length)], params) for length in lengths]

    engine.run(jobs([40, 700]))
    compiled.clear()
    for count in (1, 2, 3, 7, 16, 17, 31, 40, 64):
        engine.run(jobs([source.choice((1, 17, 64, 128, 400, 900)) for _ in range(count)]))
    assert compiled == []
