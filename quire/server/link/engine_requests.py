"""The requests of the engine process, from their arrival to their end: grammars are compiled beside
the loop, and those that wait too long in the queue are ended.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections import OrderedDict, deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import NamedTuple

from quire.assemble import Engine
from quire.constrain import Grammar
from quire.engine import Request, make_requests
from quire.errors import (
    EngineError,
    InvalidRequestError,
    ModelFormatError,
    NoRoomNowError,
    QuireError,
    UnsupportedModelError,
)
from quire.frontend.adapters import LoadedAdapter, ReadAdapter
from quire.observe.step_lines import decode_params
from quire.sampling_params import SamplingParams
from quire.server.link.adapter_reader import AdapterReader
from quire.server.link.messages import AdapterFolder, AddRequest, Refused, Resume
from quire.step import FinishReason, RequestUpdate

logger = logging.getLogger(__name__)

_MOST_GRAMMAR_TIMES = 2048
"""Kept, for whoever asks where a request's time went."""


class _Prepared(NamedTuple):
    """What a request had to wait for before it could be added."""

    grammar: Grammar | None = None
    adapter: ReadAdapter | None = None
    """None also where it is in memory."""


class _Waiting(NamedTuple):
    """A request whose grammar is compiled, or whose adapter is read."""

    message: AddRequest
    params: SamplingParams
    since: float
    prepared: Future[_Prepared]


class EngineRequests:
    """Between commands and the engine's core. One thread uses it; another compiles grammars."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._core = engine.core
        self._compiler = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._reader = AdapterReader(engine.adapters)
        self._compiling: dict[str, AddRequest] = {}
        """Requests whose grammar is compiled, or whose adapter is read."""
        self._compiled: deque[_Waiting] = deque()
        self.wake_fd, self._wake = os.pipe()
        """Readable when a grammar is compiled."""
        os.set_blocking(self.wake_fd, False)
        self._grammar_seconds: OrderedDict[str, float] = OrderedDict()
        """How long the last requests with a grammar waited for it."""
        self._grammars: dict[str, Grammar] = {}
        """Held while their answers run, so that they stay compiled."""
        self._queued: dict[str, tuple[float, Request]] = {}
        """When answers that wait have to have begun, in the order of their arrival."""
        self._num_loading = 0
        self._updates: list[RequestUpdate] = []
        self._accepted: list[str] = []
        self._refused: list[Refused] = []

    def add(self, message: AddRequest, now: float) -> None:
        """Adds a request, or says why not; with a grammar or an adapter, when that is ready."""
        try:
            params = decode_params(message.params)
        except (QuireError, TypeError) as error:
            self._refuse(message, error)
            return
        structured = params.structured
        adapter = message.adapter
        if structured is None and (adapter is None or self._reader.has(adapter)):
            self._add(message, params, _Prepared(), now)
            return
        self._compiling[message.request_id] = message

        def prepare() -> _Prepared:
            if message.request_id not in self._compiling:
                return _Prepared()
            grammar = None if structured is None else self._engine.grammars.compile(structured)
            return _Prepared(grammar, None if adapter is None else self._reader.read(adapter))

        def done(future: Future[_Prepared]) -> None:
            self._compiled.append(_Waiting(message, params, now, future))
            os.write(self._wake, b".")

        # Adapters are read in a thread of their own: grammars don't wait for them.
        executor = self._compiler if adapter is None else self._reader.executor
        executor.submit(prepare).add_done_callback(done)

    def abort(self, request_ids: Iterable[str], now: float) -> None:
        wanted = tuple(request_ids)
        for request_id in wanted:
            self._compiling.pop(request_id, None)
        self._core.abort(wanted, now)

    def end(self, request_id: str, reason: FinishReason, now: float) -> None:
        """Ends an answer; its metrics are the last to be told of it."""
        if request_id not in self._core.scheduler.table.requests:
            return  # it came to an end of its own meanwhile
        self._end(request_id, reason, now)

    def poll(self, now: float) -> None:
        """Adds what has been compiled and ends what has waited too long."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.wake_fd, 4096)
        while self._compiled:
            message, params, since, future = self._compiled.popleft()
            if params.structured is not None:
                self._note_grammar(message.request_id, now - since)
            if self._compiling.pop(message.request_id, None) is None:
                continue  # aborted meanwhile
            try:
                prepared = future.result()
            except Exception as error:
                self._refuse(message, error)
                continue
            self._add(message, params, prepared, now)
        while self._queued:
            request_id, (deadline, request) = next(iter(self._queued.items()))
            if request.first_scheduled is None and request.finish_reason is None:
                if deadline > now:
                    return
                self._end(request_id, "deadline", now, "waited too long in the queue")
            self._queued.pop(request_id, None)

    def grammar_seconds(self, request_id: str) -> float | None:
        """How long a request waited until its grammar was compiled; None if it had none, or too
        long ago.
        """
        return self._grammar_seconds.get(request_id)

    def _note_grammar(self, request_id: str, seconds: float) -> None:
        self._grammar_seconds[request_id] = seconds
        if len(self._grammar_seconds) > _MOST_GRAMMAR_TIMES:
            self._grammar_seconds.popitem(last=False)

    @property
    def is_compiling(self) -> bool:
        return bool(self._compiling or self._num_loading)

    def forget(self, updates: Iterable[RequestUpdate]) -> None:
        """Lets go of what ended answers held."""
        for update in updates:
            if update.finish_reason is not None:
                self._grammars.pop(update.request_id, None)
                self._queued.pop(update.request_id, None)

    def take(self) -> tuple[list[RequestUpdate], list[str], list[Refused]]:
        """Answers that were ended here, and requests that were accepted or refused, since the last
        time.
        """
        taken = self._updates, self._accepted, self._refused
        self._updates = []
        self._accepted = []
        self._refused = []
        return taken

    def close(self) -> None:
        self._compiling.clear()
        self._compiler.shutdown(wait=False, cancel_futures=True)
        self._reader.close()
        self._engine.grammars.close()
        os.close(self.wake_fd)

    def _add(
        self, message: AddRequest, params: SamplingParams, prepared: _Prepared, now: float
    ) -> None:
        eos = self._engine.eos_token_ids
        resolved = message.resolved
        grammar = prepared.grammar
        if message.adapter is not None:
            try:
                digest = self._reader.digest_of(message.adapter, prepared.adapter)
            except QuireError as error:
                self._refuse(message, error)
                return
            resolved = replace(resolved, adapter=digest, adapter_name=message.adapter.name)
        requests = make_requests(
            message.request_id,
            message.prompt_token_ids,
            params,
            message.seed,
            eos,
            resolved,
            message.pooling,
        )
        if message.resume is not None:
            requests = _resumed(requests, message.resume, now)
        try:
            self._core.add_requests(requests, now)
        except QuireError as error:
            self._refuse(message, error)
            return
        self._accepted.append(message.request_id)
        for request in requests:
            if grammar is not None:
                self._grammars[request.request_id] = grammar
            if message.queue_timeout is not None:
                self._queued[request.request_id] = (now + message.queue_timeout, request)

    def load_adapter(self, adapter: AdapterFolder) -> Future[ReadAdapter | None]:
        """Begins to read an adapter that nobody waits for yet; `name_adapter` takes it in."""
        self._num_loading += 1

        def done(future: Future[ReadAdapter | None]) -> None:
            self._num_loading -= 1
            os.write(self._wake, b".")

        future = self._reader.executor.submit(self._reader.read, adapter)
        future.add_done_callback(done)
        return future

    def name_adapter(self, adapter: AdapterFolder, read: ReadAdapter | None) -> LoadedAdapter:
        return self._reader.add(adapter, read)

    def _refuse(self, message: AddRequest, error: Exception) -> None:
        if message.adapter is not None and isinstance(
            error, ModelFormatError | UnsupportedModelError
        ):
            # It says where files lie, which is nothing to clients.
            logger.error("adapter %s: %s", message.adapter.name, error)
            said = f"the adapter {message.adapter.name} can't be loaded; the server's log says why"
            self._refused.append(Refused(message.request_id, f"model: {said}", "model", "invalid"))
            return
        if isinstance(error, EngineError | NoRoomNowError):  # it sleeps, say
            self._refused.append(Refused(message.request_id, str(error), None, "unavailable"))
            return
        if isinstance(error, QuireError):
            field = error.field if isinstance(error, InvalidRequestError) else None
            self._refused.append(Refused(message.request_id, str(error), field, "invalid"))
            return
        logger.error("request %s could not be added", message.request_id, exc_info=error)
        self._refused.append(
            Refused(message.request_id, "the engine could not take it", None, "internal")
        )

    def _end(
        self, request_id: str, reason: FinishReason, now: float, error: str | None = None
    ) -> None:
        update = RequestUpdate(
            request_id, (), reason, error=error, metrics=self._core.end(request_id, reason, now)
        )
        self._updates.append(update)
        self.forget([update])


def _resumed(requests: list[Request], resume: Resume, now: float) -> list[Request]:
    """The answers that are not complete, with their tokens so far: to the engine they are like
    preempted ones.
    """
    going_on = [request for request in requests if request.request_id in resume.outputs]
    for request in going_on:
        request.token_ids.extend(resume.outputs[request.request_id])
        request.queued_since = now - resume.age
    return going_on
