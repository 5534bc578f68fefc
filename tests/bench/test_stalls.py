"""The command that measures stalls, on one body."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, ROOT / "bench" / "stalls.py"]


def test_a_body_is_sent_while_another_client_asks(smollm2_gguf: Path) -> None:
    assert smollm2_gguf.exists()  # fetched before the server is started
    done = subprocess.run([*COMMAND, "45,000 stop strings"], capture_output=True, text=True, check=False, timeout=120)
    rows = [
        re.match(r"(nothing|45,000 stop strings) +(\S+)(?: +\d+)? +([\d.]+) +([\d.]+)$", line)
        for line in done.stdout.splitlines()
    ]
    found = {row[1]: row for row in rows if row is not None}
    assert found["45,000 stop strings"][2] == "400"
    longest = max(float(row[3]) for row in found.values())
    assert f"others waited {longest:.1f} ms at most" in done.stdout
    assert done.returncode == (longest > 50)


def test_bodies_that_there_are_not_are_named() -> None:
    done = subprocess.run([*COMMAND, "a whale"], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert "there is no 'a whale'" in done.stderr
