"""The command that measures stalls, on one body."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from quire.tools.bench.server_costs import stalls
from tests.ladder.conftest import tiny_model as tiny_model


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> object:
    """Its status."""
    monkeypatch.setattr(sys, "argv", ["stalls.py", *arguments])
    monkeypatch.setattr(stalls, "end_with_servers", lambda: None)  # signals are the tests' own
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with pytest.raises(SystemExit) as ended:
        stalls.main()
    return ended.value.code


@pytest.mark.slow
def test_a_body_is_sent_while_another_client_asks(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code = run(monkeypatch, "45,000 stop strings", "--model", str(tiny_model))
    shown = capsys.readouterr().out
    rows = [
        re.match(r"(nothing|45,000 stop strings) +(\S+)(?: +\d+)? +([\d.]+) +([\d.]+)$", line)
        for line in shown.splitlines()
    ]
    found = {row[1]: row for row in rows if row is not None}
    assert found["45,000 stop strings"][2] == "400"
    longest = max(float(row[3]) for row in found.values())
    assert f"others waited {longest:.1f} ms at most" in shown
    assert code == (longest > 50)


def test_bodies_that_there_are_not_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "a whale") == 2
    assert "there is no 'a whale'" in capsys.readouterr().err
