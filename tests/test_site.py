"""The docs as a site: built without a warning, every link leading somewhere."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("mkdocs", reason="mkdocs is not installed: pip install -e '.[docs]'")
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    with caplog.at_level(logging.WARNING, "mkdocs"):
        build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path / "site"), strict=True))
    assert caplog.messages == []
    page = (tmp_path / "site" / "index.html").read_text()
    assert "Reading Quire" in page
    assert "source/quire/step.py.txt" in page  # code is linked to a copy
    assert (tmp_path / "site" / "source" / "quire" / "step.py.txt").is_file()


def test_every_document_is_in_the_sites_menu() -> None:
    menu = (ROOT / "mkdocs.yml").read_text()
    for path in (ROOT / "docs").rglob("*.md"):
        assert f" {path.relative_to(ROOT / 'docs').as_posix()}\n" in menu, path.name
