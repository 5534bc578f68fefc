"""POST /v1/responses: text and tools. What was answered is stored (`stored.py`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PrivateAttr

from quire.errors import InvalidRequestError
from quire.sampling_params import StructuredOutput
from quire.server.api import sampling, structure
from quire.server.api.body import (
    LIST,
    MAX_MESSAGES,
    MAX_TOP_LOGPROBS,
    TEXT,
    TEXT_OR_LIST,
    ApiRequest,
    Body,
    Metadata,
    by_type,
    function_tool,
    kind,
    offered,
    present,
)
from quire.server.api.endpoint import endpoint
from quire.server.api.response_items import (
    Conversation,
    Event,
    Item,
    ItemReference,
    OutputItems,
    status_of,
)
from quire.server.api.sampling import FromTable
from quire.server.api.writer import TextEvent, Writer
from quire.server.calls.generation import (
    ChatPrompt,
    FinishReason,
    GenerationEvent,
    GenerationRequest,
    NamedTool,
    ToolChoice,
    Usage,
)
from quire.server.errors import CANCELLED, ApiError, error_body
from quire.server.http_responses import named_event
from quire.server.stored.store import OwnResponses

LOGPROBS = "message.output_text.logprobs"
ABSENT = (
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "message.input_image.image_url",
)
"""What OpenAI can include of things that no response here has. Reasoning is returned as text."""
TOOL_FIELDS = {"name", "description", "parameters", "strict"}
"""Of a tool, those that the model is shown and the response repeats."""


class FunctionTool(Body):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamespaceTool(Body):
    """Functions under a common name: the model calls `namespace.function`."""

    type: Literal["namespace"]
    name: str
    description: str | None = None
    tools: list[Annotated[FunctionTool | OtherTool, Field(union_mode="left_to_right")]]


class OtherTool(Body):
    """One that the server would have to run, or whose form only OpenAI's models know."""

    type: str
    name: str | None = None


Tool = Annotated[
    Annotated[FunctionTool, kind("function")]
    | Annotated[NamespaceTool, kind("namespace")]
    | Annotated[OtherTool, kind("other")],
    by_type("function", "namespace", other="other"),
]


class FunctionChoice(Body):
    type: Literal["function"]
    name: str


class TextFormat(structure.JsonSchemaFormat):
    type: Literal["text", "json_object", "json_schema"] = "text"


class TextConfig(Body):
    format: TextFormat | None = None


class Reasoning(Body):
    """The reasoning itself is returned: a wish for a summary is among the fields that are ignored."""

    effort: str | None = Field(None, max_length=32)


class ResponsesStreamOptions(Body):
    include_obfuscation: Literal[False] | None = None


class ResponsesRequest(sampling.TokenChoice, ApiRequest):
    """POST /v1/responses"""

    ENDPOINT: ClassVar[str] = "/v1/responses"
    ID_PREFIX: ClassVar[str] = "resp_"
    FIELDS: ClassVar[Mapping[str, str]] = {
        "max_tokens": "max_output_tokens",
        "chat_template_kwargs.reasoning_effort": "reasoning.effort",
        "messages": "input",
        "prompt": "input",
    }
    UNSUPPORTED: ClassVar[Mapping[str, str]] = {
        **sampling.UNSUPPORTED,
        "background": "the answer comes with the response",
        "conversation": "go on with previous_response_id, or send the whole conversation as input",
        "prompt": "there are no stored prompts: send the text as input",
        "max_tool_calls": "no tools run here: calls are returned to you",
        "enable_response_messages": "what the template made of the input is not returned: see /tokenize",
        "previous_input_messages": "send the whole conversation as input",
    }

    input: Annotated[
        Annotated[str, TEXT] | Annotated[list[Item], Field(max_length=MAX_MESSAGES), LIST],
        TEXT_OR_LIST,
    ]
    instructions: str | None = None
    previous_response_id: str | None = Field(None, max_length=128)
    max_output_tokens: Annotated[int | None, FromTable("max_tokens")] = None
    n: Literal[1] | None = None
    temperature: Annotated[float | None, FromTable("temperature", high=2)] = None
    top_p: Annotated[float | None, FromTable("top_p")] = None
    stop: str | list[str] | None = None
    top_logprobs: Annotated[int | None, FromTable("logprobs", high=MAX_TOP_LOGPROBS)] = None
    include: list[str] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["auto", "none", "required"] | FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    store: bool | None = None
    """False: the response can't be asked for again, nor gone on with."""
    truncation: Literal["disabled", "auto"] | None = None
    metadata: Metadata | None = None
    service_tier: sampling.ServiceTier | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    include_reasoning: Literal[True] | None = None
    """An item of its own, which a client may leave out by itself."""
    user: str | None = Field(None, max_length=1024)
    safety_identifier: str | None = Field(None, max_length=1024)

    _conversation: Conversation | None = PrivateAttr(None)
    _cant_store: bool = PrivateAttr(False)
    _to_store: tuple[bytes, list[str]] | None = PrivateAttr(None)

    @property
    def wants_logprobs(self) -> bool:
        """OpenAI's clients ask for them by `include`, LiteLLM's bridge by their number alone."""
        return bool(self.top_logprobs) or (self.include is not None and LOGPROBS in self.include)

    @property
    def recalls(self) -> bool:
        if self.previous_response_id is not None:
            return True
        return not isinstance(self.input, str) and any(
            isinstance(item, ItemReference) for item in self.input
        )

    @property
    def to_store(self) -> tuple[bytes, list[str]] | None:
        """What the call adds to the conversation, as JSON, and the ids of these items; None if
        nothing is stored.
        """
        return self._to_store

    def recall(self, stored: OwnResponses) -> None:
        if not (self.input.strip() if isinstance(self.input, str) else self.input):
            raise InvalidRequestError("input", "is empty")
        self._conversation = Conversation.recall(self.input, self.previous_response_id, stored)
        self._cant_store = bool(self.store) and not stored.store.is_on
        if self.store is not False and stored.store.is_on:
            self._to_store = self._conversation.describe_added()

    def to_generation(self) -> GenerationRequest:
        ignored = self._unmet_includes() + (("store",) if self._cant_store else ())
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options", "needs stream to be true")
        structured, names = self.structured(self._text_format())
        params = self.sampling_params(
            self.stop,
            max_tokens=self.max_output_tokens,
            logprobs=(self.top_logprobs or 0) if self.wants_logprobs else None,
            structured=structured,
        )
        effort = self.reasoning.effort if self.reasoning is not None else None
        kwargs = dict(self.chat_template_kwargs or {})
        if effort is not None:
            kwargs.setdefault("reasoning_effort", effort)
        tools, dropped = offered(self.tools, _foreign, self.tool_choice in ("auto", "none"))
        functions = [function for tool in tools for function in _functions(tool)]
        assert self._conversation is not None, "recall comes first"
        messages = self._conversation.messages(self.instructions)
        return GenerationRequest(
            prompts=(ChatPrompt(messages, functions or None, template_kwargs=kwargs or None),),
            params=params,
            endpoint=self.ENDPOINT,
            stream=bool(self.stream),
            split=True,
            tool_choice=self._tool_choice(),
            parallel_tool_calls=self.parallel_tool_calls is not False,
            truncate_prompt_tokens=-1 if self.truncation == "auto" else None,
            fields={**self.FIELDS, **names, **sampling.tier_field(self)},
            ignored=(*ignored, *dropped),
            notes=present(
                user=self.user, safety_identifier=self.safety_identifier, metadata=self.metadata
            ),
        )

    def namespaces(self) -> dict[str, tuple[str, str]]:
        """By the names that the model calls them: the namespace and the name of functions in one."""
        return {
            f"{tool.name}.{function.name}": (tool.name, function.name)
            for tool in self.tools or ()
            if isinstance(tool, NamespaceTool)
            for function in tool.tools
            if isinstance(function, FunctionTool)
        }

    def _unmet_includes(self) -> tuple[str, ...]:
        for index, name in enumerate(self.include or ()):
            if name != LOGPROBS and name not in ABSENT:
                known = ", ".join((LOGPROBS, *ABSENT))
                raise InvalidRequestError(
                    f"include[{index}]", f"nothing of this name can be included; there is: {known}"
                )
        return tuple(f"include.{name}" for name in self.include or () if name != LOGPROBS)

    def _text_format(self) -> dict[str, tuple[StructuredOutput, str]]:
        wanted = self.text.format if self.text is not None else None
        if wanted is None:
            return {}
        field = "text.format.schema"
        schema = wanted.schema_ if wanted.type == "json_schema" else None
        form = structure.json_output(wanted.type, schema, field, wanted.strict)
        return {} if form is None else {"text.format": (form, field)}

    def _tool_choice(self) -> ToolChoice:
        if isinstance(self.tool_choice, FunctionChoice):
            return NamedTool(self.tool_choice.name)
        if self.tool_choice == "required" and not self.tools:
            raise InvalidRequestError("tool_choice", "needs tools")
        return self.tool_choice or "auto"


def _foreign(tool: FunctionTool | NamespaceTool | OtherTool) -> tuple[str, str | None] | None:
    if isinstance(tool, NamespaceTool):
        tool = next((one for one in tool.tools if isinstance(one, OtherTool)), tool)
    return (tool.type, tool.name) if isinstance(tool, OtherTool) else None


def _functions(tool: FunctionTool | NamespaceTool | OtherTool) -> list[dict[str, Any]]:
    """In the form that chat templates take."""
    if isinstance(tool, FunctionTool):
        return [function_tool(**tool.model_dump(include=TOOL_FIELDS))]
    if not isinstance(tool, NamespaceTool):
        return []
    inside = [one for one in tool.tools if isinstance(one, FunctionTool)]
    return [
        function_tool(**{**one.model_dump(include=TOOL_FIELDS), "name": f"{tool.name}.{one.name}"})
        for one in inside
    ]


class ResponseWriter(Writer[ResponsesRequest]):
    """There is one answer. Every event of a stream has its number."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._items = OutputItems(self.body.wants_logprobs, self.body.namespaces())
        self._num_events = 0
        self._text_item = 0
        self._text_event: TextEvent | None = None
        """How the message goes on that is the item of this number, counted from 1."""
        self._is_over = False
        self._stores_elsewhere = self.body.to_store is not None and self.stored.store.is_remote
        self.is_long = self.is_long or self._stores_elsewhere
        self.may_take_long = self._stores_elsewhere
        self._error: dict[str, Any] | None = None

    def begin(self) -> Iterator[bytes]:
        for name in ("response.created", "response.in_progress"):
            yield self._event({"type": name, "response": self._response("in_progress")})

    def is_long_chunk(self, event: GenerationEvent) -> bool:
        """It has to wait until the response is stored, and its client must not hear of the end
        before.
        """
        return event.finish_reason is not None and self._stores_elsewhere

    def text_chunk(self, index: int, text: str, is_reasoning: bool) -> bytes | None:
        if not self._items.takes_text("reasoning" if is_reasoning else "message"):
            return None
        if self._text_item != len(self._items.items):
            self._text_item = len(self._items.items)
            self._text_event = TextEvent(
                lambda text, number: self._encode(self._items.text_delta(text), number)
            )
        assert self._text_event is not None
        self._items.add_text(text)
        self._num_events += 1
        return self._text_event.write(text, self._num_events - 1)

    def chunks(self, event: GenerationEvent) -> Iterator[bytes]:
        for out in self._items.take(event):
            yield self._event(out)
        if event.finish_reason is not None:
            for out in self._items.finish(event.finish_reason):
                yield self._event(out)
            status = status_of(event.finish_reason)
            yield self._event({"type": f"response.{status}", "response": self._finish(status)})

    def error_event(self, path: str, error: ApiError, http_request_id: str) -> bytes:
        shown = error_body(path, error, http_request_id)["error"]
        if not self._is_over:
            is_cancelled = error.code == CANCELLED
            if not is_cancelled:
                self._error = {"code": shown["code"] or "server_error", "message": shown["message"]}
            list(self._items.finish("length"))
            self._finish("cancelled" if is_cancelled else "failed")
        return self._event(
            {"type": "error", **{name: shown[name] for name in ("code", "message", "param")}}
        )

    def close(self) -> None:
        if not self._is_over:  # the client left
            list(self._items.finish("length"))
            self._finish("cancelled")

    def whole(self, events: list[GenerationEvent]) -> dict[str, Any]:
        reason: FinishReason = "stop"
        for event in events:
            list(self._items.take(event))
            reason = event.finish_reason or reason
        list(self._items.finish(reason))
        return self._finish(status_of(reason))

    def _finish(self, status: str) -> dict[str, Any]:
        """The response, now that it is over; it is stored before its client hears of it, who may go
        on at once.
        """
        self._is_over = True
        response = self._response(status)
        if self.body.to_store is not None:
            items, ids = self.body.to_store
            output = [_without_logprobs(item) for item in self._items.items]
            ids = [*ids, *(item["id"] for item in output)]
            self.stored.put(
                {**response, "output": output}, items, ids, self.body.previous_response_id
            )
        return response

    def _event(self, fields: Event) -> bytes:
        number = self._num_events
        self._num_events += 1
        return self._encode(fields, number)

    @staticmethod
    def _encode(fields: Event, number: int) -> bytes:
        return named_event(fields["type"], {**fields, "sequence_number": number})

    def _response(self, status: str) -> dict[str, Any]:
        """The response as far as it has come."""
        reasoning = {
            "effort": self.body.reasoning.effort if self.body.reasoning is not None else None,
            "summary": None,
        }
        choice: Any = self.body.tool_choice or "auto"
        text_format: dict[str, Any] = {"type": "text"}
        if self.body.text is not None and self.body.text.format is not None:
            text_format = self.body.text.format.model_dump(by_alias=True, exclude_none=True)
        return {
            "id": self.request_id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "background": False,
            "error": self._error,
            "incomplete_details": {"reason": "max_output_tokens"}
            if status == "incomplete"
            else None,
            "instructions": self.body.instructions,
            "max_output_tokens": self.body.max_output_tokens,
            "model": self.model,
            "output": self._items.items,
            "parallel_tool_calls": self.body.parallel_tool_calls is not False,
            "previous_response_id": self.body.previous_response_id,
            "reasoning": reasoning,
            "safety_identifier": self.body.safety_identifier,
            "service_tier": sampling.tier_of(self.body.service_tier),
            "store": self.body.to_store is not None,
            "temperature": self.body.effective("temperature"),
            "text": {"format": text_format},
            "tool_choice": choice
            if isinstance(choice, str)
            else {"type": "function", "name": choice.name},
            "tools": [_describe(tool) for tool in self.body.tools or ()],
            "top_logprobs": self.body.top_logprobs or 0,
            "top_p": self.body.effective("top_p"),
            "truncation": self.body.truncation or "disabled",
            "usage": None if status == "in_progress" else _usage(self.call.usage),
            "user": self.body.user,
            "metadata": self.body.metadata or {},
        }


def _describe(tool: FunctionTool | NamespaceTool | OtherTool) -> dict[str, Any]:
    """A tool as the response repeats it."""
    if isinstance(tool, FunctionTool):
        return tool.model_dump(include={"type", *TOOL_FIELDS})
    return tool.model_dump(exclude_none=True)


def _without_logprobs(item: dict[str, Any]) -> dict[str, Any]:
    if item["type"] != "message":
        return item
    return {**item, "content": [{**part, "logprobs": []} for part in item["content"]]}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.total_tokens,
    }


router = endpoint(
    ResponsesRequest,
    ResponseWriter,
    "create_response",
    "An answer to a text or a conversation.",
    "OpenAI",
)
