"""Conversations as OpenAI's clients send them, through templates as strict as those that models
come with.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from quire.errors import InvalidRequestError
from quire.frontend.chat_template import ChatTemplate
from quire.frontend.tool_calls import ToolSupport
from quire.frontend.tool_calls.template_needs import TemplateNeeds, find_needs
from tests.frontend.parsed_answers import parse
from tests.frontend.templates import QWEN
from tests.frontend.test_tool_plan import NOW, WEATHER, Grammars, make_tokenizer

# One call per message, told by the key being there; results under a role of their own.
ONE_CALL = """
{%- if tools is not none %}Environment: ipython. Answer {"name": …, "parameters": …}
{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {%- if message.tool_calls | length != 1 %}{{ raise_exception("one call at a time") }}{% endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<assistant>{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + '}' }}
    {%- elif message.role == 'tool' %}{{- '<ipython>' + ({"output": message.content} | tojson) }}
    {%- else %}{{- '<' + message.role + '>' + message.content }}
    {%- endif %}
{%- endfor %}<assistant>"""

# Ids of nine characters, turns that alternate unless they have the key; calls in a list right
# behind the mark.
SHORT_IDS = """
{%- for message in messages | rejectattr('role', 'equalto', 'tool') | selectattr('tool_calls', 'undefined') %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception("turns alternate") }}{% endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- if tools %}{{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{% endif %}
        {{- '[INST]' + message.content + '[/INST]' }}
    {%- elif message.tool_calls is defined %}
        {{- '[TOOL_CALLS][' }}
        {%- for call in message.tool_calls %}
            {%- if call.id | length != 9 %}{{ raise_exception("ids have nine characters") }}{% endif %}
            {{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' + ('' if loop.last else ', ') }}
        {%- endfor %}{{- ']' + eos_token }}
    {%- elif message.role == 'tool' %}
        {%- if message.tool_call_id | length != 9 %}{{ raise_exception("ids have nine characters") }}{% endif %}
        {{- '[TOOL_RESULTS]{"content": ' + message.content + ', "call_id": "' + message.tool_call_id + '"}' }}
    {%- else %}{{- message.content + eos_token }}
    {%- endif %}
{%- endfor %}"""

# Tools put together from their parts; results that name their function.
FULL_TOOLS = """
{%- for tool in tools or [] %}
    {{- tool.function.name + ': ' + tool.function.description }}
    {%- for name, field in tool.function.parameters.properties | items %}{{- ' ' + name }}{% endfor %}
    {{- ' <tool_call>{"name": …, "arguments": …}</tool_call>\\n' }}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'assistant' and message.tool_calls is defined %}
        {%- for call in message.tool_calls %}
            {{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' }}
            {{- (call.function.arguments | tojson) + '}</tool_call>' }}
        {%- endfor %}
    {%- elif message.role == 'tool' %}
        {%- if message.name is not defined %}{{ raise_exception("a result names its function") }}{% endif %}
        {{- '<tool_response>{"name": "' + message.name + '", "content": ' + (message.content | tojson) + '}' }}
    {%- else %}{{- '<' + message.role + '>' + message.content }}
    {%- endif %}
{%- endfor %}"""

ASK = {"role": "user", "content": "How is the weather?"}
ROME = {
    "id": "call_0f3a",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Rome"}'},
}
TIME = {"id": "Nine12345", "type": "function", "function": {"name": "now"}}
SUNNY = {"role": "tool", "tool_call_id": "call_0f3a", "content": "sunny"}
NOON = {"role": "tool", "tool_call_id": "Nine12345", "content": "noon"}
BOTH = {"role": "assistant", "content": None, "tool_calls": [ROME, TIME]}
STRICT = [ONE_CALL, SHORT_IDS, FULL_TOOLS]


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    found = Grammars(make_tokenizer(QWEN))
    yield found
    found.compiler.close()


def shown(template: str, messages: list[Any], tools: Any = (WEATHER, NOW)) -> str:
    tokenizer = make_tokenizer(template)
    plan = ToolSupport(tokenizer).plan(messages, tools)
    return ChatTemplate.from_tokenizer(tokenizer).render(plan.messages, tools=plan.template_tools)


@pytest.mark.parametrize(
    ("template", "needs"),
    [
        (ONE_CALL, TemplateNeeds(one_call=True)),
        (SHORT_IDS, TemplateNeeds(short_ids=True)),
        (FULL_TOOLS, TemplateNeeds(full_tools=True)),
        (QWEN, TemplateNeeds()),
        ("{{ tool_calls }}{{ raise_exception('never') }}", TemplateNeeds()),
        ("{% tool_calls", TemplateNeeds()),
    ],
)
def test_what_a_template_needs_is_found_by_trying(template: str, needs: TemplateNeeds) -> None:
    assert find_needs(template, {"eos_token": "</s>"}) == needs


@pytest.mark.few(3)
@pytest.mark.parametrize("template", [*STRICT, QWEN])
@pytest.mark.parametrize("tools", [None, (WEATHER, NOW)])
def test_calls_that_are_null_are_none(template: str, tools: Any) -> None:
    """As a message of the `openai` package comes back when it is sent as it was received."""
    for empty in (None, []):
        answer = {"role": "assistant", "content": "Hi.", "refusal": None, "tool_calls": empty}
        text = shown(template, [ASK, answer, ASK], tools)
        assert text == shown(template, [ASK, {"role": "assistant", "content": "Hi."}, ASK], tools)


def test_calls_made_at_once_are_shown_one_after_the_other() -> None:
    text = shown(ONE_CALL, [ASK, {**BOTH, "content": "Let me see."}, NOON, SUNNY, ASK])
    turns = text[text.index("<user>") :].split("<")[1:]
    assert turns == [
        "user>How is the weather?",
        'assistant>{"name": "now", "parameters": {}}',
        'ipython>{"output": "noon"}',
        'assistant>{"name": "weather", "parameters": {"city": "Rome"}}',
        'ipython>{"output": "sunny"}',
        "user>How is the weather?",
        "assistant>",
    ]
    # One without a result is not lost, and results of nobody's call neither.
    text = shown(ONE_CALL, [ASK, BOTH, SUNNY, ASK])
    assert (
        text.index("Rome")
        < text.index("sunny")
        < text.index('"now", "parameters"')
        < text.rindex("<user>")
    )
    assert "stray" in shown(
        ONE_CALL, [ASK, {"role": "tool", "tool_call_id": "x", "content": "stray"}]
    )


def test_a_model_of_one_call_at_a_time_is_asked_for_one(grammars: Grammars) -> None:
    plan = ToolSupport(make_tokenizer(ONE_CALL)).plan([ASK], [WEATHER, NOW], "required")
    call = '{"name": "now", "parameters": {}}'
    assert grammars.judge(plan.constrain(None), call) == "whole"
    assert grammars.judge(plan.constrain(None), f"{call}; {call}") == "refused"


def test_llamas_mark_is_read_but_never_asked_for(grammars: Grammars) -> None:
    """Its tokenizers have the mark as a control token; calls of a client's own functions come
    without it.
    """
    support = ToolSupport(make_tokenizer(ONE_CALL, ("<|python_tag|>",)))
    call = '{"name": "now", "parameters": {}}'
    forced = support.plan([ASK], [NOW], "required")
    assert forced.suffix(None) == ""
    assert grammars.judge(forced.constrain(None), call) == "whole"
    strict = {"type": "function", "function": {"name": "now", "strict": True}}
    free = support.plan([ASK], [strict])
    assert free.ignored == ()
    assert grammars.judge(free.constrain(None), "It is fine.") == "whole"
    assert grammars.judge(free.constrain(None), call.replace("now", "then")) == "refused"
    assert free.needs_special_tokens
    parser = free.new_parser()
    assert parser is not None
    assert [one.name for one in parse(parser, f"<|python_tag|>{call}").calls] == ["now"]


def test_ids_are_made_to_fit_and_still_belong_together() -> None:
    text = shown(SHORT_IDS, [ASK, BOTH, SUNNY, NOON])
    calls = json.loads(re.findall(r"\[TOOL_CALLS\](\[.*?\])<", text)[0])
    results = re.findall(r'"content": (\w+), "call_id": "(\w+)"', text)
    assert [(call["name"], call["arguments"]) for call in calls] == [
        ("weather", {"city": "Rome"}),
        ("now", {}),
    ]
    assert results == [("sunny", calls[0]["id"]), ("noon", calls[1]["id"])]
    assert re.fullmatch("[A-Za-z0-9]{9}", calls[0]["id"])
    assert calls[1]["id"] == "Nine12345"  # one that fits stays
    assert text == shown(SHORT_IDS, [ASK, BOTH, SUNNY, NOON])


def test_calls_stand_where_the_template_puts_them(grammars: Grammars) -> None:
    """With or without a space behind the mark."""
    for template, lead in (
        (SHORT_IDS, "[TOOL_CALLS]["),
        (SHORT_IDS.replace("S][", "S] ["), "[TOOL_CALLS] ["),
    ):
        plan = ToolSupport(make_tokenizer(template)).plan([ASK], [NOW], "required")
        assert (
            grammars.judge(plan.constrain(None), lead + '{"name": "now", "arguments": {}}]')
            == "whole"
        )
        parser = plan.new_parser()
        assert parser is not None
        written = lead + '{"name": "now", "arguments": {}, "id": "Nine12345"}]'
        assert [one.arguments for one in parse(parser, written).calls] == ["{}"]


def test_results_name_their_function_and_tools_are_whole() -> None:
    text = shown(FULL_TOOLS, [ASK, BOTH, SUNNY, NOON])
    assert "weather: The weather somewhere. city unit" in text
    assert "now:  <tool_call>" in text
    assert '<tool_response>{"name": "weather", "content": "sunny"}' in text
    assert '<tool_response>{"name": "now", "content": "noon"}' in text
    named = {**SUNNY, "name": "mine"}
    assert '{"name": "mine", "content": "sunny"}' in shown(FULL_TOOLS, [ASK, BOTH, named])


@pytest.mark.parametrize("template", STRICT)
def test_what_is_wrong_is_named_by_its_place_in_the_request(template: str) -> None:
    broken = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": "now", "arguments": "["}}],
    }
    with pytest.raises(InvalidRequestError) as caught:
        shown(template, [ASK, BOTH, SUNNY, NOON, broken])
    assert caught.value.field == "messages[4].tool_calls[0].function.arguments"


# As Qwen3's first template and DeepSeek-V3's do.
LOOKS_INTO_CONTENT = (
    "{% for m in messages %}{% if '</think>' in m.content %}thought{% endif %}[{{ m.role }}]{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }} {{ call.function.arguments | tojson }}{% endfor %}"
    "{% endfor %}"
)
ADDS_ARGUMENTS = (
    "{% for m in messages %}[{{ m.role }}]{% if m.content is none %}{% for call in m.tool_calls %}"
    "{{ call.function.name + ' ' + call.function.arguments }}{% endfor %}{% else %}{{ m.content }}{% endif %}"
    "{% endfor %}"
)
PRINTS_WHATEVER = (
    "{% for m in messages %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.arguments }}{% endfor %}{% endfor %}"
)
CALLED = {"role": "assistant", "content": None, "tool_calls": [ROME]}


def test_content_that_is_null_becomes_empty_where_a_template_looks_into_it() -> None:
    """Every client sends null beside calls; Qwen3's template failed with it."""
    text = ChatTemplate(LOOKS_INTO_CONTENT).render([ASK, CALLED, SUNNY])
    assert '[assistant]weather {"city": "Rome"}[tool]sunny' in text


def test_arguments_become_text_where_a_template_adds_them_to_text() -> None:
    text = ChatTemplate(ADDS_ARGUMENTS).render([ASK, CALLED, SUNNY])
    assert '[assistant]weather {"city": "Rome"}[tool]sunny' in text


def test_nothing_of_pythons_own_is_shown() -> None:
    text = ChatTemplate(PRINTS_WHATEVER).render([ASK, CALLED, SUNNY])
    assert text == 'How is the weather?{"city": "Rome"}sunny'


def test_text_beside_calls_is_kept() -> None:
    text = ChatTemplate(LOOKS_INTO_CONTENT).render(
        [ASK, {**CALLED, "content": "Let me see."}, SUNNY]
    )
    assert "[assistant]Let me see.weather" in text
