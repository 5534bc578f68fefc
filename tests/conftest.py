"""Shared fixtures. The real model is fetched once into Quire's own cache, as `make run` does."""

from __future__ import annotations

import gc
import os
import signal

os.environ["TRANSFORMERS_VERBOSITY"] = "error"  # read when it is imported, so before that
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
os.environ["TQDM_DISABLE"] = "1"

from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.long_runs import IS_QUICK
from tests.processes import Processes, add_options
from tests.selection import mark_slow_cases
from tests.skips import skipped_lines

gc.disable()  # while tests are collected: nearly all that is made then stays

if not torch.cuda.is_available():
    # Triton's kernels then run on the CPU; read when it is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

# The same examples on every run; HYPOTHESIS_PROFILE=explore looks for new ones.
settings.register_profile(
    "repeatable", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
# For tests that don't say how many themselves.
settings.register_profile("quick", settings.get_profile("repeatable"), max_examples=25)
settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick" if IS_QUICK else "repeatable"))


# All of it is marked `gpu`, which `make test` leaves out: to import it takes seconds.
collect_ignore = ["gpu"] if IS_QUICK else []


def pytest_addoption(parser: pytest.Parser) -> None:
    add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    # Started in the background, a shell has us ignore Ctrl-C, and every process that a test
    # interrupts would, too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.option.processes > 1:
        config.pluginmanager.register(
            Processes(config, begin=partial(share_cores, config.option.processes))
        )
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))  # who has pytest-xdist
    if workers > 1:
        share_cores(workers)


def share_cores(count: int) -> None:
    """With more threads than cores, OpenMP spends its time waiting at barriers. The variable is for
    the processes that tests start.
    """
    threads = max(1, (os.cpu_count() or 1) // count)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    torch.set_num_threads(threads)


@pytest.hookimpl(tryfirst=True)  # before pytest takes out what -m does not want
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_slow_cases(items)
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="no CUDA device here")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


def pytest_collection_finish() -> None:
    """Thousands of tests with their marks and parameters stay until the end: full collections, of
    which tests cause hundreds, need not walk over them every time.
    """
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What was skipped, and why, in three lines at most."""
    for line in skipped_lines(terminalreporter.stats.get("skipped", [])):
        terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct, pulled on first use."""
    from quire.checkpoints.sources import resolve

    return resolve("smollm2").path
