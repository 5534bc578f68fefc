"""Decoders on the GPU that several tests share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from quire.backends.select import select_kernels
from quire.models.decoder import Decoder
from quire.models.load import open_model
from tests.decoding import load_decoder
from tests.gpu.support import DEVICE, decoder_of, shape_of


@pytest.fixture(scope="session")
def qwen() -> Decoder:
    """Random weights in the shape of Qwen3-0.6B."""
    return decoder_of(shape_of("qwen3-0.6b"))


@pytest.fixture(scope="session")
def smollm2() -> Decoder:
    """The real one, from the folder or GGUF file QUIRE_TEST_MODEL names."""
    path = os.environ.get("QUIRE_TEST_MODEL")
    if not path:
        pytest.skip("QUIRE_TEST_MODEL names no model")
    kernels = select_kernels(DEVICE, torch.bfloat16)
    return load_decoder(open_model(Path(path)), kernels, torch.bfloat16, DEVICE, max_position=4096)


@pytest.fixture(params=["qwen", "smollm2"])
def decoder(request: pytest.FixtureRequest) -> Decoder:
    found: Decoder = request.getfixturevalue(request.param)
    return found
