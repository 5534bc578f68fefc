"""What a model's scores and its attention cost, in terms of its layers: a step log says it, for whoever predicts how
long steps take."""

from __future__ import annotations

import math
from typing import NamedTuple

from quire.models.spec import MlpSpec, ModelSpec


class RowShares(NamedTuple):
    """Products, over those of all layers' matrices for a row."""

    head_share: float = 0.0
    """Of the scores of a row that is sampled from."""
    pair_share: float = 0.0
    """Of a query and a key that it sees."""


def row_shares(spec: ModelSpec) -> RowShares:
    """Those of a model."""
    experts = [layer.mlp for layer in spec.layers if not isinstance(layer.mlp, MlpSpec)]
    part = experts[0].top_k / experts[0].num_experts if experts else 1.0
    layers = 0.0
    for name, parameter in spec.parameters().items():
        if name not in ("embedding", "head"):
            is_stack = len(parameter.shape) > 2  # of experts, of which a token has a few
            layers += math.prod(parameter.shape) * (part if is_stack else 1.0)
    pair = 2 * spec.heads.num_heads * spec.heads.head_dim * spec.num_layers  # with the key, and with its value
    return RowShares(spec.vocab_size * spec.hidden_size / layers, pair / layers)
