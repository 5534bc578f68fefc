"""The one decoder: a stack of attention and MLP layers as its ModelSpec describes.

`forward` takes everything it needs as arguments and knows no phases: a row is a token at a position of some
sequence, and the batch says where that sequence's keys and values lie. Modules hold parameters; what is
computed with them is the kernels' business.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from quire.kernels.ops import ExpertWeights, HeadShape, Kernels, LayerCache, PagedBatch
from quire.models.rope import cos_sin_table
from quire.models.spec import LayerSpec, ModelSpec


class Linear(nn.Module):
    """A weight [out, in], perhaps with a bias."""

    def __init__(self, in_size: int, out_size: int, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = _parameter(out_size, in_size, dtype=dtype)
        self.bias = _parameter(out_size, dtype=dtype) if bias else None

    def forward(self, kernels: Kernels, x: Tensor) -> Tensor:
        return kernels.linear(x, self.weight, self.bias)

    __call__ = forward  # here and below: no hooks, so not through the machinery that looks for them


class Attention(nn.Module):
    """Packed query, key and value projections, perhaps normed heads, rope, attention over the cache."""

    def __init__(self, spec: ModelSpec, layer: LayerSpec, dtype: torch.dtype) -> None:
        super().__init__()
        self.spec = spec
        self.layer = layer
        self.scale = spec.head_dim**-0.5
        self.shape = HeadShape(spec.num_heads, spec.num_kv_heads, spec.head_dim)
        self.qkv = Linear(spec.hidden_size, spec.query_size + 2 * spec.kv_size, spec.qkv_bias, dtype)
        self.output = Linear(spec.query_size, spec.hidden_size, spec.output_bias, dtype)
        self.query_norm = _parameter(spec.head_dim, dtype=dtype) if spec.qk_norm else None
        self.key_norm = _parameter(spec.head_dim, dtype=dtype) if spec.qk_norm else None

    def forward(
        self, kernels: Kernels, x: Tensor, positions: Tensor, cos_sin: Tensor, batch: PagedBatch, cache: LayerCache
    ) -> Tensor:
        qkv = self.qkv(kernels, x)
        norms = None
        if self.query_norm is not None and self.key_norm is not None:
            norms = self.query_norm, self.key_norm
        rotation = cos_sin if self.layer.use_rope else None
        query = kernels.qkv_to_cache_(
            qkv, self.shape, norms, self.spec.rms_norm_eps, positions, rotation, cache, batch.slot_mapping
        )
        attended = kernels.attention(query, cache, batch, self.scale, self.layer.sliding_window)
        return self.output(kernels, attended.view(x.shape[0], self.spec.query_size))

    __call__ = forward


class Mlp(nn.Module):
    """silu(gate) * up, then down; gate and up packed into one product."""

    def __init__(self, hidden_size: int, intermediate_size: int, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate_up = Linear(hidden_size, 2 * intermediate_size, bias, dtype)
        self.down = Linear(intermediate_size, hidden_size, bias, dtype)

    def forward(self, kernels: Kernels, x: Tensor) -> Tensor:
        activated = kernels.linear_silu_mul(x, self.gate_up.weight, self.gate_up.bias)
        return self.down(kernels, activated)

    __call__ = forward


class MoeMlp(nn.Module):
    """A router, its experts stacked into two tensors, and perhaps an expert that all tokens share."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype) -> None:
        super().__init__()
        moe = spec.moe
        assert moe is not None
        self.top_k = moe.top_k
        self.normalize_weights = moe.normalize_weights
        self.router = Linear(spec.hidden_size, moe.num_experts, False, dtype)
        self.gate_up = _parameter(moe.num_experts, 2 * moe.intermediate_size, spec.hidden_size, dtype=dtype)
        self.down = _parameter(moe.num_experts, spec.hidden_size, moe.intermediate_size, dtype=dtype)
        shared = moe.shared_intermediate_size
        self.shared = Mlp(spec.hidden_size, shared, False, dtype) if shared else None
        self.shared_gate = Linear(spec.hidden_size, 1, False, dtype) if shared else None

    def forward(self, kernels: Kernels, x: Tensor) -> Tensor:
        experts = ExpertWeights(self.gate_up, self.down)
        output = kernels.moe(x, self.router(kernels, x), experts, self.top_k, self.normalize_weights)
        if self.shared is not None and self.shared_gate is not None:
            output = output + kernels.sigmoid_mul(self.shared_gate(kernels, x), self.shared(kernels, x))
        return output

    __call__ = forward


class DecoderLayer(nn.Module):
    """Norm, attention, norm, MLP, each adding to the residual stream."""

    def __init__(self, spec: ModelSpec, layer: LayerSpec, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = spec.rms_norm_eps
        self.attention_norm = _parameter(spec.hidden_size, dtype=dtype)
        self.attention = Attention(spec, layer, dtype)
        self.mlp_norm = _parameter(spec.hidden_size, dtype=dtype)
        self.mlp: Mlp | MoeMlp
        if layer.use_moe:
            self.mlp = MoeMlp(spec, dtype)
        else:
            self.mlp = Mlp(spec.hidden_size, spec.intermediate_size, spec.mlp_bias, dtype)

    def forward(
        self,
        kernels: Kernels,
        x: Tensor,
        residual: Tensor | None,
        positions: Tensor,
        cos_sin: Tensor,
        batch: PagedBatch,
        cache: LayerCache,
    ) -> tuple[Tensor, Tensor]:
        """x is what the last layer would add to the residual stream; adding is fused with the norm."""
        if residual is None:
            normed, residual = kernels.rms_norm(x, self.attention_norm, self.eps), x
        else:
            normed, residual = kernels.add_rms_norm(x, residual, self.attention_norm, self.eps)
        attended = self.attention(kernels, normed, positions, cos_sin, batch, cache)
        normed, residual = kernels.add_rms_norm(attended, residual, self.mlp_norm, self.eps)
        return self.mlp(kernels, normed), residual

    __call__ = forward


class Decoder(nn.Module):
    """A whole model. Made without memory behind its parameters; `load.py` gives them their values."""

    cos_sin: Tensor

    def __init__(self, spec: ModelSpec, kernels: Kernels, dtype: torch.dtype) -> None:
        super().__init__()
        self.spec = spec
        self.kernels = kernels
        self.dtype = dtype
        self.embedding = _parameter(spec.vocab_size, spec.hidden_size, dtype=dtype)
        self.layers = nn.ModuleList(DecoderLayer(spec, layer, dtype) for layer in spec.layers)
        self.final_norm = _parameter(spec.hidden_size, dtype=dtype)
        self.head = None if spec.tie_embeddings else _parameter(spec.vocab_size, spec.hidden_size, dtype=dtype)

    def forward(self, token_ids: Tensor, positions: Tensor, batch: PagedBatch, caches: Sequence[LayerCache]) -> Tensor:
        """The final hidden states [rows, hidden] of int64 token_ids [rows] at int64 positions [rows]."""
        kernels = self.kernels
        x = kernels.embedding(token_ids, self.embedding)
        residual = None
        for layer, cache in zip(self.layers, caches, strict=True):
            x, residual = layer(kernels, x, residual, positions, self.cos_sin, batch, cache)
        if residual is None:
            return kernels.rms_norm(x, self.final_norm, self.spec.rms_norm_eps)
        return kernels.add_rms_norm(x, residual, self.final_norm, self.spec.rms_norm_eps)[0]

    __call__ = forward

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores [rows, vocab], in the model's dtype, of the hidden rows one asks for."""
        return self.kernels.linear(hidden, self.head_weight)

    @property
    def head_weight(self) -> Tensor:
        """What turns hidden states into scores [vocab, hidden], packed."""
        return self.embedding if self.head is None else self.head

    def finish_loading(self, max_position: int, device: torch.device) -> None:
        """Once all parameters have their values: the rope table, and the kernels' own weight layouts."""
        self.cos_sin = cos_sin_table(self.spec.rope, self.spec.head_dim, max_position).to(device)
        pack = self.kernels.pack_linear
        for module in self.modules():
            if isinstance(module, Linear):
                module.weight = _frozen(pack(module.weight))
            elif isinstance(module, MoeMlp):
                module.gate_up = _frozen(pack(module.gate_up))
                module.down = _frozen(pack(module.down))
        if self.head is None:
            self.embedding = _frozen(pack(self.embedding))  # one matrix for both ends
        else:
            self.head = _frozen(pack(self.head))


def _parameter(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    return _frozen(torch.empty(shape, dtype=dtype, device="meta"))


def _frozen(tensor: Tensor) -> nn.Parameter:
    return tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, requires_grad=False)
