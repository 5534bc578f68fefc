"""OpenAI's chat completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from quire.errors import InvalidRequestError
from quire.frontend.tool_calls.tools import MAX_TOOLS
from quire.server.api.protocol import common, sampling
from quire.server.api.protocol.completions import MAX_PROMPTS
from quire.server.api.protocol.sampling import FromTable
from quire.server.api.protocol.tools import foreign_function, offered
from quire.server.calls.generation import ChatPrompt, GenerationRequest, NamedTool, ToolChoice


class FunctionName(common.Body):
    name: str


class NamedToolChoice(common.Body):
    type: Literal["function"]
    function: FunctionName


class PredictedText(common.Body):
    type: Literal["text"]
    text: str


class Prediction(common.Body):
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

    messages: list[dict[str, Any]] = Field(min_length=1, max_length=common.MAX_MESSAGES)
    modalities: list[Literal["text"]] | None = Field(None, min_length=1, max_length=1)
    """Text is all the model writes."""
    max_tokens: Annotated[int | None, FromTable("max_tokens")] = None
    max_completion_tokens: Annotated[int | None, FromTable("max_tokens")] = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, FromTable("logprobs", high=common.MAX_TOP_LOGPROBS)] = None
    tools: list[dict[str, Any]] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Literal["auto", "none", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    prediction: Prediction | None = None
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: str | None = Field(None, max_length=1024)
    store: bool | None = None
    """Only /v1/responses stores what it answers; the answer itself is the same."""
    metadata: common.Metadata | None = None

    documents: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    include_reasoning: bool = True
    """False leaves the reasoning out of the response."""

    def conversations(self) -> list[list[dict[str, Any]]]:
        return [self.messages]

    def to_generation(self, response_id: str, request_id: str) -> GenerationRequest:
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
        kwargs = dict(self.chat_template_kwargs or {})
        if self.reasoning_effort is not None:
            kwargs.setdefault("reasoning_effort", self.reasoning_effort)
            fields["chat_template_kwargs.reasoning_effort"] = "reasoning_effort"
        begins, continues = self.add_generation_prompt, self.continue_final_message
        tools, ignored = offered(self.tools, foreign_function, self.tool_choice in ("auto", "none"))
        if self.store:
            ignored += ("store",)
        prompts = tuple(
            ChatPrompt(messages, tools or None, self.documents, kwargs or None, begins, continues)
            for messages in self.conversations()
        )
        return GenerationRequest(
            response_id=response_id,
            request_id=request_id,
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
            notes=common.present(
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


class BatchedChatRequest(ChatCompletionRequest):
    """POST /v1/chat/completions/batch: vLLM's way to ask for answers to several conversations at
    once.
    """

    ENDPOINT: ClassVar[str] = "/v1/chat/completions/batch"
    messages: list[
        Annotated[list[dict[str, Any]], Field(min_length=1, max_length=common.MAX_MESSAGES)]
    ] = Field(  # type: ignore[assignment]
        min_length=1, max_length=MAX_PROMPTS
    )
    """Conversations."""

    def conversations(self) -> list[list[dict[str, Any]]]:
        return self.messages

    def to_generation(self, response_id: str, request_id: str) -> GenerationRequest:
        for field, value in (("stream", self.stream), ("tools", self.tools)):
            if value:
                raise InvalidRequestError(
                    field, "is not supported for batches: use /v1/chat/completions"
                )
        return super().to_generation(response_id, request_id)
