"""Products by cuBLAS, through a handle of our own.

cuBLAS splits sums, and then adds in another order for another number of rows, if it has memory for the parts. torch can
be told to give it little by CUBLAS_WORKSPACE_CONFIG, but then reads that variable anew for every product, which takes
longer than all the rest of a launch (docs/performance.md, attempt 47). Our handle gets its memory once.
"""

from __future__ import annotations

import ctypes
import threading
from functools import cache

import torch
from torch import Tensor

_WORKSPACE = 128 << 10
"""Bytes. From 256 KB on, sums of 16 to 320 rows are split for some shapes of weights."""
_NUMBERS = {torch.float16: 2, torch.bfloat16: 14}
_POINTER, _INT = ctypes.c_void_p, ctypes.c_int
_ARGUMENTS: list[type[ctypes.c_void_p] | type[ctypes.c_int]] = [
    _POINTER, *[_INT] * 5, *[_POINTER] * 2, *[_INT] * 2, _POINTER, *[_INT] * 2, *[_POINTER] * 2, *[_INT] * 4
]  # fmt: skip
"""Of cublasGemmEx: handle, how each matrix lies, three sizes; then each matrix with its factor, type and stride."""
_TRANSPOSED, _AS_IT_IS, _COMPUTE_FLOAT32, _ANY_ALGORITHM, _NO_REDUCED_SUMS = 1, 0, 68, -1, 16
_ONE, _ZERO = (ctypes.byref(ctypes.c_float(number)) for number in (1.0, 0.0))


@cache
def _library() -> ctypes.CDLL | None:
    """The cuBLAS that torch uses, if it can be found."""
    try:
        library = ctypes.CDLL(f"libcublas.so.{(torch.version.cuda or '').partition('.')[0]}")
    except OSError:
        return None
    library.cublasGemmEx.argtypes = _ARGUMENTS
    return library


class _Handle(threading.local):
    """A thread's handle for one GPU. It is made by the thread's first product, which must not be during a capture."""

    def __init__(self, library: ctypes.CDLL, device: torch.device) -> None:
        self._library, self._value, self._stream = library, _POINTER(), -1
        self._workspace = torch.empty(_WORKSPACE, dtype=torch.uint8, device=device)
        with torch.cuda.device(device):
            _check(library.cublasCreate_v2(ctypes.byref(self._value)))
        _check(library.cublasSetMathMode(self._value, _NO_REDUCED_SUMS))

    def multiply(self, x: Tensor, weight: Tensor, out: Tensor) -> None:
        stream = torch.cuda.current_stream(x.device).cuda_stream
        if stream != self._stream:  # to change it takes the memory away
            memory = _POINTER(self._workspace.data_ptr()), ctypes.c_size_t(_WORKSPACE)
            _check(self._library.cublasSetStream_v2(self._value, _POINTER(stream)))
            _check(self._library.cublasSetWorkspace_v2(self._value, *memory))
            self._stream = stream
        number = _NUMBERS[x.dtype]
        # It takes matrices to lie by columns: what is computed is the transposed product.
        status = self._library.cublasGemmEx(
            self._value, _TRANSPOSED, _AS_IT_IS, weight.shape[0], x.shape[0], weight.shape[1],
            _ONE, weight.data_ptr(), number, weight.stride(0), x.data_ptr(), number, x.stride(0),
            _ZERO, out.data_ptr(), number, out.stride(0), _COMPUTE_FLOAT32, _ANY_ALGORITHM,
        )  # fmt: skip
        _check(status)


_handle = cache(_Handle)


def product(x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
    """x [rows, in] times weight [out, in] transposed, written to `out`; in half precision."""
    library = _library()
    if library is None:
        return torch.mm(x, weight.t(), out=out)
    _handle(library, x.device).multiply(x, weight, out)
    return out


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"cuBLAS failed with status {status}")
