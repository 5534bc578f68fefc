"""Tokens to text while they are being generated."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from quire.frontend.tokenizer import Tokenizer

_MOST_TEXTS = 16384
"""Of tokens, that are remembered: those that come often come early."""


class IncrementalDetokenizer:
    """Turns one answer's tokens into text deltas.

    The deltas joined equal `tokenizer.decode(ids)`; none holds half a character: bytes of an
    unfinished UTF-8 sequence (at most three) wait for the tokens that complete it. Each token is
    looked up once, so a token costs the same at the start and at the end of a long answer.

    With `prompt_ids` the answer is read as the continuation of that prompt: a SentencePiece
    tokenizer then keeps the space before the first word, which `decode` drops only at the very
    start of a text.

    `special_mark` stands before each special token's text, for readers who must tell it from the
    same text in others.

    Ids past the tokenizer's vocabulary add nothing (a model may have more rows than its tokenizer
    tokens).
    """

    __slots__ = (
        "_is_between",
        "_skip_special_tokens",
        "_special_mark",
        "_strip_space",
        "_texts",
        "_tokenizer",
        "_utf8",
    )

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool = True,
        prompt_ids: Sequence[int] = (),
        special_mark: str = "",
    ) -> None:
        self._tokenizer = tokenizer
        self._special_mark = special_mark
        self._skip_special_tokens = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._strip_space = tokenizer.strips_first_space and not any(map(self._bytes, prompt_ids))
        # With marks, special tokens have other texts than everybody else's.
        self._texts = {} if special_mark else tokenizer.whole_texts[skip_special_tokens]
        self._is_between = not self._strip_space
        """Whether the text so far ends with a whole character, so that the next token's text is its
        own.
        """

    def push(self, token_id: int) -> str:
        """The text that is certain once this token is known; often empty inside a multi-byte
        character.
        """
        if self._is_between and (known := self._texts.get(token_id)) is not None:
            return known
        data = self._bytes(token_id)
        was_between = self._is_between
        if data and self._strip_space:
            self._strip_space = False
            data = data.removeprefix(b" ")
        if self._special_mark and data and token_id in self._tokenizer.special_token_ids:
            text = self._utf8.decode(b"", final=True) + self._special_mark + self._utf8.decode(data)
            self._is_between = not self._utf8.getstate()[0]
            return text
        text = self._utf8.decode(data)
        self._is_between = not self._strip_space and not self._utf8.getstate()[0]
        is_its_own = was_between and self._is_between and token_id < self._tokenizer.vocab_size
        if is_its_own and len(self._texts) < _MOST_TEXTS:
            self._texts[token_id] = text
        return text

    def finish(self) -> str:
        """What is left when no token follows: U+FFFD for a character that was never completed."""
        return self._utf8.decode(b"", final=True)

    def _bytes(self, token_id: int) -> bytes:
        if token_id >= self._tokenizer.vocab_size:
            return b""
        if self._skip_special_tokens and token_id in self._tokenizer.special_token_ids:
            return b""
        return self._tokenizer.token_bytes(token_id)
