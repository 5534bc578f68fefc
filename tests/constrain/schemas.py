"""Random JSON schemas of every kind users write, small enough for a small model to finish an
answer.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from typing import Any

import jsonschema

from quire.sampling_params import StructuredOutput

Schema = dict[str, Any]

_NAMES = ("name", "age", "city", "tags", "id", "price", "kind", "ok", "größe", "a b", 'q"t')
_WORDS = (
    "red",
    "green",
    "blue",
    "on",
    "off",
    "Zürich",
    "a/b",
    "two words",
    'say "hi"',
    "back\\slash",
    "日本",
    "",
)
_PATTERNS = (
    "^[a-z]{1,8}$",
    "^[A-Z]{3}-[0-9]{2,4}$",
    "^(cat|dog|fish)s?$",
    r"^\d{4}-\d{2}-\d{2}$",
    "^#[0-9a-f]{6}$",
)
REGEXES = (
    "(a+)+b",
    "[a-z]{1,20}",
    r"\d{3}-\d{4}",
    "(yes|no|maybe)( really)?",
    "[A-Z][a-z]{2,10}( [A-Z][a-z]{2,10}){0,2}",
    r"(25[0-5]|2[0-4]\d|1?\d?\d)(\.(25[0-5]|2[0-4]\d|1?\d?\d)){3}",
    "x?y?z?",
    "[äöü]{2,4}|[日本語]{1,3}",
)
CHOICES = (
    ("yes", "no"),
    ("a", "ab", "abc"),
    ("Paris", "London", "New York"),
    ('"quoted"', "new\nline", "é", "\\"),
)


def random_schemas(seed: int, count: int) -> list[Schema]:
    generator = random.Random(seed)
    return [_top(generator) for _ in range(count)]


def check_json(schema: Schema, text: str) -> None:
    """Raises if the text is not JSON or not what the schema asks for."""
    value = json.loads(text)
    jsonschema.validate(value, schema, cls=jsonschema.Draft202012Validator)


def check(structured: StructuredOutput, text: str) -> None:
    """Raises unless the text is what was asked for."""
    if structured.json_schema is not None:
        assert isinstance(structured.json_schema, str)
        check_json(json.loads(structured.json_schema), text)
    elif structured.json_object:
        check_json({"type": "object"}, text)
    elif structured.regex is not None:
        assert re.fullmatch(structured.regex, text), (structured.regex, text)
    else:
        assert structured.choice is not None
        assert text in structured.choice


def _top(generator: random.Random) -> Schema:
    if generator.random() < 0.25:
        return _with_references(generator)
    return _schema(generator, depth=2)


def _with_references(generator: random.Random) -> Schema:
    """A definition used twice, and one that holds itself."""
    item = _schema(generator, depth=0)
    tree: Schema = {
        "type": "object",
        "properties": {
            "value": {"$ref": "#/$defs/item"},
            "children": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 1},
        },
        "required": ["value"],
        "additionalProperties": False,
    }
    pair: Schema = {
        "type": "object",
        "properties": {"first": {"$ref": "#/$defs/item"}, "second": {"$ref": "#/$defs/item"}},
        "required": ["first", "second"],
        "additionalProperties": False,
    }
    root: Schema = generator.choice([pair, {"$ref": "#/$defs/tree"}])
    return {**root, "$defs": {"item": item, "tree": tree}}


def _schema(generator: random.Random, depth: int) -> Schema:
    flat = [_string, _pattern, _enum, _const, _integer, _number, _plain]
    nested = [_object, _object, _array, _any_of]
    kinds: list[Callable[[random.Random, int], Schema]] = (
        flat if depth == 0 else [*nested, *nested, *flat]
    )
    return generator.choice(kinds)(generator, depth)


def _object(generator: random.Random, depth: int) -> Schema:
    names = generator.sample(_NAMES, generator.randint(1, 3))
    required = [name for name in names if generator.random() < 0.6]
    schema: Schema = {
        "type": "object",
        "properties": {name: _schema(generator, depth - 1) for name in names},
        "required": required,
        "additionalProperties": False,
    }
    return schema


def _array(generator: random.Random, depth: int) -> Schema:
    low = generator.randint(0, 2)
    return {
        "type": "array",
        "items": _schema(generator, depth - 1),
        "minItems": low,
        "maxItems": low + generator.randint(0, 2),
    }


def _any_of(generator: random.Random, depth: int) -> Schema:
    return {"anyOf": [_schema(generator, depth - 1) for _ in range(generator.randint(2, 3))]}


def _string(generator: random.Random, depth: int) -> Schema:
    low = generator.randint(0, 3)
    return {"type": "string", "minLength": low, "maxLength": low + generator.randint(0, 10)}


def _pattern(generator: random.Random, depth: int) -> Schema:
    return {"type": "string", "pattern": generator.choice(_PATTERNS)}


def _enum(generator: random.Random, depth: int) -> Schema:
    values: list[Any] = [*_WORDS, 1, -2, 3.5, True, None, [1, 2], {"a": 1}]
    return {"enum": generator.sample(values, generator.randint(1, 5))}


def _const(generator: random.Random, depth: int) -> Schema:
    return {"const": generator.choice([*_WORDS, 7, False])}


def _integer(generator: random.Random, depth: int) -> Schema:
    low = generator.randint(-1000, 1000)
    schema: Schema = {
        "type": "integer",
        "minimum": low,
        "maximum": low + generator.randint(0, 5000),
    }
    if generator.random() < 0.3:
        schema = {
            "type": "integer",
            "exclusiveMinimum": low,
            "exclusiveMaximum": low + generator.randint(2, 50),
        }
    return schema


def _number(generator: random.Random, depth: int) -> Schema:
    low = generator.randint(-50, 50) / 4
    return {"type": "number", "minimum": low, "maximum": low + generator.randint(1, 400) / 8}


def _plain(generator: random.Random, depth: int) -> Schema:
    return {"type": generator.choice(["boolean", "null", "integer", ["boolean", "null"]])}
