"""The form an answer must take, by whatever name a client asks for it: OpenAI's, vLLM's new and
former ones, SGLang's, llama.cpp's, Ollama's and TGI's, the same in every API. A constraint that is
dropped changes what an answer means, so a name that means nothing here is refused (`UNSUPPORTED`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from quire.constrain.gbnf import is_gbnf, to_lark
from quire.errors import InvalidRequestError
from quire.frontend.strict_schema import close_objects
from quire.sampling_params import StructuredOutput
from quire.server.api.body import Body

PARTS = ("json_schema", "json_object", "regex", "choice", "grammar")


def structured_output(field: str, **given: Any) -> StructuredOutput:
    """The form an answer must take; errors name the field that asked for it."""
    try:
        return StructuredOutput(**given)
    except InvalidRequestError as error:
        raise InvalidRequestError(field, str(error).removeprefix(f"{error.field}: ")) from None


def json_output(
    kind: str, schema: dict[str, Any] | None, field: str, strict: bool | None = False
) -> StructuredOutput | None:
    """The form that "text", "json_object" or "json_schema" asks for; `field` is where its schema
    stands.
    """
    if kind == "text":
        return None
    if kind == "json_object" and schema is None:
        return StructuredOutput(json_object=True)
    if schema is None:
        raise InvalidRequestError(field, "is missing")
    return structured_output(field, json_schema=close_objects(schema) if strict else schema)


class JsonSchemaFormat(Body):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None
    """Objects have no properties but those that the schema names. Answers follow the schema, strict
    or not.
    """


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    """With json_object: llama.cpp's and Together's way to give a schema, which instructor uses."""

    def structured(self) -> StructuredOutput | None:
        if self.type == "json_object":
            return json_output(self.type, self.schema_, "response_format.schema")
        wanted = self.json_schema
        schema, strict = (None, None) if wanted is None else (wanted.schema_, wanted.strict)
        return json_output(self.type, schema, "response_format.json_schema.schema", strict)


class StructuredOutputs(Body):
    """vLLM's way to ask for structure."""

    UNSUPPORTED: ClassVar[Mapping[str, str]] = {
        "structural_tag": "use tools or a grammar",
        "whitespace_pattern": "write the white space into a regex or grammar",
        "disable_any_whitespace": "write the white space into a regex or grammar",
    }

    json_: str | dict[str, Any] | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_additional_properties: bool | None = None

    def structured(self) -> StructuredOutput:
        schema = self.json_
        if self.disable_additional_properties:
            if not isinstance(schema, dict):
                message = "needs a schema that is given as an object"
                raise InvalidRequestError(
                    "structured_outputs.disable_additional_properties", message
                )
            schema = close_objects(schema)
        return structured_output(
            "structured_outputs",
            json_schema=schema,
            regex=self.regex,
            choice=None if self.choice is None else tuple(self.choice),
            grammar=None
            if self.grammar is None
            else _lark("structured_outputs.grammar", self.grammar),
            json_object=bool(self.json_object),
        )


class TypedGrammar(Body):
    """TGI's way."""

    type: Literal["json", "json_object", "regex"]
    value: str | dict[str, Any]


class ConstraintFields(Body):
    """Every name by which an answer's form can be asked for, in every API; several, if they ask for
    the same.
    """

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_json_object: bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    regex: str | None = None
    """SGLang's."""
    ebnf: str | None = None
    """SGLang's: a grammar with rules like `root ::= …`."""
    json_schema: str | dict[str, Any] | None = None
    """SGLang's as text, llama.cpp's as an object."""
    grammar: str | TypedGrammar | None = None
    """llama.cpp's as text with rules like `root ::= …`, TGI's as an object."""
    format: str | dict[str, Any] | None = None
    """Ollama's: "json" or a schema."""

    def structured(
        self, native: Mapping[str, tuple[StructuredOutput, str]] | None = None
    ) -> tuple[StructuredOutput | None, dict[str, str]]:
        """The form the answer must take, and for `GenerationRequest.fields`: errors about it name
        the field that asked for it. `native` is the API's own way: under its field's name the form,
        and where the schema stands.
        """
        forms = dict(native or {})
        for name in _READERS:
            form = _READERS[name](self)
            if form is not None:
                forms[name] = form, name
        if not forms:
            return None, {}
        field, *others = forms
        form, schema_field = forms[field]
        for other in others:
            if forms[other][0] != form:
                raise InvalidRequestError(
                    other, f"asks for something else than {field}: send one of them"
                )
        return form, {
            "structured": field,
            **dict.fromkeys((f"structured.{part}" for part in PARTS), schema_field),
        }


def _lark(field: str, grammar: str) -> str:
    return to_lark(grammar, field) if is_gbnf(grammar) else grammar


def _read_response_format(body: ConstraintFields) -> StructuredOutput | None:
    return None if body.response_format is None else body.response_format.structured()


def _read_structured_outputs(body: ConstraintFields) -> StructuredOutput | None:
    return None if body.structured_outputs is None else body.structured_outputs.structured()


def _read_guided_json_object(body: ConstraintFields) -> StructuredOutput | None:
    return StructuredOutput(json_object=True) if body.guided_json_object else None


def _read_typed_grammar(body: ConstraintFields) -> StructuredOutput | None:
    if not isinstance(body.grammar, TypedGrammar):
        return _reader("grammar", "grammar")(body)
    part = "regex" if body.grammar.type == "regex" else "json_schema"
    return structured_output("grammar", **{part: body.grammar.value})


def format_output(given: str | dict[str, Any] | None) -> StructuredOutput | None:
    """What Ollama's `format` asks for."""
    if isinstance(given, str) and given not in ("", "json"):
        raise InvalidRequestError("format", 'must be "json" or a JSON schema')
    if given == "json":
        return StructuredOutput(json_object=True)
    return structured_output("format", json_schema=given) if given else None


def _read_format(body: ConstraintFields) -> StructuredOutput | None:
    return format_output(body.format)


def _reader(name: str, part: str) -> Callable[[ConstraintFields], StructuredOutput | None]:
    """Of a field whose value is one of StructuredOutput's; clients with a form to fill in send ""
    for none.
    """

    def read(body: ConstraintFields) -> StructuredOutput | None:
        value = getattr(body, name)
        if value is None or (value == "" and not name.startswith("guided_")):
            return None
        if part == "grammar":
            value = _lark(name, value)
        return structured_output(name, **{part: tuple(value) if isinstance(value, list) else value})

    return read


_READERS: Mapping[str, Callable[[ConstraintFields], StructuredOutput | None]] = {
    "response_format": _read_response_format,
    "structured_outputs": _read_structured_outputs,
    "guided_json": _reader("guided_json", "json_schema"),
    "guided_json_object": _read_guided_json_object,
    "guided_regex": _reader("guided_regex", "regex"),
    "guided_choice": _reader("guided_choice", "choice"),
    "guided_grammar": _reader("guided_grammar", "grammar"),
    "regex": _reader("regex", "regex"),
    "ebnf": _reader("ebnf", "grammar"),
    "json_schema": _reader("json_schema", "json_schema"),
    "grammar": _read_typed_grammar,
    "format": _read_format,
}

UNSUPPORTED: Mapping[str, str] = {
    "guided_whitespace_pattern": "write the white space into a regex or grammar",
    "structural_tag": "use tools or a grammar",
    "guided_decoding": "use structured_outputs",
    "nvext": "send its entries as fields of their own",
    "grammar_lazy": "a grammar holds from the first token: use tools",
    "grammar_triggers": "a grammar holds from the first token: use tools",
    "grammar_string": "use grammar",
    "regex_pattern": "use regex",
}
"""Constraints that can't be applied."""
