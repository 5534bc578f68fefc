"""Anthropic's messages: POST /v1/messages and /v1/messages/count_tokens"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from quire.server.api.anthropic_fields import CountTokensRequest, MessagesRequest
from quire.server.api.body import body_schema
from quire.server.api.endpoint import convert, endpoint, ignored_header, read_body
from quire.server.api.writer import TextEvent, Writer
from quire.server.calls.generation import FinishReason, GenerationEvent, Usage
from quire.server.errors import ApiError, error_body
from quire.server.http_responses import JsonResponse, named_event
from quire.server.service import get_service


class MessageWriter(Writer[MessagesRequest]):
    """There is one answer."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._blocks = ContentBlocks()
        self._has_begun = False
        self._is_clamped = self.call.prompts[0].is_clamped

    def text_chunk(self, index: int, text: str, is_reasoning: bool) -> bytes | None:
        return self._blocks.extend("thinking" if is_reasoning else "text", text)

    def chunks(self, event: GenerationEvent) -> Iterator[bytes]:
        if not self._has_begun:
            # Only now it is known how much of the prompt was cached.
            self._has_begun = True
            yield _event("message_start", message=self._message())
            yield _event("ping")
        yield from self._blocks.take(event)
        if event.finish_reason is not None:
            yield from self._blocks.close()
            ending = stop_reason(event.finish_reason, event.stop_reason, self._is_clamped)
            yield _event(
                "message_delta",
                delta=ending,
                usage=_usage(self.call.usage),
                **self._applied_edits(),
            )

    def finish(self) -> Iterator[bytes]:
        yield _event("message_stop")

    def error_event(self, path: str, error: ApiError, http_request_id: str) -> bytes:
        return named_event("error", error_body(path, error, http_request_id))

    def whole(self, events: list[GenerationEvent]) -> dict[str, Any]:
        for event in events:
            list(self._blocks.take(event))
        last = events[-1]
        assert last.finish_reason is not None
        ending = stop_reason(last.finish_reason, last.stop_reason, self._is_clamped)
        return {
            **self._message(),
            "content": self._blocks.whole(),
            **ending,
            **self._applied_edits(),
        }

    def _applied_edits(self) -> dict[str, Any]:
        """Edits that would change something are refused."""
        return (
            {}
            if self.body.context_management is None
            else {"context_management": {"applied_edits": []}}
        )

    def _message(self) -> dict[str, Any]:
        """A message that holds nothing yet."""
        return {
            "id": self.request_id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(self.call.usage),
        }


def _usage(usage: Usage) -> dict[str, Any]:
    """Anthropic counts cached tokens apart from the others."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def stop_reason(
    reason: FinishReason, why: str | int | None, is_clamped: bool = False
) -> dict[str, Any]:
    """Why an answer ended, in Anthropic's words, and the stop sequence if that was it.
    `is_clamped`: the context had less room than was asked for.
    """
    if reason == "length" and is_clamped:
        return {"stop_reason": "model_context_window_exceeded", "stop_sequence": None}
    if reason == "stop" and isinstance(why, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": why}
    names = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
    return {"stop_reason": names[reason], "stop_sequence": None}


def tool_input(arguments: str) -> dict[str, Any]:
    """A call's arguments as an object. What is none (cut off, or written badly) is passed on as
    text.
    """
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"invalid_json": arguments}


def _event(name: str, **fields: Any) -> bytes:
    return named_event(name, {"type": name, **fields})


class ContentBlocks:
    """A message is a row of blocks in the order in which they were written, of which the last is
    open.

    `take` and `close` give the events that tell of it; without a stream only `whole` counts.
    """

    def __init__(self) -> None:
        self._blocks: list[tuple[dict[str, Any], list[str]]] = []
        """Each as it began, with the pieces that came since."""
        self._kind: str | None = None
        self._text_event: TextEvent | None = None
        """How the open block goes on, if it is text or thinking."""

    def whole(self) -> list[dict[str, Any]]:
        """All blocks, complete."""
        content = []
        for block, pieces in self._blocks:
            text = "".join(pieces)
            kind = block["type"]
            content.append(
                {**block, "input": tool_input(text)}
                if kind == "tool_use"
                else {**block, kind: text}
            )
        return content

    def extend(self, kind: str, text: str) -> bytes | None:
        """The event that tells of text for the open block; None if that is of another kind."""
        if self._kind != kind:
            return None
        if self._text_event is None:
            place = len(self._blocks) - 1
            self._text_event = TextEvent(lambda text, _: _text_delta(place, kind, text))
        self._blocks[-1][1].append(text)
        return self._text_event.write(text)

    def take(self, event: GenerationEvent) -> Iterator[bytes]:
        if event.reasoning:
            yield from self._open("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            self._blocks[-1][1].append(event.reasoning)
            yield _text_delta(len(self._blocks) - 1, "thinking", event.reasoning)
        if event.content:
            yield from self._open("text", {"type": "text", "text": ""})
            self._blocks[-1][1].append(event.content)
            yield _text_delta(len(self._blocks) - 1, "text", event.content)
        for call in event.tool_calls:
            if call.name is not None:
                yield from self.close()
                block: dict[str, Any] = {
                    "type": "tool_use",
                    "id": call.id,
                    "name": call.name,
                    "input": {},
                }
                yield from self._open("tool_use", block)
            if call.arguments:
                yield self._delta(
                    {"type": "input_json_delta", "partial_json": call.arguments}, call.arguments
                )

    def close(self) -> Iterator[bytes]:
        if self._kind is not None:
            yield _event("content_block_stop", index=len(self._blocks) - 1)
            self._kind = self._text_event = None

    def _open(self, kind: str, block: dict[str, Any]) -> Iterator[bytes]:
        if self._kind == kind:
            return
        yield from self.close()
        self._kind = kind
        self._blocks.append((block, []))
        yield _event("content_block_start", index=len(self._blocks) - 1, content_block=block)

    def _delta(self, delta: dict[str, Any], text: str) -> bytes:
        self._blocks[-1][1].append(text)
        return _event("content_block_delta", index=len(self._blocks) - 1, delta=delta)


def _text_delta(place: int, kind: str, text: str) -> bytes:
    return _event("content_block_delta", index=place, delta={"type": f"{kind}_delta", kind: text})


router = endpoint(
    MessagesRequest, MessageWriter, "create_message", "An answer to a conversation.", "Anthropic"
)


@router.post(
    "/v1/messages/count_tokens", openapi_extra=body_schema(CountTokensRequest), tags=["Anthropic"]
)
async def count_tokens(request: Request) -> Response:
    """How many tokens a conversation has."""
    body = await read_body(request, CountTokensRequest)
    service = get_service(request)
    service.check_model(body.model)
    prompt, left_out = await convert(request, body.read_prompt)
    token_ids = await service.in_thread(service.encoder.encode_chat, prompt)
    ignored = ignored_header([*request.state.ignored, *left_out])
    return JsonResponse({"input_tokens": len(token_ids)}, headers=ignored)
