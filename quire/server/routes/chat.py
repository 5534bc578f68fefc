"""POST /v1/chat/completions"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from quire.outputs import TokenLogprobs
from quire.server.generation import GenerationEvent, ToolCallDelta, whole_choices
from quire.server.guard.connection import body_schema, cancel_on_disconnect
from quire.server.http_responses import DONE, data_event
from quire.server.lifecycle import Writer, answer
from quire.server.protocol.chat import ChatCompletionRequest
from quire.server.protocol.common import function_call, logprob_body, prompt_logprobs_body, usage_body, usage_so_far

router = APIRouter()


@router.post("/v1/chat/completions", openapi_extra=body_schema(ChatCompletionRequest), tags=["OpenAI"])
@cancel_on_disconnect
async def create_chat_completion(request: Request) -> Response:
    """An answer to a conversation."""
    return await answer(request, ChatCompletionRequest, ChatWriter)


class ChatWriter(Writer[ChatCompletionRequest]):
    def begin(self) -> Iterator[bytes]:
        for index in range(self.call.request.params.n):
            delta = {"role": "assistant", "content": ""}
            first = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            yield self._chunk(first, **({} if index else self._prompt_tokens()))

    def chunk(self, event: GenerationEvent) -> Iterator[bytes]:
        delta = self._message(event)
        if event.tool_calls:
            delta["tool_calls"] = [_call_delta(call) for call in event.tool_calls]
        shows_tokens = bool(self.body.return_token_ids and event.token_ids) or bool(event.logprobs)
        if not delta and event.finish_reason is None and not shows_tokens:
            return
        choice = self._choice(event, "delta", delta, self._logprobs(event.logprobs) if event.logprobs else None)
        if event.finish_reason is None:
            del choice["stop_reason"]
        yield self._chunk(choice)

    def finish(self) -> Iterator[bytes]:
        options = self.body.stream_options
        if options is not None and options.include_usage:
            base = self._base("chat.completion.chunk")
            yield data_event({**base, "choices": [], "usage": usage_body(self.call.usage)})
        yield DONE

    def whole(self, events: list[GenerationEvent]) -> dict[str, Any]:
        choices = []
        for event in whole_choices(events):
            content = None if event.tool_calls else ""
            message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
            message |= self._message(event)
            if event.tool_calls:
                message["tool_calls"] = [function_call(one.id, one.name, one.arguments) for one in event.tool_calls]
            logprobs = self._logprobs(event.logprobs) if self.body.logprobs else None
            choices.append(self._choice(event, "message", message, logprobs))
        whole = {**self._base("chat.completion"), "choices": choices, "usage": usage_body(self.call.usage)}
        if self.body.prompt_logprobs is not None:
            found = self.call.prompt_logprobs(0)
            whole["prompt_logprobs"] = prompt_logprobs_body(found, self.body.prompt_logprobs)
        return whole | self._prompt_tokens()

    def _base(self, kind: str) -> dict[str, Any]:
        base: dict[str, Any] = {
            "id": self.response_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }
        return base if self.body.service_tier is None else {**base, "service_tier": "default"}

    def _chunk(self, choice: dict[str, Any], **more: Any) -> bytes:
        usage = usage_so_far(self.body.stream_options, usage_body(self.call.usage))
        return data_event({**self._base("chat.completion.chunk"), "choices": [choice], **more, **usage})

    def _prompt_tokens(self) -> dict[str, Any]:
        return {"prompt_token_ids": self.call.prompts[0].token_ids} if self.body.return_token_ids else {}

    def _message(self, event: GenerationEvent) -> dict[str, Any]:
        """What a message and a delta say in the same way."""
        shown: dict[str, Any] = {"content": event.content} if event.content else {}
        if event.reasoning and self.body.include_reasoning:
            shown["reasoning_content"] = event.reasoning
        return shown

    def _choice(
        self, event: GenerationEvent, name: str, shown: dict[str, Any], logprobs: dict[str, Any] | None
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": event.index,
            name: shown,
            "logprobs": logprobs,
            "finish_reason": event.finish_reason,
            "stop_reason": event.stop_reason,
        }
        if self.body.return_token_ids:
            choice["token_ids"] = event.token_ids
        return choice

    def _logprobs(self, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        as_ids = bool(self.body.return_tokens_as_token_ids)
        return {"content": [logprob_body(entry, as_ids) for entry in entries], "refusal": None}


def _call_delta(call: ToolCallDelta) -> dict[str, Any]:
    if call.name is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    return {"index": call.index, **function_call(call.id, call.name, call.arguments)}
