"""Names by which other engines' clients ask for a form of answer: applied in every API, or refused."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from quire.errors import InvalidRequestError
from quire.server.api.structure import ConstraintFields
from tests.server.harness import Server

SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2]}},
    "required": ["a"],
    "additionalProperties": False,
}
GBNF = 'root ::= "go" | stay\nstay ::= "st" [a] "y" # rules\n'
WORDS = "go|stay"
JSON = r'\{"a": [12]\}'
ANY_OBJECT = r"\{.*"

FORMS: dict[str, tuple[Any, str]] = {
    # name and value, and what the answer has to match
    "SGLang's regex": ({"regex": "[a-c]{4}"}, "[a-c]{4}"),
    "SGLang's ebnf": ({"ebnf": GBNF}, WORDS),
    "SGLang's json_schema": ({"json_schema": json.dumps(SCHEMA)}, JSON),
    "llama.cpp's json_schema": ({"json_schema": SCHEMA}, JSON),
    "llama.cpp's grammar": ({"grammar": GBNF}, WORDS),
    "a grammar of Lark's": ({"grammar": 'start: "go" | "stay"\n'}, WORDS),
    "TGI's regex": ({"grammar": {"type": "regex", "value": "[xyz]{3}"}}, "[xyz]{3}"),
    "TGI's json": ({"grammar": {"type": "json", "value": SCHEMA}}, JSON),
    "Ollama's schema": ({"format": SCHEMA}, JSON),
    "Ollama's json": ({"format": "json"}, ANY_OBJECT),
    "vLLM's former grammar": ({"guided_grammar": GBNF}, WORDS),
    "vLLM's former object": ({"guided_json_object": True}, ANY_OBJECT),
    "vLLM's former choice": ({"guided_choice": ["go", "stay"]}, WORDS),
    "vLLM's grammar": ({"structured_outputs": {"grammar": GBNF}}, WORDS),
    "vLLM's schema": ({"structured_outputs": {"json": SCHEMA}}, JSON),
    "OpenAI's": (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
        JSON,
    ),
}


@pytest.fixture(scope="module")
def small(shared_small_server: Server) -> Iterator[Server]:
    shared_small_server.assert_sound()
    yield shared_small_server
    shared_small_server.assert_sound()


def ask(server: Server, api: str, **fields: Any) -> str:
    """The text of an answer that every API gives to the same question."""
    turns = [{"role": "user", "content": "What now?"}]
    fields = {"temperature": 1, **fields}
    if api == "messages":
        body = {"model": "small", "messages": turns, "max_tokens": 20, **fields}
        response = server.post("/v1/messages", body)
        assert response.status_code == 200, response.text
        text = response.json()["content"][0]["text"]
    elif api == "responses":
        response = server.post(
            "/v1/responses", {"input": "What now?", "max_output_tokens": 20, **fields}
        )
        assert response.status_code == 200, response.text
        text = response.json()["output"][0]["content"][0]["text"]
    elif api == "chat":
        response = server.post(
            "/v1/chat/completions", {"messages": turns, "max_tokens": 20, **fields}
        )
        assert response.status_code == 200, response.text
        text = response.json()["choices"][0]["message"]["content"]
    else:
        prompt = server.post("/tokenize", {"messages": turns}).json()["tokens"]
        response = server.post("/v1/completions", {"prompt": prompt, "max_tokens": 20, **fields})
        assert response.status_code == 200, response.text
        text = response.json()["choices"][0]["text"]
    assert "x-quire-ignored" not in response.headers
    return str(text)


APIS = ("chat", "completions", "responses", "messages")


@pytest.mark.few(5)
@pytest.mark.parametrize("name", FORMS)
def test_it_is_applied_in_every_api(small: Server, name: str) -> None:
    fields, pattern = FORMS[name]
    found = {ask(small, api, seed=7, **fields) for api in APIS}
    assert len(found) == 1
    assert re.fullmatch(pattern, found.pop(), re.DOTALL)


def test_the_exact_answer_can_be_had_by_any_route(small: Server) -> None:
    for fields in (
        {"seed": 11},
        {"seed": 12},
        {"seed": 11, "top_k": 5, "repetition_penalty": 1.3},
        {"temperature": 0},
    ):
        assert len({ask(small, api, **fields) for api in APIS}) == 1
    assert ask(small, "messages", seed=11) != ask(small, "messages", seed=12)
    assert ask(small, "responses", seed=11) != ask(small, "responses", seed=12)


BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {
        "model": "small",
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 1,
    },
}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"structural_tag": "x"}, "structural_tag"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
        (
            {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " "}},
            "structured_outputs.whitespace_pattern",
        ),
        (
            {"structured_outputs": {"structural_tag": "x", "regex": "a"}},
            "structured_outputs.structural_tag",
        ),
        ({"nvext": {"guided_json": SCHEMA}}, "nvext"),
        ({"guided_decoding": {"regex": "a"}}, "guided_decoding"),
        ({"grammar": GBNF, "grammar_lazy": True}, "grammar_lazy"),
        ({"stop_regex": "a+"}, "stop_regex"),
        ({"format": "yaml"}, "format"),
        ({"response_format": {"type": "structural_tag"}}, "response_format.type"),
        ({"grammar": 'root ::= "a" | missing'}, "grammar"),
        ({"ebnf": "root ::= " + "x" * 20_000}, "ebnf"),
        ({"grammar": {"type": "xml", "value": "x"}}, "grammar"),
        ({"regex": "(", "max_tokens": 1}, "regex"),
        ({"regex": "a", "ebnf": GBNF}, "ebnf"),
        ({"json_schema": "{", "max_tokens": 1}, "json_schema"),
    ],
)
def test_what_cant_be_applied_is_refused(
    small: Server, path: str, fields: dict[str, Any], field: str
) -> None:
    fields = {name: value for name, value in fields.items() if name != "max_tokens"}
    response = small.post(path, {**BODIES[path], **fields})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["message"].startswith(field)


def test_nothing_asked_for_is_nothing() -> None:
    empty = {
        "regex": "",
        "ebnf": None,
        "grammar": "",
        "json_schema": "",
        "format": "",
        "guided_json_object": False,
    }
    assert ConstraintFields.model_validate(empty).structured() == (None, {})
    both = ConstraintFields.model_validate(
        {"regex": "a", "response_format": {"type": "json_object"}}
    )
    with pytest.raises(
        InvalidRequestError, match="regex: asks for something else than response_format"
    ):
        both.structured()


def test_the_same_constraint_under_two_names_is_one() -> None:
    """guidance's client for vLLM sends its grammar under the new name and under the former one."""
    grammar = 'start: "a" | "b"'
    twice = ConstraintFields.model_validate(
        {"structured_outputs": {"grammar": grammar}, "guided_grammar": grammar}
    )
    once = ConstraintFields.model_validate({"structured_outputs": {"grammar": grammar}})
    assert twice.structured() == once.structured()
    differ = ConstraintFields.model_validate(
        {"guided_grammar": grammar, "structured_outputs": {"regex": "a"}}
    )
    with pytest.raises(InvalidRequestError, match="guided_grammar"):
        differ.structured()


OPEN = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}


@pytest.mark.parametrize("strict", [True, False])
def test_strict_schemas_are_closed_and_others_are_not(small: Server, strict: bool) -> None:
    """With `strict` nothing but what is named can come; without, JSON Schema lets more come, and
    this model, which writes whatever is allowed, does so.
    """
    chat = {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"schema": OPEN, "strict": strict},
        }
    }
    text = {
        "text": {"format": {"type": "json_schema", "name": "x", "schema": OPEN, "strict": strict}}
    }
    for api, fields in (("chat", chat), ("completions", chat), ("responses", text)):
        answers = {ask(small, api, seed=seed, **fields) for seed in range(4)}
        assert (answers == {'{"a": 1}'}) == strict
    tool = {"name": "f", "parameters": OPEN, "strict": strict}
    asked = {
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 60,
        "tool_choice": "required",
    }
    asked |= {"tools": [{"type": "function", "function": tool}], "parallel_tool_calls": False}
    found = set()
    for seed in range(4):
        choice = small.post("/v1/chat/completions", {**asked, "seed": seed}).json()["choices"][0]
        found |= {call["function"]["arguments"] for call in choice["message"].get("tool_calls", ())}
    assert (found == {'{"a": 1}'}) == strict
