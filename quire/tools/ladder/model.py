"""Before rung 1, the model itself: each part of a decoder in a few lines of plain torch, for one
sequence.

It computes what `quire/models/decoder.py` computes with the kernels, from the same weights, so both
can be compared:

    python -m quire.tools.ladder.model            SmolLM2's next token, and how far the two are apart
    python -m quire.tools.ladder.model FOLDER     of another model
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from quire.errors import UnsupportedModelError
from quire.kernels.ops import AttentionSpec, MoeSpec
from quire.kernels.reference import ReferenceKernels
from quire.models.decoder import Decoder
from quire.models.spec import LayerSpec, MlpSpec, ModelSpec, RopeSpec
from quire.tools.ladder.contiguous import ContiguousCache, as_token_tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Every row divided by its root mean square, so that all have the same size; then each
    dimension times its own factor. `eps` keeps a row of zeros from being divided by zero.
    """
    return x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rotate(x: Tensor, theta: float) -> Tensor:
    """RoPE: x [tokens, heads, size]. Dimension i and i + size / 2 are the two coordinates of a
    point, which is turned by the token's position times theta^(-2i / size): the first pair turns
    fast, the last one hardly at all.
    """
    half = x.shape[-1] // 2
    speeds = theta ** (-torch.arange(half) / half)
    angles = (torch.arange(len(x)).unsqueeze(1) * speeds).unsqueeze(1)
    first, second = x[..., :half], x[..., half:]
    turned = (
        first * angles.cos() - second * angles.sin(),
        second * angles.cos() + first * angles.sin(),
    )
    return torch.cat(turned, -1)


def softmax(scores: Tensor) -> Tensor:
    """exp(score) of each, divided by their sum. The largest is taken off first: it changes nothing,
    and without it a score of 100 would already be infinite in float32 (exp(89) is).
    """
    powers = (scores - scores.amax(-1, keepdim=True)).exp()
    return powers / powers.sum(-1, keepdim=True)


def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Each token looks at itself and those before it: [tokens, heads, size] all three, with fewer
    heads of keys and values than of queries (grouped-query attention): a few query heads share one.
    """
    shared = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) / query.shape[-1] ** 0.5
    later = torch.ones(len(query), len(key), dtype=torch.bool).triu(1)
    return torch.einsum("hqk,khd->qhd", softmax(scores.masked_fill(later, -torch.inf)), value)


def swiglu(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """The MLP: one product says how far each of many features is opened (gate), another what it
    holds (up); down mixes them back into a row of the model's size. x * sigmoid(x) is called SiLU
    or swish.
    """
    gate, up = (x @ gate_up.T).chunk(2, -1)
    return (gate * torch.sigmoid(gate) * up) @ down.T


def experts(x: Tensor, router: Tensor, gate_up: Tensor, down: Tensor, spec: MoeSpec) -> Tensor:
    """Many MLPs of which each token uses a few: a router scores them, and the best are mixed by
    their probability.
    """
    probabilities = softmax(x @ router.T)
    weights, chosen = probabilities.topk(spec.top_k, -1)
    if spec.normalize_weights:
        weights = weights / weights.sum(-1, keepdim=True)
    mixed = torch.zeros_like(x)
    for token, row in enumerate(x):
        for weight, number in zip(weights[token], chosen[token].tolist(), strict=True):
            mixed[token] += weight * swiglu(
                row.unsqueeze(0), gate_up[number], down[number]
            ).squeeze(0)
    return mixed


def forward(decoder: Decoder, tokens: Sequence[int]) -> Tensor:
    """Scores [tokens, vocabulary] of what may follow each token. The residual stream `x` starts as
    the tokens' embeddings; every layer reads a normed copy of it and adds what it found.
    """
    weights = {name: weight.tensor.float() for name, weight in decoder.weights.items()}
    spec = decoder.spec
    x = weights["embedding"][torch.tensor(tokens)]
    _check(spec)
    for i, layer in enumerate(spec.layers):
        prefix = f"layers.{i}."
        own = {
            name.removeprefix(prefix): one
            for name, one in weights.items()
            if name.startswith(prefix)
        }
        x = x + _attend(
            rms_norm(x, own["attention_norm"], spec.rms_norm_eps), own, layer, spec.rms_norm_eps
        )
        x = x + _think(rms_norm(x, own["mlp_norm"], spec.rms_norm_eps), own, layer)
    head = weights["embedding"] if spec.tie_embeddings else weights["head"]
    return rms_norm(x, weights["final_norm"], spec.rms_norm_eps) @ head.T


def _attend(x: Tensor, own: dict[str, Tensor], layer: LayerSpec, eps: float) -> Tensor:
    """Projects to queries, keys and values, lets tokens look back, and mixes the heads."""
    assert layer.attention is not None
    heads = layer.attention.heads
    projected = x @ own["attention.qkv.weight"].T + own.get("attention.qkv.bias", torch.zeros(()))
    sizes = [
        count * heads.head_dim
        for count in (heads.num_heads, heads.num_kv_heads, heads.num_kv_heads)
    ]
    query, key, value = (
        part.view(len(x), -1, heads.head_dim) for part in projected.split_with_sizes(sizes, -1)
    )
    if layer.qk_norm:
        query, key = (
            rms_norm(query, own["attention.query_norm"], eps),
            rms_norm(key, own["attention.key_norm"], eps),
        )
    assert layer.rope is not None
    looked = attention(rotate(query, layer.rope.theta), rotate(key, layer.rope.theta), value)
    return looked.flatten(1) @ own["attention.output.weight"].T


def _think(x: Tensor, own: dict[str, Tensor], layer: LayerSpec) -> Tensor:
    if isinstance(layer.mlp, MoeSpec):
        return experts(x, own["mlp.router.weight"], own["mlp.gate_up"], own["mlp.down"], layer.mlp)
    return swiglu(x, own["mlp.gate_up.weight"], own["mlp.down.weight"])


def _check(spec: ModelSpec) -> None:
    """This file shows what most families have in common; the decoder does the rest."""
    plain = ModelSpec(
        spec.family,
        spec.vocab_size,
        spec.hidden_size,
        spec.rms_norm_eps,
        tuple(map(_plain, spec.layers)),
        spec.max_position,
        tie_embeddings=spec.tie_embeddings,
        eos_token_ids=spec.eos_token_ids,
        bos_token_id=spec.bos_token_id,
    )
    if spec != plain:
        raise UnsupportedModelError(
            f"{spec.family} has more to it than quire/tools/ladder/model.py shows"
        )


def _plain(layer: LayerSpec) -> LayerSpec:
    """A layer of the same sizes without anything special."""
    assert layer.attention is not None
    heads, mlp = layer.attention.heads, layer.mlp
    assert mlp is not None
    same: MlpSpec | MoeSpec = MlpSpec(mlp.intermediate_size)
    if isinstance(mlp, MoeSpec):
        same = MoeSpec(mlp.num_experts, mlp.top_k, mlp.intermediate_size, mlp.normalize_weights)
    rope = RopeSpec(layer.rope.theta if layer.rope is not None else 0.0)
    attention = AttentionSpec(heads, heads.head_dim**-0.5)
    return LayerSpec(attention, rope, same, qk_norm=layer.qk_norm, qkv_bias=layer.qkv_bias)


@torch.inference_mode()
def compare(decoder: Decoder, tokens: Sequence[int]) -> tuple[float, int]:
    """The largest difference between these logits and the decoder's, and the likeliest next token."""
    ours = forward(decoder, tokens)
    cache = ContiguousCache(decoder, 1, len(tokens))
    batch = cache.batch(decoder, [(0, 0, len(tokens))])
    hidden = decoder(
        as_token_tensor(decoder, tokens), torch.arange(len(tokens)), (batch,), cache.layers
    )
    return float((ours - decoder.logits(hidden).float()).abs().max()), int(ours[-1].argmax())


def main(model: str = "smollm2", text: str = "The capital of France is") -> None:
    from quire.checkpoints.sources import resolve
    from quire.load import open_tokenizer
    from quire.models.load import load_planned, open_model
    from quire.models.weight_plan import plan_weights

    source = resolve(model)
    files, tokenizer = open_model(source.path), open_tokenizer(source)
    plan = plan_weights(
        files, ReferenceKernels(), torch.float32, torch.device("cpu"), quantization="none"
    )
    decoder = load_planned(plan, max_position=1024)
    difference, following = compare(decoder, tokenizer.encode(text))
    print(f"{text!r} goes on with {tokenizer.decode([following])!r}")
    print(f"largest difference from the decoder's logits: {difference:.1e}")


if __name__ == "__main__":
    main(*sys.argv[1:])
