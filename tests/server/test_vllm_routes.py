"""Addresses and fields of vLLM's server beside the APIs it shares with others."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from quire.server.api.anthropic_fields import MessagesRequest
from quire.server.api.chat import ChatCompletionRequest
from quire.server.api.completions import CompletionRequest
from quire.server.api.embeddings import EmbeddingsRequest
from quire.server.api.responses import ResponsesRequest
from tests.server.harness import Server, error_of

ASK = [{"role": "user", "content": "What now?"}]
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def small(shared_small_server: Server) -> Iterator[Server]:
    shared_small_server.assert_sound()
    yield shared_small_server
    shared_small_server.assert_sound()


def test_ping_is_health(small: Server) -> None:
    assert (
        small.get("/ping").json() == small.post("/ping", {}).json() == small.get("/health").json()
    )


def test_load_counts_what_is_asked_for(small: Server) -> None:
    assert small.get("/load").json() == {"server_load": 0}
    body = {"prompt": "a", "max_tokens": 800, "ignore_eos": True, "n": 3, "stream": True}
    seen = set()
    for _ in range(20):  # on a busy machine an answer may end before it is asked for
        with (
            small.client() as client,
            client.stream("POST", "/v1/completions", json=body) as response,
        ):
            next(response.iter_lines())
            seen.add(small.get("/load").json()["server_load"])
        if 3 in seen:
            break
    assert 3 in seen


def test_server_info_tells_settings_and_no_secrets(small: Server, small_model: str) -> None:
    response = small.get("/server_info")
    assert response.json()["config"]["max_model_len"] == 1024
    assert response.json()["config"]["served_model_names"] == ["small", "m"]
    assert small_model not in response.text


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": ASK, "max_tokens": 4, "temperature": 0}),
        ("/v1/completions", {"prompt": "a b", "max_tokens": 4, "temperature": 0}),
        ("/v1/embeddings", {"input": "a b"}),
    ],
)
def test_invocations_are_whatever_their_body_is(
    small: Server, path: str, body: dict[str, Any]
) -> None:
    found, expected = small.post("/invocations", body).json(), small.post(path, body).json()
    for one in (found, expected):
        one.pop("id"), one.pop("created"), one["usage"].pop("prompt_tokens_details", None)
    assert found == expected


def test_an_invocation_of_nothing_is_refused(small: Server) -> None:
    assert "messages" in error_of(small.post("/invocations", {"max_tokens": 4}), 400)
    error_of(small.post("/invocations", {"prompt": "a", "max_tokens": -4}), 400, "max_tokens")


def test_a_batch_of_chats_is_answered_like_each_alone(small: Server) -> None:
    conversations = [
        ASK,
        [{"role": "user", "content": "Why?"}],
        [*ASK, {"role": "assistant", "content": "a"}, *ASK],
    ]
    options = {"max_tokens": 6, "temperature": 0, "return_token_ids": True}
    batch = small.post(f"{CHAT}/batch", {"messages": conversations, **options}).json()
    assert [choice["index"] for choice in batch["choices"]] == [0, 1, 2]
    for choice, messages in zip(batch["choices"], conversations, strict=True):
        alone = small.post(CHAT, {"messages": messages, **options}).json()
        assert choice["message"] == alone["choices"][0]["message"]
        assert choice["token_ids"] == alone["choices"][0]["token_ids"]
        assert choice["prompt_token_ids"] == alone["prompt_token_ids"]
    assert batch["usage"]["completion_tokens"] == 18
    wrong = {"messages": [ASK, [{"role": "user", "content": 5}]]}
    error_of(small.post(f"{CHAT}/batch", wrong), 400, "messages[1][0].content")
    error_of(small.post(f"{CHAT}/batch", {"messages": [ASK], "stream": True}), 400, "stream")


def test_a_stream_tells_tokens_without_text_too(small: Server) -> None:
    """Half a character comes with the token that completes it, whose event has both."""
    for seed in range(6):
        body = {"messages": [{"role": "user", "content": "One?"}], "max_tokens": 16, "seed": seed}
        body |= {"return_token_ids": True, "temperature": 1}
        whole = small.post(CHAT, body).json()["choices"][0]["token_ids"]
        found: list[int] = []
        for chunk in small.stream(CHAT, body):
            found += chunk["choices"][0].get("token_ids") or []
        assert found == whole


def test_waiting_requests_are_counted_by_reason(small: Server) -> None:
    small.canary()
    assert re.search(
        r'vllm:num_requests_waiting_by_reason\{.*reason="capacity"\} 0.0',
        small.get("/metrics").text,
    )


def test_logprobs_of_tokens_that_are_asked_for_by_id(small: Server) -> None:
    body = {
        "messages": ASK,
        "max_tokens": 2,
        "temperature": 0,
        "logprobs": True,
        "return_tokens_as_token_ids": True,
    }
    wide = small.post(CHAT, {**body, "top_logprobs": 20}).json()["choices"][0]["logprobs"][
        "content"
    ]
    ids = [int(entry["token"].partition(":")[2]) for entry in wide[0]["top_logprobs"]][10:13]
    found = small.post(CHAT, {**body, "top_logprobs": 1, "logprob_token_ids": ids}).json()
    content = found["choices"][0]["logprobs"]["content"]
    expected = {entry["token"]: entry["logprob"] for entry in wide[0]["top_logprobs"]}
    shown = {entry["token"]: entry["logprob"] for entry in content[0]["top_logprobs"]}
    assert set(shown) == {f"token_id:{one}" for one in ids} | {content[0]["token"]}
    assert all(expected[name] == logprob for name, logprob in shown.items())
    assert list(shown.values()) == sorted(shown.values(), reverse=True)
    (text,) = small.complete(prompt="a", max_tokens=1, logprobs=0, logprob_token_ids=ids)["choices"]
    assert len(text["logprobs"]["top_logprobs"][0]) in (3, 4)
    error_of(
        small.post(CHAT, {"messages": ASK, "logprob_token_ids": [1]}), 400, "logprob_token_ids"
    )
    error_of(small.post(CHAT, {**body, "logprob_token_ids": [10**6]}), 400, "logprob_token_ids")


def test_prompts_are_cut_off_on_either_side(small: Server) -> None:
    ids = list(range(40, 60))
    for side, kept in (("left", ids[-5:]), ("right", ids[:5]), (None, ids[-5:])):
        body = small.complete(
            prompt=ids, max_tokens=1, truncate_prompt_tokens=5, truncation_side=side
        )
        assert body["choices"][0]["prompt_token_ids"] == kept


def test_numbers_may_be_written_as_text(small: Server) -> None:
    body = {
        "prompt": "a",
        "temperature": 0.5,
        "max_tokens": 5,
        "seed": 3,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    texts = {**body, "temperature": "0.5", "max_tokens": "5", "seed": "3", "ignore_eos": "true"}
    found, expected = (
        small.post("/v1/completions", one).json()["choices"] for one in (texts, body)
    )
    assert found == expected
    for value in ("half", "0.5.5", "NaN", "1e999", "9" * 5000, ""):
        error_of(small.post("/v1/completions", {**body, "temperature": value}), 400, "temperature")
    # Where a text has a meaning of its own it stays one.
    assert small.post("/v1/completions", {**body, "prompt": "5", "stop": "7"}).status_code == 200


def test_roles_of_the_clients_own_reach_the_template(server: Server) -> None:
    messages = [*ASK, {"role": "narrator", "content": "It was night."}]
    ids = server.post("/tokenize", {"messages": messages}).json()["tokens"]
    assert (
        "<|im_start|>narrator\nIt was night."
        in server.post("/detokenize", {"tokens": ids}).json()["prompt"]
    )
    assert server.post(CHAT, {"messages": messages, "max_tokens": 1}).status_code == 200
    for role in ("", "a\nb", "<|im_end|>", "x" * 65, 5):
        wrong = {"messages": [{"role": role, "content": "a"}]}
        error_of(server.post(CHAT, wrong), 400, "messages[0].role")


def test_usage_comes_with_every_chunk_where_both_are_asked_for(small: Server) -> None:
    body = {
        "messages": ASK,
        "max_tokens": 4,
        "ignore_eos": True,
        "temperature": 0,
        "allowed_token_ids": [70],
    }
    both = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(small.stream(CHAT, {**body, "stream_options": both}))
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts[0] == 0
    assert counts == sorted(counts)
    assert counts[-1] == 4
    assert all(
        chunk["usage"]["total_tokens"] == chunk["usage"]["prompt_tokens"] + count
        for chunk, count in zip(chunks, counts, strict=True)
    )
    alone = list(small.stream(CHAT, {**body, "stream_options": {"continuous_usage_stats": True}}))
    assert all("usage" not in chunk for chunk in alone)


NAMES = {
    ChatCompletionRequest: "echo add_special_tokens chat_template media_io_kwargs mm_processor_kwargs "
    "return_token_offsets return_prompt_text return_assistant_tokens_mask routed_experts_prompt_start "
    "ec_transfer_params kv_transfer_params "
    "vllm_xargs repetition_detection thinking_token_budget use_beam_search length_penalty early_stopping best_of "
    "truncation_side logprob_token_ids truncate_prompt_tokens prompt_logprobs bad_words documents include_reasoning "
    "structured_outputs cache_salt allowed_token_ids min_tokens return_tokens_as_token_ids return_token_ids",
    CompletionRequest: "suffix prompt_embeds return_token_offsets routed_experts_prompt_start ec_transfer_params "
    "kv_transfer_params vllm_xargs repetition_detection thinking_token_budget use_beam_search length_penalty "
    "truncation_side logprob_token_ids truncate_prompt_tokens add_special_tokens structured_outputs response_format",
    ResponsesRequest: "enable_response_messages chat_template_kwargs previous_input_messages structured_outputs "
    "include_reasoning seed stop repetition_penalty logit_bias cache_salt skip_special_tokens media_io_kwargs",
    MessagesRequest: "chat_template_kwargs seed structured_outputs kv_transfer_params",
    EmbeddingsRequest: "messages normalize embed_dtype endianness truncation_side truncate_prompt_tokens dimensions "
    "encoding_format use_activation mm_processor_kwargs chat_template chat_template_kwargs task cache_salt priority",
}
"""vLLM's fields that change what is answered."""


@pytest.mark.parametrize("kind", NAMES)
def test_no_field_that_changes_the_answer_is_only_named_in_a_header(kind: Any) -> None:
    known = {*kind.model_fields, *kind.UNSUPPORTED}
    assert [name for name in NAMES[kind].split() if name not in known] == []
