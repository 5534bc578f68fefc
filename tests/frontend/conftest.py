"""Tokenizers that several test files use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.checkpoints.gguf_file import read_gguf
from quire.frontend.tokenizer import Tokenizer
from tests.frontend.helpers import (
    byte_level_metadata,
    sentencepiece_metadata,
    train_byte_level,
)


@pytest.fixture(scope="session")
def smollm2_metadata(smollm2_gguf: Path) -> dict[str, Any]:
    """As the gguf package reads it, too (tests/models/test_gguf_file.py), which takes seconds for
    it.
    """
    return read_gguf(smollm2_gguf).metadata


@pytest.fixture(scope="session")
def smollm2(smollm2_metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_gguf(smollm2_metadata)


@pytest.fixture(scope="session")
def byte_level() -> Tokenizer:
    return Tokenizer.from_gguf(byte_level_metadata(train_byte_level("qwen2"), "qwen2"))


@pytest.fixture(scope="session")
def sentencepiece() -> Tokenizer:
    return Tokenizer.from_gguf(sentencepiece_metadata())
