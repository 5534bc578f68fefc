"""Every field of every endpoint that takes a number, with every value that is none: 400, and the
field is named. The fields are read from the models of the bodies, so that a new one is tried as
soon as it is there.
"""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from pydantic import BaseModel

from quire.server.api.anthropic_fields import MessagesRequest
from quire.server.api.chat import ChatCompletionRequest
from quire.server.api.completions import CompletionRequest
from quire.server.api.embeddings import EmbeddingsRequest
from quire.server.api.responses import ResponsesRequest
from tests.server.harness import Server, error_of

MESSAGES = [{"role": "user", "content": "hi"}]
ENDPOINTS: dict[str, tuple[type[BaseModel], dict[str, Any]]] = {
    "/v1/completions": (CompletionRequest, {"prompt": "ab", "max_tokens": 1}),
    "/v1/chat/completions": (ChatCompletionRequest, {"messages": MESSAGES, "max_tokens": 1}),
    "/v1/responses": (ResponsesRequest, {"input": "hi", "max_output_tokens": 1}),
    "/v1/messages": (MessagesRequest, {"model": "m", "messages": MESSAGES, "max_tokens": 1}),
    "/v1/embeddings": (EmbeddingsRequest, {"input": "hi"}),
}
NO_NUMBERS = ("NaN", "Infinity", "-Infinity", "1e400", "-1e400", "true", "false", "[]", "{}")
NO_NUMBERS += ('"one"', '"NaN"', '"1e400"', '""')
TOO_LARGE = "9" * 400
"""No float is as large."""
NEGATIVE_IS_FINE = {
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "top_k",
    "truncate_prompt_tokens",
}
"""-1 means something there; -10**6 does not, but for a seed."""
ZERO_IS_FINE = {
    "weights_version",
    "temperature",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "top_k",
    "min_p",
    "top_n_sigma",
    "no_repeat_ngram_size",
    "dry_multiplier",
    "xtc_probability",
    "xtc_threshold",
    "min_tokens",
    "logprobs",
    "top_logprobs",
    "prompt_logprobs",
    "priority",
}


def kinds(annotation: Any) -> set[Any]:
    """The types an annotation allows; of lists and the like only that they are one."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return set().union(*map(kinds, arguments))
    return {origin or annotation}


def number_fields() -> Iterator[tuple[str, str]]:
    for path, (model, _) in ENDPOINTS.items():
        for name, field in model.model_fields.items():
            if kinds(field.annotation) & {int, float}:
                yield path, name


@pytest.fixture(scope="module")
def server(shared_small_server: Server) -> Server:
    shared_small_server.assert_sound()
    return shared_small_server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[httpx.Client]:
    with server.client(headers={"content-type": "application/json"}) as client:
        yield client


def test_there_are_fields_to_try() -> None:
    found = list(number_fields())
    assert len(found) > 50
    assert {path for path, _ in found} == set(ENDPOINTS)


@pytest.mark.few(20)
@pytest.mark.parametrize(("path", "name"), list(number_fields()))
def test_what_is_no_number_or_none_the_field_takes(
    server: Server, client: httpx.Client, path: str, name: str
) -> None:
    wrong = [*NO_NUMBERS]
    wrong += [] if name in NEGATIVE_IS_FINE else ["-1"]
    wrong += [] if name == "seed" else ["-1000000"]
    wrong += [] if name in ZERO_IS_FINE else ["0"]
    # A prompt is truncated to at most so many tokens: to nothing less, then.
    wrong += [] if name == "truncate_prompt_tokens" else [TOO_LARGE]
    for raw in wrong:
        fields = {key: json.dumps(value) for key, value in ENDPOINTS[path][1].items()} | {name: raw}
        body = ", ".join(f'"{key}": {value}' for key, value in fields.items())
        response = client.post(path, content=f"{{{body}}}")
        if path == "/v1/messages":  # errors as Anthropic's clients know them have no `param`
            assert response.status_code == 400, (raw, response.text)
            assert response.json()["request_id"] == response.headers["x-request-id"]
            assert response.json()["error"]["message"].startswith(name), (raw, response.text)
        else:
            error_of(response, 400, name)
    server.assert_sound()
