"""Tools and reasoning through the server, with a model whose template knows both (and whose weights
know nothing).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.frontend.templates import QWEN
from tests.frontend.test_template_needs import FULL_TOOLS, ONE_CALL, SHORT_IDS
from tests.server.harness import SMALL_ENGINE, Server, error_of
from tests.server.random_model import write_model

THINKER = (
    QWEN
    + """
{%- if add_generation_prompt and (enable_thinking or reasoning_effort) %}{{- '<think>\\n' }}{%- endif %}"""
)
ASK = [{"role": "user", "content": "What now?"}]
PICK = {
    "type": "function",
    "function": {
        "name": "pick",
        "parameters": {
            "type": "object",
            "properties": {"what": {"enum": ["this", "that"]}},
            "required": ["what"],
        },
    },
}
STOP = {"type": "function", "function": {"name": "stop", "strict": True}}


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("thinker")
    write_model(folder, THINKER)
    engine = {
        "kv_cache_memory": "16MiB",
        "max_model_len": 1024,
        "max_num_seqs": 8,
        "dtype": "float32",
    }
    with Server(model=str(folder), engine=engine, served_model_names=["thinker"]) as server:
        server.assert_sound()
        yield server
        server.assert_sound()


def chat(server: Server, **fields: Any) -> dict[str, Any]:
    response = server.post(
        "/v1/chat/completions", {"messages": ASK, "temperature": 0, "max_tokens": 200, **fields}
    )
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


def streamed(server: Server, **fields: Any) -> dict[str, Any]:
    """A stream's deltas put together as a client does."""
    message: dict[str, Any] = {
        "content": "",
        "reasoning": "",
        "reasoning_content": "",
        "tool_calls": [],
    }
    body = {"messages": ASK, "temperature": 0, "max_tokens": 200, **fields}
    for chunk in server.stream(
        "/v1/chat/completions", {**body, "stream_options": {"include_usage": True}}
    ):
        if not chunk["choices"]:
            message["usage"] = chunk["usage"]
            break
        delta = chunk["choices"][0]["delta"]
        message["content"] += delta.get("content") or ""
        for name in ("reasoning", "reasoning_content"):
            message[name] += delta.get(name) or ""
        for call in delta.get("tool_calls", ()):
            if call["index"] == len(message["tool_calls"]):
                assert call["id"]
                message["tool_calls"].append({**call["function"]})
            else:
                message["tool_calls"][call["index"]]["arguments"] += call["function"]["arguments"]
        message["finish_reason"] = chunk["choices"][0]["finish_reason"]
    return message


def answer_as(text: str, **fields: Any) -> dict[str, Any]:
    """Fields that make the model write exactly this."""
    return {"structured_outputs": {"choice": [text]}, **fields}


THOUGHT = "<think>\nHm, <b>well</b>.\n</think>\n\nYes."


def test_reasoning_is_told_apart(thinker: Server) -> None:
    body = chat(thinker, **answer_as(THOUGHT))
    message = body["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm, <b>well</b>.", "Yes.")
    assert message["reasoning"] == message["reasoning_content"]
    details = body["usage"]["completion_tokens_details"]
    assert 0 < details["reasoning_tokens"] < body["usage"]["completion_tokens"]
    parts = streamed(thinker, **answer_as(THOUGHT))
    assert (parts["reasoning_content"], parts["content"]) == ("Hm, <b>well</b>.", "Yes.")
    assert parts["reasoning"] == parts["reasoning_content"]
    assert parts["usage"]["completion_tokens_details"] == details
    plain = chat(thinker, **answer_as("Yes <think> no."))["choices"][0]["message"]
    assert plain["content"] == "Yes <think> no."
    assert "reasoning_content" not in plain
    assert plain["reasoning"] is None  # vLLM's clients read it without looking


def test_reasoning_that_the_prompt_began(thinker: Server) -> None:
    """In every protocol, streamed and not; the model never comes to an end, so all of it is
    reasoning.
    """
    on: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": True}, "max_tokens": 5}
    body = chat(thinker, **on)
    message = body["choices"][0]["message"]
    assert message["reasoning_content"]
    assert message["content"] == ""
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == 5
    parts = streamed(thinker, **on)
    assert (parts["reasoning_content"], parts["usage"]["completion_tokens"]) == (
        message["reasoning_content"],
        5,
    )
    assert parts["usage"]["completion_tokens_details"]["reasoning_tokens"] == 5

    ask = {"model": "thinker", "max_tokens": 5, "messages": ASK, "temperature": 0}
    ask["thinking"] = {"type": "enabled", "budget_tokens": 1024}
    (block,) = thinker.post("/v1/messages", ask).json()["content"]
    assert block == {"type": "thinking", "thinking": message["reasoning_content"], "signature": ""}
    deltas = [
        event["delta"]
        for event in thinker.stream("/v1/messages", ask)
        if event["type"] == "content_block_delta"
    ]
    assert "".join(delta["thinking"] for delta in deltas) == block["thinking"]

    wanted = {
        "max_output_tokens": 5,
        "input": "What now?",
        "temperature": 0,
        "reasoning": {"effort": "high"},
    }
    response = thinker.post("/v1/responses", wanted).json()
    (item,) = response["output"]
    assert (item["type"], item["content"][0]["text"]) == ("reasoning", block["thinking"])
    assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": 5}
    events = list(thinker.stream("/v1/responses", wanted))
    pieces = [
        event["delta"] for event in events if event["type"] == "response.reasoning_text.delta"
    ]
    assert "".join(pieces) == block["thinking"]


@pytest.mark.parametrize("parallel", [True, False])
def test_required_calls(thinker: Server, parallel: bool) -> None:
    fields = {
        "tools": [PICK, STOP],
        "tool_choice": "required",
        "parallel_tool_calls": parallel,
        "seed": 5,
    }
    choice = chat(thinker, **fields, temperature=1)["choices"][0]
    calls = choice["message"]["tool_calls"]
    if choice["finish_reason"] == "tool_calls":
        for call in calls:
            arguments = json.loads(call["function"]["arguments"])
            assert (
                arguments == {}
                if call["function"]["name"] == "stop"
                else arguments["what"] in ("this", "that")
            )
    assert parallel or len(calls) == 1
    assert len({call["id"] for call in calls}) == len(calls)
    again = streamed(thinker, **fields, temperature=1)
    assert again["tool_calls"] == [call["function"] for call in calls]
    assert again["finish_reason"] == choice["finish_reason"]


def test_a_call_that_was_cut_off_says_so(thinker: Server) -> None:
    choice = chat(thinker, tools=[PICK], tool_choice="required", max_tokens=18)["choices"][0]
    assert choice["finish_reason"] == "length"
    # Inside of the arguments too, in every protocol.
    for most in range(18, 60):
        fields = {"tools": [PICK], "tool_choice": "required", "max_tokens": most}
        choice = chat(thinker, **fields)["choices"][0]
        if choice["message"].get("tool_calls"):
            break
    (call,) = choice["message"]["tool_calls"]
    with pytest.raises(json.JSONDecodeError):
        json.loads(call["function"]["arguments"])
    assert choice["finish_reason"] == "length"
    assert streamed(thinker, **fields)["finish_reason"] == "length"
    tool = {"name": "pick", "input_schema": PICK["function"]["parameters"]}  # type: ignore[index]
    body = {
        "model": "thinker",
        "messages": ASK,
        "temperature": 0,
        "max_tokens": most,
        "tools": [tool],
    }
    answer = thinker.post("/v1/messages", {**body, "tool_choice": {"type": "any"}}).json()
    assert (answer["stop_reason"], answer["content"][-1]["type"]) == ("max_tokens", "tool_use")
    asked = {
        "input": "What now?",
        "temperature": 0,
        "max_output_tokens": most,
        "tool_choice": "required",
    }
    function = {"type": "function", **PICK["function"]}  # type: ignore[dict-item]
    response = thinker.post("/v1/responses", {**asked, "tools": [function]}).json()
    assert (response["status"], response["output"][-1]["status"]) == ("incomplete", "incomplete")


def test_n_answers_have_calls_of_their_own(thinker: Server) -> None:
    body = chat(
        thinker,
        tools=[PICK, STOP],
        tool_choice={"type": "function", "function": {"name": "pick"}},
        n=3,
        seed=1,
    )
    names = [
        [call["function"]["name"] for call in choice["message"]["tool_calls"]]
        for choice in body["choices"]
    ]
    assert names == [["pick"]] * 3


def test_with_strict_tools_the_model_may_still_talk(thinker: Server) -> None:
    choice = chat(thinker, tools=[STOP], max_tokens=20, return_token_ids=True)["choices"][0]
    assert choice["message"]["content"]
    assert "tool_calls" not in choice["message"]
    assert (choice["finish_reason"], len(choice["token_ids"])) == ("length", 20)


def test_tools_or_an_answer_in_json(thinker: Server) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"enum": [1]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    message = chat(thinker, tools=[STOP], response_format=wanted)["choices"][0]["message"]
    assert message.get("tool_calls") or json.loads(message["content"]) == {"a": 1}


def test_earlier_calls_are_part_of_the_prompt(thinker: Server) -> None:
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "pick", "arguments": '{"what": "this"}'},
    }
    told = [
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "done"},
    ]
    tokens = thinker.post("/tokenize", {"messages": told, "tools": [PICK]}).json()
    prompt = thinker.post("/detokenize", {"tokens": tokens["tokens"]}).json()["prompt"]
    assert '<tool_call>\n{"name": "pick", "arguments": {"what": "this"}}\n</tool_call>' in prompt
    assert "<tool_response>\ndone\n</tool_response>" in prompt
    assert '"name": "pick"' in prompt.split("<tools>")[1].split("</tools>")[0]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
        ({"tools": [PICK, PICK]}, "tools[1].function.name"),
        ({"tools": [PICK] * 129}, "tools"),
        (
            {"tools": [PICK], "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice",
        ),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [PICK], "structured_outputs": {"regex": "a+"}}, "tools"),
        (
            {
                "tools": [
                    {
                        "type": "function",
                        "function": {"name": "a", "parameters": {"$ref": "#/nowhere"}},
                    }
                ],
                "tool_choice": "required",
            },
            "tools",
        ),
    ],
)
def test_what_is_wrong_is_named(thinker: Server, fields: dict[str, Any], field: str) -> None:
    error_of(thinker.post("/v1/chat/completions", {"messages": ASK, **fields}), 400, field)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "template", [ONE_CALL, SHORT_IDS, FULL_TOOLS], ids=["llama3", "mistral", "hermes"]
)
def test_strict_templates_in_every_protocol(template: str, tmp_path: Path) -> None:
    """A required call, and two earlier ones with ids of the client's own, whatever the template
    insists on.
    """
    write_model(tmp_path, template)
    function = {"name": "pick", "parameters": PICK["function"]["parameters"]}  # type: ignore[index]
    ids = ("call_1", "toolu_0123456789abcdef")
    with Server(model=str(tmp_path), engine=SMALL_ENGINE, served_model_names=["strict"]) as server:
        tools = [{"type": "function", "function": function}]
        (call, *_) = chat(server, tools=tools, tool_choice="required")["choices"][0]["message"][
            "tool_calls"
        ]
        assert call["function"]["name"] == "pick"
        calls = [{**call, "id": one} for one in ids]
        results: list[Any] = [
            {"role": "tool", "tool_call_id": one, "content": "done"} for one in ids
        ]
        turns = [*ASK, {"role": "assistant", "content": None, "tool_calls": calls}, *results]
        used = chat(server, messages=turns, tools=tools, max_tokens=1)["usage"]["prompt_tokens"]

        items: list[Any] = [
            {
                "type": "function_call",
                "call_id": one,
                "name": "pick",
                "arguments": call["function"]["arguments"],
            }
            for one in ids
        ]
        items += [{"type": "function_call_output", "call_id": one, "output": "done"} for one in ids]
        body = {
            "input": [*ASK, *items],
            "tools": [{"type": "function", **function}],
            "max_output_tokens": 1,
        }
        assert server.post("/v1/responses", body).json()["usage"]["input_tokens"] == used

        value = json.loads(call["function"]["arguments"])
        blocks = [{"type": "tool_use", "id": one, "name": "pick", "input": value} for one in ids]
        answers = [{"type": "tool_result", "tool_use_id": one, "content": "done"} for one in ids]
        body = {
            "model": "strict",
            "messages": [
                *ASK,
                {"role": "assistant", "content": blocks},
                {"role": "user", "content": answers},
            ],
            "tools": [{"name": "pick", "input_schema": function["parameters"]}],
        }
        assert server.post("/v1/messages/count_tokens", body).json() == {"input_tokens": used}
