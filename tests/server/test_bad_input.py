"""Bad input: every row of that table in HARDENING. Each answer names the field; afterwards the
server is sound.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.harness import Server, error_of, resident

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
EMBEDDINGS = "/v1/embeddings"
PROMPT = "The capital of France is"
MESSAGES = [{"role": "user", "content": "hi"}]

NUMBERS = {
    "temperature": (-1, 1000),
    "top_p": (-0.1, 0, 1.5),
    "n": (0, -1, 129, 10**9),
    "max_tokens": (-1, 2**31, 10**30),
    "presence_penalty": (3, -3),
    "frequency_penalty": (2.5,),
    "seed": (2**64, -(2**64)),
    "top_k": (-2, 2**31),
    "min_p": (-0.5, 1.1),
    "typical_p": (0, 2),
    "top_n_sigma": (-1, 10**6),
    "repetition_penalty": (0, -1, 1000),
    "min_tokens": (-1, 100),
    "logprobs": (-1, 21, 10**9),
    "prompt_logprobs": (-1, 10**6),
    "best_of": (0, 129),
    "truncate_prompt_tokens": (-2,),
    "no_repeat_ngram_size": (-1, 1000),
    "priority": (10**12, 1),
    "deadline": (0, -1),
    "dry_multiplier": (-1,),
    "xtc_probability": (2,),
}


@pytest.fixture(scope="module")
def server(shared_small_server: Server) -> Server:
    shared_small_server.assert_sound()
    return shared_small_server


@pytest.fixture(autouse=True)
def _sound_after_every_case(server: Server) -> Iterator[None]:
    yield
    server.assert_sound()


@pytest.mark.parametrize("field", NUMBERS)
def test_numbers_out_of_range_or_of_the_wrong_kind(server: Server, field: str) -> None:
    with server.client() as client:
        for value in NUMBERS[field]:
            response = client.post(COMPLETIONS, json={"prompt": PROMPT, field: value})
            error_of(response, 400, field)
        for raw in (
            "NaN",
            "Infinity",
            "-Infinity",
            "1e400",
            "true",
            '"1x"',
            "[]",
            "{}",
            "1" * 5000,
        ):
            body = f'{{"prompt": "{PROMPT}", "max_tokens": 1, "{field}": {raw}}}'
            if field == "max_tokens":
                body = f'{{"prompt": "{PROMPT}", "{field}": {raw}}}'
            response = client.post(
                COMPLETIONS, content=body, headers={"content-type": "application/json"}
            )
            assert response.status_code == 400, (field, raw, response.text)
        response = client.post(
            COMPLETIONS, json={"prompt": PROMPT, "max_tokens": 1} | {field: None}
        )
        assert response.status_code == 200, response.text  # null: not given


def test_what_asks_for_nothing_is_not_refused(server: Server) -> None:
    """As vLLM's clients send it who fill in every field."""
    nothing = {
        "use_beam_search": False,
        "length_penalty": 1.0,
        "logits_processors": None,
        "repetition_min_count": 0,
    }
    response = server.post(COMPLETIONS, {"prompt": PROMPT, "max_tokens": 1, **nothing})
    assert response.status_code == 200, response.text
    assert "x-quire-ignored" not in response.headers


@pytest.mark.few(33)
@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (COMPLETIONS, {}, "prompt"),
        (COMPLETIONS, {"prompt": ""}, "prompt"),
        (COMPLETIONS, {"prompt": " \n\t "}, "prompt"),
        (COMPLETIONS, {"prompt": []}, "prompt"),
        (COMPLETIONS, {"prompt": [[]]}, "prompt"),
        (COMPLETIONS, {"prompt": [""]}, "prompt"),
        (COMPLETIONS, {"prompt": None}, "prompt"),
        (COMPLETIONS, {"prompt": [1, "a"]}, "prompt"),
        (COMPLETIONS, {"prompt": [-1]}, "prompt"),
        (COMPLETIONS, {"prompt": [10**6]}, "prompt"),
        (COMPLETIONS, {"prompt": [[1, 2], [10**20]]}, "prompt"),
        (COMPLETIONS, {"prompt": [True]}, "prompt"),
        (COMPLETIONS, {"prompt": ["x"] * 2000}, "prompt"),
        (COMPLETIONS, {"prompt": ["x"] * 200, "n": 2}, "n"),
        (COMPLETIONS, {"prompt": PROMPT, "suffix": "x"}, "suffix"),
        (COMPLETIONS, {"prompt": PROMPT, "stop": ["x"] * 65}, "stop"),
        (COMPLETIONS, {"prompt": PROMPT, "stop": [""]}, "stop"),
        (COMPLETIONS, {"prompt": PROMPT, "stop": "x" * 2000}, "stop"),
        (
            COMPLETIONS,
            {"prompt": PROMPT, "logit_bias": {str(i): 1 for i in range(2000)}},
            "logit_bias",
        ),
        (COMPLETIONS, {"prompt": PROMPT, "logit_bias": {"-1": 1}}, "logit_bias"),
        (COMPLETIONS, {"prompt": PROMPT, "logit_bias": {"x": 1}}, "logit_bias"),
        (COMPLETIONS, {"prompt": PROMPT, "logit_bias": {"99999999": 1}}, "logit_bias"),
        (COMPLETIONS, {"prompt": PROMPT, "logit_bias": {"5": 101}}, "logit_bias"),
        (COMPLETIONS, {"prompt": PROMPT, "stop_token_ids": [10**6]}, "stop_token_ids"),
        (COMPLETIONS, {"prompt": PROMPT, "best_of": 3, "stream": True}, "best_of"),
        (COMPLETIONS, {"prompt": PROMPT, "n": 3, "best_of": 2, "temperature": 1}, "best_of"),
        (
            COMPLETIONS,
            {"prompt": PROMPT, "stream_options": {"include_usage": True}},
            "stream_options",
        ),
        (COMPLETIONS, {"prompt": PROMPT, "guided_regex": "a", "guided_json": {}}, "guided_regex"),
        (COMPLETIONS, {"prompt": PROMPT, "guided_choice": []}, "guided_choice"),
        (COMPLETIONS, {"prompt": PROMPT, "structured_outputs": {}}, "structured_outputs"),
        (
            COMPLETIONS,
            {
                "prompt": PROMPT,
                "structured_outputs": {"regex": "a", "disable_any_whitespace": True},
            },
            "structured_outputs.disable_any_whitespace",
        ),
        (
            COMPLETIONS,
            {"prompt": PROMPT, "repetition_detection": {"max_pattern_size": 9}},
            "repetition_detection",
        ),
        (COMPLETIONS, {"prompt": PROMPT, "length_penalty": 1.5}, "length_penalty"),
        (CHAT, {"messages": MESSAGES, "add_special_tokens": True}, "add_special_tokens"),
        (COMPLETIONS, {"prompt": PROMPT, "guided_regex": "a" * 20_000}, "guided_regex"),
        (COMPLETIONS, {"prompt": PROMPT, "guided_json": {"a": "b" * 300_000}}, "guided_json"),
        (COMPLETIONS, {"prompt": PROMPT, "guided_grammar": "a" * 300_000}, "guided_grammar"),
        (COMPLETIONS, {"prompt": PROMPT, "allowed_token_ids": []}, "allowed_token_ids"),
        (COMPLETIONS, {"prompt": PROMPT, "allowed_token_ids": [-1]}, "allowed_token_ids"),
        (COMPLETIONS, {"prompt": PROMPT, "allowed_token_ids": [10**6]}, "allowed_token_ids"),
        (COMPLETIONS, {"prompt": PROMPT, "allowed_token_ids": [1] * 190_000}, "allowed_token_ids"),
        (COMPLETIONS, {"prompt": PROMPT, "stop_token_ids": [1] * 20_000}, "stop_token_ids"),
        (COMPLETIONS, {"prompt": PROMPT, "bad_words": ["x"] * 20_000}, "bad_words"),
        (
            COMPLETIONS,
            {"prompt": PROMPT, "dry_sequence_breakers": ["x"] * 20_000},
            "dry_sequence_breakers",
        ),
        (COMPLETIONS, {"prompt": PROMPT, "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        (COMPLETIONS, {"prompt": PROMPT, "chat_template": "{{ 1 }}"}, "chat_template"),
        (COMPLETIONS, {"prompt": PROMPT, "cache_salt": "x" * 2000}, "cache_salt"),
        (COMPLETIONS, {"prompt": "so " * 1500}, "prompt"),
        (COMPLETIONS, {"prompt": [1] * 1024}, "prompt"),
        (COMPLETIONS, {"prompt": PROMPT, "max_tokens": 5000}, "max_tokens"),
        (CHAT, {}, "messages"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": "hi"}, "messages"),
        (CHAT, {"messages": [1]}, "messages"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content"),
        (CHAT, {"messages": [{"role": "alien", "content": "x"}]}, "messages[0].role"),
        (CHAT, {"messages": [{"content": "x"}]}, "messages[0].role"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0].type",
        ),
        (CHAT, {"messages": MESSAGES, "top_logprobs": 2}, "top_logprobs"),
        (CHAT, {"messages": MESSAGES, "top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        (
            CHAT,
            {"messages": MESSAGES, "max_tokens": 3, "max_completion_tokens": 4},
            "max_completion_tokens",
        ),
        (CHAT, {"messages": MESSAGES, "tool_choice": "required"}, "tool_choice"),
        (CHAT, {"messages": MESSAGES, "tool_choice": "sometimes"}, "tool_choice"),
        (CHAT, {"messages": MESSAGES, "tools": [{"type": "x"}]}, "tools[0].type"),
        (CHAT, {"messages": MESSAGES, "response_format": {"type": "xml"}}, "response_format.type"),
        (
            CHAT,
            {"messages": MESSAGES, "response_format": {"type": "json_schema"}},
            "response_format.json_schema",
        ),
        (CHAT, {"messages": MESSAGES, "documents": [{"a": "b"}]}, "documents"),
        (CHAT, {"messages": MESSAGES, "continue_final_message": True}, "continue_final_message"),
        (
            CHAT,
            {"messages": MESSAGES, "chat_template_kwargs": {"messages": []}},
            "chat_template_kwargs.messages",
        ),
        (CHAT, {"messages": MESSAGES, "stream": "yes"}, "stream"),
        (CHAT, {"messages": [{"role": "user", "content": ""}]}, "messages"),
        (
            CHAT,
            {"messages": [{"role": "system", "content": " "}, {"role": "user", "content": "\n\t"}]},
            "messages",
        ),
        (CHAT, {"messages": [{"role": "user", "content": []}]}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": "so " * 3000}]}, "messages"),
        (CHAT, {"messages": MESSAGES * 500}, "messages"),
        (CHAT, {"messages": MESSAGES * 9000}, "messages"),
        (CHAT, {"messages": MESSAGES, "max_completion_tokens": 5000}, "max_completion_tokens"),
        (CHAT, {"messages": MESSAGES, "chat_template": "{{ 1 }}"}, "chat_template"),
        (
            CHAT,
            {"messages": MESSAGES, "chat_template_kwargs": {f"k{i}": 1 for i in range(300)}},
            "chat_template_kwargs",
        ),
        (CHAT, {"messages": MESSAGES, "logprobs": True, "top_logprobs": 10**9}, "top_logprobs"),
        (CHAT, {"messages": MESSAGES, "tools": [{"type": "function"}] * 3000}, "tools"),
        (RESPONSES, {"input": ""}, "input"),
        (RESPONSES, {"input": []}, "input"),
        (RESPONSES, {"input": [{"role": "user", "content": " "}]}, "input"),
        (RESPONSES, {"input": [{"role": "alien", "content": "x"}]}, "input[0].role"),
        (RESPONSES, {"input": MESSAGES * 9000}, "input"),
        (RESPONSES, {"input": "so " * 3000}, "input"),
        (RESPONSES, {"input": "x", "max_output_tokens": 5000}, "max_output_tokens"),
        (RESPONSES, {"input": "x", "chat_template": "{{ 1 }}"}, "chat_template"),
        (EMBEDDINGS, {"input": "so " * 3000}, "input"),
        (EMBEDDINGS, {"input": ["x", "so " * 3000]}, "input[1]"),
        (EMBEDDINGS, {"input": "x", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x" * 1_100_000}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": "x" * 1_100_000}]}, "messages"),
        ("/tokenize", {"messages": MESSAGES, "chat_template": "{{ 1 }}"}, "chat_template"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [10**30]}, "tokens"),
        ("/detokenize", {"tokens": [True]}, "tokens[0]"),
    ],
)
def test_a_field_that_is_wrong_is_named(
    server: Server, path: str, body: dict[str, Any], field: str
) -> None:
    error_of(server.post(path, body), 400, field)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": " \n"}]}, "messages"),
        ({"messages": [{"role": "user", "content": []}]}, "messages"),
        ({"messages": [{"role": "alien", "content": "x"}]}, "messages[0].role"),
        ({"messages": MESSAGES * 9000}, "messages"),
        ({"messages": [{"role": "user", "content": "so " * 3000}]}, "messages"),
        ({"max_tokens": 10**12}, "max_tokens"),
        ({"stop_sequences": ["x"] * 65}, "stop_sequences"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"a": "b" * 300_000}}}},
            "output_config",
        ),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"tools": [{"name": "f", "input_schema": {}}] * 200}, "tools"),
    ],
)
def test_anthropics_fields_are_named_too(
    server: Server, fields: dict[str, Any], field: str
) -> None:
    model = server.get("/v1/models").json()["data"][0]["id"]
    response = server.post(
        "/v1/messages", {"model": model, "max_tokens": 1, "messages": MESSAGES, **fields}
    )
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith(field)
    assert response.json()["request_id"] == response.headers["x-request-id"]


def test_calls_of_tools_count_as_text(server: Server) -> None:
    """What a client says a tool was called with is as long as it likes; it is not tokenized to find
    that out.
    """
    call = {
        "id": "a",
        "type": "function",
        "function": {"name": "f", "arguments": json.dumps({"a": "so " * 100_000})},
    }
    messages = [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert "at least" in error_of(server.post(CHAT, {"messages": messages}), 400, "messages")


def test_prompts_beyond_the_context_say_both_numbers(server: Server) -> None:
    message = error_of(server.post(COMPLETIONS, {"prompt": [1] * 1500}), 400)
    assert "1500" in message
    assert "1024" in message
    message = error_of(server.post(COMPLETIONS, {"prompt": PROMPT, "max_tokens": 5000}), 400)
    assert "5000" in message
    assert "1024" in message
    for fields in ({"prompt": "so " * 1500}, {"prompt": PROMPT, "max_tokens": 5000}):
        assert server.post(COMPLETIONS, fields).json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"guided_json": {"$ref": "#"}}, None),
        ({"guided_json": {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}}, None),
        ({"guided_json": {"enum": [f"value {i}" for i in range(9000)]}}, None),
        ({"guided_json": "{not json"}, "guided_json"),
        ({"guided_regex": "(a"}, "guided_regex"),
        ({"guided_regex": "(a+)+b"}, None),
        ({"guided_regex": "([a-z]{1,9999}){1,9999}"}, None),
        ({"guided_grammar": "begin: "}, "guided_grammar"),
        ({"guided_grammar": "start: start start"}, None),
        ({"guided_json": {"type": "no such type"}}, "guided_json"),
    ],
)
def test_hostile_grammars_hurt_nobody_else(
    server: Server, fields: dict[str, Any], field: str | None
) -> None:
    """Each is answered or refused, and a plain request beside it is not held up by it."""
    finished: list[object] = []

    def beside() -> None:
        finished.append(server.complete(prompt=PROMPT, max_tokens=2))

    thread = threading.Thread(target=beside)
    thread.start()
    response = server.post(
        COMPLETIONS, {"prompt": PROMPT, "max_tokens": 4, "temperature": 0, **fields}
    )
    thread.join(60)
    assert finished
    if field is not None:
        error_of(response, 400, field)
    else:
        assert response.status_code in (200, 400), response.text


@pytest.mark.slow
def test_many_distinct_schemas_leave_the_memory_bounded(server: Server) -> None:
    def use(start: int) -> None:
        with server.client() as client:
            for i in range(start, start + 40):
                body = {
                    "prompt": PROMPT,
                    "max_tokens": 1,
                    "guided_regex": f"[a-f]{{{i % 7 + 1}}}-{i}",
                }
                assert client.post(COMPLETIONS, json=body).status_code == 200

    use(0)
    before = resident(server.engine_pid)
    use(40)
    assert resident(server.engine_pid) - before < 64 * 1024  # KiB


def test_deep_json_and_broken_json(server: Server) -> None:
    headers = {"content-type": "application/json"}
    deep = "[" * 10_000 + "]" * 10_000
    with server.client() as client:
        for body in (
            f'{{"messages": {deep}}}',
            f'{{"messages": [{{"role": "user", "content": "x", "deep": {deep}}}]}}',
            deep,
            '{"a":' * 10_000 + "1" + "}" * 10_000,
            "{",
            "",
            "null",
            "[]",
            '"text"',
            "\x00",
            '{"messages": [{"role": "user", "content": "\ud800"}]}'.encode(
                "utf-8", "surrogatepass"
            ),
            b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}',
        ):
            error_of(client.post(CHAT, content=body, headers=headers), 400)
        lone = '{"messages": [{"role": "user", "content": "\\ud800"}]}'
        error_of(client.post(CHAT, content=lone, headers=headers), 400)


def test_media_types_and_encodings(server: Server) -> None:
    body = json.dumps({"prompt": PROMPT, "max_tokens": 1})
    with server.client() as client:
        for kind in (
            "text/plain",
            "application/x-www-form-urlencoded",
            "multipart/form-data; boundary=x",
            "",
        ):
            error_of(client.post(COMPLETIONS, content=body, headers={"content-type": kind}), 415)
        for coding in (
            "gzip",
            "GZIP",
            "deflate",
            "br",
            "zstd",
            "identity, gzip",
            "gzip, gzip",
            "x",
        ):
            packed = {"content-type": "application/json", "content-encoding": coding}
            error_of(client.post(COMPLETIONS, content=body, headers=packed), 415)
        plain = client.post(
            COMPLETIONS, content=body, headers={"content-type": "application/json; charset=utf-8"}
        )
        assert plain.status_code == 200


@pytest.mark.slow
def test_bodies_that_are_too_large_and_others_meanwhile(server: Server) -> None:
    """Ten megabytes are refused; four are read, and others are served meanwhile."""
    error_of(server.post(COMPLETIONS, {"prompt": "x" * 10_000_000}), 413)
    stop = threading.Event()
    served = [0]

    def watch() -> None:
        with server.client() as client:
            while not stop.is_set():
                assert client.get("/health").status_code == 200
                served[0] += 1

    thread = threading.Thread(target=watch)
    thread.start()
    bodies: list[dict[str, Any]] = [
        {"prompt": "word " * 800_000},
        {"prompt": list(range(1000)) * 800},
        {"prompt": [["a"]] * 30_000},
        {"prompt": [["a"]] * 300_000},
        {"prompt": [1.5] * 800_000},
        {"prompt": "x", "stop": [1] * 1_000_000},
        {"prompt": "x", "logit_bias": {str(i): "x" for i in range(200_000)}},
        {"prompt": "x", **{f"field{i}": 1 for i in range(200_000)}},
        {"prompt": "x", "deep": [[[]]] * 500_000},
    ]
    for body in bodies:
        before = served[0]
        assert server.post(COMPLETIONS, body).status_code == 400
        assert served[0] > before
    stop.set()
    thread.join(60)


def test_nothing_there_and_wrong_methods(server: Server) -> None:
    error_of(server.get("/nothing"), 404)
    error_of(server.get(COMPLETIONS), 405)
    error_of(server.post("/health", {}), 405)
    error_of(server.get("/v1/models/a/b/../../c"), 404)


def test_a_text_full_of_brackets_is_just_a_text(server: Server) -> None:
    message = error_of(server.post(COMPLETIONS, {"prompt": '[{"a\\": ' * 100_000}), 400)
    assert "context" in message
