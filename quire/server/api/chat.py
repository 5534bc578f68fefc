"""OpenAI's chat completions: POST /v1/chat/completions"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from quire.errors import InvalidRequestError
from quire.frontend.tool_calls.tools import MAX_TOOLS
from quire.outputs import TokenLogprobs
from quire.server.api import sampling
from quire.server.api.body import (
    MAX_MESSAGES,
    MAX_TOP_LOGPROBS,
    Body,
    Metadata,
    foreign_function,
    function_call,
    offered,
    present,
)
from quire.server.api.endpoint import endpoint
from quire.server.api.writer import (
    ChoicesWriter,
    logprob_body,
    prompt_logprobs_body,
    usage_body,
)
from quire.server.calls.generation import (
    ChatPrompt,
    GenerationEvent,
    GenerationRequest,
    NamedTool,
    ToolCallDelta,
    ToolChoice,
    Usage,
    whole_choices,
)


class FunctionName(Body):
    name: str


class NamedToolChoice(Body):
    type: Literal["function"]
    function: FunctionName


class PredictedText(Body):
    type: Literal["text"]
    text: str


class Prediction(Body):
    """What the client thinks the answer will be, or be like."""

    type: Literal["content"]
    content: str | list[PredictedText]

    def joined(self) -> str:
        return (
            self.content
            if isinstance(self.content, str)
            else "".join(part.text for part in self.content)
        )


class ChatCompletionRequest(sampling.SamplingFields):
    """POST /v1/chat/completions"""

    ENDPOINT: ClassVar[str] = "/v1/chat/completions"
    ID_PREFIX: ClassVar[str] = "chatcmpl-"
    UNSUPPORTED: ClassVar[Mapping[str, str]] = {
        **sampling.UNSUPPORTED,
        "audio": "the model writes text only",
        "functions": "use tools",
        "function_call": "use tool_choice",
        "web_search_options": "there is no web search",
        "verbosity": "say in a message how long the answer should be",
        "echo": "use the completions API",
        "best_of": "use the completions API",
        "suffix": "the model continues texts, it does not fill gaps",
        "add_special_tokens": "the chat template writes those that the model wants",
    }

    messages: list[dict[str, Any]] = Field(min_length=1, max_length=MAX_MESSAGES)
    modalities: list[Literal["text"]] | None = Field(None, min_length=1, max_length=1)
    """Text is all the model writes."""
    max_tokens: Annotated[int | None, sampling.FromTable("max_tokens")] = None
    max_completion_tokens: Annotated[int | None, sampling.FromTable("max_tokens")] = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, sampling.FromTable("logprobs", high=MAX_TOP_LOGPROBS)] = (
        None
    )
    tools: list[dict[str, Any]] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Literal["auto", "none", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    prediction: Prediction | None = None
    service_tier: sampling.ServiceTier | None = None
    safety_identifier: str | None = Field(None, max_length=1024)
    store: bool | None = None
    """Only /v1/responses stores what it answers; the answer itself is the same."""
    metadata: Metadata | None = None

    documents: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    include_reasoning: bool = True
    """False leaves the reasoning out of the response."""

    def conversations(self) -> list[list[dict[str, Any]]]:
        return [self.messages]

    def to_generation(self) -> GenerationRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequestError("top_logprobs", "needs logprobs to be true")
        self.check_stream()
        structured, fields = self.structured()
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        predicted = (self.prediction.joined() if self.prediction is not None else None) or None
        params = self.sampling_params(
            self.stop,
            max_tokens=self._max_tokens(),
            structured=structured,
            prediction=predicted,
            **self.logprob_params(logprobs),
        )
        if self.max_completion_tokens is not None:
            fields["max_tokens"] = "max_completion_tokens"
        fields |= sampling.tier_field(self)
        kwargs = dict(self.chat_template_kwargs or {})
        if self.reasoning_effort is not None:
            kwargs.setdefault("reasoning_effort", self.reasoning_effort)
            fields["chat_template_kwargs.reasoning_effort"] = "reasoning_effort"
        begins = self.add_generation_prompt
        continues = self.continue_final_message
        tools, ignored = offered(self.tools, foreign_function, self.tool_choice in ("auto", "none"))
        if self.store:
            ignored += ("store",)
        prompts = tuple(
            ChatPrompt(messages, tools or None, self.documents, kwargs or None, begins, continues)
            for messages in self.conversations()
        )
        return GenerationRequest(
            prompts=prompts,
            params=params,
            endpoint=self.ENDPOINT,
            stream=bool(self.stream),
            split=True,
            tool_choice=self._tool_choice(),
            parallel_tool_calls=self.parallel_tool_calls is not False,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            truncation_side=self.truncation_side or "left",
            fields=fields,
            ignored=ignored,
            notes=present(
                user=self.user, safety_identifier=self.safety_identifier, metadata=self.metadata
            ),
        )

    def _max_tokens(self) -> int | None:
        if (
            None not in (self.max_tokens, self.max_completion_tokens)
            and self.max_tokens != self.max_completion_tokens
        ):
            raise InvalidRequestError(
                "max_completion_tokens", "and max_tokens mean the same and differ: send one"
            )
        return (
            self.max_completion_tokens
            if self.max_completion_tokens is not None
            else self.max_tokens
        )

    def _tool_choice(self) -> ToolChoice:
        if isinstance(self.tool_choice, NamedToolChoice):
            return NamedTool(self.tool_choice.function.name)
        if self.tool_choice is not None and not self.tools and self.tool_choice != "none":
            raise InvalidRequestError("tool_choice", "needs tools")
        return self.tool_choice or "auto"


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
        delta = _reasoning(text) if is_reasoning else {"content": text}
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
            message: dict[str, Any] = {
                "role": "assistant",
                "content": content,
                "refusal": None,
                "reasoning": None,
            }
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
        tier = self.body.service_tier
        return outline if tier is None else {**outline, "service_tier": sampling.tier_of(tier)}

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
            shown |= _reasoning(event.reasoning)
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


def _reasoning(text: str) -> dict[str, Any]:
    """vLLM calls it `reasoning` now; clients of before, and of others, look for the other name."""
    return {"reasoning": text, "reasoning_content": text}


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
