"""The docs quote code and figures, link to files and show pictures: none of it may drift."""

from __future__ import annotations

import importlib.util
import json
import re
import statistics
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

from quire.tools.bench.ladder.sources import sources_digest

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


@pytest.mark.parametrize("name", draw.PICTURES)
def test_text_in_a_picture_is_neither_cut_off_nor_written_over(name: str) -> None:
    picture = ElementTree.fromstring(draw.PICTURES[name]().svg())
    lines: dict[str, list[tuple[float, float]]] = {}
    for text in picture.iter("{http://www.w3.org/2000/svg}text"):
        assert text.text is not None
        assert "  " not in text.text, "SVG shows several spaces as one"
        width = 6.5 * len(text.text)  # about what 12 pixels of a wide font take
        left = float(text.attrib["x"]) - (
            width / 2 if text.attrib["text-anchor"] == "middle" else 0
        )
        lines.setdefault(text.attrib["y"], []).append((left, left + width))
    for spans in lines.values():
        spans.sort()
        assert spans[0][0] >= 0
        assert spans[-1][1] <= float(picture.attrib["width"])
        assert all(before[1] <= after[0] for before, after in pairwise(spans))


def test_every_document_is_in_the_reading_order() -> None:
    reading_order = (ROOT / "docs" / "README.md").read_text()
    for document in (ROOT / "docs").glob("*.md"):
        assert document.name == "README.md" or f"({document.name})" in reading_order


def test_there_is_a_chapter_for_every_rung_and_all_have_the_same_parts() -> None:
    chapters = sorted((ROOT / "docs" / "ladder").glob("*.md"))
    # two before the first rung
    assert [int(chapter.name[:2]) for chapter in chapters] == [0, *range(11)]
    reading_order = (ROOT / "docs" / "README.md").read_text()
    for chapter in chapters:
        text = chapter.read_text()
        assert f"(ladder/{chapter.name})" in reading_order
        assert "## The lines that matter" in text
        assert "```python" in text
        assert "**Exercise.**" in text
        assert chapter.name.startswith("00") or "<!-- results: " in text


@pytest.mark.parametrize(
    "folder",
    [ROOT / "docs" / "results" / name for name in ("", "arm", "h200")],
    ids=lambda path: path.name,
)
def test_the_recorded_tables_and_plots_are_those_of_the_recorded_figures(folder: Path) -> None:
    raw = json.loads((folder / "results.json").read_text())
    table = [f"- {name}: {value}" for name, value in raw["facts"].items()]
    for part in raw["tables"]:
        table += [f"## {part['title']}", part["note"], f"| {' | '.join(part['columns'])} |"]
        table += [f"| {' | '.join(cell['text'] for cell in row)} |" for row in part["rows"]]
    written = (folder / "results.md").read_text().splitlines()[1:]
    assert [line for line in written if line and not line.startswith("| ---")] == table
    plot = (folder / "ladder.svg").read_text()
    rungs = [row for row in raw["tables"][0]["rows"] if "values" in row[5]]
    assert len(rungs) >= 6
    for number, name, *_ in rungs:
        assert f"{number['text']} {name['text']}<" in plot
    for row in rungs:
        assert f"> {statistics.median(row[5]['values']):,.1f}<" in plot
    assert raw["facts"]["same tokens on all rungs"] == "yes"
    assert "/" not in raw["facts"]["command"]


def test_the_recorded_climb_is_one_of_the_present_rungs() -> None:
    """Those of other machines can't be renewed here: their dates say how old they are."""
    raw = json.loads((ROOT / "docs" / "results" / "results.json").read_text())
    assert raw["facts"].get("rungs") == sources_digest(), (
        "the ladder's code has changed since docs/results/results.md was measured; run: "
        "quire bench ladder, copy ladder-results/* to docs/results, run python docs/update.py"
    )


def test_a_table_is_quoted_with_its_note_and_its_origin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = tmp_path / "results.md"
    results.write_text(
        "# T\n\n- command: quire x\n- machine: m\n- model: s\n- date: d\n\n"
        "## One\n\nNote.\n\n| a | b |\n| --- | --- |\n| 1 | 2 |\n"
    )
    monkeypatch.setattr(update, "RESULTS", results)
    document = tmp_path / "doc.md"
    document.write_text("x\n<!-- results: One | b -->\nold\n<!-- end -->\ny\n")
    origin = "(`quire x`, s, m; d; [docs/results/results.md](results.md))"
    quoted = f"| b |\n| --- |\n| 2 |\n\nNote. {origin}\n"
    assert update.updated(document) == f"x\n<!-- results: One | b -->\n{quoted}<!-- end -->\ny\n"
    document.write_text("<!-- results: One | b | no note -->\n<!-- end -->\n")
    assert f"| 2 |\n\n{origin}\n" in update.updated(document)
    (tmp_path / "card").mkdir()
    (tmp_path / "card" / "results.md").write_text(
        results.read_text().replace("machine: m", "machine: gpu")
    )
    document.write_text("<!-- results: card/results.md One | b -->\n<!-- end -->\n")
    assert (
        "(`quire x`, s, gpu; d; [docs/results/card/results.md](card/results.md))"
        in update.updated(document)
    )
    for wrong, message in (
        ("Two", "no table called 'Two'"),
        ("One | c", "no column 'c'"),
        ("One | b | brief", "'brief' should be 'no note'"),
    ):
        document.write_text(f"<!-- results: {wrong} -->\n<!-- end -->\n")
        with pytest.raises(SystemExit, match=message):
            update.updated(document)


def test_code_is_quoted_whole_and_unindented(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(update, "ROOT", tmp_path)
    (tmp_path / "m.py").write_text(
        "class A:\n    @property\n    def b(self) -> int:\n        return 1\n\n    c = 2\n"
    )
    document = tmp_path / "doc.md"
    document.write_text("<!-- code: m.py A.b -->\n<!-- end -->\n")
    body = "@property\ndef b(self) -> int:\n    return 1"
    assert (
        update.updated(document)
        == f"<!-- code: m.py A.b -->\n[m.py](m.py)\n\n```python\n{body}\n```\n<!-- end -->\n"
    )
    document.write_text("<!-- code: m.py A.d -->\n<!-- end -->\n")
    with pytest.raises(SystemExit, match=r"no A\.d"):
        update.updated(document)
