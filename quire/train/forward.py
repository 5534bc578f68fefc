"""Logprobs whose values are the engine's, bit for bit, and whose gradients are the definition's.

The decoder is cut into segments: the embedding, each layer, the head. A segment computes forward
with the engine's own kernels and weights and keeps its inputs only. Backward it computes the plain
definition from these inputs and lets autograd differentiate it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from quire.errors import InvalidRequestError
from quire.kernels.ops import Kernels, LayerCache, MixerCache
from quire.kernels.weights import Weight
from quire.models.decoder import Decoder, DecoderLayer, LayerInputs
from quire.models.mixers import Batch
from quire.models.parameters import Parameters
from quire.sampling.logprobs import logprobs_of_rows
from quire.train.definition import Definition
from quire.train.routing import RoutedKernels
from quire.train.rows import Sequences
from quire.train.weights import Weights

_SCORED_AT_ONCE = 256
"""Rows whose logits are in memory together, with their gradients."""

Tensors = tuple[Tensor, ...]
Named = Mapping[str, Tensor]


def logprobs(
    weights: Weights,
    token_ids: Sequence[Sequence[int]],
    scored_from: Sequence[int] | None = None,
) -> list[Tensor]:
    """For each sequence, the float32 logprobs of its tokens given those before them, from its second
    token on, or from position `scored_from[i]` on (the length of a prompt, to score its answer).

    Values are those that the engine gives for sampled tokens and for prompts. Raises if its weights
    are not the present ones.
    """
    weights.check()
    decoder = weights.decoder
    firsts = [1] * len(token_ids) if scored_from is None else list(scored_from)
    _check(token_ids, firsts, decoder)
    # a sequence's last token predicts nothing that is asked for
    sequences = Sequences.of([one[:-1] for one in token_ids], decoder.device)
    forward = _Forward(weights, sequences)
    x, residual = forward.layers()
    starts = sequences.starts
    rows = [
        torch.arange(start + first - 1, end)
        for start, end, first in zip(starts, starts[1:], firsts, strict=False)
    ]
    targets = torch.tensor(
        [token for one, f in zip(token_ids, firsts, strict=True) for token in one[f:]]
    )
    found = forward.score(
        x, residual, torch.cat(rows).to(decoder.device), targets.to(decoder.device)
    )
    return list(found.split_with_sizes([len(one) for one in rows]))


def _check(token_ids: Sequence[Sequence[int]], firsts: Sequence[int], decoder: Decoder) -> None:
    if len(firsts) != len(token_ids):
        raise InvalidRequestError(
            "scored_from", f"has {len(firsts)} positions for {len(token_ids)} sequences"
        )
    if not token_ids:
        raise InvalidRequestError("token_ids", "has no sequence")
    vocab_size, most = decoder.spec.vocab_size, decoder.max_position
    for number, (one, first) in enumerate(zip(token_ids, firsts, strict=True)):
        if not 2 <= len(one) <= most:
            raise InvalidRequestError(
                "token_ids",
                f"sequence {number} has {len(one)} tokens, but must have 2 to {most} (max_model_len)",
            )
        if not 1 <= first < len(one):
            raise InvalidRequestError(
                "scored_from",
                f"is {first} for sequence {number}, but must be 1 to {len(one) - 1}: the first token has no "
                "logprob, and at least one must be scored",
            )
        if min(one) < 0 or max(one) >= vocab_size:
            raise InvalidRequestError(
                "token_ids", f"of sequence {number} are not all from 0 to {vocab_size - 1}"
            )


@dataclass
class _Segment:
    """A part of the decoder, computed in two ways."""

    exact: Callable[[Tensors], Tensors]
    """With the engine's kernels and weights, of inputs in the model's dtype."""
    definition: Callable[[Tensors, Named], Tensors]
    """The same outputs, of inputs and parameters that autograd follows."""
    names: tuple[str, ...]
    """The decoder's parameters that it has: first those that have gradients."""
    dtypes: tuple[torch.dtype, ...]
    """In which the engine keeps these."""
    input_dtype: torch.dtype
    weights: Weights

    def __call__(self, inputs: Sequence[Tensor], trained: Named) -> Tensors:
        """Activations are in the dtype of gradients, which loses nothing of the model's dtype."""
        own = (trained[name] for name in self.names if name in trained)
        apply: Any = _Differentiated.apply
        return tuple(apply(self, len(inputs), *inputs, *own))


class _Differentiated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, segment: _Segment, num_inputs: int, *tensors: Tensor) -> Tensors:
        inputs = tuple(one.to(segment.input_dtype) for one in tensors[:num_inputs])
        ctx.segment, ctx.num_inputs = segment, num_inputs
        ctx.save_for_backward(*inputs, *tensors[num_inputs:])
        ctx.num_updates = segment.weights.decoder.num_updates
        wide = segment.weights.gradient_dtype
        # a copy, as an output may be an input, or two outputs one tensor
        return tuple(one.to(wide, copy=True) for one in segment.exact(inputs))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        segment, count = ctx.segment, ctx.num_inputs
        segment.weights.check_unchanged_since(ctx.num_updates)
        saved, needed = ctx.saved_tensors, ctx.needs_input_grad[2:]
        wide = segment.weights.gradient_dtype
        inputs = [one.to(wide) for one in saved[:count]]
        num_trained = len(saved) - count
        frozen = (segment.weights.parameter(name) for name in segment.names[num_trained:])
        # as the engine rounds them
        parameters = [
            one.to(dtype).to(wide)
            for one, dtype in zip((*saved[count:], *frozen), segment.dtypes, strict=True)
        ]
        with torch.enable_grad():
            leaves = [
                one.detach().requires_grad_(is_needed)
                for one, is_needed in zip((*inputs, *parameters[:num_trained]), needed, strict=True)
            ]
            own = (*leaves[count:], *parameters[num_trained:])
            named = dict(zip(segment.names, own, strict=True))
            outputs = segment.definition(tuple(leaves[:count]), named)
        pairs = [
            (output, gradient)
            for output, gradient in zip(outputs, gradients, strict=True)
            if gradient is not None and output.requires_grad
        ]
        wanted = [one for one in leaves if one.requires_grad]
        found = iter(
            torch.autograd.grad(
                [output for output, _ in pairs],
                wanted,
                [gradient for _, gradient in pairs],
                allow_unused=True,
            )
            if pairs
            else [None] * len(wanted)
        )
        return None, None, *(next(found) if is_needed else None for is_needed in needed)


class _PlainParameters(Parameters):
    """Parameters of a part of a decoder, for `Definition`."""

    def __init__(
        self, kernels: Kernels, decoder: Decoder, named: Named, dtype: torch.dtype
    ) -> None:
        loaded = {name: Weight.dense(one) for name, one in named.items()}
        super().__init__(kernels, loaded, dtype, decoder.max_position)
        self._place = decoder.device

    def constant(self, key: Any, make: Callable[[], Tensor]) -> Tensor:
        return make().to(self._place)


@dataclass
class _Forward:
    """One pass through the decoder."""

    weights: Weights
    sequences: Sequences
    keys: dict[int, Tensors] = field(default_factory=dict)
    """By number of a layer that others read: its keys and values, [1, heads, rows, head_dim]."""

    def __post_init__(self) -> None:
        self.decoder = self.weights.decoder
        self.spec = self.decoder.spec
        self.dtype = self.weights.gradient_dtype
        self.trained = self.weights.trained()
        self.paged, self.caches = self.sequences.make_blocks(self.decoder)
        self.plain = self.sequences.plain_batch()
        self.read = {one.reads_layer for one in self.spec.layers if one.reads_layer is not None}
        self.per_layer: Tensor | None = None

    def layers(self) -> tuple[Tensor, Tensor | None]:
        """What the last layer returns."""
        x, *per_layer = self._embedding()((), self.trained)
        self.per_layer = per_layer[0] if per_layer else None
        residual, first = None, 0
        for number, layer in enumerate(self.decoder.layers):
            end = first + len(layer.attention.parts)
            x, residual = self._through(number, x, residual, self.caches[first:end])
            first = end
        return x, residual

    def score(self, x: Tensor, residual: Tensor | None, rows: Tensor, targets: Tensor) -> Tensor:
        """The logprobs of targets by the last layer's rows."""
        parts: list[Tensor] = []
        for first in range(0, len(rows), _SCORED_AT_ONCE):
            chunk = slice(first, first + _SCORED_AT_ONCE)
            some = rows[chunk]
            inputs = [one[some] for one in (x, residual) if one is not None]
            parts += self._head(some, targets[chunk])(inputs, self.trained)
        return torch.cat(parts).float()

    def _segment(
        self,
        exact: Callable[[Tensors], Tensors],
        definition: Callable[[Tensors, Named], Tensors],
        prefix: str | None,
    ) -> _Segment:
        """`prefix` is that of its parameters' names; None: those that are in no layer."""
        own = [
            name
            for name in self.weights.names
            if (name.startswith(prefix) if prefix else not name.startswith("layers."))
        ]
        names = tuple(sorted(own, key=lambda name: name not in self.trained))
        dtype, shapes = self.decoder.dtype, self.spec.parameters()
        dtypes = tuple(torch.float32 if shapes[name].keep_float32 else dtype for name in names)
        return _Segment(exact, definition, names, dtypes, dtype, self.weights)

    def _embedding(self) -> _Segment:
        tokens, positions = self.sequences.token_ids, self.sequences.positions

        def embed(decoder: Decoder, batch: Batch) -> Tensors:
            x = decoder.embed(batch, tokens)
            per_layer = decoder.with_layer_inputs(batch, tokens, x).per_layer
            return (x,) if per_layer is None else (x, per_layer)

        def exact(inputs: Tensors) -> Tensors:
            return embed(self.decoder, Batch(self.decoder.kernels, positions, self.paged))

        def definition(inputs: Tensors, named: Named) -> Tensors:
            kernels = Definition(self.sequences.lengths)
            return embed(self._ends(kernels, named), Batch(kernels, positions, self.plain))

        return self._segment(exact, definition, None)

    def _ends(self, kernels: Definition, named: Named) -> Decoder:
        """A decoder without layers."""
        loaded = {name: Weight.dense(one) for name, one in named.items()}
        spec = replace(self.spec, layers=(), per_layer_size=0)
        ends = Decoder(spec, kernels, loaded, self.dtype, self.decoder.max_position)
        if self.spec.per_layer_size:
            own = _PlainParameters(kernels, self.decoder, named, self.dtype)
            ends.inputs = LayerInputs(own, self.spec)
        return ends

    def _through(
        self, number: int, x: Tensor, residual: Tensor | None, caches: Sequence[MixerCache]
    ) -> tuple[Tensor, Tensor | None]:
        """One layer."""
        layer, spec = self.decoder.layers[number], self.spec.layers[number]
        positions, is_read = self.sequences.positions, number in self.read
        has_residual = residual is not None
        routed = RoutedKernels(self.decoder.kernels)
        source = spec.reads_layer
        kept: list[Tensor] = []
        kept += () if residual is None else (residual,)
        kept += () if self.per_layer is None else (self.per_layer,)
        kept += () if source is None else self.keys[source]

        def unpacked(inputs: Tensors) -> tuple[Tensor, Tensor | None, Tensor | None, Tensors]:
            x, *rest = inputs
            residual = rest.pop(0) if has_residual else None
            per_layer = rest.pop(0) if self.per_layer is not None else None
            return x, residual, per_layer, tuple(rest)

        def exact(inputs: Tensors) -> Tensors:
            x, residual, per_layer, _ = unpacked(inputs)
            kernels: Any = routed
            batch = Batch(kernels, positions, self.paged, per_layer)
            found = [one for one in layer(batch, x, residual, caches) if one is not None]
            return (*found, *self._stored(caches[0])) if is_read else tuple(found)

        def definition(inputs: Tensors, named: Named) -> Tensors:
            x, residual, per_layer, keys = unpacked(inputs)
            kernels = Definition(self.sequences.lengths, routed.chosen)
            own = _PlainParameters(kernels, self.decoder, named, self.dtype)
            tables = [getattr(part, "cos_sin", None) for part in layer.attention.parts]
            plain = DecoderLayer(own, f"layers.{number}", self.spec, spec, tables)
            batch = Batch(kernels, positions, self.plain, per_layer)
            local = self.sequences.plain_caches(spec, self.dtype)
            if keys:
                local = [LayerCache(keys[0], keys[1])]
            found = [one for one in plain(batch, x, residual, local) if one is not None]
            if is_read:
                (cache,) = local
                assert isinstance(cache, LayerCache)
                found += (cache.keys, cache.values)
            return tuple(found)

        segment = self._segment(exact, definition, f"layers.{number}.")
        x, *rest = segment((x, *kept), self.trained)
        if is_read:
            self.keys[number] = tuple(rest[-2:])
            del rest[-2:]
        return x, rest[0] if rest else None

    def _stored(self, cache: MixerCache) -> Tensors:
        """The keys and values of all rows, as `Definition` keeps them."""
        assert isinstance(cache, LayerCache)
        slots = self.paged[cache.group].slot_mapping
        block, offset = slots // cache.block_size, slots % cache.block_size
        sides = (cache.keys, cache.values)
        return tuple(side[block, :, offset].transpose(0, 1).unsqueeze(0) for side in sides)

    def _head(self, rows: Tensor, targets: Tensor) -> _Segment:
        positions = self.sequences.positions[rows]

        def exact(inputs: Tensors) -> Tensors:
            decoder = self.decoder
            batch = Batch(decoder.kernels, positions, self.paged)
            hidden = decoder.finish(batch, *_with_residual(inputs))
            found = logprobs_of_rows(hidden, decoder.logits, targets, 0, decoder.kernels)
            return (found[1],)

        def definition(inputs: Tensors, named: Named) -> Tensors:
            kernels = Definition(self.sequences.lengths)
            decoder = self._ends(kernels, named)
            batch = Batch(kernels, positions, self.plain)
            logits = decoder.logits(decoder.finish(batch, *_with_residual(inputs)))
            return (logits.log_softmax(-1).gather(1, targets.unsqueeze(1)).squeeze(1),)

        return self._segment(exact, definition, None)


def _with_residual(inputs: Tensors) -> tuple[Tensor, Tensor | None]:
    return inputs[0], inputs[1] if len(inputs) > 1 else None
