"""From attention's output to the end of a layer, or to the next layer's first product, for one row,
in one launch: see `single_row_layer.h`.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_uint64, c_void_p
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from quire.backends.cuda import build, driver
from quire.backends.cuda.tensor_maps import COLUMN, MAP_WORDS, weight_map
from quire.backends.triton.launch import USE_PDL
from quire.backends.triton.shapes import next_power_of_2

_Map = c_uint64 * MAP_WORDS
_THREADS = 160
_MOST_COLUMNS = 16


class Call(ctypes.Structure):
    """`Call` of single_row_layer.h."""

    _fields_ = (
        *((name, _Map) for name in ("output", "up", "down", "next")),
        *(
            (name, c_void_p)
            for name in (
                *("attended", "residual", "norm", "next_norm"),
                *("total", "result", "words", "stamps"),
            )
        ),
        ("eps", c_float),
        ("next_eps", c_float),
        ("padding", c_uint64 * 7),  # it is aligned to 64 bytes there
    )


@dataclass(frozen=True)
class Shape:
    """What the kernel is compiled for."""

    hidden: int
    attended: int
    """Inputs of the output product."""
    intermediate: int
    next: int
    """Outputs of the next layer's first product; 0: it is not computed."""
    programs: int
    slot_bytes: int
    slots: int
    late: bool = False
    stamps: bool = False

    @property
    def constants(self) -> dict[str, int]:
        found = {
            "HIDDEN": self.hidden,
            "PADDED": next_power_of_2(self.hidden),
            "ATTENDED": self.attended,
            "INTERMEDIATE": self.intermediate,
            "NEXT": self.next,
            "PROGRAMS": self.programs,
            "SLOT_BYTES": self.slot_bytes,
            "SLOTS": self.slots,
            "LATE": int(self.late),
            "PDL": int(USE_PDL),
        }
        return found | ({"STAMPS": 1} if self.stamps else {})

    @property
    def shared_bytes(self) -> int:
        rows = 2 * max(self.attended, self.intermediate) + 2 * self.hidden
        squares = next_power_of_2(self.hidden) // 64
        return 1024 + self.slots * (self.slot_bytes + 16) + rows + squares + 16

    @property
    def num_words(self) -> int:
        return 4 + 2 * self.hidden + self.intermediate

    def columns(self, rows: int, inner: int) -> int:
        """`columns_at_once` of single_row_layer.h."""
        columns = 1
        while (
            2 * columns * rows * 128 <= self.slot_bytes
            and inner // COLUMN % (2 * columns) == 0
            and columns < _MOST_COLUMNS
        ):
            columns *= 2
        return columns

    def map_of(self, weight: Tensor, halves: int = 1) -> ctypes.Array[c_uint64]:
        rows = weight.shape[0] // self.programs
        return weight_map(weight, halves, rows // halves, self.columns(rows, weight.shape[1]))


@cache
def module_of(shape: Shape, device: torch.device) -> driver.Module:
    with torch.cuda.device(device):
        code = build.build("single_row_layer.cu", shape.constants, "sm_90a")
        return driver.Module(code, {"single_row_layer": shape.shared_bytes}, USE_PDL)


def launch(shape: Shape, call: Call, device: torch.device) -> None:
    module_of(shape, device).launch("single_row_layer", (shape.programs, 1), _THREADS, call, device)
