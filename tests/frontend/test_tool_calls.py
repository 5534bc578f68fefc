"""Tool-call parsers: what they find, what they leave alone, and that neither cuts nor hostile text
matter.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from quire.frontend.tool_calls.deepseek import DeepSeekParser
from quire.frontend.tool_calls.hermes import HermesParser
from quire.frontend.tool_calls.llama3 import Llama3Parser
from quire.frontend.tool_calls.mistral import MistralParser
from quire.frontend.tool_calls.parser import ArgumentsDelta, CallStart, ContentDelta, ToolCallParser
from tests.frontend.parsed_answers import ParsedAnswer, collect, parse
from tests.long_runs import examples

NAMES = ("get_weather", "add", "a")
PARSERS: dict[str, Callable[[], ToolCallParser]] = {
    "hermes": HermesParser,
    "hermes, forced": lambda: HermesParser(after_mark=True),
    "llama3": lambda: Llama3Parser(NAMES),
    "mistral": MistralParser,
    "mistral, forced": lambda: MistralParser(after_mark=True),
    "deepseek": DeepSeekParser,
}
Calls = list[tuple[str, str]]


def found(parser: ToolCallParser, text: str) -> tuple[str, Calls]:
    answer = parse(parser, text)
    return answer.content, [(call.name, call.arguments) for call in answer.calls]


def in_pieces(parser: ToolCallParser, pieces: Sequence[str]) -> ParsedAnswer:
    return collect([delta for piece in pieces for delta in parser.feed(piece)] + parser.finish())


CALL = '<tool_call>\n{"name": "add", "arguments": {"x": 1, "y": [2, {"z": "}"}]}}\n</tool_call>'
ARGUMENTS = '{"x": 1, "y": [2, {"z": "}"}]}'


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (
            "Just text, with < and > and <tool> in it.  ",
            "Just text, with < and > and <tool> in it.  ",
            [],
        ),
        (CALL, "", [("add", ARGUMENTS)]),
        (f"I will add.\n\n{CALL}\n", "I will add.", [("add", ARGUMENTS)]),
        (f"{CALL}\n{CALL}\n\n and so on", "\n\n and so on", [("add", ARGUMENTS)] * 2),
        (
            '<tool_call>{"arguments": {"x": 1}, "id": [3], "name": "add"}</tool_call>',
            "",
            [("add", '{"x": 1}')],
        ),
        ('<tool_call>{"name": "a"}</tool_call>', "", [("a", "{}")]),
        ('<tool_call>{"name": "a", "arguments": null}</tool_call>', "", [("a", "{}")]),
        (
            '<tool_call>{"name": "a", "arguments": "{\\"x\\": 1}"}</tool_call>',
            "",
            [("a", '{"x": 1}')],
        ),
        ('<tool_call>{"name": "a", "parameters": {"x": 1}}</tool_call>', "", [("a", '{"x": 1}')]),
        # Fake tags inside strings are part of them.
        (
            '<tool_call>{"name": "a", "arguments": {"x": "</tool_call> <tool_call> \\" }"}}</tool_call>',
            "",
            [("a", '{"x": "</tool_call> <tool_call> \\" }"}')],
        ),
        # Cut off: a call whose arguments have begun is one, anything before that is text.
        ('<tool_call>{"name": "a", "arguments": {"x": "y', "", [("a", '{"x": "y')]),
        ('<tool_call>{"name": "a", "argum', '<tool_call>{"name": "a", "argum', []),
        ('<tool_call>{"name": "a", "arguments": {}}</tool_', "", [("a", "{}")]),
        ("Hi <tool_ca", "Hi <tool_ca", []),
        # No calls, so text.
        ("<tool_call>nonsense</tool_call>", "<tool_call>nonsense</tool_call>", []),
        (
            '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
            '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
            [],
        ),
        ('<tool_call>["name"]</tool_call>', '<tool_call>["name"]</tool_call>', []),
        (
            '<tool_call>{"name": "a", "arguments": [1]}',
            '<tool_call>{"name": "a", "arguments": [1]}',
            [],
        ),
        (
            '<tool_call>{"name": "\\ud800", "arguments": {}}',
            '<tool_call>{"name": "\\ud800", "arguments": {}}',
            [],
        ),
        (f"<tool_call><tool_call>{CALL}", "<tool_call><tool_call>", [("add", ARGUMENTS)]),
        # The closing tag forgotten, or a bracket too many.
        ('<tool_call>{"name": "a", "arguments": {}}' + CALL, "", [("a", "{}"), ("add", ARGUMENTS)]),
        ('<tool_call>{"name": "a", "arguments": {}}}</tool_call>', "}</tool_call>", [("a", "{}")]),
        # Arguments that are no JSON are passed on as they are.
        ('<tool_call>{"name": "a", "arguments": {x: 1}}</tool_call>', "", [("a", "{x: 1}")]),
    ],
)
def test_hermes(text: str, content: str, calls: Calls) -> None:
    assert found(HermesParser(), text) == (content, calls)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('{"name": "add", "parameters": {"x": 1}}', "", [("add", '{"x": 1}')]),
        (' \n{"name": "add", "parameters": {}}\n', "", [("add", "{}")]),
        ('<|python_tag|>{"name": "add", "parameters": {}}', "", [("add", "{}")]),
        ('Sure. <|python_tag|>{"name": "add", "parameters": {}}', "Sure.", [("add", "{}")]),
        (
            '{"name": "add", "parameters": {"x": ";"}}; {"name": "a", "arguments": {}}',
            "",
            [("add", '{"x": ";"}'), ("a", "{}")],
        ),
        # An answer in JSON that is no call of any tool there is.
        ('{"name": "Bob", "parameters": {}}', '{"name": "Bob", "parameters": {}}', []),
        ('{"name": "add"}', '{"name": "add"}', []),
        ('{"answer": 3}', '{"answer": 3}', []),
        ('Text {"name": "add", "parameters": {}}', 'Text {"name": "add", "parameters": {}}', []),
        ('{"name": "add", "parameters": {}}; and?', "; and?", [("add", "{}")]),
        ('{"name": "add", "parameters": {"x', "", [("add", '{"x')]),
    ],
)
def test_llama3(text: str, content: str, calls: Calls) -> None:
    assert found(Llama3Parser(NAMES), text) == (content, calls)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('[TOOL_CALLS] [{"name": "add", "arguments": {"x": "]"}}]', "", [("add", '{"x": "]"}')]),
        (
            'Well. [TOOL_CALLS][{"name": "add", "arguments": {}, "id": "abcdefghi"}, {"arguments": {}, "name": "a"}]',
            "Well.",
            [("add", "{}"), ("a", "{}")],
        ),
        (
            '[TOOL_CALLS]add[ARGS]{"x": "[TOOL_CALLS]"}[TOOL_CALLS]a[ARGS]{}',
            "",
            [("add", '{"x": "[TOOL_CALLS]"}'), ("a", "{}")],
        ),
        ("[TOOL_CALLS]add[CALL_ID]abc[ARGS] {} done", " done", [("add", "{}")]),
        ("[TOOL_CALLS]add{}", "", [("add", "{}")]),
        ('[TOOL_CALLS]{"name": "a", "arguments": {}}', "", [("a", "{}")]),
        ("[TOOL_CALLS] []", "[TOOL_CALLS] []", []),
        ("[TOOL_CALLS]", "[TOOL_CALLS]", []),
        ("[TOOL_CALLS]what? no", "[TOOL_CALLS]what? no", []),
        ("[TOOL_CALLS]add[ARGS]nothing", "[TOOL_CALLS]add[ARGS]nothing", []),
        ("[TOOL_CALLS]" + "n" * 300 + "[ARGS]{}", "[TOOL_CALLS]" + "n" * 300 + "[ARGS]{}", []),
        ('[TOOL_CALLS][{"name": "a", "arguments": {}}, oh', ", oh", [("a", "{}")]),
    ],
)
def test_mistral(text: str, content: str, calls: Calls) -> None:
    assert found(MistralParser(), text) == (content, calls)


def fenced(name: str, arguments: str = ARGUMENTS) -> str:
    """As DeepSeek-V3 and R1 write a call."""
    return f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>"


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("Text with <｜tool▁ and ``` in it. ", "Text with <｜tool▁ and ``` in it. ", []),
        (f"<｜tool▁calls▁begin｜>{fenced('add')}<｜tool▁calls▁end｜>", "", [("add", ARGUMENTS)]),
        # as the template ends it
        (f"Well.\n<｜tool▁calls▁begin｜>{fenced('add')}", "Well.", [("add", ARGUMENTS)]),
        (
            f"<｜tool▁calls▁begin｜>{fenced('a', '{}')}\n{fenced('add')}<｜tool▁calls▁end｜> So.",
            " So.",
            [("a", "{}"), ("add", ARGUMENTS)],
        ),
        # V3.1: no kind, no fence.
        (
            '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>a<｜tool▁sep｜>{"x": 1}<｜tool▁call▁end｜>'
            "<｜tool▁call▁begin｜>add<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            "",
            [("a", '{"x": 1}'), ("add", "{}")],
        ),
        ("<｜tool▁calls▁begin｜>nothing", "<｜tool▁calls▁begin｜>nothing", []),
        (
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>a b",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>a b",
            [],
        ),
        # cut in the closing mark
        (f"<｜tool▁calls▁begin｜>{fenced('a', '{}')[:-3]}", "", [("a", "{}")]),
        (f"<｜tool▁calls▁begin｜>{fenced('a', '{}')} and more", " and more", [("a", "{}")]),
    ],
)
def test_deepseek(text: str, content: str, calls: Calls) -> None:
    assert found(DeepSeekParser(), text) == (content, calls)


def test_behind_a_forced_mark_the_call_begins_at_once() -> None:
    assert found(DeepSeekParser(after_mark=True), fenced("a", "{}")) == ("", [("a", "{}")])
    assert found(HermesParser(after_mark=True), '\n{"name": "a", "arguments": {}}') == (
        "",
        [("a", "{}")],
    )
    assert found(MistralParser(after_mark=True), ' [{"name": "a", "arguments": {}}]') == (
        "",
        [("a", "{}")],
    )
    assert found(MistralParser(after_mark=True), "add{}") == ("", [("add", "{}")])


def test_a_call_is_told_while_it_is_being_written() -> None:
    parser = HermesParser()
    assert parser.feed('Hm <tool_call>{"name": "a", "arguments": ') == [ContentDelta("Hm")]
    assert parser.feed('{"x": "') == [CallStart(0, "a"), ArgumentsDelta(0, '{"x": "')]
    assert parser.feed("long ") == [ArgumentsDelta(0, "long ")]
    assert parser.feed('"}') == [ArgumentsDelta(0, '"}')]
    assert parser.feed("}</tool_call>") == parser.finish() == []


BITS = [
    "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>",
    "<｜tool▁", "function", "```", "json",
    "<tool_call>", "</tool_call>", "<tool_", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[TOOL", "<|python_tag|>", "<|py",
    '{"name": "a", "arguments": {"x": 1}}', '{"name": "add", "parameters": {"y": "</tool_call>"}}', '{"name": "a"}',
    '"', "\\", "{", "}", "[", "]", ",", ";", ":", " ", "\n", "null", "a", "é", "name", '"name"', '"arguments": ',
]  # fmt: skip
texts = st.lists(st.sampled_from(BITS), max_size=12).map("".join)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", PARSERS)
@settings(max_examples=examples(150))
@given(text=texts, data=st.data())
@example(text='<tool_call>{"name": "a", "arguments": {}}</tool_call>', data=None)
def test_pieces_give_what_the_whole_gives(name: str, text: str, data: st.DataObject | None) -> None:
    make = PARSERS[name]
    whole = parse(make(), text)
    assert in_pieces(make(), list(text)) == whole
    if data is not None:
        cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=4)))
        bounds = [0, *cuts, len(text)]
        assert in_pieces(make(), [text[a:b] for a, b in pairwise(bounds)]) == whole
    if not whole.calls and "forced" not in name:
        assert whole.content == text  # what was no call is given back, every character


@pytest.mark.few(2)
@pytest.mark.parametrize("name", PARSERS)
@settings(max_examples=30)
@given(
    st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
        st.text(max_size=12),
        max_size=3,
    ),
)
def test_arguments_survive_whatever_their_strings_hold(
    name: str, arguments: dict[str, str]
) -> None:
    value = {key: text.encode("utf-8", "replace").decode() for key, text in arguments.items()}
    value["tags"] = '</tool_call>[TOOL_CALLS]<|python_tag|>;]}"\\'
    written = json.dumps(value, ensure_ascii=False)
    call = f'{{"name": "add", "arguments": {written}}}'
    text = {
        "hermes": f"<tool_call>\n{call}\n</tool_call>",
        "hermes, forced": f"{call}\n</tool_call>",
        "llama3": call,
        "mistral": f"[TOOL_CALLS] [{call}]",
        "mistral, forced": f"add[ARGS]{written}",
        "deepseek": f"<｜tool▁calls▁begin｜>{fenced('add', written)}<｜tool▁calls▁end｜>",
    }[name]
    answer = in_pieces(PARSERS[name](), [text[i : i + 3] for i in range(0, len(text), 3)])
    assert [(one.name, json.loads(one.arguments)) for one in answer.calls] == [("add", value)]
    assert answer.content == ""


HOSTILE = {
    "opening tags": "<tool_call>",
    "half tags": "<tool_call",
    "brackets": '<tool_call>{"name":"a","arguments":{"x":',
    "nested": "[TOOL_CALLS][",
    "strings": '<tool_call>{"',
    "escapes": "\\",
    "spaces": " \n",
    "objects": '{"name":{"name":',
    "marks": "[TOOL_CALLS]a[CALL_ID]b",
    "long name": "[TOOL_CALLS]a" + "a" * 40,
    "python": "<|python_tag|>{",
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
    "deepseek calls": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>a<｜tool▁sep｜>{}```",
    "separators": '{"name": "a", "parameters": {}};',
}


@pytest.mark.few(8)
@pytest.mark.parametrize("name", PARSERS)
@pytest.mark.parametrize("kind", HOSTILE)
def test_work_grows_with_the_text_and_not_faster(name: str, kind: str) -> None:
    def cost(size: int) -> int:
        """Function calls, and the characters that are looked at again with the next piece."""
        text = (HOSTILE[kind] * (size // len(HOSTILE[kind]) + 1))[:size]
        parser = PARSERS[name]()
        count = 0

        def count_call(frame: object, event: str, argument: object) -> None:
            nonlocal count
            count += 1

        sys.setprofile(count_call)
        try:
            for start in range(0, size, 4):
                parser.feed(text[start : start + 4])
                count += len(parser._held)  # type: ignore[attr-defined]
            parser.finish()
        finally:
            sys.setprofile(None)
        return count

    assert cost(16_000) < 5 * cost(4_000)


@pytest.mark.few(8)
@pytest.mark.parametrize("name", PARSERS)
@pytest.mark.parametrize("kind", HOSTILE)
def test_megabytes_are_read(name: str, kind: str) -> None:
    text = HOSTILE[kind] * (2**20 // len(HOSTILE[kind]))
    answer = parse(PARSERS[name](), text)
    assert len(answer.content) + sum(len(call.arguments) for call in answer.calls) <= len(text)
