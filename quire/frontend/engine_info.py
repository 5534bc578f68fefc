"""What an engine is, as fields: for programs, where `description` is for people."""

from __future__ import annotations

from dataclasses import dataclass

from quire.engine import SchedulerConfig
from quire.frontend.tokenizer import Tokenizer
from quire.kernels.formats import PLAIN
from quire.models.decoder import Decoder
from quire.models.spec import ModelSpec
from quire.runner.memory import CachePlan


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """A loaded model and what fits beside it."""

    family: str
    num_parameters: int
    num_layers: int
    hidden_size: int
    num_heads: int
    """This and the next two: of the first layer, if layers differ."""
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    device: str
    dtype: str
    """Of activations, and of weights that are plain numbers."""
    kernels: str
    weight_bytes: int
    weight_formats: tuple[str, ...]
    """As checkpoints spell them: BF16, Q4_1."""
    cache_dtype: str
    cache_bytes: int
    cache_tokens: int
    cache_bytes_per_token: int
    host_cache_tokens: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_batched_tokens: int
    policy: str
    prefix_caching: bool
    eos_token_ids: tuple[int, ...]
    has_chat_template: bool


def engine_info(
    spec: ModelSpec,
    decoder: Decoder,
    tokenizer: Tokenizer,
    plan: CachePlan,
    scheduler: SchedulerConfig,
    eos_token_ids: tuple[int, ...],
) -> EngineInfo:
    """`spec` is the whole model's, of which the decoder may have a part."""
    names = (part.format.name for weight in decoder.weights.values() for part in weight.parts)
    plain = {str(dtype).removeprefix("torch."): format.name for dtype, format in PLAIN.items()}
    stored = (name.rpartition("packed_")[2] for name in names)  # however a backend lays them out
    formats = dict.fromkeys(plain.get(name, name) for name in stored)
    heads = spec.head_shapes[0]
    return EngineInfo(
        family=spec.family,
        num_parameters=spec.num_parameters,
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        vocab_size=spec.vocab_size,
        device=str(decoder.device),
        dtype=str(decoder.dtype).removeprefix("torch."),
        kernels=decoder.kernels.name,
        weight_bytes=decoder.nbytes,
        weight_formats=tuple(formats),
        cache_dtype=str(plan.dtype).removeprefix("torch."),
        cache_bytes=plan.nbytes,
        cache_tokens=plan.num_tokens,
        cache_bytes_per_token=plan.bytes_per_token,
        host_cache_tokens=plan.num_host_blocks * plan.block_size,
        block_size=plan.block_size,
        max_model_len=plan.max_model_len,
        max_num_seqs=scheduler.max_num_seqs,
        max_batched_tokens=scheduler.max_batched_tokens,
        policy=scheduler.policy,
        prefix_caching=scheduler.prefix_caching,
        eos_token_ids=eos_token_ids,
        has_chat_template=bool(tokenizer.chat_templates),
    )
