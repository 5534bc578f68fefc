"""Measures what rows cost a decoder on a CPU, where kernels compute them in tiles, in about half a
second.

What counts is how few and many rows compare, so the clock is the processor's: it stands still while
other programs run.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import accumulate, islice
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import torch

from quire.config import EngineConfig
from quire.kernels.ops import MoeSpec, PagedBatch
from quire.models.decoder import Decoder
from quire.models.mixers import Batch
from quire.models.spec import ModelSpec
from quire.observe.row_costs import RowCosts
from quire.observe.step_log import LoggedModel
from quire.runner.kv_cache import KVCache

_ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 14, 16)
_TRIES = 2
_BLOCK_SIZE = 16
_SECONDS = 0.4
"""For the layers, and about as long for the head; of a large model a few layers stand for all."""


def about_model(
    name: str, config: EngineConfig, spec: ModelSpec, decoder: Decoder, is_measured: bool
) -> dict[str, Any]:
    """What a log says of a model (`LoggedEngine.model`) and of its rows (`.costs`); these are
    measured if there is a file to write that to and the decoder is that of all of the model.
    """
    costs = costs_of_shapes(spec)
    where = str(Path(name).absolute()) if os.path.exists(name) else name
    asked = {one: getattr(config, one) for one in LoggedModel._fields if hasattr(config, one)}
    model = LoggedModel(**asked | {"name": where, "device": decoder.device.type})
    return {
        "costs": asdict(measured_costs(decoder, costs) if is_measured else costs),
        "model": model._asdict(),
    }


@torch.inference_mode()
def measured_costs(decoder: Decoder, costs: RowCosts) -> RowCosts:
    """With its kernels' times, on a CPU: a GPU hides small steps behind their launches."""
    spec = decoder.spec
    if decoder.device.type != "cpu":
        return costs
    by_dimension = decoder.kernels.keys_by_dimension(decoder.dtype, _BLOCK_SIZE)
    cache = KVCache(spec, 1, 0, _BLOCK_SIZE, decoder.dtype, decoder.device, by_dimension)
    caches = iter(cache.layers)
    layers = [(layer, list(islice(caches, len(layer.attention.parts)))) for layer in decoder.layers]
    chance = torch.Generator().manual_seed(0)
    # All different: experts are chosen by them.
    hidden = torch.randn(_ROWS[-1], spec.hidden_size, generator=chance).to(decoder.dtype)

    def compute(count: int, every: int) -> float:
        batch = _batch(decoder, count, cache.num_groups)
        tokens = torch.zeros(count, dtype=torch.int64)
        batch = decoder.with_layer_inputs(batch, tokens, hidden[:count])
        began = process_time()
        for layer, own in layers[::every]:
            layer(batch, hidden[:count], None, own)
        return process_time() - began

    def score(count: int) -> float:
        began = process_time()
        decoder.logits(hidden[:count])
        return process_time() - began

    some = _ROWS[len(_ROWS) // 2]
    one = len(layers)
    compute(some, one)  # the first time is another one
    expected = len(layers) * compute(some, one) / some * sum(_ROWS) * _TRIES
    every = max(1, min(len(layers), round(expected / _SECONDS)))
    share = len(layers[::every]) / len(layers)
    times = tuple(seconds / share for seconds in _times(lambda count: compute(count, every)))
    return replace(costs, rows=_ROWS[: len(times)], layers=times, head=_times(score)[: len(times)])


def _times(part: Callable[[int], float]) -> tuple[float, ...]:
    """By numbers of rows, two at least and as many as there is time for. What disturbs makes times
    longer, never shorter: so the shortest one counts, of as many rows or of more.
    """
    deadline = perf_counter() + 2 * _SECONDS
    times: list[float] = []
    for count in _ROWS:
        times.append(part(count))
        if len(times) > 1 and perf_counter() > deadline:
            break
    for _ in range(_TRIES - 1):
        times = [min(known, part(count)) for known, count in zip(times, _ROWS, strict=False)]
    return tuple(accumulate(reversed(times), min))[::-1]


def _batch(decoder: Decoder, count: int, num_groups: int) -> Batch:
    """So many sequences of one token, all in one place of the cache."""
    zeros = torch.zeros(count, dtype=torch.int32)
    paged = PagedBatch(
        query_start=torch.arange(count + 1, dtype=torch.int32),
        context_lens=zeros + 1,
        block_tables=torch.zeros(1, 1, dtype=torch.int32),
        table_rows=zeros,
        slot_mapping=zeros.long(),
        max_context_len=1,
    )
    return Batch(decoder.kernels, zeros.long(), (paged,) * num_groups)


def costs_of_shapes(spec: ModelSpec) -> RowCosts:
    """Without a measurement."""
    experts = [layer.mlp for layer in spec.layers if isinstance(layer.mlp, MoeSpec)]
    part = experts[0].top_k / experts[0].num_experts if experts else 1.0
    layers = 0.0
    for name, parameter in spec.parameters().items():
        if name not in ("embedding", "head"):
            is_stack = len(parameter.shape) > 2  # of experts, of which a token has a few
            layers += math.prod(parameter.shape) * (part if is_stack else 1.0)
    attention = (layer.attention for layer in spec.layers)
    # with the key, and with its value
    pair = sum(2 * one.output_size for one in attention if one is not None)
    return RowCosts(spec.vocab_size * spec.hidden_size / layers, pair / layers)
