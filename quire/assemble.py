"""Puts an engine together: files, weights, cache, runner, scheduler. The one place that knows all of them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from quire.config import EngineConfig, Limits, format_bytes
from quire.constrain import GrammarCompiler
from quire.constrain.masks import Constrainer
from quire.engine import EngineCore, Scheduler, SchedulerConfig
from quire.frontend.tokenizer import Tokenizer
from quire.kernels.select import select_kernels
from quire.models.checkpoint import Checkpoint
from quire.models.decoder import Decoder
from quire.models.gguf_checkpoint import GgufCheckpoint
from quire.models.load import ModelFiles, Progress, load_decoder, open_model
from quire.models.npy_checkpoint import NpyCheckpoint
from quire.models.sources import ModelSource
from quire.models.spec import ModelSpec
from quire.observe.step_log import StepLog
from quire.runner.device import describe, free_memory, pick_device, pick_dtype, wake
from quire.runner.kv_cache import KVCache
from quire.runner.memory import CachePlan, Needs, check_weights_fit, measure_needs, plan_cache
from quire.runner.request_rows import RequestRows
from quire.runner.runner import PlainDraw, Runner
from quire.step import StepLogEntry

if TYPE_CHECKING:
    from quire.runner.graphs import DecodeGraphs

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Engine:
    """A loaded model, ready to take requests."""

    core: EngineCore
    step_log: StepLog
    runner: Runner
    decoder: Decoder
    tokenizer: Tokenizer
    plan: CachePlan
    eos_token_ids: tuple[int, ...]
    grammars: GrammarCompiler
    """For structured output; makes nothing before it is asked."""
    description: str
    """What was loaded, where, in which format, and what fits: for the start-up message."""


def build_engine(
    source: ModelSource,
    config: EngineConfig,
    progress: Progress | None = None,
    listeners: Sequence[Callable[[StepLogEntry], None]] = (),
) -> Engine:
    """Loads the model's weights and makes an engine around them; `progress` follows the weights, `listeners` hear
    of every step that is over."""
    device = pick_device(config.device)
    dtype = pick_dtype(config.dtype, device)
    with ThreadPoolExecutor(1, "device") as beside:
        waking = beside.submit(wake, device)
        files, tokenizer = _open(source)  # the tokenizer takes long, and keeps Python to itself
    try:
        waking.result()
        _check_fit(files.spec, config, dtype, device)
        decoder = _load(files, config, dtype, device, progress)
    finally:
        files.checkpoint.close()
    eos_token_ids = tuple(dict.fromkeys((*files.spec.eos_token_ids, *tokenizer.eos_token_ids)))
    return assemble(
        decoder, config, name=source.name, tokenizer=tokenizer, eos_token_ids=eos_token_ids, listeners=listeners
    )


def assemble(
    decoder: Decoder,
    config: EngineConfig,
    *,
    name: str,
    tokenizer: Tokenizer | None = None,
    eos_token_ids: tuple[int, ...] = (),
    listeners: Sequence[Callable[[StepLogEntry], None]] = (),
) -> Engine:
    """An engine around a decoder whose weights are in place; without a tokenizer, tokens are bytes. `listeners` hear of
    every step that is over."""
    spec, dtype, device = decoder.spec, decoder.dtype, decoder.embedding.device
    tokenizer = Tokenizer.of_bytes() if tokenizer is None else tokenizer
    limits = config.limits(device.type)
    needs = measure_needs(decoder, limits, config.block_size, config.cuda_graphs)
    plan = plan_cache(spec, config, limits, dtype, free_memory(device), needs)
    cache = KVCache(spec, plan.num_blocks, plan.num_host_blocks, plan.block_size, dtype, device)
    rows = RequestRows(limits.max_num_seqs, plan.max_model_len, plan.block_size, device)
    grammars = GrammarCompiler(tokenizer, spec.vocab_size, eos_token_ids)
    constrainer = Constrainer(grammars, limits.max_num_seqs, spec.vocab_size, device)
    draw, graphs = _quick_ways(decoder, cache, rows, plan, limits, config)
    runner = Runner(decoder, cache, rows, plan.block_size, constrainer, draw, graphs)
    step_log = StepLog(path=Path(config.step_log) if config.step_log is not None else None, listeners=listeners)
    core = EngineCore(
        Scheduler(_scheduler_config(config, plan, limits)),
        runner,
        depth=2 if device.type == "cuda" else 1,  # the host prepares a step while the device computes another
        on_step=step_log.append,
        clock=time.monotonic,
    )
    description = (
        f"{name}: {spec.family}, {spec.num_parameters / 1e6:,.0f}M parameters "
        f"({format_bytes(needs.weights)}) on {describe(device, dtype)}, {decoder.kernels.name} kernels; "
        f"{plan.describe()}"
    )
    logger.info(description)
    return Engine(core, step_log, runner, decoder, tokenizer, plan, eos_token_ids, grammars, description)


def open_tokenizer(source: ModelSource) -> Tokenizer:
    """A model's tokenizer alone, for a process that has no need of the weights."""
    files, tokenizer = _open(source)
    files.checkpoint.close()
    return tokenizer


def _open(source: ModelSource) -> tuple[ModelFiles, Tokenizer]:
    files = open_model(source.path)
    try:
        return files, _open_tokenizer(files.checkpoint, source.path)
    except BaseException:
        files.checkpoint.close()
        raise


def _quick_ways(
    decoder: Decoder, cache: KVCache, rows: RequestRows, plan: CachePlan, limits: Limits, config: EngineConfig
) -> tuple[PlainDraw | None, DecodeGraphs | None]:
    """Sampling in one go and decode steps in one launch, where the kernels are made for that."""
    if decoder.kernels.name != "triton":
        return None, None
    from quire.kernels.triton.kernels import TritonKernels  # needs triton, like the next ones
    from quire.kernels.triton.sampling import sample_rows
    from quire.runner.graphs import DecodeGraphs

    assert isinstance(decoder.kernels, TritonKernels)
    if not config.cuda_graphs:
        return sample_rows, None
    graphs = DecodeGraphs(
        decoder, cache.layers, rows, decoder.kernels, plan.block_size, limits.max_num_seqs, plan.max_model_len
    )
    graphs.warm_up()
    return sample_rows, graphs


def _check_fit(spec: ModelSpec, config: EngineConfig, dtype: torch.dtype, device: torch.device) -> None:
    """Says what can't work before the weights are read; the real plan is made when they are there."""
    free = free_memory(device)
    check_weights_fit(spec, dtype, free)
    needs, limits = Needs(spec.num_parameters * dtype.itemsize), config.limits(device.type)
    _scheduler_config(config, plan_cache(spec, config, limits, dtype, free - needs.weights, needs), limits)


def _load(
    files: ModelFiles, config: EngineConfig, dtype: torch.dtype, device: torch.device, progress: Progress | None
) -> Decoder:
    kernels = select_kernels(device, dtype, config.kernels)
    max_position = config.max_model_len or files.spec.max_position
    return load_decoder(files, kernels, dtype, device, max_position, progress)


def _scheduler_config(config: EngineConfig, plan: CachePlan, limits: Limits) -> SchedulerConfig:
    return SchedulerConfig(
        num_blocks=plan.num_blocks,
        max_num_seqs=limits.max_num_seqs,
        max_batched_tokens=limits.max_batched_tokens,
        max_model_len=plan.max_model_len,
        block_size=plan.block_size,
        policy=config.policy,
        num_host_blocks=plan.num_host_blocks,
        prefix_caching=config.prefix_caching,
    )


def _open_tokenizer(checkpoint: Checkpoint, path: Path) -> Tokenizer:
    if isinstance(checkpoint, GgufCheckpoint):
        return Tokenizer.from_gguf(checkpoint.metadata)
    if isinstance(checkpoint, NpyCheckpoint) and not (path / "tokenizer.json").exists():
        logger.warning("%s has no tokenizer.json: text is read and written as UTF-8 bytes, token i being byte i", path)
        return Tokenizer.of_bytes()
    return Tokenizer.from_hf_folder(path)
