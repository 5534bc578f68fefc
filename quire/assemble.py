"""Builds an engine from all its parts: worker (decoder, cache, runner), scheduler and loop,
tokenizer, step log.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from quire.backends.select import device_of, pick_device
from quire.checkpoints.checkpoint import Checkpoint
from quire.checkpoints.memory_file import MemoryFile
from quire.checkpoints.sources import ModelSource
from quire.config import EngineConfig, parse_bytes
from quire.constrain import GrammarCompiler
from quire.engine import EngineCore, Scheduler
from quire.errors import EngineError, InvalidRequestError
from quire.frontend.adapters import AdapterRegistry, SlotMemory
from quire.frontend.engine_info import EngineInfo, engine_info
from quire.frontend.tokenizer import Tokenizer
from quire.kernels.weights import Weight
from quire.load import Share, WeightReader, load_model, scheduler_config
from quire.models.adapters import AdapterLoader
from quire.models.decoder import Decoder
from quire.models.given_weights import checked_tensors, given_weights, stored_weights
from quire.models.load import Progress
from quire.models.spec import ModelSpec
from quire.observe.measure_costs import about_model
from quire.observe.step_log import StepLog
from quire.process.own_cores import use_own_cores
from quire.runner.adapters import NO_ADAPTERS
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

    adapters: AdapterRegistry
    """By the names that requests call them."""
    quantization: str = "auto"
    """As it was asked for."""
    reload: Callable[[], None] | None = None
    """Reads the weights from the model's files again; None where there are no files."""
    path: Path | None = None
    """Where these files are."""

    def sleep(self, level: int = 1) -> None:
        """Gives the memory of weights and cache back; requests are refused until `wake_up`. At
        level 1 the weights are kept in host memory, at level 2 they are dropped. The prefix cache
        is forgotten.
        """
        if level not in (1, 2):
            raise InvalidRequestError(
                "level", f"must be 1 (weights are kept in host memory) or 2, not {level!r}"
            )
        if self.runner.is_asleep:
            raise EngineError("the engine is asleep already: wake it up first")
        self.core.settle("sleeping", time.monotonic())
        self.runner.sleep(1 if level == 1 else 2)
        self.core.reset_prefix_cache(time.monotonic())
        self.core.refusal = "the engine is asleep and takes no requests: wake it up first"

    def wake_up(self, reload: bool = True) -> None:
        """Takes the memory again, and after level 2 reads the weights from the model's files;
        without `reload` requests are refused until `update_weights` has brought all of them. Does
        nothing where nothing is missing. Where weights were replaced before, those of the files are
        a new version.
        """
        if self.runner.is_asleep:
            self.runner.wake()
        try:
            if self.decoder.missing and reload and self.reload is not None:
                self.core.settle("reading the weights again", time.monotonic())
                self.reload()
                if self.weights_version:
                    self.core.change_weights(self.core.next_version(None), time.monotonic())
        finally:
            self._take_requests()

    @property
    def weights_version(self) -> int:
        """0 as loaded; higher with every update."""
        return self.core.weights_version

    def new_weights(self, given: Iterable[tuple[str, Tensor]]) -> dict[str, Weight]:
        """What `update_weights` takes, from tensors by the names that checkpoints have."""
        if isinstance(self.runner, Runner):
            return given_weights(self.decoder, self.quantization, given)
        tensors = checked_tensors(given)
        gathered = MemoryFile()  # for the other ranks to read
        try:
            for name, tensor in tensors.items():
                gathered.write(name, tensor)
            return self.runner.prepare(gathered.checkpoint())
        finally:
            gathered.close()

    def stored_weights(self, checkpoint: Checkpoint) -> dict[str, Weight]:
        """The same from files. In any thread, also while requests are computed."""
        if isinstance(self.runner, Runner):
            return stored_weights(self.decoder, self.quantization, checkpoint)
        return self.runner.prepare(checkpoint)

    def abandon_weights(self) -> None:
        """Forgets what `new_weights` or `stored_weights` has read and nobody will replace."""
        if not isinstance(self.runner, Runner):
            self.runner.abandon()

    def update_weights(self, weights: Mapping[str, Weight], version: int | None = None) -> None:
        """Replaces weights, by the decoder's names, where they lie (see `Parameters.update`), and
        forgets the prefix cache, which was computed with the old ones. They have a new version, the
        next one unless it is named here. If they turn out not to fit, nothing has changed; if the
        update fails halfway, requests are refused until the rest is replaced.
        """
        version = self.core.next_version(version)
        self.core.settle("an update of weights", time.monotonic())
        if self.runner.is_asleep:
            raise EngineError("the engine is asleep: wake it up before its weights are replaced")
        self.adapters.drop_unused()  # whose requests have ended since their names were forgotten
        slots = self.runner.adapters
        if slots is not None and slots.depends_on_weights:
            raise EngineError(
                "DoRA adapters are loaded, which were made for the present weights: unload them first"
            )
        missing = self.decoder.missing.copy()
        try:
            self.runner.update(weights)
        except BaseException:
            if self.decoder.missing != missing:
                self.core.change_weights(version, time.monotonic())
            raise
        else:
            self.core.change_weights(version, time.monotonic())
        finally:
            self._take_requests()

    def _take_requests(self) -> None:
        missing = self.decoder.missing
        self.core.refusal = None
        if missing:
            self.core.refusal = (
                f"{len(missing)} weights are missing since the engine slept at level 2 or an update failed halfway, "
                f"such as {min(missing)}: load them with update_weights, or all of them with wake_up"
            )

    @property
    def info(self) -> EngineInfo:
        """What `description` says, as fields."""
        config = self.core.scheduler.config
        return engine_info(
            self.spec, self.decoder, self.tokenizer, self.plan, config, self.eos_token_ids
        )


def build_engine(
    source: ModelSource,
    config: EngineConfig,
    progress: Progress | None = None,
    listeners: Sequence[Callable[[StepLogEntry], None]] = (),
) -> Engine:
    """Loads a model and builds an engine; `progress` is called while weights are read, `listeners`
    after each step.
    """
    use_own_cores()
    ranks: Ranks | None = None
    if config.tensor_parallel_size > 1:
        from quire.parallel.ranks import start_ranks  # which brings torch.distributed

        ranks = start_ranks(source, config)
    try:
        share, device = (
            (Share(), pick_device(config.device)) if ranks is None else (ranks.share, ranks.device)
        )
        config = config if ranks is None else ranks.config
        loaded = load_model(source, config, device, share, progress)
        about = {
            name: getattr(loaded, name)
            for name in (
                "tokenizer",
                "eos_token_ids",
                "formats",
                "draft",
                "spec",
                "adapters",
                "replacing",
            )
        }
        engine = assemble(
            loaded.decoder, config, name=source.name, listeners=listeners, ranks=ranks, **about
        )
        runner = engine.runner
        reload = loaded.replacing.reload if isinstance(runner, Runner) else runner.reload
        return replace(engine, reload=reload, path=source.path)
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
    adapters: AdapterLoader | None = None,
    replacing: WeightReader | None = None,
) -> Engine:
    """An engine around a decoder whose weights are loaded; without a tokenizer, tokens are bytes.
    Each of `listeners` is called after every step; `formats` names the weights' formats; `grammars`
    may be shared with another engine. With `ranks` (tensor parallelism) the decoder has a part of
    the model, `spec` describes the whole model, and `replacing` reads other weights for that part.
    `adapters` reads those that requests may have.
    """
    tokenizer = Tokenizer.of_bytes() if tokenizer is None else tokenizer
    grammars = grammars or GrammarCompiler(tokenizer, decoder.spec.vocab_size, eos_token_ids)
    worker = start_worker(
        decoder,
        config,
        grammars,
        formats,
        draft,
        None if ranks is None else ranks.agree,
        adapters or AdapterLoader(decoder, decoder.spec if spec is None else spec),
    )
    runner: Runner | ParallelRunner = worker.runner
    if ranks is not None:
        assert replacing is not None
        runner = ranks.runner(worker.runner, replacing)
    has_ngrams, has_drafts = config.speculation == "ngram", draft is not None
    speculator = Speculator(
        decoder.spec.vocab_size,
        ngrams=has_ngrams,
        runner_drafts=has_drafts,
        num_tokens=config.num_speculative_tokens,
    )
    path = Path(config.step_log) if config.step_log is not None else None
    scheduling = scheduler_config(
        config, worker.plan, config.limits(on_gpu=device_of(decoder.device).is_gpu)
    )
    whole = decoder.spec if spec is None else spec
    about = about_model(name, config, whole, decoder, path is not None and ranks is None)
    about |= {"depth": worker.depth, **asdict(scheduling)}
    step_log = StepLog(path=path, listeners=(*listeners, speculator.observe), engine=about)
    num_drafts = None if config.speculation == "off" else speculator.num_drafts
    scheduler = Scheduler(scheduling, propose=speculator.propose, num_drafts=num_drafts)
    core = EngineCore(
        scheduler,
        runner,
        depth=worker.depth,
        on_step=step_log.append,
        clock=time.monotonic,
        held=worker.runner,
    )
    table = scheduler.table
    slots = runner.adapters
    registry = AdapterRegistry(
        runner,
        parse_bytes("lora_memory", config.lora_memory),
        lambda: frozenset(request.adapter for request in table.requests.values()),
        NO_ADAPTERS if slots is None else None,
        None if slots is None or slots.room is None else SlotMemory(slots.room, slots.num_slots),
    )
    if ranks is None:
        description = f"{name}: {worker.description}"
    else:
        in_all = f"{whole.num_parameters / 1e6:,.0f}M parameters in all"
        description = f"{name}: {in_all}; {worker.description}; {ranks.description}"
    logger.info(description)
    return Engine(
        core,
        step_log,
        runner,
        decoder,
        whole,
        tokenizer,
        worker.plan,
        eos_token_ids,
        grammars,
        description,
        registry,
        config.quantization,
    )
