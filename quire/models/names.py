"""Which tensor of a checkpoint fills which part of which parameter of the decoder."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from quire.models.families import Family, family_named
from quire.models.spec import ModelSpec

Index = tuple[int | slice, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """One tensor of the checkpoint and where it goes."""

    name: str
    """Its name in the checkpoint."""
    parameter: str
    """The decoder's parameter, by its dotted path."""
    index: Index = ()
    """The part of that parameter it fills."""
    interleaved_heads: int = 0
    """If not 0: its rows are this many heads, each in the order of rope over neighbouring dimensions."""


@dataclass(frozen=True, slots=True)
class _LayerNames:
    """A layer's tensor names below the layer's prefix; `weight` and `bias` are appended."""

    attention_norm: str
    query: str
    key: str
    value: str
    output: str
    query_norm: str
    key_norm: str
    mlp_norm: str
    gate: str
    up: str
    down: str
    router: str
    expert_gate: str
    expert_up: str
    expert_down: str
    shared_gate: str
    shared_up: str
    shared_down: str
    shared_router: str


_GGUF_LAYER = _LayerNames(
    attention_norm="attn_norm",
    query="attn_q",
    key="attn_k",
    value="attn_v",
    output="attn_output",
    query_norm="attn_q_norm",
    key_norm="attn_k_norm",
    mlp_norm="ffn_norm",
    gate="ffn_gate",
    up="ffn_up",
    down="ffn_down",
    router="ffn_gate_inp",
    expert_gate="ffn_gate_exps",
    expert_up="ffn_up_exps",
    expert_down="ffn_down_exps",
    shared_gate="ffn_gate_shexp",
    shared_up="ffn_up_shexp",
    shared_down="ffn_down_shexp",
    shared_router="ffn_gate_inp_shexp",
)


def _huggingface_layer(family: Family) -> _LayerNames:
    return _LayerNames(
        attention_norm="input_layernorm",
        query="self_attn.q_proj",
        key="self_attn.k_proj",
        value="self_attn.v_proj",
        output="self_attn.o_proj",
        query_norm="self_attn.q_norm",
        key_norm="self_attn.k_norm",
        mlp_norm="post_attention_layernorm",
        gate="mlp.gate_proj",
        up="mlp.up_proj",
        down="mlp.down_proj",
        router=family.moe_names.router,
        expert_gate=family.moe_names.gate,
        expert_up=family.moe_names.up,
        expert_down=family.moe_names.down,
        shared_gate="mlp.shared_expert.gate_proj",
        shared_up="mlp.shared_expert.up_proj",
        shared_down="mlp.shared_expert.down_proj",
        shared_router="mlp.shared_expert_gate",
    )


def huggingface_pieces(spec: ModelSpec, present: Collection[str]) -> Iterator[Piece]:
    """`present` are the names in the checkpoint: experts come one by one or stacked."""
    family = family_named(spec.family)
    yield Piece("model.embed_tokens.weight", "embedding")
    for i in range(spec.num_layers):
        yield from _layer_pieces(spec, i, f"model.layers.{i}.", _huggingface_layer(family), False, present)
    yield Piece("model.norm.weight", "final_norm")
    if not spec.tie_embeddings:
        yield Piece("lm_head.weight", "head")


def gguf_pieces(spec: ModelSpec, present: Collection[str]) -> Iterator[Piece]:
    interleaved = family_named(spec.family).gguf_interleaved_rope
    yield Piece("token_embd.weight", "embedding")
    for i in range(spec.num_layers):
        yield from _layer_pieces(spec, i, f"blk.{i}.", _GGUF_LAYER, interleaved, present)
    yield Piece("output_norm.weight", "final_norm")
    if not spec.tie_embeddings:
        yield Piece("output.weight", "head")


def ignored_names(spec: ModelSpec, present: Collection[str]) -> set[str]:
    """Tensors some checkpoints carry though the decoder has no use for them."""
    unused = {name for name in present if name.endswith(".rotary_emb.inv_freq")}
    if spec.rope.kind == "factors":
        unused.add("rope_freqs.weight")
    if spec.tie_embeddings:
        unused.add("lm_head.weight")
    return unused


def _layer_pieces(
    spec: ModelSpec, i: int, prefix: str, names: _LayerNames, interleaved: bool, present: Collection[str]
) -> Iterator[Piece]:
    to = f"layers.{i}."
    yield Piece(f"{prefix}{names.attention_norm}.weight", f"{to}attention_norm")
    yield Piece(f"{prefix}{names.mlp_norm}.weight", f"{to}mlp_norm")
    if spec.qk_norm:
        yield Piece(f"{prefix}{names.query_norm}.weight", f"{to}attention.query_norm")
        yield Piece(f"{prefix}{names.key_norm}.weight", f"{to}attention.key_norm")
    yield from _qkv_pieces(spec, prefix, to, names, interleaved)
    yield from _weight_and_bias(f"{prefix}{names.output}", f"{to}attention.output", spec.output_bias)
    if spec.layers[i].use_moe:
        yield from _expert_pieces(spec, prefix, f"{to}mlp.", names, present)
    else:
        yield from _mlp_pieces(
            prefix, f"{to}mlp.", (names.gate, names.up, names.down), spec.intermediate_size, spec.mlp_bias
        )


def _qkv_pieces(spec: ModelSpec, prefix: str, to: str, names: _LayerNames, interleaved: bool) -> Iterator[Piece]:
    start = 0
    for name, heads, rotated in (
        (names.query, spec.num_heads, True),
        (names.key, spec.num_kv_heads, True),
        (names.value, spec.num_kv_heads, False),
    ):
        rows = slice(start, start + heads * spec.head_dim)
        start = rows.stop
        reorder = heads if interleaved and rotated else 0
        yield Piece(f"{prefix}{name}.weight", f"{to}attention.qkv.weight", (rows,), reorder)
        if spec.qkv_bias:
            yield Piece(f"{prefix}{name}.bias", f"{to}attention.qkv.bias", (rows,), reorder)


def _mlp_pieces(prefix: str, to: str, names: tuple[str, str, str], size: int, bias: bool) -> Iterator[Piece]:
    gate, up, down = names
    yield from _weight_and_bias(f"{prefix}{gate}", f"{to}gate_up", bias, (slice(0, size),))
    yield from _weight_and_bias(f"{prefix}{up}", f"{to}gate_up", bias, (slice(size, 2 * size),))
    yield from _weight_and_bias(f"{prefix}{down}", f"{to}down", bias)


def _expert_pieces(
    spec: ModelSpec, prefix: str, to: str, names: _LayerNames, present: Collection[str]
) -> Iterator[Piece]:
    moe = spec.moe
    assert moe is not None
    yield Piece(f"{prefix}{names.router}.weight", f"{to}router.weight")
    gate_rows, up_rows = slice(0, moe.intermediate_size), slice(moe.intermediate_size, 2 * moe.intermediate_size)
    packed = family_named(spec.family).moe_names
    if f"{prefix}{packed.packed_gate_up}" in present:
        yield Piece(f"{prefix}{packed.packed_gate_up}", f"{to}gate_up")
        yield Piece(f"{prefix}{packed.packed_down}", f"{to}down")
    elif "{expert}" in names.expert_gate:
        for expert in range(moe.num_experts):
            gate, up, down = (
                name.format(expert=expert) for name in (names.expert_gate, names.expert_up, names.expert_down)
            )
            yield Piece(f"{prefix}{gate}.weight", f"{to}gate_up", (expert, gate_rows))
            yield Piece(f"{prefix}{up}.weight", f"{to}gate_up", (expert, up_rows))
            yield Piece(f"{prefix}{down}.weight", f"{to}down", (expert,))
    else:
        everyone = slice(None)
        yield Piece(f"{prefix}{names.expert_gate}.weight", f"{to}gate_up", (everyone, gate_rows))
        yield Piece(f"{prefix}{names.expert_up}.weight", f"{to}gate_up", (everyone, up_rows))
        yield Piece(f"{prefix}{names.expert_down}.weight", f"{to}down")
    if moe.shared_intermediate_size:
        shared = (names.shared_gate, names.shared_up, names.shared_down)
        yield from _mlp_pieces(prefix, f"{to}shared.", shared, moe.shared_intermediate_size, False)
        yield Piece(f"{prefix}{names.shared_router}.weight", f"{to}shared_gate.weight")


def _weight_and_bias(name: str, parameter: str, bias: bool, index: Index = ()) -> Iterator[Piece]:
    yield Piece(f"{name}.weight", f"{parameter}.weight", index)
    if bias:
        yield Piece(f"{name}.bias", f"{parameter}.bias", index)
