"""A streamed call crosses few files of the server, and docs/server.md names them."""

from __future__ import annotations

import re

import pytest

from scripts.way_of_a_call import ROOT, Way, trace
from tests.server.harness import SMALL_ENGINE

MOST_DOWN = 12
MOST_UP = 8


@pytest.fixture(scope="module")
def ways(small_model: str) -> tuple[Way, Way]:
    return trace(small_model, **SMALL_ENGINE)


def documented(title: str) -> list[str]:
    """The files of the server in a table of docs/server.md, in order."""
    page = (ROOT / "docs/server.md").read_text(encoding="utf-8")
    table = page.partition(f"| {title} | |\n")[2].partition("\n\n")[0]
    return re.findall(r"\d+ \[[\w./]+\]\(\.\./quire/server/([\w./]+)\)", table)


@pytest.mark.slow
def test_a_post_crosses_few_files(ways: tuple[Way, Way]) -> None:
    down, up = ways
    assert len(down.files) <= MOST_DOWN, down.files
    assert len(up.files) <= MOST_UP, up.files
    assert {"guard/quotas.py", "guard/admission.py"} <= set(down.passing_files)


@pytest.mark.slow
def test_the_way_is_the_documented_one(ways: tuple[Way, Way]) -> None:
    down, up = ways
    assert documented("down") == down.files
    assert documented("up, for a token") == up.files
