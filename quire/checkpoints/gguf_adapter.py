"""Adapters in GGUF files, as llama.cpp has them.

`general.type` is "adapter", `general.architecture` that of the base model. Beside the name of a
tensor of the base model lie its `.lora_a` [rank, inputs] and `.lora_b` [outputs, rank] (in torch's
order; of stacked experts with the experts in front).
"""

from __future__ import annotations

import hashlib
import math
from pathlib import Path

from quire.checkpoints.checkpoint import Checkpoint
from quire.checkpoints.fields import Fields
from quire.checkpoints.files import open_checked, quote
from quire.checkpoints.gguf_file import read_gguf
from quire.errors import ModelFormatError, UnsupportedModelError

_HASHED_AT_ONCE = 2**20
_INVOCATION = "adapter.alora.invocation_tokens"
_ALPHA = "adapter.lora.alpha"


def open_gguf_adapter(path: Path) -> tuple[Checkpoint, str]:
    """The checked file, and the digest of its content."""
    header = read_gguf(path)
    checkpoint = Checkpoint("gguf", header.tensors, header.stamps, header.metadata)
    fields = Fields(header.metadata, str(path))
    for key, wanted in (("general.type", "adapter"), ("adapter.type", "lora")):
        value = fields.raw(key)
        if value != wanted:
            raise UnsupportedModelError(
                f"{path}: {key} is {quote(value)}; a GGUF file with an adapter has {wanted!r}"
            )
    if fields.raw(_INVOCATION) not in (None, []):
        raise UnsupportedModelError(
            f"{path}: {_INVOCATION} is set, and Quire computes no adapter that begins inside of a prompt"
        )
    if not header.tensors:
        raise ModelFormatError(f"{path}: the adapter has no tensors")
    content = hashlib.sha256(b"gguf")
    for file in sorted(header.stamps):
        with open_checked(file, checkpoint.stamp_of(file)) as opened:
            while data := opened.read(_HASHED_AT_ONCE):
                content.update(data)
    return checkpoint, content.hexdigest()


def scale_of(checkpoint: Checkpoint, file: str, rank: int) -> float:
    """What products with A are multiplied by: alpha / rank; 1 where there is no alpha."""
    alpha = checkpoint.metadata.get(_ALPHA, 0.0)
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not math.isfinite(alpha):
        raise ModelFormatError(f"{file}: {_ALPHA} should be a number, not {quote(alpha)}")
    return alpha / rank if alpha else 1.0
