"""`quire replay`: recorded requests again, for real or on a virtual clock with other settings."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from quire.cli import options
from quire.cli.terminal import say
from quire.errors import InvalidRequestError

if TYPE_CHECKING:
    from quire.observe.step_log import LoggedEngine
    from quire.simulate.recorded import RecordedRequest
    from quire.simulate.what_if import Prediction, Summary
    from quire.step import StepLogEntry

_TIMES = {"ttft": "time to first token", "per_token": "time per token", "latency": "latency"}
_WHICH = ("median", "p95")


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
        str | None, Option("--model", "-m", metavar="M", help="Run them for real on this model: the same tokens?")
    ] = None,
    no_wait: Annotated[bool, Option("--no-wait", help="With --model: all at once, not when they came.")] = False,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    quantization: options.Quantization = "auto",
    kv_cache_dtype: options.KVCacheDtype = "auto",
    json_output: Annotated[bool, Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Send the requests of a step log again, at the times they came.

    With --model they run on the real engine, and their tokens are compared with the recorded ones: the exit status is
    1 if one differs. Without it nothing is computed: the real scheduler runs on a virtual clock, with step times fitted
    to the log, as recorded and with the settings of each --what-if. How well the fit predicts steps it has not seen is
    said first.

    \b
    quire replay steps.jsonl --model smollm2
    quire replay steps.jsonl --what-if max_num_seqs=16
    quire replay steps.jsonl --what-if rate=2 --what-if rate=2,max_batched_tokens=1024,policy=priority
    """
    from quire.observe.step_log import last_run
    from quire.simulate.recorded import recorded_requests

    entries, engine = last_run(log)
    requests = recorded_requests(entries)
    if not requests:
        raise InvalidRequestError("LOG", f"{log} has no request from its beginning on")
    if model is None:
        _play(log, entries, engine, requests, what_if or [], json_output)
        return
    if what_if:
        raise InvalidRequestError("--what-if", "runs on a virtual clock: leave --model out")
    chosen = {"device": device, "dtype": dtype, "quantization": quantization, "kv_cache_dtype": kv_cache_dtype}
    _run_again(model, engine, requests, chosen, wait=not no_wait, json_output=json_output)


def _run_again(
    model: str,
    engine: LoggedEngine | None,
    requests: list[RecordedRequest],
    chosen: dict[str, Any],
    wait: bool,
    json_output: bool,
) -> None:
    """On the real engine; exits with 1 if a token differs."""
    from quire.observe.engine_metrics import EngineMetrics
    from quire.verify.replay import open_engine
    from quire.verify.replay import replay as run_again

    metrics = EngineMetrics(keep=10**9)
    running = open_engine(model, engine, metrics, **chosen)
    say(running.description)
    done = run_again(running, requests, metrics, wait=wait)
    _print_tokens(done.requests, done.tokens, done.different, done.skipped, json_output)
    if done.different:
        raise typer.Exit(1)


def _play(
    log: Path,
    entries: list[StepLogEntry],
    engine: LoggedEngine | None,
    requests: list[RecordedRequest],
    what_if: list[str],
    json_output: bool,
) -> None:
    """On a virtual clock, as recorded and with other settings."""
    if engine is None:
        raise InvalidRequestError("LOG", f"{log} does not say its engine's settings: it is of an older version")
    from quire.observe.engine_metrics import EngineMetrics
    from quire.simulate.step_times import fit_step_times
    from quire.simulate.what_if import Setting, Summary, parse_changes, predict

    base = Setting(engine.config, engine.depth)
    settings = [(text, parse_changes(text, base)) for text in what_if]
    times = fit_step_times(entries, engine.costs)
    recorded = EngineMetrics(keep=10**9)
    for entry in entries:
        recorded.observe(entry)
    runs = [("recorded", Summary.of(recorded), 0)]
    ranges: dict[str, Prediction] = {}
    notes: list[str] = []
    for title, setting in [("replayed", base), *settings]:
        ranges[title] = found = predict(requests, setting, times)
        runs.append((title, found.run, found.refused))
        if found.share_beyond > 0.01:
            note = f"{title}: {found.share_beyond:.0%} of its steps are larger than any in the log, their times a guess"
            known = times.quality.beyond_error
            tried = f" (the log's own, from steps half as large: {known:.1%} off in the median)"
            notes.append(f"{note}{'' if known is None else tried}.")
        uncertain = [
            f"{_TIMES[name]}, {_WHICH[index]}, {1e3 * low:,.1f} to {1e3 * high:,.1f} ms"
            for name, index, low, high in found.uncertain()
        ]
        if uncertain:
            notes.append(f"{title}: were all steps 2% shorter or longer: {'; '.join(uncertain)}.")
    quality = times.quality
    if any(one.guesses for entry in entries for one in entry.step.scheduled):
        notes.append("The log has guessed tokens (speculation); a replay has none, so its answers take more steps.")
    if json_output:
        fit = {name: getattr(quality, name) for name in quality.__slots__}
        told = [{"setting": title, "refused": refused, **run.as_json()} for title, run, refused in runs]
        for one in told[1:]:
            found = ranges[str(one["setting"])]
            one |= {"low": found.low.as_json(), "high": found.high.as_json()}
        print(json.dumps({"fit": fit, "runs": told, "notes": notes}, indent=1))
        return
    print(
        f"Step times fitted to the log: on {quality.num_steps} steps held out they are off by "
        f"{quality.median_error:.1%} in the median, {quality.p95_error:.1%} at the 95th percentile, "
        f"{quality.total_error:+.1%} in the sum."
    )
    _print_runs(runs)
    for note in notes:
        print(note)


def _print_tokens(
    requests: int, tokens: int, different: list[tuple[str, int]], skipped: int, json_output: bool
) -> None:
    if json_output:
        told = [{"request": name, "first_difference": place} for name, place in different]
        print(json.dumps({"requests": requests, "tokens": tokens, "skipped": skipped, "different": told}, indent=1))
        return
    left_out = f"; {skipped} without an answer were left out" if skipped else ""
    if not different:
        print(f"The same: {requests} requests, {tokens:,} tokens{left_out}.")
        return
    print(f"NOT the same: {len(different)} of {requests} requests differ{left_out}.")
    for name, place in different[:10]:
        print(f"  {name}: from token {place} on")


def _print_runs(runs: list[tuple[str, Summary, int]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("", *(title for title, _, _ in runs), box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    every = [run for _, run, _ in runs]
    for name, place in _TIMES.items():
        for index, which in enumerate(_WHICH):
            cells = [f"{1e3 * getattr(run, name)[index]:,.1f} ms" for run in every]
            table.add_row(f"{place}, {which}", *cells)
    table.add_row("answer tokens/s", *(f"{run.tokens_per_second:,.1f}" for run in every))
    table.add_row("all in all", *(f"{run.seconds:,.2f} s" for run in every))
    table.add_row("steps", *(f"{run.steps:,}" for run in every))
    table.add_row("preemptions", *(f"{run.preemptions:,}" for run in every))
    table.add_row("prompt tokens cached", *(f"{run.hit_rate:.0%}" for run in every))
    table.add_row("requests", *(f"{run.requests:,}" for run in every))
    if any(refused for _, _, refused in runs):
        table.add_row("could never run", *(f"{refused:,}" for _, _, refused in runs))
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    console.print()
    console.print(table)
