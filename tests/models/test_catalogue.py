"""Short names for models on the hub."""

from __future__ import annotations

import json
import re

import pytest

from quire.checkpoints.catalogue import CATALOGUE
from quire.checkpoints.download import ALIASES
from quire.checkpoints.hub import parse_hub_id
from quire.checkpoints.sources import resolve
from quire.errors import ModelNotFoundError
from tests.cli.in_process import quire_here

GIB = 2**30


def test_every_name_is_short_and_stands_for_one_model_on_the_hub() -> None:
    for name, entry in CATALOGUE.items():
        assert re.fullmatch(r"[a-z0-9][a-z0-9.-]{2,20}", name), name
        assert parse_hub_id(entry.repo) is not None, entry
        assert parse_hub_id(name) is None  # could be no hub id itself
        assert entry.licence
        assert entry.num_bytes > 10**8
    assert len({entry.repo for entry in CATALOGUE.values()}) == len(CATALOGUE)
    assert not CATALOGUE.keys() & ALIASES.keys()


def test_what_fits_depends_on_the_memory_there_is() -> None:
    entry = CATALOGUE["qwen3-8b"]
    fits = [entry.fit(memory * GIB) for memory in (24, 12, 6, 2)]
    assert fits == ["fits", "int8", "int4", "no"]
    assert CATALOGUE["gpt-oss-20b"].fit(8 * GIB) == "no"  # is quantised already


def test_a_short_name_is_looked_for_on_the_hub(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelNotFoundError, match=r"Qwen/Qwen3-0\.6B"):
        resolve("qwen3-0.6b", offline=True)
    with pytest.raises(ModelNotFoundError, match=r"Did you mean qwen3-0\.6b"):
        resolve("qwen3-0.6bb", offline=True)


def test_the_list_is_whole_in_a_pipe_and_as_json() -> None:
    shown = quire_here("models", "--available")
    assert shown.returncode == 0, shown.stderr
    line = next(line for line in shown.stdout.splitlines() if line.startswith("command-r7b"))
    assert "CohereLabs/c4ai-command-r7b-12-2024" in line
    assert "CC-BY-NC-4.0 (gated)" in line
    rows = [
        json.loads(line)
        for line in quire_here("models", "--available", "--json").stdout.splitlines()
    ]
    assert [row["name"] for row in rows] == list(CATALOGUE)
    assert {row["fits_here"] for row in rows} >= {"yes"}
