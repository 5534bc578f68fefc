"""For `mkdocs build`: links from the docs to files of the repository lead to copies in the site."""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
_LINK = re.compile(r"(?<!!)\[([^\[\]]*)\]\((?!https?://|#)([^)#\s]+)(?:#[^)]*)?\)")
"""A link that is no picture: its words, and where it leads."""


def on_files(files: Any, config: Any) -> Any:
    """Adds every file outside docs/ that a page links to, as plain text."""
    found: set[Path] = set()
    for page in files.documentation_pages():
        for _, link in _LINK.findall(page.content_string):
            outside = _outside(page.src_uri, link)
            if outside is not None and outside.is_file():
                found.add(outside)
    for path in sorted(found):
        content = path.read_text(encoding="utf-8")
        files.append(File.generated(config, _place(path), content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Points links at the copies. Of a link to a folder only the words stay: it has no page."""

    def rewrite(match: re.Match[str]) -> str:
        outside = _outside(page.file.src_uri, match[2])
        if outside is None:
            return match[0]
        if not outside.is_file():
            return match[1]
        here = PurePosixPath(page.file.src_uri).parent
        return f"[{match[1]}]({os.path.relpath(_place(outside), here)})"

    return _LINK.sub(rewrite, markdown)


def _outside(page: str, link: str) -> Path | None:
    """The file or folder that a page's link leads to, if it is in the repository and not in docs/."""
    target = (ROOT / "docs" / page).parent / link
    path = Path(os.path.normpath(target))
    is_outside = path.is_relative_to(ROOT) and not path.is_relative_to(ROOT / "docs")
    return path if is_outside or path.suffix == ".py" else None


def _place(path: Path) -> str:
    return f"source/{path.relative_to(ROOT).as_posix()}.txt"
