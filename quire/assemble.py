"""Puts an engine together: files, tokenizer, a worker, scheduler. The one place that knows all of them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from quire.checkpoints.checkpoint import Checkpoint
from quire.checkpoints.sources import ModelSource, resolve
from quire.config import EngineConfig, Limits
from quire.constrain import GrammarCompiler
from quire.engine import EngineCore, Scheduler, SchedulerConfig
from quire.errors import InvalidRequestError
from quire.frontend.engine_info import EngineInfo, engine_info
from quire.frontend.tokenizer import Tokenizer
from quire.models.decoder import Decoder
from quire.models.load import Progress, load_planned, open_model
from quire.models.weight_plan import ModelFiles, WeightPlan, plan_weights
from quire.observe.step_log import StepLog
from quire.runner.device import pick_device, pick_dtype, use_own_cores, wake
from quire.runner.memory import CachePlan
from quire.runner.runner import Runner
from quire.runner.worker import Draft, choose_weights, expected_plan, start_worker
from quire.speculate.speculator import Speculator
from quire.step import StepLogEntry

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

    @property
    def info(self) -> EngineInfo:
        """The same as fields."""
        config = self.core.scheduler.config
        return engine_info(self.decoder, self.tokenizer, self.plan, config, self.eos_token_ids)


def build_engine(
    source: ModelSource,
    config: EngineConfig,
    progress: Progress | None = None,
    listeners: Sequence[Callable[[StepLogEntry], None]] = (),
) -> Engine:
    """Loads the model's weights and makes an engine around them; `progress` follows the weights, `listeners` hear
    of every step that is over."""
    device = pick_device(config.device)
    use_own_cores()
    pick_dtype(config.dtype, device)  # what can't be had is said before files are opened
    with ThreadPoolExecutor(1, "device") as beside:
        waking = beside.submit(wake, device)
        files, tokenizer = _open(source)  # the tokenizer takes long, and keeps Python to itself
    try:
        waking.result()
        weights = choose_weights(files, config, device)
        _scheduler_config(config, expected_plan(weights, config), config.limits(device.type))
        decoder = load_planned(weights, config.max_model_len, progress)
        draft = _load_draft(config, weights, decoder, tokenizer)
    finally:
        files.checkpoint.close()
    eos_token_ids = tuple(dict.fromkeys((*files.spec.eos_token_ids, *tokenizer.eos_token_ids)))
    return assemble(
        decoder,
        config,
        name=source.name,
        tokenizer=tokenizer,
        eos_token_ids=eos_token_ids,
        listeners=listeners,
        formats=weights.describe(),
        draft=draft,
    )


def _load_draft(config: EngineConfig, weights: WeightPlan, decoder: Decoder, tokenizer: Tokenizer) -> Draft | None:
    """The decoder that makes guesses, if `speculation` wants one."""
    device, spec = weights.device, decoder.spec
    if config.speculation == "self":
        stored = weights.files.block_formats()
        if stored and not weights.expanded():
            raise InvalidRequestError(
                "speculation",
                f"is self, but the weights are computed with as they are stored ({', '.join(stored)}), and there are "
                'no quicker ones to draft with: use ngram, or quantization="none"',
            )
        plan = plan_weights(weights.files, weights.kernels, weights.dtype, device, "auto" if stored else "int4")
        return Draft(load_planned(plan, config.max_model_len), False, f"drafts by itself in {plan.describe()}")
    if not config.speculation.startswith("draft:"):
        return None
    source = resolve(config.speculation.removeprefix("draft:"))
    files, own_tokenizer = _open(source)
    try:
        sizes = {own_tokenizer.vocab_size, tokenizer.vocab_size, spec.vocab_size, files.spec.vocab_size}
        known = range(min(sizes))
        differs = next((i for i in known if own_tokenizer.token_bytes(i) != tokenizer.token_bytes(i)), None)
        if differs is not None or files.spec.vocab_size != spec.vocab_size:
            where = ""
            if differs is not None:
                theirs, ours = own_tokenizer.token_bytes(differs), tokenizer.token_bytes(differs)
                where = f", and the first that differs is {differs}: {theirs!r} there, {ours!r} here"
            raise InvalidRequestError(
                "speculation",
                f"{source.name} can't draft for this model: its vocabulary has {files.spec.vocab_size} tokens, the "
                f"model's {spec.vocab_size}{where}",
            )
        # Its weights may be in another format, but it reads what the model writes.
        plan = choose_weights(files, replace(config, dtype=str(decoder.dtype).removeprefix("torch.")), device)
        name = f"{source.name} drafts ({plan.describe()})"
        return Draft(load_planned(plan, decoder.max_position), True, name)
    finally:
        files.checkpoint.close()


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
) -> Engine:
    """An engine around a decoder whose weights are in place; without a tokenizer, tokens are bytes. `listeners` hear of
    every step that is over; `formats` says which ones the weights are in; `grammars` may be those of another engine."""
    tokenizer = Tokenizer.of_bytes() if tokenizer is None else tokenizer
    grammars = grammars or GrammarCompiler(tokenizer, decoder.spec.vocab_size, eos_token_ids)
    worker = start_worker(decoder, config, grammars, formats, draft)
    device = decoder.device
    speculator = Speculator(
        decoder.spec.vocab_size, ngrams=config.speculation == "ngram", runner_drafts=draft is not None
    )
    path = Path(config.step_log) if config.step_log is not None else None
    scheduling = _scheduler_config(config, worker.plan, config.limits(device.type))
    # The host prepares a step while the device computes another, unless there is drafting in between.
    depth = 2 if device.type == "cuda" and draft is None else 1
    about = {"depth": depth, **asdict(scheduling)}
    step_log = StepLog(path=path, listeners=(*listeners, speculator.observe), engine=about)
    core = EngineCore(
        Scheduler(
            scheduling,
            guess=speculator.guess,
            num_drafts=None if config.speculation == "off" else speculator.num_drafts,
        ),
        worker.runner,
        depth=depth,
        on_step=step_log.append,
        clock=time.monotonic,
    )
    description = f"{name}: {worker.description}"
    logger.info(description)
    return Engine(core, step_log, worker.runner, decoder, tokenizer, worker.plan, eos_token_ids, grammars, description)


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
    if checkpoint.kind == "gguf":
        return Tokenizer.from_gguf(checkpoint.metadata)
    if checkpoint.kind == "npy" and not (path / "tokenizer.json").exists():
        logger.warning("%s has no tokenizer.json: text is read and written as UTF-8 bytes, token i being byte i", path)
        return Tokenizer.of_bytes()
    return Tokenizer.from_hf_folder(path)
