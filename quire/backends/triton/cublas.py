"""Products by cuBLAS, through its interface for those who say which algorithms they want
(cublasLt).

Some of its algorithms split sums, and then add in another order for another number of rows: they
are not asked for. torch's own calls would take the host longer, several times as long with a bias,
and environment variables change what they do (docs/performance.md, attempts 47 and 49).
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from ctypes import byref, c_int, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.backends.cuda.driver import stream_of

_NUMBERS = {torch.float16: 2, torch.bfloat16: 14}
_FLOAT32, _COMPUTE_FLOAT32, _TRANSPOSED, _ADD_BIAS = 0, 68, 1, 4
# Attributes: of a product, and of what is asked of algorithms.
_WEIGHT_LIES, _AT_LAST, _BIAS = 3, 7, 8
_COUNT, _APART = 5, 6
"""Of a stack of matrices: how many, and by how many numbers one begins after the other."""
_SPLIT_SUMS, _ALIGNMENTS = 3, (5, 6, 7, 8)
_MOST_ALIGNED = 16
"""Bytes; no algorithm asks that addresses of rows are multiples of more."""
_Reference = Any
"""What `byref` returns."""
_Attribute = c_int | c_uint32 | c_int64 | c_void_p
_Described = tuple[Callable[..., int], c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, _Reference]
"""What computes, the handle, a product without bias, the weight, the inputs, the outputs, and the
algorithm for them.
"""
_ONE, _ZERO = (byref(ctypes.c_float(number)) for number in (1.0, 0.0))


class CublasError(RuntimeError):
    """cublasLt can't do what it was asked to."""


class _Algorithm(ctypes.Structure):
    """As cublasLt describes it: 64 bytes that it wants to have back, and 32 about them."""

    _fields_ = (("value", c_uint64 * 8), ("about", c_uint64 * 4))


@cache
def _library() -> ctypes.CDLL | None:
    """The cublasLt that torch uses, if it can be found."""
    try:
        library = ctypes.CDLL(f"libcublasLt.so.{(torch.version.cuda or '').partition('.')[0]}")
    except OSError:
        return None
    library.cublasLtMatmul.argtypes = [c_void_p] * 14 + [c_size_t, c_void_p]
    return library


def _call(name: str, *arguments: object) -> None:
    status = getattr(_library(), f"cublasLt{name}")(*arguments)
    if status:
        raise CublasError(f"cublasLt{name} failed with status {status}")


def _made(name: str, *arguments: object) -> c_void_p:
    made = c_void_p()
    _call(f"{name}Create", byref(made), *arguments)
    return made


def _set(name: str, made: c_void_p, attribute: int, value: _Attribute) -> None:
    _call(f"{name}SetAttribute", made, attribute, byref(value), c_size_t(ctypes.sizeof(value)))


@cache
def _handle(device: torch.device) -> c_void_p:
    with torch.cuda.device(device):
        return _made("")


@cache
def _matrix(dtype: torch.dtype, size: int, count: int) -> c_void_p:
    """`count` rows of `size` numbers; cublasLt takes them for columns, so that all it computes is
    transposed.
    """
    return _made("MatrixLayout", _NUMBERS[dtype], c_uint64(size), c_uint64(count), c_int64(size))


@cache
def _stack(
    dtype: torch.dtype, size: int, count: int, row_stride: int, matrices: int, matrix_stride: int
) -> c_void_p:
    """As many matrices, each of `count` rows of `size` numbers that lie row_stride apart."""
    made = _made(
        "MatrixLayout", _NUMBERS[dtype], c_uint64(size), c_uint64(count), c_int64(row_stride)
    )
    _set("MatrixLayout", made, _COUNT, c_int(matrices))
    _set("MatrixLayout", made, _APART, c_int64(matrix_stride))
    return made


@cache
def _operation(bias: int) -> c_void_p:
    """A product to which the bias at this address is added, if it is not 0."""
    made = _made("MatmulDesc", _COMPUTE_FLOAT32, _FLOAT32)
    _set("MatmulDesc", made, _WEIGHT_LIES, c_int(_TRANSPOSED))
    if bias:
        _set("MatmulDesc", made, _AT_LAST, c_uint32(_ADD_BIAS))
        _set("MatmulDesc", made, _BIAS, c_void_p(bias))
    return made


@cache
def _asked(alignment: int) -> c_void_p:
    """What an algorithm must be like, if all addresses of rows are multiples of so many bytes."""
    made = _made("MatmulPreference")
    _set("MatmulPreference", made, _SPLIT_SUMS, c_uint32(0))
    for attribute in _ALIGNMENTS:
        _set("MatmulPreference", made, attribute, c_uint32(alignment))
    return made


def _algorithm(
    device: torch.device,
    operation: c_void_p,
    weight: c_void_p,
    x: c_void_p,
    out: c_void_p,
    alignment: int,
) -> _Reference:
    algorithm, count = _Algorithm(), c_int()
    about = _handle(device), operation, weight, x, out, out, _asked(alignment)
    _call("MatmulAlgoGetHeuristic", *about, 1, byref(algorithm), byref(count))
    return byref(algorithm)


@cache
def _described(
    device: torch.device, dtype: torch.dtype, shape: torch.Size, rows: int, has_bias: bool
) -> _Described:
    """A weight of this shape, and so many rows."""
    outputs, inner = shape
    alignment = math.gcd(outputs * dtype.itemsize, inner * dtype.itemsize, _MOST_ALIGNED)
    matrices = (
        _matrix(dtype, inner, outputs),
        _matrix(dtype, inner, rows),
        _matrix(dtype, outputs, rows),
    )
    # of a bias's address only this matters here
    operation = _operation(alignment if has_bias else 0)
    algorithm = _algorithm(device, operation, *matrices, alignment)
    library = _library()
    assert library is not None
    return library.cublasLtMatmul, _handle(device), _operation(0), *matrices, algorithm


@cache
def _described_heads(
    device: torch.device,
    dtype: torch.dtype,
    shape: torch.Size,
    rows: int,
    x_strides: tuple[int, int],
    out_strides: tuple[int, int],
) -> _Described:
    """A stack of weights of this shape; strides of rows and of heads."""
    heads, outputs, inner = shape
    strides = inner, outputs * inner, *x_strides, *out_strides
    alignment = math.gcd(*(stride * dtype.itemsize for stride in strides), _MOST_ALIGNED)
    matrices = (
        _stack(dtype, inner, outputs, inner, heads, outputs * inner),
        _stack(dtype, inner, rows, x_strides[0], heads, x_strides[1]),
        _stack(dtype, outputs, rows, out_strides[0], heads, out_strides[1]),
    )
    algorithm = _algorithm(device, _operation(0), *matrices, alignment)
    library = _library()
    assert library is not None
    return library.cublasLtMatmul, _handle(device), _operation(0), *matrices, algorithm


def product(x: Tensor, weight: Tensor, out: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [rows, in] times weight [out, in] transposed, plus the bias, written to `out`; half
    precision, contiguous.
    """
    if _library() is None:
        return out.copy_(F.linear(x, weight, bias))
    described = _described(x.device, x.dtype, weight.shape, x.shape[0], bias is not None)
    return _multiply(described, x, weight, out, bias)


def heads_product(x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
    """Of each head, x [rows, heads, in] times weight [heads, out, in] transposed, written to `out`
    [rows, heads, out]. Heads and rows of x and `out` may lie in longer rows.
    """
    if _library() is None:
        return out.copy_(torch.bmm(x.transpose(0, 1), weight.mT).transpose(0, 1))
    described = _described_heads(
        x.device, x.dtype, weight.shape, x.shape[0], x.stride()[:2], out.stride()[:2]
    )
    return _multiply(described, x, weight, out, None)


def _multiply(
    described: _Described, x: Tensor, weight: Tensor, out: Tensor, bias: Tensor | None
) -> Tensor:
    matmul, handle, operation, as_weight, as_x, as_out, algorithm = described
    address = out.data_ptr()
    status = matmul(
        handle,
        operation if bias is None else _operation(bias.data_ptr()),
        _ONE,
        weight.data_ptr(),
        as_weight,
        x.data_ptr(),
        as_x,
        _ZERO,
        address,
        as_out,
        address,
        as_out,
        algorithm,
        None,
        0,
        stream_of(x.device),
    )
    if status:
        raise CublasError(f"cublasLtMatmul failed with status {status}")
    return out
