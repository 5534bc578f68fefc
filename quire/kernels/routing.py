"""Which experts a row gets, and how much each counts."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.elementwise import sigmoid
from quire.kernels.ops import MoeSpec


def route(
    router_logits: Tensor, spec: MoeSpec, choice_bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Each row's experts and their weights, [rows, top_k] both, the likeliest to be chosen first."""
    scores = sigmoid(router_logits) if spec.sigmoid_scores else router_logits.float().softmax(-1)
    ranked = scores if choice_bias is None else scores + choice_bias.float()
    if spec.num_groups > 1:
        ranked = _in_best_groups(ranked, spec)
    # A stable sort, because topk leaves the order of equal values open.
    chosen = ranked.sort(dim=-1, descending=True, stable=True).indices[:, : spec.top_k]
    weights = scores.gather(1, chosen)
    if spec.normalize_weights:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * spec.weight_scale, chosen


def _in_best_groups(ranked: Tensor, spec: MoeSpec) -> Tensor:
    """The scores [rows, experts], minus infinity outside of each row's best groups."""
    groups = ranked.view(len(ranked), spec.num_groups, -1)
    totals = (
        groups.sort(dim=-1, descending=True, stable=True).values[..., : spec.group_scores].sum(-1)
    )
    best = totals.sort(dim=-1, descending=True, stable=True).indices[:, : spec.top_groups]
    is_best = torch.zeros_like(totals, dtype=torch.bool).scatter_(1, best, True)
    return groups.masked_fill(~is_best.unsqueeze(-1), float("-inf")).flatten(1)
