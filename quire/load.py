"""Loads a model: its files, its tokenizer, its weights, and those of a draft model if there is one.

Every process that computes does this, also each rank of tensor parallelism; `quire.assemble` builds
the engine.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from quire.backends.select import device_of
from quire.checkpoints.checkpoint import Checkpoint
from quire.checkpoints.sources import ModelSource, resolve
from quire.config import EngineConfig, EngineLimits, read_weights
from quire.engine import SchedulerConfig
from quire.errors import InvalidRequestError
from quire.frontend.tokenizer import Tokenizer
from quire.kernels.device import Device
from quire.kernels.weights import Weight
from quire.models.adapters import AdapterLoader
from quire.models.decoder import Decoder
from quire.models.given_weights import stored_weights
from quire.models.load import Progress, load_planned, open_model, reading
from quire.models.names import drafting_names, names_not_for_text
from quire.models.parameters import WeightSource
from quire.models.prediction import Predictor, prediction_files
from quire.models.spec import ModelSpec
from quire.models.vocabulary_adapters import Segments
from quire.models.weight_plan import ModelFiles, WeightPlan, plan_weights
from quire.process import gc_pauses
from quire.runner.dtypes import pick_dtype
from quire.runner.memory import CachePlan
from quire.runner.worker import Draft, choose_weights, expected_plan

logger = logging.getLogger(__name__)


class Share:
    """Which part of a model a process computes: here all of it. `quire.parallel.share` has the
    share of one rank.
    """

    def files(self, files: ModelFiles) -> ModelFiles:
        """The files with only what this process reads of them."""
        return files

    def plan(self, plan: WeightPlan, whole: ModelSpec) -> WeightPlan:
        """The plan with the kernels that this share needs."""
        return plan

    def source_of(self, whole: ModelSpec) -> Callable[[WeightSource], WeightSource]:
        """A wrapper for the source of weights that a decoder is filled from."""
        return lambda source: source

    def segments_of(self, whole: ModelSpec) -> Segments | None:
        """Which rows of a parameter it has; None: all."""
        return None


@dataclass(frozen=True, slots=True)
class WeightReader:
    """Reads other weights for a decoder, this process's share of them."""

    spec: ModelSpec
    """Of the whole model."""
    decoder: Decoder
    source: ModelSource
    config: EngineConfig
    device: Device
    share: Share

    def read(self, stored: Checkpoint) -> dict[str, Weight]:
        """New weights, for `Decoder.update`."""
        quantization = self.config.quantization
        return stored_weights(self.decoder, quantization, stored, self.spec, self.share.files)

    def reload(self) -> None:
        """Fills the decoder from its files again, in the memory that it has."""
        files = open_model(self.source.path)
        try:
            weights = _choose(files, self.config, self.device, self.share)
            with reading(weights) as loaded:
                self.decoder.reload(loaded)
        finally:
            files.checkpoint.close()


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A decoder with its weights in place, and what belongs to it."""

    spec: ModelSpec
    """Of the whole model, also where the decoder has a part of it."""
    decoder: Decoder
    tokenizer: Tokenizer
    eos_token_ids: tuple[int, ...]
    formats: str
    """The names of the weights' formats, for the start-up message."""
    draft: Draft | None
    adapters: AdapterLoader
    replacing: WeightReader


def load_model(
    source: ModelSource,
    config: EngineConfig,
    device: Device,
    share: Share,
    progress: Progress | None = None,
) -> LoadedModel:
    """Opens a model and loads this process's share of its weights; `progress` is called while they
    are read.
    """
    # a dtype that the device lacks is an error before files are opened
    pick_dtype(config.dtype, device)
    with ThreadPoolExecutor(1, "device") as beside:
        initialising = beside.submit(device.initialise)
        # The tokenizer takes long and holds the interpreter's lock.
        files, tokenizer = _open(source, config.skip_tokenizer_init, config.speculation == "mtp")
    try:
        initialising.result()
        # of engines that were here before: the plan counts what is free
        device.return_freed_memory()
        if config.speculation == "mtp":  # found missing before weights are read
            prediction_files(files)
        weights = _choose(files, config, device, share)
        scheduler_config(
            config, expected_plan(weights, config), config.limits(on_gpu=device.is_gpu)
        )
        decoder = load_planned(weights, config.max_model_len, progress, share.source_of(files.spec))
        draft = _load_draft(config, files, weights, decoder, tokenizer, share)
    finally:
        files.checkpoint.close()
    ends = tuple(dict.fromkeys((*files.spec.eos_token_ids, *tokenizer.eos_token_ids)))
    adapters = AdapterLoader(
        decoder,
        files.spec,
        share.segments_of(files.spec),
        partial(open_model, source.path),
        share.source_of(files.spec),
    )
    replacing = WeightReader(files.spec, decoder, source, config, device, share)
    formats = weights.describe()
    return LoadedModel(files.spec, decoder, tokenizer, ends, formats, draft, adapters, replacing)


def _choose(files: ModelFiles, config: EngineConfig, device: Device, share: Share) -> WeightPlan:
    return share.plan(choose_weights(share.files(files), config, device), files.spec)


def _load_draft(
    config: EngineConfig,
    whole: ModelFiles,
    weights: WeightPlan,
    decoder: Decoder,
    tokenizer: Tokenizer,
    share: Share,
) -> Draft | None:
    """The decoder that makes draft tokens, if `speculation` wants one. `whole` are the model's files,
    of which `weights` may have a share.
    """
    spec = decoder.spec
    if config.speculation == "self":
        stored = weights.files.block_formats()
        if stored and not weights.expanded():
            raise InvalidRequestError(
                "speculation",
                f"is self, but the weights are computed with as they are stored ({', '.join(stored)}), and there are "
                'no quicker ones to draft with: use ngram, or quantization="none"',
            )
        plan = plan_weights(
            weights.files,
            weights.kernels,
            weights.dtype,
            weights.device,
            "auto" if stored else "int4",
        )
        drafter = load_planned(plan, config.max_model_len, wrap_source=share.source_of(whole.spec))
        return Draft(drafter, False, f"drafts by itself in {plan.describe()}")
    if config.speculation == "mtp":
        return _load_predictor(config, prediction_files(whole), weights, decoder, share)
    if not config.speculation.startswith("draft:"):
        return None
    source = resolve(config.speculation.removeprefix("draft:"))
    files, own_tokenizer = _open(source, config.skip_tokenizer_init)
    try:
        sizes = {
            own_tokenizer.vocab_size,
            tokenizer.vocab_size,
            spec.vocab_size,
            files.spec.vocab_size,
        }
        known = range(min(sizes))
        differs = next(
            (i for i in known if own_tokenizer.token_bytes(i) != tokenizer.token_bytes(i)), None
        )
        if differs is not None or files.spec.vocab_size != spec.vocab_size:
            where = ""
            if differs is not None:
                theirs, ours = own_tokenizer.token_bytes(differs), tokenizer.token_bytes(differs)
                where = (
                    f", and the first that differs is {differs}: {theirs!r} there, {ours!r} here"
                )
            raise InvalidRequestError(
                "speculation",
                f"{source.name} can't draft for this model: its vocabulary has {files.spec.vocab_size} tokens, the "
                f"model's {spec.vocab_size}{where}",
            )
        # Its KV cache will have the dtype of the model's, so it must compute in the model's dtype.
        config = replace(config, dtype=str(decoder.dtype).removeprefix("torch."))
        plan = _choose(files, config, device_of(weights.device), share)
        name = f"{source.name} drafts ({plan.describe()})"
        return Draft(
            load_planned(plan, decoder.max_position, wrap_source=share.source_of(files.spec)),
            True,
            name,
        )
    finally:
        files.checkpoint.close()


def _load_predictor(
    config: EngineConfig, whole: ModelFiles, weights: WeightPlan, decoder: Decoder, share: Share
) -> Draft:
    """This process's share of the checkpoint's layer for multi-token prediction."""
    files = share.files(whole)
    plan = plan_weights(files, weights.kernels, weights.dtype, weights.device, config.quantization)
    with reading(plan) as loaded:
        source = share.source_of(whole.spec)(loaded)
        predictor = Predictor(files.spec, decoder, source)
    return Draft(
        predictor, False, f"drafts by its layer for multi-token prediction ({plan.describe()})"
    )


def open_tokenizer(source: ModelSource) -> Tokenizer:
    """A model's tokenizer alone, for a process that does not need the weights."""
    files, tokenizer = _open(source, without_text=False)
    files.checkpoint.close()
    return tokenizer


def _open(
    source: ModelSource, without_text: bool, predicts: bool = False
) -> tuple[ModelFiles, Tokenizer]:
    """`predicts`: its layers for multi-token prediction are used."""
    files = open_model(source.path)
    names = files.checkpoint.tensors.keys()
    if left_out := names_not_for_text(files.spec, names):
        logger.warning(
            "%s: %d tensors for images are left out: only text is read", source.name, len(left_out)
        )
    if not predicts and (left_out := drafting_names(files.spec, names)):
        logger.warning(
            "%s: %d tensors of layers for multi-token prediction are left out: speculation=mtp drafts with them",
            source.name,
            len(left_out),
        )
    try:
        tokenizer = (
            Tokenizer.without_text()
            if without_text
            else _open_tokenizer(files.checkpoint, source.path)
        )
        # a GGUF file's vocabulary as Python objects, which nobody needs any more
        files.checkpoint.metadata = {}
        gc_pauses.return_freed_memory()
        return files, tokenizer
    except BaseException:
        files.checkpoint.close()
        raise


def scheduler_config(
    config: EngineConfig, plan: CachePlan, limits: EngineLimits
) -> SchedulerConfig:
    return SchedulerConfig(
        num_blocks=plan.num_blocks,
        max_num_seqs=limits.max_num_seqs,
        max_batched_tokens=limits.max_batched_tokens,
        max_model_len=plan.max_model_len,
        block_size=plan.block_size,
        policy=config.policy,
        tenant_weights=_weights(config.tenant_weights),
        num_host_blocks=plan.num_host_blocks,
        prefix_caching=config.prefix_caching,
        groups=plan.groups.kept,
        state=plan.groups.state,
        bytes_per_block=plan.bytes_per_block,
        max_checked_tokens=limits.graph_tokens,
        target_token_time=_seconds(config.target_token_time),
        target_first_token=_seconds(config.target_first_token),
        gives_way=config.gives_way,
        max_loras=config.max_loras,
    )


def _weights(value: Mapping[str, float] | str) -> tuple[tuple[str, float], ...]:
    assert isinstance(value, str)  # as `Weights` keeps them
    return read_weights(value)


def _seconds(value: float | str | None) -> float | None:
    assert not isinstance(value, str)  # `Duration` keeps seconds
    return value


def _open_tokenizer(checkpoint: Checkpoint, path: Path) -> Tokenizer:
    if checkpoint.kind == "gguf":
        return Tokenizer.from_gguf(checkpoint.metadata)
    if checkpoint.kind == "npy" and not (path / "tokenizer.json").exists():
        logger.warning(
            "%s has no tokenizer.json: text is read and written as UTF-8 bytes, token i being byte i",
            path,
        )
        return Tokenizer.of_bytes()
    return Tokenizer.from_hf_folder(path)
