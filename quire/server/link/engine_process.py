"""The engine's own process: `python -m quire.server.link.engine_process`, started by `engine_client`.

It is told its configuration, loads the model, and then turns one loop: take in commands, compute a
step, tell what came of it. It ends with its parent: nothing is left behind when the HTTP process
dies, however it dies.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import hashlib
import logging
import math
import select
import signal
import sys
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import msgspec

import quire
from quire.assemble import Engine, build_engine
from quire.backends.select import pick_device
from quire.checkpoints.sources import resolve
from quire.config import EngineConfig
from quire.errors import EngineError, QuireError
from quire.frontend.adapters import ReadAdapter
from quire.frontend.progress import ModelBars
from quire.observe.cache_events import CacheEvents, window_of
from quire.observe.step_log import StepSummary, describe_steps, summarize
from quire.process import life
from quire.process.child import end_group, end_with_parent, ignore_terminal_signals
from quire.process.gc_pauses import IdleCollector, full_collections_put_off
from quire.server.link import messages
from quire.server.link.channel import BlockingChannel
from quire.server.link.engine_control import EngineController
from quire.server.link.engine_memory import EngineMemory
from quire.server.link.engine_requests import EngineRequests
from quire.server.link.engine_watch import EngineWatch
from quire.server.logs import set_up_logging
from quire.step import RequestUpdate, StepLogEntry
from quire.tools.explain.explain import explain_request
from quire.tools.explain.outside import add_grammar

logger = logging.getLogger(__name__)

_MAX_BATCHED_TOKENS = 8192
"""On a GPU, unless it is set: half of what the engine computes in a step elsewhere."""
_LAST_WORDS = 1.0
"""Seconds in which the parent may take what it was told last."""
_FAILURES_IN_A_ROW = 3
"""Steps. A device that lost its mind fails every one, and only a new process helps."""
_LAST_STEPS = 20
_STEP_FAILED = "the engine failed while computing this request; the server's log says why"
_HEARTBEAT = 1000
"""Milliseconds between signs of life while there is work but no step: a grammar is being compiled."""
_SILENCE = 1000
"""Milliseconds without work or commands, after which nobody is expected for as long as garbage is
collected.
"""
_MAX_COMMANDS = 256
"""Taken in between two steps, so that a flood of them can't keep a step waiting."""


class EngineLoop:
    """Commands in, steps, updates out. `observe` must be among the step log's listeners."""

    def __init__(self, channel: BlockingChannel) -> None:
        self._channel = channel
        self._poller = select.poll()
        self._poller.register(channel, select.POLLIN)
        self._out = messages.Updates()
        self._last_steps: deque[StepSummary] = deque(maxlen=_LAST_STEPS)
        self._asked: list[messages.Describe] = []
        self._loading: list[tuple[messages.LoadAdapter, Future[ReadAdapter | None]]] = []
        self._failed_ids: set[str] = set()
        self._failures = 0
        self._memory: EngineMemory | None = None
        self._controller: EngineController | None = None
        self._weights_version = 0
        """As it was told last."""
        self._watch: EngineWatch | None = None
        """While somebody watches."""
        self._idle_collector = IdleCollector(time.monotonic())
        self._cache_events: CacheEvents | None = None

    def observe(self, entry: StepLogEntry) -> None:
        """Hears of every step that is over."""
        step = entry.step
        for admission in step.admitted:
            self._out.started.append(admission.request_id)
            self._out.cached[admission.request_id] = (
                admission.num_cached_tokens + admission.num_host_tokens
            )
        if entry.error is not None:
            self._failures += 1
            self._failed_ids.update(one.request_id for one in step.scheduled)
        elif step.scheduled:
            self._failures = 0
        summary = summarize(entry)
        self._out.steps.append(summary)
        self._last_steps.append(summary)
        if self._watch is not None:
            self._watch.observe(entry)

    def run(self, engine: Engine, block_events: bool = False) -> None:
        """Until the parent is gone."""
        if block_events:
            self._cache_events = CacheEvents(engine.core.scheduler.blocks)
        requests = EngineRequests(engine)
        controller = self._controller = EngineController(engine)
        self._memory = EngineMemory(engine.decoder.device)
        self._poller.register(requests.wake_fd, select.POLLIN)
        self._poller.register(controller.wake_fd, select.POLLIN)
        if engine.runner.broken_fd is not None:
            self._poller.register(engine.runner.broken_fd, select.POLLIN)
        core = engine.core
        try:
            while True:
                if not core.has_work:
                    self._wait(requests.is_compiling or controller.has_idle_requests)
                for _ in range(_MAX_COMMANDS):
                    try:
                        data = self._channel.receive(0.0)
                    except EOFError:
                        return
                    if data is None:
                        break
                    self._handle(messages.decode_command(data), requests, engine)
                now = time.monotonic()
                requests.poll(now)
                updates = core.step(now)
                if engine.runner.broken is not None:
                    # The engine is lost, and that is all there is to say: its requests may go on
                    # elsewhere.
                    raise EngineError(engine.runner.broken)
                requests.forget(updates)
                answers = controller.poll()
                self._send_updates(requests, updates, engine)
                for answer in answers:  # after what it says has been told
                    self._channel.send(answer)
                self._describe(requests, engine)
                if self._loading:
                    self._take_adapters(requests)
                if self._watch is not None:
                    for frame in self._watch.take_frames(
                        time.monotonic(), is_idle=not core.has_work
                    ):
                        self._channel.send(frame)
                if self._failures >= _FAILURES_IN_A_ROW:
                    raise EngineError(f"{self._failures} steps failed one after the other")
        finally:
            controller.close()
            requests.close()

    def _wait(self, is_compiling: bool) -> None:
        """Until there may be something to do. A silence is time to look for garbage."""
        if self._channel.has_received:
            return
        self._channel.flush()
        frame_due = None if self._watch is None else self._watch.wait_seconds(time.monotonic())
        if frame_due is not None:
            self._poller.poll(math.ceil(1000 * frame_due))
        elif is_compiling or (self._controller is not None and self._controller.has_update):
            self._poller.poll(_HEARTBEAT)
        elif not self._idle_collector.is_due(time.monotonic()):
            self._poller.poll()
        elif not self._poller.poll(_SILENCE):
            self._idle_collector.collect(time.monotonic())

    def log_last_steps(self) -> None:
        logger.error("last steps: %s", describe_steps(self._last_steps))

    def _handle(self, command: messages.Command, requests: EngineRequests, engine: Engine) -> None:
        now = time.monotonic()
        match command:
            case messages.AddRequest():
                requests.add(command, now)
            case messages.Abort():
                requests.abort(command.request_ids, now)
            case messages.End():
                requests.end(command.request_id, command.reason, now)
            case messages.Describe():
                self._asked.append(command)
            case messages.LoadAdapter():
                self._loading.append((command, requests.load_adapter(command.adapter)))
            case messages.UnloadAdapter():
                with contextlib.suppress(QuireError):  # it was never asked for here
                    engine.adapters.remove(command.name)
            case messages.Control():
                assert self._controller is not None
                self._controller.take(command)
            case messages.Watch():
                config = engine.core.scheduler.config
                self._watch = EngineWatch(engine.step_log, config) if command.is_on else None
                if self._watch is not None and self._memory is not None:
                    self._memory.look(now)
                    self._watch.note_memory(self._memory.last)

    def _take_adapters(self, requests: EngineRequests) -> None:
        """Tells those who asked for adapters to be read what came of it."""
        waiting = self._loading
        self._loading = []
        for command, future in waiting:
            if not future.done():
                self._loading.append((command, future))
                continue
            try:
                loaded = requests.name_adapter(command.adapter, future.result())
                record: dict[str, Any] = {"rank": loaded.rank, "bytes": loaded.nbytes}
            except QuireError as error:
                record = {"error": str(error).replace(f"{command.adapter.path}/", "")}
            except Exception:
                logger.exception("adapter %s could not be read", command.adapter.name)
                record = {"error": "it could not be read; the server's log says why"}
            self._channel.send(messages.Described(command.ticket, record))

    def _describe(self, requests: EngineRequests, engine: Engine) -> None:
        """Answers what was asked about requests: after a step, as that tells of the ends of those
        before it.
        """
        for command in self._asked:
            request_id = command.request_id
            scheduling = engine.core.scheduler.config
            entries, before = engine.step_log.about(request_id)
            record = explain_request(entries, request_id, scheduling, before)
            seconds = requests.grammar_seconds(request_id)
            if record is not None and seconds is not None:
                add_grammar(record, seconds)
            self._channel.send(messages.Described(command.ticket, record))
        self._asked.clear()

    def _send_updates(
        self, requests: EngineRequests, updates: list[RequestUpdate], engine: Engine
    ) -> None:
        out = self._out
        out.updates, out.accepted, out.refused = requests.take()
        if self._failed_ids:  # why a step failed is for the log: it may hold anything
            hidden = self._failed_ids
            updates = [
                one._replace(error=_STEP_FAILED) if one.error and one[0] in hidden else one
                for one in updates
            ]
        out.add_updates(updates)
        if engine.weights_version != self._weights_version:
            out.weights_version = self._weights_version = engine.weights_version
        is_waiting = requests.is_compiling or (
            self._controller is not None and self._controller.has_idle_requests
        )
        if not (out.has_updates or out.accepted or out.refused or out.steps or is_waiting):
            return
        out.num_free_blocks = engine.core.scheduler.blocks.pool.num_free
        if self._memory is not None:
            out.memory = self._memory.look(time.monotonic())
            if self._watch is not None:
                self._watch.note_memory(out.memory)
        if self._cache_events is not None:
            out.blocks_stored, out.blocks_removed = self._cache_events.take()
        self._channel.send(out)
        self._out = messages.Updates()
        self._failed_ids.clear()


def engine_config(options: dict[str, Any]) -> EngineConfig:
    """The engine's options with this server's own defaults: while a prompt is computed, every
    running answer waits for its next token, so a step computes fewer tokens here than where only
    throughput counts.
    """
    config = EngineConfig(**options)
    if config.max_batched_tokens is None and pick_device(config.device).is_gpu:
        return replace(config, max_batched_tokens=_MAX_BATCHED_TOKENS)
    return config


def main(build: Callable[..., Engine] = build_engine) -> int:
    """Runs the process; `build` makes the engine (tests make it break)."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # where it hangs, if it hangs
    ignore_terminal_signals()
    end_with_parent()
    channel = BlockingChannel.to_parent()
    config = msgspec.msgpack.decode(channel.receive() or b"", type=messages.EngineProcessConfig)
    set_up_logging(config.log_format, config.log_level, config.log_name)
    loop = EngineLoop(channel)
    channel.send(messages.Loading())
    life.listeners.append(life.Heartbeat(lambda: channel.send(messages.Loading())))
    try:
        with ModelBars(config.model) as bars:
            source = resolve(config.model, progress=bars("download"))
            engine = build(source, engine_config(config.options), bars("load"), [loop.observe])
        # The weights and modules are here to stay: no need to look through them again and again.
        gc.collect()
        gc.freeze()
        channel.send(_ready(source.name, engine))
        with full_collections_put_off():
            loop.run(engine, config.block_events)
        end_group()
    except QuireError as error:
        loop.log_last_steps()
        channel.send(messages.Fatal(str(error), is_users_fault=not isinstance(error, EngineError)))
    except Exception as error:
        logger.exception("the engine failed")
        loop.log_last_steps()
        channel.send(messages.Fatal(f"{type(error).__name__}: {error}"))
    channel.flush(_LAST_WORDS)
    return 1


def _ready(name: str, engine: Engine) -> messages.Ready:
    spec = engine.spec
    plan = engine.plan
    decoder = engine.decoder
    scheduler = engine.core.scheduler.config
    identity = f"{quire.__version__} {name} {spec} {decoder.dtype} {decoder.kernels.name} {decoder.device.type}"
    return messages.Ready(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        max_model_len=plan.max_model_len,
        max_num_seqs=scheduler.max_num_seqs,
        num_blocks=scheduler.num_usable_blocks,
        block_size=scheduler.block_size,
        policy=scheduler.policy,
        fingerprint="fp_" + hashlib.sha256(identity.encode()).hexdigest()[:12],
        memory=EngineMemory(decoder.device).look(time.monotonic()),
        bytes_per_block=scheduler.bytes_per_block,
        window=window_of(scheduler),
    )


if __name__ == "__main__":
    sys.exit(main())
