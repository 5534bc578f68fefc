"""What figures depend on besides the code: the machine, the versions, the day and the command."""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from quire import __version__
from quire.config import format_bytes

if TYPE_CHECKING:
    import torch

_INSTRUCTION_SETS = (
    *(
        "avx2",
        "fma",
        "f16c",
        "avx_vnni",
        "avx512f",
        "avx512_vnni",
        "avx512_bf16",
        "amx_int8",
        "amx_bf16",
    ),
    *("asimd", "asimdhp", "asimddp", "i8mm", "bf16", "sve", "sve2"),
)


def report_facts(device: torch.device | None = None, program: str = "quire") -> dict[str, str]:
    """The head of every report; call it before measuring, for the load is then that of others.
    `device` is None where another process computes.
    """
    memory = format_bytes(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    threads = versions = gpu = ""
    load = "unknown"
    with contextlib.suppress(OSError):
        load = f"{os.getloadavg()[0]:.1f}"
    if device is not None:
        import torch

        threads = f"{torch.get_num_threads()} threads, "
        versions = f"torch {torch.__version__}, "
        gpu = f", {torch.cuda.get_device_name(device)}" if device.type == "cuda" else ""
    return {
        "command": command_line(sys.argv[1:], program),
        "machine": f"{_processor()}, {os.cpu_count()} cores, {threads}{memory} memory{gpu}, {platform.system()}",
        "versions": f"quire {__version__}, {versions}Python {platform.python_version()}",
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "load average before": load,
    }


def this_command() -> str:
    """How a module that is run as a script was called, less its options."""
    spec = sys.modules["__main__"].__spec__
    return f"python -m {spec.name}" if spec is not None else "python"


def command_line(arguments: Sequence[str], program: str = "quire") -> str:
    """The command that measured, less keys and the options that say where its report goes: they
    change no figure, and a report that is passed on need not name folders of the machine it was
    made on.
    """
    left_out = ("--output", "--markdown", "--json", "--result-file", "--plot", "--api-key")
    kept: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        if argument in left_out:
            next(rest, None)
        elif kept[-1:] == ["--peer"]:
            kept.append(argument.partition("=")[0])  # less the interpreter it is installed for
        elif argument.partition("=")[0] not in left_out:
            kept.append(argument)
    return f"{program} {shlex.join(kept)}".strip()


def instruction_sets() -> str:
    """Those of the CPU that matter to matrix products."""
    flags = set(f"{_cpu_info('flags')} {_cpu_info('Features')}".split())
    return " ".join(name for name in _INSTRUCTION_SETS if name in flags) or "none that is known"


def _processor() -> str:
    if name := _cpu_info("model name"):
        return name
    with contextlib.suppress(OSError):  # Linux on ARM tells numbers, and lscpu knows what they mean
        shown = subprocess.run(
            ["lscpu"], capture_output=True, text=True, check=False, env=os.environ | {"LC_ALL": "C"}
        )
        if found := re.search(r"^Model name:\s*(.+)$", shown.stdout, re.MULTILINE):
            return found[1]
    return platform.processor() or platform.machine()


def _cpu_info(field: str) -> str:
    """A field of the first CPU; empty where the system does not tell."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith(field):
                return line.partition(":")[2].strip()
    return ""
