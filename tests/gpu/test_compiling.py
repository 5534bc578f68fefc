"""Kernels are compiled at the start, many at once, and none while requests are served."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from quire.process import compile_together as module
from tests.gpu.support import DEVICE

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


def test_a_fault_in_what_is_to_be_compiled_leaves_launches_as_they_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_may_miss", {"kernels"})

    def fail() -> None:
        raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        module.compile_together(fail)
    x = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    _add_kernel[(1,)](x, 3)
    assert x.item() == 3


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_nothing_is_compiled_while_requests_are_served(kv_cache_dtype: str, tmp_path: Path) -> None:
    """By a process with an empty cache of kernels: what other tests have compiled does not count."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.compiled_while_serving", kv_cache_dtype],
        env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout.splitlines()[-1]) == []
