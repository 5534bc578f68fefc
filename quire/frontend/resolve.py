"""What the sampling parameters that are text mean in a model's tokens."""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from weakref import WeakKeyDictionary

from quire.errors import InvalidRequestError
from quire.frontend.tokenizer import Tokenizer
from quire.sampling_params import ResolvedTokens, SamplingParams

_REMEMBERED = 64
_NEED_TEXT = ("stop", "bad_words", "structured", "dry_multiplier", "prediction")
"""Parameters that mean nothing where tokens stand for no text."""


def resolve_tokens(params: SamplingParams, tokenizer: Tokenizer) -> ResolvedTokens:
    """Raises InvalidRequestError for what can't be said in this model's tokens."""
    if not tokenizer.has_text:
        for field in _NEED_TEXT:
            if getattr(params, field):
                tokenizer.need_text(field)
    breakers = params.dry_sequence_breakers if params.dry_multiplier else ()
    bad_word_ids = dict.fromkeys(
        ids for word in params.bad_words for ids in _spellings(word, tokenizer)
    )
    predicted = (
        tokenizer.encode_plain(params.prediction)
        if params.prediction and params.speculation
        else ()
    )
    return ResolvedTokens(
        tuple(bad_word_ids), _breaker_ids(breakers, tokenizer) if breakers else (), tuple(predicted)
    )


def _spellings(word: str, tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """The tokens of a word inside a text, both right after other characters and after a space."""
    texts = dict.fromkeys((word, " " + word.lstrip(" ")))
    return [tuple(tokenizer.encode_plain(text, continues=True)) for text in texts]


class _Vocabulary:
    """All tokens' bytes in one string, so that a search in them is one of the machine's, not of
    Python's.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        pieces = [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)]
        self._text = b"".join(pieces)
        self._ends = list(accumulate(map(len, pieces)))
        self.breaker_ids: dict[tuple[str, ...], tuple[int, ...]] = {}
        """Answers already found; requests with the same breakers share one tuple."""

    def tokens_with(self, part: bytes) -> list[int]:
        found = []
        start = self._text.find(part)
        while start >= 0:
            token_id = bisect_right(self._ends, start)
            end = self._ends[token_id]
            inside = start + len(part) <= end  # and not half of it in the next token
            if inside:
                found.append(token_id)
            start = self._text.find(part, end if inside else start + 1)
        return found


_vocabularies: WeakKeyDictionary[Tokenizer, _Vocabulary] = WeakKeyDictionary()


def _breaker_ids(breakers: tuple[str, ...], tokenizer: Tokenizer) -> tuple[int, ...]:
    vocabulary = _vocabularies.get(tokenizer)
    if vocabulary is None:
        vocabulary = _vocabularies[tokenizer] = _Vocabulary(tokenizer)
    known = vocabulary.breaker_ids.get(breakers)
    if known is None:
        found: set[int] = set()
        for text in breakers:
            tokens = vocabulary.tokens_with(text.encode("utf-8", "replace"))
            if not tokens:
                raise InvalidRequestError(
                    "dry_sequence_breakers", f"no token of this model contains {text!r}"
                )
            found.update(tokens)
        if len(vocabulary.breaker_ids) >= _REMEMBERED:
            vocabulary.breaker_ids.clear()
        known = vocabulary.breaker_ids[breakers] = tuple(sorted(found))
    return known
