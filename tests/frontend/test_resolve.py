"""Text parameters in a real tokenizer's tokens."""

from __future__ import annotations

import pytest

from quire.errors import InvalidRequestError
from quire.frontend.resolve import resolve_tokens
from quire.frontend.tokenizer import Tokenizer
from quire.sampling_params import ResolvedTokens, SamplingParams

DRY = SamplingParams(dry_multiplier=0.8)


def test_bad_words_are_spelled_with_and_without_a_space_before(smollm2: Tokenizer) -> None:
    ids = resolve_tokens(SamplingParams(bad_words=("Paris", "fjord")), smollm2).bad_word_ids
    assert [smollm2.decode(word) for word in ids] == ["Paris", " Paris", "fjord", " fjord"]
    assert any(len(word) == 1 for word in ids)
    assert any(len(word) > 1 for word in ids)


def test_a_word_after_other_text_gets_no_space_of_the_tokenizers_own(
    sentencepiece: Tokenizer,
) -> None:
    ids = resolve_tokens(SamplingParams(bad_words=("he",)), sentencepiece).bad_word_ids
    assert [b"".join(map(sentencepiece.token_bytes, word)) for word in ids] == [b"he", b" he"]


@pytest.mark.parametrize("breakers", [DRY.dry_sequence_breakers, ("the",), ("é",), ("\n\n", "ing")])
def test_breakers_are_the_tokens_that_contain_them(
    smollm2: Tokenizer, breakers: tuple[str, ...]
) -> None:
    params = SamplingParams(dry_multiplier=1.0, dry_sequence_breakers=breakers)
    expected = tuple(
        token_id
        for token_id in range(smollm2.vocab_size)
        if any(text.encode() in smollm2.token_bytes(token_id) for text in breakers)
    )
    found = resolve_tokens(params, smollm2).dry_breaker_ids
    assert found == expected
    assert resolve_tokens(params, smollm2).dry_breaker_ids is found  # requests share one tuple


def test_a_breaker_no_token_contains_is_refused(smollm2: Tokenizer) -> None:
    params = SamplingParams(
        dry_multiplier=1.0, dry_sequence_breakers=("no such token is in there",)
    )
    with pytest.raises(InvalidRequestError, match=r"^dry_sequence_breakers: no token"):
        resolve_tokens(params, smollm2)


def test_what_is_not_asked_for_is_not_looked_up(smollm2: Tokenizer) -> None:
    params = SamplingParams(dry_sequence_breakers=("no such token is in there",))
    assert resolve_tokens(params, smollm2) == ResolvedTokens()
