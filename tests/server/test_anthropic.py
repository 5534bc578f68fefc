"""POST /v1/messages, by hand; tests/server/test_clients.py has Anthropic's own client."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from quire.server.api.anthropic import ContentBlocks, tool_input
from quire.server.api.anthropic_fields import MessagesRequest
from quire.server.calls.generation import GenerationEvent, ToolCallDelta
from tests.server.harness import Server, wait_for

WEATHER = {
    "name": "weather",
    "description": "The weather in a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Oslo"]}},
        "required": ["city"],
    },
}
HI = [{"role": "user", "content": "Hi!"}]


def body_of(**fields: Any) -> dict[str, Any]:
    return {"model": "smollm2", "max_tokens": 12, "temperature": 0, "messages": HI, **fields}


def ask(server: Server, **fields: Any) -> dict[str, Any]:
    response = server.post("/v1/messages", body_of(**fields))
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


def refusal(response: httpx.Response, status: int = 400) -> str:
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"type", "error", "request_id"}
    assert body["type"] == "error"
    assert body["request_id"] == response.headers["x-request-id"]
    message: str = body["error"]["message"]
    return message


def test_an_answer_is_what_chat_completions_give(server: Server) -> None:
    messages = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "Name a colour."},
    ]
    chat = server.post(
        "/v1/chat/completions", {"messages": messages, "temperature": 0, "max_tokens": 12}
    ).json()
    system = [{"type": "text", "text": "Be short.", "cache_control": {"type": "ephemeral"}}]
    user = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "Name a "}, {"type": "text", "text": "colour."}],
        }
    ]
    body = ask(server, system=system, messages=user, metadata={"user_id": "me"})
    assert body["content"] == [{"type": "text", "text": chat["choices"][0]["message"]["content"]}]
    assert (body["type"], body["role"], body["model"]) == ("message", "assistant", "smollm2")
    assert body["id"].startswith("msg_")
    usage = body["usage"]
    assert (
        usage["input_tokens"] + usage["cache_read_input_tokens"] == chat["usage"]["prompt_tokens"]
    )
    assert usage["output_tokens"] == chat["usage"]["completion_tokens"]
    counted = server.post(
        "/v1/messages/count_tokens", {"model": "smollm2", "system": "Be short.", "messages": user}
    )
    assert counted.json() == {"input_tokens": chat["usage"]["prompt_tokens"]}
    assert server.get(f"/v1/requests/{body['id']}").json()["notes"] == {"user": "me"}


@pytest.mark.parametrize("choice", [None, {"type": "none"}])
def test_tokens_are_counted_as_they_will_be_used(server: Server, choice: Any) -> None:
    fields = {"model": "smollm2", "messages": HI, "tools": [WEATHER], "tool_choice": choice}
    counted = server.post("/v1/messages/count_tokens", fields).json()["input_tokens"]
    usage = ask(server, **fields, max_tokens=1)["usage"]
    assert counted == usage["input_tokens"] + usage["cache_read_input_tokens"]
    plain = server.post("/v1/messages/count_tokens", {"model": "smollm2", "messages": HI}).json()[
        "input_tokens"
    ]
    assert (counted > plain) == (choice is None)


def test_why_it_ended(server: Server) -> None:
    whole = ask(server, max_tokens=64)
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("end_turn", None)
    assert ask(server, max_tokens=2)["stop_reason"] == "max_tokens"
    word = whole["content"][0]["text"].split()[2]
    stopped = ask(server, max_tokens=64, stop_sequences=["never", word])
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", word)
    assert word not in stopped["content"][0]["text"]


def test_a_stream_tells_the_whole_message_in_order(server: Server) -> None:
    whole = ask(server, max_tokens=6)
    events = list(server.stream("/v1/messages", body_of(max_tokens=6)))
    names = [event["type"] for event in events]
    assert names[:3] == ["message_start", "ping", "content_block_start"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    text = "".join(
        event["delta"]["text"] for event in events if event["type"] == "content_block_delta"
    )
    assert text == whole["content"][0]["text"]
    assert events[0]["message"]["content"] == []
    assert events[-2]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] == 6


def test_the_last_message_is_continued(server: Server) -> None:
    prefilled = [*HI, {"role": "assistant", "content": "My name is"}]
    chat = server.post(
        "/v1/chat/completions",
        {
            "messages": prefilled,
            "add_generation_prompt": False,
            "continue_final_message": True,
            "temperature": 0,
            "max_tokens": 12,
        },
    ).json()
    body = ask(server, messages=prefilled)
    assert body["content"][0]["text"] == chat["choices"][0]["message"]["content"]


@pytest.mark.few(1)
@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_calls_and_their_results(server: Server, choice: dict[str, Any]) -> None:
    fields = {
        "tools": [WEATHER],
        "tool_choice": {**choice, "disable_parallel_tool_use": True},
        "max_tokens": 100,
    }
    body = ask(server, **fields)
    (block,) = body["content"]
    assert (block["type"], block["name"], body["stop_reason"]) == (
        "tool_use",
        "weather",
        "tool_use",
    )
    assert block["input"]["city"] in ("Rome", "Oslo")
    events = list(server.stream("/v1/messages", body_of(**fields)))
    (start,) = [event for event in events if event["type"] == "content_block_start"]
    assert start["content_block"] | {"id": ""} == {
        "type": "tool_use",
        "id": "",
        "name": "weather",
        "input": {},
    }
    pieces = [
        event["delta"]["partial_json"] for event in events if event["type"] == "content_block_delta"
    ]
    assert json.loads("".join(pieces)) == block["input"]
    result = {
        "type": "tool_result",
        "tool_use_id": block["id"],
        "content": [{"type": "text", "text": "sunny"}],
    }
    turns = [*HI, {"role": "assistant", "content": [block]}, {"role": "user", "content": [result]}]
    follow_up = ask(server, messages=turns, tools=[WEATHER], tool_choice={"type": "none"})
    assert follow_up["content"][0]["type"] == "text"
    longer = server.post(
        "/v1/messages/count_tokens", {"model": "smollm2", "messages": turns, "tools": [WEATHER]}
    )
    assert longer.json()["input_tokens"] > 60


def test_structure(server: Server) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"enum": [1, 2]}},
        "required": ["n"],
        "additionalProperties": False,
    }
    body = ask(
        server, output_config={"format": {"type": "json_schema", "schema": schema}}, max_tokens=30
    )
    assert json.loads(body["content"][0]["text"]) in ({"n": 1}, {"n": 2})


def test_blocks_become_openai_messages() -> None:
    call = {"type": "tool_use", "id": "1", "name": "f", "input": {"x": 1}}
    thought = {"type": "thinking", "thinking": "Hm", "signature": "s"}
    hidden = {"type": "redacted_thinking", "data": "?"}
    result = {"type": "tool_result", "tool_use_id": "1", "content": "none", "is_error": True}
    body = MessagesRequest.model_validate(
        {
            "model": "m",
            "max_tokens": 5,
            "system": "S",
            "messages": [
                {"role": "user", "content": "Q"},
                {
                    "role": "assistant",
                    "content": [hidden, thought, {"type": "text", "text": "A"}, call],
                },
                {"role": "user", "content": [result, {"type": "text", "text": "And?"}]},
            ],
            "thinking": {"type": "enabled", "budget_tokens": 2000},
            "tools": [{"name": "f", "input_schema": {"type": "object"}, "strict": True}],
        }
    )
    (prompt,) = body.to_generation().prompts
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}]
    assert prompt.messages == [  # type: ignore[union-attr]
        {"role": "system", "content": "S"},
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": "A", "reasoning_content": "Hm", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "content": "Error: none"},
        {"role": "user", "content": "And?"},
    ]
    assert prompt.template_kwargs == {"enable_thinking": True}  # type: ignore[union-attr]
    function = {"name": "f", "parameters": {"type": "object"}, "strict": True}
    assert prompt.tools == [{"type": "function", "function": function}]  # type: ignore[union-attr]


def test_thinking_text_and_calls_are_blocks_of_their_own() -> None:
    blocks = ContentBlocks()
    lines: list[bytes] = []
    for event in (
        GenerationEvent(0, reasoning="Hm"),
        GenerationEvent(0, content="Let "),
        GenerationEvent(0, content="me"),
        GenerationEvent(
            0, tool_calls=(ToolCallDelta(0, "a", "f", "{}"), ToolCallDelta(1, "b", "f", ""))
        ),
        GenerationEvent(0, tool_calls=(ToolCallDelta(1, None, None, "{}"),)),
    ):
        lines += blocks.take(event)
    lines += blocks.close()
    lines += blocks.close()
    events = [json.loads(line.split(b"data: ")[1]) for line in lines]
    started = [
        (e["index"], e["content_block"]["type"])
        for e in events
        if e["type"] == "content_block_start"
    ]
    assert started == [(0, "thinking"), (1, "text"), (2, "tool_use"), (3, "tool_use")]
    assert [e["index"] for e in events if e["type"] == "content_block_stop"] == [0, 1, 2, 3]
    deltas = [
        (e["index"], e["delta"]["type"]) for e in events if e["type"] == "content_block_delta"
    ]
    assert deltas == [
        (0, "thinking_delta"),
        (1, "text_delta"),
        (1, "text_delta"),
        (2, "input_json_delta"),
        (3, "input_json_delta"),
    ]


def test_arguments_that_are_no_object_are_passed_on_as_text() -> None:
    assert tool_input('{"a": 1}') == {"a": 1}
    assert tool_input('{"a": ') == {"invalid_json": '{"a": '}
    assert tool_input("[" * 100_000) == {"invalid_json": "[" * 100_000}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": []}]}, "messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "messages[0].content[0]",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}]},
            "messages.content",
        ),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": [{"role": "user", "content": "word " * 2000}]}, "1024"),
        ({"temperature": 1.5}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"stop_sequences": [" "]}, "stop_sequences"),
        ({"stop_sequences": ["a"] * 100}, "stop_sequences"),
        ({"tools": [{"name": "x"}]}, "tools[0].input_schema"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": 3}}}},
            "output_config.format.schema",
        ),
    ],
)
def test_what_is_wrong_is_named(server: Server, fields: dict[str, Any], named: str) -> None:
    assert named in refusal(server.post("/v1/messages", body_of(**fields)))


def test_the_model_and_the_path_must_be_right(server: Server) -> None:
    response = server.post("/v1/messages", body_of(model="claude"))
    assert "claude" in refusal(response, 404)
    assert response.json()["error"]["type"] == "not_found_error"
    refusal(server.get("/v1/messages"), 405)


def test_what_has_no_meaning_here_is_named_in_a_header(server: Server) -> None:
    thinking = {"type": "enabled", "budget_tokens": 1024}
    response = server.post("/v1/messages", body_of(max_tokens=1, thinking=thinking, speed="fast"))
    ignored = set(response.headers["x-quire-ignored"].split(", "))
    assert {"thinking.budget_tokens", "speed", "thinking"} <= ignored


def test_a_client_that_leaves_ends_its_message(server: Server) -> None:
    lost_before = server.metric("quire_answers_not_finished_total")
    stream = server.stream(
        "/v1/messages", body_of(max_tokens=900, messages=[{"role": "user", "content": "Count."}])
    )
    for _ in range(6):
        next(stream)
    stream.close()  # type: ignore[attr-defined]
    wait_for(lambda: server.is_idle, "the engine to be idle")
    assert server.metric("quire_answers_not_finished_total") > lost_before
