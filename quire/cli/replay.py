"""`quire replay`: recorded requests again, for real or on a virtual clock with other settings."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from quire.cli import options
from quire.cli.terminal import say
from quire.config import format_bytes
from quire.errors import InvalidRequestError
from quire.frontend.adapter_names import LoRARequest, parse_lora
from quire.frontend.progress import BatchBar

if TYPE_CHECKING:
    from quire.observe.step_log import LoggedEngine
    from quire.tools.what_if.recorded import RecordedRequest


_LARGE = 10 * 2**20
"""Bytes of a log that take seconds to read."""


def replay(
    log: Annotated[Path, Argument(metavar="LOG", help="A step log (step_log=FILE).")],
    what_if: Annotated[
        list[str] | None,
        Option(
            metavar="NAME=VALUE,…",
            help="Other settings: max_num_seqs, max_batched_tokens, num_blocks, num_host_blocks, max_model_len, "
            "policy, prefix_caching, depth, rate (of arrivals). Repeat to compare several.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        Option(
            "--model",
            "-m",
            metavar="M",
            help="Run them for real on this model: the same tokens? With --what-if: measure steps on it.",
        ),
    ] = None,
    calibrate: Annotated[
        bool,
        Option(
            help="With --what-if: measure steps of sizes that the log does not have, if its model is here."
        ),
    ] = True,
    no_wait: Annotated[
        bool, Option("--no-wait", help="With --model: all at once, not when they came.")
    ] = False,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    quantization: options.Quantization = "auto",
    kv_cache_dtype: options.KVCacheDtype = "auto",
    lora: Annotated[
        list[str] | None,
        Option(
            metavar="NAME=PATH",
            help="With --model: an adapter that recorded requests had. Repeat for several.",
        ),
    ] = None,
    json_output: Annotated[bool, Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Send the requests of a step log again, at the times they came.

    With --model they run on the real engine, and their tokens are compared with the recorded ones:
    the exit status is 1 if one differs. Without it, or with --what-if, the real scheduler runs on a
    virtual clock, with step times fitted to the log, as recorded and with the settings of each
    --what-if. How well the fit predicts steps it has not seen is said first. Where settings lead to
    steps of other sizes than the log has, some are measured on the log's model, in at most ten
    seconds; where it is not on this machine, the figures are marked as uncertain.

    \b
    quire replay steps.jsonl --model smollm2
    quire replay steps.jsonl --what-if max_num_seqs=16
    quire replay steps.jsonl --what-if max_batched_tokens=2048 --no-calibrate
    quire replay steps.jsonl --what-if rate=2 --what-if rate=2,max_batched_tokens=1024
    """
    from quire.observe.step_log import last_run
    from quire.tools.what_if.recorded import recorded_requests

    # what can't be a path is told when it is read
    size = log.stat().st_size if os.path.isfile(log) else 0
    if size > _LARGE:
        say(f"Reading {log} ({format_bytes(size)})")
    entries, engine = last_run(log)
    requests = recorded_requests(entries)
    if not requests:
        raise InvalidRequestError("LOG", f"{log} has no request from its beginning on")
    chosen = {
        "device": device,
        "dtype": dtype,
        "quantization": quantization,
        "kv_cache_dtype": kv_cache_dtype,
    }
    if model is None or what_if:
        if lora:
            raise InvalidRequestError("--lora", "goes with --model, without --what-if")
        from quire.cli.what_if import play_and_print

        if engine is None:
            raise InvalidRequestError(
                "LOG", f"{log} does not say its engine's settings: it is of an older version"
            )
        play_and_print(
            entries,
            engine,
            requests,
            what_if or [],
            model,
            chosen if calibrate else None,
            json_output,
        )
        return
    adapters = [parse_lora(one) for one in lora or ()]
    _run_again(model, engine, requests, chosen, adapters, wait=not no_wait, json_output=json_output)


def _run_again(
    model: str,
    engine: LoggedEngine | None,
    requests: list[RecordedRequest],
    chosen: dict[str, Any],
    adapters: list[LoRARequest],
    wait: bool,
    json_output: bool,
) -> None:
    """On the real engine; exits with 1 if a token differs."""
    from quire.observe.engine_metrics import EngineMetrics
    from quire.tools.verify.replay import load_adapters, open_engine
    from quire.tools.verify.replay import replay as run_again

    metrics = EngineMetrics(keep=10**9)
    running = open_engine(model, engine, metrics.observe, **chosen)
    say(running.description)
    load_adapters(running, requests, adapters)
    seconds = requests[-1].admission.arrival - requests[0].admission.arrival
    how = f"as they came, over {seconds:,.1f} s (--no-wait: all at once)" if wait else "all at once"
    say(f"Sending {len(requests):,} requests again, {how}")
    with BatchBar() as bar:
        done = run_again(
            running,
            requests,
            metrics,
            wait,
            lambda count, tokens: bar.report(count, len(requests), tokens),
        )
    _print_tokens(done.requests, done.tokens, done.different, done.skipped, json_output)
    if done.different:
        raise typer.Exit(1)


def _print_tokens(
    requests: int, tokens: int, different: list[tuple[str, int]], skipped: int, json_output: bool
) -> None:
    if json_output:
        differences = [{"request": name, "first_difference": place} for name, place in different]
        print(
            json.dumps(
                {
                    "requests": requests,
                    "tokens": tokens,
                    "skipped": skipped,
                    "different": differences,
                },
                indent=1,
            )
        )
        return
    left_out = f"; {skipped} without an answer were left out" if skipped else ""
    if not different:
        print(f"The same: {requests} requests, {tokens:,} tokens{left_out}.")
        return
    print(f"NOT the same: {len(different)} of {requests} requests differ{left_out}.")
    for name, place in different[:10]:
        print(f"  {name}: from token {place} on")
