"""What a tokenizer is made of, however its files spell it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from quire.frontend.token_text import byte_level_alphabet


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """The common result of reading a Hugging Face folder or GGUF metadata."""

    backend: tokenizers.Tokenizer
    vocab_size: int
    """One more than the highest token id."""
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    """Every token that ends an answer, the tokenizer's own first."""
    unk_token_id: int | None
    """What the model makes of text it has no token for; None where it has a token for everything."""
    named_tokens: Mapping[str, str] = field(default_factory=dict)
    """`bos_token`, `eos_token`, … as chat templates see them."""
    chat_templates: Mapping[str, str] = field(default_factory=dict)
    """By name; `default` is the one for every day, `tool_use` (if any) the one for requests with tools."""


def byte_tokenizer_parts() -> TokenizerParts:
    """Bytes as tokens, for teaching models (folders of `.npy` files), which have no tokenizer: token i is byte i of
    the text in UTF-8, for i below 256; tokens from there on stand for no text."""
    backend = tokenizers.Tokenizer(models.BPE(vocab=byte_level_alphabet(), merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return TokenizerParts(backend, vocab_size=256, bos_token_id=None, eos_token_ids=(), unk_token_id=None)
