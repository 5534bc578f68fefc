"""Rung 6 in isolation: the same attention by different kernels, its time and the memory it needs on
the way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial

import torch
from torch import Tensor

from quire.errors import EngineError
from quire.kernels.ops import Kernels
from quire.kernels.reference import ReferenceKernels
from quire.llm import LLM
from quire.models.decoder import Decoder
from quire.tools.bench.ladder.settings import ClimbSettings
from quire.tools.bench.measure import Clock, peak_memory, timed
from quire.tools.bench.report import EMPTY, Bytes, Factor, Row, Table
from quire.tools.bench.spread import Spread
from quire.tools.ladder.attention import Attend, attention_ways

FLOAT32_ON_GPU = (
    "In float32 a GPU's tensor cores would round the factors, so these kernels don't use them; and torch has no fused "
    "attention for grouped heads in float32 there, so that it, too, has all scores in memory at once."
)


def compare_attention(llm: LLM, settings: ClimbSettings, clock: Clock) -> Table:
    """One layer's attention over a whole prompt."""
    decoder = llm.engine.decoder
    heads, device = decoder.spec.head_shapes[0], decoder.device
    both: tuple[Kernels, ...] = (ReferenceKernels(), decoder.kernels)
    # the model may run on the reference
    backends = list({kernels.name: kernels for kernels in both}.values())
    rows: list[Row] = []
    for tokens in settings.attention_lengths:
        ways = attention_ways(decoder, backends, tokens)
        rows += _measure(decoder, ways, tokens, settings.repeats, clock)
    note = (
        f"One layer of {heads.num_heads} heads ({heads.num_kv_heads} for keys and values) of {heads.head_dim}, "
        f"{settings.repeats} repeats after a first run. The kernels find their batch laid out, as an engine does once "
        "for all layers. Memory is the most that was held beyond the inputs."
    )
    if device.type == "cuda" and decoder.dtype == torch.float32:
        note += f" {FLOAT32_ON_GPU}"
    return Table(
        "Attention kernels", note, ("tokens", "attention", "time", "memory", "factor"), tuple(rows)
    )


@torch.inference_mode()
def _measure(
    decoder: Decoder, ways: Mapping[str, Attend], tokens: int, repeats: int, clock: Clock
) -> Iterable[Row]:
    heads, device = decoder.spec.head_shapes[0], decoder.device
    generator = torch.Generator().manual_seed(tokens)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(decoder.dtype).to(device)

    query = draw(tokens, heads.num_heads, heads.head_dim)
    keys, values = (draw(heads.num_kv_heads, tokens, heads.head_dim) for _ in range(2))
    # GPUs may round float32 factors to fewer bits before they multiply them.
    tolerance = 1e-4 if decoder.dtype == torch.float32 and device.type == "cpu" else 0.03
    expected = slowest = None
    for name, attend in ways.items():
        work = partial(attend, query, keys, values)
        output = work()
        expected = output if expected is None else expected
        if not torch.allclose(output.float(), expected.float(), atol=tolerance):
            raise EngineError(
                f"attention of {name} differs from its definition: please report this as a bug"
            )
        memory = peak_memory(work, device)
        spread = Spread.of((1000 * timed(work, device, clock)[0] for _ in range(repeats)), "ms")
        slowest = slowest or spread
        yield (
            tokens,
            name,
            spread,
            EMPTY if memory is None else Bytes(memory),
            Factor.of(slowest, spread),
        )
