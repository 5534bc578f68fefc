"""Adapters for tests: made by PEFT for models of transformers, or written by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from quire.kernels.ops import MoeSpec
from quire.models.decoder import Decoder
from quire.models.spec import MlpSpec

SETTINGS: dict[str, Any] = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "r": 4,
    "lora_alpha": 8,
    "bias": "none",
    "base_model_name_or_path": "base",
}


def save_adapter(folder: Path, tensors: Mapping[str, Tensor], **settings: Any) -> Path:
    """A folder as PEFT writes it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({**SETTINGS, **settings}))
    save_file(
        {name: one.contiguous() for name, one in tensors.items()},
        folder / "adapter_model.safetensors",
    )
    return folder


KINDS = ("", "copies", "tokens", "pair")
"""What an adapter changes of embedding and head: nothing, all of both, some tokens' rows, or both by
low rank.
"""


def random_adapter(
    folder: Path, decoder: Decoder, seed: int, rank: int = 4, size: float = 0.3, kind: str = ""
) -> Path:
    """One for attention's projections, dense MLPs and every other expert of a decoder in Hugging
    Face's names; and of a kind for embedding and head.
    """
    source = torch.Generator().manual_seed(seed)
    spec, tensors = decoder.spec, {}
    settings: dict[str, Any] = {"r": rank, "lora_alpha": 2 * rank}

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=source) * size

    def add(module: str, outputs: int, inputs: int) -> None:
        name = f"base_model.model.model.layers.{module}"
        tensors[f"{name}.lora_A.weight"] = torch.randn(rank, inputs, generator=source) * size
        tensors[f"{name}.lora_B.weight"] = torch.randn(outputs, rank, generator=source) * size

    for number, layer in enumerate(spec.layers):
        attention = layer.attention
        assert attention is not None
        heads = attention.heads
        query, kv = heads.num_heads * heads.head_dim, heads.num_kv_heads * heads.head_dim
        for side, width in (("q", query), ("k", kv), ("v", kv)):
            add(f"{number}.self_attn.{side}_proj", width, spec.hidden_size)
        add(f"{number}.self_attn.o_proj", spec.hidden_size, query)
        if isinstance(layer.mlp, MlpSpec):
            inner = layer.mlp.intermediate_size
            up, down = ("up_proj", "down_proj") if layer.mlp.gated else ("c_fc", "c_proj")
            if layer.mlp.gated:
                add(f"{number}.mlp.gate_proj", inner, spec.hidden_size)
            add(f"{number}.mlp.{up}", inner, spec.hidden_size)
            add(f"{number}.mlp.{down}", spec.hidden_size, inner)
        elif isinstance(layer.mlp, MoeSpec):
            inner = layer.mlp.intermediate_size
            for expert in range(0, layer.mlp.num_experts, 2):
                add(f"{number}.mlp.experts.{expert}.gate_proj", inner, spec.hidden_size)
                add(f"{number}.mlp.experts.{expert}.down_proj", spec.hidden_size, inner)
    vocab, hidden = spec.vocab_size, spec.hidden_size
    embedding, head = "base_model.model.model.embed_tokens", "base_model.model.lm_head"
    if kind == "copies":
        settings["modules_to_save"] = ["embed_tokens", "lm_head"]
        tensors |= {f"{one}.weight": drawn(vocab, hidden) for one in (embedding, head)}
    elif kind == "tokens":
        settings["trainable_token_indices"] = list(range(vocab - 1, 2, -3))
        count = len(settings["trainable_token_indices"])
        tensors[f"{embedding}.token_adapter.trainable_tokens_delta"] = drawn(count, hidden)
    elif kind == "pair":
        tensors[f"{embedding}.lora_embedding_A"] = drawn(rank, vocab)
        tensors[f"{embedding}.lora_embedding_B"] = drawn(hidden, rank)
        tensors[f"{head}.lora_A.weight"] = drawn(rank, hidden)
        tensors[f"{head}.lora_B.weight"] = drawn(vocab, rank)
    return save_adapter(folder, tensors, **settings)
