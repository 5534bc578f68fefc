"""The requests of a step log again, on the real engine and at the same times: are the tokens the
same?
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.assemble import Engine, build_engine
from quire.backends.select import pick_device
from quire.checkpoints.sources import resolve
from quire.config import EngineConfig
from quire.errors import InvalidRequestError
from quire.frontend.adapter_names import LoRARequest
from quire.frontend.progress import ModelBars
from quire.models.load import open_model
from quire.observe.engine_metrics import EngineMetrics
from quire.observe.step_log import LoggedEngine
from quire.runner.dtypes import pick_cache_dtype
from quire.runner.kv_cache import token_bytes
from quire.runner.worker import choose_weights
from quire.step import StepLogEntry
from quire.tools.what_if.recorded import RecordedRequest

Listener = Callable[[StepLogEntry], None]


@dataclass(slots=True)
class Replayed:
    """What came of it."""

    metrics: EngineMetrics
    requests: int = 0
    tokens: int = 0
    """Compared."""
    different: list[tuple[str, int]] = field(default_factory=list)
    """Names of requests whose answers differ, and the first place."""
    skipped: int = 0
    """Requests without an answer to compare: pooled, failed, or without tokens."""


def open_engine(
    model: str,
    logged: LoggedEngine | None,
    listener: Listener,
    offline: bool = False,
    **options: Any,
) -> Engine:
    """An engine with the settings of the one that wrote the log, where it says them; `listener`
    hears of its steps. `offline`: with a model that is here.
    """
    with ModelBars(model) as bars:
        source = resolve(model, offline=offline, progress=bars("download"))
        if logged is not None:
            config = logged.config
            device = pick_device(options.get("device", "auto"))
            files = open_model(source.path)
            try:
                dtype = choose_weights(files, EngineConfig(**options), device).dtype
                asked = options.get("kv_cache_dtype", "auto")
                key_dtype = pick_cache_dtype(asked, dtype, device, files.spec.cache)
                block = token_bytes(files.spec, config.block_size, key_dtype)
            finally:
                files.checkpoint.close()
            options |= {
                "max_num_seqs": config.max_num_seqs,
                "max_batched_tokens": config.max_batched_tokens,
                "max_model_len": min(config.max_model_len, files.spec.max_position),
                "block_size": config.block_size,
                "policy": config.policy,
                "prefix_caching": config.prefix_caching,
                "kv_cache_memory": config.num_blocks * block // config.num_groups,
                "host_cache_memory": config.num_host_blocks * block // config.num_groups,
            }
        return build_engine(source, EngineConfig(**options), bars("load"), [listener])


def load_adapters(
    engine: Engine, requests: Sequence[RecordedRequest], given: Sequence[LoRARequest]
) -> None:
    """Loads these; all that the requests had must be among them, with the content they had then."""
    for one in given:
        engine.adapters.add(one.lora_name, one.lora_path)
    loaded = {one.digest for one in engine.adapters.loaded}
    had = {one.admission.resolved.adapter: one.admission.resolved.adapter_name for one in requests}
    missing = [
        f"{name} (content {digest[:12]})"
        for digest, name in had.items()
        if digest and digest not in loaded
    ]
    if missing:
        raise InvalidRequestError(
            "--lora",
            f"the log's requests had the adapters {', '.join(missing)}: give NAME=PATH for each, with the content of "
            "then",
        )


def replay(
    engine: Engine,
    requests: Sequence[RecordedRequest],
    metrics: EngineMetrics,
    wait: bool = True,
    report: Callable[[int, int], None] = lambda requests, tokens: None,
) -> Replayed:
    """Sends the requests again, each when it came then (or all at once), and compares their tokens.
    `report` hears how many have been answered, or left out, and how many tokens there were.
    """
    core = engine.core
    done = Replayed(metrics)
    started = time.monotonic()
    first = requests[0].admission.arrival if requests else 0.0
    waiting = list(enumerate(requests))[::-1]
    tokens: dict[str, list[int]] = {}
    owners: dict[str, RecordedRequest] = {}
    held = []  # compiled grammars
    num_answered = num_tokens = 0
    while waiting or core.has_work:
        now = time.monotonic()
        while waiting and (not wait or waiting[-1][1].admission.arrival - first <= now - started):
            number, one = waiting.pop()
            params = one.admission.params
            if one.admission.pooling is not None or not one.tokens or one.finish_reason == "error":
                done.skipped += 1
                continue
            if max(one.prompt) >= engine.decoder.spec.vocab_size:
                raise InvalidRequestError(
                    "--model", f"has too few tokens for {one.name}: is it the same model?"
                )
            if params.structured is not None:
                held.append(engine.grammars.compile(params.structured))
            request = one.request(params, f"{number}:{one.name}", None)
            owners[request.request_id], tokens[request.request_id] = one, []
            core.add_request(request, now)
        if not core.has_work:
            if waiting:
                time.sleep(
                    min(0.05, max(0.0, waiting[-1][1].admission.arrival - first - (now - started)))
                )
            continue
        for update in core.step(now):
            tokens[update.request_id].extend(update.new_token_ids)
            num_tokens += len(update.new_token_ids)
            one = owners[update.request_id]
            # A stop string, a deadline or a client ended it then: the engine alone would go on.
            is_cut = update.finish_reason is None and len(tokens[update.request_id]) >= len(
                one.tokens
            )
            if is_cut:
                core.end(update.request_id, "stop", time.monotonic())
            num_answered += is_cut or update.finish_reason is not None
        report(num_answered + done.skipped, num_tokens)
    for name, one in owners.items():
        _compare(one, tokens[name], done)
    return done


def _compare(one: RecordedRequest, got: Sequence[int], done: Replayed) -> None:
    done.requests += 1
    done.tokens += len(one.tokens)
    for place, token in enumerate(one.tokens):
        if place >= len(got) or got[place] != token:
            done.different.append((one.name, place))
            return
