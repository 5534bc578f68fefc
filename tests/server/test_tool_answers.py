"""Answers with calls: repeated ones, those that were cut off, text before and behind them; the same
in every API, streamed or not.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from quire.frontend.tool_calls.hermes import HermesParser
from quire.frontend.tool_calls.llama3 import Llama3Parser
from quire.frontend.tool_calls.mistral import MistralParser
from quire.frontend.tool_calls.parser import ArgumentsDelta, CallStart, ContentDelta, ToolCallParser
from quire.server.calls.answer_reader import AnswerReader
from tests.server.harness import Server

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CHAT_TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]
RESPONSES_TOOLS = [{"type": "function", "name": "weather", "parameters": PARAMETERS}]
MESSAGES_TOOLS = [{"name": "weather", "input_schema": PARAMETERS}]
Parts = list[tuple[str, str]]
"""Of an answer in order: ("text", "…") and ("call", "arguments")."""


def call(city: str, name: str = "weather") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {{"city": "{city}"}}}}\n</tool_call>'


def read(
    text: str, size: int, ends_at_repeat: bool = True, is_cut: bool = False
) -> tuple[AnswerReader, Parts]:
    """The answer as it comes in pieces of a size."""
    reader = AnswerReader(None, HermesParser(), lambda: "id", ends_at_repeat=ends_at_repeat)
    parts: Parts = []
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    for place, piece in enumerate([*pieces, ""]):
        for found in reader.feed(piece, place == len(pieces), is_cut and place == len(pieces)):
            if found.content:
                if parts and parts[-1][0] == "text":
                    parts[-1] = ("text", parts[-1][1] + found.content)
                else:
                    parts.append(("text", found.content))
            for one in found.tool_calls:
                if one.name is not None:
                    parts.append(("call", one.arguments))
                else:
                    parts[-1] = ("call", parts[-1][1] + one.arguments)
    return reader, parts


ROME, OSLO = '{"city": "Rome"}', '{"city": "Oslo"}'


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_a_repeated_call_ends_the_answer(size: int) -> None:
    text = "\n".join([call("Rome"), call("Oslo"), call("Rome"), call("Bonn")])
    reader, parts = read(text, size)
    assert (reader.is_over, parts) == (True, [("call", ROME), ("call", OSLO)])
    other, parts = read("\n".join([call("Rome"), call("Rome", "other")]), size)
    assert (other.is_over, parts) == (False, [("call", ROME), ("call", ROME)])
    longer, parts = read("\n".join([call("Ro"), call("Rome")]), size)
    assert (longer.is_over, parts) == (False, [("call", '{"city": "Ro"}'), ("call", ROME)])
    free, parts = read(f"{call('Rome')}\n{call('Rome')}", size, ends_at_repeat=False)
    assert (free.is_over, parts) == (False, [("call", ROME), ("call", ROME)])


def test_a_repeat_that_was_cut_off_is_left_out() -> None:
    text = f"{call('Rome')}\n{call('Rome')[:-20]}"
    assert read(text, 3, is_cut=True)[1] == [("call", ROME)]
    # An end of the model's own is none of ours: what it wrote is told.
    assert read(text, 3)[1] == [("call", ROME), ("call", '{"city": "')]


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_the_order_does_not_depend_on_the_pieces(size: int) -> None:
    text = f"First. {call('Rome')} Then. {call('Oslo')} Last."
    expected = [
        ("text", "First."),
        ("call", ROME),
        ("text", " Then."),
        ("call", OSLO),
        ("text", " Last."),
    ]
    assert read(text, size)[1] == expected


def outcome(parser: ToolCallParser, text: str, is_cut: bool) -> tuple[str, list[str]]:
    deltas = [delta for character in text for delta in parser.feed(character)] + parser.finish(
        is_cut
    )
    content = "".join(delta.text for delta in deltas if isinstance(delta, ContentDelta))
    names = [delta.name for delta in deltas if isinstance(delta, CallStart)]
    arguments = "".join(delta.text for delta in deltas if isinstance(delta, ArgumentsDelta))
    return content, [*names, arguments] if names else []


MISTRAL = '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Rome"}}]'
LLAMA = '{"name": "weather", "parameters": {"city": "Rome"}}'


@pytest.mark.parametrize(
    ("text", "lead"),
    [("Sure. " + call("Rome"), "Sure."), ("Sure. " + MISTRAL, "Sure."), (LLAMA, "")],
)
def test_a_call_that_was_cut_off_is_no_content(text: str, lead: str) -> None:
    """Wherever the cut is; an answer that ends there by itself is text, every character of it."""
    kinds: Any = {"<": HermesParser, "[": MistralParser}
    begins = len("Sure. ") if lead else 0

    def parser() -> ToolCallParser:
        return kinds[text[begins]]() if lead else Llama3Parser(["weather"], forced=True)

    for end in range(begins + 2, len(text)):
        content, found = outcome(parser(), text[:end], is_cut=True)
        assert content == lead, text[:end]
        assert not found or found[0] == "weather"
        if not found:
            assert outcome(parser(), text[:end], is_cut=False)[0] == text[:end]
    assert outcome(parser(), text, is_cut=True) == (lead, ["weather", ROME])


def test_a_lone_bracket_is_text() -> None:
    assert outcome(HermesParser(), "if a <", is_cut=True)[0] == "if a <"
    assert outcome(HermesParser(), "a <b> and", is_cut=True)[0] == "a <b> and"
    free = Llama3Parser(["weather"])
    assert outcome(free, '{"name": "Ann", "age": 3', is_cut=True)[0] == '{"name": "Ann", "age": 3'
    assert outcome(Llama3Parser(["weather"]), '{"name": "weather", "par', is_cut=True)[0] == ""
    assert outcome(Llama3Parser(["weather"]), '<|python_tag|>{"na', is_cut=True)[0] == ""


# Through the server


def chat(server: Server, ask: str, **fields: Any) -> tuple[Parts, str]:
    body = {"messages": [{"role": "user", "content": ask}], "tools": CHAT_TOOLS, **fields}
    response = server.post("/v1/chat/completions", body)
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    parts: Parts = [("text", choice["message"]["content"])] if choice["message"]["content"] else []
    parts += [
        ("call", one["function"]["arguments"]) for one in choice["message"].get("tool_calls", ())
    ]
    return parts, choice["finish_reason"]


def chat_stream(server: Server, ask: str, **fields: Any) -> tuple[Parts, str]:
    body = {"messages": [{"role": "user", "content": ask}], "tools": CHAT_TOOLS, **fields}
    text, calls, reason = "", [], ""
    for chunk in server.stream("/v1/chat/completions", body):
        choice = chunk["choices"][0]
        text += choice["delta"].get("content") or ""
        for one in choice["delta"].get("tool_calls", ()):
            if one["index"] == len(calls):
                calls.append("")
            calls[one["index"]] += one["function"]["arguments"]
        reason = choice["finish_reason"] or reason
    return [("text", text)] * bool(text) + [("call", one) for one in calls], reason


def of_response(response: dict[str, Any]) -> tuple[Parts, str]:
    parts: Parts = []
    for item in response["output"]:
        if item["type"] == "function_call":
            parts.append(("call", item["arguments"]))
        elif item["content"][0]["text"]:
            parts.append(("text", item["content"][0]["text"]))
    return parts, "length" if response["status"] == "incomplete" else response["status"]


def responses_body(ask: str, fields: dict[str, Any]) -> dict[str, Any]:
    most = {"max_output_tokens": fields.pop("max_tokens")} if "max_tokens" in fields else {}
    return {"input": ask, "tools": RESPONSES_TOOLS, **most, **fields}


def responses(server: Server, ask: str, **fields: Any) -> tuple[Parts, str]:
    return of_response(server.post("/v1/responses", responses_body(ask, fields)).json())


def responses_stream(server: Server, ask: str, **fields: Any) -> tuple[Parts, str]:
    return of_response(
        list(server.stream("/v1/responses", responses_body(ask, fields)))[-1]["response"]
    )


def messages_body(ask: str, fields: dict[str, Any]) -> dict[str, Any]:
    if fields.pop("tool_choice", None) is not None:
        fields["tool_choice"] = {"type": "any"}
    turns = [{"role": "user", "content": ask}]
    return {
        "model": "scripted",
        "messages": turns,
        "tools": MESSAGES_TOOLS,
        "max_tokens": 200,
        **fields,
    }


def messages(server: Server, ask: str, **fields: Any) -> tuple[Parts, str]:
    body = server.post("/v1/messages", messages_body(ask, fields)).json()
    parts: Parts = []
    for block in body["content"]:
        if block["type"] == "text":
            parts.append(("text", block["text"]))
        else:
            given = block["input"]
            parts.append(("call", given.get("invalid_json") or json.dumps(given)))
    return parts, body["stop_reason"]


def messages_stream(server: Server, ask: str, **fields: Any) -> tuple[Parts, str]:
    parts: Parts = []
    reason = ""
    kinds: dict[int, str] = {}
    for event in server.stream("/v1/messages", messages_body(ask, fields)):
        if event["type"] == "content_block_start":
            kinds[event["index"]] = event["content_block"]["type"]
            parts.append(("text" if event["content_block"]["type"] == "text" else "call", ""))
        elif event["type"] == "content_block_delta":
            assert event["index"] == len(parts) - 1  # only the last block is open
            delta = event["delta"]
            assert (delta["type"] == "text_delta") == (kinds[event["index"]] == "text")
            parts[-1] = (
                parts[-1][0],
                parts[-1][1] + (delta.get("text") or delta.get("partial_json") or ""),
            )
        elif event["type"] == "message_delta":
            reason = event["delta"]["stop_reason"]
    return parts, reason


EVERY_WAY = [chat, chat_stream, responses, responses_stream, messages, messages_stream]


@pytest.mark.parametrize("way", EVERY_WAY)
def test_text_before_and_behind_a_call(scripted: Server, way: Any) -> None:
    parts, _ = way(scripted, "@mixed")
    if way in (chat, chat_stream):  # calls have a field of their own
        assert parts == [("text", "First. Then this."), ("call", OSLO)]
    else:
        assert parts == [("text", "First."), ("call", OSLO), ("text", " Then this.")]


@pytest.mark.parametrize("way", EVERY_WAY)
def test_no_markup_is_left_of_a_call_that_was_cut_off(scripted: Server, way: Any) -> None:
    whole, _ = way(scripted, "@weather")
    assert whole == [("text", "I look it up."), ("call", ROME)]
    for most in range(2, 8):
        parts, reason = way(scripted, "@weather", max_tokens=most)
        assert reason in ("length", "max_tokens")
        assert "".join(text for kind, text in parts if kind == "text") in (
            "I look it up.",
            "I look it",
            "I look it up",
        )
        for kind, arguments in parts:
            assert kind == "text" or ROME.startswith(arguments)


@pytest.mark.parametrize("way", EVERY_WAY)
def test_required_calls_are_not_repeated(scripted: Server, way: Any) -> None:
    """A model that always calls again: the same call, as its schema allows no other."""
    only = {"type": "object", "properties": {"city": {"enum": ["Rome"]}}, "required": ["city"]}
    only["additionalProperties"] = False
    if way in (chat, chat_stream):
        tools: Any = [{"type": "function", "function": {"name": "weather", "parameters": only}}]
    elif way in (responses, responses_stream):
        tools = [{"type": "function", "name": "weather", "parameters": only}]
    else:
        tools = [{"name": "weather", "input_schema": only}]
    ban = {str(scripted.get("/tokenizer_info").json()["eos_token_ids"][0]): -100.0}
    parts, reason = way(
        scripted, "hi", tools=tools, tool_choice="required", max_tokens=200, seed=1, logit_bias=ban
    )
    assert parts == [("call", ROME)]
    assert reason in ("tool_calls", "completed", "tool_use")


def test_the_first_chunk_of_a_call_has_no_content(scripted: Server) -> None:
    def first(ask: str, **fields: Any) -> Any:
        body = {"messages": [{"role": "user", "content": ask}], "tools": CHAT_TOOLS, **fields}
        return next(iter(scripted.stream("/v1/chat/completions", body)))["choices"][0]["delta"]

    assert first("@shell") == {"role": "assistant", "content": None}
    assert first("hi") == {"role": "assistant", "content": ""}
    assert first("@weather") == {"role": "assistant", "content": ""}
    assert first("hi", tool_choice="required", seed=1) == {"role": "assistant", "content": None}


def test_how_an_answer_ends_is_recorded(scripted: Server) -> None:
    only = {"type": "object", "properties": {}, "additionalProperties": False}
    tools = [{"type": "function", "function": {"name": "stop", "parameters": only}}]
    body = {
        "messages": [{"role": "user", "content": "hi"}],
        "tools": tools,
        "tool_choice": "required",
        "n": 3,
    }
    ban = {str(scripted.get("/tokenizer_info").json()["eos_token_ids"][0]): -100.0}
    response = scripted.post(
        "/v1/chat/completions", {**body, "logit_bias": ban, "max_tokens": 200}
    ).json()
    assert [len(choice["message"]["tool_calls"]) for choice in response["choices"]] == [1, 1, 1]
    record = scripted.get(f"/v1/requests/{response['id']}").json()
    assert record["finish_reasons"] == ["tool_calls"] * 3
    scripted.assert_sound()
