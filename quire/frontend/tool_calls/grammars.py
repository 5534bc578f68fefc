"""Grammars that make an answer consist of well-formed calls whose arguments follow the tools'
schemas.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.constrain.guidance import JSON_STYLE
from quire.errors import InvalidRequestError
from quire.frontend.reasoning import END as REASONING_END
from quire.frontend.strict_schema import close_objects
from quire.frontend.tool_calls import harmony
from quire.frontend.tool_calls.tools import Tool
from quire.sampling_params import MAX_GRAMMAR, StructuredOutput

MAX_CALLS = 16
"""In one constrained answer: a small model that may go on often never stops."""


@dataclass(frozen=True, slots=True)
class CallShape:
    """How a format writes calls, without what the prompt holds already. `NAME` stands for the
    tool's name.
    """

    before: str
    begin: str
    end: str
    between: str
    after: str
    several: bool = True
    """Whether one answer can hold several calls as far as a grammar can say: control tokens are
    beyond it.
    """


def forced_calls(
    shape: CallShape, tools: Sequence[Tool], parallel: bool, inside_reasoning: bool
) -> StructuredOutput:
    """At least one call, and nothing else (but the rest of the reasoning that the prompt has
    begun).
    """
    return _grammar(["calls"], _calls(shape, tools, parallel), inside_reasoning)


def calls_or_answer(
    shape: CallShape,
    tools: Sequence[Tool],
    parallel: bool,
    answer: StructuredOutput,
    inside_reasoning: bool,
) -> StructuredOutput:
    """Calls, or an answer of the form that was asked for."""
    lines = [*_calls(shape, tools, parallel), f"answer: {_json_rule(answer)}"]
    return _grammar(["calls", "answer"], lines, inside_reasoning)


def calls_in_text(shape: CallShape, mark: str, tools: Sequence[Tool]) -> StructuredOutput:
    """Any text, in which whatever follows the mark is a call."""
    opening = shape.before + shape.begin
    assert opening.startswith(mark)
    lines = [
        "start: tagged* TEXT",
        f"tagged: lead {_text(opening[len(mark) :].partition('NAME')[0])} call_rest",
        f"lead[lazy]: TEXT {_text(mark)}",
        "TEXT: /(.|\\n)*/",
        f"call_rest: {_alternatives('rest', tools)}",
    ]
    for index, tool in enumerate(tools):
        middle = shape.begin.partition("NAME")[2]
        lines.append(
            f"rest_{index}: {_text(tool.name + middle)} {_schema(tool)} {_text(shape.end + shape.after)}"
        )
    return _structured(lines)


def calls_or_text(shape: CallShape, tools: Sequence[Tool], parallel: bool) -> StructuredOutput:
    """For calls without a mark: an answer that begins like one is one; any other text is free."""
    lines = [*_calls(shape, tools, parallel), "text: PLAIN?", "PLAIN: /[^{\\s](.|\\n)*/"]
    return _grammar(["calls", "text"], lines, inside_reasoning=False)


def after_reasoning(structured: StructuredOutput) -> StructuredOutput:
    """The form applies to what follows the reasoning that the prompt has begun."""
    if not can_follow(structured):
        raise InvalidRequestError(
            "structured",
            "a regex or grammar can't follow this model's reasoning: use a JSON schema or a choice",
        )
    return _grammar(["answer"], [f"answer: {_rule(structured)}"], inside_reasoning=True)


def in_channels(
    tools: Sequence[Tool], forced: bool, answer: StructuredOutput | None
) -> StructuredOutput:
    """Harmony: reasoning if the model likes, then a call of one of the tools or (unless `forced`)
    an answer of the form that was asked for, behind headers of control tokens. Of several calls at
    once its models know nothing.
    """
    said = '"analysis"' if forced else '("analysis" | "commentary")'
    lines = [
        f'said: {harmony.CHANNEL} {said} {harmony.MESSAGE} TEXT {harmony.END} {harmony.START} "assistant"',
        "TEXT: /(.|\\n)*/",
    ]
    for index, tool in enumerate(tools):
        header = f'{_text(f"commentary to=functions.{tool.name} ")} {harmony.CONSTRAIN} "json"'
        lines.append(f"call_{index}: {harmony.CHANNEL} {header} {harmony.MESSAGE} {_schema(tool)}")
    starts = [f"call_{index}" for index in range(len(tools))]
    if not forced:
        rule = "TEXT" if answer is None else _rule(answer)
        lines += [f'final: {harmony.CHANNEL} "final" {harmony.MESSAGE} answer', f"answer: {rule}"]
        starts.append("final")
    return _structured([f"start: said* ({' | '.join(starts)})", *lines], harmony.CONTROL_TOKENS)


def can_follow(structured: StructuredOutput) -> bool:
    """Whether grammars here can have something come before it."""
    return structured.choice is not None or is_json(structured)


def is_json(structured: StructuredOutput) -> bool:
    """Whether it asks for JSON, which grammars here can be put around."""
    return structured.json_object or structured.json_schema is not None


def _grammar(
    starts: Sequence[str], lines: Sequence[str], inside_reasoning: bool
) -> StructuredOutput:
    start = " | ".join(starts)
    head = [f"start: {start}"]
    if inside_reasoning:
        head = [
            f"start: thought ({start})",
            'thought: rest_of_thought "\\n\\n"?',
            f"rest_of_thought[lazy]: THOUGHT {_text(REASONING_END)}",
            "THOUGHT: /(.|\\n)*/",
        ]
    return _structured([*head, *lines])


def _structured(lines: Sequence[str], control_tokens: tuple[str, ...] = ()) -> StructuredOutput:
    try:
        return StructuredOutput(grammar="\n".join(lines) + "\n", control_tokens=control_tokens)
    except InvalidRequestError:  # of what can be wrong with it here, the length is left
        raise InvalidRequestError(
            "tools",
            f"their schemas are too long: together at most {MAX_GRAMMAR // 1024} KiB can be followed",
        ) from None


def _calls(shape: CallShape, tools: Sequence[Tool], parallel: bool) -> list[str]:
    more = (
        f" ({_text(shape.between)} call){{0,{MAX_CALLS - 1}}}" if parallel and shape.several else ""
    )
    lines = [
        f"calls: {_text(shape.before)} call{more} {_text(shape.after)}",
        f"call: {_alternatives('call', tools)}",
    ]
    for index, tool in enumerate(tools):
        begin = _text(shape.begin.replace("NAME", tool.name))
        lines.append(f"call_{index}: {begin} {_schema(tool)} {_text(shape.end)}")
    return lines


def _alternatives(prefix: str, tools: Sequence[Tool]) -> str:
    return " | ".join(f"{prefix}_{index}" for index in range(len(tools)))


def _schema(tool: Tool) -> str:
    schema = {"type": "object", **tool.parameters}
    return _json(close_objects(schema) if tool.strict else schema)


def _rule(structured: StructuredOutput) -> str:
    """What `can_follow` allows, as the right side of a rule."""
    return (
        _json_rule(structured)
        if structured.choice is None
        else " | ".join(map(_text, structured.choice))
    )


def _json_rule(structured: StructuredOutput) -> str:
    if structured.json_object:
        return _json({"type": "object"})
    assert isinstance(structured.json_schema, str)
    try:
        schema = json.loads(structured.json_schema)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError("structured.json_schema", f"is not JSON: {error}") from None
    if not isinstance(schema, dict):
        raise InvalidRequestError("structured.json_schema", "must be a JSON object")
    return _json(schema)


def _json(schema: Mapping[str, Any]) -> str:
    try:
        return "%json " + json.dumps({"x-guidance": JSON_STYLE, **schema}, allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError("tools", f"a schema can't be written as JSON: {error}") from None


def _text(text: str) -> str:
    """A literal in Lark's notation; nothing where there is no text."""
    return json.dumps(text, ensure_ascii=False) if text else ""
