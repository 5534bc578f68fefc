"""Which code a climb measured: a recorded table that is older than its rungs is noticed."""

from __future__ import annotations

import ast
import hashlib
from pathlib import Path

_TOOLS = Path(__file__).parents[2]
_MEASURED = ("ladder/*.py", "bench/ladder/rungs.py", "bench/ladder/settings.py")


def sources_digest() -> str:
    """A digest of the rungs' code and of the workload. Comments on lines of their own, docstrings
    and blank lines are no part of it: they change no figure.
    """
    digest = hashlib.sha256()
    for pattern in _MEASURED:
        for path in sorted(_TOOLS.glob(pattern)):
            digest.update("\n".join([path.name, *_code_lines(path)]).encode())
    return digest.hexdigest()[:12]


def _code_lines(path: Path) -> list[str]:
    """The lines that are code. By line numbers, which every version of Python gives alike; a dump
    of the tree differs between them.
    """
    source = path.read_text(encoding="utf-8")
    text_lines: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            text_lines.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return [
        line.rstrip()
        for number, line in enumerate(source.splitlines(), 1)
        if number not in text_lines and line.strip() and not line.lstrip().startswith("#")
    ]
