"""Servers that modules share: starting one takes as long as many tests do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire import LLM
from tests.frontend.templates import QWEN
from tests.server.browser import open_browser
from tests.server.harness import ENGINE, KEY, SMALL_ENGINE, Server
from tests.server.random_model import write_model
from tests.server.scripted_model import write_scripted_model


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
def llm() -> Iterator[LLM]:
    """The same model without a server."""
    with LLM("smollm2", **ENGINE) as llm:
        yield llm


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that loads at once and computes nonsense, for tests in which neither matters."""
    folder: Path = tmp_path_factory.mktemp("small-model")
    write_model(folder, QWEN)
    return str(folder)


@pytest.fixture(scope="session")
def shared_small_server(small_model: str) -> Iterator[Server]:
    """A server of that model, for modules that leave it as they found it."""
    with Server(
        model=small_model, engine=SMALL_ENGINE, served_model_names=["small", "m"]
    ) as server:
        yield server


SCRIPTS = {
    "hello": "Hello, this is a scripted model.",
    "shell": '<tool_call>\n{"name": "exec_command", "arguments": {"cmd": "echo quire-was-here"}}\n</tool_call>',
    "bash": '<tool_call>\n{"name": "Bash", "arguments": {"command": "echo quire-was-here", "description": "Say it"}}'
    "\n</tool_call>",
    "small-bash": '<tool_call>\n{"name": "bash", "arguments": {"command": "echo quire-was-here", "description": "x"}}'
    "\n</tool_call>",
    "weather": 'I look it up. <tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>',
    "mixed": 'First. <tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call> Then this.',
    "nested": '<tool_call>\n{"name": "agents.stop", "arguments": {"target": "all"}}\n</tool_call>',
    "long": "word, " * 40 + "end.",
    "done": "I have seen what came back.",
}
"""What the scripted model says to a user who writes @NAME; else "hello", and "done" to the results
of tools.
"""
SCRIPTED_ENGINE = {
    "kv_cache_memory": "32MiB",
    "max_model_len": 16384,
    "max_num_seqs": 8,
    "dtype": "float32",
}


@pytest.fixture(scope="session")
def scripted_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with it."""
    folder: Path = tmp_path_factory.mktemp("scripted")
    write_scripted_model(folder, SCRIPTS, default="hello", after_tool="done", context=16384)
    return str(folder)


@pytest.fixture(scope="session")
def scripted(scripted_model: str) -> Iterator[Server]:
    """A server of a model that says what its script wants, to whatever client."""
    with Server(
        model=scripted_model, engine=SCRIPTED_ENGINE, served_model_names=["scripted"]
    ) as server:
        yield server


@pytest.fixture(scope="session")
def keyed() -> Iterator[Server]:
    """The same, for those who know a key."""
    with Server(api_keys=[KEY]) as server:
        yield server


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """For one module at a time: while it is there, nobody else can have an event loop in this
    thread.
    """
    yield from open_browser()
