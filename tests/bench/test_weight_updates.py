"""The benchmark of updates: it replaces all weights, and would notice if it did not."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from quire.assemble import Engine
from quire.tools.bench.engine.weight_updates import main
from tests.frontend.templates import QWEN
from tests.server.random_model import write_model


def printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> str:
    monkeypatch.setattr(sys, "argv", ["weight_updates", "--device=cpu", "--repeats=2", *arguments])
    main()
    return capsys.readouterr().out


@pytest.mark.parametrize("given", ["float32", "bfloat16"])
def test_a_shape(
    given: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--shape=tiny", f"--given={given}", "--dtype=bfloat16")
    out = printed(monkeypatch, capsys, *options)
    assert re.search(r"^\d\.\d+ s \(.*\)  \d\.\d+ s .*MiB", out, re.MULTILINE)


def test_a_model_from_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_model(tmp_path, QWEN)
    assert "Updates of all weights" in printed(
        monkeypatch, capsys, str(tmp_path), "--dtype=float32"
    )


@pytest.mark.parametrize(
    ("is_done", "error"),
    [(lambda turn: turn < 3, "other logprobs"), (lambda _turn: False, "the same logprobs")],
)
def test_an_update_that_is_not_made_ends_it(
    is_done: object,
    error: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One that is only said to be, by its version."""
    turns = iter(range(100))
    real = Engine.update_weights

    def update(engine: Engine, weights: object) -> None:
        assert callable(is_done)
        real(engine, weights if is_done(next(turns)) else {})  # type: ignore[arg-type]

    monkeypatch.setattr(Engine, "update_weights", update)
    with pytest.raises(RuntimeError, match=error):
        printed(monkeypatch, capsys, "--shape=tiny")
