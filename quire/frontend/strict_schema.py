"""JSON schemas with `strict: true`: objects are closed, as OpenAI's are. Without it a schema means
what JSON Schema says, by which an object may have properties that nobody named.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_ONE = ("items", "additionalProperties", "unevaluatedProperties", "contains", "then", "else")
"""Keywords whose value is a schema. What stands under `not` and `if` is a condition: closing would
turn it around.
"""
_LISTS = ("anyOf", "oneOf", "prefixItems")
_MAPPINGS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_COMBINING = ("allOf", "anyOf", "oneOf", "$ref", "then", "else", "dependentSchemas")
"""Beside one of these an object's properties may be named elsewhere: closing it would forbid them."""


def close_objects(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema with `additionalProperties: false` in every object that says nothing about them."""
    combined = {ref for part in _walk(schema) for ref in _combined_refs(part)}
    return _closed(schema, "#", combined, True)


def _closed(
    schema: Mapping[str, Any], path: str, combined: set[str], may_close: bool
) -> dict[str, Any]:
    closed = dict(schema)
    for key in _ONE:
        if isinstance(schema.get(key), Mapping):
            closed[key] = _closed(
                schema[key], f"{path}/{key}", combined, key not in ("then", "else")
            )
    for key in _LISTS:
        if isinstance(schema.get(key), list):
            closed[key] = _closed_list(
                schema[key], f"{path}/{key}", combined, "properties" not in schema
            )
    if isinstance(schema.get("allOf"), list):
        alone = len(schema["allOf"]) == 1 and "properties" not in schema
        closed["allOf"] = _closed_list(schema["allOf"], f"{path}/allOf", combined, alone)
    for key in _MAPPINGS:
        if isinstance(schema.get(key), Mapping):
            own = key != "dependentSchemas"
            closed[key] = {
                name: _closed(part, f"{path}/{key}/{name}", combined, own)
                if isinstance(part, Mapping)
                else part
                for name, part in schema[key].items()
            }
    says_enough = ("additionalProperties", "unevaluatedProperties", *_COMBINING)
    if (
        may_close
        and _is_object(schema)
        and path not in combined
        and not any(key in schema for key in says_enough)
    ):
        closed["additionalProperties"] = False
    return closed


def _closed_list(parts: list[Any], path: str, combined: set[str], may_close: bool) -> list[Any]:
    return [
        _closed(part, f"{path}/{place}", combined, may_close) if isinstance(part, Mapping) else part
        for place, part in enumerate(parts)
    ]


def _is_object(schema: Mapping[str, Any]) -> bool:
    kind = schema.get("type", "object" if "properties" in schema else None)
    return kind == "object" or (isinstance(kind, list) and "object" in kind)


def _walk(schema: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(schema, Mapping):
        yield schema
        for part in schema.values():
            yield from _walk(part)
    elif isinstance(schema, list):
        for part in schema:
            yield from _walk(part)


def _combined_refs(schema: Mapping[str, Any]) -> Iterator[str]:
    """Definitions that a schema adds to others, so that none of them holds all properties."""
    several = schema.get("allOf")
    parts = (
        several
        if isinstance(several, list) and (len(several) > 1 or "properties" in schema)
        else []
    )
    if "properties" in schema:
        parts = [*parts, schema]
    for part in parts:
        if isinstance(part, Mapping) and isinstance(part.get("$ref"), str):
            yield part["$ref"]
