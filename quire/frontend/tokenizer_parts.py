"""What a tokenizer is made of, however its files spell it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import tokenizers
from tokenizers import processors


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


def bos_eos_processor(bos: tuple[str, int] | None, eos: tuple[str, int] | None) -> processors.TemplateProcessing:
    """A post-processor that puts `bos` before and `eos` after every text, each where it is given."""
    single = " ".join(([f"{bos[0]}:0"] if bos else []) + ["$A:0"] + ([f"{eos[0]}:0"] if eos else []))
    pair = " ".join([single] + ([f"{bos[0]}:1"] if bos else []) + ["$B:1"] + ([f"{eos[0]}:1"] if eos else []))
    special_tokens = [token for token in (bos, eos) if token is not None]
    return processors.TemplateProcessing(single=single, pair=pair, special_tokens=special_tokens)
