"""Every field of a chat request changes something. A field that is new must be told here how it
does.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from quire.server.api.anthropic_fields import MessagesRequest
from quire.server.api.chat import ChatCompletionRequest
from quire.server.api.completions import CompletionRequest
from quire.server.api.embeddings import EmbeddingsRequest
from quire.server.api.responses import ResponsesRequest
from tests.server.harness import ROOT, SMALL_ENGINE, Server, error_of, wait_for
from tests.server.random_model import write_model
from tests.server.test_tools import THINKER

CHAT = "/v1/chat/completions"
EOS = 977
ASK = [{"role": "user", "content": "What now? " * 8}]
BASE: dict[str, Any] = {
    "messages": ASK,
    "max_tokens": 24,
    "temperature": 1.0,
    "seed": 1,
    "return_token_ids": True,
}
GREEDY = {"temperature": 0}
LOOP = {
    "temperature": 0,
    "max_tokens": 60,
    "allowed_token_ids": [70, 71, 72],
    "dry_multiplier": 0.02,
}
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("go", "stay")]
CALLS = {
    "tools": TOOLS,
    "tool_choice": "required",
    "max_tokens": 100,
    "logit_bias": {str(EOS): -100},
}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": [1]}},
    "required": ["a"],
    "additionalProperties": False,
}
THINKING = {"chat_template_kwargs": {"enable_thinking": True}}

CHANGES: dict[str, tuple[dict[str, Any], Any]] = {
    # field: what is sent with it and without it, and its value
    "messages": ({}, [{"role": "user", "content": "Why?"}]),
    "max_tokens": ({}, 3),
    "max_completion_tokens": ({"max_tokens": None}, 3),
    "n": ({}, 2),
    "temperature": ({}, 0.0),
    "top_p": ({}, 0.05),
    "top_k": ({}, 1),
    "min_p": ({}, 1.0),
    "typical_p": ({}, 0.05),
    "top_n_sigma": ({}, 0.01),
    "seed": ({}, 2),
    "presence_penalty": (GREEDY, 2.0),
    "frequency_penalty": (GREEDY, 2.0),
    "repetition_penalty": (GREEDY, 5.0),
    "no_repeat_ngram_size": (GREEDY, 1),
    "dry_multiplier": (LOOP, 5.0),
    "dry_base": (LOOP, 10.0),
    "dry_allowed_length": (LOOP | {"dry_multiplier": 5.0}, 50),
    "dry_sequence_breakers": (LOOP | {"dry_multiplier": 5.0}, ["i", "j", "k", "h", "g"]),
    "xtc_probability": ({"xtc_threshold": 0.001}, 1.0),
    "xtc_threshold": ({"xtc_probability": 1.0}, 0.001),
    "logit_bias": ({}, {"5": 100}),
    "stop": ({"allowed_token_ids": [70, 71]}, ["h", "i", "g"]),
    "stop_token_ids": ({"allowed_token_ids": [70, 71]}, [70, 71]),
    "include_stop_str_in_output": (
        {"allowed_token_ids": [70, 71], "stop_token_ids": [70, 71]},
        True,
    ),
    "min_tokens": ({"allowed_token_ids": [70, 71], "stop_token_ids": [70]}, 9),
    "ignore_eos": ({"allowed_token_ids": [EOS]}, True),
    "allowed_token_ids": ({}, [70, 71]),
    "bad_words": ({"allowed_token_ids": [70, 71]}, ["g"]),
    "skip_special_tokens": ({"allowed_token_ids": [EOS], "ignore_eos": True}, False),
    "truncate_prompt_tokens": ({}, 3),
    "truncation_side": ({"truncate_prompt_tokens": 3}, "right"),
    "logprob_token_ids": ({"logprobs": True}, [5, 6]),
    "logprobs": ({}, True),
    "top_logprobs": ({"logprobs": True}, 2),
    "prompt_logprobs": ({}, 1),
    "return_token_ids": ({"return_token_ids": False}, True),
    "return_tokens_as_token_ids": ({"logprobs": True}, True),
    "response_format": (
        {},
        {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}},
    ),
    "guided_json": ({}, SCHEMA),
    "guided_regex": ({}, "[a-c]{4}"),
    "guided_choice": ({}, ["go", "stay"]),
    "guided_grammar": ({}, 'start: "x" "y"\n'),
    "guided_json_object": ({}, True),
    "regex": ({}, "[a-c]{4}"),
    "ebnf": ({}, 'root ::= "x" "y"'),
    "grammar": ({}, 'root ::= "x" "y"'),
    "json_schema": ({}, SCHEMA),
    "format": ({}, SCHEMA),
    "structured_outputs": ({}, {"choice": ["go", "stay"]}),
    "tools": ({}, TOOLS),
    "tool_choice": ({"tools": TOOLS, "max_tokens": 60}, "required"),
    "parallel_tool_calls": (CALLS, False),
    "documents": ({}, [{"title": "t", "text": "Words."}]),
    "chat_template_kwargs": ({}, {"enable_thinking": True}),
    "reasoning_effort": ({}, "high"),
    "include_reasoning": (THINKING, False),
    "add_generation_prompt": ({}, False),
    "continue_final_message": (
        {
            "messages": [*ASK, {"role": "assistant", "content": "Now"}],
            "add_generation_prompt": False,
        },
        True,
    ),
    "service_tier": ({}, "auto"),
}
NOTED = {"user": "me", "safety_identifier": "s", "metadata": {"a": "b"}}
"""Found again in the request's record."""
ELSEWHERE = {
    "model": "test_chat: 404 if it is not served",
    "stream": "test_chat",
    "stream_options": "test_chat",
    "request_id": "below",
    "cache_salt": "below",
    "weights_version": "test_weights",
    "deadline": "below",
    "priority": "below",
    "prediction": "test_speculation",
    "speculation": "test_speculation",
}
NOTHING = {
    "spaces_between_special_tokens": "no decoder here puts spaces there (SamplingParams says so)",
    "modalities": "can only be what it always is, text",
    "store": "is named in x-quire-ignored (test_recorded_clients)",
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("fields")
    write_model(
        folder, THINKER + "{%- for document in documents or [] %}{{- document.text }}{%- endfor %}"
    )
    engine = SMALL_ENGINE | {"policy": "priority", "max_num_seqs": 1}
    with Server(model=str(folder), engine=engine, served_model_names=["small"]) as server:
        yield server


def answer(server: Server, fields: dict[str, Any]) -> dict[str, Any]:
    """What is the same whenever the same is asked."""
    response = server.post(CHAT, BASE | fields)
    assert response.status_code == 200, response.text
    assert "x-quire-ignored" not in response.headers
    body: dict[str, Any] = response.json()
    del body["id"], body["created"], body["usage"]["prompt_tokens_details"]
    for choice in body["choices"]:
        for call in choice["message"].get("tool_calls", ()):
            del call["id"]
    return body


def test_no_field_is_forgotten() -> None:
    told = [*CHANGES, *NOTED, *ELSEWHERE, *NOTHING]
    assert sorted(told) == sorted(ChatCompletionRequest.model_fields)


@pytest.mark.parametrize(
    "kind",
    [
        ChatCompletionRequest,
        CompletionRequest,
        ResponsesRequest,
        MessagesRequest,
        EmbeddingsRequest,
    ],
)
def test_what_is_refused_is_written_down(kind: Any) -> None:
    text = (ROOT / "docs" / "server.md").read_text()
    assert [name for name in kind.UNSUPPORTED if f"`{name}`" not in text] == []


@pytest.mark.few(4)
@pytest.mark.parametrize("field", CHANGES)
def test_it_changes_the_answer(server: Server, field: str) -> None:
    others, value = CHANGES[field]
    without = answer(server, others)
    assert answer(server, others) == without
    assert answer(server, others | {field: value}) != without


def test_it_is_kept_with_the_record(server: Server) -> None:
    response = server.post(CHAT, {**BASE, **NOTED, "request_id": "by-the-body"})
    assert response.headers["x-request-id"] == "by-the-body"
    assert server.get("/v1/requests/by-the-body").json()["notes"] == NOTED


def test_salt_keeps_caches_apart(server: Server) -> None:
    def cached(**fields: Any) -> int:
        usage = server.post(CHAT, {**BASE, **fields}).json()["usage"]
        count: int = usage["prompt_tokens_details"]["cached_tokens"]
        return count

    answer(server, {})
    assert cached() > 0
    assert cached(cache_salt="mine") == 0
    assert cached(cache_salt="mine") > 0


def test_deadlines_end_requests(server: Server) -> None:
    error_of(
        server.post(CHAT, {**BASE, "max_tokens": 900, "ignore_eos": True, "deadline": 0.001}), 504
    )


def test_bans_that_leave_nothing_are_the_clients_mistake(server: Server) -> None:
    response = server.post(CHAT, BASE | {"allowed_token_ids": [70, 71], "no_repeat_ngram_size": 1})
    assert "masks and bans" in error_of(response, 400)


def test_the_more_important_goes_first(server: Server) -> None:
    """One runs, two wait: the one that came later is admitted before the other. (On busy cores the
    first may be done before the last has come; then there was no choice, and it is tried again.)
    """

    def admitted(attempt: int) -> list[int]:
        with ThreadPoolExecutor(3) as pool:

            def begin(name: str, priority: int, max_tokens: int) -> Any:
                body = BASE | {"priority": priority, "max_tokens": max_tokens, "ignore_eos": True}
                future = pool.submit(server.post, CHAT, body, headers={"x-request-id": name})
                wait_for(
                    lambda: server.get(f"/v1/requests/{name}").status_code == 200,
                    what="its arrival",
                )
                return future

            names = [f"rank-{attempt}-{number}" for number in range(3)]
            runs = [begin(names[0], 0, 700), begin(names[1], 9, 2), begin(names[2], 1, 2)]
            assert all(run.result().status_code == 200 for run in runs)
        records = [server.get(f"/v1/requests/{name}").json() for name in names]
        return [record["engine"]["answers"][0]["admissions"][0]["step"] for record in records]

    for attempt in range(4):
        first, later, sooner = admitted(attempt)
        if first < sooner < later:
            return
    raise AssertionError(f"admitted in the steps {first}, {sooner}, {later}")
