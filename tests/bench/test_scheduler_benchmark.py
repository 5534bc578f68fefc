"""The benchmark of the scheduler with and without targets and shares."""

from __future__ import annotations

from typing import Any

import pytest

from quire.tools.bench.engine.scheduler import DrivenScheduler, compare, print_comparisons


@pytest.mark.parametrize("settings", [{"target_token_time": 1.0}, {"policy": "fair"}])
@pytest.mark.parametrize("chunk", [0, 30])
def test_both_compute_alike(chunk: int, settings: dict[str, Any]) -> None:
    seconds, ratio = compare(4, 16, chunk, **settings)
    assert seconds > 0
    assert ratio > 0
    plain, other = (DrivenScheduler(4, 16, chunk, **more) for more in ({}, settings))
    for scheduler in (plain, other):
        assert [scheduler.step()[1] for _ in range(16)][-4:] == [True] * 4


def test_it_prints_all(capsys: pytest.CaptureFixture[str]) -> None:
    print_comparisons(3, 16)
    out = capsys.readouterr().out
    assert out.count("ms a step, with") == 6
