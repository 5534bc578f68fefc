"""The docs quote code and figures, link to files and show pictures: none of it may drift."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"docs_{name}", ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


update, draw = load("update"), load("draw")


@pytest.mark.parametrize("document", update.documents(), ids=lambda path: path.name)
def test_quoted_code_and_figures_are_those_of_the_source_and_the_results(document: Path) -> None:
    assert update.updated(document) == document.read_text(), "run: python docs/update.py"


@pytest.mark.parametrize("document", update.documents(), ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", document.read_text())
    for link in links:
        if not link.startswith(("http://", "https://")):
            assert (document.parent / link).exists(), link


@pytest.mark.parametrize("name", draw.PICTURES)
def test_pictures_are_the_ones_the_code_draws(name: str) -> None:
    drawn = draw.PICTURES[name]().svg()
    assert (draw.FOLDER / f"{name}.svg").read_text() == drawn, "run: python docs/draw.py"


def test_there_is_a_chapter_for_every_rung_and_all_have_the_same_parts() -> None:
    chapters = sorted((ROOT / "docs" / "ladder").glob("*.md"))
    assert [int(chapter.name[:2]) for chapter in chapters] == list(range(11))
    reading_order = (ROOT / "docs" / "README.md").read_text()
    for chapter in chapters:
        text = chapter.read_text()
        assert f"(ladder/{chapter.name})" in reading_order
        assert "## The lines that matter" in text
        assert "```python" in text
        assert "**Exercise.**" in text
        assert chapter.name.startswith("00") or "<!-- results: " in text


def test_a_table_is_quoted_with_its_note_and_its_origin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = tmp_path / "results.md"
    results.write_text(
        "# T\n\n- command: quire x\n- machine: m\n- model: s\n- date: d\n\n"
        "## One\n\nNote.\n\n| a | b |\n| --- | --- |\n| 1 | 2 |\n"
    )
    monkeypatch.setattr(update, "RESULTS", results)
    document = tmp_path / "doc.md"
    document.write_text("x\n<!-- results: One | b -->\nold\n<!-- end -->\ny\n")
    origin = "(`quire x`, s, m; d; [benchmarks/results.md](results.md))"
    quoted = f"| b |\n| --- |\n| 2 |\n\nNote. {origin}\n"
    assert update.updated(document) == f"x\n<!-- results: One | b -->\n{quoted}<!-- end -->\ny\n"
    for wrong, message in (("Two", "no table called 'Two'"), ("One | c", "no column 'c'")):
        document.write_text(f"<!-- results: {wrong} -->\n<!-- end -->\n")
        with pytest.raises(SystemExit, match=message):
            update.updated(document)


def test_code_is_quoted_whole_and_unindented(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(update, "ROOT", tmp_path)
    (tmp_path / "m.py").write_text("class A:\n    @property\n    def b(self) -> int:\n        return 1\n\n    c = 2\n")
    document = tmp_path / "doc.md"
    document.write_text("<!-- code: m.py A.b -->\n<!-- end -->\n")
    body = "@property\ndef b(self) -> int:\n    return 1"
    assert (
        update.updated(document) == f"<!-- code: m.py A.b -->\n[m.py](m.py)\n\n```python\n{body}\n```\n<!-- end -->\n"
    )
    document.write_text("<!-- code: m.py A.d -->\n<!-- end -->\n")
    with pytest.raises(SystemExit, match=r"no A\.d"):
        update.updated(document)
