"""A first start compiles dozens of Triton kernels: one after the other, as they are first launched,
takes long.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import triton

from quire.process.life import sign_of_life

_may_miss = {"kernels"}
"""Empty once it turned out that an earlier process has compiled them all."""
_compiling: set[int] = set()
"""Threads whose launches of Triton kernels are not run now."""


def only_compiles() -> bool:
    """Whether this thread is in a `compile_together`: what its Triton kernels should have written is
    noise, which others must not take for places in memory.
    """
    return threading.get_ident() in _compiling


def compile_together(call: Callable[[], object]) -> None:
    """Compiles the kernels that `call` launches, by several threads at once; they are not run, so
    what it computes is noise. Once a call has met none that are missing, as in a second start,
    further calls do nothing.
    """
    if (
        not _may_miss
        or os.environ.get("TRITON_INTERPRET") == "1"
        or not hasattr(triton, "AsyncCompileMode")
    ):
        return
    owner = threading.get_ident()
    interface = triton.runtime.jit.KernelInterface
    launch = interface.__getitem__
    missing = []
    _compiling.add(owner)
    # Other threads go on launching theirs.
    interface.__getitem__ = lambda kernel, grid: partial(
        kernel.run, grid=grid, warmup=threading.get_ident() == owner
    )
    try:
        with (
            triton.knobs.compilation.scope(),
            _Compilers() as threads,
            triton.AsyncCompileMode(threads, ignore_errors=True),  # whoever runs them will see
        ):
            triton.knobs.compilation.listener = lambda cache_hit, **_: missing.append(not cache_hit)
            call()
    finally:
        interface.__getitem__ = launch
        _compiling.discard(owner)
    if not any(missing):
        _may_miss.clear()


class _Compilers(ThreadPoolExecutor):
    """Threads that have the C compiler make a kernel's launcher as well. Triton 3.6 leaves that to
    the first launch: 0.3 s each, one after the other. What is made is found on the disk then.
    """

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        def compile_both() -> Any:
            kernel = fn(*args, **kwargs)
            sign_of_life()
            with contextlib.suppress(Exception):  # who launches it will see
                triton.runtime.driver.active.launcher_cls(kernel.src, kernel.metadata)
            sign_of_life()
            return kernel

        return super().submit(compile_both)
