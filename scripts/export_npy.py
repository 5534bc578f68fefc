"""Writes a tiny Llama-style model as one .npy file per weight, with tokens and logits to check a
loader by.

The logits come from the forward pass below, which is written straight from the definition of the
architecture and shares no code with Quire: if Quire loads the folder and gets the same logits, both
the loading and the decoder are right. Asked as text (its tokens are bytes), the model goes on with
the alphabet.

    python scripts/export_npy.py --out tiny-llama
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

NUM_LAYERS, NUM_HEADS, HIDDEN, INTERMEDIATE, VOCABULARY = 2, 4, 256, 1024, 16384
HEAD_DIM = HIDDEN // NUM_HEADS
NUM_TEST_TOKENS, MAX_POSITION, ROPE_THETA, EPSILON = 48, 512, 10000.0, 1e-5

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": NUM_HEADS,
    "num_key_value_heads": NUM_HEADS,
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "max_position_embeddings": MAX_POSITION,
    "rms_norm_eps": EPSILON,
    "rope_theta": ROPE_THETA,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}


def make_weights(seed: int) -> dict[str, Tensor]:
    """Random weights under their Hugging Face names, scaled so that activations stay of size one."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator) / math.sqrt(columns)

    def norm() -> Tensor:
        return 1 + 0.1 * torch.randn(HIDDEN, generator=generator)

    weights = {"model.embed_tokens.weight": torch.randn(VOCABULARY, HIDDEN, generator=generator)}
    for layer in range(NUM_LAYERS):
        prefix = f"model.layers.{layer}"
        weights[f"{prefix}.input_layernorm.weight"] = norm()
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            weights[f"{prefix}.self_attn.{name}.weight"] = matrix(HIDDEN, HIDDEN)
        weights[f"{prefix}.post_attention_layernorm.weight"] = norm()
        weights[f"{prefix}.mlp.gate_proj.weight"] = matrix(INTERMEDIATE, HIDDEN)
        weights[f"{prefix}.mlp.up_proj.weight"] = matrix(INTERMEDIATE, HIDDEN)
        weights[f"{prefix}.mlp.down_proj.weight"] = matrix(HIDDEN, INTERMEDIATE)
    weights["model.norm.weight"] = norm()
    weights["lm_head.weight"] = _readable(
        matrix(VOCABULARY, HIDDEN), weights["model.embed_tokens.weight"]
    )
    return weights


def _readable(head: Tensor, embedding: Tensor) -> Tensor:
    """A head that makes random layers write what one can read, in a vocabulary whose first 256
    tokens are bytes.

    The residual stream still holds much of the last token's embedding when it reaches the head. Of
    each letter it is added to the row of the next one, so "abc" goes on with "defg"; and printable
    characters score higher than the rest.
    """
    head[32:127] *= 3
    for cycle in ("abcdefghijklmnopqrstuvwxyz ", "ABCDEFGHIJKLMNOPQRSTUVWXYZ", "0123456789,"):
        for character, following in zip(cycle, cycle[1:] + cycle[0], strict=True):
            vector = embedding[ord(character)]
            head[ord(following)] += 3 * vector / vector.norm()
    return head


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + EPSILON) * weight


def rope(x: Tensor) -> Tensor:
    """Turns the pair (i, i + half) of the vector at position p by the angle p * theta^(-i / half)."""
    half = HEAD_DIM // 2
    positions = torch.arange(x.shape[0], dtype=x.dtype)
    frequencies = ROPE_THETA ** (-torch.arange(half, dtype=x.dtype) / half)
    angles = (positions[:, None] * frequencies[None, :])[:, None, :]
    left, right = x[..., :half], x[..., half:]
    turned_left = left * angles.cos() - right * angles.sin()
    turned_right = right * angles.cos() + left * angles.sin()
    return torch.cat([turned_left, turned_right], dim=-1)


def attention(x: Tensor, weights: dict[str, Tensor], prefix: str) -> Tensor:
    count = x.shape[0]
    query, key, value = (
        (x @ weights[f"{prefix}.{name}_proj.weight"].T).view(count, NUM_HEADS, HEAD_DIM)
        for name in "qkv"
    )
    scores = torch.einsum("qhd,khd->hqk", rope(query), rope(key)) / HEAD_DIM**0.5
    future = torch.ones(count, count, dtype=torch.bool).triu(1)
    probabilities = scores.masked_fill(future, -torch.inf).softmax(-1)
    mixed = torch.einsum("hqk,khd->qhd", probabilities, value).reshape(count, HIDDEN)
    return mixed @ weights[f"{prefix}.o_proj.weight"].T


def mlp(x: Tensor, weights: dict[str, Tensor], prefix: str) -> Tensor:
    gate = x @ weights[f"{prefix}.gate_proj.weight"].T
    up = x @ weights[f"{prefix}.up_proj.weight"].T
    return (gate * torch.sigmoid(gate) * up) @ weights[f"{prefix}.down_proj.weight"].T


def forward(tokens: Tensor, weights: dict[str, Tensor]) -> Tensor:
    """Logits [tokens, vocabulary] of one sequence, every position at once, in the weights' dtype."""
    x = weights["model.embed_tokens.weight"][tokens]
    for layer in range(NUM_LAYERS):
        prefix = f"model.layers.{layer}"
        normed = rms_norm(x, weights[f"{prefix}.input_layernorm.weight"])
        x = x + attention(normed, weights, f"{prefix}.self_attn")
        normed = rms_norm(x, weights[f"{prefix}.post_attention_layernorm.weight"])
        x = x + mlp(normed, weights, f"{prefix}.mlp")
    return rms_norm(x, weights["model.norm.weight"]) @ weights["lm_head.weight"].T


def export(out: Path, seed: int) -> None:
    out.mkdir(parents=True, exist_ok=True)
    weights = make_weights(seed)
    for name, weight in weights.items():
        np.save(out / f"{name}.npy", weight.numpy(), allow_pickle=False)
    (out / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    generator = torch.Generator().manual_seed(seed + 1)
    tokens = torch.randint(VOCABULARY, (NUM_TEST_TOKENS,), generator=generator)
    # In float64, so that the expected logits carry no rounding of their own.
    logits = forward(tokens, {name: weight.double() for name, weight in weights.items()})
    np.save(out / "test_tokens.npy", tokens.numpy(), allow_pickle=False)
    np.save(out / "test_logits.npy", logits.float().numpy(), allow_pickle=False)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a tiny Llama-style model as .npy files.")
    parser.add_argument(
        "--out", type=Path, required=True, help="folder to write to; made if missing"
    )
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    export(arguments.out, arguments.seed)
    print(f"{arguments.out}: {len(list(arguments.out.glob('*.npy')))} .npy files")


if __name__ == "__main__":
    main()
