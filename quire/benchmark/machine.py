"""What figures depend on besides the code: the machine, the versions, the day and the command."""

from __future__ import annotations

import datetime
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from quire import __version__
from quire.benchmark.measure import load_average
from quire.config import format_bytes

_WHERE_TO = ("--output", "--markdown", "--json")


def describe_machine(device: torch.device) -> str:
    """Processor, threads, memory, and the GPU where it is used."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    text = f"{_processor()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, {format_bytes(memory)} memory"
    if device.type == "cuda":
        text += f", {torch.cuda.get_device_name(device)}"
    return f"{text}, {platform.system()}"


def report_facts(device: torch.device) -> dict[str, str]:
    """The head of every report; call it before measuring, for the load is then that of others."""
    return {
        "command": command_line(sys.argv[1:]),
        "machine": describe_machine(device),
        "versions": f"quire {__version__}, torch {torch.__version__}, Python {platform.python_version()}",
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "load average before": load_average(),
    }


def command_line(arguments: Sequence[str]) -> str:
    """The command that measured, less the options that say where its report goes: they change no figure, and a report
    that is passed on need not name folders of the machine it was made on."""
    kept: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        if argument in _WHERE_TO:
            next(rest, None)
        elif argument.partition("=")[0] not in _WHERE_TO:
            kept.append(argument)
    return shlex.join(["quire", *kept])


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
