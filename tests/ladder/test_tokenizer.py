"""The teaching tokenizer against the real one, on SmolLM2's vocabulary and on ones trained here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

from quire.checkpoints.gguf_file import read_gguf
from quire.frontend.tokenizer import Tokenizer
from quire.tools.ladder.tokenizer import BytePairTokenizer, split_words
from tests.frontend.helpers import TEXTS, anything, byte_level_metadata, train_byte_level
from tests.long_runs import examples

Pair = tuple[BytePairTokenizer, Tokenizer]


def from_metadata(metadata: dict[str, Any]) -> Pair:
    vocabulary = {token: index for index, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    single_digits = metadata["tokenizer.ggml.pre"] == "smollm"
    ours = BytePairTokenizer(vocabulary, metadata["tokenizer.ggml.merges"], single_digits)
    return ours, Tokenizer.from_gguf(metadata)


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf: Path) -> Pair:
    return from_metadata(dict(read_gguf(smollm2_gguf).metadata))


@pytest.fixture(scope="module", params=["gpt-2", "smollm"])
def trained(request: pytest.FixtureRequest) -> Pair:
    return from_metadata(byte_level_metadata(train_byte_level(request.param), request.param))


def check(pair: Pair, text: str) -> None:
    ours, real = pair
    token_ids = real.encode(text)
    assert ours.encode(text) == token_ids
    assert ours.decode(token_ids) == real.decode(token_ids)


@pytest.mark.parametrize(
    "text", [*TEXTS, "x's 's ' 't''re", "a\x85b\x1c\x1d c", "\U00077000\x8e\U000f4000"]
)
def test_texts_become_the_same_ids_and_come_back(smollm2: Pair, trained: Pair, text: str) -> None:
    check(smollm2, text)
    check(trained, text)


@pytest.mark.few(1)
@settings(max_examples=examples(200))
@given(text=anything)
def test_any_text_becomes_the_same_ids(smollm2: Pair, trained: Pair, text: str) -> None:
    check(smollm2, text)
    check(trained, text)


@pytest.mark.slow
def test_every_character_is_of_the_kind_the_real_tokenizer_takes_it_for(smollm2: Pair) -> None:
    for code in range(0x3100):
        check(smollm2, f"a{chr(code) * 2} b{chr(code)}1")


def test_words_join_up_to_the_text() -> None:
    for text in TEXTS:
        assert "".join(split_words(text)) == text
    assert list(split_words("I'll go  home, now\n")) == [
        "I",
        "'ll",
        " go",
        " ",
        " home",
        ",",
        " now",
        "\n",
    ]


def test_it_is_short_enough_to_read() -> None:
    source = Path(split_words.__code__.co_filename).read_text().splitlines()
    code = [line for line in source if line.strip() and not line.strip().startswith(("#", '"""'))]
    assert len(code) < 80
