"""POST /v1/chat/completions"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from quire.server.connection import (
    body_schema,
    cancel_on_disconnect,
    convert,
    name_request,
    new_id,
    read_body,
    response_headers,
)
from quire.server.json_response import JsonResponse
from quire.server.protocol.chat import ChatCompletionRequest, choice_body, delta_body
from quire.server.protocol.common import prompt_logprobs_body, usage_body, usage_so_far
from quire.server.running import Generation
from quire.server.service import get_service
from quire.server.sse import DONE, EventStream, data_event

router = APIRouter()


@router.post("/v1/chat/completions", openapi_extra=body_schema(ChatCompletionRequest), tags=["OpenAI"])
@cancel_on_disconnect
async def create_chat_completion(request: Request) -> Response:
    """An answer to a conversation."""
    body = await read_body(request, ChatCompletionRequest)
    service = get_service(request)
    model = service.check_model(body.model)
    request_id = name_request(request, body.request_id)
    generation = await service.start(await convert(request, body.to_generation, new_id("chatcmpl"), request_id))
    request.state.record = generation.record
    headers = response_headers(request, generation.ignored)
    base = {
        "id": generation.request.response_id,
        "object": "chat.completion.chunk" if body.stream else "chat.completion",
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": service.ready.fingerprint,
    }
    if body.service_tier is not None:
        base["service_tier"] = "default"
    if body.stream:
        return EventStream(_chunks(generation, body, base), generation, headers=headers)
    choices = await generation.collect()

    def respond() -> Response:
        answer: dict[str, Any] = {
            **base,
            "choices": [choice_body(choice, body) for choice in choices],
            "usage": usage_body(generation.usage),
        }
        if body.prompt_logprobs is not None:
            answer["prompt_logprobs"] = prompt_logprobs_body(generation.prompt_logprobs(0), body.prompt_logprobs)
        if body.return_token_ids:
            answer["prompt_token_ids"] = generation.prompts[0].token_ids
        return JsonResponse(answer, headers=headers)

    return await service.write(respond, generation)


async def _chunks(generation: Generation, body: ChatCompletionRequest, base: dict[str, Any]) -> AsyncIterator[bytes]:
    options = body.stream_options

    def chunk(choices: list[dict[str, Any]], **more: Any) -> bytes:
        return data_event({**base, "choices": choices, **more, **usage_so_far(options, usage_body(generation.usage))})

    for index in range(generation.request.params.n):
        first = {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        shown = {"prompt_token_ids": generation.prompts[0].token_ids} if body.return_token_ids and not index else {}
        yield chunk([first], **shown)
    async for event in generation:
        choice = delta_body(event, body)
        if choice is not None:
            yield chunk([choice])
    if options is not None and options.include_usage:
        yield data_event({**base, "choices": [], "usage": usage_body(generation.usage)})
    yield DONE
