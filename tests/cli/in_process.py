"""The command line in this process: most of the time of one of its own goes into imports."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
from pathlib import Path

import pytest

from quire.cli.main import main


def quire_here(*arguments: str | Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """`quire ARGUMENTS`, as subprocess.run would do it."""
    command = ["quire", *map(str, arguments)]
    code = 0
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(io.StringIO()) as output,
        contextlib.redirect_stderr(io.StringIO()) as errors,
    ):
        patch.setattr(sys, "argv", command)
        patch.setattr(sys, "stdin", io.StringIO(stdin))
        try:
            main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
    return subprocess.CompletedProcess(command, code, output.getvalue(), errors.getvalue())
