"""Streaming text equals decoding it at once, for any tokens."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.frontend.detokenizer import IncrementalDetokenizer
from quire.frontend.tokenizer import Tokenizer
from tests.frontend.helpers import anything
from tests.long_runs import examples

fractions = st.lists(st.floats(0, 1, exclude_max=True), max_size=30)


def to_ids(tokenizer: Tokenizer, numbers: list[float]) -> list[int]:
    return [int(number * tokenizer.vocab_size) for number in numbers]


def stream(tokenizer: Tokenizer, ids: list[int], **options: Any) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, **options)
    return [detokenizer.push(token_id) for token_id in ids] + [detokenizer.finish()]


@pytest.fixture(params=["byte_level", "sentencepiece"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    found: Tokenizer = request.getfixturevalue(request.param)
    return found


@settings(max_examples=examples(150))
@given(numbers=fractions, low=st.lists(st.integers(0, 300), max_size=12), skip=st.booleans())
def test_deltas_of_any_tokens_join_to_the_full_decode(
    byte_level: Tokenizer,
    sentencepiece: Tokenizer,
    numbers: list[float],
    low: list[int],
    skip: bool,
) -> None:
    for tokenizer in (byte_level, sentencepiece):
        # The low ids are single bytes in both: invalid UTF-8 of every kind, and special tokens
        # between.
        ids = [*low, *to_ids(tokenizer, numbers), *tokenizer.special_token_ids, *low[::-1]]
        deltas = stream(tokenizer, ids, skip_special_tokens=skip)
        assert "".join(deltas) == tokenizer.decode(ids, skip_special_tokens=skip)


@settings(max_examples=examples(100))
@given(text=anything)
def test_no_delta_of_real_text_holds_a_replacement_character(
    byte_level: Tokenizer, sentencepiece: Tokenizer, text: str
) -> None:
    text = text.replace("\ufffd", "")
    for tokenizer in (byte_level, sentencepiece):
        deltas = stream(tokenizer, tokenizer.encode(text))
        assert not any("\ufffd" in delta for delta in deltas)
        assert "".join(deltas) == tokenizer.decode(tokenizer.encode(text))


def test_a_character_of_four_tokens_appears_whole_with_the_last(sentencepiece: Tokenizer) -> None:
    ids = [259 - 256 + byte for byte in "👍".encode()]
    assert stream(sentencepiece, ids) == ["", "", "", "👍", ""]


def test_an_unfinished_character_is_replaced_only_at_the_end(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("🦩", add_special_tokens=False)[:-1]
    deltas = stream(tokenizer, ids)
    assert "\ufffd" not in "".join(deltas[:-1])
    assert "\ufffd" in deltas[-1]


def test_each_token_is_looked_up_at_most_once(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or never, if an earlier stream has met it."""
    ids = tokenizer.encode("many words in a row, 中文, é " * 200, add_special_tokens=False)
    looked_up: list[int] = []
    original = tokenizer.token_bytes

    def counting(token_id: int) -> bytes:
        looked_up.append(token_id)
        return original(token_id)

    monkeypatch.setattr(tokenizer, "token_bytes", counting)
    deltas = stream(tokenizer, ids)
    assert Counter(looked_up) <= Counter(ids)
    looked_up.clear()
    assert stream(tokenizer, ids) == deltas
    assert len(looked_up) < len(ids) / 2


def test_what_streams_have_met_changes_no_text(tokenizer: Tokenizer) -> None:
    """Halves of characters before and after whole ones, and the space that is dropped at the very
    beginning.
    """
    text = " a 中é🦩 b 🦩\u0301"
    ids = tokenizer.encode(text, add_special_tokens=False)
    for order in (ids, ids[1:], ids[::-1], ids * 2, ids[::2] + ids):
        for skip in (True, False):
            fresh = IncrementalDetokenizer(tokenizer, skip)
            fresh._texts = {}
            plain = [*map(fresh.push, order), fresh.finish()]
            again = IncrementalDetokenizer(tokenizer, skip)
            assert [*map(again.push, order), again.finish()] == plain
            assert "".join(plain) == tokenizer.decode(order, skip_special_tokens=skip)


def test_texts_that_are_remembered_are_bounded(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = list(range(tokenizer.vocab_size))
    expected = stream(tokenizer, ids)
    fresh = {False: {}, True: {}}  # type: dict[bool, dict[int, str]]
    monkeypatch.setattr(tokenizer, "whole_texts", fresh)
    monkeypatch.setattr("quire.frontend.detokenizer._MOST_TEXTS", 5)
    assert stream(tokenizer, ids) == expected
    assert len(fresh[True]) == 5


def test_continuing_a_prompt_keeps_the_space_that_decode_drops(sentencepiece: Tokenizer) -> None:
    prompt = sentencepiece.encode("The quick")
    answer = sentencepiece.encode("brown fox", add_special_tokens=False)
    assert "".join(stream(sentencepiece, answer)) == "brown fox"
    joined = "".join(stream(sentencepiece, answer, prompt_ids=prompt))
    assert (
        sentencepiece.decode(prompt) + joined
        == sentencepiece.decode(prompt + answer)
        == "The quick brown fox"
    )


def test_a_prompt_of_special_tokens_only_is_no_text(sentencepiece: Tokenizer) -> None:
    answer = sentencepiece.encode("brown", add_special_tokens=False)
    assert "".join(stream(sentencepiece, answer, prompt_ids=[1])) == "brown"


def test_ids_past_the_vocabulary_add_nothing(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("lazy", add_special_tokens=False)
    padded = [tokenizer.vocab_size, *ids, tokenizer.vocab_size + 5]
    assert "".join(stream(tokenizer, padded)) == tokenizer.decode(ids)
