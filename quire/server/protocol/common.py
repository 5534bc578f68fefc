"""Fields that several APIs share, and how they become sampling parameters.

Null means "not given" where OpenAI's documentation allows it; elsewhere it is an error like any other wrong type.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from quire.errors import InvalidRequestError
from quire.sampling_params import MAX_ALLOWED_TOKENS, MAX_BIASES, MAX_STOP_TOKENS, SamplingParams, StructuredOutput
from quire.server.generation import GenerationRequest, Prompt, TextPrompt, TokensPrompt

MAX_TOP_LOGPROBS = 20
MAX_ENTRIES = MAX_BIASES
"""Of a mapping whose values are checked."""
MAX_MESSAGES = 8192
NO_TEMPLATES = "templates come with the model"
"""Why `chat_template` is refused wherever there is a chat."""


def _bound_errors(schema: Any) -> None:
    """Makes the lists in a schema end at their first error, and puts a bound on its mappings of checked values."""
    if isinstance(schema, list | tuple):
        for item in schema:
            _bound_errors(item)
        return
    if not isinstance(schema, dict):
        return
    for key, part in schema.items():
        if key in ("default", "metadata", "serialization"):
            continue
        if isinstance(part, dict) and part.get("type") == "dict" and part["values_schema"]["type"] != "any":
            schema[key] = core_schema.no_info_before_validator_function(_check_size, part)
        _bound_errors(part)
    if schema.get("type") == "list":
        schema["fail_fast"] = True


def _check_size(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > MAX_ENTRIES:
        raise ValueError(f"has {len(value)} entries; at most {MAX_ENTRIES} are accepted")
    return value


class Body(BaseModel):
    """Strict: no text for a number, no 1 for true, no NaN. Fields nobody knows are kept apart.

    Checking ends with the first item of a list that is wrong: a million errors would take half a minute to collect.
    """

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _bound_errors(schema)
        return schema


class ApiRequest(Body):
    """The body of a call that the engine works on, of whichever API."""

    ENDPOINT: ClassVar[str]
    ID_PREFIX: ClassVar[str]
    """What ids of responses begin with."""
    FIELDS: ClassVar[Mapping[str, str]] = {}
    """Parameters as clients of this API write them, where that differs from ours."""

    model: str | None = None

    @abstractmethod
    def to_generation(self, response_id: str, request_id: str) -> GenerationRequest:
        """What is asked of the engine; raises InvalidRequestError for fields that don't go together."""

    def check_model_limits(self, hidden_size: int) -> None:
        """Raises InvalidRequestError for what the model can't do."""


def present(**values: Any) -> dict[str, Any]:
    """Those that are not None."""
    return {name: value for name, value in values.items() if value is not None}


def to_prompts(given: str | list[Any], add_special_tokens: bool) -> tuple[Prompt, ...]:
    """A text, token ids, or a list of either."""
    if isinstance(given, str):
        return (TextPrompt(given, add_special_tokens),)
    if not given:
        raise InvalidRequestError("prompt", "is empty")
    if isinstance(given[0], int):
        return (TokensPrompt(tuple(given)),)
    return tuple(
        TextPrompt(one, add_special_tokens) if isinstance(one, str) else TokensPrompt(tuple(one)) for one in given
    )


def function_tool(**function: Any) -> dict[str, Any]:
    """A tool in OpenAI's form, which chat templates take."""
    return {"type": "function", "function": present(**function)}


def function_call(call_id: str | None, name: str | None, arguments: str) -> dict[str, Any]:
    """A tool call in OpenAI's form; `arguments` are JSON text."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def structured_output(field: str, **given: Any) -> StructuredOutput:
    """The form an answer must take; errors name the field that asked for it."""
    try:
        return StructuredOutput(**given)
    except InvalidRequestError as error:
        raise InvalidRequestError(field, str(error).removeprefix(f"{error.field}: ")) from None


def json_output(kind: str, schema: dict[str, Any] | None, field: str) -> StructuredOutput | None:
    """The form that "text", "json_object" or "json_schema" asks for; `field` is where its schema stands."""
    if kind == "text":
        return None
    if kind == "json_object" and schema is None:
        return StructuredOutput(json_object=True)
    if schema is None:
        raise InvalidRequestError(field, "is missing")
    return structured_output(field, json_schema=schema)


class StreamOptions(Body):
    include_usage: bool = False
    """Send a last chunk with the usage of the whole request."""
    continuous_usage_stats: bool = False
    """Send the usage so far with every chunk."""


class JsonSchemaFormat(Body):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None
    """Answers always follow the schema, strict or not."""


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    """With json_object: llama.cpp's and Together's way to give a schema, which instructor uses."""

    def structured(self) -> StructuredOutput | None:
        if self.type == "json_object":
            return json_output(self.type, self.schema_, "response_format.schema")
        schema = None if self.json_schema is None else self.json_schema.schema_
        return json_output(self.type, schema, "response_format.json_schema.schema")


class StructuredOutputs(Body):
    """vLLM's way to ask for structure."""

    UNSUPPORTED: ClassVar[Mapping[str, str]] = {"structural_tag": "use tools or a grammar"}

    json_: str | dict[str, Any] | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def structured(self) -> StructuredOutput:
        return structured_output(
            "structured_outputs",
            json_schema=self.json_,
            regex=self.regex,
            choice=None if self.choice is None else tuple(self.choice),
            grammar=self.grammar,
            json_object=bool(self.json_object),
        )


class SamplingFields(ApiRequest):
    """What chat and completions share, above all how tokens are chosen: OpenAI's fields, those vLLM's users send, and
    our own."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    user: str | None = Field(None, max_length=1024)
    request_id: str | None = Field(None, min_length=1, max_length=128)
    """The name that the body itself gives its request."""

    n: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[str, float] | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    stop: str | list[str] | None = None

    top_k: int = Field(0, ge=-1)
    """0 or -1: all."""
    min_p: float = Field(0.0, ge=0, le=1)
    typical_p: float = Field(1.0, gt=0, le=1)
    top_n_sigma: float = Field(0.0, ge=0)
    repetition_penalty: float = Field(1.0, gt=0)
    no_repeat_ngram_size: int = Field(0, ge=0)
    dry_multiplier: float = Field(0.0, ge=0)
    dry_base: float = Field(1.75, ge=1)
    dry_allowed_length: int = Field(2, ge=1)
    dry_sequence_breakers: list[str] = ["\n", ":", '"', "*"]
    xtc_probability: float = Field(0.0, ge=0, le=1)
    xtc_threshold: float = Field(0.1, ge=0, le=1)
    min_tokens: int = Field(0, ge=0)
    ignore_eos: bool = False
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOP_TOKENS)] | None = None
    include_stop_str_in_output: bool = False
    allowed_token_ids: Annotated[list[int], Field(max_length=MAX_ALLOWED_TOKENS)] | None = None
    bad_words: list[str] | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    truncate_prompt_tokens: int | None = Field(None, ge=-1)
    """Keep this many of the prompt's last tokens; -1: as many as fit."""
    cache_salt: str | None = Field(None, min_length=1)
    priority: int = 0
    deadline: float | None = Field(None, gt=0)
    """Seconds after which the request ends."""
    speculation: bool = True
    """False: no guesses. The answer is the same."""
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None

    def check_stream(self) -> None:
        """Raises InvalidRequestError for what needs a stream and for what can't be streamed."""
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options", "needs stream to be true")
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequestError("prompt_logprobs", "can't be streamed")

    def structured(self) -> tuple[StructuredOutput | None, dict[str, str]]:
        """The form the answer must take, and for `GenerationRequest.fields`: errors about it name the field that asked
        for it."""
        forms: dict[str, StructuredOutput] = {}
        form = self.response_format.structured() if self.response_format is not None else None
        if form is not None:
            forms["response_format"] = form
        if self.structured_outputs is not None:
            forms["structured_outputs"] = self.structured_outputs.structured()
        for kind, part in _GUIDED.items():
            name = f"guided_{kind}"
            value = getattr(self, name)
            if value is not None:
                forms[name] = structured_output(name, **{part: tuple(value) if isinstance(value, list) else value})
        if not forms:
            return None, {}
        field, *others = forms
        if others:
            raise InvalidRequestError(others[0], f"can't be combined with {field}")
        parts = ("json_schema", "json_object", "regex", "choice", "grammar")
        names = dict.fromkeys(("structured", *(f"structured.{part}" for part in parts)), field)
        return forms[field], names

    def sampling_params(self, **more: Any) -> SamplingParams:
        """`more` are parameters that an API names or defaults differently."""
        given = present(**{name: getattr(self, name) for name in _SAME})
        given = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
        given["stop"] = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        given["top_k"] = max(0, self.top_k)
        if self.seed is not None:
            given["seed"] = self.seed % 2**64
        if self.logit_bias:
            given["logit_bias"] = {_token_id(name): bias for name, bias in self.logit_bias.items()}
        return SamplingParams(**(given | more))


_GUIDED = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "grammar"}
"""vLLM's former way to ask for structure: `guided_json` and so on."""
_SAME = SamplingFields.model_fields.keys() & SamplingParams.__dataclass_fields__.keys() - {"logit_bias"}
"""Fields that are sampling parameters of the same name."""

UNSUPPORTED_EVERYWHERE: Mapping[str, str] = {
    "use_beam_search": "beam search is part of the Python API",
    "length_penalty": "it belongs to beam search",
    "logits_processors": "code is never taken from a request",
    "guided_whitespace_pattern": "write the white space into a regex or grammar",
    "structural_tag": "use tools or a grammar",
    "kv_transfer_params": "the cache is not transferred",
    "vllm_xargs": "there are no plugins",
    "mm_processor_kwargs": "the model reads text only",
    "prompt_embeds": "prompts are text or token ids",
    "lora_request": "there are no adapters",
    "thinking_token_budget": "set max_tokens",
    "chat_template": NO_TEMPLATES,
}


def _token_id(name: str) -> int:
    if not name.isascii() or not name.isdigit() or len(name) > 10:
        raise InvalidRequestError("logit_bias", f"has the key {name[:50]!r}, which is no token id")
    return int(name)
