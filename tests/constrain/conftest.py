"""The real model's vocabulary, and a compiler for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.constrain import GrammarCompiler
from quire.frontend.tokenizer import Tokenizer
from quire.models.load import open_model


@pytest.fixture(scope="session")
def tokenizer(smollm2_gguf: Path) -> Tokenizer:
    checkpoint = open_model(smollm2_gguf).checkpoint
    try:
        return Tokenizer.from_gguf(checkpoint.metadata)
    finally:
        checkpoint.close()


PADDING = 40
"""Models often have more token ids than their tokenizer."""


@pytest.fixture(scope="session")
def compiler(tokenizer: Tokenizer) -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size + PADDING, tokenizer.eos_token_ids)
    yield compiler
    compiler.close()
