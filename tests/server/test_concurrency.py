"""Output through the server equals the offline API token for token, however many requests there are
at once.
"""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import httpx
import pytest

from quire import LLM, SamplingParams
from tests.long_runs import short_or_long
from tests.server.harness import Server

WORDS = [
    "the",
    "a",
    "sea",
    "sky",
    "red",
    "blue",
    "one",
    "two",
    "three",
    "king",
    "queen",
    "ran",
    "saw",
    "old",
    "new",
]


def mixed_requests(count: int) -> list[dict[str, Any]]:
    """Chats and texts, short and long, greedy and sampled, streamed and not, with everything that
    can end them.
    """
    chance = random.Random(0)
    requests = []
    for i in range(count):
        text = " ".join(chance.choices(WORDS, k=chance.choice([3, 10, 40, 120])))
        request: dict[str, Any] = {"max_tokens": chance.choice([1, 4, 9, 14]), "seed": i}
        request["temperature"] = chance.choice([0.0, 0.7, 1.0])
        if i % 2:
            request["messages"] = [{"role": "user", "content": text}]
        else:
            request["prompt"] = text
        if i % 3 == 0:
            request["stream"] = True
        extra: list[dict[str, Any]] = [
            {},
            {"n": 2},
            {"stop": ["the", "e"]},
            {"top_k": 20, "repetition_penalty": 1.3},
            {"min_tokens": 3, "stop_token_ids": [28, 30, 198]},
            {"guided_regex": "[a-z ]{4,20}"},
            {"presence_penalty": 1.0, "top_p": 0.8},
        ]
        requests.append(request | extra[i % len(extra)])
    return requests


def offline(llm: LLM, request: dict[str, Any]) -> list[list[int]]:
    fields = {
        name: value
        for name, value in request.items()
        if name not in ("messages", "prompt", "stream")
    }
    for name in ("stop", "stop_token_ids"):
        if name in fields:
            fields[name] = tuple(fields[name])
    if "guided_regex" in fields:
        fields["structured"] = {"regex": fields.pop("guided_regex")}
    params = SamplingParams(**{**llm.sampling_defaults, **fields})
    output = (
        llm.chat(request["messages"], params)
        if "messages" in request
        else llm.generate(request["prompt"], params)
    )
    return [list(completion.token_ids) for completion in output[0].completions]


async def online(client: httpx.AsyncClient, request: dict[str, Any]) -> list[list[int]]:
    path = "/v1/chat/completions" if "messages" in request else "/v1/completions"
    body = {**request, "return_token_ids": True}
    if not request.get("stream"):
        response = await client.post(path, json=body)
        assert response.status_code == 200, response.text
        return [choice["token_ids"] for choice in response.json()["choices"]]
    tokens: list[list[int]] = [[] for _ in range(request.get("n", 1))]
    async with client.stream("POST", path, json=body) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    tokens[choice["index"]] += choice.get("token_ids", [])
    return tokens


@pytest.mark.slow
@pytest.mark.soak
def test_many_mixed_requests_at_once(server: Server, llm: LLM) -> None:
    requests = mixed_requests(short_or_long(14, 64))  # each of the extras twice
    expected = [offline(llm, request) for request in requests]

    async def run() -> list[list[list[int]]]:
        limits = httpx.Limits(max_connections=100)
        async with httpx.AsyncClient(
            base_url=server.url, timeout=120, limits=limits, verify=False
        ) as client:
            return await asyncio.gather(*(online(client, request) for request in requests))

    for request, found, wanted in zip(requests, asyncio.run(run()), expected, strict=True):
        assert found == wanted, request
