"""Grammars with `root ::= …`."""

from __future__ import annotations

import time

import pytest

from quire.constrain.gbnf import MAX_RULES, is_gbnf, to_lark
from quire.errors import InvalidRequestError


def test_notations_are_told_apart() -> None:
    assert is_gbnf('root ::= "a"')
    assert is_gbnf('# words\n\n  root ::= a\na ::= "x"')
    assert not is_gbnf('start: "a"')
    assert not is_gbnf('start: "::="\n')


def test_escapes_keep_their_meaning() -> None:
    lark = to_lark('root ::= "\\u00e9\\U0001f600\\x41\\n" [\\u0061-z] "\\\\u0041"')
    assert "é" in lark
    assert "😀" in lark
    assert "\\x41" in lark
    assert "[\\x61-z]" in lark
    assert '"\\\\u0041"' in lark  # a backslash, then letters


@pytest.mark.parametrize(
    "wrong",
    [
        'root ::= "\\',
        'other ::= "a"',
        "root ::= [a",
        "root ::= missing",
        "root ::= " + "(" * 5000,
        'root ::= "a"\n' * (MAX_RULES + 1),
        'root ::= "' + "a" * 20_000 + '"',
    ],
)
def test_what_is_wrong_is_said_in_a_line(wrong: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        to_lark(wrong, "grammar")
    assert caught.value.field == "grammar"
    assert len(str(caught.value)) < 300


def test_the_work_is_bounded() -> None:
    """Each rule refers to the next: the most rounds the converter can take."""
    rules = "root ::= r0\n" + "".join(
        f"r{number} ::= r{number + 1}\n" for number in range(MAX_RULES - 2)
    )
    began = time.process_time()
    assert to_lark(rules + f'r{MAX_RULES - 2} ::= "x"')
    assert time.process_time() - began < 0.5
