"""How large each room of Quire is, in statements: `python scripts/statements.py`.

Statements and not lines, so that no line break is saved to look small. Docstrings don't count.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "quire"


def num_statements(nodes: Iterable[ast.AST]) -> int:
    return sum(map(_is_code, nodes))


def _is_code(node: ast.AST) -> bool:
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return isinstance(node, ast.stmt) and not is_text


def room(file: Path) -> str:
    """The folder of a file below `quire/`; of what stands in none, and of a room of rooms (tools,
    backends, server), the names that tell more."""
    parts = file.relative_to(PACKAGE).parts
    if len(parts) == 1:
        return "(words and assembly)"
    nested = parts[0] in ("tools", "backends", "server") and len(parts) > 2
    return "/".join(parts[:2]) if nested else parts[0]


def main() -> None:
    sizes: Counter[str] = Counter()
    files: Counter[str] = Counter()
    for file in PACKAGE.rglob("*.py"):
        sizes[room(file)] += num_statements(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
        files[room(file)] += 1
    print("statements  files  room")
    for name in sorted(sizes):
        print(f"{sizes[name]:10,}  {files[name]:5}  {name}")
    print(f"{sizes.total():10,}  {files.total():5}  quire/")


if __name__ == "__main__":
    main()
