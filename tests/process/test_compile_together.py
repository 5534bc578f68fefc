"""What is made for a kernel when many are compiled at once; tests/gpu/test_compiling.py does so on
a GPU.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import triton

from quire.process.compile_together import _Compilers


@pytest.mark.parametrize("fails", [False, True])
def test_a_kernel_s_launcher_is_made_with_it_and_a_fault_there_is_left_to_who_launches(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    def launcher(src: str, metadata: str) -> None:
        made.append((src, metadata))
        if fails:
            raise RuntimeError("no C compiler")

    driver = SimpleNamespace(active=SimpleNamespace(launcher_cls=launcher))
    monkeypatch.setattr(triton.runtime, "driver", driver)
    kernels = [SimpleNamespace(src=f"source {i}", metadata=f"metadata {i}") for i in range(5)]

    def compiled(number: int) -> Any:
        return kernels[number]

    with _Compilers() as compilers:
        futures = [compilers.submit(compiled, number) for number in range(5)]
    assert [future.result() for future in futures] == kernels
    assert sorted(made) == [(one.src, one.metadata) for one in kernels]


def test_a_kernel_that_does_not_compile_has_no_launcher_and_says_why() -> None:
    def compile_() -> Any:
        raise ValueError("no such instruction")

    with _Compilers() as compilers:
        future = compilers.submit(compile_)
    with pytest.raises(ValueError, match="no such instruction"):
        future.result()
