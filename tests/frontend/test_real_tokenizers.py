"""Seven real tokenizers and their chat templates, as transformers reads them: text both ways, piece
by piece, conversations, tools, and marks of reasoning.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any

import jinja2
import pytest
from tokenizers import Tokenizer as Backend
from transformers.utils.chat_template_utils import render_jinja_template

from quire.errors import TemplateError
from quire.frontend.call_form import find_call_form
from quire.frontend.chat_template import ChatTemplate
from quire.frontend.detokenizer import IncrementalDetokenizer
from quire.frontend.messages import check_messages
from quire.frontend.reasoning import ReasoningSplitter, opens_reasoning
from quire.frontend.tokenizer import Tokenizer
from quire.frontend.tool_calls import ToolSupport
from tests.frontend.helpers import TEXTS
from tests.frontend.parsed_answers import collect, parse
from tests.frontend.real_tokenizers import NAMES, real_tokenizer_folder

OFTEN = ("llama3_2", "qwen3")
"""Those of `make test`: to read one takes a second, and once it must be fetched."""


def slow_but_often(*cases: Any) -> list[Any]:
    """Cases that begin with a name: those of other tokenizers are slow."""
    names = [case if isinstance(case, str) else case[0] for case in cases]
    return [
        case
        if name in OFTEN
        else pytest.param(*([case] if isinstance(case, str) else case), marks=pytest.mark.slow)
        for name, case in zip(names, cases, strict=True)
    ]


CHATTING = [name for name in NAMES if name != "gemma2"]
"""Gemma 2's package has no template."""
WITHOUT_SYSTEM: list[dict[str, Any]] = [
    {"role": "user", "content": "What is 2 + 2?\n\n  Answer in `code`."},
    {"role": "assistant", "content": "`4` 🙂"},
    {"role": "user", "content": "Größe?"},
]
WITH_SYSTEM = [{"role": "system", "content": "Be brief."}, *WITHOUT_SYSTEM]
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather somewhere.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
ARGUMENTS = {"city": "Zürich", "days": 3}
CALLING: list[dict[str, Any]] = [
    {"role": "user", "content": "How is the weather in Zürich?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "call000001",
                "type": "function",
                "function": {
                    "name": "weather",
                    "arguments": json.dumps(ARGUMENTS, ensure_ascii=False),
                },
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call000001", "content": '{"sky": "grey"}'},
]


@cache
def tokenizer_of(name: str) -> Tokenizer:
    return Tokenizer.from_hf_folder(real_tokenizer_folder(name))


def by_transformers(
    tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], tools: Any = None, **options: Any
) -> str:
    """What transformers makes of a conversation, by the tokenizer's own template."""
    rendered, _ = render_jinja_template(
        conversations=[list(messages)],
        tools=tools,
        chat_template=tokenizer.chat_templates["default"],
        add_generation_prompt=options.pop("add_generation_prompt", True),
        **tokenizer.named_tokens,
        **options,
    )
    return str(rendered[0])


def by_transformers_or_error(tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]]) -> str:
    try:
        return by_transformers(tokenizer, messages)
    except (TypeError, jinja2.TemplateError) as error:
        raise TemplateError(str(error)) from None


@pytest.mark.parametrize("name", slow_but_often(*NAMES))
def test_text_becomes_the_same_tokens_and_comes_back(name: str) -> None:
    tokenizer = tokenizer_of(name)
    backend = Backend.from_file(str(real_tokenizer_folder(name) / "tokenizer.json"))
    backend.encode_special_tokens = True  # what a user writes is text
    normal = backend.normalizer
    for text in [*TEXTS, "\n\n".join(TEXTS)]:
        ids = tokenizer.encode(text)
        if not any(special in text for special in ("[INST]", "</s>")):
            assert ids == backend.encode(text).ids, text
        expected = (
            text if normal is None or name.startswith("gemma") else normal.normalize_str(text)
        )
        assert tokenizer.decode(ids) == expected
        pieces = IncrementalDetokenizer(tokenizer)
        assert "".join([pieces.push(token_id) for token_id in ids]) + pieces.finish() == expected


@pytest.mark.parametrize("name", slow_but_often(*NAMES))
def test_control_tokens_never_come_from_text(name: str) -> None:
    tokenizer = tokenizer_of(name)
    begins = set(tokenizer.encode(""))
    spelt = [tokenizer.id_to_token(token_id) for token_id in sorted(tokenizer.special_token_ids)]
    assert len(spelt) >= 2
    for text in (spelt[0], spelt[-1], "a" + spelt[-1] + "b", "".join(spelt[:5])):
        ids = tokenizer.encode(text)
        assert not (set(ids) - begins) & tokenizer.special_token_ids, text
        assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("name", slow_but_often(*CHATTING))
def test_conversations_are_rendered_and_encoded_as_transformers_does(name: str) -> None:
    tokenizer = tokenizer_of(name)
    template = ChatTemplate.from_tokenizer(tokenizer)
    for messages in (WITH_SYSTEM, WITHOUT_SYSTEM, WITHOUT_SYSTEM[:1]):
        for begins in (True, False):
            expected = by_transformers(tokenizer, messages, add_generation_prompt=begins)
            assert template.render(messages, add_generation_prompt=begins) == expected
            ids = template.encode_chat(tokenizer, messages, add_generation_prompt=begins)
            assert tokenizer.decode(ids, skip_special_tokens=False) == expected
            assert ids == tokenizer.encode(expected, add_special_tokens=False, allow_special=True)


@pytest.mark.parametrize("name", slow_but_often(*CHATTING))
def test_a_users_control_tokens_stay_text_in_a_chat(name: str) -> None:
    tokenizer = tokenizer_of(name)
    template = ChatTemplate.from_tokenizer(tokenizer)
    end = tokenizer.id_to_token(tokenizer.eos_token_ids[0])
    plain = template.encode_chat(tokenizer, [{"role": "user", "content": "a b"}])
    forged = template.encode_chat(tokenizer, [{"role": "user", "content": f"a{end}b"}])

    def controls(ids: list[int]) -> list[int]:
        return [token_id for token_id in ids if token_id in tokenizer.special_token_ids]

    assert controls(forged) == controls(plain)


@pytest.mark.parametrize(
    ("name", "format_name", "teaches"),
    slow_but_often(
        ("llama3_1", "hermes", False),
        ("llama3_2", "llama3", True),
        ("qwen2_5", "hermes", True),
        ("qwen3", "hermes", True),
        ("deepseek_v3", "deepseek", False),
        ("gemma3", "hermes", False),
    ),
)
def test_tools_are_shown_as_the_template_does_or_described(
    name: str, format_name: str, teaches: bool
) -> None:
    tokenizer = tokenizer_of(name)
    support = ToolSupport(tokenizer)
    assert support.format == format_name
    plan = support.plan(CALLING[:1], [WEATHER])
    assert (plan.template_tools is not None) == teaches
    rendered = ChatTemplate.from_tokenizer(tokenizer).render(
        plan.messages, tools=plan.template_tools
    )
    assert rendered == by_transformers(tokenizer, plan.messages, plan.template_tools)
    assert '"name": "weather"' in rendered
    assert "The weather somewhere." in rendered


@pytest.mark.parametrize("name", slow_but_often(*CHATTING))
def test_calls_and_their_results_are_rendered_as_transformers_does(name: str) -> None:
    tokenizer = tokenizer_of(name)
    plan = ToolSupport(tokenizer).plan(CALLING, [WEATHER])
    rendered = ChatTemplate.from_tokenizer(tokenizer).render(
        plan.messages, tools=plan.template_tools
    )
    # transformers gives a template what it gets: null and text, which some of them take and others
    # fail with.
    messages = find_call_form(partial(by_transformers_or_error, tokenizer)).suit(
        check_messages(plan.messages, True)
    )
    assert rendered == by_transformers(tokenizer, messages, plan.template_tools)
    assert "Zürich" in rendered
    assert "grey" in rendered


@pytest.mark.parametrize("name", slow_but_often("llama3_2", "qwen2_5", "qwen3", "deepseek_v3"))
def test_a_call_as_the_template_writes_it_is_read_back(name: str) -> None:
    """What the model has been shown as its own earlier call is what it will write: the parser must
    know it.
    """
    tokenizer = tokenizer_of(name)
    template, support = ChatTemplate.from_tokenizer(tokenizer), ToolSupport(tokenizer)
    plan = support.plan(CALLING[:2], [WEATHER])
    asked = template.render(plan.messages[:-1], tools=plan.template_tools)
    told = template.render(plan.messages, tools=plan.template_tools, add_generation_prompt=False)
    assert told.startswith(asked)
    written = told.removeprefix(asked)
    splitter = ReasoningSplitter()
    written = splitter.feed(written).content + splitter.finish().content
    answer = tokenizer.decode(
        tokenizer.encode(written, add_special_tokens=False, allow_special=True)
    )
    parser = plan.new_parser()
    assert parser is not None
    found = parse(parser, answer.rstrip("\n"))
    assert found.content.strip() == ""
    assert [(call.name, json.loads(call.arguments)) for call in found.calls] == [
        ("weather", ARGUMENTS)
    ]
    # And token by token, as it comes from the engine.
    parser, pieces, deltas = plan.new_parser(), IncrementalDetokenizer(tokenizer), []
    assert parser is not None
    for token_id in tokenizer.encode(
        answer.rstrip("\n"), add_special_tokens=False, allow_special=True
    ):
        deltas += parser.feed(pieces.push(token_id))
    assert collect([*deltas, *parser.finish()]) == found


def test_reasoning_marks_of_qwen3() -> None:
    tokenizer = tokenizer_of("qwen3")
    assert ToolSupport(tokenizer).thinks
    template = ChatTemplate.from_tokenizer(tokenizer)
    ask = [{"role": "user", "content": "2 + 2?"}]
    thinking = template.encode_chat(tokenizer, ask)
    quick = template.encode_chat(tokenizer, ask, template_kwargs={"enable_thinking": False})
    assert tokenizer.decode(quick[len(thinking) :]) == "<think>\n\n</think>\n\n"
    assert not opens_reasoning(tokenizer, thinking)
    assert not opens_reasoning(tokenizer, quick)
    mark = tokenizer.token_to_id("<think>")
    assert mark is not None
    assert opens_reasoning(tokenizer, [*thinking, mark])
    splitter, pieces = ReasoningSplitter(), IncrementalDetokenizer(tokenizer)
    text = "<think>\nTwo and two.\n</think>\n\n4"
    found = [
        splitter.feed(pieces.push(token_id))
        for token_id in tokenizer.encode(text, allow_special=True)
    ]
    assert "".join(part.reasoning for part in found) == "Two and two."
    assert "".join(part.content for part in found) == "4"


@pytest.mark.parametrize("name", slow_but_often(*(name for name in CHATTING if name != "qwen3")))
def test_others_have_no_reasoning_marks(name: str) -> None:
    assert not ToolSupport(tokenizer_of(name)).thinks


def test_qwen3_forgets_earlier_reasoning_as_its_template_says() -> None:
    tokenizer = tokenizer_of("qwen3")
    earlier = {"role": "assistant", "content": "<think>\nhm\n</think>\n\n4"}
    messages = [
        {"role": "user", "content": "2 + 2?"},
        earlier,
        {"role": "user", "content": "Sure?"},
    ]
    rendered = ChatTemplate.from_tokenizer(tokenizer).render(messages)
    assert rendered == by_transformers(tokenizer, messages)
    assert "hm" not in rendered
