"""What a model's files hold, and what the model takes on this machine, before any of it is loaded."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from quire.backends.select import pick_device
from quire.checkpoints.sources import ModelSource
from quire.config import EngineConfig, format_bytes
from quire.errors import QuireError
from quire.frontend.tokenizer import Tokenizer
from quire.kernels.ops import MoeSpec
from quire.load import open_tokenizer
from quire.models.load import open_model
from quire.models.spec import ModelSpec
from quire.models.weight_plan import ModelFiles
from quire.runner.dtypes import pick_cache_dtype
from quire.runner.kv_cache import token_bytes
from quire.runner.worker import choose_weights, expected_plan


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """A tensor of the files, or several that are alike."""

    name: str
    shape: tuple[int, ...]
    format: str
    num_bytes: int
    count: int = 1


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """All that can be said without loading."""

    source: str
    spec: dict[str, Any]
    tensors: tuple[TensorFacts, ...]
    tokenizer: dict[str, Any]
    templates: dict[str, str]
    memory: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def look_at(source: ModelSource, config: EngineConfig) -> tuple[ModelFacts, ModelFiles, Tokenizer]:
    """The facts, the opened files (for whoever goes on with them) and the tokenizer."""
    files = open_model(source.path)
    tokenizer = open_tokenizer(source)
    infos = files.checkpoint.tensors.values()
    tensors = tuple(TensorFacts(one.name, one.shape, one.dtype, one.num_bytes) for one in infos)
    facts = ModelFacts(
        source=f"{source.name}: {source.path} ({files.checkpoint.kind}; {source.origin})",
        spec=spec_facts(files.spec),
        tensors=tensors,
        tokenizer=_tokenizer_facts(tokenizer),
        templates=dict(tokenizer.chat_templates),
        memory=_memory(files, config),
    )
    return facts, files, tokenizer


def spec_facts(spec: ModelSpec) -> dict[str, Any]:
    """The settings people look for first, by their names in config.json where they have one."""
    first = spec.layers[0]
    shapes = (
        f"{one.num_heads} of {one.head_dim}, {one.num_kv_heads} for keys and values"
        for one in spec.head_shapes
    )
    facts: dict[str, Any] = {
        "family": spec.family,
        "parameters": spec.num_parameters,
        "layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "heads": "; ".join(shapes),
        "vocab_size": spec.vocab_size,
        "max_position": spec.max_position,
        "tied_embeddings": spec.tie_embeddings,
        "norm": ("LayerNorm" if spec.layer_norm else "RMSNorm") + f", eps {spec.rms_norm_eps:g}",
        "eos_token_ids": list(spec.eos_token_ids),
    }
    if first.rope is not None:
        facts["rope"] = f"{first.rope.kind}, theta {first.rope.theta:g}"
    sizes = dict.fromkeys(
        layer.mlp.intermediate_size for layer in spec.layers if layer.mlp is not None
    )
    facts["intermediate_size"] = ", ".join(map(str, sizes))
    experts = next((layer.mlp for layer in spec.layers if isinstance(layer.mlp, MoeSpec)), None)
    if experts is not None:
        facts["experts"] = f"{experts.top_k} of {experts.num_experts}"
    attention = (layer.attention for layer in spec.layers)
    windows = dict.fromkeys(one.sliding_window for one in attention if one is not None)
    if any(windows):
        facts["attention_windows"] = ", ".join(
            "all" if one is None else str(one) for one in windows
        )
    return facts


def grouped(tensors: Sequence[TensorFacts]) -> list[TensorFacts]:
    """Tensors that are alike in all layers as one line, the number of the layer (or expert) as a
    star.
    """
    groups: dict[tuple[str, tuple[int, ...], str], TensorFacts] = {}
    for one in tensors:
        pattern = re.sub(r"(?<=\.)\d+(?=\.)", "*", one.name)
        key = (pattern, one.shape, one.format)
        known = groups.get(key)
        count, size = (0, 0) if known is None else (known.count, known.num_bytes)
        groups[key] = TensorFacts(pattern, one.shape, one.format, size + one.num_bytes, count + 1)
    return list(groups.values())


def golden_tokens(source: ModelSource) -> list[int] | None:
    """The tokens that somebody put beside the weights to compare answers with (`test_tokens.npy`)."""
    file = source.path / "test_tokens.npy"
    return (
        np.load(file, allow_pickle=False).tolist()
        if source.path.is_dir() and file.exists()
        else None
    )


def _tokenizer_facts(tokenizer: Tokenizer) -> dict[str, Any]:
    def spelt(token_id: int) -> str:
        return tokenizer.id_to_token(token_id) if token_id < tokenizer.vocab_size else "(no token)"

    example = "Hello, world!"
    ids = tokenizer.encode(example)
    return {
        "tokens": tokenizer.vocab_size,
        "special": len(tokenizer.special_token_ids),
        "bos": None if tokenizer.bos_token_id is None else spelt(tokenizer.bos_token_id),
        "eos": [spelt(token_id) for token_id in tokenizer.eos_token_ids],
        "example": f"{example!r} is {ids}",
    }


def _memory(files: ModelFiles, config: EngineConfig) -> dict[str, Any]:
    """What loading it here would take, and what would be left for the cache; or why it can't be."""
    device = pick_device(config.device)
    facts: dict[str, Any] = {"device": str(device), "free": format_bytes(device.free_memory())}
    try:
        weights = choose_weights(files, config, device)
        facts["weights"] = f"{format_bytes(weights.nbytes)} ({weights.describe()})"
        cache_dtype = pick_cache_dtype(
            config.kv_cache_dtype, weights.dtype, device, files.spec.cache
        )
        facts["cache_per_token"] = format_bytes(token_bytes(files.spec, 1, cache_dtype))
        facts["cache"] = expected_plan(weights, config).describe()
    except QuireError as error:
        facts["problem"] = str(error)
    return facts
