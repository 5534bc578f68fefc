"""The definition of the kernels (`quire.kernels.reference`) in a form that autograd differentiates:
the same functions of real numbers, whole sequences at once, in any order of additions.

Only gradients are computed with it. So it may use torch's own sums and products, whose bits depend
on the number of rows, and must not write over what a derivative needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from quire.kernels.low_rank import ExpertAdapters
from quire.kernels.ops import (
    Activation,
    AttentionSpec,
    ExpertWeights,
    LayerCache,
    MoeSpec,
    PagedBatch,
    TransformActivated,
)
from quire.kernels.recurrent import (
    CHUNK,
    ConvolutionCache,
    ConvolutionSpec,
    GatedNormSpec,
    RecurrentCache,
    RecurrentSpec,
    RecurrentWeights,
)
from quire.kernels.reference import ReferenceKernels
from quire.kernels.weights import Weight

_ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    Activation.SILU: F.silu,
    Activation.GELU_TANH: lambda x: F.gelu(x, approximate="tanh"),
    Activation.CLAMPED_SWIGLU: lambda x: x * torch.sigmoid(1.702 * x),
    Activation.RELU2: lambda x: x.relu().square(),
    Activation.RELU: torch.relu,
    Activation.GELU: F.gelu,
}
"""The reference's are written with an exponential, whose derivative is 0 times infinity far from 0."""
_EPSILON = 1e-6
"""Of the norm of queries and keys in the delta rule, as in `reference_recurrent.py`."""


class Definition(ReferenceKernels):
    """Kernels for whole sequences, one after the other. Row i is token i of all, and caches have
    one block of as many tokens.
    """

    def __init__(self, lengths: Sequence[int], chosen: Sequence[Tensor] = ()) -> None:
        """`chosen` are the experts that the layer's calls of `moe` took in the forward pass."""
        self._lengths = list(lengths)
        self._chosen = list(chosen)

    def _split(self, x: Tensor, axis: int = 0) -> tuple[Tensor, ...]:
        """By sequence: the gradients of all are put together once, unlike those of slices."""
        return x.split_with_sizes(self._lengths, axis)

    def linear(
        self, x: Tensor, weight: Weight, bias: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        assert out is None
        return F.linear(x, weight.tensor, bias)

    def linear_heads(self, x: Tensor, weight: Weight) -> Tensor:
        return torch.einsum("rhi,hoi->rho", x, weight.tensor)

    def embedding(self, token_ids: Tensor, weight: Weight) -> Tensor:
        return F.embedding(token_ids, weight.tensor)

    def activate(self, x: Tensor, activation: Activation) -> Tensor:
        return _ACTIVATIONS[activation](x)

    def sigmoid_mul(self, gate: Tensor, x: Tensor) -> Tensor:
        return torch.sigmoid(gate) * x

    def soft_cap_(self, x: Tensor, cap: float) -> None:
        x.copy_(cap * torch.tanh(x / cap))

    def clamp_(self, x: Tensor, limit: float) -> None:
        x.copy_(x.clone().clamp(-limit, limit))  # its gradient needs x as it was

    def write_kv_(
        self, keys: Tensor, values: Tensor, cache: LayerCache, slot_mapping: Tensor
    ) -> None:
        for new, side in ((keys, cache.keys), (values, cache.values)):
            side[0] = new.transpose(0, 1)

    def attention(
        self,
        query: Tensor,
        cache: LayerCache,
        batch: PagedBatch,
        spec: AttentionSpec,
        sinks: Tensor | None = None,
        slopes: Tensor | None = None,
    ) -> Tensor:
        outputs = []
        heads = cache.keys.shape[1]
        sides = (self._split(query), self._split(cache.keys[0], 1), self._split(cache.values[0], 1))
        for own, keys, values in zip(*sides, strict=True):
            own, keys, values = own.transpose(0, 1), keys.unsqueeze(1), values.unsqueeze(1)
            grouped = own.reshape(heads, -1, *own.shape[1:])
            scores = grouped @ keys.mT * spec.scale
            if spec.soft_cap:
                scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
            if slopes is not None:
                positions = torch.arange(scores.shape[-1], device=query.device)
                distance = (positions - positions.unsqueeze(1)).to(scores.dtype)
                scores = scores + slopes.to(scores.dtype).view(heads, -1, 1, 1) * distance
            scores = scores.masked_fill(~_visible(scores.shape[-1], spec, query.device), -torch.inf)
            if sinks is not None:
                sink = sinks.to(scores.dtype).view(heads, -1, 1, 1)
                scores = torch.cat((scores, sink.expand(*scores.shape[:3], 1)), -1)
            weights = scores.softmax(-1)[..., : keys.shape[-2]]
            outputs.append((weights @ values).flatten(0, 1).transpose(0, 1))
        return torch.cat(outputs)

    def moe(
        self,
        x: Tensor,
        router_logits: Tensor,
        experts: ExpertWeights,
        spec: MoeSpec,
        transform_activated: TransformActivated | None = None,
        adapters: ExpertAdapters | None = None,
    ) -> Tensor:
        assert adapters is None, "rows that are trained have no adapters"
        chosen = self._chosen.pop(0)
        weights = _weights_of(chosen, router_logits, spec)
        if experts.scales is not None:
            weights = weights * experts.scales[chosen]
        # one tensor for each expert, whose gradients are put together once
        gate_up, down = experts.gate_up.tensor.unbind(), experts.down.tensor.unbind()
        output = torch.zeros_like(x)
        for expert in sorted(set(chosen.flatten().tolist())):
            rows, place = (chosen == expert).nonzero(as_tuple=True)
            scale, own = weights[rows, place].unsqueeze(1), x[rows]
            if spec.scales_inputs:
                own = own * scale
            added = None if experts.gate_up_bias is None else experts.gate_up_bias[expert]
            hidden = F.linear(own, gate_up[expert], added)
            apply = self.gate if spec.gated else self.activate
            hidden = apply(hidden, spec.activation)
            added = None if experts.down_bias is None else experts.down_bias[expert]
            product = F.linear(hidden, down[expert], added)
            product = product if spec.scales_inputs else product * scale
            output = output.index_add(0, rows, product)
        return output

    def convolve_(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        spec: ConvolutionSpec,
        cache: ConvolutionCache,
        batch: PagedBatch,
    ) -> Tensor:
        outputs = []
        for own in self._split(x):
            inputs = F.pad(own.T, (spec.taps - 1, 0)).unsqueeze(0)
            total = F.conv1d(inputs, weight.unsqueeze(1), bias, groups=spec.channels)[0].T
            outputs.append(F.silu(total) if spec.silu else total)
        return torch.cat(outputs)

    def recur_(
        self,
        mixed: Tensor,
        gates: Tensor,
        weights: RecurrentWeights,
        spec: RecurrentSpec,
        cache: RecurrentCache,
        batch: PagedBatch,
        decay_gates: Tensor | None = None,
    ) -> Tensor:
        heads = spec.num_value_heads
        told = gates[:, :heads] if decay_gates is None else decay_gates
        steps = F.softplus(told + weights.time_bias)
        if spec.is_delta:
            betas = torch.sigmoid(gates[:, -heads:]) * spec.beta_scale
        else:
            betas = steps = steps.clamp(*spec.time_limits)
        # of one channel, which stands for all, or of each
        decays = -weights.log_rate.exp().unsqueeze(1) * steps.view(len(steps), heads, -1)
        query, key, value = mixed.split_with_sizes(
            (spec.query_size, spec.query_size, spec.value_size), 1
        )
        query, key = (one.reshape(len(one), -1, spec.key_dim) for one in (query, key))
        if spec.is_delta:
            query, key = _normed(query) * spec.key_dim**-0.5, _normed(key)
        shared = heads // spec.num_key_heads
        query, key = (one.repeat_interleave(shared, 1).transpose(0, 1) for one in (query, key))
        value = value.reshape(len(value), -1, spec.value_dim)
        sides = query, key, value.transpose(0, 1), decays.transpose(0, 1), betas.T
        outputs = []
        for own in zip(*(self._split(side, 1) for side in sides), strict=True):
            state = value.new_zeros(heads, spec.key_dim, spec.value_dim)
            for tokens in zip(*(side.split(CHUNK, 1) for side in own), strict=True):
                if spec.gate_rank:  # computed again for its gradients: its numbers are many
                    output, state = checkpoint(
                        _chunk,
                        _Tokens(*tokens),
                        state,
                        True,
                        use_reentrant=False,
                        preserve_rng_state=False,
                    )
                else:
                    output, state = _chunk(_Tokens(*tokens), state, spec.is_delta)
                outputs.append(output.transpose(0, 1))
        output = torch.cat(outputs)
        if weights.skip is not None:
            output = output + weights.skip.unsqueeze(1) * value
        return output.flatten(1)

    def gated_norm(
        self, x: Tensor, gate: Tensor, weight: Tensor | None, eps: float, spec: GatedNormSpec
    ) -> Tensor:
        gates = torch.sigmoid(gate) if spec.sigmoid else F.silu(gate)
        if spec.gate_first:
            x = x * gates
        if spec.group_size:
            grouped = x.view(len(x), -1, spec.group_size)
            x = (grouped * torch.rsqrt(grouped.square().mean(-1, keepdim=True) + eps)).flatten(1)
        if weight is not None:
            x = x * weight.repeat(x.shape[1] // weight.shape[0])
        return x if spec.gate_first else x * gates


def _visible(length: int, spec: AttentionSpec, device: torch.device) -> Tensor:
    """bool [length, length]: which keys each token of a sequence sees."""
    places = torch.arange(length, device=device)
    query, key = places.unsqueeze(1), places
    seen = key <= query
    if spec.sliding_window is not None:
        seen &= key > query - spec.sliding_window
    if spec.chunk is not None:
        seen &= key >= query // spec.chunk * spec.chunk
    return seen


def _weights_of(chosen: Tensor, router_logits: Tensor, spec: MoeSpec) -> Tensor:
    """[rows, top_k]: how much each row takes of its experts."""
    scores = torch.sigmoid(router_logits) if spec.sigmoid_scores else router_logits.softmax(-1)
    weights = scores.gather(1, chosen)
    if spec.normalize_weights:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * spec.weight_scale


def _normed(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPSILON)


class _Tokens(NamedTuple):
    """What a recurrence takes of some tokens: [heads, tokens, ...] each, keys repeated for all the
    heads of values that share them.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    decay: Tensor
    beta: Tensor


def _chunk(tokens: _Tokens, state: Tensor, is_delta: bool) -> tuple[Tensor, Tensor]:
    """The outputs [heads, tokens, value_dim] of a chunk, and the state behind it, by the formulas of
    `kernels/recurrent.py`.
    """
    query, key, value, decay, beta = tokens
    total = decay.cumsum(1)
    order = torch.arange(decay.shape[1], device=decay.device)
    from_begin, beta = total.exp(), beta.unsqueeze(2)
    if is_delta:
        overlaps = _faded_products(key, key, total).tril(-1)
        # each change is what is left behind those before it: a triangular system
        changes = torch.linalg.solve_triangular(
            torch.eye(len(order), dtype=key.dtype, device=key.device) + beta * overlaps,
            beta * (value - key * from_begin @ state),
            upper=False,
            unitriangular=True,
        )
    else:
        changes = beta * value
    output = query * from_begin @ state + _faded_products(query, key, total) @ changes
    to_end = (total[:, -1:] - total).exp()
    after = state * total[:, -1].exp().unsqueeze(2) + (key * to_end).mT @ changes
    return output, after


def _faded_products(left: Tensor, right: Tensor, total: Tensor) -> Tensor:
    """[heads, tokens, tokens]: products of each token's numbers with those of the tokens up to it,
    which have faded since then; `total` are sums of log-decays, of a channel or of all together.
    """
    order = torch.arange(total.shape[1], device=total.device)
    apart = total.unsqueeze(2) - total.unsqueeze(1)
    later = (order.unsqueeze(1) < order).unsqueeze(2)
    fading = apart.masked_fill(later, -torch.inf).exp()
    if total.shape[2] == 1:
        return left @ right.mT * fading.squeeze(3)
    return torch.einsum("hic,hjc,hijc->hij", left, right, fading)
