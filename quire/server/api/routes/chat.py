"""POST /v1/chat/completions"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from quire.outputs import TokenLogprobs
from quire.server.api.protocol.chat import ChatCompletionRequest
from quire.server.api.protocol.common import function_call
from quire.server.api.routes.choices import (
    ChoicesWriter,
    logprob_body,
    prompt_logprobs_body,
    usage_body,
)
from quire.server.calls.generation import GenerationEvent, ToolCallDelta, Usage, whole_choices
from quire.server.lifecycle import endpoint


class ChatWriter(ChoicesWriter[ChatCompletionRequest]):
    """Answers as messages, or as deltas of them."""

    OBJECT: ClassVar[str] = "chat.completion"
    CHUNK_OBJECT: ClassVar[str] = "chat.completion.chunk"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.shows_reasoning = bool(self.body.include_reasoning)
        self._begun: set[int] = set()
        """Choices that something was said of."""
        self._contentless: set[int] = set()
        """Those of them that have no content, and no calls yet."""

    def text_choice(self, index: int, text: str, is_reasoning: bool) -> dict[str, Any]:
        delta = {"reasoning_content" if is_reasoning else "content": text}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def chunks(self, event: GenerationEvent) -> Iterator[bytes]:
        delta = self._message(event)
        if event.tool_calls:
            delta["tool_calls"] = [_call_delta(call) for call in event.tool_calls]
        shows_tokens = bool(self.body.return_token_ids and event.token_ids) or bool(event.logprobs)
        if not delta and event.finish_reason is None and not shows_tokens:
            return
        if event.index not in self._begun:
            yield self._first_chunk(event)
        if event.content or event.tool_calls:
            self._contentless.discard(event.index)
        elif event.finish_reason is not None and event.index in self._contentless:
            delta["content"] = ""  # as a whole answer has it
        choice = self._choice(
            event, "delta", delta, self._logprobs(event.logprobs) if event.logprobs else None
        )
        if event.finish_reason is None:
            del choice["stop_reason"]
        yield self.chunk_of(choice)

    def whole(self, events: list[GenerationEvent]) -> dict[str, Any]:
        choices = []
        for event in whole_choices(events):
            content = None if event.tool_calls else ""
            message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
            message |= self._message(event)
            if event.tool_calls:
                message["tool_calls"] = [
                    function_call(one.id, one.name, one.arguments) for one in event.tool_calls
                ]
            logprobs = self._logprobs(event.logprobs) if self.body.logprobs else None
            # vLLM's clients read token ids, asked for or not.
            choices.append({"token_ids": None, **self._choice(event, "message", message, logprobs)})
        found = None if self.body.prompt_logprobs is None else self.call.prompt_logprobs(0)
        prompt = {"prompt_logprobs": prompt_logprobs_body(found, self.body.prompt_logprobs or 0)}
        return self.whole_of(choices) | prompt | {"prompt_token_ids": None} | self._prompt_tokens()

    def outline(self, kind: str) -> dict[str, Any]:
        outline = super().outline(kind)
        return outline if self.body.service_tier is None else {**outline, "service_tier": "default"}

    def _first_chunk(self, event: GenerationEvent) -> bytes:
        """Says who speaks. An answer that begins with a call has no content, one without calls has
        at least an empty one; where neither is known yet, it has none if there may be calls.
        """
        is_text = bool(event.content or event.reasoning) or (
            event.finish_reason is not None and not event.tool_calls
        )
        plan = self.call.prompts[0].plan
        may_call = plan is not None and bool(plan.tools)
        delta = {
            "role": "assistant",
            "content": "" if is_text or not (event.tool_calls or may_call) else None,
        }
        first = {"index": event.index, "delta": delta, "logprobs": None, "finish_reason": None}
        if delta["content"] is None:
            self._contentless.add(event.index)
        more = {} if self._begun else self._prompt_tokens()
        self._begun.add(event.index)
        self.begun(event.index)
        if len(self._begun) > 1:
            return self.chunk_of(first, **more)
        usage = self.call.usage  # the first token comes with the next chunk
        return self.chunk_of(
            first, usage_body(Usage(usage.prompt_tokens, usage.cached_tokens)), **more
        )

    def _prompt_tokens(self) -> dict[str, Any]:
        return (
            {"prompt_token_ids": self.call.prompts[0].token_ids}
            if self.body.return_token_ids
            else {}
        )

    def _message(self, event: GenerationEvent) -> dict[str, Any]:
        """What a message and a delta say in the same way."""
        shown: dict[str, Any] = {"content": event.content} if event.content else {}
        if event.reasoning and self.body.include_reasoning:
            shown["reasoning_content"] = event.reasoning
        return shown

    def _choice(
        self,
        event: GenerationEvent,
        name: str,
        shown: dict[str, Any],
        logprobs: dict[str, Any] | None,
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


router = endpoint(
    ChatCompletionRequest,
    ChatWriter,
    "create_chat_completion",
    "An answer to a conversation.",
    "OpenAI",
)
