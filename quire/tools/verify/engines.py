"""One model, loaded once, and engines of all kinds around it."""

from __future__ import annotations

import gc
import random
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from quire.assemble import Engine, assemble, build_engine
from quire.backends.select import device_of
from quire.checkpoints.sources import ModelSource, resolve
from quire.config import EngineConfig
from quire.engine import Request, make_requests
from quire.engine.invariants import check_invariants
from quire.errors import CapacityError, EngineError, InvalidRequestError
from quire.frontend.progress import ModelBars
from quire.frontend.resolve import resolve_tokens
from quire.kernels.device import Device
from quire.models.spec import ModelSpec
from quire.parallel.division import Division
from quire.process.granted import num_cores
from quire.runner.dtypes import pick_cache_dtype
from quire.runner.kv_cache import token_bytes
from quire.runner.recorded import RecordedSteps
from quire.sampling_params import SamplingParams
from quire.step import TokenLogprob
from quire.tools.verify.answers import Answer
from quire.tools.verify.cases import Case

MAX_LEN = 1024
"""No request of ours is longer; positions are prepared for so many."""
_BLOCK_SIZE = 16
_MOST_KEPT = 24
"""Engines on a GPU that wait for more work of their kind."""


@dataclass(slots=True)
class CaseRun:
    """What became of some requests in an engine."""

    answers: list[list[Answer]] = field(default_factory=list)
    """By request, then by answer."""
    preemptions: int = 0
    cached_tokens: int = 0
    host_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0


class Model:
    """Weights, tokenizer, and whatever engine is wanted around them. Nothing else holds their
    memory twice.
    """

    num_devices = 2
    """Among which the model is divided, where that is tried."""

    def __init__(self, name: str, **options: Any) -> None:
        """`options` as for an LLM: device, dtype, quantization, kv_cache_dtype, kernels."""
        self._options = options
        self._kept: OrderedDict[tuple[EngineConfig, int | None], Engine] = OrderedDict()
        with ModelBars(name) as bars:
            self._source: ModelSource | None = resolve(name, progress=bars("download"))
            started = time.monotonic()
            self._engine = self._load(bars("load"))
        self.load_seconds = time.monotonic() - started

    @classmethod
    def around(cls, engine: Engine, **options: Any) -> Model:
        """Of an engine that is there already; it can't be loaded again."""
        model = cls.__new__(cls)
        model._options = options
        model._kept = OrderedDict()
        model._engine = engine
        model._source = None
        model.load_seconds = 0.0
        return model

    @property
    def can_reload(self) -> bool:
        return self._source is not None

    @property
    def has_recordings(self) -> bool:
        """Whether steps on this CPU are recorded."""
        return RecordedSteps.fit(self._engine.decoder)

    @property
    def keeps_engines(self) -> bool:
        """Whether an engine that has done its work is worth keeping."""
        return self.device.is_gpu

    @property
    def device(self) -> Device:
        return device_of(self._engine.decoder.device)

    @property
    def spec(self) -> ModelSpec:
        return self._engine.decoder.spec

    @property
    def first_engine(self) -> Engine:
        """The one that came with the weights."""
        return self._engine

    @property
    def longest(self) -> int:
        return min(MAX_LEN, self._engine.plan.max_model_len)

    def engine(
        self,
        cases: Sequence[Case],
        *,
        spare_tokens: int | None = None,
        host_tokens: int = 0,
        depth: int | None = None,
        block_size: int = _BLOCK_SIZE,
        max_num_seqs: int = 1,
        **options: Any,
    ) -> Engine:
        """An engine with room for these requests: for all of them at once, or for the longest one
        and `spare_tokens` more. A new one; on a GPU, where making one takes seconds, perhaps one
        that has done its work.
        """
        config = self._config(cases, spare_tokens, host_tokens, block_size, max_num_seqs, options)
        keeps = self.keeps_engines
        if keeps and (config, depth) in self._kept:
            self._kept.move_to_end((config, depth))
            engine = self._kept[config, depth]
            if not engine.core.has_work:  # one that broke is never done
                return engine
            del self._kept[config, depth]
        try:
            engine = self._assemble(config)
        except CapacityError:
            if not self._kept:
                raise
            self._kept.clear()  # they have the memory
            self.forget()
            engine = self._assemble(config)
        if depth is not None:
            engine.core.depth = depth
        if keeps:
            self._kept[config, depth] = engine
            while len(self._kept) > _MOST_KEPT:
                self._kept.popitem(last=False)
        return engine

    def _config(
        self,
        cases: Sequence[Case],
        spare_tokens: int | None,
        host_tokens: int,
        block_size: int,
        max_num_seqs: int,
        options: Mapping[str, Any],
    ) -> EngineConfig:
        decoder = self._engine.decoder
        keeps = self.keeps_engines
        longest = max(case.num_tokens for case in cases) + 1
        rooms = [case.num_tokens + block_size for case in cases for _ in range(case.params.n)]
        num_tokens = sum(rooms) if spare_tokens is None else spare_tokens
        if keeps and spare_tokens is None:  # rounded up, so that few are needed
            longest = min(_round_up(longest, 64), self._engine.plan.max_model_len)
            num_tokens = _round_up(num_tokens, 1024)
        if keeps and max_num_seqs > 8:
            max_num_seqs = _round_up(max_num_seqs, 16)
        num_blocks = -(-longest // block_size) + -(-num_tokens // block_size) + 2
        asked = self._options.get("kv_cache_dtype", "auto")
        cache_dtype = pick_cache_dtype(asked, decoder.dtype, self.device, self.spec.cache)
        block_bytes = token_bytes(self.spec, block_size, cache_dtype)
        given = {
            "max_batched_tokens": max(512, longest, max_num_seqs),
            "prefix_caching": False,
            **self._options,
            **options,
        }
        return EngineConfig(
            max_model_len=longest,
            max_num_seqs=max_num_seqs,
            block_size=block_size,
            kv_cache_memory=num_blocks * block_bytes,
            host_cache_memory=-(-host_tokens // block_size) * block_bytes,
            **given,
        )

    def no_devices(self, size: int) -> str | None:
        """Why the model can't be divided among so many processes here, if so."""
        decoder = self._engine.decoder
        if self._source is None:
            return "these weights have no files"
        try:
            Division(self.spec, 0, size)
        except InvalidRequestError as error:
            return str(error)
        if not self.device.is_gpu and num_cores() < size:
            return f"{size} processes need as many cores"
        if self.device.free_memory() < 1.5 * decoder.nbytes:
            return "there is no room for the weights a second time"
        return None

    @property
    def _own_device(self) -> str:
        device = self.device
        return f"{device.kind}:{device.torch_device.index or 0}" if device.is_gpu else device.kind

    @contextmanager
    def divided(self, cases: Sequence[Case], size: int, max_num_seqs: int) -> Iterator[Engine]:
        """An engine whose model is divided among so many processes: on GPUs of their own where
        there are as many, else on the same device.
        """
        assert self._source is not None
        kind = self.device.kind
        asked = self._options.get("device", "auto")
        has_more = self.device.is_gpu and self.device.count() >= size
        where = kind if has_more and asked in ("auto", kind) else self._own_device
        options = {"tensor_parallel_size": size, "device": where}
        config = self._config(cases, None, 0, _BLOCK_SIZE, max_num_seqs, options)
        engine = build_engine(self._source, config)
        try:
            yield engine
        finally:
            engine.step_log.close()
            engine.grammars.close()
            engine.runner.release()

    def _assemble(self, config: EngineConfig) -> Engine:
        first = self._engine
        return assemble(
            first.decoder,
            config,
            name="verify",
            tokenizer=first.tokenizer,
            eos_token_ids=first.eos_token_ids,
            grammars=first.grammars,
        )

    def reload(self) -> None:
        """Gives everything back and begins again from the files, as a new process would."""
        assert self._source is not None
        self.close()
        with ModelBars(self._source.name) as bars:
            self._engine = self._load(bars("load"))

    def close(self) -> None:
        """Gives weights and engines back."""
        self._kept.clear()
        engine = self._engine
        engine.step_log.close()
        engine.grammars.close()
        engine.runner.release()
        self.forget()

    def forget(self) -> None:
        """Gives back the memory of engines that nobody holds any more."""
        gc.collect()
        self.device.return_freed_memory()

    def _load(self, report: Callable[[int, int], None]) -> Engine:
        # Its own cache is never used: what one request could ever need, of a little of the memory.
        config = EngineConfig(
            max_num_seqs=1, max_batched_tokens=64, kv_cache_memory=0.1, **self._options
        )
        assert self._source is not None
        return build_engine(self._source, config, report)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def run_cases(
    engine: Engine,
    cases: Sequence[Case],
    *,
    order: Sequence[int] | None = None,
    arrivals_per_step: int | None = None,
    preempt_every: int = 0,
    displace: bool = False,
    predictions: Sequence[Sequence[int]] = (),
) -> CaseRun:
    """Puts the requests into an engine, all at once or a few before each step, and drives it until
    they are done. Every so many steps a running request, drawn by chance, is preempted, or all of
    them, and a request that takes all blocks goes first (`displace`); `predictions` are draft tokens at
    the answers, one for each.
    """
    core = engine.core
    source = random.Random(0)
    run = CaseRun([[] for _ in cases])
    live: dict[str, tuple[Request, Answer]] = {}
    prompts: dict[str, dict[int, TokenLogprob]] = {}
    waiting = list(range(len(cases)) if order is None else order)[::-1]
    held = []  # compiled grammars, which must be there when their requests are admitted
    steps = 0
    clock = core.clock or time.monotonic
    while waiting or core.has_work:
        steps += 1
        for _ in range(min(len(waiting), arrivals_per_step or len(waiting))):
            number = waiting.pop()
            case = cases[number]
            if case.params.structured is not None:
                held.append(engine.grammars.compile(case.params.structured))
            resolved = resolve_tokens(case.params, engine.tokenizer)
            if predictions:
                resolved = replace(resolved, prediction_ids=tuple(predictions[number]))
            for request in make_requests(
                str(number),
                case.prompt,
                case.params,
                case.params.seed or 0,
                engine.eos_token_ids,
                resolved,
            ):
                answer = Answer({"tokens": []})
                run.answers[number].append(answer)
                live[request.request_id] = request, answer
                core.add_request(request, clock())
        running = [request for request, _ in live.values() if request.row is not None]
        if preempt_every and steps % preempt_every == 0 and running:
            for request in running if displace else [source.choice(running)]:
                core.scheduler.preempt(request.request_id)
            if displace:
                core.add_request(_filler(engine, f"filler-{steps}", source), clock())
        for update in core.step(clock()):
            if update.request_id not in live:
                continue
            _, answer = live[update.request_id]
            answer.values["tokens"].extend(update.new_token_ids)
            answer.add_logprobs("", update.logprobs)
            if update.finish_reason is not None:
                answer.end = (
                    update.finish_reason if update.error is None else f"error: {update.error}"
                )
            if update.prompt_logprobs is not None:
                known = prompts.setdefault(update.request_id.split("/")[0], {})
                known.update(
                    enumerate(update.prompt_logprobs.logprobs, start=update.prompt_logprobs.start)
                )
    check_invariants(core.scheduler)
    for name, scores in prompts.items():
        run.answers[int(name)][0].add_logprobs(
            "prompt ", [scores[place] for place in sorted(scores)]
        )
    for request, _ in live.values():
        run.preemptions += request.preemptions
        run.cached_tokens += request.cached_tokens
        run.host_tokens += request.host_tokens
        run.drafted_tokens += request.drafted_tokens
        run.accepted_tokens += request.accepted_tokens
    return run


def _filler(engine: Engine, name: str, source: random.Random) -> Request:
    """A request that nobody has seen before and that takes as many blocks as there may be for one."""
    prompt = [
        source.randrange(engine.decoder.spec.vocab_size)
        for _ in range(engine.plan.max_model_len - 1)
    ]
    (request,) = make_requests(name, prompt, SamplingParams(max_tokens=1, priority=-1), 0)
    return request


def run_alone(engine: Engine, cases: Sequence[Case]) -> list[list[Answer]]:
    """Each request when nobody else is there; that one which fails even so is an error."""
    answers = []
    for number, case in enumerate(cases):
        (own,) = run_cases(engine, [case]).answers
        for answer in own:
            if answer.end is not None and answer.end.startswith("error"):
                raise EngineError(
                    f"request {number} ({case.kind}) failed when it was alone: {answer.end}"
                )
        answers.append(own)
    return answers
