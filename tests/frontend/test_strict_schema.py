"""Closed objects of strict schemas."""

from __future__ import annotations

from typing import Any

from quire.frontend.strict_schema import close_objects

CLOSED = {"additionalProperties": False}


def obj(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


def test_every_object_is_closed() -> None:
    schema = {
        **obj(
            a=obj(b={"type": "array", "items": obj(c={"type": "string"})}), d={"$ref": "#/$defs/e"}
        ),
        "$defs": {"e": {"anyOf": [obj(x={}), {"type": "null"}, {"type": ["object", "null"]}]}},
    }
    closed = close_objects(schema)
    assert closed["additionalProperties"] is False
    assert closed["properties"]["a"]["additionalProperties"] is False
    assert closed["properties"]["a"]["properties"]["b"]["items"]["additionalProperties"] is False
    assert closed["$defs"]["e"]["anyOf"][0] == obj(x={}) | CLOSED
    assert closed["$defs"]["e"]["anyOf"][2]["additionalProperties"] is False
    assert "additionalProperties" not in schema  # the caller's own is left alone


def test_what_a_schema_says_itself_counts() -> None:
    for value in (True, {"type": "integer"}, False):
        assert (
            close_objects({"type": "object", "additionalProperties": value})["additionalProperties"]
            == value
        )
    mapping = {"type": "object", "additionalProperties": obj(a={})}
    assert close_objects(mapping)["additionalProperties"] == obj(a={}) | CLOSED


def test_data_is_no_schema() -> None:
    schema = {
        "enum": [{"type": "object"}],
        "default": {"type": "object"},
        "const": {"type": "object"},
    }
    assert close_objects(schema) == schema
    condition = {"not": obj(a={}), "if": obj(b={})}
    assert close_objects(condition) == condition


def test_parts_that_add_up_stay_open() -> None:
    """Each would forbid what the others name."""
    parts = {"allOf": [obj(a={}), {"$ref": "#/$defs/b"}], "$defs": {"b": obj(b=obj())}}
    closed = close_objects(parts)
    assert closed["allOf"] == parts["allOf"]
    assert closed["$defs"]["b"] == obj(b=obj() | CLOSED)
    alone = close_objects({"allOf": [{"$ref": "#/$defs/b"}], "$defs": {"b": obj(b={})}})
    assert alone["$defs"]["b"]["additionalProperties"] is False
    beside = {**obj(a={}), "anyOf": [obj(b={}), obj(c={})]}
    assert close_objects(beside) == beside
