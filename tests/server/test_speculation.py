"""Predicted outputs over HTTP: the same answers, and what came of the guesses."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.server.harness import Server

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Count from one to ten, in words."}]


def chat(server: Server, **fields: Any) -> dict[str, Any]:
    response: httpx.Response = server.post(
        CHAT, {"messages": MESSAGES, "max_tokens": 32, "temperature": 0, "logprobs": True, **fields}
    )
    assert response.status_code == 200, response.text
    assert "x-quire-ignored" not in response.headers
    body: dict[str, Any] = response.json()
    return body


def test_a_prediction_is_checked_and_changes_nothing(server: Server) -> None:
    plain = chat(server)
    details = plain["usage"]["completion_tokens_details"]
    assert (details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]) == (0, 0)
    text = plain["choices"][0]["message"]["content"]
    parts = [{"type": "text", "text": text[:10]}, {"type": "text", "text": text[10:]}]
    for content in (text, parts, "Something else altogether, " + text):
        guided = chat(server, prediction={"type": "content", "content": content})
        assert guided["choices"] == plain["choices"]
        details = guided["usage"]["completion_tokens_details"]
        assert details["accepted_prediction_tokens"] + details["rejected_prediction_tokens"] > 0
        if content is text:
            assert details["accepted_prediction_tokens"] > 0
    off = chat(server, prediction={"type": "content", "content": text}, speculation=False)
    assert off["choices"] == plain["choices"]
    assert off["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] == 0
    metrics = server.get("/metrics").text
    for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
        lines = [
            line
            for line in metrics.splitlines()
            if line.startswith(f"vllm:spec_decode_{name}_total")
        ]
        assert float(lines[0].rsplit(" ", 1)[1]) > 0, name
    assert 'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0"' in metrics


@pytest.mark.parametrize(
    "prediction", ["text", {"type": "text"}, {"type": "content"}, {"type": "content", "content": 3}]
)
def test_what_is_no_prediction_is_refused(server: Server, prediction: Any) -> None:
    error = server.post(CHAT, {"messages": MESSAGES, "prediction": prediction})
    assert error.status_code == 400
    assert error.json()["error"]["param"].startswith("prediction")
