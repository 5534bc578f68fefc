"""What is compiled at the start is all that the graphs need: nothing is compiled while requests are
served.

Triton compiles a kernel anew for other constants, and for numbers that are 1 or a multiple of 16.
Here launches are only noted, with what Triton would compile them for, so that the models have their
true shapes and no memory. Kernels in Gluon are not among them: `tests/gpu/test_compiling.py` has
those.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from triton.runtime.jit import JITFunction, KernelInterface

from quire.backends import select
from quire.backends.cpu.device import CpuDevice
from quire.backends.triton import quantized
from quire.backends.triton.kernels import TritonKernels
from quire.kernels.formats import FORMATS, gpu_computes
from quire.kernels.weights import Weight
from quire.models.decoder import Decoder
from quire.models.spec import ModelSpec
from quire.runner.graphs import DecodeGraphs
from quire.runner.kv_cache import KVCache
from quire.runner.request_rows import RequestRows
from quire.tools.bench.shapes import spec_of
from tests.kernels.triton.support import ON_GPU

pytestmark = pytest.mark.skipif(ON_GPU, reason="a card compiles them: tests/gpu/test_compiling.py")

META = torch.device("meta")
MAX_NUM_SEQS, MAX_MODEL_LEN = 256, 4096

Launch = tuple[Any, ...]


def specialized(value: Any, on_alignment: bool) -> Any:
    """What Triton's compiled form depends on, of an argument that is not a constant."""
    if isinstance(value, torch.Tensor):
        return value.dtype, on_alignment and value.storage_offset() * value.itemsize % 16 == 0
    if isinstance(value, int) and not isinstance(value, bool):
        return "1" if value == 1 else on_alignment and value % 16 == 0
    return value if value is None else type(value)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> set[Launch]:
    """Every different compiled form that was asked for; nothing is run."""
    found: set[Launch] = set()
    functions: dict[Any, JITFunction[Any]] = {}

    def note(kernel: Any, *arguments: Any, **options: Any) -> None:
        function = functions.get(kernel)
        if function is None:
            function = functions[kernel] = JITFunction(kernel.fn, **kernel.kwargs)
        values = dict(zip(kernel.arg_names, arguments, strict=False)) | options
        key: list[Any] = [kernel.fn.__name__]
        for parameter in function.params:
            value = values.pop(parameter.name)
            if not (parameter.is_constexpr or parameter.do_not_specialize):
                value = specialized(value, not parameter.do_not_specialize_on_alignment)
            elif parameter.do_not_specialize and not parameter.is_constexpr:
                value = type(value)
            key.append((parameter.name, value))
        found.add((*key, tuple(sorted(values.items()))))

    def launcher(kernel: Any, grid: Any) -> Callable[..., None]:
        return lambda *arguments, **options: note(kernel, *arguments, **options)

    monkeypatch.setattr(KernelInterface, "__getitem__", launcher)
    monkeypatch.setitem(select.DEVICES, META.type, CpuDevice)
    return found


class NoGraphs:
    """What is compiled is seen without capturing anything."""

    def reset(self) -> None:
        pass

    def capture(self, compute: Callable[[], None]) -> Callable[[], None]:
        raise AssertionError


def decoder_of(spec: ModelSpec, format: str) -> Decoder:
    """A model of one layer in a format; nothing is in its weights."""
    loaded = {}
    for name, parameter in spec.parameters().items():
        shape = tuple(parameter.shape)
        is_plain = (
            len(shape) == 1 or name in ("embedding", "head") or "bias" in name or "router" in name
        )
        chosen = FORMATS["BF16" if is_plain else format]
        loaded[name] = Weight.of(chosen, shape, *chosen.empty(shape, META))
    return Decoder(spec, TritonKernels(), loaded, torch.bfloat16, MAX_MODEL_LEN)


@pytest.mark.few(2)
@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize(
    ("shape", "format", "is_cublas_exact"),
    [
        *(
            (shape, format, is_cublas_exact)
            for shape in ("qwen3-0.6b", "qwen3-8b", "qwen3-30b-a3b", "llama-3.2-1b")
            for format, is_cublas_exact in (
                ("BF16", True),
                ("BF16", False),
                ("FP8", True),
                ("FP8", False),
                ("INT8", False),
                ("Q4_K", False),
            )
        ),
        ("gpt-oss-20b", "BF16", True),
        ("glm-4.7-flash", "BF16", True),
    ],
)
def test_graphs_of_every_size_are_made_of_kernels_that_the_start_compiled(
    format: str,
    is_cublas_exact: bool,
    shape: str,
    cache_dtype: torch.dtype,
    launches: set[Launch],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(TritonKernels, "_check", lambda self, weight, has_bias: is_cublas_exact)
    monkeypatch.setattr(quantized, "computes", lambda format: gpu_computes(format, (9, 0)))
    monkeypatch.setattr(quantized, "_rows_are_exact", lambda *weight: (is_cublas_exact, False))
    spec = spec_of(shape)
    spec = replace(spec, layers=spec.layers[:1])
    decoder = decoder_of(spec, format)
    rows = RequestRows(MAX_NUM_SEQS, MAX_MODEL_LEN, 16, META)
    graphs = DecodeGraphs(
        decoder, KVCache(spec, 64, 0, 16, cache_dtype, META).layers, rows, 512, NoGraphs()
    )
    graphs.warm_up()
    at_start = set(launches)
    assert len(at_start) > 10
    assert format == "BF16" or any("product" in launch[0] for launch in at_start)
    for size, name in graphs._most_work:
        launches.clear()
        graphs._compute(size, name)
        missing = launches - at_start
        assert not missing, (
            f"{len(missing)} more for {size} tokens, kind {name}: {sorted(map(str, missing))[0]}"
        )
