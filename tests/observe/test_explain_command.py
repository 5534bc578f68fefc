"""`quire explain` on files: lists, words, JSON, a picture, and what it says when there is nothing
to explain.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from quire.cli.main import app
from quire.errors import InvalidRequestError
from quire.observe.step_log import StepLog
from tests.observe.test_explain import run_three


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "steps.jsonl"
    steps = StepLog(path=path)
    run_three(steps)
    steps.close()
    return path


def run(*arguments: str | Path) -> str:
    done = CliRunner().invoke(app, ["explain", *map(str, arguments)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_the_slowest_are_listed_and_one_is_explained(log: Path, tmp_path: Path) -> None:
    lines = run(log).splitlines()
    assert [line.split()[0] for line in lines[:4]] == ["request", "c", "b", "a"]
    assert "20 of its tokens were cached" in run(log, "c", "--svg", tmp_path / "c.svg")
    assert (tmp_path / "c.svg").read_text().startswith("<svg")
    told = json.loads(run(log, "c", "--json"))
    assert told["answers"][0]["admissions"][0]["computed_by"] == {"a": 20}
    listed = json.loads(run(log, "--json"))
    assert [one["request_id"] for one in listed] == ["c", "b", "a"]
    assert listed[0]["finished"] - listed[0]["arrival"] == max(
        one["finished"] - one["arrival"] for one in listed
    )


def test_wrong_names_and_files_say_what_there_is(log: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"'nobody' is not in .*there are a, b, c"):
        run(log, "nobody")
    with pytest.raises(InvalidRequestError, match="can't be read"):
        run(tmp_path / "nothing.jsonl")
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(InvalidRequestError, match="has no request"):
        run(tmp_path / "empty.jsonl")
    with pytest.raises(InvalidRequestError, match="can't be written"):
        run(log, "c", "--svg", tmp_path / "no" / "c.svg")
    with pytest.raises(InvalidRequestError, match="--svg: draws one request"):
        run(log, "--svg", tmp_path / "c.svg")
