"""`--processes`: the same results as in one process, whatever happens to one of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.processes import Stretches, units_of
from tests.selection import LONG

ROOT = Path(__file__).parents[1]
CONFTEST = """
import pytest
from tests import processes

processes.worker_group = lambda path: path  # files here are none of Quire's

def pytest_addoption(parser):
    processes.add_options(parser)

def pytest_configure(config):
    if config.option.processes > 1:
        config.pluginmanager.register(processes.Processes(config, begin=lambda: None))

@pytest.fixture(scope="session")
def whole():
    yield
    print("the session's fixture ends")
"""
TESTS = """
import os, pytest, signal, warnings

@pytest.fixture(scope="module")
def own(request):
    with open(f"{request.path}.{os.getpid()}", "a") as file:
        file.write("begins ")
    yield
    with open(f"{request.path}.{os.getpid()}", "a") as file:
        file.write("ends ")

@pytest.mark.parametrize("number", range(20))
def test_passes(own, whole, number):
    pass

def test_fails(own):
    print("what it printed")
    assert 1 + 1 == 3

@pytest.mark.skip(reason="not today")
def test_skipped():
    pass

@pytest.mark.xfail
def test_expected():
    assert False

def test_warns():
    warnings.warn("mind this", UserWarning)

@pytest.fixture
def broken():
    raise ValueError("no fixture")

def test_error(broken):
    pass
"""
ENDS = """
import os, signal, time

def test_before():
    pass

def test_ends_its_process():
    HOW

def test_after():
    pass
"""


def run(folder: Path, files: dict[str, str], *options: str) -> tuple[int, str]:
    """The exit status and what pytest printed."""
    for name, text in {"conftest.py": CONFTEST, **files}.items():
        (folder / name).write_text(text)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options, str(folder)]
    found = subprocess.run(
        command,
        check=False,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        env={"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PATH": "/usr/bin"},
    )
    return found.returncode, found.stdout + found.stderr


@pytest.mark.parametrize("options", [[], ["--each"]])
def test_results_are_those_of_one_process(options: list[str], tmp_path: Path) -> None:
    files = {f"test_{letter}.py": TESTS for letter in "abc"}
    status, shown = run(tmp_path, files, "--processes", "3", *options)
    assert status == 1
    counts = shown.splitlines()[-1]
    for count in ("3 failed", "63 passed", "3 skipped", "3 xfailed", "3 warnings", "3 errors"):
        assert count in counts
    for said in ("what it printed", "assert (1 + 1) == 3", "no fixture", "mind this", "100%"):
        assert said in shown
    # a fixture of a file begins and ends once in each process that ran tests of it
    notes = [path.read_text() for path in tmp_path.glob("test_*.py.*")]
    assert set(notes) == {"begins ends "}
    assert len(notes) == 3 or options


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "the process of this test ended with SIGKILL"),
        ("os._exit(3)", "the process of this test ended with exit status 3"),
        ("os._exit(0)", "the process of this test ended with exit status 0"),
    ],
)
def test_a_test_that_ends_its_process_fails_and_the_others_run(
    how: str, said: str, tmp_path: Path
) -> None:
    files = {
        f"test_{letter}.py": ENDS.replace("HOW", how if letter == "b" else "pass")
        for letter in "abc"
    }
    status, shown = run(tmp_path, files, "--processes", "2", "--each")
    assert status == 1
    assert said in shown
    assert "1 failed, 8 passed" in shown.splitlines()[-1]


def test_others_run_what_a_process_had_taken_and_even_if_none_is_left(tmp_path: Path) -> None:
    text = ENDS.replace("HOW", "os._exit(0)")
    status, shown = run(tmp_path, {"test_a.py": text, "test_b.py": text}, "--processes", "2")
    assert status == 1
    assert "2 failed, 4 passed" in shown.splitlines()[-1]


def test_the_first_failure_ends_all_with_x(tmp_path: Path) -> None:
    slow = ENDS.replace("HOW", "time.sleep(60)")
    failing = "def test_fails():\n    assert False\n"
    status, shown = run(
        tmp_path, {"test_a.py": slow, "test_b.py": failing}, "--processes", "2", "-x"
    )
    assert status == 1
    assert "stopping after 1 failures" in shown


def test_what_cannot_be_collected_is_an_error(tmp_path: Path) -> None:
    files = {"test_a.py": TESTS, "test_b.py": "import nothing_of_this_name"}
    status, shown = run(tmp_path, files, "--processes", "2")
    assert status == 2
    assert "nothing_of_this_name" in shown


@given(
    sizes=st.lists(st.integers(1, 9), max_size=30),
    num_processes=st.integers(1, 6),
    turns=st.lists(st.integers(0, 5), max_size=80),
    first=st.integers(0, 30),
)
def test_every_unit_is_given_out_once(
    sizes: list[int], num_processes: int, turns: list[int], first: int
) -> None:
    num_first = min(first, len(sizes))
    stretches = Stretches(sizes, num_processes, num_first)
    taken = []
    for turn in [*turns, *list(range(num_processes)) * (len(sizes) + 1)]:
        unit = stretches.take(turn % num_processes)
        if unit is not None:
            taken.append(unit)
    assert sorted(taken) == list(range(len(sizes)))
    assert taken[:num_first] == list(range(num_first))


def test_everybody_begins_with_as_many_tests() -> None:
    stretches = Stretches([5, 5, 10, 1, 1, 8], 3)
    assert [stretches.take(process) for process in range(3)] == [0, 2, 3]


def test_tests_of_long_files_come_first_where_single_ones_are_given_out() -> None:
    long = sorted(LONG)[0]
    names = ["tests/test_a.py::one", f"{long}::two", "tests/test_b.py::three", f"{long}::four"]
    items: Any = [SimpleNamespace(nodeid=name) for name in names]
    assert units_of(items, each=True) == ([[1], [3]], [[0], [2]])


def test_long_files_exist() -> None:
    assert [name for name in sorted(LONG) if not (ROOT / name).is_file()] == []
