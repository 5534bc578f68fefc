"""Which tensors of a checkpoint fill which parameters of the decoder."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from quire.kernels.ops import MoeSpec
from quire.models.families import family_named
from quire.models.spec import LayerSpec, MlpSpec, ModelSpec, Parameter


@dataclass(frozen=True, slots=True)
class RowOrder:
    """How to reorder the rows of a tensor for the decoder, whose rope pairs dimension i of a head with dimension
    i + head_dim / 2. A checkpoint's rope may pair neighbours, or rotate only the first dimensions. Queries and keys are
    reordered alike, so their products don't change. Also sorts experts whose gate and up rows alternate."""

    heads: int
    """How many heads are reordered, from the first row on; rows after them keep their place."""
    head_dim: int
    rotated: int
    """How many rows of a head are rotated, the first ones."""
    interleaved: bool
    """Whether the checkpoint pairs neighbours."""
    axis: int = 0
    """The tensor's dimension that has the rows."""

    def index(self, num_rows: int) -> Tensor:
        """For each row of the decoder, the checkpoint's row that it is taken from."""
        turned, others = torch.arange(self.rotated), torch.arange(self.rotated, self.head_dim)
        pairs = turned.view(-1, 2).t() if self.interleaved else turned.view(2, -1)
        head = torch.cat((pairs, others.view(2, -1)), 1).flatten()
        rows = torch.arange(num_rows)
        changed = self.heads * self.head_dim
        rows[:changed] = rows[:changed].view(self.heads, -1)[:, head].flatten()
        return rows


@dataclass(frozen=True, slots=True)
class Piece:
    """One tensor of the checkpoint and where it goes."""

    name: str
    """Its name in the checkpoint."""
    parameter: str
    """The decoder's parameter, by its dotted path."""
    part: int | None = None
    """Which of several tensors stacked in one parameter it is (query 0, key 1, value 2); None: it fills all rows."""
    expert: int | None = None
    """Which expert of a stack it is; None: it has all experts, or the parameter has none."""
    order: RowOrder | None = None
    """How its rows are rearranged; None: not at all."""

    def index(self, parameter: Parameter) -> tuple[int | slice, ...]:
        """The part of the parameter that it fills."""
        rows = slice(None) if self.part is None else parameter.rows_of(self.part)
        if len(parameter.shape) < 3:
            return (rows,)
        return slice(None) if self.expert is None else self.expert, rows

    def shape(self, parameter: Parameter) -> tuple[int, ...]:
        """The shape that it must have in the checkpoint."""
        shape = list(parameter.shape)
        if self.part is not None:
            shape[-2 if len(shape) > 1 else -1] = parameter.rows[self.part]
        shape = shape if self.expert is None else shape[1:]
        return tuple(shape[:-1] if shape[2:] == [1] else shape)  # biases of experts are stacked vectors


_MLP = ("gate", "up", "down")
_LAYER_NAMES = {
    "attention_norm": ("input_layernorm", "attn_norm"),
    "attention_post_norm": ("post_attention_layernorm", "post_attention_norm"),
    "mlp_norm": ("post_attention_layernorm", "ffn_norm"),
    "mlp_post_norm": ("post_feedforward_layernorm", "post_ffw_norm"),
    "query": ("self_attn.q_proj", "attn_q"),
    "key": ("self_attn.k_proj", "attn_k"),
    "value": ("self_attn.v_proj", "attn_v"),
    "output": ("self_attn.o_proj", "attn_output"),
    "query_norm": ("self_attn.q_norm", "attn_q_norm"),
    "key_norm": ("self_attn.k_norm", "attn_k_norm"),
    "sinks": ("self_attn.sinks", "attn_sinks.weight"),
    **{part: (f"mlp.{part}_proj", f"ffn_{part}") for part in _MLP},
    **{f"shared_{part}": (f"mlp.shared_expert.{part}_proj", f"ffn_{part}_shexp") for part in _MLP},
    **{f"expert_{part}": (f"mlp.experts.{{expert}}.{part}_proj", f"ffn_{part}_exps") for part in _MLP},
    "shared_router": ("mlp.shared_expert_gate", "ffn_gate_inp_shexp"),
    "router": ("mlp.gate", "ffn_gate_inp"),
    "choice_bias": ("mlp.gate.e_score_correction_bias", "exp_probs_b.bias"),
    "experts_gate_up": ("mlp.experts.gate_up_proj", ""),
    "experts_down": ("mlp.experts.down_proj", ""),
}
"""A layer's tensors by Hugging Face's and by GGUF's name, without the layer's prefix. `.weight` or `.bias` is appended,
but for sinks, choice_bias and stacked experts. `{expert}` is an expert's number. A family whose files pack tensors adds
names for `qkv`, `gate_up` and `shared_gate_up`."""
_HUGGINGFACE, _GGUF = ({part: pair[i] for part, pair in _LAYER_NAMES.items()} for i in range(2))


def huggingface_pieces(spec: ModelSpec, present: Collection[str]) -> Iterator[Piece]:
    """`present` are the names in the checkpoint: experts come one by one or stacked."""
    family, ends = family_named(spec.family), ("model.embed_tokens", "model.norm", "lm_head")
    return _pieces(spec, ends, "model.layers", {**_HUGGINGFACE, **family.names}, family.interleaved_rope, present)


def gguf_pieces(spec: ModelSpec, present: Collection[str] = ()) -> Iterator[Piece]:
    family, ends = family_named(spec.family), ("token_embd", "output_norm", "output")
    return _pieces(spec, ends, "blk", {**_GGUF, **family.gguf_names}, family.gguf_interleaved_rope, present)


def ignored_names(spec: ModelSpec, present: Collection[str]) -> set[str]:
    """Tensors of a checkpoint that are not loaded: the decoder does not need them, or they are part of its spec."""
    further = tuple(f"{prefix}.{spec.num_layers}." for prefix in ("model.layers", "blk"))
    unused = {name for name in present if name.endswith(".rotary_emb.inv_freq")}
    if any(layer.rope is not None and layer.rope.kind == "factors" for layer in spec.layers):
        unused |= {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}
    if family_named(spec.family).has_guessing_layers:
        unused |= {name for name in present if name.startswith(further)}
    if spec.tie_embeddings:
        unused.add("lm_head.weight")
    return unused


def _pieces(
    spec: ModelSpec, ends: tuple[str, str, str], layers: str, names: Mapping[str, str], interleaved: bool,
    present: Collection[str],
) -> Iterator[Piece]:  # fmt: skip
    embedding, norm, head = ends
    yield Piece(f"{embedding}.weight", "embedding")
    yield Piece(f"{norm}.weight", "final_norm")
    if spec.norm_bias:
        yield Piece(f"{norm}.bias", "final_norm_bias")
    if not spec.tie_embeddings:
        yield Piece(f"{head}.weight", "head")
    for i, layer in enumerate(spec.layers):
        own = {part: f"{layers}.{i}.{name}" for part, name in names.items() if name}
        yield from _Layer(spec, layer, own, f"layers.{i}.", interleaved, present).pieces()


class _Layer(NamedTuple):
    """One layer's tensors."""

    spec: ModelSpec
    layer: LayerSpec
    names: Mapping[str, str]
    """In the checkpoint."""
    to: str
    """What its parameters' names begin with."""
    interleaved: bool
    present: Collection[str]

    def pieces(self) -> Iterator[Piece]:
        names, layer, to = self.names, self.layer, self.to
        for norm in layer.norms:
            yield Piece(f"{names[norm]}.weight", f"{to}{norm}")
            if self.spec.norm_bias:
                yield Piece(f"{names[norm]}.bias", f"{to}{norm}_bias")
        yield from self._attention()
        if layer.sinks:
            yield Piece(names["sinks"], f"{to}attention.sinks")
        yield from _linear(names["output"], f"{to}attention.output", layer.output_bias)
        if isinstance(layer.mlp, MlpSpec):
            yield from self._mlp("", f"{to}mlp", layer.mlp)
            return
        yield from self._experts(layer.mlp)
        if layer.mlp.shared_intermediate_size:
            yield from self._mlp("shared_", f"{to}mlp.shared", MlpSpec(layer.mlp.shared_intermediate_size))
            if layer.mlp.shared_gate:
                yield Piece(f"{names['shared_router']}.weight", f"{to}mlp.shared_gate.weight")

    def _order(self, heads: int) -> RowOrder | None:
        head_dim, rope = self.layer.attention.heads.head_dim, self.layer.rope
        rotated = head_dim if rope is None or not rope.rotated else rope.rotated
        is_needed = heads and (self.interleaved or rotated < head_dim)
        return RowOrder(heads, head_dim, rotated, self.interleaved) if is_needed else None

    def _attention(self) -> Iterator[Piece]:
        names, to, heads = self.names, f"{self.to}attention.", self.layer.attention.heads
        parts = ("query", heads.num_heads), ("key", heads.num_kv_heads), ("value", 0)
        if self.layer.qk_norm:
            for name, count in parts[:2]:
                order = self._order(count if self.layer.qk_norm_is_whole else 1)
                yield Piece(f"{names[f'{name}_norm']}.weight", f"{to}{name}_norm", order=order)
        if "qkv" in names:
            order = self._order(heads.num_heads + heads.num_kv_heads)
            yield from _linear(names["qkv"], f"{to}qkv", self.layer.qkv_bias, order=order)
            return
        for part, (name, count) in enumerate(parts):
            yield from _linear(names[name], f"{to}qkv", self.layer.qkv_bias, part, self._order(count))

    def _mlp(self, kind: str, to: str, mlp: MlpSpec) -> Iterator[Piece]:
        names = self.names
        if not mlp.gated:
            yield from _linear(names["up"], f"{to}.up", mlp.bias)
        elif f"{kind}gate_up" in names:
            yield from _linear(names[f"{kind}gate_up"], f"{to}.gate_up", mlp.bias)
        else:
            yield from _linear(names[f"{kind}gate"], f"{to}.gate_up", mlp.bias, 0)
            yield from _linear(names[f"{kind}up"], f"{to}.gate_up", mlp.bias, 1)
        yield from _linear(names[f"{kind}down"], f"{to}.down", mlp.bias)

    def _experts(self, moe: MoeSpec) -> Iterator[Piece]:
        names, to = self.names, f"{self.to}mlp."
        yield from _linear(names["router"], f"{to}router", moe.bias)
        if moe.choice_bias:
            yield Piece(names["choice_bias"], f"{to}choice_bias")
        if names.get("experts_gate_up") in self.present or "expert_gate" not in names:
            alternate, size = family_named(self.spec.family).alternating_gate_up, 2 * moe.intermediate_size
            order = RowOrder(1, size, size, True, axis=1) if alternate else None
            yield Piece(names["experts_gate_up"], f"{to}gate_up", order=order)
            yield Piece(names["experts_down"], f"{to}down")
            if moe.bias:
                yield Piece(f"{names['experts_gate_up']}_bias", f"{to}gate_up_bias", order=order)
                yield Piece(f"{names['experts_down']}_bias", f"{to}down_bias")
            return
        for kind, added in (("weight", ""), ("bias", "_bias")) if moe.bias else (("weight", ""),):
            for expert in range(moe.num_experts) if "{expert}" in names["expert_gate"] else (None,):
                gate, up, down = (names[f"expert_{part}"].format(expert=expert) for part in _MLP)
                yield Piece(f"{gate}.{kind}", f"{to}gate_up{added}", 0, expert)
                yield Piece(f"{up}.{kind}", f"{to}gate_up{added}", 1, expert)
                yield Piece(f"{down}.{kind}", f"{to}down{added}", None, expert)


def _linear(
    name: str, parameter: str, bias: bool, part: int | None = None, order: RowOrder | None = None
) -> Iterator[Piece]:
    for kind in ("weight", "bias") if bias else ("weight",):
        yield Piece(f"{name}.{kind}", f"{parameter}.{kind}", part, None, order)
