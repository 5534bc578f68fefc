"""Servers that modules share: starting one takes as long as many tests do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.frontend.templates import QWEN
from tests.server.harness import KEY, Server
from tests.server.random_model import write_model


@pytest.fixture(scope="session")
def shared_server() -> Iterator[Server]:
    with Server() as server:
        yield server


@pytest.fixture(scope="module")
def server(shared_server: Server) -> Iterator[Server]:
    """SmolLM2 behind the server's defaults, in a small cache; each module leaves it as it found it."""
    shared_server.assert_sound()
    yield shared_server
    shared_server.assert_sound()


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that loads at once and computes nonsense, for tests in which neither matters."""
    folder: Path = tmp_path_factory.mktemp("small-model")
    write_model(folder, QWEN)
    return str(folder)


@pytest.fixture(scope="session")
def keyed() -> Iterator[Server]:
    """The same, for those who know a key."""
    with Server(api_keys=[KEY]) as server:
        yield server
