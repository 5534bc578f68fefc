"""How requests are sampled that don't say: one rule, wherever they come from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.cli.options import SamplingOptions
from quire.errors import ModelFormatError
from quire.frontend.tokenizer import Tokenizer
from quire.sampling_defaults import OURS, read_defaults, read_gguf_defaults
from quire.server.api.anthropic_fields import MessagesRequest
from quire.server.api.body import ApiRequest
from quire.server.api.chat import ChatCompletionRequest
from quire.server.api.completions import CompletionRequest
from quire.server.api.ollama import OllamaChatRequest
from tests.frontend.templates import QWEN
from tests.server.random_model import write_model

QWEN3 = {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
MESSAGES = [{"role": "user", "content": "Hi!"}]


@pytest.mark.parametrize(
    ("written", "defaults"),
    [
        ({}, OURS),
        ({"eos_token_id": 2, "temperature": None}, OURS),
        (QWEN3, QWEN3),
        ({"temperature": 1.0}, {"temperature": 1.0}),  # the model's word, and only that
        ({"top_k": -1, "min_p": 0.1}, {"top_k": 0, "min_p": 0.1}),
        ({"repetition_penalty": 1.1}, {**OURS, "repetition_penalty": 1.1}),
    ],
)
def test_the_models_defaults_count_and_else_ours(
    written: dict[str, Any], defaults: Mapping[str, float]
) -> None:
    assert read_defaults(written, "here") == defaults


@pytest.mark.parametrize("written", [{"temperature": "hot"}, {"top_p": 2.0}, {"top_k": 0.5}])
def test_a_value_that_no_request_may_have_is_the_files_fault(written: dict[str, Any]) -> None:
    with pytest.raises(ModelFormatError, match=r"generation_config.json: (temperature|top_[pk]): "):
        read_defaults(written, "generation_config.json")


def test_a_gguf_file_has_its_own_names() -> None:
    metadata = {"general.sampling.temp": 0.3, "general.sampling.penalty_repeat": 1.2}
    assert read_gguf_defaults(metadata) == {"temperature": 0.3, "repetition_penalty": 1.2}
    assert read_gguf_defaults({}) == OURS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("with-defaults")
    write_model(folder, QWEN)
    path = folder / "generation_config.json"
    written = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**written, **QWEN3}))
    return folder


def chosen(params: SamplingParams) -> dict[str, float]:
    return {name: getattr(params, name) for name in QWEN3}


def test_every_door_follows_the_model(folder: Path) -> None:
    defaults = Tokenizer.from_hf_folder(folder).sampling_defaults
    assert defaults == QWEN3
    assert chosen(SamplingOptions().params(defaults)) == QWEN3
    assert chosen(SamplingOptions(temperature=0.0).params(defaults)) == {
        **QWEN3,
        "temperature": 0.0,
    }
    bodies: list[tuple[type[ApiRequest], dict[str, Any]]] = [
        (ChatCompletionRequest, {"messages": MESSAGES}),
        (CompletionRequest, {"prompt": "a"}),
        (MessagesRequest, {"model": "m", "messages": MESSAGES, "max_tokens": 4}),
        (OllamaChatRequest, {"model": "m", "messages": MESSAGES}),
    ]
    for kind, body in bodies:
        silent = kind.model_validate(body)
        silent.use_defaults(defaults)
        assert chosen(silent.to_generation().params) == QWEN3, kind
        named = {"top_k": 5, "temperature": 0.25}
        said = {"options": named} if kind is OllamaChatRequest else named
        loud = kind.model_validate({**body, **said})
        loud.use_defaults(defaults)
        assert chosen(loud.to_generation().params) == {**QWEN3, **named}, kind


def test_llm_follows_it_unless_it_is_given_parameters(folder: Path) -> None:
    with LLM(str(folder), kv_cache_memory="8MiB", max_model_len=64) as llm:
        assert chosen(llm.default_params) == QWEN3
        seeded = SamplingParams(**QWEN3, seed=3, max_tokens=6)  # type: ignore[arg-type]
        (output,) = llm.generate(["a"])
        again = SamplingParams(**QWEN3, seed=output.completions[0].seed)  # type: ignore[arg-type]
        assert llm.generate(["a"], again)[0].token_ids == output.token_ids
        neutral = SamplingParams(seed=3, max_tokens=6)
        assert llm.generate(["a"], seeded)[0].token_ids != llm.generate(["a"], neutral)[0].token_ids
