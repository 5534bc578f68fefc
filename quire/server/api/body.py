"""What the bodies of all APIs share: their base classes, fields of several kinds, tools.

Null means "not given" where OpenAI's documentation allows it; elsewhere it is an error like any
other wrong type.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from types import UnionType
from typing import Annotated, Any, ClassVar, TypeVar, Union, get_args, get_origin

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    Tag,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticUndefined, core_schema

from quire.errors import InvalidRequestError
from quire.sampling_params import MAX_BIASES
from quire.server.calls.generation import GenerationRequest, Prompt, TextPrompt, TokensPrompt
from quire.server.stored.store import OwnResponses

MAX_TOP_LOGPROBS = 20
MAX_ENTRIES = MAX_BIASES
"""Of a mapping whose values are checked."""
MAX_MESSAGES = 8192
NO_TEMPLATES = "templates come with the model"
"""Why `chat_template` is refused wherever there is a chat."""

Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
    Field(max_length=16),
]
"""What clients note down with what they ask for, in OpenAI's bounds: it is kept."""


def _bound_errors(schema: Any) -> None:
    """Makes the lists in a schema end at their first error, and puts a bound on its mappings of
    checked values.
    """
    if isinstance(schema, list | tuple):
        for item in schema:
            _bound_errors(item)
        return
    if not isinstance(schema, dict):
        return
    for key, part in schema.items():
        if key in ("default", "metadata", "serialization"):
            continue
        if (
            isinstance(part, dict)
            and part.get("type") == "dict"
            and part["values_schema"]["type"] != "any"
        ):
            schema[key] = core_schema.no_info_before_validator_function(_check_size, part)
        _bound_errors(part)
    if schema.get("type") == "list":
        schema["fail_fast"] = True


def _check_size(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > MAX_ENTRIES:
        raise ValueError(f"has {len(value)} entries; at most {MAX_ENTRIES} are accepted")
    return value


_MOST_UNKNOWN = 256
_NEUTRAL = {"length_penalty": 1.0}
"""Values with which a field that is not supported changes nothing, besides null, false and empty
ones.
"""
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?")
_LONGEST_NUMBER = 40
_WORDS = {"true": True, "false": False}


def _kinds(annotation: Any) -> set[Any]:
    """The types that a field may have, if it is one of several."""
    if get_origin(annotation) is Annotated:
        return _kinds(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return set().union(*map(_kinds, get_args(annotation)))
    return {annotation}


def _from_text(text: str, kind: type) -> Any:
    """What a text says that stands for a number or for true or false; the text itself if it says
    none.
    """
    if kind is bool:
        return _WORDS.get(text, text)
    if len(text) > _LONGEST_NUMBER or _NUMBER.fullmatch(text) is None:
        return text
    number = float(text)
    if kind is float:
        return number
    try:
        return int(text)
    except ValueError:
        return int(number) if number.is_integer() else text


class Body(BaseModel):
    """Strict: no 1 for true, no NaN. Fields nobody knows are kept apart. As in vLLM, a number may
    be written as text ("0.5"), and so may true and false, where a field takes nothing else.

    Checking ends with the first item of a list that is wrong: a million errors would take half a
    minute to collect.
    """

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    _from_text: ClassVar[Mapping[str, type]] = {}
    """Fields that are a number or a truth value and nothing else, with which of them."""

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        found = {
            name: _kinds(field.annotation) - {type(None)}
            for name, field in cls.model_fields.items()
        }
        cls._from_text = {
            name: kind
            for name, kinds in found.items()
            for kind in (bool, int, float)
            if kinds == {kind}
        }

    @model_validator(mode="before")
    @classmethod
    def _read_texts(cls, data: Any) -> Any:
        if not isinstance(data, dict) or cls._from_text.keys().isdisjoint(data):
            return data
        return {
            name: _from_text(value, cls._from_text[name])
            if isinstance(value, str) and name in cls._from_text
            else value
            for name, value in data.items()
        }

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

    @property
    def served_name(self) -> str | None:
        """The model's name, as the server knows it."""
        return self.model

    @property
    def recalls(self) -> bool:
        """Whether it goes on with what was stored."""
        return False

    def recall(self, stored: OwnResponses) -> None:
        """Looks up what it goes on with; called before `to_generation`."""

    def use_defaults(self, defaults: Mapping[str, float]) -> None:
        """The model's sampling defaults, for what the body does not name; called before
        `to_generation`. Embeddings have no use for them.
        """

    @abstractmethod
    def to_generation(self) -> GenerationRequest:
        """What is asked of the engine; raises InvalidRequestError for fields that don't go
        together.
        """

    def check_model_limits(self, hidden_size: int) -> None:
        """Raises InvalidRequestError for what the model can't do."""


def refuse_unsupported(value: BaseModel, prefix: str = "") -> None:
    """A field that clients know and we can't honour is an error; left out or null, it is not there.

    Models list such fields in a class variable `UNSUPPORTED`: name to why, or to what to use
    instead.
    """
    unsupported: Mapping[str, str] = getattr(type(value), "UNSUPPORTED", {})
    extra = value.model_extra or {}
    for name in list(extra):
        if name not in unsupported:
            continue
        if extra[name] in (None, False, [], {}, "") or extra[name] == _NEUTRAL.get(name):
            del extra[name]
            continue
        raise InvalidRequestError(f"{prefix}{name}", f"is not supported: {unsupported[name]}")
    for name in type(value).model_fields:
        item = getattr(value, name, None)
        if isinstance(item, BaseModel):
            refuse_unsupported(item, f"{prefix}{name}.")


def unknown_fields(value: BaseModel, prefix: str = "") -> list[str]:
    """Fields that were sent and that no model here has, nested ones included."""
    names = [f"{prefix}{name}" for name in islice(value.model_extra or {}, _MOST_UNKNOWN)]
    for name in type(value).model_fields:
        item = getattr(value, name, PydanticUndefined)
        if isinstance(item, BaseModel):
            names += unknown_fields(item, f"{prefix}{name}.")
    return names


def body_schema(model: type[BaseModel]) -> dict[str, Any]:
    """`openapi_extra` for an endpoint that reads its body with `read_body`."""
    schema = model.model_json_schema(
        ref_template=f"#/components/schemas/{model.__name__}.{{model}}"
    )
    definitions = schema.pop("$defs", {})
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "x-quire-definitions": {
            f"{model.__name__}.{name}": one for name, one in definitions.items()
        },
    }


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
        TextPrompt(one, add_special_tokens) if isinstance(one, str) else TokensPrompt(tuple(one))
        for one in given
    )


def function_tool(**function: Any) -> dict[str, Any]:
    """A tool in OpenAI's form, which chat templates take."""
    return {"type": "function", "function": present(**function)}


def function_call(call_id: str | None, name: str | None, arguments: str) -> dict[str, Any]:
    """A tool call in OpenAI's form; `arguments` are JSON text."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


TEXT = Tag("<text>")
LIST = Tag("<list>")


def _text_or_list(value: Any) -> str | None:
    if isinstance(value, str):
        return TEXT.tag
    return LIST.tag if isinstance(value, list) else None


TEXT_OR_LIST = Discriminator(
    _text_or_list,
    custom_error_type="text_or_list",
    custom_error_message="Input should be a text or a list",
)


def kind(name: str) -> Tag:
    """The tag of objects whose `type` is that."""
    return Tag(f"<{name}>")


def by_type(*names: str, default: str | None = None, other: str | None = None) -> Discriminator:
    """Tells objects apart by their `type`; those without one are of the `default` kind, those with
    a type of which nothing is known here of the `other` kind.
    """

    def tag_of(value: Any) -> str | None:
        name = (
            value.get("type", default) if isinstance(value, dict) else getattr(value, "type", None)
        )
        if not isinstance(value, dict | BaseModel):
            return None
        if name in names:
            return f"<{name}>"
        return f"<{other}>" if other is not None and isinstance(name, str) else None

    return Discriminator(
        tag_of,
        custom_error_type="unknown_type",
        custom_error_message=f"Input should be an object whose type is one of: {', '.join(names)}",
    )


_Tool = TypeVar("_Tool")
_MOST_SHOWN = 100


def offered(
    tools: Sequence[_Tool] | None,
    foreign: Callable[[_Tool], tuple[str, str | None] | None],
    is_optional: bool,
) -> tuple[list[_Tool], tuple[str, ...]]:
    """Those that the model can be offered, and what to name in x-quire-ignored. `foreign` gives the
    type and, if it has one, the name of a tool that can't be offered; None for one that can.
    """
    kept = []
    ignored = []
    for place, tool in enumerate(tools or ()):
        found = foreign(tool)
        if found is None:
            kept.append(tool)
            continue
        kind = found[0][:_MOST_SHOWN]
        name = (found[1] or "")[:_MOST_SHOWN]
        if not is_optional:
            shown = f"{kind!r} (named {name!r})" if name and name != kind else repr(kind)
            advice = "leave it out, or send tool_choice 'auto' if the model may do without it"
            raise InvalidRequestError(
                f"tools[{place}].type", f"tools of type {shown} can't be used here: {advice}"
            )
        ignored.append(f"tools[{place}].{kind}")
    return kept, tuple(ignored)


def foreign_function(tool: Mapping[str, Any]) -> tuple[str, str | None] | None:
    """For tools in OpenAI's form, of which functions can be offered."""
    kind = tool.get("type")
    # what is wrong with a function is found later
    if not isinstance(kind, str) or kind == "function":
        return None
    about = tool.get(kind)
    name = about.get("name") if isinstance(about, Mapping) else tool.get("name")
    return kind, name if isinstance(name, str) else None
