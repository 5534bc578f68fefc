"""A worker: everything that computes steps on one device, from the weights to the runner.

What schedules the steps and understands text is put together in `quire.assemble`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quire.config import EngineConfig, format_bytes
from quire.constrain import GrammarCompiler
from quire.constrain.masks import Constrainer
from quire.kernels.formats import PLAIN
from quire.kernels.select import select_kernels
from quire.models.decoder import Decoder
from quire.models.load import ModelFiles, Progress, load_decoder
from quire.models.spec import ModelSpec
from quire.runner.device import describe, free_memory
from quire.runner.graphs import DecodeGraphs
from quire.runner.kv_cache import KVCache
from quire.runner.memory import CachePlan, Needs, check_weights_fit, measure_needs, plan_cache
from quire.runner.request_rows import RequestRows
from quire.runner.runner import Runner


@dataclass(frozen=True, slots=True)
class Worker:
    """One device, ready to compute."""

    decoder: Decoder
    runner: Runner
    plan: CachePlan
    description: str
    """What was loaded, where, and what fits: for the start-up message."""


def expected_plan(spec: ModelSpec, config: EngineConfig, dtype: torch.dtype, device: torch.device) -> CachePlan:
    """Says what can't work before the weights are read; the real plan is made when they are there."""
    free = free_memory(device)
    needs = Needs(check_weights_fit(spec, PLAIN[dtype], free))
    return plan_cache(spec, config, config.limits(device.type), dtype, free - needs.weights, needs)


def load_weights(
    files: ModelFiles, config: EngineConfig, dtype: torch.dtype, device: torch.device, progress: Progress | None
) -> Decoder:
    """The decoder with its weights in place; `progress` follows them."""
    kernels = select_kernels(device, dtype, config.kernels)
    return load_decoder(files, kernels, dtype, device, config.max_model_len, progress)


def start_worker(decoder: Decoder, config: EngineConfig, grammars: GrammarCompiler) -> Worker:
    """A worker around a decoder whose weights are in place; what memory is left becomes the cache."""
    spec, dtype, device, kernels = decoder.spec, decoder.dtype, decoder.device, decoder.kernels
    limits = config.limits(device.type)
    needs = measure_needs(decoder, limits, config.block_size, config.cuda_graphs)
    plan = plan_cache(spec, config, limits, dtype, free_memory(device), needs)
    cache = KVCache(spec, plan.num_blocks, plan.num_host_blocks, plan.block_size, dtype, device)
    rows = RequestRows(limits.max_num_seqs, plan.max_model_len, plan.block_size, device)
    constrainer = Constrainer(grammars, limits.max_num_seqs, spec.vocab_size, device)
    graphs = None
    if config.cuda_graphs and kernels.decode_lists(1, 1, 1, spec.heads) and kernels.sample_rows is not None:
        graphs = DecodeGraphs(decoder, cache.layers, rows, plan.block_size, limits.max_num_seqs, plan.max_model_len)
        graphs.warm_up()
    runner = Runner(decoder, cache, rows, plan.block_size, constrainer, graphs)
    description = (
        f"{spec.family}, {spec.num_parameters / 1e6:,.0f}M parameters ({format_bytes(needs.weights)}) "
        f"on {describe(device, dtype)}, {kernels.name} kernels; {plan.describe()}"
    )
    return Worker(decoder, runner, plan, description)
