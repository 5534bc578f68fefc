"""Byte-level BPE to read: from text to token ids and back, given a vocabulary and the merges it was
trained with.

The engine uses the `tokenizers` library (`quire/frontend/tokenizer.py`); this one gives the same
ids, slowly.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

_ENDINGS = ("'s", "'t", "'re", "'ve", "'m", "'ll", "'d")


class BytePairTokenizer:
    """Text → words → bytes → merged pieces → ids."""

    def __init__(
        self, vocabulary: Mapping[str, int], merges: Sequence[str], single_digits: bool = False
    ) -> None:
        """`merges` are lines of two pieces with a space between, the most frequent pair of the
        training first.
        """
        self._ids = vocabulary
        self._pieces = {token_id: piece for piece, token_id in vocabulary.items()}
        self._ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}
        self._single_digits = single_digits
        # Vocabularies are text files, so bytes are written as characters: printable ones as
        # themselves.
        printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
        hidden = [byte for byte in range(256) if byte not in printable]
        self._spelling = {byte: chr(byte) for byte in printable} | {
            b: chr(256 + i) for i, b in enumerate(hidden)
        }
        self._bytes = {char: byte for byte, char in self._spelling.items()}

    def encode(self, text: str) -> list[int]:
        """Token ids; a byte the vocabulary has no piece for is left out, as `tokenizers` does."""
        parts = _split_digits(text) if self._single_digits else [text]
        words = [word for part in parts for word in split_words(part)]
        spelled = [[self._spelling[byte] for byte in word.encode()] for word in words]
        known = [[piece for piece in pieces if piece in self._ids] for pieces in spelled]
        return [self._ids[piece] for pieces in known for piece in self._merge(pieces)]

    def decode(self, token_ids: Sequence[int]) -> str:
        """The tokens' bytes, read as UTF-8."""
        spelled = "".join(self._pieces[token_id] for token_id in token_ids)
        return bytes(self._bytes[char] for char in spelled).decode(errors="replace")

    def _merge(self, pieces: list[str]) -> list[str]:
        """Joins the pair that was learnt first, everywhere, until no neighbours are a pair that was
        learnt.
        """
        while len(pieces) > 1:
            left, right = min(
                pairwise(pieces), key=lambda pair: self._ranks.get(pair, len(self._ranks))
            )
            if (left, right) not in self._ranks:
                break
            merged: list[str] = []
            for piece in pieces:
                if piece == right and merged and merged[-1] == left:
                    merged[-1] = left + right
                else:
                    merged.append(piece)
            pieces = merged
        return pieces


def split_words(text: str) -> Iterator[str]:
    """GPT-2's words: an English ending, a run of letters, of numbers or of signs with one space
    before it, or spaces (all of them at the end of the text, otherwise all but the last, which
    belongs to the next word).
    """
    start = 0
    while start < len(text):
        ending = next((ending for ending in _ENDINGS if text.startswith(ending, start)), None)
        lead = text[start] == " " and start + 1 < len(text) and _kind(text[start + 1]) != "space"
        end = first = start + lead
        while end < len(text) and _kind(text[end]) == _kind(text[first]):
            end += 1
        if ending is not None:
            end = start + len(ending)
        elif _kind(text[first]) == "space" and end < len(text) and end - start > 1:
            end -= 1
        yield text[start:end]
        start = end


def _kind(char: str) -> str:
    # separators to Python, but not to Unicode's White_Space
    if char.isspace() and not "\x1c" <= char <= "\x1f":
        return "space"
    return {"L": "letter", "N": "number"}.get(unicodedata.category(char)[0], "sign")


def _split_digits(text: str) -> list[str]:
    """Every numeral stands alone, whatever the merges say."""
    parts = [""]
    for char in text:
        alone = unicodedata.category(char)[0] == "N"
        parts += [char, ""] if alone else []
        parts[-1] += "" if alone else char
    return [part for part in parts if part]
