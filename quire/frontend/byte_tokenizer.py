"""Bytes as tokens: how text is read for a teaching model (a folder of `.npy` files) that has no tokenizer."""

from __future__ import annotations

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from quire.frontend.token_text import byte_level_alphabet
from quire.frontend.tokenizer_parts import TokenizerParts


def byte_tokenizer_parts() -> TokenizerParts:
    """Token i is byte i of the text in UTF-8, for i below 256; tokens from there on stand for no text."""
    backend = tokenizers.Tokenizer(models.BPE(vocab=byte_level_alphabet(), merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return TokenizerParts(backend, vocab_size=256, bos_token_id=None, eos_token_ids=(), unk_token_id=None)
