"""How the memory is shared out: weights first, then as many cache blocks as were asked for."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch

from quire.backends.select import device_of
from quire.config import EngineConfig, EngineLimits, format_bytes, parse_bytes
from quire.errors import CapacityError, InvalidRequestError
from quire.kernels.ops import PagedBatch
from quire.models.decoder import Decoder
from quire.models.spec import ModelSpec
from quire.models.weight_plan import WeightPlan
from quire.runner.kv_cache import KVCache
from quire.runner.layer_groups import LayerGroups


@dataclass(frozen=True, slots=True)
class CachePlan:
    """The cache that fits."""

    num_blocks: int
    """Block 0, the target of padding, included."""
    num_host_blocks: int
    block_size: int
    bytes_per_block: int
    """Of every block, whatever it holds, with its part of a draft model's cache."""
    groups: LayerGroups
    dtype: torch.dtype
    """Of keys and values."""
    max_model_len: int
    needs: str
    """What else takes memory, for the start-up message."""
    spare: int
    """Bytes that are left for nobody in particular."""

    @property
    def num_tokens(self) -> int:
        """How many tokens fit, if no block is given up; states are not counted."""
        return (self.num_blocks - 1) // len(self.groups.members) * self.block_size

    @property
    def nbytes(self) -> int:
        return self.num_blocks * self.bytes_per_block

    @property
    def bytes_per_token(self) -> int:
        """In all groups together, before any is given up; states come on top."""
        return len(self.groups.members) * self.bytes_per_block // self.block_size

    def blocks_at(self, num_tokens: int) -> int:
        """How many blocks a request of that length holds when it computes its next token."""
        return blocks_at(self.groups, num_tokens, self.block_size)

    def describe(self) -> str:
        """For the start-up message: what fits."""
        full = (self.num_blocks - 1) / self.blocks_at(self.max_model_len)
        kind = {torch.int8: "int8 ", torch.float8_e4m3fn: "fp8 "}.get(self.dtype, "")
        text = (
            f"{kind}cache of {self.num_tokens:,} tokens ({format_bytes(self.nbytes)}): "
            f"{full:,.1f} requests of the full length of {self.max_model_len:,}"
        )
        if self.num_host_blocks:
            num_host = self.num_host_blocks // len(self.groups.members)
            host_bytes = format_bytes(self.num_host_blocks * self.bytes_per_block)
            text += f"; host tier of {num_host * self.block_size:,} tokens ({host_bytes})"
        if self.groups.state is not None:
            size = format_bytes(self.groups.state.num_blocks * self.bytes_per_block)
            text += f"; a state of its recurrent layers takes {size}, every request has two"
        return f"{text} ({self.needs})"


def blocks_at(groups: LayerGroups, num_tokens: int, block_size: int) -> int:
    """How many blocks a request of that length holds, in all groups, and for its two states."""
    count = 0 if groups.state is None else 2 * groups.state.num_blocks
    for kept in groups.kept:
        seen = (
            num_tokens
            if kept.keeps == "all"
            else min(num_tokens, kept.size + (kept.keeps == "window") * block_size)
        )
        count += -(-seen // block_size)
    return count


def check_weights_fit(plan: WeightPlan, free: int) -> int:
    """The bytes that the weights will take; raises CapacityError if they don't fit. Called before
    they are loaded.
    """
    needed = plan.nbytes
    if needed > free:
        raise CapacityError(
            f"the model does not fit: {plan.num_parameters:,} parameters take {format_bytes(needed)} "
            f"({plan.describe()}), but {format_bytes(free)} are free. "
            "Use a smaller model, a dtype of fewer bytes, quantization int8 or int4, or another device."
        )
    return needed


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Bytes that are taken before the cache gets the rest. Measured on a GPU, where a step fails if
    memory is missing. On a CPU activations are small compared with what a default cache leaves
    free, and are not counted.
    """

    weights: int
    activations: int = 0
    """At the largest step."""
    draft_block: int = 0
    """Bytes per block in the cache of a draft model."""
    graphs: int = 0
    """The pool that all CUDA graphs share: the activations of the largest one."""
    adapters: int = 0
    """Kept for those in slots."""

    @property
    def beside_cache(self) -> int:
        """What is taken of the memory that the weights leave."""
        return self.activations + self.graphs + self.adapters

    def table(self, free: int) -> str:
        """What takes how much, as text; `free` is what is left when the weights are loaded."""
        entries = (
            ("weights", self.weights),
            ("activations", self.activations),
            ("graphs", self.graphs),
            ("adapters", self.adapters),
            ("free for the cache", max(free - self.beside_cache, 0)),
        )
        return ", ".join(
            f"{name} {format_bytes(size)}" for name, size in entries if size or name == "weights"
        )


@torch.inference_mode()
def measure_needs(
    decoder: Decoder, limits: EngineLimits, block_size: int, cache_dtype: torch.dtype
) -> Needs:
    """Computes the largest possible step on a GPU and reads the peak of memory; this also compiles
    the kernels, with keys and values of `cache_dtype`.
    """
    weights, device = decoder.nbytes, device_of(decoder.device)
    if not device.is_gpu:
        return Needs(weights=weights)
    tokens = limits.graph_tokens

    def peaks() -> tuple[int, int]:
        groups = LayerGroups.of(
            decoder.spec, block_size, cache_dtype, longest=1, model_dtype=decoder.dtype
        )
        cache = KVCache(decoder.spec, 1, 0, block_size, cache_dtype, decoder.device, groups=groups)
        largest = _peak_of_step(decoder, limits.max_batched_tokens, limits.max_num_seqs, cache)
        return largest, _peak_of_step(decoder, tokens, tokens, cache) if tokens else 0

    for heads in decoder.spec.head_shapes:
        # kernels are tested at their first question, which fails while they are only compiled
        decoder.kernels.decode_lists(1, 1, 1, heads)
    try:
        decoder.kernels.compile_together(peaks)
        activations, graphs = peaks()
    except torch.OutOfMemoryError as error:
        free = device.free_memory()
        raise CapacityError(
            f"a step of {limits.max_batched_tokens:,} tokens does not fit: weights {format_bytes(weights)}, "
            f"{format_bytes(free)} left. Lower max_batched_tokens or max_num_seqs."
        ) from error
    device.return_freed_memory()
    return Needs(weights=weights, activations=activations, graphs=graphs)


def _peak_of_step(decoder: Decoder, num_tokens: int, num_scored: int, cache: KVCache) -> int:
    """The peak of memory that a step of sequences of full length adds; its cache has a single
    block.
    """
    device, spec = decoder.device, decoder.spec
    longest = min(num_tokens, decoder.max_position)
    lengths = [longest] * (num_tokens // longest) + (
        [num_tokens % longest] if num_tokens % longest else []
    )
    places = torch.cat([torch.arange(length) for length in lengths]).to(device)
    starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
    batch = PagedBatch(
        query_start=starts,
        context_lens=starts.diff(),
        block_tables=torch.zeros(
            1, -(-longest // cache.layers[0].block_size), dtype=torch.int32, device=device
        ),
        table_rows=torch.zeros(len(lengths), dtype=torch.int32, device=device),
        slot_mapping=torch.zeros(num_tokens, dtype=torch.int64, device=device),
        max_context_len=longest,
        state_tables=torch.zeros(2, 1, cache.num_state_blocks, dtype=torch.int32, device=device),
    )

    def compute() -> None:
        hidden = decoder(
            places % spec.vocab_size, places, (batch,) * cache.num_groups, cache.layers
        )
        scores = decoder.logits(hidden[:num_scored]).float()
        _ = scores.clone(), scores.exp()  # sampling with filters holds about as much at once

    return device_of(device).peak_memory(compute) or 0


def plan_cache(
    spec: ModelSpec,
    config: EngineConfig,
    limits: EngineLimits,
    dtype: torch.dtype,
    free: int,
    needs: Needs,
    groups: LayerGroups,
) -> CachePlan:
    """How many blocks fit, for keys and values of a dtype. `free` is what is left once the weights
    are loaded; what activations, graphs and adapters need is subtracted here.
    """
    table = needs.table(free)
    free = max(free - needs.beside_cache, 0)
    if config.max_model_len is not None and config.max_model_len > spec.max_position:
        raise InvalidRequestError(
            "max_model_len",
            f"is {config.max_model_len}, but the model was made for at most {spec.max_position}",
        )
    count = len(groups.members)
    # what a block of tokens takes in all groups
    span_bytes = count * groups.block_bytes + needs.draft_block
    state_blocks = 0 if groups.state is None else 2 * groups.state.num_blocks
    wanted = limits.kv_cache_memory
    budget = (
        int(wanted * free) if isinstance(wanted, float) else parse_bytes("kv_cache_memory", wanted)
    )
    if budget > free:
        raise CapacityError(
            f"the cache does not fit: kv_cache_memory is {format_bytes(budget)}, but {format_bytes(free)} are free "
            f"({table}). Lower kv_cache_memory, or max_batched_tokens and max_num_seqs."
        )
    usable = count * (budget // span_bytes - 1)
    affordable = (usable - state_blocks) // count
    longest = config.max_model_len or spec.max_position
    needed = 1 if config.max_model_len is None else -(-longest // config.block_size)
    if affordable < needed:
        taken = (needed + 1) * span_bytes + state_blocks * groups.block_bytes
        states = f" and {state_blocks:,} blocks of its states" if state_blocks else ""
        raise CapacityError(
            f"one request of {needed * config.block_size:,} tokens does not fit: {needed + 1:,} blocks of "
            f"{config.block_size} tokens x {format_bytes(span_bytes)}{states} = {format_bytes(taken)}, "
            f"but kv_cache_memory is {format_bytes(budget)} ({wanted} asked for, {format_bytes(free)} free: {table}). "
            "Raise kv_cache_memory or lower max_model_len."
        )
    longest = min(longest, affordable * config.block_size)
    # More blocks than all rows need at full length would never be used, but for states that are
    # kept.
    useful = (
        count * limits.max_num_seqs * -(-longest // config.block_size)
        if groups.state is None
        else usable
    )
    host_bytes = parse_bytes("host_cache_memory", config.host_cache_memory)
    num_blocks = 1 + min(usable, useful)
    return CachePlan(
        num_blocks=num_blocks,
        num_host_blocks=host_bytes // span_bytes * count,
        block_size=config.block_size,
        bytes_per_block=span_bytes // count,
        groups=groups,
        dtype=dtype,
        max_model_len=longest,
        needs=table,
        spare=max(free - num_blocks * (span_bytes // count), 0),
    )
