"""The bytes each token stands for.

Decoding is nothing but joining these bytes and reading them as UTF-8, so a token's text never
depends on its neighbours and can be streamed one token at a time. The table is derived from the
decoder that the tokenizer's files ask for; a decoder that does not work on bytes is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import tokenizers

from quire.errors import UnsupportedModelError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")
_SPACE_MARK = "▁"


def byte_level_alphabet() -> dict[str, int]:
    """How byte-level BPE spells bytes as characters: printable ones as themselves, the others from
    U+0100.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    hidden = [byte for byte in range(256) if chr(byte) not in alphabet]
    alphabet.update({chr(256 + index): byte for index, byte in enumerate(hidden)})
    return alphabet


class TokenText:
    """Token id to bytes, computed when first asked for and then remembered."""

    def __init__(self, backend: tokenizers.Tokenizer, vocab_size: int) -> None:
        steps = _decoder_steps(backend)
        kinds = [step.get("type") for step in steps]
        self._backend = backend
        self._added = backend.get_added_tokens_decoder()
        self._table: list[bytes | None] = [None] * vocab_size
        self._alphabet: dict[str, int] | None = (
            byte_level_alphabet() if "ByteLevel" in kinds else None
        )
        self._byte_fallback = "ByteFallback" in kinds
        self.strips_first_space = any(_strips_first_space(step) for step in steps)
        """SentencePiece puts a space before the first word; decoding takes it away again."""

    def __getitem__(self, token_id: int) -> bytes:
        known = self._table[token_id]
        if known is None:
            known = self._table[token_id] = self._spell_out(token_id)
        return known

    def _spell_out(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None:  # a gap in the vocabulary
            return b""
        if self._alphabet is not None:
            # Added tokens are written as they are, ordinary ones in the byte alphabet.
            if token_id in self._added or not all(char in self._alphabet for char in token):
                return token.encode()
            return bytes(self._alphabet[char] for char in token)
        byte = _BYTE_TOKEN.match(token) if self._byte_fallback else None
        if byte:
            return bytes([int(byte[1], 16)])
        return token.replace(_SPACE_MARK, " ").encode()


def _decoder_steps(backend: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    decoder = backend.decoder
    if decoder is None:
        raise UnsupportedModelError(
            "the tokenizer has no decoder, so its tokens can't be turned back into text; get a complete tokenizer.json"
        )
    state = json.loads(decoder.__getstate__())
    steps: list[dict[str, Any]] = state["decoders"] if state.get("type") == "Sequence" else [state]
    for step in steps:
        if not _is_supported(step):
            raise UnsupportedModelError(
                f"the tokenizer's decoder has the step {step.get('type')!r}; Quire decodes byte-level BPE "
                "(ByteLevel) and SentencePiece-style tokenizers (Replace of ▁ by a space, ByteFallback, "
                "Fuse, Strip of one leading space, Metaspace)"
            )
    return steps


def _is_supported(step: Mapping[str, Any]) -> bool:
    match step.get("type"):
        case "ByteLevel" | "ByteFallback" | "Fuse":
            return True
        case "Replace":
            return step.get("pattern") == {"String": _SPACE_MARK} and step.get("content") == " "
        case "Metaspace":
            return step.get("replacement") == _SPACE_MARK
        case "Strip":
            return (
                step.get("content") == " " and step.get("start") in (0, 1) and step.get("stop") == 0
            )
    return False


def _strips_first_space(step: Mapping[str, Any]) -> bool:
    if step.get("type") == "Strip":
        return step.get("start") == 1
    return step.get("type") == "Metaspace" and step.get("prepend_scheme", "always") != "never"
