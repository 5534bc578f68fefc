"""A parameter is declared once: whoever offers, checks or describes it follows from the table."""

from __future__ import annotations

import json
import subprocess
import sys
import typing
from pathlib import Path
from typing import Any

import pytest

from quire.config import EngineConfig, EngineOptions
from quire.field_checks import parameters
from quire.sampling_params import SamplingParams
from quire.server.api.anthropic_fields import MessagesRequest
from quire.server.api.chat import ChatCompletionRequest
from quire.server.api.completions import CompletionRequest
from quire.server.api.ollama import Options
from quire.server.api.responses import ResponsesRequest
from quire.server.api.sampling import FromTable

ROOT = Path(__file__).parents[1]
BODIES = (ChatCompletionRequest, CompletionRequest, ResponsesRequest, MessagesRequest, Options)
OWN_FORM = {"stop", "logit_bias", "logprobs", "n", "prediction"}
"""Parameters that some API writes in another form: a text for a list, true for a number, only 1."""


@pytest.fixture(scope="module")
def planted() -> Any:
    """Where a new line of each table is found, in a process that has planted it."""
    command = [sys.executable, "-m", "tests.planted_parameters"]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, cwd=ROOT, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_new_sampling_parameter_is_a_field_of_every_api(planted: Any) -> None:
    chat = planted["schemas"]["/v1/chat/completions"]
    number, null = chat["anyOf"]
    assert number == {"type": "number", "minimum": 0.0, "maximum": 0.75}
    assert null == {"type": "null"}
    assert chat["default"] == 0.25
    assert chat["description"] == "Planted for a test."
    paths = ("/v1/completions", "/v1/responses", "/v1/messages", "Ollama's options")
    assert [planted["schemas"].get(path) for path in paths] == [chat] * len(paths)


@pytest.mark.parametrize("command", ["run --help", "chat --help", "bench serve --help"])
def test_a_new_sampling_parameter_is_an_option_of_commands(planted: Any, command: str) -> None:
    assert "--planted-p X" in planted["command line"][command]
    assert "Planted for a test." in planted["command line"][command]


@pytest.mark.parametrize("command", ["run --help", "chat --help", "serve --help", "batch --help"])
def test_a_new_engine_option_is_an_option_of_commands(planted: Any, command: str) -> None:
    assert "--planted-size N" in planted["command line"][command]


def test_a_new_parameter_is_in_the_forms_that_are_filled_in(planted: Any) -> None:
    (field,) = [one for one in planted["form"] if one["name"] == "planted_p"]
    assert (field["minimum"], field["maximum"], field["default"]) == (0.0, 0.75, 0.25)
    written = planted["command line"]["serve --print-config"]
    assert "# Planted in the engine.\nplanted_size = 3\n" in written


def test_a_new_parameter_is_in_the_docs(planted: Any) -> None:
    row = "| `planted_p` | `0.25` | 0 to 0.75 | Planted for a test. | x | x | x |"
    assert row in planted["docs"]["sampling"]
    assert "| `planted_size` | `3` | 1 to 8 | Planted in the engine. |" in planted["docs"]["engine"]


def test_a_new_parameter_is_checked_wherever_it_comes_from(planted: Any) -> None:
    assert planted["refused"] == [
        "planted_p: must be at least 0 and at most 0.75, not 1.0",
        "planted_size: must be from 1 to 8, not 0",
    ]
    asked = planted["command line"]
    assert "planted_p: must be at least 0 and at most 0.75, not 2.0" in asked["run x --planted-p 2"]
    assert "planted_size: must be from 1 to 8, not 9" in asked["run x --planted-size 9"]


def test_tables_and_options_need_neither_torch_nor_the_servers_libraries(planted: Any) -> None:
    assert planted["imported for options"] == []


def test_no_api_writes_a_range_of_its_own_beside_the_tables() -> None:
    for body in BODIES:
        for name in body.model_fields.keys() & parameters(SamplingParams).keys() - OWN_FORM:
            metadata = body.model_fields[name].metadata
            assert any(isinstance(one, FromTable) for one in metadata), (body, name)
            assert not any(
                hasattr(one, end) for one in metadata for end in ("ge", "gt", "le", "lt")
            )


def test_the_page_names_no_parameter_that_it_has_from_the_server() -> None:
    """But for the seed, which it draws."""
    offered = {name for name, one in parameters(SamplingParams).items() if one.page} - {"seed"}
    web = ROOT / "quire" / "server" / "web"
    page, script = (web / "index.html").read_text(), (web / "settings.js").read_text()
    assert [name for name in offered if f'name="{name}"' in page or f'"{name}"' in script] == []


def test_an_llm_takes_as_keywords_what_the_engine_has_as_options() -> None:
    assert EngineOptions.__annotations__.keys() == EngineConfig.__dataclass_fields__.keys()
    assert typing.get_type_hints(EngineOptions) == typing.get_type_hints(EngineConfig)


def test_every_line_says_what_it_is_for() -> None:
    for table in (SamplingParams, EngineConfig):
        for name, one in parameters(table).items():
            assert one.help.endswith("."), name
            assert len(one.help) <= 110, name
            assert str(one.values), name


def test_names_elsewhere_are_given_for_all_parameters() -> None:
    text = (ROOT / "docs" / "sampling.md").read_text()
    table = text[text.index("## Names elsewhere") :]
    missing = [name for name in parameters(SamplingParams) if f"`{name}`" not in table]
    assert missing == []
