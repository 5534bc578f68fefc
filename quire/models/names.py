"""Which tensor of a checkpoint fills which part of which parameter of the decoder."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
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


_LAYER_NAMES = {
    "attention_norm": ("input_layernorm", "attn_norm"),
    "query": ("self_attn.q_proj", "attn_q"),
    "key": ("self_attn.k_proj", "attn_k"),
    "value": ("self_attn.v_proj", "attn_v"),
    "output": ("self_attn.o_proj", "attn_output"),
    "query_norm": ("self_attn.q_norm", "attn_q_norm"),
    "key_norm": ("self_attn.k_norm", "attn_k_norm"),
    "mlp_norm": ("post_attention_layernorm", "ffn_norm"),
    "mlp": ("mlp.{}_proj", "ffn_{}"),
    "shared": ("mlp.shared_expert.{}_proj", "ffn_{}_shexp"),
    "shared_router": ("mlp.shared_expert_gate", "ffn_gate_inp_shexp"),
}
"""A layer's tensor names below its prefix, Hugging Face's and GGUF's, to which `weight` and `bias` are appended;
`{}` is gate, up or down."""
_HUGGINGFACE, _GGUF = ({part: pair[i] for part, pair in _LAYER_NAMES.items()} for i in range(2))
_GGUF_EXPERTS = MoeNames("ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")


def huggingface_pieces(spec: ModelSpec, present: Collection[str]) -> Iterator[Piece]:
    """`present` are the names in the checkpoint: experts come one by one or stacked."""
    experts = family_named(spec.family).moe_names
    yield Piece("model.embed_tokens.weight", "embedding")
    for i, layer in enumerate(spec.layers):
        prefix = f"model.layers.{i}."
        is_packed = f"{prefix}{experts.packed_gate_up}" in present
        yield from _layer_pieces(layer, prefix, f"layers.{i}.", _HUGGINGFACE, experts, is_packed=is_packed)
    yield Piece("model.norm.weight", "final_norm")
    if not spec.tie_embeddings:
        yield Piece("lm_head.weight", "head")


def gguf_pieces(spec: ModelSpec) -> Iterator[Piece]:
    interleaved = family_named(spec.family).gguf_interleaved_rope
    yield Piece("token_embd.weight", "embedding")
    for i, layer in enumerate(spec.layers):
        yield from _layer_pieces(layer, f"blk.{i}.", f"layers.{i}.", _GGUF, _GGUF_EXPERTS, interleaved)
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
    layer: LayerSpec, prefix: str, to: str, below: Mapping[str, str], experts: MoeNames, interleaved: bool = False,
    is_packed: bool = False,
) -> Iterator[Piece]:  # fmt: skip
    names = {part: prefix + name for part, name in below.items()}
    yield Piece(f"{names['attention_norm']}.weight", f"{to}attention_norm")
    yield Piece(f"{names['mlp_norm']}.weight", f"{to}mlp_norm")
    if layer.qk_norm:
        yield Piece(f"{names['query_norm']}.weight", f"{to}attention.query_norm")
        yield Piece(f"{names['key_norm']}.weight", f"{to}attention.key_norm")
    heads = layer.attention.heads
    for part, (name, rotated) in enumerate((("query", heads.num_heads), ("key", heads.num_kv_heads), ("value", 0))):
        reorder = rotated if interleaved else 0
        yield from _linear_pieces(names[name], f"{to}attention.qkv", layer.qkv_bias, part, reorder)
    yield from _linear_pieces(names["output"], f"{to}attention.output", layer.output_bias)
    if isinstance(layer.mlp, MlpSpec):
        yield from _mlp_pieces(names["mlp"], f"{to}mlp.", layer.mlp.bias)
        return
    yield from _expert_pieces(layer.mlp, prefix, f"{to}mlp.", experts, is_packed)
    if layer.mlp.shared_intermediate_size:
        yield from _mlp_pieces(names["shared"], f"{to}mlp.shared.", False)
        yield Piece(f"{names['shared_router']}.weight", f"{to}mlp.shared_gate.weight")


def _mlp_pieces(name: str, to: str, bias: bool) -> Iterator[Piece]:
    for kind, parameter, part in (("gate", "gate_up", 0), ("up", "gate_up", 1), ("down", "down", None)):
        yield from _linear_pieces(name.format(kind), f"{to}{parameter}", bias, part)


def _expert_pieces(moe: MoeSpec, prefix: str, to: str, experts: MoeNames, is_packed: bool) -> Iterator[Piece]:
    yield Piece(f"{prefix}{experts.router}.weight", f"{to}router.weight")
    if is_packed:
        yield Piece(f"{prefix}{experts.packed_gate_up}", f"{to}gate_up")
        yield Piece(f"{prefix}{experts.packed_down}", f"{to}down")
        return
    one_by_one = "{expert}" in experts.gate
    for expert in range(moe.num_experts) if one_by_one else (None,):
        gate, up, down = (name.format(expert=expert) for name in (experts.gate, experts.up, experts.down))
        yield Piece(f"{prefix}{gate}.weight", f"{to}gate_up", 0, expert)
        yield Piece(f"{prefix}{up}.weight", f"{to}gate_up", 1, expert)
        yield Piece(f"{prefix}{down}.weight", f"{to}down", None, expert)


def _linear_pieces(
    name: str, parameter: str, bias: bool, part: int | None = None, interleaved_heads: int = 0
) -> Iterator[Piece]:
    for kind in ("weight", "bias") if bias else ("weight",):
        yield Piece(f"{name}.{kind}", f"{parameter}.{kind}", part, None, interleaved_heads)
