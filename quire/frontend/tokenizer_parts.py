"""What a tokenizer is made of, however its files spell it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import tokenizers

from quire.sampling_defaults import OURS


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
    """By name; `default` is the one for every day, `tool_use` (if any) the one for requests with
    tools.
    """
    sampling_defaults: Mapping[str, float] = field(default_factory=lambda: OURS)
    """For requests that don't say how they are sampled (`quire.sampling_defaults`)."""
    class_name: str = "PreTrainedTokenizerFast"
    """What transformers calls it; for tokenizers that don't say, the class for any
    `tokenizer.json`.
    """
