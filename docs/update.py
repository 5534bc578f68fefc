"""Puts what the docs quote into them: tables of docs/results/results.md and of files like it, and
code.

A quotation stands between two comments, the first of which says what it is:

    <!-- results: The ladder | rung, adds, time -->     a table, or some of its columns
    <!-- results: The ladder | rung, adds | no note -->  the same without the note under it
    <!-- results: h200/results.md The ladder -->        the same of another machine's results in docs/results/
    <!-- code: quire/tools/ladder/naive.py generate_naive --> a function, a class or one of its methods
    <!-- families: all -->                              the table of model families
    <!-- parameters: sampling -->                       the table of SamplingParams, or of EngineConfig (engine)
    <!-- end -->

    python docs/update.py            rewrites the files
    python docs/update.py --check    only says which ones are out of date
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results" / "results.md"
_QUOTATION = re.compile(
    r"(<!-- (results|code|families|parameters): (.+?) -->\n)(.*?)(<!-- end -->)", re.DOTALL
)


def documents() -> list[Path]:
    """The README and everything under docs/."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def updated(path: Path) -> str:
    """A document's text with its quotations as they should be."""

    def quote(match: re.Match[str]) -> str:
        head, kind, what, _, end = match.groups()
        makers = {
            "results": quote_table,
            "code": quote_code,
            "families": quote_families,
            "parameters": quote_parameters,
        }
        return f"{head}{makers[kind](what, path)}{end}"

    return _QUOTATION.sub(quote, path.read_text(encoding="utf-8"))


def quote_table(what: str, document: Path) -> str:
    """A table of the results, with the note under it and where it comes from."""
    title, columns, note_wanted = (part.strip() for part in f"{what}||".split("|")[:3])
    if note_wanted not in ("", "no note"):
        raise SystemExit(f"{document}: {note_wanted!r} should be 'no note', or left out")
    results = RESULTS
    if (named := re.match(r"(\S+\.md) (.+)", title)) is not None:
        results, title = RESULTS.parent / named[1], named[2]
    text = results.read_text(encoding="utf-8")
    facts = dict(re.findall(r"^- ([^:\n]+): (.+)$", text.split("\n## ")[0], re.MULTILINE))
    sections = {section.partition("\n")[0]: section for section in text.split("\n## ")[1:]}
    if title not in sections:
        raise SystemExit(f"{document}: there is no table called {title!r} in {results}")
    lines = [line for line in sections[title].splitlines()[1:] if line]
    rows = [line for line in lines if line.startswith("|")]
    note = " ".join(line for line in lines if not line.startswith("|"))
    if columns:
        rows = _columns(rows, [name.strip() for name in columns.split(",")], document)
    name = results.relative_to(RESULTS.parent)
    source = f"[docs/results/{name}]({_relative(results, document)})"
    origin = (
        f"`{facts['command']}`, {facts['model']}, {facts['machine']}; {facts['date']}; {source}"
    )
    under = f"({origin})" if note_wanted else f"{note} ({origin})"
    return "\n".join([*rows, "", under, ""])


def quote_families(what: str, document: Path) -> str:
    """The families of `quire/models/families.py`, in the order of their models' names."""
    sys.path.insert(0, str(ROOT))
    from quire.models.families import FAMILIES

    rows = []
    for one in sorted(FAMILIES, key=lambda one: one.title.lower()):
        architectures, gguf = (
            ", ".join(f"`{name}`" for name in names if name)
            for names in (one.architectures, [one.gguf, *one.gguf_others])
        )
        rows.append(f"| {one.title} | {architectures} | {gguf} |")
    return "\n".join(
        ["| models | `architectures` in config.json | GGUF |", "|---|---|---|", *rows, ""]
    )


def quote_parameters(what: str, document: Path) -> str:
    """Every line of a table of parameters."""
    sys.path.insert(0, str(ROOT))
    from quire.config import EngineConfig
    from quire.field_checks import parameters
    from quire.sampling_params import SamplingParams

    if what == "engine":
        rows = ["| option | default | values | |", "|---|---|---|---|"]
        for name, line in parameters(EngineConfig).items():
            rows.append(f"| `{name}` | {_default(line.default)} | {line.values} | {line.help} |")
        return "\n".join([*rows, ""])
    rows = [
        "| parameter | default | values | | API | CLI | page |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, line in parameters(SamplingParams).items():
        places = " | ".join("x" if one else "" for one in (line.api, line.cli, line.page))
        default = _default(line.default)
        rows.append(f"| `{name}` | {default} | {line.values} | {line.help} | {places} |")
    return "\n".join([*rows, ""])


def _default(value: object) -> str:
    if value is None or value == ():
        return "none"
    if isinstance(value, tuple):
        return " ".join(f"`{str(one)!r}`" for one in value)
    return f"`{value}`"


def quote_code(what: str, document: Path) -> str:
    """The source of something, as it is now, with a link to its file."""
    name, _, symbol = what.partition(" ")
    path = ROOT / name
    source = path.read_text(encoding="utf-8")
    node: ast.AST = ast.parse(source)
    for part in symbol.split("."):
        found = [
            child for child in ast.iter_child_nodes(node) if getattr(child, "name", None) == part
        ]
        if not found:
            raise SystemExit(f"{document}: {name} has no {symbol}")
        node = found[0]
    assert isinstance(node, ast.FunctionDef | ast.ClassDef)
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    lines = source.splitlines()[first - 1 : node.end_lineno]
    indent = len(lines[0]) - len(lines[0].lstrip())
    body = "\n".join(line[indent:] for line in lines)
    return f"[{name}]({_relative(path, document)})\n\n```python\n{body}\n```\n"


def _columns(rows: list[str], wanted: list[str], document: Path) -> list[str]:
    cells = [row.strip("|").split("|") for row in rows]
    names = [name.strip() for name in cells[0]]
    for name in wanted:
        if name not in names:
            raise SystemExit(
                f"{document}: the table has no column {name!r}; it has {', '.join(names)}"
            )
    picked = [[line[names.index(name)] for name in wanted] for line in cells]
    return [f"|{'|'.join(line)}|" for line in picked]


def _relative(path: Path, document: Path) -> str:
    return os.path.relpath(path, document.parent)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="change nothing; fail if something is out of date"
    )
    check = parser.parse_args().check
    stale = [path for path in documents() if updated(path) != path.read_text(encoding="utf-8")]
    for path in stale:
        print(f"{'out of date' if check else 'updated'}: {path.relative_to(ROOT)}")
        if not check:
            path.write_text(updated(path), encoding="utf-8")
    sys.exit(1 if check and stale else 0)


if __name__ == "__main__":
    main()
