"""From a model's settings to its spec: what all families have in common; `families.py` has the
rest.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quire.checkpoints.fields import Fields
from quire.checkpoints.files import read_json
from quire.checkpoints.gguf_settings import MAX_LAYERS
from quire.checkpoints.quantization_config import read_layout
from quire.errors import ModelFormatError, UnsupportedModelError
from quire.kernels.ops import MoeSpec
from quire.kernels.recurrent import RecurrentSpec
from quire.models.config_parts import (
    MAX_CONFIG_BYTES,
    plain_attention,
    read_activation,
    read_eos,
    read_rope,
)
from quire.models.defaults import defaults_of, with_defaults
from quire.models.families import FAMILIES
from quire.models.family import Family
from quire.models.latent_families import WITH_INDEXER
from quire.models.spec import LayerSpec, MlpSpec, ModelSpec


def read_config(path: Path) -> ModelSpec:
    """The spec of a model in Hugging Face layout, from its config.json and generation_config.json."""
    values: dict[str, Any] = read_json(path, MAX_CONFIG_BYTES, may_be_infinite=True)
    config = Fields(values, str(path))
    family = _find_family(config)
    read_layout(config)  # refuses ways of quantising that can't be read
    if "text_config" in config:  # of a model that also sees: its text part
        config.part("text_config")  # which is an object
        tied = values.get("tie_word_embeddings", family.ties_whole)
        values = dict(values["text_config"])
        if tied is not None and not family.text_has_head:
            values["tie_word_embeddings"] = tied
    config = Fields(with_defaults(family.name, values), str(path))
    if family.settings is not None:
        config = family.settings(config)
    return spec_of(family, config, path.with_name("generation_config.json"))


def spec_of(family: Family, config: Fields, generation_config: Path | None = None) -> ModelSpec:
    """The spec of a family's model whose settings have been read."""
    hidden_size = config.integer("hidden_size")
    num_heads = config.integer("num_attention_heads")
    num_layers = config.integer("num_hidden_layers", high=MAX_LAYERS)
    num_kv_heads = config.integer("num_key_value_heads", num_heads)
    head_dim = (
        config.integer("head_dim")
        if "head_dim" in config
        else config.head_size("hidden_size", num_heads)
    )
    defaults = defaults_of(family.name)
    rope = read_rope(
        config,
        head_dim,
        theta=config.number("rope_theta", defaults["rope_theta"]),
        is_partial=family.has_partial_rope,
        has_alpha=family.has_rope_alpha,
    )
    max_position = config.integer("max_position_embeddings", 2048, high=2**31)
    if rope.kind == "yarn":
        max_position = max(max_position, int(rope.original_max_position * rope.factor))
    activation = read_activation(config, defaults.get("hidden_activation", defaults["hidden_act"]))
    if "intermediate_size" not in config and "moe_intermediate_size" in config:
        size = config.integer("moe_intermediate_size")  # all layers have experts
    else:
        size = config.integer("intermediate_size")
    mlp = MlpSpec(size, activation)
    spec = ModelSpec(
        family=family.name,
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        rms_norm_eps=config.number("rms_norm_eps", 1e-6),
        layers=(LayerSpec(plain_attention(num_heads, num_kv_heads, head_dim), rope, mlp),)
        * num_layers,
        max_position=max_position,
        tie_embeddings=config.boolean("tie_word_embeddings", False),
        eos_token_ids=read_eos(config, generation_config),
        bos_token_id=config.integer("bos_token_id", low=0) if "bos_token_id" in config else None,
    )
    spec = family.quirks(config, spec)
    check_spec(spec, config.file)
    if "layer_types" in config and not family.numbers_blocks:
        _check_layer_types(config, spec)
    return spec


def _check_layer_types(config: Fields, spec: ModelSpec) -> None:
    """Refuses kinds of layers that are not those that are computed, also in families that don't
    read them.
    """
    kinds = config.list_of("layer_types", str)
    if len(kinds) != spec.num_layers:
        raise config.error("layer_types", f"a list of {spec.num_layers} kinds of layers", kinds)
    for number, (kind, layer) in enumerate(zip(kinds, spec.layers, strict=True)):
        computed = _kinds_of(layer)
        if kind not in computed:
            expected = f"{computed[0]} in layer {number} with the other settings of this model"
            raise config.error("layer_types", expected, kind)


def _kinds_of(layer: LayerSpec) -> tuple[str, ...]:
    """What files call such a layer."""
    attention = layer.attention
    if attention is None:
        return "linear_attention", "mamba", "conv"
    if len(layer.mixers) > 1:
        return "hybrid", "full_attention"
    if attention.sliding_window:
        return ("sliding_attention",)
    return ("chunked_attention",) if attention.chunk else ("full_attention", "attention")


def check_spec(spec: ModelSpec, file: str) -> None:
    """Refuses sizes that can't belong together, before anything is made of them."""

    def require(holds: bool, message: str) -> None:
        if not holds:
            raise ModelFormatError(f"{file}: {message}")

    for heads in spec.head_shapes:
        queries, keys = heads.num_heads, heads.num_kv_heads
        require(
            queries % keys == 0,
            f"{queries} attention heads can't share {keys} key-value heads evenly",
        )
        require(
            heads.head_dim % 2 == 0, f"head_dim is {heads.head_dim}, but rope needs an even number"
        )
    for mixer in spec.mixers:
        if isinstance(mixer, RecurrentSpec):
            keys, values = mixer.num_key_heads, mixer.num_value_heads
            require(values % keys == 0, f"{values} value heads can't share {keys} key heads evenly")
            require(mixer.value_dim > 0, f"{values} heads are more than there are values")
    for layer in spec.layers:
        attention = layer.attention
        if attention is not None and layer.rope is not None and layer.rope.kind == "factors":
            pairs = (layer.rope.rotated or attention.rotary_size) // 2
            for factors in (
                layer.rope.freq_factors,
                layer.rope.short_factors or layer.rope.freq_factors,
            ):
                require(
                    len(factors) == pairs, f"{len(factors)} rope factors for {pairs} frequencies"
                )
        if isinstance(layer.mlp, MoeSpec):
            top_k, num_experts = layer.mlp.top_k, layer.mlp.num_experts
            require(top_k <= num_experts, f"{top_k} experts per token of {num_experts}")


def _find_family(config: Fields) -> Family:
    names = config.list_of("architectures", str, [])
    if not names:
        model_type = config.string("model_type", "")
        names = [f.architectures[0] for f in FAMILIES if f.name == model_type] or [
            f"model_type {model_type!r}"
        ]
    fitting = [family for family in FAMILIES if names[0] in family.architectures]
    if fitting:  # a model that also sees says which family its text part is of
        part = config.part("text_config").string("model_type", "")
        return next((family for family in fitting if family.name == part), fitting[0])
    if names[0] in ("Gemma3nForCausalLM", "Gemma3nForConditionalGeneration"):
        raise UnsupportedModelError(
            f"{config.file}: {names[0]} keeps several residual streams that every layer mixes (AltUp), which Quire "
            "does not compute. Gemma 3 and Gemma 4 run."
        )
    if names[0] in WITH_INDEXER:
        raise UnsupportedModelError(
            f"{config.file}: {names[0]} chooses the tokens that a query sees by a sparse indexer, which Quire does not "
            "compute yet. DeepSeek-V3 and GLM-4.7-Flash, which have none, run."
        )
    supported = ", ".join(name for family in FAMILIES for name in family.architectures)
    raise UnsupportedModelError(
        f"{config.file}: the architecture {names[0]} is not supported. Supported: {supported}."
    )
