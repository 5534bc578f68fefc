"""Runs the CUDA kernels' source on a CPU, compiled by the C++ compiler with device.h in this folder."""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import subprocess
import tempfile
from ctypes import byref, c_uint
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from quire.backends.cuda import build, recurrent
from quire.kernels.ops import PagedBatch
from quire.kernels.recurrent import ConvolutionCache, ConvolutionSpec, RecurrentSpec
from quire.kernels.reference import ReferenceKernels
from quire.process.native_library import find_compiler
from tests.long_runs import IS_LONG

FOLDER = Path(__file__).parent
MOST_SHARED = 227 * 1024
_FLAGS = (
    # in the short form not optimised: the compiler takes longer than the kernels
    "-O2" if IS_LONG else "-O0",
    *("-std=c++17", "-march=native", "-ffp-contract=off", "-fPIC", "-shared"),
    # or the loader would take what libraries of other shapes call by the same name for one thing
    "-fvisibility=hidden",
)


@cache
def _folder() -> Path:
    """Of this session's libraries: each takes the compiler some seconds."""
    return Path(tempfile.mkdtemp(prefix="quire-emulated-"))


@cache
def library(definitions: tuple[str, ...]) -> ctypes.CDLL:
    path = _folder() / f"{hashlib.sha256(repr(definitions).encode()).hexdigest()[:16]}.so"
    source = FOLDER / "emulated_recurrent.cpp"
    folders = [f"-I{FOLDER}", f"-I{build.FOLDER}"]
    command = [*find_compiler(), *_FLAGS, *definitions, *folders, str(source), "-o", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(path))


class Emulator:
    """In the place of `driver.Module`."""

    seeds = itertools.count()
    """In what order blocks and threads run, and when copies arrive: another one each time."""

    def __init__(self, spec: RecurrentSpec, definitions: tuple[str, ...]) -> None:
        self._library = library(definitions)
        self._shared_bytes = recurrent.shared_sizes(spec, MOST_SHARED)
        assert self._library.call_size() == ctypes.sizeof(recurrent.Call)
        self.launched: list[str] = []

    def launch(
        self,
        name: str,
        grid: tuple[int, int],
        threads: int,
        argument: recurrent.Call,
        device: torch.device,
    ) -> None:
        self.launched.append(name)
        sizes = (*grid, threads, self._shared_bytes[name])
        status = self._library.launch(
            name.encode(), *map(c_uint, sizes), byref(argument), c_uint(next(self.seeds))
        )
        assert status == 0, f"{name} takes other shared memory than it is given, or is not there"


class EmulatedKernels(ReferenceKernels):
    """The CUDA kernels of layers with a state, the rest by the definition."""

    name = "emulated"

    def __init__(self) -> None:
        self.modules: dict[object, Emulator] = {}

    @staticmethod
    def convolve_(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        spec: ConvolutionSpec,
        cache: ConvolutionCache,
        batch: PagedBatch,
    ) -> Tensor:
        """Leaves the last inputs of chunks as they were: `recur_` keeps them on a GPU."""
        assert cache.tail is not None
        before = [memory.clone() for _, memory in cache.tail.runs]
        out = ReferenceKernels.convolve_(x, weight, bias, spec, cache, batch)
        for (_, memory), found in zip(cache.tail.runs, before, strict=True):
            memory.copy_(found)
        return out

    def recur_(self, *arguments: object) -> Tensor:
        launches = _Launches(*arguments)  # type: ignore[arg-type]
        launches.modules = self.modules
        return launches.run()


class _Launches(recurrent.Launches):
    modules: dict[object, Emulator]

    def limits(self) -> tuple[int, int]:
        return MOST_SHARED, 6

    def module(self) -> Emulator:  # type: ignore[override]
        given = recurrent.constants(
            self.spec, self.block_size, self.dtype, self.has_skip, self.aligned, pdl=False
        )
        key = tuple(build.definitions(given))
        if key not in self.modules:
            self.modules[key] = Emulator(self.spec, key)
        return self.modules[key]
