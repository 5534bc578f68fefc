"""Which tensor of a checkpoint fills which part of which parameter of the decoder."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from quire.kernels.ops import MoeSpec
from quire.models.families import MoeNames, family_named
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
    """A layer's tensor names below the layer's prefix, by default Hugging Face's; `weight` and `bias` are appended."""

    experts: MoeNames
    attention_norm: str = "input_layernorm"
    query: str = "self_attn.q_proj"
    key: str = "self_attn.k_proj"
    value: str = "self_attn.v_proj"
    output: str = "self_attn.o_proj"
    query_norm: str = "self_attn.q_norm"
    key_norm: str = "self_attn.k_norm"
    mlp_norm: str = "post_attention_layernorm"
    mlp: tuple[str, str, str] = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    shared: tuple[str, str, str] = (
        "mlp.shared_expert.gate_proj",
        "mlp.shared_expert.up_proj",
        "mlp.shared_expert.down_proj",
    )
    shared_router: str = "mlp.shared_expert_gate"


_GGUF_LAYER = _LayerNames(
    experts=MoeNames("ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"),
    attention_norm="attn_norm",
    query="attn_q",
    key="attn_k",
    value="attn_v",
    output="attn_output",
    query_norm="attn_q_norm",
    key_norm="attn_k_norm",
    mlp_norm="ffn_norm",
    mlp=("ffn_gate", "ffn_up", "ffn_down"),
    shared=("ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp"),
    shared_router="ffn_gate_inp_shexp",
)


def huggingface_pieces(spec: ModelSpec, present: Collection[str]) -> Iterator[Piece]:
    """`present` are the names in the checkpoint: experts come one by one or stacked."""
    names = _LayerNames(family_named(spec.family).moe_names)
    yield Piece("model.embed_tokens.weight", "embedding")
    for i, layer in enumerate(spec.layers):
        prefix = f"model.layers.{i}."
        is_packed = f"{prefix}{names.experts.packed_gate_up}" in present
        yield from _layer_pieces(layer, prefix, f"layers.{i}.", names, packed_experts=is_packed)
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
    layer: LayerSpec, prefix: str, to: str, names: _LayerNames, interleaved: bool = False, packed_experts: bool = False
) -> Iterator[Piece]:
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
        yield from _mlp_pieces(prefix, f"{to}mlp.", names.mlp, layer.mlp.bias)
    else:
        yield from _expert_pieces(layer.mlp, prefix, f"{to}mlp.", names, packed_experts)


def _mlp_pieces(prefix: str, to: str, names: tuple[str, str, str], bias: bool) -> Iterator[Piece]:
    gate, up, down = names
    yield from _linear_pieces(f"{prefix}{gate}", f"{to}gate_up", bias, 0)
    yield from _linear_pieces(f"{prefix}{up}", f"{to}gate_up", bias, 1)
    yield from _linear_pieces(f"{prefix}{down}", f"{to}down", bias)


def _expert_pieces(moe: MoeSpec, prefix: str, to: str, names: _LayerNames, is_packed: bool) -> Iterator[Piece]:
    experts = names.experts
    yield Piece(f"{prefix}{experts.router}.weight", f"{to}router.weight")
    if is_packed:
        yield Piece(f"{prefix}{experts.packed_gate_up}", f"{to}gate_up")
        yield Piece(f"{prefix}{experts.packed_down}", f"{to}down")
    else:
        one_by_one = "{expert}" in experts.gate
        for expert in range(moe.num_experts) if one_by_one else (None,):
            gate, up, down = (name.format(expert=expert) for name in (experts.gate, experts.up, experts.down))
            yield Piece(f"{prefix}{gate}.weight", f"{to}gate_up", 0, expert)
            yield Piece(f"{prefix}{up}.weight", f"{to}gate_up", 1, expert)
            yield Piece(f"{prefix}{down}.weight", f"{to}down", None, expert)
    if moe.shared_intermediate_size:
        yield from _mlp_pieces(prefix, f"{to}shared.", names.shared, False)
        yield Piece(f"{prefix}{names.shared_router}.weight", f"{to}shared_gate.weight")


def _linear_pieces(
    name: str, parameter: str, bias: bool, part: int | None = None, interleaved_heads: int = 0
) -> Iterator[Piece]:
    for kind in ("weight", "bias") if bias else ("weight",):
        yield Piece(f"{name}.{kind}", f"{parameter}.{kind}", part, None, interleaved_heads)
