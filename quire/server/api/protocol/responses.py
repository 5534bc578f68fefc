"""OpenAI's responses: what comes in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PrivateAttr

from quire.errors import InvalidRequestError
from quire.sampling_params import StructuredOutput
from quire.server.api.protocol import common, sampling, structure
from quire.server.api.protocol.response_items import Conversation, Item, ItemReference
from quire.server.api.protocol.sampling import FromTable
from quire.server.api.protocol.tools import offered
from quire.server.api.protocol.unions import LIST, TEXT, TEXT_OR_LIST, by_type, kind
from quire.server.calls.generation import ChatPrompt, GenerationRequest, NamedTool, ToolChoice
from quire.server.calls.response_store import OwnResponses

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


class FunctionTool(common.Body):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamespaceTool(common.Body):
    """Functions under a common name: the model calls `namespace.function`."""

    type: Literal["namespace"]
    name: str
    description: str | None = None
    tools: list[Annotated[FunctionTool | OtherTool, Field(union_mode="left_to_right")]]


class OtherTool(common.Body):
    """One that the server would have to run, or whose form only OpenAI's models know."""

    type: str
    name: str | None = None


Tool = Annotated[
    Annotated[FunctionTool, kind("function")]
    | Annotated[NamespaceTool, kind("namespace")]
    | Annotated[OtherTool, kind("other")],
    by_type("function", "namespace", other="other"),
]


class FunctionChoice(common.Body):
    type: Literal["function"]
    name: str


class TextFormat(structure.JsonSchemaFormat):
    type: Literal["text", "json_object", "json_schema"] = "text"


class TextConfig(common.Body):
    format: TextFormat | None = None


class Reasoning(common.Body):
    """The reasoning itself is returned: a wish for a summary is among the fields that are ignored."""

    effort: str | None = Field(None, max_length=32)


class ResponsesStreamOptions(common.Body):
    include_obfuscation: Literal[False] | None = None


class ResponsesRequest(sampling.TokenChoice, common.ApiRequest):
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
        Annotated[str, TEXT] | Annotated[list[Item], Field(max_length=common.MAX_MESSAGES), LIST],
        TEXT_OR_LIST,
    ]
    instructions: str | None = None
    previous_response_id: str | None = Field(None, max_length=128)
    max_output_tokens: Annotated[int | None, FromTable("max_tokens")] = None
    n: Literal[1] | None = None
    temperature: Annotated[float | None, FromTable("temperature", high=2)] = None
    top_p: Annotated[float | None, FromTable("top_p")] = None
    stop: str | list[str] | None = None
    top_logprobs: Annotated[int | None, FromTable("logprobs", high=common.MAX_TOP_LOGPROBS)] = None
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
    metadata: common.Metadata | None = None
    service_tier: Literal["auto", "default"] | None = None
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

    def to_generation(self, response_id: str, request_id: str) -> GenerationRequest:
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
            response_id=response_id,
            request_id=request_id,
            prompts=(ChatPrompt(messages, functions or None, template_kwargs=kwargs or None),),
            params=params,
            endpoint=self.ENDPOINT,
            stream=bool(self.stream),
            split=True,
            tool_choice=self._tool_choice(),
            parallel_tool_calls=self.parallel_tool_calls is not False,
            truncate_prompt_tokens=-1 if self.truncation == "auto" else None,
            fields={**self.FIELDS, **names},
            ignored=(*ignored, *dropped),
            notes=common.present(
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
        return [common.function_tool(**tool.model_dump(include=TOOL_FIELDS))]
    if not isinstance(tool, NamespaceTool):
        return []
    inside = [one for one in tool.tools if isinstance(one, FunctionTool)]
    return [
        common.function_tool(
            **{**one.model_dump(include=TOOL_FIELDS), "name": f"{tool.name}.{one.name}"}
        )
        for one in inside
    ]
