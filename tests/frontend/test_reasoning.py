"""Reasoning taken apart from the answer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.frontend.messages import check_messages
from quire.frontend.reasoning import ReasoningSplitter, opens_reasoning, thinks
from quire.frontend.tokenizer import Tokenizer
from tests.frontend.templates import LLAMA, QWEN
from tests.long_runs import examples


def split(pieces: Sequence[str], inside: bool = False) -> tuple[str, str]:
    splitter = ReasoningSplitter(inside)
    parts = [splitter.feed(piece) for piece in pieces] + [splitter.finish()]
    return "".join(part.reasoning for part in parts), "".join(part.content for part in parts)


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("Hello <think>there</think>", "", "Hello <think>there</think>"),
        ("<think>\nHm.\n\n</think>\n\nYes.\n", "Hm.", "Yes.\n"),
        ("\n <think>a b</think>c", "a b", "c"),
        ("<think></think>yes", "", "yes"),
        ("<think>never ends \n", "never ends \n", ""),
        ("<think>a <think> b</think> c </think> d", "a <think> b", "c </think> d"),
        ("<think>x</thi", "x</thi", ""),
        ("<thinking", "", "<thinking"),
        ("  \n", "", "  \n"),
        ("</think>x", "", "</think>x"),
    ],
)
def test_an_answer_that_may_think(text: str, reasoning: str, content: str) -> None:
    assert split([text]) == split(list(text)) == (reasoning, content)


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("Hm.\n</think>\n\nYes.", "Hm.", "Yes."),
        ("\n<think>\nagain</think>ok", "again", "ok"),
        ("all of it", "all of it", ""),
        ("</think>", "", ""),
        ("<thi", "<thi", ""),
    ],
)
def test_an_answer_that_begins_inside(text: str, reasoning: str, content: str) -> None:
    assert split([text], inside=True) == split(list(text), inside=True) == (reasoning, content)


def test_earlier_reasoning_may_have_either_name() -> None:
    """A client that sends back what it got from vLLM calls it `reasoning`."""
    said = {"role": "assistant", "content": "Yes."}
    for named in ({"reasoning": "Hm."}, {"reasoning": "Hm.", "reasoning_content": None}):
        (message,) = check_messages([{**said, **named}], True)
        assert message["reasoning_content"] == "Hm."
    (both,) = check_messages([{**said, "reasoning": "a", "reasoning_content": "b"}], True)
    assert both["reasoning_content"] == "b"
    (neither,) = check_messages([{**said, "reasoning": None}], True)
    assert neither.get("reasoning_content") is None


@settings(max_examples=examples(200))
@given(
    st.lists(
        st.sampled_from(["<think>", "</think>", "<thi", "</", "nk>", " ", "\n", "a", "é<"]),
        max_size=10,
    ),
    st.booleans(),
    st.lists(st.integers(0, 40), max_size=4),
)
def test_pieces_give_what_the_whole_gives(bits: list[str], inside: bool, cuts: list[int]) -> None:
    text = "".join(bits)
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    assert split([text[a:b] for a, b in pairwise(bounds)], inside) == split([text], inside)
    assert split(list(text), inside) == split([text], inside)


def test_it_says_whether_the_text_ends_inside_the_reasoning() -> None:
    splitter = ReasoningSplitter()
    states = []
    for piece in (" ", "<think>", "a", "</think>", "b"):
        splitter.feed(piece)
        states.append(splitter.is_reasoning)
    assert states == [False, True, True, False, False]


def test_a_megabyte_of_half_tags_is_all_reasoning() -> None:
    text = "<think>" + "</think" * 150_000
    assert split([text[i : i + 1000] for i in range(0, len(text), 1000)]) == (
        text.removeprefix("<think>"),
        "",
    )


def test_templates_and_prompts_tell(byte_level: Tokenizer) -> None:
    assert thinks(QWEN)
    assert not thinks(LLAMA)
    assert opens_reasoning(
        byte_level, byte_level.encode("<|im_start|>assistant\n<think>\n", allow_special=True)
    )
    assert not opens_reasoning(
        byte_level, byte_level.encode("<think>\n\n</think>\n\n", allow_special=True)
    )
    assert not opens_reasoning(byte_level, byte_level.encode("a"))
