"""POST /v1/responses, by hand; tests/server/test_clients.py has OpenAI's own client."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quire.outputs import TokenLogprobs
from quire.server.api.responses import OutputItems, ResponsesRequest
from quire.server.calls.generation import GenerationEvent, ToolCallDelta
from quire.server.stored.store import ResponseStore, StoreLimits
from tests.server.harness import Server, error_of, wait_for

WEATHER = {
    "type": "function",
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Oslo"]}},
        "required": ["city"],
    },
}


def respond(server: Server, **fields: Any) -> dict[str, Any]:
    response = server.post(
        "/v1/responses", {"input": "Hi!", "temperature": 0, "max_output_tokens": 12, **fields}
    )
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


def test_a_response_can_be_cancelled_while_it_is_written(server: Server) -> None:
    body = {
        "input": "Tell me a story.",
        "max_output_tokens": 900,
        "ignore_eos": True,
        "stream": True,
    }
    with server.client() as client, client.stream("POST", "/v1/responses", json=body) as response:
        events = (
            json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: ")
        )
        response_id = next(
            event["response"]["id"] for event in events if event["type"] == "response.created"
        )
        next(event for event in events if event["type"] == "response.output_text.delta")
        cancelled = server.post(f"/v1/responses/{response_id}/cancel", {})
        rest = list(events)
    assert cancelled.status_code == 200
    assert (cancelled.json()["id"], cancelled.json()["status"]) == (response_id, "cancelled")
    assert rest[-1]["type"] == "error"
    assert rest[-1]["code"] == "cancelled"
    stored = server.get(f"/v1/responses/{response_id}").json()
    assert stored["status"] == "cancelled"
    assert stored["output"][0]["content"][0]["text"]
    assert "is over" in error_of(server.post(f"/v1/responses/{response_id}/cancel", {}), 400)
    error_of(server.post("/v1/responses/resp_unknown/cancel", {}), 404)


def test_an_answer_is_what_chat_completions_give(server: Server) -> None:
    chat = server.post(
        "/v1/chat/completions",
        {
            "messages": [
                {"role": "system", "content": "Be short."},
                {"role": "user", "content": "Name a colour."},
            ],
            "temperature": 0,
            "max_tokens": 12,
        },
    ).json()
    body = respond(
        server,
        input="Name a colour.",
        instructions="Be short.",
        user="me",
        metadata={"a": "b"},
        safety_identifier="s",
    )
    (item,) = body["output"]
    assert item["content"][0]["text"] == chat["choices"][0]["message"]["content"]
    assert (item["type"], item["role"]) == ("message", "assistant")
    assert body["id"].startswith("resp_")
    assert (body["object"], body["store"], body["metadata"], body["user"]) == (
        "response",
        True,
        {"a": "b"},
        "me",
    )
    assert (body["safety_identifier"], body["service_tier"]) == ("s", "default")
    assert server.get(f"/v1/requests/{body['id']}").json()["notes"] == {
        "user": "me",
        "safety_identifier": "s",
        "metadata": {"a": "b"},
    }
    usage = body["usage"]
    assert usage["input_tokens"] == chat["usage"]["prompt_tokens"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert respond(server, max_output_tokens=2)["status"] == "incomplete"
    assert respond(server, max_output_tokens=2)["incomplete_details"] == {
        "reason": "max_output_tokens"
    }


def test_a_stream_tells_the_whole_response_in_order(server: Server) -> None:
    whole = respond(server, max_output_tokens=6)
    events = list(
        server.stream("/v1/responses", {"input": "Hi!", "temperature": 0, "max_output_tokens": 6})
    )
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    names = [event["type"].removeprefix("response.") for event in events]
    assert names[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert names[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert set(names[4:-4]) == {"output_text.delta"}
    text = whole["output"][0]["content"][0]["text"]
    assert "".join(event.get("delta", "") for event in events) == text
    last = events[-1]["response"]
    assert last["output"][0]["content"][0]["text"] == text
    assert last["usage"]["output_tokens"] == 6
    assert events[-2]["item"] == last["output"][0]


def test_logprobs_on_request(server: Server) -> None:
    body = respond(
        server, include=["message.output_text.logprobs"], top_logprobs=2, max_output_tokens=4
    )
    part = body["output"][0]["content"][0]
    assert "".join(entry["token"] for entry in part["logprobs"]) == part["text"]
    assert all(len(entry["top_logprobs"]) == 2 for entry in part["logprobs"])


def test_structure(server: Server) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "maximum": 9, "minimum": 0}},
        "required": ["n"],
    }
    schema["additionalProperties"] = False
    text = {"format": {"type": "json_schema", "name": "number", "schema": schema, "strict": True}}
    body = respond(server, input="A number?", text=text, max_output_tokens=40)
    assert set(json.loads(body["output"][0]["content"][0]["text"])) == {"n"}
    assert body["text"] == text
    loose = respond(
        server, text={"format": {"type": "json_object"}, "verbosity": "low"}, max_output_tokens=5
    )
    assert loose["output"][0]["content"][0]["text"].startswith("{")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
def test_calls_and_their_results(server: Server, choice: Any) -> None:
    question = {"role": "user", "content": [{"type": "input_text", "text": "Weather in Rome?"}]}
    fields = {
        "input": [question],
        "tools": [WEATHER],
        "tool_choice": choice,
        "parallel_tool_calls": False,
    }
    body = respond(server, **fields, max_output_tokens=100)
    (call,) = body["output"]
    assert (call["type"], call["name"], call["status"]) == ("function_call", "weather", "completed")
    assert json.loads(call["arguments"])["city"] in ("Rome", "Oslo")
    assert body["tool_choice"] == choice
    events = list(
        server.stream("/v1/responses", {**fields, "temperature": 0, "max_output_tokens": 100})
    )
    deltas = [e["delta"] for e in events if e["type"] == "response.function_call_arguments.delta"]
    assert "".join(deltas) == call["arguments"]
    assert len(deltas) > 2
    (done,) = [
        event for event in events if event["type"] == "response.function_call_arguments.done"
    ]
    assert done["arguments"] == call["arguments"]
    result = {
        "type": "function_call_output",
        "call_id": call["call_id"],
        "output": "sunny, 30 degrees",
    }
    follow_up = respond(server, input=[question, call, result], tools=[WEATHER], tool_choice="none")
    assert follow_up["output"][0]["type"] == "message"
    assert follow_up["usage"]["input_tokens"] > 20


def test_items_become_the_turns_they_were() -> None:
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    body = ResponsesRequest.model_validate(
        {
            "input": [
                {"role": "developer", "content": "Be kind."},
                {"role": "user", "content": "Q"},
                {
                    "type": "reasoning",
                    "id": "rs",
                    "summary": [],
                    "content": [{"type": "reasoning_text", "text": "Hm"}],
                },
                {
                    "type": "message",
                    "role": "assistant",
                    "content": [{"type": "output_text", "text": "Let me see."}],
                },
                call,
                {**call, "call_id": "2"},
                {
                    "type": "function_call_output",
                    "call_id": "1",
                    "output": [{"type": "input_text", "text": "one"}],
                },
                {"type": "function_call_output", "call_id": "2", "output": "two"},
                {"type": "message", "role": "assistant", "content": "A"},
                {
                    "type": "message",
                    "role": "assistant",
                    "content": [{"type": "refusal", "refusal": "B"}],
                },
            ]
        }
    )
    body.recall(ResponseStore(StoreLimits(0, 0, 1)).of(""))
    (prompt,) = body.to_generation().prompts
    function = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    assert prompt.messages == [  # type: ignore[union-attr]
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": "Q"},
        {
            "role": "assistant",
            "content": "Let me see.",
            "reasoning_content": "Hm",
            "tool_calls": [{"id": "1", **function}, {"id": "2", **function}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "one"},
        {"role": "tool", "tool_call_id": "2", "content": "two"},
        {"role": "assistant", "content": "A"},
        {"role": "assistant", "content": "B"},
    ]


def test_reasoning_text_and_calls_are_items_of_their_own() -> None:
    items = OutputItems(with_logprobs=True, namespaces={})
    score = TokenLogprobs(1, -0.5, 1, b"x", ())
    out = []
    for event in (
        GenerationEvent(0, reasoning="Hm", logprobs=(score,)),
        GenerationEvent(0, reasoning="m."),
        GenerationEvent(0, logprobs=(score,)),  # half a character
        GenerationEvent(0, content="Let me", logprobs=(score,)),
        GenerationEvent(
            0, tool_calls=(ToolCallDelta(0, "c1", "f", ""), ToolCallDelta(0, None, None, "{}"))
        ),
        GenerationEvent(
            0, tool_calls=(ToolCallDelta(1, "c2", "g", '{"a":'), ToolCallDelta(1, None, None, "1}"))
        ),
        GenerationEvent(0, content="Bye", finish_reason="stop"),
    ):
        out += list(items.take(event))
    out += list(items.finish("stop"))
    assert [item["type"] for item in items.items] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
        "message",
    ]
    assert items.items[0]["content"] == [{"type": "reasoning_text", "text": "Hmm."}]
    assert [len(items.items[i]["content"][0]["logprobs"]) for i in (1, 4)] == [2, 0]
    assert [(item["name"], item["arguments"]) for item in items.items[2:4]] == [
        ("f", "{}"),
        ("g", '{"a":1}'),
    ]
    opened = [
        event["output_index"] for event in out if event["type"] == "response.output_item.added"
    ]
    closed = [
        event["output_index"] for event in out if event["type"] == "response.output_item.done"
    ]
    assert opened == closed == [0, 1, 2, 3, 4]
    assert all(item["status"] == "completed" for item in items.items)


def test_an_answer_that_says_nothing_is_an_empty_message() -> None:
    items = OutputItems(with_logprobs=False, namespaces={})
    names = [event["type"] for event in items.finish("length")]
    assert names[0] == "response.output_item.added"
    assert items.items[0]["content"][0]["text"] == ""
    assert items.items[0]["status"] == "incomplete"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": 3}, "input"),
        ({"input": [{"role": "wizard", "content": "a"}]}, "input[0]"),
        ({"input": [{"type": "item_reference", "id": 3}]}, "input[0]"),
        ({"input": [{"type": "computer_call", "id": "x"}]}, "input[0]"),
        ({"previous_response_id": "resp_x"}, "previous_response_id"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0]",
        ),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
        ({"background": True}, "background"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": True}, "max_output_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"include": ["file_search_call.results", "weather"]}, "include[1]"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0]"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        (
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": 3}}}},
            "text.format.schema",
        ),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
        ({"truncation": "middle"}, "truncation"),
        ({"model": "gpt-9"}, "model"),
    ],
)
def test_what_is_wrong_is_named(server: Server, fields: dict[str, Any], field: str) -> None:
    response = server.post("/v1/responses", {"input": "Hi", **fields})
    error_of(response, 404 if field == "model" else 400, field)


def test_a_context_that_is_too_small_names_both_numbers(server: Server) -> None:
    message = error_of(
        server.post("/v1/responses", {"input": "Hi", "max_output_tokens": 5000}), 400
    )
    assert "5000" in message
    assert "1024" in message
    assert (
        respond(server, input="word " * 2000, truncation="auto", max_output_tokens=2)["usage"][
            "input_tokens"
        ]
        > 900
    )


def test_what_has_no_meaning_here_is_named_in_a_header(server: Server) -> None:
    fields = {"prompt_cache_key": "k", "reasoning": {"effort": "low", "summary": "auto"}}
    fields["include"] = ["file_search_call.results", "message.output_text.logprobs"]
    response = server.post("/v1/responses", {"input": "Hi", "max_output_tokens": 1, **fields})
    ignored = response.headers["x-quire-ignored"].split(", ")
    left_out = {
        "prompt_cache_key",
        "reasoning.summary",
        "reasoning.effort",
        "include.file_search_call.results",
    }
    assert set(ignored) == left_out


def test_a_client_that_leaves_ends_its_response(server: Server) -> None:
    lost_before = server.metric("quire_answers_not_finished_total")
    stream = server.stream("/v1/responses", {"input": "Count to 1000.", "max_output_tokens": 900})
    for _ in range(6):
        next(stream)
    stream.close()  # type: ignore[attr-defined]
    wait_for(lambda: server.is_idle, "the engine to be idle")
    assert server.metric("quire_answers_not_finished_total") > lost_before
