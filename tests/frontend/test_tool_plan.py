"""What tools mean for prompt, grammar and reading, for models of every format."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from tokenizers import AddedToken

from quire.constrain import GrammarCompiler, GrammarState
from quire.errors import InvalidRequestError
from quire.frontend.chat_template import ChatTemplate
from quire.frontend.gguf_tokenizer import read_gguf_tokenizer
from quire.frontend.tokenizer import Tokenizer
from quire.frontend.tool_calls import ToolPlan, ToolSupport
from quire.frontend.tool_calls.plan import detect_format
from quire.sampling_params import StructuredOutput
from tests.frontend.helpers import byte_level_metadata, train_byte_level
from tests.frontend.parsed_answers import parse
from tests.frontend.templates import MISTRAL, QWEN

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather somewhere.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "unit": {"$ref": "#/$defs/unit"}},
            "required": ["city"],
            "$defs": {"unit": {"enum": ["C", "F"]}},
        },
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
ASK = [{"role": "user", "content": "How is the weather?"}]
LLAMA3 = '{% if tools %}{{ tools | tojson }} {"name": …, "parameters": …}{% endif %}<|python_tag|> tool_calls ipython'
MISTRAL3 = "{% if tools %}{{ tools | tojson }}{% endif %}[TOOL_CALLS] tool_calls"
TEKKEN = MISTRAL3 + "[ARGS]"
DEEPSEEK = (
    "{% for m in messages %}{{ m.content }}{% endfor %}<｜tool▁calls▁begin｜> tool_calls ```json"
)
DEEPSEEK31 = "{% for m in messages %}{{ m.content }}{% endfor %}<｜tool▁calls▁begin｜> tool_calls"
PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)


def make_tokenizer(template: str, special: tuple[str, ...] = ()) -> Tokenizer:
    parts = read_gguf_tokenizer(byte_level_metadata(train_byte_level("qwen2"), "qwen2"))
    parts.backend.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in special]
    )
    return Tokenizer(
        replace(
            parts, vocab_size=parts.backend.get_vocab_size(), chat_templates={"default": template}
        )
    )


class Grammars:
    """Judges whole answers by a plan's grammar."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids)

    def judge(self, structured: StructuredOutput | None, text: str) -> str:
        """refused, open (more must follow) or whole."""
        assert structured is not None
        state = GrammarState(self.compiler.compile(structured))
        for token_id in self.tokenizer.encode_plain(text):
            if not state.advance(token_id):
                return "refused"
        return "whole" if state.may_end or state.is_finished else "open"


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    found = Grammars(make_tokenizer(QWEN))
    yield found
    found.compiler.close()


def plan(template: str, special: tuple[str, ...] = (), **options: Any) -> ToolPlan:
    tools = options.pop("tools", [WEATHER, NOW])
    return ToolSupport(make_tokenizer(template, special)).plan(ASK, tools, **options)


CALLS = {
    QWEN: '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>',
    LLAMA3: '{"name": "weather", "parameters": {"city": "Rome"}}',
    MISTRAL3: '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Rome"}}]',
    TEKKEN: '[TOOL_CALLS]weather[ARGS]{"city": "Rome"}',
    DEEPSEEK: "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n"
    '```json\n{"city": "Rome"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    DEEPSEEK31: "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>"
    '{"city": "Rome"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
}
FORMATS = {
    **{"hermes": QWEN, "llama3": LLAMA3, "mistral": MISTRAL3, "tekken": TEKKEN},
    **{"deepseek": DEEPSEEK, "deepseek 3.1": DEEPSEEK31},
}


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (QWEN, "hermes"),
        (LLAMA3, "llama3"),
        (MISTRAL3, "mistral"),
        (TEKKEN, "mistral"),
        (DEEPSEEK, "deepseek"),
        (DEEPSEEK31, "deepseek"),
        (PLAIN, "hermes"),
        (MISTRAL, "hermes"),
        ("{{ tools }} <tool_call><function=name><parameter=x>", None),
        ("{{ tools }} in some way of its own", None),
    ],
)
def test_the_template_tells_the_format(template: str, expected: str | None) -> None:
    assert detect_format(template) == expected


@pytest.mark.parametrize("name", FORMATS)
def test_a_required_call_is_forced_and_found(name: str, grammars: Grammars) -> None:
    template = FORMATS[name]
    forced = plan(template, choice="required")
    structured = forced.constrain(None)
    call = CALLS[template]
    assert grammars.judge(structured, call) == "whole"
    assert grammars.judge(structured, "Let me see") == "refused"
    assert grammars.judge(structured, call.replace("weather", "other")) == "refused"
    assert grammars.judge(structured, call.replace("city", "town")) == "refused"
    assert grammars.judge(structured, call.replace('"Rome"', "3")) == "refused"
    parser = forced.new_parser()
    assert parser is not None
    (found,) = parse(parser, call).calls
    assert (found.name, json.loads(found.arguments)) == ("weather", {"city": "Rome"})


@pytest.mark.parametrize("name", FORMATS)
def test_a_named_call_is_that_one_and_one_only(name: str, grammars: Grammars) -> None:
    template = FORMATS[name]
    structured = plan(template, name="now").constrain(None)
    call = CALLS[template].replace("weather", "now").replace('{"city": "Rome"}', "{}")
    assert grammars.judge(structured, call) == "whole"
    assert grammars.judge(structured, CALLS[template]) == "refused"
    assert grammars.judge(structured, f"{call}\n{call}") == "refused"


def test_several_calls_unless_one_is_wanted(grammars: Grammars) -> None:
    call = CALLS[QWEN]
    assert (
        grammars.judge(plan(QWEN, choice="required").constrain(None), f"{call}\n{call}") == "whole"
    )
    single = plan(QWEN, choice="required", parallel=False).constrain(None)
    assert grammars.judge(single, f"{call}\n{call}") == "refused"


@pytest.mark.parametrize("name", FORMATS)
def test_strict_tools_leave_text_free_and_calls_bound(name: str, grammars: Grammars) -> None:
    template = FORMATS[name]
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}  # type: ignore[dict-item]
    free = plan(template, tools=[strict, NOW])
    structured = free.constrain(None)
    call = CALLS[template]
    assert grammars.judge(structured, "No tool needed: {it is} <fine>.") == "whole"
    assert grammars.judge(structured, call) == "whole"
    assert grammars.judge(structured, call.replace("city", "town")) == "refused"
    if template != LLAMA3:
        assert grammars.judge(structured, f"Let me look.\n{call}") == "whole"
    assert plan(template).constrain(None) is None  # nobody asked for strict
    assert free.ignored == ()


def test_calls_or_an_answer_in_json(grammars: Grammars) -> None:
    schema = StructuredOutput(
        json_schema={"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    )
    structured = plan(QWEN).constrain(schema)
    assert grammars.judge(structured, '{"x": 3}') == "whole"
    assert grammars.judge(structured, CALLS[QWEN]) == "whole"
    assert grammars.judge(structured, "Hello") == "refused"
    with pytest.raises(InvalidRequestError, match="can't be combined"):
        plan(QWEN).constrain(StructuredOutput(regex="a+"))


def test_what_the_prompt_began_to_think_is_thought_to_its_end(grammars: Grammars) -> None:
    forced = plan(QWEN, choice="required").constrain(None, inside_reasoning=True)
    assert grammars.judge(forced, f"Hm, {{what}} now?\n</think>\n\n{CALLS[QWEN]}") == "whole"
    assert grammars.judge(forced, "Hm, still thinking") == "open"
    assert grammars.judge(forced, "Hm.\n</think>\n\nHello") == "refused"
    without = plan(QWEN, tools=None)
    answer = without.constrain(StructuredOutput(json_object=True), inside_reasoning=True)
    assert grammars.judge(answer, 'Hm.\n</think>\n\n{"a": 1}') == "whole"
    choice = without.constrain(StructuredOutput(choice=("yes", "no")), inside_reasoning=True)
    assert grammars.judge(choice, "Hm.</think>yes") == "whole"
    with pytest.raises(InvalidRequestError, match="reasoning"):
        without.constrain(StructuredOutput(regex="a"), inside_reasoning=True)


def test_a_mark_that_is_a_control_token_goes_into_the_prompt(grammars: Grammars) -> None:
    for template, special, answer in (
        (MISTRAL3, ("[TOOL_CALLS]",), ' [{"name": "now", "arguments": {}}]'),
        (TEKKEN, ("[TOOL_CALLS]", "[ARGS]"), "now{}"),
    ):
        forced = plan(template, special, choice="required")
        assert forced.suffix(None) == "[TOOL_CALLS]"
        assert forced.needs_special_tokens
        assert grammars.judge(forced.constrain(None), answer) == "whole"
        parser = forced.new_parser()
        assert parser is not None
        assert [call.name for call in parse(parser, answer).calls] == ["now"]
        assert len(forced.new_call_id()) == 9
        assert plan(template, special).suffix(None) == ""
    strict = {"type": "function", "function": {"name": "now", "strict": True}}
    unheeded = plan(MISTRAL3, ("[TOOL_CALLS]",), tools=[strict])
    assert unheeded.constrain(None) is None
    assert unheeded.ignored == ("tools.function.strict",)


def test_without_tools_text_is_text() -> None:
    for one in (plan(QWEN, tools=None), plan(QWEN, tools=[]), plan(QWEN, choice="none")):
        assert one.new_parser() is None
        assert one.template_tools is None
        assert one.constrain(None) is None


@pytest.mark.parametrize(
    ("tools", "options", "field"),
    [
        ([{"type": "web_search"}], {}, "tools[0].type"),
        ([{"type": "function"}], {}, "tools[0].function"),
        ([{"type": "function", "function": {"name": "a b"}}], {}, "tools[0].function.name"),
        ([{"type": "function", "function": {"name": "a" * 200}}], {}, "tools[0].function.name"),
        ([NOW, NOW], {}, "tools[1].function.name"),
        ([{"type": "function", "function": {"name": "a", "parameters": []}}], {}, "tools[0].function.parameters"),
        ([{"type": "function", "function": {"name": "a", "strict": 1}}], {}, "tools[0].function.strict"),
        ([NOW] * 200, {}, "tools"),
        ([NOW], {"name": "then"}, "tool_choice"),
        ([], {"choice": "required"}, "tool_choice"),
    ],
)  # fmt: skip
def test_tools_that_are_wrong_are_refused_by_field(
    tools: Any, options: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        plan(QWEN, tools=tools, **options)
    assert caught.value.field == field


def test_schemas_that_are_too_long_are_refused_by_name() -> None:
    schema = {
        "type": "object",
        "properties": {"x": {"enum": ["y" * 1000 + str(i) for i in range(300)]}},
    }
    made = plan(
        QWEN,
        tools=[{"type": "function", "function": {"name": "a", "parameters": schema}}],
        choice="required",
    )
    with pytest.raises(InvalidRequestError, match="at most 256 KiB") as caught:
        made.constrain(None)
    assert caught.value.field == "tools"


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="format not known"):
        plan("{{ tools }} tool_calls in some way of its own")


def test_a_template_that_knows_no_tools_is_told_in_words() -> None:
    tokenizer = make_tokenizer(PLAIN)
    messages = [
        *ASK,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "1",
                    "type": "function",
                    "function": {"name": "weather", "arguments": '{"city": "Rome"}'},
                },
                {"id": "2", "type": "function", "function": {"name": "now", "arguments": ""}},
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": "sunny"},
        {"role": "tool", "tool_call_id": "2", "content": [{"type": "text", "text": "noon"}]},
    ]
    support = ToolSupport(tokenizer)
    made = support.plan(messages, [WEATHER])
    assert made.template_tools is None
    prompt = ChatTemplate.from_tokenizer(tokenizer).render(made.messages)
    assert prompt.index('"name": "weather"') < prompt.index("How is the weather?")
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>' in prompt
    assert '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>' in prompt
    assert (
        "<tool_response>\nsunny\n</tool_response>\n<tool_response>\nnoon\n</tool_response>"
        in prompt
    )
    # Also when the tools are gone: the calls are part of the conversation.
    assert "sunny" in ChatTemplate.from_tokenizer(tokenizer).render(support.plan(messages).messages)
    with_system = support.plan([{"role": "system", "content": "Be kind."}, *ASK], [WEATHER])
    assert [message["role"] for message in with_system.messages] == ["system", "user"]
    assert with_system.messages[0]["content"].startswith("Be kind.\n\n")


@pytest.mark.parametrize(
    ("call", "field"),
    [
        ({"function": {"arguments": "{}"}}, "messages[0].tool_calls[0].function.name"),
        (
            {"function": {"name": "a", "arguments": "{"}},
            "messages[0].tool_calls[0].function.arguments",
        ),
        ("what", "messages[0].tool_calls[0].function.name"),
    ],
)
def test_calls_that_can_not_be_written_out_are_refused(call: Any, field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        ToolSupport(make_tokenizer(PLAIN)).plan(
            [{"role": "assistant", "content": "", "tool_calls": [call]}]
        )
    assert caught.value.field == field
