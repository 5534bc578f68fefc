"""Logits against transformers on the same GPU: equal in float32, and in bfloat16 as close to
float32 as its own are.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.backends.select import select_kernels
from quire.kernels.weights import Weight
from quire.models.decoder import Decoder
from quire.models.model_config import read_config
from quire.models.names import huggingface_pieces
from quire.tools.bench.shapes import CONFIGS
from tests.decoding import all_logits
from tests.gpu.support import DEVICE

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

pytestmark = pytest.mark.gpu

LAYERS = {
    "qwen3-0.6b": 28,
    "llama-3.2-1b": 16,
    "qwen3-30b-a3b": 3,
    "smollm2-135m": 30,
    "gemma-3-4b": 6,
}
"""How many of each shape's layers are compared."""


def make_model(shape: str) -> Any:
    """Random weights that bfloat16 holds exactly, so that all computations start from the same
    ones; norms are not all 1, and logits have the size of a real model's.
    """
    options = {k: v for k, v in CONFIGS[shape].items() if k != "architectures"} | {
        "num_hidden_layers": LAYERS[shape]
    }
    kind = CONFIGS[shape]["architectures"][0].replace("ForCausalLM", "Config")
    kind = {"Gemma3Config": "Gemma3TextConfig"}.get(kind, kind)  # the other one has images
    config = getattr(transformers, kind)(**options)
    config._attn_implementation = config._experts_implementation = "eager"
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(std=1.5 / parameter.shape[-1] ** 0.5)
            parameter.copy_(parameter.to(torch.bfloat16))
    return model


def decoder_of_model(model: Any, dtype: torch.dtype, folder: Path) -> Decoder:
    """Quire's decoder with the same weights."""
    model.config.save_pretrained(folder)
    spec = read_config(folder / "config.json")
    weights = {
        name: value for name, value in model.state_dict().items() if name != "lm_head.weight"
    }
    if not spec.tie_embeddings:
        weights["lm_head.weight"] = model.lm_head.weight
    parameters = spec.parameters()
    kinds = {name: torch.float32 if p.keep_float32 else dtype for name, p in parameters.items()}
    loaded = {
        name: Weight.dense(torch.empty(p.shape, dtype=kinds[name], device=DEVICE))
        for name, p in parameters.items()
    }
    for piece in huggingface_pieces(spec, set(weights)):
        target = loaded[piece.parameter].tensor[piece.index(parameters[piece.parameter])]
        value = weights.pop(piece.name)
        if piece.order is not None:
            value = value.index_select(0, piece.order.index(len(value)).to(value.device))
        target.copy_(value)
    assert not weights, f"left over: {list(weights)}"
    return Decoder(spec, select_kernels(DEVICE, dtype), loaded, dtype, 1024)


@torch.inference_mode()
def reference_logits(model: Any, tokens: list[int]) -> Tensor:
    logits: Tensor = model(torch.tensor([tokens], device=DEVICE)).logits[0].float()
    return logits


@pytest.mark.parametrize("shape", LAYERS)
def test_logits_are_those_of_transformers(shape: str, tmp_path: Path) -> None:
    model = make_model(shape)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(CONFIGS[shape]["vocab_size"], (300,), generator=generator).tolist()
    truth = reference_logits(model, tokens)
    assert truth.std() > 1
    ours = all_logits(decoder_of_model(model, torch.float32, tmp_path), tokens)
    torch.testing.assert_close(ours, truth, atol=1e-3, rtol=0)
    rounded = all_logits(decoder_of_model(model, torch.bfloat16, tmp_path), tokens)
    theirs = reference_logits(model.to(torch.bfloat16), tokens)
    our_error, their_error = (
        (logits - truth).square().mean().sqrt().item() for logits in (rounded, theirs)
    )
    assert our_error <= 1.5 * their_error, f"{our_error} against transformers' {their_error}"
