"""What the operating system, or a container's control groups, grant this process and have given it:
memory, and time on cores.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path


def available_memory() -> int:
    """Bytes that can be had now."""
    return min(_system_available(), _cgroup_available())


def peak_resident() -> int | None:
    """The most memory this process has held; None where the system does not say. (`getrusage` begins
    with the peak of whoever started this process.)
    """
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    found = re.search(r"^VmHWM:\s*(\d+)", status, re.MULTILINE)
    return None if found is None else int(found[1]) * 1024


def num_cores() -> int:
    """Those this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def granted_cores(root: Path) -> int:
    """Whole cores in the time that control groups grant, one at least; a very large number where
    they don't say. With more threads than that, all of them would be stopped for a while again and
    again.
    """
    cores = 2.0**31
    with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
        quota, period = (
            int((root / "sys/fs/cgroup/cpu" / name).read_text())
            for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        )
        cores = quota / period if quota > 0 else cores
    with contextlib.suppress(OSError, StopIteration):
        lines = (root / "proc/self/cgroup").read_text().splitlines()
        path = next(line for line in lines if line.startswith("0::/")).removeprefix("0::/")
        base = root / "sys/fs/cgroup"
        for folder in (base / path, *(base / path).parents):
            with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
                share = (folder / "cpu.max").read_text().split()
                cores = min(cores, int(share[0]) / int(share[1]))
            if folder == base:
                break
    return max(1, int(cores))


def _system_available() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    # No /proc (macOS): half of what is installed is a fair guess at what can be had.
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _cgroup_available() -> int:
    """What a container's limit leaves; a very large number where there is none."""
    unlimited = 2**63
    folder = Path("/sys/fs/cgroup")
    for limit_file, used_file in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            limit = (folder / limit_file).read_text().strip()
            used = (folder / used_file).read_text().strip()
        except OSError:
            continue
        if limit.isdigit() and used.isdigit():
            return max(int(limit) - int(used), 0)
    return unlimited
