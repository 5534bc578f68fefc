"""The library of C++ kernels: its sources are the files beside this one."""

from __future__ import annotations

import ctypes
import platform
from functools import cache
from pathlib import Path

from quire.errors import DeviceError
from quire.process.native_library import build_library

_SOURCE_FOLDER = Path(__file__).parent
# -ffp-contract=off: products and sums are fused only where the source says so, or bits would depend
# on how the compiler unrolled a loop. -fno-schedule-insns: on ARM GCC would move loads so far ahead
# that sums no longer fit the registers.
FLAGS = (
    "-O3", "-std=c++17", "-fPIC", "-pthread", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math",
    "-fno-schedule-insns", "-fvisibility=hidden",
)  # fmt: skip


@cache
def load_library(architecture: str = "native") -> ctypes.CDLL:
    """The kernels compiled for `architecture` (a value of the compiler's -march), built if need be."""
    path = build_library(_SOURCE_FOLDER, [*FLAGS, machine_flag(architecture)], "CPU")
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise DeviceError(
            f"The compiled CPU kernels {path} can't be loaded ({error}); delete the file."
        ) from error


def machine_flag(architecture: str) -> str:
    """The compiler's flag for an architecture; on ARM "native" is -mcpu for clang, and gcc knows
    that too.
    """
    is_arm = architecture == "native" and platform.machine() == "aarch64"
    return "-mcpu=native" if is_arm else f"-march={architecture}"
