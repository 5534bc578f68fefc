"""Arguments of C++ functions: both sides' lists are compared when a library is loaded, and calls
are made by name.
"""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from quire.backends.cpu import build
from quire.backends.cpu.arguments import Recorded, caller, check_names, check_packer, exported
from quire.backends.cpu.functions import Address
from quire.errors import DeviceError
from quire.process.native_library import find_compiler

SOURCE = """
#include "arguments.h"
struct Add {
  const float *x, *bias;
  float* out;
  int64_t size;
  float scale;
  int num_threads;
  QUIRE_ARGUMENTS(x, bias, out, size, scale, num_threads)
  void run() const {
    for (int64_t i = 0; i < size; ++i) out[i] = x[i] * scale + (bias ? bias[i] : 0.0f);
  }
};
struct Gap {
  int64_t first, forgotten, last;
  QUIRE_ARGUMENTS(first, last)
};
struct Tail {
  int64_t first, forgotten;
  QUIRE_ARGUMENTS(first)
};
struct Narrow {
  int first;
  const void* last;
  QUIRE_ARGUMENTS(first, last)
};
extern "C" {
QUIRE_FUNCTION(add, call->run(), Add)
QUIRE_DESCRIBE(gap, Gap)
QUIRE_DESCRIBE(tail, Tail)
QUIRE_DESCRIBE(narrow, Narrow)
QUIRE_NAMES(colours, Red, Green)
}
"""


class Recorder:
    recorded: Recorded | None = None

    def note(self, function: int, arguments: bytes) -> None:
        assert self.recorded is not None
        self.recorded.append((function, arguments))


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    try:
        compiler = find_compiler()
    except DeviceError:
        pytest.skip("no C++ compiler here")
    folder = tmp_path_factory.mktemp("library")
    (folder / "add.cpp").write_text(SOURCE)
    kernels = Path(build.__file__).parent
    command = [*compiler, "-std=c++17", "-fPIC", "-shared", f"-I{kernels}", "add.cpp"]
    command += [str(kernels / "arguments.cpp"), "-o", "add.so"]
    subprocess.run(command, cwd=folder, check=True, timeout=300)
    return ctypes.CDLL(str(folder / "add.so"))


def add(
    *, x: Tensor, bias: Tensor | None, out: Tensor, size: int, scale: float, num_threads: int
) -> None:
    """As the library has it."""


def swapped(
    *, x: Tensor, out: Tensor, bias: Tensor | None, size: int, scale: float, num_threads: int
) -> None: ...


def mistyped(
    *, x: Tensor, bias: Tensor | None, out: Tensor, size: float, scale: float, num_threads: int
) -> None: ...


def too_short(*, x: Tensor, bias: Tensor | None, out: Tensor, size: int, scale: float) -> None: ...


def too_long(
    *,
    x: Tensor,
    bias: Tensor | None,
    out: Tensor,
    size: int,
    scale: float,
    num_threads: int,
    depth: int,
) -> None: ...


def gap(*, first: int, last: int) -> None: ...


def tail(*, first: int) -> None: ...


def narrow(*, first: int, last: Address) -> None: ...


def test_a_call_by_names_in_any_order_computes(library: ctypes.CDLL) -> None:
    call = caller(library, "add", add, Recorder())
    x, bias, out = torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0]), torch.zeros(2)
    call(num_threads=1, scale=3.0, out=out, size=2, bias=bias, x=x)
    assert out.tolist() == [13.0, 26.0]
    call(x=x, bias=None, out=out, size=1, scale=3.0, num_threads=1)
    assert out.tolist() == [3.0, 26.0]


def test_a_call_without_one_of_its_arguments_names_it(library: ctypes.CDLL) -> None:
    call: Callable[..., None] = caller(library, "add", add, Recorder())
    with pytest.raises(
        TypeError, match=r"add\(\) missing 1 required keyword-only argument: 'size'"
    ):
        call(x=torch.ones(1), bias=None, out=torch.ones(1), scale=1.0, num_threads=1)


def test_a_recorder_gets_the_calls_while_it_has_a_list(library: ctypes.CDLL) -> None:
    recorder, x, out = Recorder(), torch.ones(1), torch.zeros(1)
    call = caller(library, "add", add, recorder)
    call(x=x, bias=None, out=out, size=1, scale=2.0, num_threads=1)
    recorder.recorded = []
    call(x=x, bias=None, out=out, size=1, scale=5.0, num_threads=1)
    ((address, arguments),) = recorder.recorded
    out.zero_()
    ctypes.CFUNCTYPE(None, ctypes.c_char_p)(address)(arguments)
    assert out.item() == 5.0


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        (swapped, "argument 1 is out, and bias in the library"),
        (mistyped, "argument size is a float, and an int64_t in the library"),
        (too_short, "argument 5 is None, and num_threads in the library"),
        (too_long, "argument depth is not in the library"),
    ],
)
def test_a_declaration_that_is_not_the_librarys_is_refused(
    library: ctypes.CDLL, declared: Callable[..., None], message: str
) -> None:
    with pytest.raises(DeviceError, match=f"quire_add .*{message}"):
        caller(library, "add", declared, Recorder())


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        (gap, "QUIRE_ARGUMENTS leaves out a field before last"),
        (tail, "QUIRE_ARGUMENTS leaves out the last field"),
        (narrow, "integer that is no int64_t"),
    ],
)
def test_a_struct_that_is_packed_otherwise_is_refused(
    library: ctypes.CDLL, declared: Callable[..., None], message: str
) -> None:
    with pytest.raises(DeviceError, match=message):
        check_packer(library, declared)


def test_names_with_other_numbers_are_refused(library: ctypes.CDLL) -> None:
    check_names(library, "quire_colours", ["RED", "GREEN"])
    with pytest.raises(DeviceError, match=r"quire_colours .*\['RED', 'GREEN'\]"):
        check_names(library, "quire_colours", ["GREEN", "RED"])


def test_a_library_without_a_function_is_refused(library: ctypes.CDLL) -> None:
    with pytest.raises(DeviceError, match="have no quire_subtract: delete them"):
        exported(library, "quire_subtract")
