"""POST /v1/completions"""

from __future__ import annotations

import asyncio
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
from quire.server.generation import Choice, GenerationEvent
from quire.server.json_response import JsonResponse
from quire.server.protocol.common import prompt_logprobs_body, usage_body, usage_so_far
from quire.server.protocol.completions import CompletionRequest, LogprobsWriter
from quire.server.running import Generation
from quire.server.service import get_service
from quire.server.sse import DONE, EventStream, data_event

router = APIRouter()


@router.post("/v1/completions", openapi_extra=body_schema(CompletionRequest), tags=["OpenAI"])
@cancel_on_disconnect
async def create_completion(request: Request) -> Response:
    """Continues one or several texts."""
    body = await read_body(request, CompletionRequest)
    service = get_service(request)
    model = service.check_model(body.model)
    request_id = name_request(request, body.request_id)
    generation = await service.start(await convert(request, body.to_generation, new_id("cmpl"), request_id))
    request.state.record = generation.record
    headers = response_headers(request, generation.ignored)
    base = {
        "id": generation.request.response_id,
        "object": "text_completion",
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": service.ready.fingerprint,
    }
    writers = _Choices(generation, body)
    if body.stream:
        return EventStream(_chunks(generation, body, base, writers), generation, headers=headers)
    choices = await generation.collect()

    def respond() -> Response:
        bodies = [writers.whole(choice) for choice in choices]
        return JsonResponse({**base, "choices": bodies, "usage": _usage(generation, body)}, headers=headers)

    return await service.write(respond, generation)


async def _chunks(
    generation: Generation, body: CompletionRequest, base: dict[str, Any], writers: _Choices
) -> AsyncIterator[bytes]:
    options = body.stream_options
    async for event in generation:
        if not event.text and event.finish_reason is None and not event.logprobs and not body.return_token_ids:
            continue
        if writers.shows_prompt_logprobs(event):
            choice = await asyncio.to_thread(writers.body, event)
        else:
            choice = writers.body(event)
        usage = usage_so_far(options, _usage(generation, body))
        yield data_event({**base, "choices": [choice], **usage})
    if options is not None and options.include_usage:
        yield data_event({**base, "choices": [], "usage": _usage(generation, body)})
    yield DONE


class _Choices:
    """Makes bodies of choices, whole or in pieces: the first of each choice shows the prompt, if it is echoed."""

    def __init__(self, generation: Generation, body: CompletionRequest) -> None:
        self._generation = generation
        self._body = body
        self._writers: dict[int, LogprobsWriter] = {}

    def whole(self, choice: Choice) -> dict[str, Any]:
        """The body of a choice that has come to its end."""
        return self.body(
            GenerationEvent(
                choice.index,
                text=choice.text,
                token_ids=choice.token_ids,
                logprobs=choice.logprobs or (),
                finish_reason=choice.finish_reason,
                stop_reason=choice.stop_reason,
            )
        )

    def shows_prompt_logprobs(self, event: GenerationEvent) -> bool:
        """Whether the event's body takes long to write: it holds as many logprobs as the prompt has tokens."""
        return bool(self._body.echo) and self._body.logprobs is not None and event.index not in self._writers

    def body(self, event: GenerationEvent) -> dict[str, Any]:
        request = self._body
        number = event.index // self._generation.request.params.n
        is_first = event.index not in self._writers
        if is_first:
            as_ids = bool(request.return_tokens_as_token_ids)
            self._writers[event.index] = LogprobsWriter(request.logprobs or 0, as_ids)
        writer = self._writers[event.index]
        prompt = self._generation.prompts[number]
        text, token_ids, entries = event.text, event.token_ids, event.logprobs
        if request.no_answer:
            text, token_ids, entries = "", (), ()
        logprobs = None
        if is_first and request.echo:
            tokenizer = self._generation.tokenizer
            shown = prompt.text if prompt.text is not None else tokenizer.decode(prompt.token_ids)
            text = shown + text
            if request.logprobs is not None:
                first = tokenizer.decode(prompt.token_ids[:1], skip_special_tokens=False)
                before = self._generation.prompt_logprobs(number) or ()
                logprobs = writer.write([*before, *entries], [first])
        elif request.logprobs is not None:
            logprobs = writer.write(entries)
        choice: dict[str, Any] = {
            "index": event.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": "length" if request.no_answer and event.finish_reason else event.finish_reason,
        }
        if event.finish_reason is not None:
            choice["stop_reason"] = None if request.no_answer else event.stop_reason
        if request.prompt_logprobs is not None:
            entries_before = self._generation.prompt_logprobs(number)
            choice["prompt_logprobs"] = prompt_logprobs_body(entries_before, request.prompt_logprobs)
        if request.return_token_ids:
            choice["token_ids"] = token_ids
            if is_first:
                choice["prompt_token_ids"] = prompt.token_ids
        return choice


def _usage(generation: Generation, body: CompletionRequest) -> dict[str, Any]:
    usage = usage_body(generation.usage)
    if body.no_answer:
        usage |= {"completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
    return usage
