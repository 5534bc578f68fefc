"""Which tensors of a checkpoint fill which parameters of the decoder."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from quire.kernels.latent import LatentSpec
from quire.kernels.ops import AttentionSpec, MoeSpec
from quire.models.families import family_named
from quire.models.family import Family
from quire.models.mixer_pieces import latent_pieces, recurrent_pieces
from quire.models.pieces import Piece, RowOrder, RowRuns
from quire.models.spec import POSITIONS, LayerSpec, ModelSpec, Parameter, mixer_names

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
    **{
        f"expert_{part}": (f"mlp.experts.{{expert}}.{part}_proj", f"ffn_{part}_exps")
        for part in _MLP
    },
    "shared_router": ("mlp.shared_expert_gate", "ffn_gate_inp_shexp"),
    "router": ("mlp.gate", "ffn_gate_inp"),
    "choice_bias": ("mlp.gate.e_score_correction_bias", "exp_probs_b.bias"),
    "experts_gate_up": ("mlp.experts.gate_up_proj", ""),
    "experts_down": ("mlp.experts.down_proj", ""),
}
"""A layer's tensors by Hugging Face's and by GGUF's name, without the layer's prefix. `.weight` or
`.bias` is appended, but for sinks, choice_bias and stacked experts. `{expert}` is an expert's
number. A family whose files pack tensors adds names for `qkv`, `gate_up` and `shared_gate_up`.
"""
_LINEARS = {
    "attention.qkv": ("qkv", "query", "key", "value"),
    "attention.output": ("output",),
    "mlp.up": ("up",),
    "mlp.gate_up": ("gate_up", "gate", "up"),
    "mlp.down": ("down",),
    "mlp.shared.up": ("shared_up",),
    "mlp.shared.gate_up": ("shared_gate_up", "shared_gate", "shared_up"),
    "mlp.shared.down": ("shared_down",),
    "mlp.shared_gate": ("shared_router",),
    "mlp.router": ("router",),
    "experts.router": ("router",),
    "per_layer_gate": ("per_layer_gate",),
    "per_layer_output": ("per_layer_output",),
}
"""For each of a layer's products: by what name its tensor goes, then the names of the tensors that
are stacked in it where the files don't pack them.
"""
_STACKED = ("experts_gate_up", "experts_up", "experts_down")
_BARE = (
    "sinks",
    "choice_bias",
    "expert_scales",
    "router_norm",
    "stream_scale",
    "positive_alpha",
    "negative_alpha",
)
"""Tensors whose names have no `.weight`."""
_HUGGINGFACE, _GGUF = ({part: pair[i] for part, pair in _LAYER_NAMES.items()} for i in range(2))


def huggingface_pieces(spec: ModelSpec, present: Collection[str]) -> Iterator[Piece]:
    """`present` are the names in the checkpoint: experts come one by one or stacked."""
    family = family_named(spec.family)
    prefix = next(
        (one for one in family.prefixes if f"{_under(one, family.embedding)}.weight" in present),
        family.prefixes[0],
    )
    heads = (one.removesuffix(".weight") for one in _head_names(family) if one in present)
    head = next(heads, family.head)
    embedding, norm = (_under(prefix, one) for one in (family.embedding, family.final_norm))
    further = {one: _under(prefix, name) for one, name in family.outside.items()}
    return _pieces(
        spec,
        _Ends(embedding, norm, head, further),
        _under(prefix, family.layers),
        {**_HUGGINGFACE, **family.names},
        family.interleaved_rope,
        present,
        family.stacked_names,
        family.qkv_by_key_head,
    )


def stacked_expert_names(spec: ModelSpec) -> list[set[str]]:
    """What stacked experts may be called: the names of each way to write the family's files."""
    family = family_named(spec.family)
    ways = ({**_HUGGINGFACE, **family.names}, family.stacked_names)
    layers = [
        f"{_under(prefix, family.layers)}.{number}"
        for prefix in family.prefixes
        for _, number in _stored_numbers(spec)
    ]
    return [
        {f"{layer}.{own[key]}" for layer in layers for key in _STACKED if own.get(key)}
        for own in ways
    ]


def other_tensor_names(spec: ModelSpec) -> set[str]:
    """What some of a family's tensors may be called, too: `Family.other_names`."""
    family = family_named(spec.family)
    numbers = {number for both in _stored_numbers(spec) for number in both}
    return {
        f"{_under(prefix, family.layers)}.{number}.{name}.weight"
        for prefix in family.prefixes
        for number in numbers
        for name in family.other_names.values()
    }


def _head_names(family: Family) -> tuple[str, ...]:
    """What the head may be called: by the family, by transformers, in older files of models that
    also see.
    """
    return tuple(f"{one}.weight" for one in (family.head, "lm_head", "language_model.lm_head"))


def _under(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def prediction_pieces(
    spec: ModelSpec, present: Collection[str], norm: str, further: Mapping[str, str]
) -> Iterator[Piece]:
    """The tensors of layers for multi-token prediction, called `mtp.layers.0` and so on; `norm` and
    `further` are the names of those that are in no layer.
    """
    family = family_named(spec.family)
    return _pieces(
        spec,
        _Ends("", norm, "", further),
        "mtp.layers",
        {**_HUGGINGFACE, **family.names},
        family.interleaved_rope,
        present,
        family.stacked_names,
    )


def gguf_pieces(spec: ModelSpec, present: Collection[str] = ()) -> Iterator[Piece]:
    """Which tensor of a GGUF file belongs to which parameter."""
    family = family_named(spec.family)
    pieces = _pieces(
        spec,
        _Ends("token_embd", family.gguf_final_norm, "output", family.gguf_outside),
        "blk",
        {**_GGUF, **family.gguf_names},
        family.gguf_interleaved_rope,
        present,
        {},
    )
    for piece in pieces:  # convolutions have no dimension of one there
        bare = piece.name.removesuffix(".weight")
        yield replace(
            piece,
            name=bare if bare in present else piece.name,  # Falcon-H1's norms before its MLPs
            has_middle=False,
            is_rate=piece.parameter.endswith(".log_rate"),
        )


def ignored_names(spec: ModelSpec, present: Collection[str]) -> set[str]:
    """Tensors of a checkpoint that are not loaded: the decoder does not need them, or they are part
    of its spec.
    """
    family = family_named(spec.family)
    prefixes = (*(_under(prefix, family.layers) for prefix in family.prefixes), "blk")
    unused = {name for name in present if name.endswith(".rotary_emb.inv_freq")}
    unused |= names_not_for_text(spec, present) | drafting_names(spec, present)
    unread = tuple(
        f"{prefix}.{number}.self_attn.{side}"
        for prefix in prefixes
        for number, layer in enumerate(spec.layers)
        if layer.reads_layer is not None
        for side in ("k_proj.", "v_proj.", "k_norm.", "v_norm.")
    )
    unused |= {name for name in present if name.startswith(unread)}  # another layer has them
    if family.ignored:
        unused |= {name for name in present if name.endswith(family.ignored)}
    if any(layer.rope is not None and layer.rope.kind == "factors" for layer in spec.layers):
        unused |= {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}
    if spec.tie_embeddings:
        unused |= set(_head_names(family))
    return unused


def drafting_names(spec: ModelSpec, present: Collection[str]) -> set[str]:
    """Tensors of layers for multi-token prediction."""
    family = family_named(spec.family)
    if not family.has_drafting_layers:
        return set()
    prefixes = (*(_under(prefix, family.layers) for prefix in family.prefixes), "blk")
    further = (*(f"{prefix}.{_num_stored(spec)}." for prefix in prefixes), "mtp.")
    return {name for name in present if name.startswith(further)}


def names_not_for_text(spec: ModelSpec, present: Collection[str]) -> set[str]:
    """Tensors of a model's part that sees images."""
    prefixes = family_named(spec.family).unused
    return {name for name in present if name.startswith(prefixes)} if prefixes else set()


_MLP_PARTS = ("mlp_norm", "mlp_post_norm", "router", "choice_bias", *_MLP)


def _is_of_mlp(part: str) -> bool:
    return part in _MLP_PARTS or part.startswith(("shared_", "expert", "gate_up"))


def _stored_numbers(spec: ModelSpec) -> list[tuple[int, int]]:
    """The numbers in the files of each layer's mixer and of its MLP."""
    if not family_named(spec.family).numbers_blocks:
        return [(i, i) for i in range(spec.num_layers)]
    found, number = [], 0
    for layer in spec.layers:
        behind = number + bool(layer.mixers)
        found.append((number, behind))
        number = behind + (layer.mlp is not None)
    return found


def _num_stored(spec: ModelSpec) -> int:
    """Layers in the files."""
    (mixer, mlp), last = _stored_numbers(spec)[-1], spec.layers[-1]
    return mixer + 1 if last.mlp is None else mlp + 1


class _Ends(NamedTuple):
    """Names of what is not in a layer."""

    embedding: str
    norm: str
    head: str
    further: Mapping[str, str] = {}
    """By the decoder's parameters."""


def _outside(spec: ModelSpec, ends: _Ends) -> dict[str, Piece]:
    """The tensors that are not in a layer, by the decoder's parameters."""
    found = {
        "embedding": Piece(f"{ends.embedding}.weight", "embedding"),
        "head": Piece(f"{ends.head}.weight", "head"),
        "head_bias": Piece(f"{ends.head}.bias", "head_bias"),
        "final_norm": Piece(f"{ends.norm}.weight", "final_norm", added=_added(spec)),
        "final_norm_bias": Piece(f"{ends.norm}.bias", "final_norm_bias"),
        **{one: Piece(name, one) for one, name in ends.further.items()},
    }
    first, count = family_named(spec.family).first_position, spec.num_learned_positions
    if first and count:
        rows = RowRuns(((first, count),), first + count)
        found[POSITIONS] = replace(found[POSITIONS], order=rows)
    return found


def _added(spec: ModelSpec) -> float:
    """What is added to the weights of norms when they are loaded: kernels add it to RMSNorm's."""
    return spec.norm_offset if spec.layer_norm else 0.0


def _pieces(
    spec: ModelSpec,
    ends: _Ends,
    layers: str,
    names: Mapping[str, str],
    interleaved: bool,
    present: Collection[str],
    stacked: Mapping[str, str],
    by_key_head: bool = False,
) -> Iterator[Piece]:
    """`stacked` are names that replace others in a layer whose experts are stacked under them."""
    outside = _outside(spec, ends)
    found: list[_Layer] = []
    for layer, (mixer, mlp) in zip(spec.layers, _stored_numbers(spec), strict=True):
        first = stacked.get("experts_gate_up")
        is_stacked = first is not None and f"{layers}.{mlp}.{first}" in present
        used = {**names, **stacked} if is_stacked else names
        if layer.parallel_norms:
            used = {**used, **family_named(spec.family).parallel_names}
        own, others = (
            {
                part: f"{layers}.{mlp if _is_of_mlp(part) else mixer}.{name}"
                for part, name in known.items()
                if name
            }
            for known in (used, family_named(spec.family).other_names)
        )
        own |= {
            part: name
            for part, name in others.items()
            if name in present or f"{name}.weight" in present
        }
        found.append(_Layer(spec, layer, own, interleaved, present, by_key_head))
    for path, parameter in spec.parameters().items():
        if path in outside:
            yield outside[path]
        else:
            _, number, name = path.split(".", 2)
            yield from found[int(number)].pieces(name, path, parameter)


class _Layer(NamedTuple):
    """One layer's tensors."""

    spec: ModelSpec
    layer: LayerSpec
    names: Mapping[str, str]
    """In the checkpoint."""
    interleaved: bool
    present: Collection[str]
    by_key_head: bool
    """Whether rows of packed queries, keys and values lie by key heads."""

    def pieces(self, name: str, path: str, parameter: Parameter) -> Iterator[Piece]:
        """The tensors that fill the layer's parameter `name`, which is `path` in the decoder."""
        names, (linear, _, kind) = self.names, name.rpartition(".")
        mixer_name, _, own = linear.partition(".")
        mixer = dict(zip(mixer_names(self.layer), self.layer.mixers, strict=True)).get(mixer_name)
        if isinstance(mixer, LatentSpec):
            yield from latent_pieces(names, mixer, own, kind, path, self.present)
        elif mixer is not None and not isinstance(mixer, AttentionSpec):
            yield from recurrent_pieces(names, mixer, own, kind, path)
        elif linear == "attention.qkv" and self.layer.gated_attention:
            yield from self._gated(kind, path)
        elif linear == "attention.qkv" and "qkv" in names and self.by_key_head:
            yield from self._by_key_head(kind, path)
        elif linear in _LINEARS:
            packed, *parts = _LINEARS[linear]
            is_turned = self.family.turned_products and kind == "weight"
            # keys and values may be another layer's, or values keys
            parts = parts[: len(parameter.rows) or 1]
            for part in [packed] if packed in names or not parts else parts:
                index = parts.index(part) if part != packed and parameter.rows else None
                order = self._order(part)
                yield Piece(f"{names[part]}.{kind}", path, index, order=order, is_turned=is_turned)
        elif kind in _BARE:
            yield Piece(names[kind], path)
        elif linear in ("mlp", "experts"):
            yield from self._experts(kind, path, parameter)
        else:
            norm = kind.removesuffix("_bias")
            yield Piece(
                f"{names[norm]}.{'weight' if kind == norm else 'bias'}",
                path,
                order=self._order(norm),
                added=_added(self.spec) if kind in self.layer.norms else 0.0,
            )

    @property
    def family(self) -> Family:
        return family_named(self.spec.family)

    def _by_key_head(self, kind: str, path: str) -> Iterator[Piece]:
        """Queries, keys and values from one tensor that has each key head's together."""
        assert self.layer.attention is not None
        heads = self.layer.attention.heads
        size, group = heads.head_dim, heads.num_heads // heads.num_kv_heads
        step = (group + 2) * size
        total = step * heads.num_kv_heads
        sides = (("query", 0, group), ("key", group, 1), ("value", group + 1, 1))
        for part, (side, first, count) in enumerate(sides):
            starts = (step * head + first * size for head in range(heads.num_kv_heads))
            picked = tuple((start, count * size) for start in starts)
            if (order := self._order(side)) is not None:
                rows = RowRuns(picked, total).index(total)
                picked = tuple((row, 1) for row in rows[order.index(len(rows))].tolist())
            tensor = f"{self.names['qkv']}.{kind}"
            yield Piece(tensor, path, part, order=RowRuns(picked, total))

    def _gated(self, kind: str, path: str) -> Iterator[Piece]:
        """Queries, keys, values and gates, where each head's query and gate are together."""
        assert self.layer.attention is not None
        heads = self.layer.attention.heads
        size, total = heads.head_dim, 2 * heads.num_heads * heads.head_dim
        order = self._order("query")
        for part, first in ((0, 0), (3, size)):
            picked = [(2 * size * head + first, size) for head in range(heads.num_heads)]
            if part == 0 and order is not None:
                rows = RowRuns(tuple(picked), total).index(total)[order.index(total // 2)]
                picked = [(row, 1) for row in rows.tolist()]
            tensor = f"{self.names['query']}.{kind}"
            yield Piece(tensor, path, part, order=RowRuns(tuple(picked), total))
        for part, side in ((1, "key"), (2, "value")):
            yield Piece(f"{self.names[side]}.{kind}", path, part, order=self._order(side))

    def _order(self, part: str) -> RowOrder | None:
        attention = self.layer.attention
        if attention is None:
            return None
        heads, rope, is_whole = attention.heads, self.layer.rope, self.layer.qk_norm_is_whole
        counts = {
            "query": heads.num_heads,
            "key": heads.num_kv_heads,
            "qkv": heads.num_heads + heads.num_kv_heads,
        }
        counts |= {f"{name}_norm": counts[name] if is_whole else 1 for name in ("query", "key")}
        rotated = heads.head_dim if rope is None or not rope.rotated else rope.rotated
        is_needed = part in counts and (self.interleaved or rotated < heads.head_dim)
        return (
            RowOrder(counts[part], heads.head_dim, rotated, self.interleaved) if is_needed else None
        )

    def _experts(self, name: str, path: str, parameter: Parameter) -> Iterator[Piece]:
        """The experts' `gate_up` or `down`, or a bias of these: stacked in the checkpoint, or one
        by one.
        """
        names, (matrix, bias, _) = self.names, name.partition("_bias")
        moe = self.layer.experts or self.layer.mlp
        assert isinstance(moe, MoeSpec)
        first = "gate" if moe.gated else "up"
        stacked = names.get("experts_gate_up" if moe.gated else "experts_up")
        if stacked in self.present or f"expert_{first}" not in names:
            family, size = self.family, parameter.shape[1]
            alternate = family.alternating_gate_up and matrix == "gate_up"
            order = RowOrder(1, size, size, True, axis=1) if alternate else None
            is_turned = family.turned_experts and not bias
            tensor = f"{names[f'experts_{matrix}']}{bias}"
            yield Piece(tensor, path, order=order, is_turned=is_turned)
            return
        parts = (("gate", 0), ("up", 1)) if matrix == "gate_up" else ((matrix, None),)
        for expert in range(parameter.shape[0]) if "{expert}" in names["expert_down"] else (None,):
            for part, index in parts:
                tensor = names[f"expert_{part}"].format(expert=expert)
                yield Piece(f"{tensor}.{'bias' if bias else 'weight'}", path, index, expert)
