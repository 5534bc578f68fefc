"""What scripts/soak.py calls a slope."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from quire.observe.request_records import RecordBook
from quire.observe.step_log import StepLog
from quire.tools.bench.http_client import HttpClient
from tests.server.harness import ROOT

MIB = 2**20


@pytest.fixture(scope="module")
def soak() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("soak", ROOT / "scripts" / "soak.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["soak"] = module  # where its dataclasses look themselves up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["soak"]


def test_odd_samples_are_no_slope(soak: ModuleType) -> None:
    times = [float(i) for i in range(20)]
    assert soak.slope_of(times, [2 * moment for moment in times]) == pytest.approx(2)
    assert soak.slope_of(times, [1000.0 if i == 19 else 5.0 for i in range(20)]) == 0


@pytest.mark.parametrize(
    ("memory_per_round", "descriptors_per_round", "fault"),
    [
        (0.0, 0.0, None),
        (0.2, 0.05, None),
        (2.0, 0.0, "engine memory: gained"),
        (0.0, 0.5, "engine descriptors: gained"),
    ],
)
def test_growth_in_the_second_half_is_told(
    soak: ModuleType,
    tmp_path: Path,
    memory_per_round: float,
    descriptors_per_round: float,
    fault: str | None,
) -> None:
    run = soak.Soak(HttpClient("http://127.0.0.1:1"), {}, tmp_path)
    for number in range(24):
        filling = min(number, 11) * 50  # caches
        run.times.append(25.0 * number)
        run.samples["engine memory"].append((100 + filling + memory_per_round * number) * MIB)
        run.samples["engine descriptors"].append(20 + descriptors_per_round * number)
    assert run.judge() is (fault is None)
    assert [one.startswith(fault) for one in run.faults] == ([] if fault is None else [True])


def test_a_run_lasts_until_what_fills_was_full_for_a_while(
    soak: ModuleType, tmp_path: Path
) -> None:
    """On a slow machine the last log was full at 428 of 600 s, and its filling told as growth."""
    run = soak.Soak(HttpClient("http://127.0.0.1:1"), {}, tmp_path)
    ends = []
    for number in range(60):
        run.times.append(60.0 * (number + 1))
        if run.times[-1] >= 428:
            run.filled = dict.fromkeys(soak.LOGS, 480.0)
        run.samples["engine memory"].append((100 + min(number, 7) * 20) * MIB)
        if run.is_long_enough(600):
            ends.append(run.times[-1])
            assert run.judge()
    assert ends[0] == 480 + 4 * 60
    run.filled = {}
    assert [run.is_long_enough(900), run.is_long_enough(901)] == [True, False]


def test_logs_that_fill_are_those_that_there_are(
    soak: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert list(soak.LOGS.values()) == [StepLog()._capacity, RecordBook()._keep]
    run = soak.Soak(HttpClient("http://127.0.0.1:1"), {}, tmp_path)
    run.filled = {next(iter(soak.LOGS)): 290.4}
    assert run.judge()
    assert "4,096, full after 290 s" in capsys.readouterr().out


def test_attacks_are_of_every_kind(soak: ModuleType) -> None:
    import random

    source = random.Random(1)
    made = [soak.make_attack(source) for _ in range(100)]
    assert {status for _, _, status in made} == {200, 400, 413, 431}
    assert {closes for _, closes, _ in made} == {False, True}


def test_every_request_of_the_mix_is_known_to_the_server(soak: ModuleType) -> None:
    import random

    from quire.server.app import ROUTERS

    paths = {route.path for router in ROUTERS for route in router.routes}
    source = random.Random(1)
    made = [soak.make_request(source) for _ in range(300)]
    assert {path for path, _, _ in made} <= paths
    assert {status for _, _, status in made} == {200, 400}
