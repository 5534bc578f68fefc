"""How the memory is shared out: weights first, then as many cache blocks as were asked for."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quire.config import EngineConfig, format_bytes, parse_bytes
from quire.errors import CapacityError, InvalidRequestError
from quire.models.spec import ModelSpec
from quire.runner.kv_cache import bytes_per_block


@dataclass(frozen=True, slots=True)
class CachePlan:
    """The cache that fits."""

    num_blocks: int
    """Block 0, which is nobody's, included."""
    num_host_blocks: int
    block_size: int
    bytes_per_block: int
    max_model_len: int

    @property
    def num_tokens(self) -> int:
        return (self.num_blocks - 1) * self.block_size

    def describe(self) -> str:
        """For the start-up message: what fits."""
        full = self.num_tokens / self.max_model_len
        text = (
            f"cache of {self.num_tokens:,} tokens ({format_bytes(self.num_blocks * self.bytes_per_block)}): "
            f"{full:,.1f} requests of the full length of {self.max_model_len:,}"
        )
        if self.num_host_blocks:
            host_bytes = format_bytes(self.num_host_blocks * self.bytes_per_block)
            text += f"; host tier of {self.num_host_blocks * self.block_size:,} tokens ({host_bytes})"
        return text


def check_weights_fit(spec: ModelSpec, dtype: torch.dtype, free: int) -> None:
    """Before a byte is loaded."""
    needed = spec.num_parameters * dtype.itemsize
    if needed > free:
        raise CapacityError(
            f"the model does not fit: {spec.num_parameters:,} parameters x {dtype.itemsize} bytes = "
            f"{format_bytes(needed)}, but {format_bytes(free)} are free. "
            "Use a smaller model, a dtype of fewer bytes, or another device."
        )


def plan_cache(spec: ModelSpec, config: EngineConfig, dtype: torch.dtype, free: int) -> CachePlan:
    """`free` is what is left once the weights are loaded."""
    if config.max_model_len is not None and config.max_model_len > spec.max_position:
        raise InvalidRequestError(
            "max_model_len", f"is {config.max_model_len}, but the model was made for at most {spec.max_position}"
        )
    block_bytes = bytes_per_block(spec, config.block_size, dtype)
    wanted = config.kv_cache_memory
    budget = int(wanted * free) if isinstance(wanted, float) else parse_bytes("kv_cache_memory", wanted)
    if budget > free:
        raise CapacityError(
            f"the cache does not fit: kv_cache_memory is {format_bytes(budget)}, but {format_bytes(free)} are free"
        )
    affordable = budget // block_bytes - 1
    longest = config.max_model_len or spec.max_position
    needed = -(-longest // config.block_size)
    if affordable < (needed if config.max_model_len is not None else 1):
        needed = needed if config.max_model_len is not None else 1
        raise CapacityError(
            f"one request of {needed * config.block_size:,} tokens does not fit: {needed + 1:,} blocks of "
            f"{config.block_size} tokens x {format_bytes(block_bytes)} = {format_bytes((needed + 1) * block_bytes)}, "
            f"but kv_cache_memory is {format_bytes(budget)} ({wanted} asked for, {format_bytes(free)} free). "
            "Raise kv_cache_memory or lower max_model_len."
        )
    longest = min(longest, affordable * config.block_size)
    # More than every row at full length could never be used.
    useful = config.max_num_seqs * -(-longest // config.block_size)
    return CachePlan(
        num_blocks=1 + min(affordable, useful),
        num_host_blocks=parse_bytes("host_cache_memory", config.host_cache_memory) // block_bytes,
        block_size=config.block_size,
        bytes_per_block=block_bytes,
        max_model_len=longest,
    )
