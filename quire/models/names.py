"""Which tensor of a checkpoint fills which part of which parameter of the decoder."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from quire.kernels.ops import MoeSpec
from quire.models.families import Family, MoeNames, family_named
from quire.models.spec import LayerSpec, MlpSpec, ModelSpec, Parameter


@dataclass(frozen=True, slots=True)
class Piece:
    """One tensor of the checkpoint and where it goes."""

    name: str
    """Its name in the checkpoint."""
    parameter: str
    """The decoder's parameter, by its dotted path."""
    part: int | None = None
    """Which of the parameter's stacked rows it fills; None: all of them."""
    expert: int | None = None
    """Which of a stack of experts it belongs to; None: it has all of them, or there are none."""
    interleaved_heads: int = 0
    """If not 0: its rows are this many heads, each in the order of rope over neighbouring dimensions."""

    def index(self, parameter: Parameter) -> tuple[int | slice, ...]:
        """The part of the parameter that it fills."""
        rows = slice(None) if self.part is None else parameter.rows_of(self.part)
        if len(parameter.shape) < 3:
            return (rows,)
        return slice(None) if self.expert is None else self.expert, rows

    def shape(self, parameter: Parameter) -> tuple[int, ...]:
        """What it should have in the checkpoint."""
        shape = list(parameter.shape)
        if self.part is not None:
            shape[-2 if len(shape) > 1 else -1] = parameter.rows[self.part]
        return tuple(shape if self.expert is None else shape[1:])


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
    for i, layer in enumerate(spec.layers):
        prefix, packed = f"model.layers.{i}.", family.moe_names
        is_packed = f"{prefix}{packed.packed_gate_up}" in present
        names = _huggingface_layer(family)
        yield from _layer_pieces(layer, prefix, f"layers.{i}.", names, packed=packed if is_packed else None)
    yield Piece("model.norm.weight", "final_norm")
    if not spec.tie_embeddings:
        yield Piece("lm_head.weight", "head")


def gguf_pieces(spec: ModelSpec) -> Iterator[Piece]:
    interleaved = family_named(spec.family).gguf_interleaved_rope
    yield Piece("token_embd.weight", "embedding")
    for i, layer in enumerate(spec.layers):
        yield from _layer_pieces(layer, f"blk.{i}.", f"layers.{i}.", _GGUF_LAYER, interleaved)
    yield Piece("output_norm.weight", "final_norm")
    if not spec.tie_embeddings:
        yield Piece("output.weight", "head")


def ignored_names(spec: ModelSpec, present: Collection[str]) -> set[str]:
    """Tensors some checkpoints carry though the decoder has no use for them."""
    unused = {name for name in present if name.endswith(".rotary_emb.inv_freq")}
    if any(layer.rope is not None and layer.rope.kind == "factors" for layer in spec.layers):
        unused.add("rope_freqs.weight")
    if spec.tie_embeddings:
        unused.add("lm_head.weight")
    return unused


def _layer_pieces(
    layer: LayerSpec,
    prefix: str,
    to: str,
    names: _LayerNames,
    interleaved: bool = False,
    packed: MoeNames | None = None,
) -> Iterator[Piece]:
    """`packed`: the experts come stacked, under these names."""
    yield Piece(f"{prefix}{names.attention_norm}.weight", f"{to}attention_norm")
    yield Piece(f"{prefix}{names.mlp_norm}.weight", f"{to}mlp_norm")
    if layer.qk_norm:
        yield Piece(f"{prefix}{names.query_norm}.weight", f"{to}attention.query_norm")
        yield Piece(f"{prefix}{names.key_norm}.weight", f"{to}attention.key_norm")
    heads = layer.attention.heads
    for part, (name, rotated) in enumerate(
        ((names.query, heads.num_heads), (names.key, heads.num_kv_heads), (names.value, 0))
    ):
        reorder = rotated if interleaved else 0
        yield from _linear_pieces(f"{prefix}{name}", f"{to}attention.qkv", layer.qkv_bias, part, reorder)
    yield from _linear_pieces(f"{prefix}{names.output}", f"{to}attention.output", layer.output_bias)
    if isinstance(layer.mlp, MlpSpec):
        yield from _mlp_pieces(prefix, f"{to}mlp.", (names.gate, names.up, names.down), layer.mlp.bias)
    else:
        yield from _expert_pieces(layer.mlp, prefix, f"{to}mlp.", names, packed)


def _mlp_pieces(prefix: str, to: str, names: tuple[str, str, str], bias: bool) -> Iterator[Piece]:
    gate, up, down = names
    yield from _linear_pieces(f"{prefix}{gate}", f"{to}gate_up", bias, 0)
    yield from _linear_pieces(f"{prefix}{up}", f"{to}gate_up", bias, 1)
    yield from _linear_pieces(f"{prefix}{down}", f"{to}down", bias)


def _expert_pieces(moe: MoeSpec, prefix: str, to: str, names: _LayerNames, packed: MoeNames | None) -> Iterator[Piece]:
    yield Piece(f"{prefix}{names.router}.weight", f"{to}router.weight")
    if packed is not None:
        yield Piece(f"{prefix}{packed.packed_gate_up}", f"{to}gate_up")
        yield Piece(f"{prefix}{packed.packed_down}", f"{to}down")
    else:
        one_by_one = "{expert}" in names.expert_gate
        for expert in range(moe.num_experts) if one_by_one else (None,):
            gate, up, down = (
                name.format(expert=expert) for name in (names.expert_gate, names.expert_up, names.expert_down)
            )
            yield Piece(f"{prefix}{gate}.weight", f"{to}gate_up", 0, expert)
            yield Piece(f"{prefix}{up}.weight", f"{to}gate_up", 1, expert)
            yield Piece(f"{prefix}{down}.weight", f"{to}down", None, expert)
    if moe.shared_intermediate_size:
        yield from _mlp_pieces(prefix, f"{to}shared.", (names.shared_gate, names.shared_up, names.shared_down), False)
        yield Piece(f"{prefix}{names.shared_router}.weight", f"{to}shared_gate.weight")


def _linear_pieces(
    name: str, parameter: str, bias: bool, part: int | None = None, interleaved_heads: int = 0
) -> Iterator[Piece]:
    for kind in ("weight", "bias") if bias else ("weight",):
        yield Piece(f"{name}.{kind}", f"{parameter}.{kind}", part, None, interleaved_heads)
