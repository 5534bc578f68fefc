"""Ollama's API: /api/chat, /api/generate, /api/embed and what its clients ask about the server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from quire import __version__
from tests.server.conftest import SCRIPTS
from tests.server.harness import Server

ASK = [{"role": "user", "content": "What now?"}]
FILTERS = {"top_k": 3, "top_p": 0.5, "min_p": 0.1, "typical_p": 0.9}
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}},
}


@pytest.fixture(scope="module")
def small(shared_small_server: Server) -> Iterator[Server]:
    shared_small_server.assert_sound()
    yield shared_small_server
    shared_small_server.assert_sound()


def ask(server: Server, path: str = "/api/chat", **fields: Any) -> dict[str, Any]:
    body = {"stream": False, **({"messages": ASK} if path == "/api/chat" else {}), **fields}
    response = server.post(path, body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def lines(server: Server, path: str, **fields: Any) -> list[dict[str, Any]]:
    response = server.post(path, fields)
    assert response.headers["content-type"] == "application/x-ndjson", response.text
    return [json.loads(line) for line in response.text.splitlines()]


def refused(server: Server, path: str, **fields: Any) -> str:
    response = server.post(path, fields)
    assert response.status_code == 400, response.text
    assert response.json()["request_id"] == response.headers["x-request-id"]
    message: str = response.json()["error"]
    return message


def test_a_chat_is_answered_with_the_tokens_of_openais_api(small: Server) -> None:
    options = {"temperature": 0, "num_predict": 12}
    whole = ask(small, model="small:latest", options=options)
    expected = small.post(
        "/v1/chat/completions", {"messages": ASK, "temperature": 0, "max_tokens": 12}
    ).json()
    assert whole["message"] == {
        "role": "assistant",
        "content": expected["choices"][0]["message"]["content"],
    }
    assert whole["model"] == "small:latest"
    assert (whole["done"], whole["done_reason"]) == (True, "length")
    assert whole["eval_count"] == 12
    assert whole["prompt_eval_count"] == expected["usage"]["prompt_tokens"]
    parts = lines(small, "/api/chat", messages=ASK, options=options)  # streams are the default
    assert "".join(part["message"]["content"] for part in parts) == whole["message"]["content"]
    assert [part["done"] for part in parts] == [False] * (len(parts) - 1) + [True]
    assert len(parts) > 2


def test_durations_are_measured(small: Server) -> None:
    whole = ask(small, options={"num_predict": 40, "stop": []})
    assert 0 < whole["prompt_eval_duration"] < whole["total_duration"]
    assert whole["prompt_eval_duration"] + whole["eval_duration"] == whole["total_duration"]
    assert whole["load_duration"] == 0
    assert whole["total_duration"] > 1e5  # nanoseconds


def test_generate_uses_the_template_unless_the_prompt_is_raw(small: Server) -> None:
    options = {"temperature": 0, "num_predict": 8}
    chat = ask(small, messages=[{"role": "system", "content": "Be kind."}, *ASK], options=options)
    made = ask(small, "/api/generate", prompt="What now?", system="Be kind.", options=options)
    assert made["response"] == chat["message"]["content"]
    raw = ask(small, "/api/generate", prompt="What now?", raw=True, options=options)
    plain = small.complete(prompt="What now?", max_tokens=8)
    assert raw["response"] == plain["choices"][0]["text"]
    parts = lines(small, "/api/generate", prompt="What now?", system="Be kind.", options=options)
    assert "".join(part["response"] for part in parts) == made["response"]


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({"repeat_penalty": 5.0}, {"repetition_penalty": 5.0}),
        ({"repeat_penalty": 5.0, "repeat_last_n": -1}, {"repetition_penalty": 5.0}),
        ({"repeat_penalty": 5.0, "repeat_last_n": 0}, {}),
        (FILTERS, FILTERS),
        (
            {"presence_penalty": 1.5, "frequency_penalty": 1.0},
            {"presence_penalty": 1.5, "frequency_penalty": 1.0},
        ),
    ],
)
def test_options_are_sampling_parameters(
    small: Server, theirs: dict[str, Any], ours: dict[str, Any]
) -> None:
    options = {"temperature": 1.0, "seed": 3, "num_predict": 20}
    found = ask(small, options={**options, **theirs})["message"]["content"]
    body = {"messages": ASK, "temperature": 1.0, "seed": 3, "max_tokens": 20, **ours}
    assert (
        found == small.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]
    )


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"options": {"mirostat": 2}}, "options.mirostat"),
        ({"options": {"tfs_z": 0.5}}, "options.tfs_z"),
        ({"options": {"penalize_newline": True}}, "options.penalize_newline"),
        ({"options": {"repeat_penalty": 1.2, "repeat_last_n": 64}}, "options.repeat_last_n"),
        ({"options": {"num_ctx": 10**6}}, "options.num_ctx"),
        ({"options": {"temperature": -1}}, "options.temperature"),
        ({"options": {"num_predict": 5000}}, "options.num_predict"),
        ({"format": "yaml"}, "format"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"messages": [{**ASK[0], "images": ["AAAA"]}]}, "messages[0].images"),
        ({"messages": [{"role": "user", "content": "word " * 3000}]}, "messages"),
    ],
)
def test_what_cant_be_done_is_refused_by_name(
    small: Server, fields: dict[str, Any], named: str
) -> None:
    assert refused(small, "/api/chat", **{"messages": ASK, **fields}).startswith(named)


@pytest.mark.parametrize("field", ["images", "suffix", "template", "context"])
def test_what_generate_cant_do_is_refused_by_name(small: Server, field: str) -> None:
    value = "x" if field in ("suffix", "template") else [1]
    assert refused(small, "/api/generate", prompt="a", **{field: value}).startswith(field)
    assert ask(
        small, "/api/generate", prompt="a", options={"num_predict": 1}, **{field: value[:0]}
    )["done"]


def test_how_a_model_is_loaded_changes_no_answer_and_is_named(small: Server) -> None:
    options = {"num_predict": 1, "num_gpu": 1, "num_thread": 8, "mirostat": 0}
    response = small.post(
        "/api/chat", {"messages": ASK, "stream": False, "keep_alive": "5m", "options": options}
    )
    assert response.status_code == 200
    assert response.headers["x-quire-ignored"] == "options.num_gpu, options.num_thread, keep_alive"


def test_a_smaller_context_ends_the_answer(small: Server) -> None:
    whole = ask(small, options={"num_ctx": 64, "allowed_token_ids": [70]})
    assert whole["prompt_eval_count"] + whole["eval_count"] == 64
    assert whole["done_reason"] == "length"


def test_the_model_is_there_and_stays(small: Server) -> None:
    """A call without a prompt asks Ollama to load or, with keep_alive 0, to unload a model."""
    loaded = ask(small, messages=[], model="small")
    assert (loaded["done"], loaded["done_reason"]) == (True, "load")
    assert ask(small, "/api/generate", model="small")["response"] == ""
    assert "stays" in refused(small, "/api/generate", model="small", keep_alive=0)


def test_format_constrains_the_answer(small: Server) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"enum": [1, 2]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    options = {"num_predict": 60}
    assert json.loads(ask(small, format=schema, options=options)["message"]["content"])["a"] in (
        1,
        2,
    )
    found = ask(
        small, "/api/generate", prompt="a", format="json", options={"num_predict": 8, "seed": 1}
    )
    assert found["response"].lstrip().startswith("{")


def test_logprobs_are_those_of_openais_api(small: Server) -> None:
    options = {"temperature": 0, "num_predict": 3}
    whole = ask(small, logprobs=True, top_logprobs=2, options=options)
    body = {"messages": ASK, "temperature": 0, "max_tokens": 3, "logprobs": True, "top_logprobs": 2}
    assert (
        whole["logprobs"]
        == small.post("/v1/chat/completions", body).json()["choices"][0]["logprobs"]["content"]
    )


def test_tools_are_called_and_their_results_read(scripted: Server) -> None:
    question = {"role": "user", "content": "Please @weather"}
    call = {"function": {"name": "weather", "arguments": {"city": "Rome"}}}
    whole = ask(scripted, messages=[question], tools=[WEATHER])
    assert whole["message"]["content"].strip() == "I look it up."
    assert whole["message"]["tool_calls"] == [call]
    assert whole["done_reason"] == "stop"
    parts = lines(scripted, "/api/chat", messages=[question], tools=[WEATHER])
    assert [part["message"]["tool_calls"] for part in parts if "tool_calls" in part["message"]] == [
        [call]
    ]
    result = {"role": "tool", "tool_name": "weather", "content": "sunny"}
    after = ask(scripted, messages=[question, whole["message"], result], tools=[WEATHER])
    assert after["message"]["content"] == SCRIPTS["done"]


def test_embeddings_are_those_of_openais_api(small: Server) -> None:
    texts = ["one", "two words"]
    found = small.post("/api/embed", {"model": "small", "input": texts}).json()
    expected = small.post("/v1/embeddings", {"input": texts}).json()
    assert found["embeddings"] == [entry["embedding"] for entry in expected["data"]]
    assert found["prompt_eval_count"] == expected["usage"]["prompt_tokens"]
    assert found["total_duration"] > 0
    (short,) = small.post("/api/embed", {"input": "one", "dimensions": 4}).json()["embeddings"]
    assert len(short) == 4
    assert abs(float(np.linalg.norm(short)) - 1) < 1e-5
    long = "word " * 3000
    assert len(small.post("/api/embed", {"input": long}).json()["embeddings"]) == 1
    assert "context" in refused(small, "/api/embed", input=long, truncate=False)


def test_what_the_server_says_of_itself(small: Server) -> None:
    assert small.get("/api/version").json() == {"version": __version__}
    assert [model["name"] for model in small.get("/api/tags").json()["models"]] == ["small", "m"]
    (first, _) = small.get("/api/ps").json()["models"]
    assert first["context_length"] == 1024
    assert first["size"] > 0
    shown = small.post("/api/show", {"model": "small:latest"}).json()
    assert shown["model_info"]["quire.context_length"] == 1024
    assert shown["template"]
    assert {"completion", "tools", "embedding"} <= set(shown["capabilities"])
    missing = small.post("/api/show", {"model": "another"})
    assert missing.status_code == 404
    assert "another" in missing.json()["error"]


def test_a_stream_that_fails_says_so_in_its_last_line(small: Server) -> None:
    body = {"messages": ASK, "options": {"deadline": 0.3, "ignore_eos": True, "num_predict": 900}}
    parts = lines(small, "/api/chat", **body)
    assert "longer than" in parts[-1]["error"]
