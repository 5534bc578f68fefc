"""Random adapters for the decode benchmark: made in memory, for all products of attention and MLP, or
attention's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from quire.engine import Request, make_requests
from quire.kernels.low_rank import LowRank, LowRankPart, PackedLowRank
from quire.models.adapters import Adapter
from quire.models.spec import MlpSpec
from quire.sampling_params import ResolvedTokens
from quire.tools.bench.random_engine import Machine, requests_for


def make_adapters(machine: Machine, count: int, rank: int, of: str = "all") -> list[str]:
    """Digests of so many adapters that the engine has read, `of` all products or of attention's."""
    runner = machine.engine.runner
    names = [f"random-{rank}-{number}" for number in range(count)]
    for number, name in enumerate(names):
        products = _products(machine, rank, number, "" if of == "all" else of)
        runner.load_adapter(Path(name), Adapter(name, products, rank))
    return names


def adapted_requests(
    prompts: Sequence[Sequence[int]], steps: int, prefix: str, digests: Sequence[str]
) -> list[Request]:
    """One request per prompt, over these adapters in turn; without any, as `requests_for`."""
    plain = requests_for(prompts, [steps] * len(prompts), prefix)
    if not digests:
        return plain
    found = []
    for number, one in enumerate(plain):
        resolved = ResolvedTokens(adapter=digests[number % len(digests)])
        made = make_requests(
            one.request_id, one.prompt_token_ids, one.params, number, resolved=resolved
        )
        found += made
    return found


def _products(machine: Machine, rank: int, seed: int, of: str) -> dict[str, PackedLowRank]:
    """Of the products whose name in a layer begins so."""
    decoder, spec = machine.engine.decoder, machine.spec
    source = torch.Generator(decoder.device).manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        drawn = torch.randn(*shape, generator=source, device=decoder.device)
        return (drawn * 0.02).to(decoder.dtype)

    def product(inputs: int, outputs: Sequence[int]) -> PackedLowRank:
        parts, first = [], 0
        for place, size in enumerate(outputs):
            parts.append(LowRankPart(first, place * rank, random(size, rank)))
            first += size
        ranks = len(outputs) * rank
        scale = torch.full((ranks,), 2.0, device=decoder.device)
        return decoder.kernels.pack_low_rank(LowRank(random(ranks, inputs), scale, tuple(parts)))

    found: dict[str, PackedLowRank] = {}
    for number, layer in enumerate(spec.layers):
        attention, mlp = layer.attention, layer.mlp
        if attention is None or not isinstance(mlp, MlpSpec) or not mlp.gated:
            raise ValueError(
                f"--lora: layer {number} of {machine.shape} has no plain attention and gated MLP; try qwen3-8b"
            )
        heads, name = attention.heads, f"layers.{number}"
        query, kv = heads.num_heads * heads.head_dim, heads.num_kv_heads * heads.head_dim
        inner, hidden = mlp.intermediate_size, spec.hidden_size
        for own, inputs, outputs in (
            ("attention.qkv", hidden, (query, kv, kv)),
            ("attention.output", query, (hidden,)),
            ("mlp.gate_up", hidden, (inner, inner)),
            ("mlp.down", inner, (hidden,)),
        ):
            if own.startswith(of):
                found[f"{name}.{own}"] = product(inputs, outputs)
    unknown = found.keys() - decoder.linears.keys()
    assert not unknown, unknown
    return found
