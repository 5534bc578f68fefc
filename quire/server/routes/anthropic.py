"""POST /v1/messages and /v1/messages/count_tokens, as Anthropic's clients speak them."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Iterator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from quire.errors import InvalidRequestError
from quire.server.connection import body_schema, cancel_on_disconnect, convert, read_body, response_headers
from quire.server.errors import ApiError, error_body
from quire.server.generation import GenerationEvent, ToolCallDelta
from quire.server.json_response import JsonResponse
from quire.server.protocol.anthropic import (
    FIELDS,
    CountTokensRequest,
    MessagesRequest,
    message_body,
    message_start,
    stop_reason,
    usage_body,
)
from quire.server.running import Generation
from quire.server.service import get_service, renamed
from quire.server.sse import EventStream, named_event

router = APIRouter()


@router.post("/v1/messages", openapi_extra=body_schema(MessagesRequest), tags=["Anthropic"])
@cancel_on_disconnect
async def create_message(request: Request) -> Response:
    """An answer to a conversation."""
    body = await read_body(request, MessagesRequest)
    service = get_service(request)
    model = service.check_model(body.model)
    try:
        wanted = await convert(request, body.to_generation, f"msg_{secrets.token_hex(12)}", request.state.request_id)
    except InvalidRequestError as error:
        raise renamed(error, FIELDS) from None
    generation = await service.start(wanted)
    request.state.record = generation.record
    headers = response_headers(request, generation.ignored)
    if body.stream:
        events = _events(generation, model)
        return EventStream(events, generation, headers=headers, on_error=_error_event)
    (choice,) = await generation.collect()
    return JsonResponse(message_body(wanted.response_id, model, choice, generation.usage), headers=headers)


@router.post("/v1/messages/count_tokens", openapi_extra=body_schema(CountTokensRequest), tags=["Anthropic"])
async def count_tokens(request: Request) -> Response:
    """How many tokens a conversation has."""
    body = await read_body(request, CountTokensRequest)
    service = get_service(request)
    service.check_model(body.model)
    token_ids = await service.in_thread(service.encoder.encode_chat, await convert(request, body.prompt))
    return JsonResponse({"input_tokens": len(token_ids)}, headers=response_headers(request))


def _error_event(path: str, error: ApiError, request_id: str) -> bytes:
    return named_event("error", error_body(path, error, request_id))


async def _events(generation: Generation, model: str) -> AsyncIterator[bytes]:
    blocks = _Blocks()
    started = False
    async for event in generation:
        if not started:
            # Only now it is known how much of the prompt was cached.
            started = True
            start = message_start(generation.request.response_id, model, generation.usage)
            yield _event("message_start", message=start)
            yield _event("ping")
        for out in blocks.take(event):
            yield out
        if event.finish_reason is not None:
            for out in blocks.close():
                yield out
            reason, sequence = stop_reason(event.finish_reason, event.stop_reason)
            delta = {"stop_reason": reason, "stop_sequence": sequence}
            yield _event("message_delta", delta=delta, usage=usage_body(generation.usage))
    yield _event("message_stop")


def _event(name: str, **fields: Any) -> bytes:
    return named_event(name, {"type": name, **fields})


class _Blocks:
    """A message is a row of blocks, of which the last is open."""

    def __init__(self) -> None:
        self._index = -1
        self._kind: str | None = None

    def take(self, event: GenerationEvent) -> Iterator[bytes]:
        if event.reasoning:
            yield from self._open("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            yield self._delta({"type": "thinking_delta", "thinking": event.reasoning})
        if event.content:
            yield from self._open("text", {"type": "text", "text": ""})
            yield self._delta({"type": "text_delta", "text": event.content})
        for call in event.tool_calls:
            yield from self._take_call(call)

    def close(self) -> Iterator[bytes]:
        if self._kind is not None:
            yield _event("content_block_stop", index=self._index)
            self._kind = None

    def _take_call(self, call: ToolCallDelta) -> Iterator[bytes]:
        if call.name is not None:
            yield from self.close()
            block: dict[str, Any] = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
            yield from self._open("tool_use", block)
        if call.arguments:
            yield self._delta({"type": "input_json_delta", "partial_json": call.arguments})

    def _open(self, kind: str, block: dict[str, Any]) -> Iterator[bytes]:
        if self._kind == kind:
            return
        yield from self.close()
        self._kind = kind
        self._index += 1
        yield _event("content_block_start", index=self._index, content_block=block)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)
