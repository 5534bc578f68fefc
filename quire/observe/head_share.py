"""What a model's scores cost, in terms of its layers: a step log says it, for whoever predicts how long steps take."""

from __future__ import annotations

import math

from quire.models.spec import MlpSpec, ModelSpec


def head_share(spec: ModelSpec) -> float:
    """The products of the head for a token that samples, over those of all layers for any token."""
    experts = [layer.mlp for layer in spec.layers if not isinstance(layer.mlp, MlpSpec)]
    part = experts[0].top_k / experts[0].num_experts if experts else 1.0
    layers = 0.0
    for name, parameter in spec.parameters().items():
        if name not in ("embedding", "head"):
            is_stack = len(parameter.shape) > 2  # of experts, of which a token has a few
            layers += math.prod(parameter.shape) * (part if is_stack else 1.0)
    return spec.vocab_size * spec.hidden_size / layers
