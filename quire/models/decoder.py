"""The one decoder: a stack of attention and MLP layers as its ModelSpec describes.

`Decoder.__call__` takes all it needs as arguments and knows neither prefill nor decode: a row is a
token at a position of some sequence, and the batch says where that sequence's keys and values lie.
Layers hold weights; kernels compute.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from quire.kernels.ops import (
    Activation,
    AttentionSpec,
    Batches,
    ExpertWeights,
    Kernels,
    MixerCache,
    MoeSpec,
)
from quire.kernels.tensor_memory import TensorMemory
from quire.kernels.weights import Weight
from quire.models.linear import (
    NOT_LISTED,
    Embedding,
    Experts,
    ExpertsLinear,
    Head,
    HeadLinear,
    Linear,
    Rows,
    RowsBySlot,
)
from quire.models.mixers import Batch, Mixers, make_mixer
from quire.models.parameters import Parameters, SleepLevel, WeightSource
from quire.models.rope import cos_sin_table
from quire.models.spec import (
    EXPERTS_NORMS,
    POSITIONS,
    LayerSpec,
    MlpSpec,
    ModelSpec,
    RopeSpec,
    mixer_names,
)


class Norm:
    """A norm before or after attention or MLP: RMSNorm or LayerNorm, as the model's spec says."""

    __slots__ = ("bias", "spec", "weight")

    def __init__(self, parameters: Parameters, name: str, spec: ModelSpec) -> None:
        self.spec = spec
        self.weight = (
            parameters.vector(name) if spec.norm_weights else parameters.ones(spec.hidden_size)
        )
        self.bias = parameters.optional_vector(f"{name}_bias")

    def __call__(self, batch: Batch, x: Tensor) -> Tensor:
        spec = self.spec
        if spec.layer_norm:
            return batch.kernels.layer_norm(x, self.weight, self.bias, spec.rms_norm_eps)
        return batch.kernels.rms_norm(x, self.weight, spec.rms_norm_eps, spec.norm_offset)

    def added(self, batch: Batch, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """The norm of x + residual, and that sum."""
        spec = self.spec
        if spec.layer_norm:
            total = batch.kernels.scale_add(x, 1.0, residual)
            return self(batch, total), total
        return batch.kernels.add_rms_norm(
            x, residual, self.weight, spec.rms_norm_eps, spec.norm_offset
        )


class Mlp:
    """activation(gate) * up, then down, gate and up packed into one product; or activation(up),
    then down.
    """

    def __init__(self, parameters: Parameters, name: str, spec: MlpSpec) -> None:
        self.spec = spec
        self.up = parameters.linear(f"{name}.gate_up" if spec.gated else f"{name}.up")
        self.down = parameters.linear(f"{name}.down")
        self.alphas = tuple(
            parameters.vector(f"{name}.{one}_alpha")
            for one in (("positive", "negative") if spec.xielu else ())
        )

    def __call__(self, batch: Batch, x: Tensor) -> Tensor:
        spec, kernels = self.spec, batch.kernels
        x = x if spec.input_scale == 1 else kernels.scale_add(x, spec.input_scale)
        if spec.gated:
            hidden = self.up.gated(batch, x, spec.activation)
        elif spec.xielu:
            hidden = kernels.xielu(self.up(batch, x), *self.alphas)
        else:
            hidden = kernels.activate(self.up(batch, x), spec.activation)
        output = self.down(batch, hidden)
        return output if spec.output_scale == 1 else kernels.scale_add(output, spec.output_scale)


class MoeMlp:
    """A router, its experts stacked into two weights, and perhaps an expert that all tokens share."""

    def __init__(self, parameters: Parameters, name: str, spec: MoeSpec) -> None:
        self.spec = spec
        weights = ExpertWeights(
            parameters.matrix(f"{name}.gate_up" if spec.gated else f"{name}.up"),
            parameters.matrix(f"{name}.down"),
            parameters.vector(f"{name}.gate_up_bias").squeeze(-1) if spec.bias else None,
            parameters.vector(f"{name}.down_bias").squeeze(-1) if spec.bias else None,
            parameters.optional_vector(f"{name}.choice_bias"),
            parameters.optional_vector(f"{name}.expert_scales"),
        )
        self.experts = Experts(weights, spec)
        parameters.linears[f"{name}.gate_up" if spec.gated else f"{name}.up"] = self.experts.gate_up
        parameters.linears[f"{name}.down"] = self.experts.down
        self.router = parameters.linear(f"{name}.router")
        self.shared: Mlp | None = None
        self.shared_gate: Linear | None = None
        if spec.shared_intermediate_size:
            self.shared = Mlp(
                parameters,
                f"{name}.shared",
                MlpSpec(spec.shared_intermediate_size, spec.activation, gated=spec.gated),
            )
            self.shared_gate = (
                parameters.linear(f"{name}.shared_gate") if spec.shared_gate else None
            )

    def __call__(self, batch: Batch, x: Tensor) -> Tensor:
        if batch.adapters is None:
            return self.experts.routed(batch, x, self.router, self._shared_linears)
        logits = self.router(batch, x.float() if self.spec.has_float32_router else x)
        output = self.experts(batch, x, logits)
        if self.shared is None:
            return output
        shared = self.shared(batch, x)
        if self.shared_gate is None:
            return batch.kernels.scale_add(shared, 1.0, output)
        return batch.kernels.sigmoid_mul_add(self.shared_gate(batch, x), shared, output)

    @property
    def _shared_linears(self) -> tuple[Linear, Linear, Linear | None] | None:
        """Up, down and gate of the shared expert, if there is one."""
        if self.shared is None:
            return None
        return self.shared.up, self.shared.down, self.shared_gate


class ExpertsBeside:
    """Experts beside an MLP: both take the residual stream, each by a norm of its own, and their
    outputs are normed and added.
    """

    def __init__(
        self,
        parameters: Parameters,
        name: str,
        spec: ModelSpec,
        moe: MoeSpec,
        norms: Mapping[str, Norm],
    ) -> None:
        self.spec = spec
        self.norm, self.mlp_norm, self.post_norm = (norms[one] for one in EXPERTS_NORMS)
        self.router_norm = parameters.vector(f"{name}.router_norm")
        self.moe = MoeMlp(parameters, name, moe)

    def __call__(self, batch: Batch, stream: Tensor, from_mlp: Tensor) -> Tensor:
        kernels, spec = batch.kernels, self.spec
        routed = kernels.rms_norm(stream, self.router_norm, spec.rms_norm_eps, spec.norm_offset)
        logits = self.moe.router(batch, kernels.scale_add(routed, spec.hidden_size**-0.5))
        output = self.moe.experts(batch, self.norm(batch, stream), logits)
        return kernels.scale_add(self.mlp_norm(batch, from_mlp), 1.0, self.post_norm(batch, output))


class LayerInput:
    """What a layer makes of its own vectors of tokens: they are the gates' partners in a small MLP
    over the residual stream.
    """

    def __init__(
        self, parameters: Parameters, name: str, spec: ModelSpec, activation: Activation
    ) -> None:
        size, number = spec.per_layer_size, int(name.rpartition(".")[2])
        self.rows = slice(number * size, (number + 1) * size)
        self.activation = activation
        self.gate = parameters.linear(f"{name}.per_layer_gate")
        self.output = parameters.linear(f"{name}.per_layer_output")
        self.norm = Norm(parameters, f"{name}.per_layer_post_norm", spec)

    def __call__(self, batch: Batch, stream: Tensor) -> Tensor:
        assert batch.per_layer is not None
        gate = batch.kernels.activate(self.gate(batch, stream), self.activation)
        product = batch.kernels.multiply(gate, batch.per_layer[:, self.rows])
        return self.norm(batch, self.output(batch, product))


class LayerInputs:
    """Makes the vectors that each token has for each layer."""

    def __init__(self, parameters: Parameters, spec: ModelSpec) -> None:
        self.spec = spec
        self.embedding = Embedding(parameters.matrix("per_layer_embedding", pack=False))
        self.projection = parameters.linear("per_layer_projection")
        self.norm = parameters.vector("per_layer_norm")

    def __call__(self, batch: Batch, token_ids: Tensor, x: Tensor) -> Tensor:
        """[rows, layers * size] of int64 token_ids [rows] and their embeddings."""
        kernels, spec = batch.kernels, self.spec
        projected = kernels.scale_add(self.projection(batch, x), spec.hidden_size**-0.5)
        by_layer = projected.view(-1, spec.num_layers, spec.per_layer_size)
        normed = kernels.rms_norm(by_layer, self.norm, spec.rms_norm_eps, spec.norm_offset)
        known = self.embedding(batch, token_ids).to(x.dtype)
        total = kernels.scale_add(known, spec.per_layer_size**0.5, normed.flatten(1))
        return kernels.scale_add(total, 0.5**0.5)


class DecoderLayer:
    """Attention and MLP, each adding to the residual stream, with norms before or after them."""

    def __init__(
        self,
        parameters: Parameters,
        name: str,
        spec: ModelSpec,
        layer: LayerSpec,
        tables: Sequence[Tensor | None],
    ) -> None:
        """`tables`: those of the rope of its mixers."""
        self.parallel = layer.parallel
        self.has_mixers = bool(layer.mixers)
        self.scale = spec.residual_scale
        norms = {one: Norm(parameters, f"{name}.{one}", spec) for one in layer.norms}
        self.attention_norm, self.mlp_norm = norms.get("attention_norm"), norms.get("mlp_norm")
        self.attention_post_norm, self.mlp_post_norm = (
            norms.get("attention_post_norm"),
            norms.get("mlp_post_norm"),
        )
        mixers = zip(mixer_names(layer), layer.mixers, tables, strict=True)
        self.attention = Mixers(
            [
                make_mixer(parameters, f"{name}.{own}", spec, layer, mixer, table)
                for own, mixer, table in mixers
            ],
            layer.mixer_scales,
        )
        self.mlp: Mlp | MoeMlp | None = None
        if layer.mlp is not None:
            kind = Mlp if isinstance(layer.mlp, MlpSpec) else MoeMlp
            self.mlp = kind(parameters, f"{name}.mlp", layer.mlp)  # type: ignore[arg-type]
        self.experts = (
            None
            if layer.experts is None
            else ExpertsBeside(parameters, f"{name}.experts", spec, layer.experts, norms)
        )
        self.input: LayerInput | None = None
        if spec.per_layer_size:
            assert layer.mlp is not None
            self.input = LayerInput(parameters, name, spec, layer.mlp.activation)
        self.stream_scale = parameters.optional_vector(f"{name}.stream_scale")

    def __call__(
        self, batch: Batch, x: Tensor, residual: Tensor | None, caches: Sequence[MixerCache]
    ) -> tuple[Tensor, Tensor | None]:
        """Takes x, the last layer's output that is not added to the residual stream yet (adding is
        fused with the norm), and returns this layer's output in the same way, with the residual
        stream before it; None: the output is the whole stream.
        """
        x, residual = self._computed(batch, x, residual, caches)
        if self.input is not None:
            residual = batch.kernels.scale_add(x, 1.0, residual)
            x = self.input(batch, residual)
        if self.stream_scale is None:
            return x, residual
        total = batch.kernels.scale_add(x, 1.0, residual)
        return batch.kernels.scale_rows(total, self.stream_scale), None

    def _computed(
        self, batch: Batch, x: Tensor, residual: Tensor | None, caches: Sequence[MixerCache]
    ) -> tuple[Tensor, Tensor]:
        """Attention and MLP."""
        if not self.has_mixers:
            assert self.mlp is not None
            normed, residual = enter(batch, x, residual, self.mlp_norm)
            return self._leave(batch, self.mlp(batch, normed), self.mlp_post_norm), residual
        normed, residual = enter(batch, x, residual, self.attention_norm)
        attended = self._leave(
            batch, self.attention(batch, normed, caches), self.attention_post_norm
        )
        if self.mlp is None:
            return attended, residual
        if self.parallel:
            normed = normed if self.mlp_norm is None else self.mlp_norm(batch, residual)
            return batch.kernels.scale_add(self.mlp(batch, normed), self.scale, attended), residual
        normed, residual = enter(batch, attended, residual, self.mlp_norm)
        output = self.mlp(batch, normed)
        if self.experts is not None:
            output = self.experts(batch, residual, output)
        return self._leave(batch, output, self.mlp_post_norm), residual

    def _leave(self, batch: Batch, x: Tensor, norm: Norm | None) -> Tensor:
        """What attention or MLP adds to the residual stream: normed and scaled, where the model
        does that.
        """
        x = x if norm is None else norm(batch, x)
        return x if self.scale == 1 else batch.kernels.scale_add(x, self.scale)


def enter(
    batch: Batch, x: Tensor, residual: Tensor | None, norm: Norm | None
) -> tuple[Tensor, Tensor]:
    """Adds x to the residual stream; returns its norm, which attention or MLP takes as input, and
    the stream.
    """
    if norm is None:
        total = x if residual is None else batch.kernels.scale_add(x, 1.0, residual)
        return total, total
    return (norm(batch, x), x) if residual is None else norm.added(batch, x, residual)


class Decoder:
    """A whole model."""

    def __init__(
        self,
        spec: ModelSpec,
        kernels: Kernels,
        loaded: WeightSource,
        dtype: torch.dtype,
        max_position: int | None = None,
    ) -> None:
        """`loaded` has the weights of `spec.parameters()` and is empty afterwards. `max_position`
        is the number of positions in the rope tables (default: the spec's).
        """
        self.spec = spec
        self.kernels = kernels
        self.dtype = dtype
        self.max_position = max_position or spec.max_position
        parameters = Parameters(kernels, loaded, dtype, self.max_position)
        # A tied embedding is the head too, which is packed; a recorded step (CPU) looks its rows up
        # by a kernel.
        pack_embedding = spec.tie_embeddings or kernels.record is not None
        embedding = parameters.matrix("embedding", pack=pack_embedding)
        self.device = embedding.device
        self.embedding = Embedding(embedding)
        self.head = Head(
            embedding if spec.tie_embeddings else parameters.matrix("head"),
            parameters.optional_vector("head_bias"),
        )
        parameters.linears |= {"embedding": self.embedding, "head": self.head}
        self.final_norm = Norm(parameters, "final_norm", spec)
        self.embedding_norm = (
            Norm(parameters, "embedding_norm", spec) if spec.embedding_norm else None
        )
        self.positions = (
            Embedding(parameters.matrix(POSITIONS, pack=kernels.record is not None))
            if spec.num_learned_positions
            else None
        )
        self.inputs = LayerInputs(parameters, spec) if spec.per_layer_size else None
        self.layers: list[DecoderLayer] = []
        tables: dict[tuple[RopeSpec, int], Tensor] = {}
        """Layers with the same rope and head size share a table."""

        def table_of(rope: RopeSpec | None, head_dim: int) -> Tensor | None:
            if rope is None:
                return None
            if (rope, head_dim) not in tables:
                tables[rope, head_dim] = cos_sin_table(rope, head_dim, self.max_position).to(
                    self.device
                )
            return tables[rope, head_dim]

        for i, layer in enumerate(spec.layers):
            own = [
                table_of(layer.rope, mixer.rotary_size)
                if isinstance(mixer, AttentionSpec)
                else None
                for mixer in layer.mixers
            ]
            self.layers.append(DecoderLayer(parameters, f"layers.{i}", spec, layer, own))
        self.num_updates = 0
        """How often weights were replaced, or lost in sleep."""
        self._parameters = parameters
        self._tables = TensorMemory((*tables.values(), *parameters.constants.values()))

    @property
    def weights(self) -> dict[str, Weight]:
        """All of them by name, as the kernels packed them."""
        return self._parameters.weights

    def __call__(
        self,
        token_ids: Tensor,
        positions: Tensor,
        paged: Batches,
        caches: Sequence[MixerCache],
        adapters: Tensor | None = None,
        by_slot: RowsBySlot = NOT_LISTED,
    ) -> Tensor:
        """The final hidden states [rows, hidden] of int64 token_ids [rows] at int64 positions
        [rows]. `caches` has one for every mixer, in the order of the layers. `adapters` has the
        slots of the rows' adapters, if some have one, and `by_slot` the rows of some (see `Rows`).
        """
        batch = Batch(self.kernels, positions, paged, adapters=adapters, by_slot=by_slot)
        x, residual, first = self.embed(batch, token_ids), None, 0
        batch = self.with_layer_inputs(batch, token_ids, x)
        for layer in self.layers:
            end = first + len(layer.attention.parts)
            x, residual = layer(batch, x, residual, caches[first:end])
            first = end
        return self.finish(batch, x, residual)

    def finish(self, batch: Batch, x: Tensor, residual: Tensor | None) -> Tensor:
        """The final hidden states of what the last layer returns."""
        return enter(batch, x, residual, self.final_norm)[0]

    def embed(self, batch: Batch, token_ids: Tensor) -> Tensor:
        """What the first layer takes of int64 token_ids [rows]."""
        x = self.embedding(batch, token_ids).to(self.dtype)
        if self.spec.embedding_scale != 1:
            x = self.kernels.scale_add(x, self.spec.embedding_scale)
        if self.positions is not None:
            x = self.kernels.scale_add(x, 1.0, self.positions(batch, batch.positions))
        return x if self.embedding_norm is None else self.embedding_norm(batch, x)

    def with_layer_inputs(self, batch: Batch, token_ids: Tensor, x: Tensor) -> Batch:
        """The batch with the vectors that tokens have for each layer, where they have some; `x` are
        their embeddings.
        """
        if self.inputs is None:
            return batch
        return replace(batch, per_layer=self.inputs(batch, token_ids, x))

    @property
    def linears(self) -> Mapping[str, Linear | ExpertsLinear | HeadLinear | Embedding]:
        """Its products, and the embedding, by name."""
        return self._parameters.linears

    def logits(
        self,
        hidden: Tensor,
        out: Tensor | None = None,
        adapters: Tensor | None = None,
        by_slot: RowsBySlot = NOT_LISTED,
    ) -> Tensor:
        """Scores [rows, vocab] of hidden rows, in the model's dtype; into `out` if there is one.
        `adapters` has the slots of their adapters, `by_slot` the rows of some.
        """
        # applied to the hidden rows, which are shorter than rows of logits
        if self.spec.logit_scale != 1:
            hidden = self.kernels.scale_add(hidden, self.spec.logit_scale)
        scores = self.head(Rows(self.kernels, adapters=adapters, by_slot=by_slot), hidden, out)
        if self.spec.logit_cap:
            self.kernels.soft_cap_(scores, self.spec.logit_cap)
        return scores

    @property
    def formats(self) -> Mapping[str, str]:
        """The names of the formats that weights were loaded in, by the weights' names."""
        return self._parameters.formats

    @property
    def nbytes(self) -> int:
        """What the weights take."""
        return sum(weight.nbytes for weight in self.weights.values())

    @property
    def num_parameters(self) -> int:
        """Of the weights in this process."""
        return sum(math.prod(weight.shape) for weight in self.weights.values())

    def update(self, weights: Mapping[str, Weight]) -> None:
        """Replaces weights by those loaded here, where they lie: see `Parameters.update`."""
        self.num_updates += 1
        self._parameters.update(weights)

    @property
    def has_files_weights(self) -> bool:
        """Whether its weights are those of the model's files: no others were put in their place."""
        return not self._parameters.replaced

    def reload(self, loaded: WeightSource) -> None:
        """Replaces all weights by those of the model's files, one after the other."""
        for name in self.weights:
            self.update({name: loaded.pop(name)})
        self._parameters.replaced = False

    @property
    def missing(self) -> set[str]:
        """Weights that are gone, since the decoder slept at level 2: it computes nothing of use
        before they are new.
        """
        return self._parameters.missing

    def sleep(self, level: SleepLevel) -> None:
        """Gives the weights' memory back; nothing can be computed before `wake`."""
        self.num_updates += level == 2
        self._parameters.sleep(level)
        # not among the weights that a caller has, so they are never lost
        self._tables.sleep(keep=True)

    def wake(self) -> None:
        """Takes the memory again."""
        self._parameters.wake()
        self._tables.wake()

    def release(self) -> None:
        """Sleeps for good: the decoder can't be used afterwards, and nothing of it stays."""
        self.sleep(2)
        self.layers.clear()
        self._parameters, self._tables = Parameters(self.kernels, {}), TensorMemory(())
        del self.embedding, self.head, self.final_norm, self.embedding_norm, self.positions
        self.inputs = None
