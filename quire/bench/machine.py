"""What figures depend on besides the code: the machine, the versions, the day and the command."""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from quire import __version__
from quire.config import format_bytes

if TYPE_CHECKING:
    import torch


def report_facts(device: torch.device | None = None, program: str = "quire") -> dict[str, str]:
    """The head of every report; call it before measuring, for the load is then that of others. `device` is None where
    another process computes."""
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


def command_line(arguments: Sequence[str], program: str = "quire") -> str:
    """The command that measured, less keys and the options that say where its report goes: they change no figure, and a
    report that is passed on need not name folders of the machine it was made on."""
    left_out = ("--output", "--markdown", "--json", "--result-file", "--plot", "--api-key")
    kept: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        if argument in left_out:
            next(rest, None)
        elif argument.partition("=")[0] not in left_out:
            kept.append(argument)
    return f"{program} {shlex.join(kept)}".strip()


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
