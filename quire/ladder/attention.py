"""Rung 6 in isolation: the same attention by different kernels, its time and the memory it needs on the way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.benchmark.measure import Clock, Spread, peak_memory, timed
from quire.benchmark.report import EMPTY, Bytes, Cell, Table, factor
from quire.errors import EngineError
from quire.kernels.ops import AttentionSpec, HeadShape, Kernels, LayerCache, PagedBatch
from quire.kernels.reference import ReferenceKernels
from quire.ladder.contiguous import contiguous_batch
from quire.ladder.settings import ClimbSettings
from quire.llm import LLM

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
FLOAT32_ON_GPU = (
    "In float32 a GPU's tensor cores would round the factors, so these kernels don't use them; and torch has no fused "
    "attention for grouped heads in float32 there, so that it, too, has all scores in memory at once."
)


def attention_by_definition(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """softmax(Q·Kᵀ/√d)·V with a causal mask, as in the paper: all scores are in memory at once.

    query [tokens, heads, head_dim]; keys and values [kv_heads, tokens, head_dim].
    """
    tokens, heads, head_dim = query.shape
    group = heads // keys.shape[0]
    keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
    scores = query.transpose(0, 1) @ keys.transpose(1, 2) / head_dim**0.5
    future = torch.ones(tokens, tokens, dtype=torch.bool, device=query.device).triu(1)
    weights = scores.masked_fill(future, float("-inf")).softmax(-1)
    return torch.matmul(weights, values).transpose(0, 1)


def torch_attention(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """torch's own fused kernel: fast, but its bits depend on the number of queries."""
    output = F.scaled_dot_product_attention(
        query.transpose(0, 1)[None], keys[None], values[None], is_causal=True, enable_gqa=True
    )
    return output[0].transpose(0, 1)


def kernel_attention(kernels: Kernels, batch: PagedBatch, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """A backend's attention; the sequence is one block of its cache."""
    _, num_heads, head_dim = query.shape
    spec = AttentionSpec(HeadShape(num_heads, len(keys), head_dim), head_dim**-0.5)
    return kernels.attention(query, LayerCache(keys[None], values[None]), batch, spec)


def compare_attention(llm: LLM, settings: ClimbSettings, clock: Clock) -> Table:
    """One layer's attention over a whole prompt."""
    decoder = llm.engine.decoder
    heads = decoder.spec.heads
    backends: list[Kernels] = [ReferenceKernels()]
    if type(decoder.kernels) is not ReferenceKernels:
        backends.append(decoder.kernels)
    rows: list[tuple[Cell, ...]] = []
    for tokens in settings.attention_lengths:
        rows += _measure_length(llm, _ways(llm, backends, tokens), tokens, settings.repeats, clock)
    note = (
        f"One layer of {heads.num_heads} heads ({heads.num_kv_heads} for keys and values) of {heads.head_dim}, "
        f"{settings.repeats} repeats after a first run. The kernels find their batch laid out, as an engine does once "
        "for all layers. Memory is the most that was held beyond the inputs."
    )
    if decoder.embedding.device.type == "cuda" and decoder.dtype == torch.float32:
        note += f" {FLOAT32_ON_GPU}"
    return Table("Attention kernels", note, ("tokens", "attention", "time", "memory", "factor"), tuple(rows))


def _ways(llm: LLM, backends: Sequence[Kernels], tokens: int) -> dict[str, Attend]:
    spec, device = llm.engine.decoder.spec, llm.engine.decoder.embedding.device
    ways: dict[str, Attend] = {"by definition": attention_by_definition, "torch's fused one": torch_attention}
    for kernels in backends:
        batch = contiguous_batch([(0, 0, tokens)], tokens, kernels, spec.heads, device)
        ways[f"{kernels.name} kernels"] = partial(kernel_attention, kernels, batch)
    return ways


def _measure_length(
    llm: LLM, ways: dict[str, Attend], tokens: int, repeats: int, clock: Clock
) -> list[tuple[Cell, ...]]:
    decoder = llm.engine.decoder
    heads, device = decoder.spec.heads, decoder.embedding.device
    generator = torch.Generator().manual_seed(tokens)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(decoder.dtype).to(device)

    query = draw(tokens, heads.num_heads, heads.head_dim)
    keys, values = (draw(heads.num_kv_heads, tokens, heads.head_dim) for _ in range(2))
    rows: list[tuple[Cell, ...]] = []
    # GPUs may round float32 factors to fewer bits before they multiply them.
    tolerance = 1e-4 if decoder.dtype == torch.float32 and device.type == "cpu" else 0.03
    expected = slowest = None
    with torch.inference_mode():
        for name, attend in ways.items():
            output = attend(query, keys, values)
            expected = output if expected is None else expected
            if not torch.allclose(output.float(), expected.float(), atol=tolerance):
                raise EngineError(f"attention of {name} differs from its definition: please report this as a bug")
            work = partial(attend, query, keys, values)
            memory = peak_memory(work, device)
            times = [timed(work, device, clock)[0] for _ in range(repeats)]
            spread = Spread(tuple(1000 * seconds for seconds in times), "ms")
            slowest = spread if slowest is None else slowest
            shown = EMPTY if memory is None else Bytes(memory)
            rows.append((tokens, name, spread, shown, factor(slowest, spread)))
    return rows
