"""Builds an engine from all its parts: worker (decoder, cache, runner), scheduler and loop, tokenizer, step log."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from quire.checkpoints.sources import ModelSource
from quire.config import EngineConfig
from quire.constrain import GrammarCompiler
from quire.engine import EngineCore, Scheduler
from quire.frontend.engine_info import EngineInfo, engine_info
from quire.frontend.tokenizer import Tokenizer
from quire.load import Share, load_model, scheduler_config
from quire.models.decoder import Decoder
from quire.models.load import Progress
from quire.models.spec import ModelSpec
from quire.observe.measure_costs import about_model
from quire.observe.step_log import StepLog
from quire.runner.device import pick_device, use_own_cores
from quire.runner.memory import CachePlan
from quire.runner.runner import Runner
from quire.runner.worker import Draft, start_worker
from quire.speculate.speculator import Speculator
from quire.step import StepLogEntry

if TYPE_CHECKING:
    from quire.parallel.ranks import Ranks
    from quire.parallel.runner import ParallelRunner

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Engine:
    """A loaded model, ready to take requests."""

    core: EngineCore
    step_log: StepLog
    runner: Runner | ParallelRunner
    decoder: Decoder
    spec: ModelSpec
    """Of the whole model; with tensor parallelism `decoder.spec` describes this process's part."""
    tokenizer: Tokenizer
    plan: CachePlan
    eos_token_ids: tuple[int, ...]
    grammars: GrammarCompiler
    """For structured output; starts its process only when a grammar is asked for."""
    description: str
    """What was loaded, where, in which format, and what fits: for the start-up message."""

    @property
    def info(self) -> EngineInfo:
        """What `description` says, as fields."""
        config = self.core.scheduler.config
        return engine_info(self.spec, self.decoder, self.tokenizer, self.plan, config, self.eos_token_ids)


def build_engine(
    source: ModelSource,
    config: EngineConfig,
    progress: Progress | None = None,
    listeners: Sequence[Callable[[StepLogEntry], None]] = (),
) -> Engine:
    """Loads a model and builds an engine; `progress` is called while weights are read, `listeners` after each step."""
    use_own_cores()
    ranks: Ranks | None = None
    if config.tensor_parallel_size > 1:
        from quire.parallel.ranks import start_ranks  # which brings torch.distributed

        ranks = start_ranks(source, config)
    try:
        share, device = (Share(), pick_device(config.device)) if ranks is None else (ranks.share, ranks.device)
        config = config if ranks is None else ranks.config
        loaded = load_model(source, config, device, share, progress)
        about = {name: getattr(loaded, name) for name in ("tokenizer", "eos_token_ids", "formats", "draft", "spec")}
        return assemble(loaded.decoder, config, name=source.name, listeners=listeners, ranks=ranks, **about)
    except BaseException as error:
        if ranks is None:
            raise
        raise ranks.fail(error) from error


def assemble(
    decoder: Decoder,
    config: EngineConfig,
    *,
    name: str,
    tokenizer: Tokenizer | None = None,
    eos_token_ids: tuple[int, ...] = (),
    listeners: Sequence[Callable[[StepLogEntry], None]] = (),
    formats: str = "",
    draft: Draft | None = None,
    grammars: GrammarCompiler | None = None,
    spec: ModelSpec | None = None,
    ranks: Ranks | None = None,
) -> Engine:
    """An engine around a decoder whose weights are loaded; without a tokenizer, tokens are bytes. Each of `listeners`
    is called after every step; `formats` names the weights' formats; `grammars` may be shared with another engine. With
    `ranks` (tensor parallelism) the decoder has a part of the model, and `spec` describes the whole model."""
    tokenizer = Tokenizer.of_bytes() if tokenizer is None else tokenizer
    grammars = grammars or GrammarCompiler(tokenizer, decoder.spec.vocab_size, eos_token_ids)
    worker = start_worker(decoder, config, grammars, formats, draft, None if ranks is None else ranks.agree)
    device = decoder.device
    runner = worker.runner if ranks is None else ranks.runner(worker.runner)
    has_ngrams, has_drafts = config.speculation == "ngram", draft is not None
    speculator = Speculator(decoder.spec.vocab_size, ngrams=has_ngrams, runner_drafts=has_drafts)
    path = Path(config.step_log) if config.step_log is not None else None
    scheduling = scheduler_config(config, worker.plan, config.limits(device.type))
    # On a GPU the host prepares a step while the device computes the last one; drafting needs its tokens first.
    depth = 2 if device.type == "cuda" and draft is None else 1
    whole = decoder.spec if spec is None else spec
    about = about_model(name, config, whole, decoder, path is not None and ranks is None)
    about |= {"depth": depth, **asdict(scheduling)}
    step_log = StepLog(path=path, listeners=(*listeners, speculator.observe), engine=about)
    num_drafts = None if config.speculation == "off" else speculator.num_drafts
    scheduler = Scheduler(scheduling, guess=speculator.guess, num_drafts=num_drafts)
    core = EngineCore(scheduler, runner, depth=depth, on_step=step_log.append, clock=time.monotonic, held=worker.runner)
    description = f"{name}: {worker.description}" + ("" if ranks is None else f"; {ranks.description}")
    logger.info(description)
    return Engine(core, step_log, runner, decoder, whole, tokenizer, worker.plan, eos_token_ids, grammars, description)
