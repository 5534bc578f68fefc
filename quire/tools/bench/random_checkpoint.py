"""A model's folder, made up: random weights of a true shape, and a tokenizer of the usual size."""

from __future__ import annotations

import math
import random
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from quire.models.names import huggingface_pieces
from quire.tools.bench.shapes import spec_of, write_config


def write_checkpoint(shape: str, folder: Path) -> int:
    """A folder in Hugging Face layout; returns the bytes of its weights."""
    write_config(shape, folder)
    spec = spec_of(shape)
    parameters = spec.parameters()
    # the values don't matter: repeated as often as needed
    noise = (torch.randn(2**22) * 0.02).to(torch.bfloat16)
    weights = {}
    for piece in huggingface_pieces(spec, ()):
        size = piece.shape(parameters[piece.parameter])
        count = math.prod(size)
        weights[piece.name] = noise.repeat(-(-count // noise.numel()))[:count].view(size).clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(spec.vocab_size, folder)
    return sum(weight.numel() * weight.element_size() for weight in weights.values())


def write_tokenizer(vocab_size: int, folder: Path) -> None:
    """A byte-level BPE whose tokens are random pairs of earlier ones: it takes as long to load as a
    real one.
    """
    source = random.Random(0)
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    known = set(tokens)
    merges = []
    while len(tokens) < vocab_size:
        left, right = source.choice(tokens[:5000]), source.choice(tokens[:5000])
        if left + right not in known:
            known.add(left + right)
            tokens.append(left + right)
            merges.append((left, right))
    tokenizer = Tokenizer(
        models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
