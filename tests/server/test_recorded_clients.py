"""Requests as Codex, Claude Code, the Vercel AI SDK and LiteLLM send them (long texts shortened),
against a model that says what its script wants. `test_npm_clients` and `test_python_clients` run
the clients themselves where they are installed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.server.harness import Server, error_of

RECORDED = Path(__file__).parent / "recorded"


def recorded(name: str) -> dict[str, Any]:
    body: dict[str, Any] = json.loads((RECORDED / f"{name}.json").read_text())
    return body


def stream(
    server: Server, path: str, body: dict[str, Any]
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    with server.client() as client, client.stream("POST", path, json=body) as response:
        assert response.status_code == 200, response.read()
        lines = list(response.iter_lines())
        return [json.loads(line[6:]) for line in lines if line.startswith("data: ")], dict(
            response.headers
        )


# Codex


def test_codex(scripted: Server) -> None:
    body = recorded("codex_first")
    kinds = [tool["type"] for tool in body["tools"]]
    events, headers = stream(scripted, "/v1/responses", body)
    assert set(headers["x-quire-ignored"].split(", ")) == {
        "prompt_cache_key",
        "client_metadata",
        "reasoning.summary",
        "include.reasoning.encrypted_content",
        f"tools[{kinds.index('web_search')}].web_search",
    }
    response = events[-1]["response"]
    assert (events[-1]["type"], response["store"]) == ("response.completed", False)
    (call,) = response["output"]
    assert (call["name"], json.loads(call["arguments"])) == (
        "exec_command",
        {"cmd": "echo quire-was-here"},
    )
    assert [tool["type"] for tool in response["tools"]] == kinds
    assert {"function", "namespace", "web_search"} == set(kinds)
    events, _ = stream(scripted, "/v1/responses", recorded("codex_after_tool"))
    assert (
        events[-1]["response"]["output"][0]["content"][0]["text"] == "I have seen what came back."
    )


def test_functions_in_a_namespace(scripted: Server) -> None:
    """The model calls them by both names; the client gets the two apart and sends them back so."""
    stop = {
        "type": "function",
        "name": "stop",
        "parameters": {"type": "object", "properties": {"target": {}}},
    }
    tools = [{"type": "namespace", "name": "agents", "description": "Others.", "tools": [stop]}]
    body = {"input": "@nested", "tools": tools}
    response = scripted.post("/v1/responses", body).json()
    (call,) = response["output"]
    assert (call["namespace"], call["name"], call["arguments"]) == (
        "agents",
        "stop",
        '{"target": "all"}',
    )
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "stopped"}
    again = scripted.post(
        "/v1/responses", {**body, "input": [{"role": "user", "content": "@nested"}, call, result]}
    )
    assert again.json()["output"][0]["content"][0]["text"] == "I have seen what came back."
    by_id = {"input": [result], "previous_response_id": response["id"], "tools": tools}
    assert scripted.post("/v1/responses", by_id).json()["usage"] | {
        "input_tokens_details": 0
    } == again.json()["usage"] | {"input_tokens_details": 0}


@pytest.mark.parametrize(
    ("path", "ask", "tool", "auto"),
    [
        ("/v1/responses", {"input": "Hi"}, {"type": "web_search"}, "auto"),
        ("/v1/responses", {"input": "Hi"}, {"type": "custom", "name": "patch"}, "auto"),
        (
            "/v1/responses",
            {"input": "Hi"},
            {"type": "namespace", "name": "n", "tools": [{"type": "custom", "name": "patch"}]},
            "auto",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "Hi"}]},
            {"type": "custom", "custom": {"name": "patch"}},
            "auto",
        ),
        (
            "/v1/messages",
            {
                "model": "scripted",
                "max_tokens": 20,
                "messages": [{"role": "user", "content": "Hi"}],
            },
            {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
            {"type": "auto"},
        ),
    ],
)
def test_tools_that_only_others_can_run(
    scripted: Server, path: str, ask: dict[str, Any], tool: dict[str, Any], auto: Any
) -> None:
    """Left out where the client said that the model may do without them; else refused by type and
    name.
    """
    ask = {**ask, "tools": [tool]}
    optional = scripted.post(path, {**ask, "tool_choice": auto})
    kind = tool["tools"][0]["type"] if tool["type"] == "namespace" else tool["type"]
    assert optional.headers["x-quire-ignored"] == f"tools[0].{kind}"
    assert "Hello" in optional.text
    for choice in ({}, {"tool_choice": {"type": "any"} if path == "/v1/messages" else "required"}):
        refused = scripted.post(path, {**ask, **choice})
        assert refused.status_code == 400
        message = refused.json()["error"]["message"]
        assert message.startswith("tools[0].type: ")
        assert repr(kind) in message
        assert "patch" in message or "web_search" in message


# Claude Code


def test_claude_code(scripted: Server) -> None:
    events, headers = stream(scripted, "/v1/messages?beta=true", recorded("claude_first"))
    assert headers["x-quire-ignored"] == "thinking, output_config.effort"
    assert headers["x-quire-clamped"].startswith("max_tokens=1")
    starts = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    assert [block["name"] for block in starts] == ["Bash"]
    (last,) = [event for event in events if event["type"] == "message_delta"]
    assert (last["delta"]["stop_reason"], last["context_management"]) == (
        "tool_use",
        {"applied_edits": []},
    )
    events, _ = stream(scripted, "/v1/messages?beta=true", recorded("claude_after_tool"))
    text = "".join(
        event["delta"]["text"] for event in events if event["type"] == "content_block_delta"
    )
    assert text == "I have seen what came back."


def test_system_messages_stand_where_they_were_said(scripted: Server) -> None:
    turns = [
        {"role": "user", "content": "Hi"},
        {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
    ]
    counted = scripted.post(
        "/v1/messages/count_tokens", {"model": "scripted", "messages": turns}
    ).json()
    chat = [turns[0], {"role": "system", "content": "Be brief."}]
    assert scripted.post("/tokenize", {"messages": chat}).json()["count"] == counted["input_tokens"]
    block = {"type": "tool_result", "tool_use_id": "x", "content": "y"}
    wrong = {
        "model": "scripted",
        "messages": [{"role": "system", "content": [block]}],
        "max_tokens": 1,
    }
    assert scripted.post("/v1/messages", wrong).status_code == 400


THOUGHT = {
    "role": "assistant",
    "content": [{"type": "thinking", "thinking": "Hm.", "signature": ""}],
}
RESULT = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "y"}]}
CALL = {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]}
USER = {"role": "user", "content": "Hi"}


@pytest.mark.parametrize(
    ("edit", "turns", "is_fine"),
    [
        (
            {"type": "clear_thinking_20251015", "keep": "all"},
            [USER, THOUGHT, USER, THOUGHT, USER],
            True,
        ),
        ({"type": "clear_thinking_20251015"}, [USER, THOUGHT, USER], True),
        ({"type": "clear_thinking_20251015"}, [USER, THOUGHT, USER, THOUGHT, USER], False),
        (
            {"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 2}},
            [USER, THOUGHT, USER, THOUGHT, USER],
            True,
        ),
        ({"type": "clear_tool_uses_20250919"}, [USER, CALL, RESULT], True),
        (
            {"type": "clear_tool_uses_20250919", "keep": {"type": "tool_uses", "value": 0}},
            [USER, CALL, RESULT],
            False,
        ),
        ({"type": "compact_20260112"}, [USER], False),
    ],
)
def test_edits_of_the_context(
    scripted: Server, edit: dict[str, Any], turns: list[Any], is_fine: bool
) -> None:
    """Those that would change nothing are fine, the others are refused by name."""
    body = {
        "model": "scripted",
        "max_tokens": 20,
        "messages": turns,
        "context_management": {"edits": [edit]},
    }
    response = scripted.post("/v1/messages", body)
    assert response.status_code == (200 if is_fine else 400), response.text
    if is_fine:
        assert response.json()["context_management"] == {"applied_edits": []}
    else:
        assert edit["type"] in response.json()["error"]["message"]


def test_more_tokens_than_the_context_has_room_for(
    scripted: Server, shared_small_server: Server
) -> None:
    """Anthropic's servers answer, and say so if the answer came to the context's end; OpenAI's
    refuse.
    """
    ask = {"model": "scripted", "messages": [USER], "max_tokens": 100_000}
    response = scripted.post("/v1/messages", ask)
    prompt = (
        response.json()["usage"]["input_tokens"]
        + response.json()["usage"]["cache_read_input_tokens"]
    )
    assert response.headers["x-quire-clamped"] == f"max_tokens={16384 - prompt}"
    assert response.json()["stop_reason"] == "end_turn"
    assert (
        scripted.post("/v1/messages", {**ask, "max_tokens": 2}).json()["stop_reason"]
        == "max_tokens"
    )
    chat = {"messages": [USER], "max_tokens": 100_000}
    assert "16384" in error_of(scripted.post("/v1/chat/completions", chat), 400, "max_tokens")
    # A context of 1,024 tokens is full sooner.
    full = {
        "model": "small",
        "messages": [{"role": "user", "content": "xq" * 450}],
        "max_tokens": 100_000,
    }
    response = shared_small_server.post("/v1/messages", {**full, "ignore_eos": True})
    assert response.json()["stop_reason"] == "model_context_window_exceeded"
    usage = response.json()["usage"]
    assert (
        sum(usage[name] for name in ("input_tokens", "cache_read_input_tokens", "output_tokens"))
        == 1024
    )


# Vercel's AI SDK and LiteLLM


def test_vercel_goes_on_by_reference(scripted: Server) -> None:
    first = scripted.post("/v1/responses", {"input": recorded("vercel_second")["input"][:1]}).json()
    body = recorded("vercel_second")
    body["input"][1]["id"] = first["output"][0]["id"]
    answered = scripted.post("/v1/responses", body)
    assert answered.status_code == 200, answered.text
    whole = {**body, "input": [body["input"][0], first["output"][0], body["input"][2]]}
    counts = [
        one["usage"]["input_tokens"]
        for one in (answered.json(), scripted.post("/v1/responses", whole).json())
    ]
    assert counts[0] == counts[1] > first["usage"]["input_tokens"]
    body["input"][1]["id"] = "msg_unknown"
    message = error_of(scripted.post("/v1/responses", body), 404, "input")
    assert "msg_unknown" in message
    assert "the whole conversation" in message


def test_litellm(scripted: Server) -> None:
    bridge = scripted.post("/v1/responses", recorded("litellm_bridge"))
    assert (
        bridge.headers["x-quire-ignored"] == "include.reasoning.encrypted_content, reasoning.effort"
    )
    scored = scripted.post("/v1/responses", recorded("litellm_top_logprobs")).json()
    logprobs = scored["output"][0]["content"][0]["logprobs"]
    assert logprobs
    assert all(len(one["top_logprobs"]) == 2 for one in logprobs)


def test_models_for_both_kinds_of_clients(scripted: Server) -> None:
    listed = scripted.get("/v1/models").json()
    assert (listed["first_id"], listed["last_id"], listed["has_more"]) == (
        "scripted",
        "scripted",
        False,
    )
    (model,) = listed["data"]
    assert (model["object"], model["type"], model["display_name"]) == ("model", "model", "scripted")
    assert model["created_at"].endswith("Z")
    assert scripted.get("/v1/models/scripted").json() == model


def test_storing_is_for_responses_alone(scripted: Server) -> None:
    """`store` changes no answer, so chats take it and say that nothing is stored."""
    chat = scripted.post("/v1/chat/completions", {"messages": [USER], "store": True})
    assert (chat.status_code, chat.headers["x-quire-ignored"]) == (200, "store")
    stored = scripted.post("/v1/responses", {"input": "Hi", "store": True})
    assert (stored.json()["store"], "x-quire-ignored" in stored.headers) == (True, False)


def test_tokenizer_info(scripted: Server) -> None:
    info = scripted.get("/tokenizer_info").json()
    assert (info["eos_token"], info["bos_token"]) == ("<|im_end|>", None)
    assert info["chat_template"].startswith("\n{%- set ns")
    ask = {"prompt": info["eos_token"], "add_special_tokens": False}
    assert scripted.post("/tokenize", ask).json()["tokens"] == info["eos_token_ids"]
    inside = scripted.post("/tokenize", {**ask, "prompt": "a" + info["eos_token"]}).json()
    assert not set(inside["tokens"]) & set(info["eos_token_ids"])
