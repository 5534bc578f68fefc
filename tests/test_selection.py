"""Every test is run by `make test` or by `make test-all`, and `few` leaves what it says."""

from __future__ import annotations

import re
from itertools import combinations
from pathlib import Path

import pytest
from _pytest.mark.expression import Expression

from tests.selection import evenly_spread, worker_group

MAKEFILE = (Path(__file__).parents[1] / "Makefile").read_text()
MARKS = ("slow", "soak", "hypothesis", "gpu")


def test_each_test_is_in_one_of_the_two_commands_whatever_its_marks() -> None:
    quick, rest = (
        Expression.compile(one) for one in re.findall(r'\$\(PYTEST\).* -m "([^"]+)"', MAKEFILE)
    )
    for count in range(len(MARKS) + 1):
        for marks in combinations(MARKS, count):
            has = set(marks).__contains__
            assert quick.evaluate(has) or rest.evaluate(has), marks
            if "slow" in marks:
                assert not quick.evaluate(has)


def test_cases_that_stay_are_spread_from_the_first_to_the_last() -> None:
    assert evenly_spread(10, 1) == {0}
    assert evenly_spread(10, 2) == {0, 9}
    assert evenly_spread(10, 4) == {0, 3, 6, 9}
    assert evenly_spread(3, 5) == {0, 1, 2}


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "number", [1, pytest.param(2, marks=pytest.mark.slow), 3, 4, pytest.param(5, marks=[])]
)
def test_of_cases_that_are_not_slow_already_two_are_left(
    number: int, request: pytest.FixtureRequest
) -> None:
    is_slow = request.node.get_closest_marker("slow") is not None
    assert is_slow == (number in (2, 3, 4))


@pytest.mark.parametrize(
    ("path", "group"),
    [
        ("tests/server/test_completions.py", "server"),
        ("tests/server/test_chat.py", "server"),
        ("tests/server/test_clients.py", "keyed"),
        ("tests/server/test_faults.py", "tests/server/test_faults.py"),  # it has one of its own
        ("tests/engine/test_core.py", "tests/engine/test_core.py"),
    ],
)
def test_files_that_share_a_server_share_a_worker(path: str, group: str) -> None:
    assert worker_group(path) == group
