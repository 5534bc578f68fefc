"""gpt-oss' channels through every API, streamed or not: reasoning, text and calls, wherever the
answer is cut off.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.frontend.tokenizer import Tokenizer
from quire.frontend.tool_calls.harmony import CALL, CONTROL_TOKENS, RETURN
from tests.frontend.templates import HARMONY
from tests.server.harness import Server
from tests.server.random_model import write_model
from tests.server.test_tool_answers import CHAT_TOOLS, MESSAGES_TOOLS, RESPONSES_TOOLS

ROME = '{"city": "Rome"}'
THINK = "<|channel|>analysis<|message|>Rome has weather.<|end|><|start|>assistant"
ANSWER = f"{THINK}<|channel|>final<|message|>It is ~<|end|>~ sunny.<|return|>"
LOOKS = f"{THINK}<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
CALLS = (
    f"{LOOKS}<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{ROME}<|call|>"
)
ASK = [{"role": "user", "content": "How is it?"}]
Parts = dict[str, str]


class Spoken:
    """A server whose model says what it is told."""

    def __init__(self, server: Server, tokenizer: Tokenizer) -> None:
        self.server = server
        self.tokenizer = tokenizer

    def says(self, text: str) -> int:
        """How many tokens that is. Between tildes control tokens are text."""
        ids: list[int] = []
        for place, piece in enumerate(text.split("~")):
            encode = self.tokenizer.encode_plain if place % 2 else self._encode
            ids += encode(piece)
        part = self.server.fault_file.with_suffix(".part")
        part.write_text(f"say {' '.join(map(str, ids))}")
        part.rename(self.server.fault_file)
        return len(ids)

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False, allow_special=True)


@pytest.fixture(scope="module")
def spoken(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Spoken]:
    folder: Path = tmp_path_factory.mktemp("harmony")
    write_model(folder, HARMONY, (*CONTROL_TOKENS, CALL, RETURN))
    with Server(
        model=str(folder),
        engine={},
        engine_module="tests.server.scripted_engine",
        served_model_names=["m"],
    ) as server:
        yield Spoken(server, Tokenizer.from_hf_folder(folder))


def chat(server: Server, **fields: Any) -> tuple[Parts, str]:
    body = server.post(
        "/v1/chat/completions", {"messages": ASK, "tools": CHAT_TOOLS, **fields}
    ).json()
    message = body["choices"][0]["message"]
    calls = [
        f"{one['function']['name']} {one['function']['arguments']}"
        for one in message.get("tool_calls", ())
    ]
    parts = {
        "thought": message.get("reasoning_content"),
        "text": message["content"],
        "call": "".join(calls),
    }
    return {kind: text for kind, text in parts.items() if text}, body["choices"][0]["finish_reason"]


def chat_stream(server: Server, **fields: Any) -> tuple[Parts, str]:
    parts, reason = {"thought": "", "text": "", "call": ""}, ""
    for chunk in server.stream(
        "/v1/chat/completions", {"messages": ASK, "tools": CHAT_TOOLS, **fields}
    ):
        choice = chunk["choices"][0]
        parts["thought"] += choice["delta"].get("reasoning_content") or ""
        parts["text"] += choice["delta"].get("content") or ""
        for one in choice["delta"].get("tool_calls", ()):
            function = one["function"]
            parts["call"] += (f"{function['name']} " if "name" in function else "") + function[
                "arguments"
            ]
        reason = choice["finish_reason"] or reason
    return {kind: text for kind, text in parts.items() if text}, reason


def of_response(response: dict[str, Any]) -> tuple[Parts, str]:
    parts: Parts = {}
    for item in response["output"]:
        if item["type"] == "function_call":
            parts["call"] = f"{item['name']} {item['arguments']}"
        elif item["content"][0]["text"]:
            parts["thought" if item["type"] == "reasoning" else "text"] = item["content"][0]["text"]
    reason = "tool_calls" if "call" in parts else "stop"
    return parts, "length" if response["status"] == "incomplete" else reason


def responses_body(fields: dict[str, Any]) -> dict[str, Any]:
    most = {"max_output_tokens": fields.pop("max_tokens")} if "max_tokens" in fields else {}
    return {"input": "How is it?", "tools": RESPONSES_TOOLS, **most, **fields}


def responses(server: Server, **fields: Any) -> tuple[Parts, str]:
    return of_response(server.post("/v1/responses", responses_body(fields)).json())


def responses_stream(server: Server, **fields: Any) -> tuple[Parts, str]:
    return of_response(list(server.stream("/v1/responses", responses_body(fields)))[-1]["response"])


REASONS = {"end_turn": "stop", "max_tokens": "length", "tool_use": "tool_calls"}


def messages_body(fields: dict[str, Any]) -> dict[str, Any]:
    return {"model": "m", "messages": ASK, "tools": MESSAGES_TOOLS, "max_tokens": 500, **fields}


def messages(server: Server, **fields: Any) -> tuple[Parts, str]:
    body = server.post("/v1/messages", messages_body(fields)).json()
    parts: Parts = {}
    for block in body["content"]:
        if block["type"] == "tool_use":
            given = block["input"]
            parts["call"] = (
                f"{block['name']} {given.get('invalid_json', '') if 'invalid_json' in given else json.dumps(given)}"
            )
        else:
            parts["thought" if block["type"] == "thinking" else "text"] = (
                block.get("text") or block["thinking"]
            )
    return parts, REASONS[body["stop_reason"]]


def messages_stream(server: Server, **fields: Any) -> tuple[Parts, str]:
    parts: Parts = {}
    kind, reason = "", ""
    for event in server.stream("/v1/messages", messages_body(fields)):
        if event["type"] == "content_block_start":
            block = event["content_block"]
            kind = {"text": "text", "thinking": "thought", "tool_use": "call"}[block["type"]]
            parts[kind] = f"{block['name']} " if kind == "call" else ""
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            parts[kind] += (
                delta.get("text") or delta.get("thinking") or delta.get("partial_json") or ""
            )
        elif event["type"] == "message_delta":
            reason = REASONS[event["delta"]["stop_reason"]]
    return parts, reason


EVERY_WAY = [chat, chat_stream, responses, responses_stream, messages, messages_stream]
WHOLE = {"thought": "Rome has weather.", "text": "I look.", "call": f"weather {ROME}"}


@pytest.mark.parametrize("way", EVERY_WAY)
def test_channels_become_parts(spoken: Spoken, way: Any) -> None:
    spoken.says(ANSWER)
    assert way(spoken.server) == (
        {"thought": "Rome has weather.", "text": "It is <|end|> sunny."},
        "stop",
    )
    spoken.says(CALLS)
    assert way(spoken.server) == (WHOLE, "tool_calls")


@pytest.mark.parametrize("way", EVERY_WAY)
def test_no_markup_is_left_of_an_answer_that_was_cut_off(spoken: Spoken, way: Any) -> None:
    count = spoken.says(CALLS)
    seen = set()
    for most in (1, 2, 3, *range(4, count, count // 9), count - 1):
        parts, reason = way(spoken.server, max_tokens=most)
        assert reason == "length"
        for kind, text in parts.items():
            assert WHOLE[kind].startswith(text), (most, kind)
        seen.update(parts)
    assert seen == set(WHOLE)


def test_without_tools_and_without_reasoning(spoken: Spoken) -> None:
    spoken.says(ANSWER)
    assert chat(spoken.server, tools=None, include_reasoning=False) == (
        {"text": "It is <|end|> sunny."},
        "stop",
    )
    usage = spoken.server.post("/v1/chat/completions", {"messages": ASK}).json()["usage"]
    assert 0 < usage["completion_tokens_details"]["reasoning_tokens"] < usage["completion_tokens"]


@pytest.mark.parametrize("fields", [{}, {"stop": ["@"]}])
def test_reasoning_is_counted_token_by_token(spoken: Spoken, fields: dict[str, Any]) -> None:
    """This engine gives two at a time, as guesses that are right come: which of them are reasoning
    is no matter of that.
    """
    found = []
    for thought in ("Rome has weather.", "So Rome has weather."):
        spoken.says(ANSWER.replace("Rome has weather.", thought))
        usage = spoken.server.post("/v1/chat/completions", {"messages": ASK, **fields}).json()[
            "usage"
        ]
        count = len(spoken.tokenizer.encode(thought, add_special_tokens=False))
        found.append(usage["completion_tokens_details"]["reasoning_tokens"] - count)
    assert found == [1, 1]  # what ends it is counted, too


@pytest.mark.parametrize("thought", ["Rome has weather.", "So Rome has weather."])
def test_a_message_has_the_logprobs_of_its_own_tokens(spoken: Spoken, thought: str) -> None:
    """Whichever tokens came together: neither those of the reasoning nor the one that ends it all."""
    spoken.says(ANSWER.replace("Rome has weather.", thought))
    body = {"input": "How is it?", "include": ["message.output_text.logprobs"]}
    part = spoken.server.post("/v1/responses", body).json()["output"][1]["content"][0]
    text = "".join(one["token"] for one in part["logprobs"])
    assert part["text"] == "It is <|end|> sunny."
    assert text == f"<|end|><|start|>assistant<|channel|>final<|message|>{part['text']}"
    told = []
    for event in spoken.server.stream("/v1/responses", body):
        if event["type"] == "response.output_text.delta":
            told += event["logprobs"]
    assert told == part["logprobs"]


def test_a_stream_without_content_has_an_empty_one(spoken: Spoken) -> None:
    """As the whole answer has, where tools might have been called and none was."""
    spoken.says(THINK)
    body = {"messages": ASK, "tools": CHAT_TOOLS, "logprobs": True, "max_tokens": 2}
    whole = spoken.server.post("/v1/chat/completions", body).json()["choices"][0]["message"][
        "content"
    ]
    chunks = list(spoken.server.stream("/v1/chat/completions", body))
    contents = [chunk["choices"][0]["delta"].get("content") for chunk in chunks]
    assert (whole, [one for one in contents if one is not None]) == ("", [""])


def test_earlier_turns_come_back_in_the_format(spoken: Spoken) -> None:
    """What a client was given goes into the next prompt as the template wants it, in every API."""
    spoken.says(CALLS)
    server = spoken.server
    given = server.post("/v1/chat/completions", {"messages": ASK, "tools": CHAT_TOOLS}).json()[
        "choices"
    ][0]["message"]
    result = {"role": "tool", "tool_call_id": given["tool_calls"][0]["id"], "content": "sunny"}
    spoken.says(ANSWER)
    body = {
        "messages": [*ASK, given, result],
        "tools": CHAT_TOOLS,
        "return_token_ids": True,
        "reasoning_effort": "low",
    }
    response = server.post("/v1/chat/completions", body)
    prompt = spoken.tokenizer.decode(response.json()["prompt_token_ids"], skip_special_tokens=False)
    assert "Reasoning: low" in prompt
    assert prompt.endswith(
        "<|start|>assistant<|channel|>analysis<|message|>Rome has weather.\n\nI look.<|end|>"
        f"<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>{ROME}<|call|>"
        "<|start|>functions.weather to=assistant<|channel|>commentary<|message|>sunny<|end|><|start|>assistant"
    )
    assert "x-quire-ignored" not in response.headers


def test_an_answer_that_goes_on(spoken: Spoken) -> None:
    spoken.says("ny.<|return|>")
    turns = [*ASK, {"role": "assistant", "content": "Sun"}]
    body = {"messages": turns, "add_generation_prompt": False, "continue_final_message": True}
    message = spoken.server.post("/v1/chat/completions", body).json()["choices"][0]["message"]
    assert message["content"] == "ny."
