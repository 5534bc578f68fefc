"""How fast it could be: the bytes a workload must read and the products it must compute, at the rates this very
device reads and multiplies at in this very run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from quire.models.spec import MlpSpec, ModelSpec


@dataclass(frozen=True, slots=True)
class Work:
    """What can't be avoided. Writes, activations and everything that fits a cache are left out."""

    bytes_read: float = 0.0
    flops: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(self.bytes_read + other.bytes_read, self.flops + other.flops)


@dataclass(frozen=True, slots=True)
class Rates:
    """What the device reaches on nothing but reading, and on nothing but multiplying."""

    read_bandwidth: float
    """Bytes per second."""
    flops: float
    """Per second, in products of large matrices in the model's dtype."""

    def seconds(self, work: Work) -> float:
        """The least time: reading and multiplying may overlap."""
        return max(work.bytes_read / self.read_bandwidth, work.flops / self.flops)

    def __str__(self) -> str:
        return f"reads {self.read_bandwidth / 1e9:,.0f} GB/s, multiplies at {self.flops / 1e12:,.1f} TFLOP/s"


def decode_work(spec: ModelSpec, contexts: Sequence[int], itemsize: int) -> Work:
    """One step in which sequences of these lengths (the new token included) compute one token each."""
    rows = len(contexts)
    keys = sum(_keys_seen(spec, context) for context in contexts)
    key_bytes = 2 * spec.heads.num_kv_heads * spec.heads.head_dim * itemsize
    return Work(
        bytes_read=_weight_bytes(spec, rows, itemsize) + keys * key_bytes,
        flops=2.0 * rows * (_layer_parameters(spec) + spec.vocab_size * spec.hidden_size) + keys * _key_flops(spec),
    )


def prompt_work(spec: ModelSpec, lengths: Sequence[int], itemsize: int) -> Work:
    """Prompts computed in one step, each with one token sampled. Their own keys need not leave the cache."""
    rows = sum(lengths)
    keys = sum(_keys_seen_by_all(spec, length) for length in lengths)
    head = 2.0 * len(lengths) * spec.vocab_size * spec.hidden_size
    return Work(
        bytes_read=_weight_bytes(spec, rows, itemsize),
        flops=2.0 * rows * _layer_parameters(spec) + head + keys * _key_flops(spec),
    )


def workload_work(spec: ModelSpec, jobs: Sequence[tuple[int, int]], itemsize: int) -> Work:
    """Requests of (prompt length, new tokens), all at once: prompts in the first step, then one token each."""
    total = prompt_work(spec, [prompt for prompt, _ in jobs], itemsize)
    for step in range(1, max(new for _, new in jobs)):
        total += decode_work(spec, [prompt + step for prompt, new in jobs if new > step], itemsize)
    return total


def measure_rates(device: torch.device, dtype: torch.dtype) -> Rates:
    """The best of several tries each. Takes about 4 GiB of a GPU's memory while it runs."""
    rates = Rates(_read_bandwidth(device), _multiply_rate(device, dtype))
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return rates


def _read_bandwidth(device: torch.device) -> float:
    on_gpu = device.type == "cuda"
    memory = torch.ones(2**30 if on_gpu else 2**26, dtype=torch.int32, device=device)
    read_all = _gpu_reader(memory) if on_gpu else memory.max
    return memory.numel() * memory.element_size() / _best_seconds(read_all, device)


def _multiply_rate(device: torch.device, dtype: torch.dtype) -> float:
    size = 8192 if device.type == "cuda" else 1024
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(left)
    return 2.0 * size**3 / _best_seconds(lambda: torch.mm(left, right, out=out), device)


def _gpu_reader(memory: Tensor) -> Callable[[], object]:
    from bench.read_kernel import BLOCK, read_blocks  # needs Triton, which a machine without a GPU may not have

    programs, rest = divmod(memory.numel(), BLOCK)
    assert not rest
    found = torch.empty(programs, dtype=torch.int32, device=memory.device)
    return lambda: read_blocks[(programs,)](memory, found, BLOCK, num_warps=8)


def _best_seconds(run: Callable[[], object], device: torch.device, tries: int = 10) -> float:
    seconds = _gpu_seconds if device.type == "cuda" else _cpu_seconds
    return min([seconds(run) for _ in range(tries + 2)][2:])  # the first ones warm up


def _gpu_seconds(run: Callable[[], object]) -> float:
    """By the device's own clock, so that launching does not count."""
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    run()
    ended.record()
    ended.synchronize()
    return began.elapsed_time(ended) / 1e3


def _cpu_seconds(run: Callable[[], object]) -> float:
    began = perf_counter()
    run()
    return perf_counter() - began


def _weight_bytes(spec: ModelSpec, rows: int, itemsize: int) -> float:
    """All layers and the head, and of an embedding that is not the head the rows that are looked up."""
    looked_up = 0 if spec.tie_embeddings else rows * spec.hidden_size
    head = spec.vocab_size * spec.hidden_size
    return itemsize * (_layer_parameters(spec, rows) + head + looked_up)


def _layer_parameters(spec: ModelSpec, rows: int | None = None) -> float:
    """Parameters of all layers that one row is multiplied with, or that any of so many rows is.

    Rows choose experts evenly: of E experts, n rows that take k each leave out E * (1 - k / E) ** n on average.
    """
    heads = spec.heads
    attention = spec.hidden_size * 2 * (heads.num_heads + heads.num_kv_heads) * heads.head_dim
    total = 0.0
    for layer in spec.layers:
        total += attention
        moe = layer.mlp
        if isinstance(moe, MlpSpec):
            total += 3 * moe.intermediate_size * spec.hidden_size
            continue
        experts = moe.num_experts
        read = moe.top_k if rows is None else experts * (1 - (1 - moe.top_k / experts) ** rows)
        total += (experts + 3 * moe.intermediate_size * read) * spec.hidden_size
        total += (3 * moe.shared_intermediate_size + bool(moe.shared_intermediate_size)) * spec.hidden_size
    return total


def _keys_seen(spec: ModelSpec, context: int) -> int:
    """By the last token of a sequence, over all layers."""
    windows = Counter(layer.attention.sliding_window for layer in spec.layers)
    return sum(count * min(context, window or context) for window, count in windows.items())


def _keys_seen_by_all(spec: ModelSpec, length: int) -> int:
    """By all tokens of a sequence, over all layers: token i sees i keys, up to the window."""
    total = 0
    for window, count in Counter(layer.attention.sliding_window for layer in spec.layers).items():
        growing = min(length, window or length)
        total += count * (growing * (growing + 1) // 2 + (length - growing) * growing)
    return total


def _key_flops(spec: ModelSpec) -> float:
    """Per query and key: a product with the key and one with the value, in every head."""
    return 4.0 * spec.heads.num_heads * spec.heads.head_dim
