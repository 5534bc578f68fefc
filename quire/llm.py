"""The offline API: a model and its engine behind a few plain calls."""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Unpack

from quire.assemble import Engine, build_engine
from quire.checkpoints.sources import resolve
from quire.config import EngineConfig, EngineOptions
from quire.engine import make_requests
from quire.engine_control import EngineControl
from quire.errors import EngineError, InvalidRequestError, QuireError
from quire.frontend import inputs
from quire.frontend.adapter_names import LoraChoice, as_lora_requests
from quire.frontend.beam_search import BeamSearchOutput, BeamSearchParams, LiveBeams, check_choices
from quire.frontend.chat_template import ChatTemplates
from quire.frontend.engine_info import EngineInfo
from quire.frontend.inputs import Prompt, TokenizedPrompt
from quire.frontend.live_request import LiveRequest
from quire.frontend.progress import GenerationBar, ModelBars
from quire.frontend.resolve import resolve_tokens
from quire.frontend.settings_file import UNSET, with_settings
from quire.observe.engine_metrics import EngineCounters
from quire.observe.offline import OfflineObserver
from quire.observe.tracing import Tracing
from quire.outputs import RequestDelta, RequestOutput
from quire.process.gc_pauses import full_collections_put_off
from quire.sampling_params import ResolvedTokens, SamplingParams
from quire.step import RequestMetrics, RequestUpdate

Message = Mapping[str, Any]


class LLM(EngineControl):
    """A model in memory, with its engine.

    `model` is an alias (`smollm2`), a folder in Hugging Face layout, a `.gguf` file, a Hugging Face
    id or a folder of `.npy` files. Engine options are keywords; see `quire.config.EngineConfig`.
    `config` is a TOML file with both, which `quire serve --print-config` writes; keywords go before
    it. `traces` is a collector's address for spans of requests, such as
    http://localhost:4318/v1/traces.

    One call at a time: calls from several threads wait for each other. A process that was forked
    can't use the LLM of its parent, whose threads and devices it has not got; one that was spawned
    makes its own.
    """

    def __init__(
        self,
        model: str | Path = UNSET,
        *,
        config: str | Path | None = None,
        traces: str | Tracing | None = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        model, chosen = with_settings(config, model, options)
        engine_config = EngineConfig.of(chosen)
        self._process = os.getpid()
        self._turn = threading.RLock()
        """Held while the engine is stepped, or its requests are changed."""
        self._observer = OfflineObserver(model, traces)
        with ModelBars(model) as bars:
            source, listeners = resolve(model, progress=bars("download")), (self._observer.observe,)
            self._engine: Engine | None = build_engine(
                source, engine_config, bars("load"), listeners
            )
        self._live: dict[str, LiveRequest] = {}
        self._owners: dict[str, tuple[LiveRequest, int]] = {}
        self._searches: list[LiveBeams] = []
        self._unread: list[RequestDelta] = []
        self._templates = ChatTemplates()
        self._counter = 0

    # What it is

    @property
    def engine(self) -> Engine:
        """The parts behind this object; for tools and tests."""
        if self._engine is None:
            raise QuireError("this LLM was closed; make a new one")
        if os.getpid() != self._process:
            raise EngineError(
                "this LLM was made in another process, whose threads a fork has not got: make an LLM in this process, "
                'or start it with multiprocessing.get_context("spawn")'
            )
        return self._engine

    @property
    def description(self) -> str:
        """What was loaded, where, and what fits."""
        return self.engine.description

    @property
    def info(self) -> EngineInfo:
        """What `description` says and more, as fields."""
        return self.engine.info

    @property
    def metrics(self) -> EngineCounters:
        """What the engine has done so far: steps, tokens, cache hits, preemptions, ends. A copy."""
        return self._observer.counters

    @property
    def default_params(self) -> SamplingParams:
        """What `params=None` stands for: the model's generation_config.json, else Quire's defaults
        (temperature 0.7, top_p 0.95). Change single fields with `dataclasses.replace`.
        """
        return SamplingParams(**self.sampling_defaults)  # type: ignore[arg-type]

    @property
    def sampling_defaults(self) -> Mapping[str, float]:
        """How requests are sampled that don't say: the same for `LLM`, commands, server and page."""
        return self.engine.tokenizer.sampling_defaults

    @property
    def has_chat_template(self) -> bool:
        return bool(self.engine.tokenizer.chat_templates)

    # Whole answers

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora_request: LoraChoice | Sequence[LoraChoice] = None,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Answers to one or many prompts (text or token ids), in their order, computed as one
        batch.

        `params` is one for all or one per prompt, and so is `lora_request`, the adapter that
        answers (docs/adapters.md): a `LoRARequest`, or the name of one that was loaded. A request
        that fails does not stop the others: its output says finish_reason "error" and why.
        `progress` is a bar on the terminal; None shows one for several prompts. There is none where
        stderr is no terminal.
        """
        return self._run(
            [self._text_prompt(prompt) for prompt in inputs.as_prompts(prompts)],
            params,
            progress,
            lora_request,
        )

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        lora_request: LoraChoice | Sequence[LoraChoice] = None,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Answers to one or many conversations, through the model's chat template; docs/tools.md
        says how they read.
        """
        return self._run(
            [self._chat_prompt(one, tools) for one in inputs.as_conversations(messages)],
            params,
            progress,
            lora_request,
        )

    def beam_search(
        self,
        prompt: Prompt,
        beam_width: int,
        max_tokens: int,
        *,
        length_penalty: float = 1.0,
        ignore_eos: bool = False,
        stop_token_ids: Sequence[int] = (),
        lora_request: LoraChoice = None,
    ) -> BeamSearchOutput:
        """The `beam_width` likeliest continuations found by beam search;
        `quire.frontend.beam_search` says exactly how.

        Beams end at the model's end-of-sequence tokens (unless `ignore_eos`) and at
        `stop_token_ids`. They run beside other requests, share the blocks of their common tokens,
        and compute one token each per step.
        """
        engine = self.engine
        start = self._text_prompt(prompt)
        check_choices(ignore_eos, stop_token_ids, engine.decoder.spec.vocab_size)
        ends = (*(() if ignore_eos else engine.eos_token_ids), *stop_token_ids)
        params = BeamSearchParams(beam_width, max_tokens, length_penalty, frozenset(ends))
        params = params.within(engine.plan.max_model_len - len(start.token_ids))
        with self._drive():
            self._counter += 1
            self._check_computes()
            search = LiveBeams(
                engine.core,
                f"beams-{self._counter}",
                start.token_ids,
                params,
                time.monotonic(),
                self._adapted(ResolvedTokens(), lora_request),
            )
            self._searches.append(search)
            try:
                while not search.is_done:
                    self.step()
            finally:
                self._searches.remove(search)
                search.close(time.monotonic())
        if search.error is not None:
            raise search.error
        beams = [beam.with_text(engine.tokenizer, start.token_ids) for beam in search.beams]
        return BeamSearchOutput(start.text, tuple(start.token_ids), tuple(beams))

    # Answers as they come

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        lora_request: LoraChoice = None,
    ) -> Iterator[str]:
        """Text deltas of one answer. Leaving the loop early aborts the request."""
        return self._stream(self._text_prompt(prompt), params, lora_request)

    def stream_chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        lora_request: LoraChoice = None,
    ) -> Iterator[str]:
        """Text deltas of the answer to a conversation."""
        return self._stream(self._chat_prompt(messages, None), params, lora_request)

    # The engine by hand

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: LoraChoice = None,
    ) -> str:
        """Queues a request and returns its id; `step` computes."""
        return self._add(self._text_prompt(prompt), params, request_id, lora_request)

    def add_chat_request(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        lora_request: LoraChoice = None,
    ) -> str:
        """Queues a conversation to be answered and returns the request's id."""
        return self._add(self._chat_prompt(messages, tools), params, request_id, lora_request)

    def step(self) -> list[RequestDelta]:
        """One step of the engine: what each request gained. Empty when there is nothing to do."""
        with self._drive() as engine:
            unread, self._unread = self._unread, []
            return unread + self._deltas(engine.core.step(time.monotonic()))

    def abort(self, request_id: str) -> None:
        """Ends a request; its last delta, with finish_reason "abort", comes with the next step."""
        with self._drive() as engine:
            engine.core.abort([inputs.check_id(request_id)], time.monotonic())

    @property
    def has_work(self) -> bool:
        return bool(self._unread) or self.engine.core.has_work

    def encode(self, text: str) -> list[int]:
        """The token ids that a text becomes as a prompt."""
        return self._text_prompt(inputs.check_text(text)).token_ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids."""
        inputs.check_token_ids(token_ids, self.engine.tokenizer.vocab_size)
        return self.engine.tokenizer.decode(token_ids, skip_special_tokens)

    def encode_chat(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[int]:
        """The prompt a conversation becomes."""
        return self._templates.encode_chat(self.engine.tokenizer, messages, tools)

    # Its adapters

    def load_adapter(self, name: str, path: str | Path) -> None:
        """Reads an adapter, a folder that PEFT wrote, for requests that name it; under a name that
        is in use, it takes the place of the other for requests to come.
        """
        with self._drive() as engine:
            engine.adapters.add(name, path)

    def unload_adapter(self, name: str) -> None:
        """Forgets an adapter; requests that have it are answered to their end."""
        with self._drive() as engine:
            engine.adapters.remove(name)

    @property
    def adapters(self) -> list[str]:
        """The names of those that requests may have."""
        return list(self.engine.adapters.names)

    def close(self) -> None:
        """Gives the memory of weights and cache back. Requests still running are gone."""
        if os.getpid() != self._process:  # its lock, files and device are the parent's
            self._engine = None
            return
        with self._turn:
            engine, self._engine = self._engine, None
            if engine is not None:
                engine.step_log.close()
                self._observer.close()
                engine.grammars.close()
                engine.runner.release()
            self._live.clear()
            self._owners.clear()

    def __reduce__(self) -> NoReturn:
        raise QuireError("an LLM can't be sent to another process or copied: make one there")

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # Inside

    @contextlib.contextmanager
    def _drive(self) -> Iterator[Engine]:
        """The engine, for one thread at a time. `self.engine` raises if it can't be used, and is
        asked before the lock, which in a forked process might never be released, and after it, as
        another thread may have closed it.
        """
        assert self.engine
        with self._turn:
            yield self.engine

    def _text_prompt(self, prompt: Prompt) -> TokenizedPrompt:
        token_ids = inputs.check_prompt(prompt, self.engine.decoder.spec.vocab_size)
        if token_ids is None:
            return TokenizedPrompt(
                str(prompt), self.engine.tokenizer.encode(str(prompt)), continues=True
            )
        return TokenizedPrompt(None, token_ids, continues=True)

    def _chat_prompt(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None
    ) -> TokenizedPrompt:
        return TokenizedPrompt(None, self.encode_chat(messages, tools=tools), continues=False)

    def _adapted(self, resolved: ResolvedTokens, lora_request: LoraChoice) -> ResolvedTokens:
        if lora_request is None:
            return resolved
        name, digest = self.engine.adapters.resolve(lora_request)
        return replace(resolved, adapter=digest, adapter_name=name)

    def _add(
        self,
        prompt: TokenizedPrompt,
        params: SamplingParams | None,
        request_id: str | None = None,
        lora_request: LoraChoice = None,
    ) -> str:
        params = inputs.check_params(params) or self.default_params
        engine = self.engine
        params.check_token_ids(engine.decoder.spec.vocab_size)
        if params.priority and engine.core.scheduler.config.policy == "fcfs":
            raise InvalidRequestError(
                "priority", 'counts only in an LLM made with policy="priority" or "fair"'
            )
        resolved = resolve_tokens(params, engine.tokenizer)
        # Compiled here, so that a bad grammar fails only this call; kept in `live`, so that it is
        # ready at admission.
        grammar = None if params.structured is None else engine.grammars.compile(params.structured)
        with self._drive():
            if request_id is None:
                self._counter += 1
                request_id = f"request-{self._counter}"
            if inputs.check_id(request_id) in self._live:
                raise InvalidRequestError("request_id", f"{request_id!r} is in use")
            seed = params.seed if params.seed is not None else secrets.randbits(64)
            resolved = self._adapted(resolved, lora_request)
            requests = make_requests(
                request_id, prompt.token_ids, params, seed, engine.eos_token_ids, resolved
            )
            tokens = tuple(prompt.token_ids)
            live = LiveRequest(
                request_id,
                prompt.text,
                tokens,
                requests,
                params,
                engine.tokenizer,
                prompt.continues,
            )
            live.grammar = grammar
            engine.core.add_requests(requests, time.monotonic())
            self._live[request_id] = live
            self._owners |= {
                request.request_id: (live, index) for index, request in enumerate(requests)
            }
            return request_id

    def _deltas(self, updates: list[RequestUpdate]) -> list[RequestDelta]:
        deltas: list[RequestDelta] = []
        ended = {
            update.request_id: update.metrics
            for update in updates
            if update.finish_reason is not None
        }
        for update in updates:
            owner = self._owners.get(update.request_id)
            # a request of a beam search, or one that was aborted because its caller left
            if owner is None:
                for search in self._searches:
                    if update.request_id in search.names:
                        search.take(update, time.monotonic())
                continue
            live, index = owner
            if update.prompt_logprobs is not None:
                live.take_prompt_logprobs(update.prompt_logprobs)
            if not update.new_token_ids and update.finish_reason is None:
                continue
            delta = live.advance(index, update, partial(self._end, update.request_id, ended))
            deltas.append(delta)
            if delta.finish_reason is not None:
                del self._owners[update.request_id]
                self._observer.ended(delta.finish_reason, live.metrics_of(index))
            if delta.output is not None:
                del self._live[live.request_id]
        return deltas

    def _end(self, name: str, ended: Mapping[str, RequestMetrics | None]) -> RequestMetrics:
        """Ends an answer whose text has a stop string, unless the engine has just ended it; returns
        its metrics.
        """
        return ended.get(name) or self.engine.core.end(name, "stop", time.monotonic())

    def _run(
        self,
        prompts: Sequence[TokenizedPrompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        progress: bool | None,
        lora_request: LoraChoice | Sequence[LoraChoice],
    ) -> list[RequestOutput]:
        each = inputs.as_params(params, len(prompts))
        adapters = as_lora_requests(lora_request, len(prompts))
        request_ids: list[str] = []
        outputs: dict[str, RequestOutput] = {}
        # for the whole call: a step by another thread would receive our answers
        with self._drive():
            self._check_computes()
            try:
                for prompt, one, adapter in zip(prompts, each, adapters, strict=True):
                    request_ids.append(self._add(prompt, one, lora_request=adapter))
                own = set(request_ids)
                show = len(prompts) > 1 if progress is None else progress
                shown = GenerationBar(len(prompts)) if show else contextlib.nullcontext()
                with full_collections_put_off(), shown as bar:
                    while len(outputs) < len(own):
                        deltas = [delta for delta in self.step() if delta.request_id in own]
                        outputs |= {
                            delta.request_id: delta.output
                            for delta in deltas
                            if delta.output is not None
                        }
                        if bar is not None:
                            bar.take(deltas)
            finally:
                self._abort_unfinished(request_ids)
        return [outputs[request_id] for request_id in request_ids]

    def _stream(
        self, prompt: TokenizedPrompt, params: SamplingParams | None, lora_request: LoraChoice
    ) -> Iterator[str]:
        params = inputs.check_streamed(params or self.default_params)
        with self._drive():
            request_id = self._add(prompt, params, lora_request=lora_request)
            # Other calls may step the engine before this stream is read: its deltas are kept here.
            unread = self._live[request_id].unread = deque()
        return self._stream_of(request_id, unread)

    def _stream_of(self, request_id: str, unread: deque[RequestDelta]) -> Iterator[str]:
        try:
            while True:
                while unread:
                    delta = unread.popleft()
                    if delta.text:
                        yield delta.text
                    if delta.finish_reason == "error":
                        assert delta.output is not None
                        raise QuireError(delta.output.error or "the request failed")
                    if delta.finish_reason is not None:
                        return
                self._check_computes()
                self.step()
        finally:
            self._abort_unfinished([request_id])

    def _abort_unfinished(self, request_ids: list[str]) -> None:
        if self._engine is None or os.getpid() != self._process:
            return
        with self._turn:
            unfinished = [request_id for request_id in request_ids if request_id in self._live]
            self._engine.core.abort(unfinished, time.monotonic())
            for request_id in unfinished:
                for name in self._live.pop(request_id).names:
                    self._owners.pop(name, None)
