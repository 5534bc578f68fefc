"""From attention's output to the end of a layer for one row, in one launch: see `single_row_layer.h`.

Its programs wait for each other, so all of them must run at once. The launch is a cooperative one, by
which the driver promises that: it is refused where they do not fit, and they start together, whoever
else computes on the GPU (other streams, other engines, other processes by MPS).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import c_float, c_uint64, c_void_p
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from quire.backends.cuda import build, driver
from quire.backends.cuda.tensor_maps import COLUMN, TensorMap, tensor_map
from quire.backends.triton.launch import USE_PDL, num_multiprocessors
from quire.backends.triton.linear import room_for
from quire.backends.triton.shapes import next_power_of_2
from quire.backends.triton.tested import is_exact, random_numbers
from quire.kernels.ops import Activation, LayerEnd
from quire.kernels.weights import Weight

_THREADS = 160
_MOST_COLUMNS = 16
_MOST_HIDDEN = 2048
"""On an H200 longer rows are quicker by a kernel for each operation (docs/performance.md, attempt 70)."""
_SLOT_BYTES = 16384
_STATIC_SHARED = 1024

Compose = Callable[[Tensor, Tensor, LayerEnd], tuple[Tensor, Tensor]]


class Call(ctypes.Structure):
    """`Call` of single_row_layer.h."""

    _fields_ = (
        *((name, TensorMap) for name in ("output", "up", "down")),
        *(
            (name, c_void_p)
            for name in ("attended", "residual", "norm", "total", "result", "words")
        ),
        ("eps", c_float),
        ("padding", c_uint64),  # it is aligned to 64 bytes there
    )


@dataclass(frozen=True)
class Shape:
    """What the kernel is compiled for."""

    hidden: int
    attended: int
    """Inputs of the output product."""
    intermediate: int

    @property
    def programs(self) -> int:
        """Fewer where there is little to read: a row is handed to all of them."""
        return 64 if self.hidden <= 1024 else 128

    @property
    def slots(self) -> int:
        """Of the ring of weights: the best of those tried on an H200."""
        return 13 if self.hidden <= 1024 else 7

    @property
    def constants(self) -> dict[str, int]:
        return {
            "HIDDEN": self.hidden,
            "PADDED": next_power_of_2(self.hidden),
            "ATTENDED": self.attended,
            "INTERMEDIATE": self.intermediate,
            "PROGRAMS": self.programs,
            "SLOT_BYTES": _SLOT_BYTES,
            "SLOTS": self.slots,
            "PDL": int(USE_PDL),
        }

    @property
    def shared_bytes(self) -> int:
        rows = 4 * (max(self.attended, self.intermediate) + self.hidden)  # each number twice
        squares = next_power_of_2(self.hidden) // 64
        read_behind = 256
        return 1024 + self.slots * (_SLOT_BYTES + 16) + rows + squares + 16 + read_behind

    @property
    def num_words(self) -> int:
        return 4 + self.hidden + self.intermediate

    @property
    def is_possible(self) -> bool:
        """Whether the kernel can be compiled for it: see the assertions there."""
        output_rows, rest = divmod(self.hidden, self.programs)
        up_rows, up_rest = divmod(2 * self.intermediate, self.programs)
        return (
            not (rest or up_rest or output_rows % 8 or up_rows % 16)
            and max(output_rows, up_rows) * COLUMN * 2 <= _SLOT_BYTES
            and not (self.hidden % 256 or self.attended % 256 or self.intermediate % 512)
        )

    def columns(self, rows: int, inner: int) -> int:
        """`columns_at_once` of single_row_layer.h."""
        columns = 1
        while (
            2 * columns * rows * 128 <= _SLOT_BYTES
            and inner // COLUMN % (2 * columns) == 0
            and columns < _MOST_COLUMNS
        ):
            columns *= 2
        return columns

    def map_of(self, weight: Weight, halves: int = 1) -> ctypes.Array[c_uint64]:
        """For boxes of a program's outputs, of each of the weight's halves, that lie in shared memory as
        [columns, halves, outputs, COLUMN].
        """
        size, inner = weight.shape
        rows = size // self.programs
        return tensor_map(
            weight.tensor.data_ptr(),
            weight.tensor.dtype,
            (COLUMN, size // halves, halves, inner // COLUMN),
            (inner, size // halves * inner, COLUMN),
            (COLUMN, rows // halves, halves, self.columns(rows, inner)),
        )


@cache
def _shape_of(hidden: int, attended: int, intermediate: int, device: torch.device) -> Shape | None:
    """What is quicker by this kernel than by one for each operation, where the GPU has all it needs."""
    shape = Shape(hidden, attended, intermediate)
    can_run = (
        hidden <= _MOST_HIDDEN
        and shape.is_possible
        and device.type == "cuda"
        and torch.cuda.get_device_capability(device)[0] == 9
        and driver.find_driver() is not None
        and shape.programs <= num_multiprocessors(device)
        and shape.shared_bytes + _STATIC_SHARED <= driver.most_shared_bytes(device)
    )
    return shape if can_run else None


def shape_of(end: LayerEnd) -> Shape | None:
    """None: there is no kernel for it."""
    weights = end.output, end.up, end.down
    if end.activation is not Activation.SILU or not all(
        one.is_dense and one.tensor.dtype == torch.bfloat16 and _is_in_place(one.tensor)
        for one in weights
    ):
        return None
    if end.norm.dtype != torch.bfloat16 or not _is_in_place(end.norm):
        return None
    return _shape_of(*end.output.shape, end.down.shape[1], end.norm.device)


def _is_in_place(tensor: Tensor) -> bool:
    """Whether the kernel can read it where it lies."""
    return tensor.is_contiguous() and tensor.data_ptr() % 16 == 0


@cache
def _module_of(shape: Shape, device: torch.device) -> driver.Module:
    with torch.cuda.device(device):
        code = build.build("single_row_layer.cu", shape.constants, "sm_90a")
        sizes = {"single_row_layer": shape.shared_bytes}
        return driver.Module(code, sizes, USE_PDL, is_cooperative=True)


class SingleRowLayers:
    """The kernel with the memory in which its programs hand rows to each other. Whoever owns it
    launches on one stream at a time.
    """

    def __init__(self) -> None:
        self._words: dict[Shape, Tensor | None] = {}
        """None: the kernel is not exact here. By shape, as each launch must write all words, or an old
        one could have a new launch's number, after 2³² of them.
        """

    def prepare(self, end: LayerEnd, compose: Compose) -> None:
        """Tests the kernel for such a layer against the kernels of `compose`. Neither during a graph
        capture, nor while kernels are only compiled.
        """
        shape = shape_of(end)
        if shape is None or shape in self._words:
            return
        device = end.norm.device
        self._words[shape] = torch.zeros(shape.num_words, dtype=torch.int32, device=device)
        if not is_exact("single requests", lambda: self._is_same(shape, device, compose)):
            self._words[shape] = None

    def takes(self, attended: Tensor, residual: Tensor, end: LayerEnd) -> bool:
        if attended.shape[0] != 1 or attended.dtype != torch.bfloat16:
            return False
        shape = shape_of(end)
        return (
            shape is not None
            and self._words.get(shape) is not None
            and _is_in_place(attended)
            and _is_in_place(residual)
        )

    def __call__(self, attended: Tensor, residual: Tensor, end: LayerEnd) -> tuple[Tensor, Tensor]:
        """`Kernels.finish_layer` of what `takes` says yes to."""
        shape = shape_of(end)
        assert shape is not None
        words = self._words[shape]
        assert words is not None
        result, total = room_for(residual, shape.hidden), torch.empty_like(residual)
        call = Call(
            output=shape.map_of(end.output),
            up=shape.map_of(end.up, halves=2),
            down=shape.map_of(end.down),
            attended=attended.data_ptr(),
            residual=residual.data_ptr(),
            norm=end.norm.data_ptr(),
            total=total.data_ptr(),
            result=result.data_ptr(),
            words=words.data_ptr(),
            eps=end.eps,
        )
        module = _module_of(shape, words.device)
        module.launch("single_row_layer", (shape.programs, 1), _THREADS, call, words.device)
        return result, total

    def _is_same(self, shape: Shape, device: torch.device, compose: Compose) -> bool:
        def random(*size: int, factor: float = 1.0) -> Tensor:
            return random_numbers(*size, device=device, dtype=torch.bfloat16) * factor

        def weight(size: int, inner: int) -> Weight:
            return Weight.dense(random(size, inner, factor=inner**-0.5))

        end = LayerEnd(
            output=weight(shape.hidden, shape.attended),
            norm=random(shape.hidden),
            eps=1e-6,
            up=weight(2 * shape.intermediate, shape.hidden),
            down=weight(shape.hidden, shape.intermediate),
            activation=Activation.SILU,
        )
        rows = random(2, shape.attended), random(2, shape.hidden, factor=3.0)
        pairs = [
            (found, expected)
            for i in range(2)
            for found, expected in zip(
                self(rows[0][i : i + 1], rows[1][i : i + 1], end),
                compose(rows[0][i : i + 1], rows[1][i : i + 1], end),
                strict=True,
            )
        ]
        return all(torch.equal(found, expected) for found, expected in pairs)
