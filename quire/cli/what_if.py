"""What `quire replay --what-if` shows: each setting on a virtual clock, and how far that can be
trusted.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from rich.console import Console
from rich.table import Table

from quire.cli.terminal import say
from quire.errors import QuireError
from quire.frontend.progress import PlayBar, TimeBar
from quire.observe.engine_metrics import derive_metrics
from quire.observe.step_log import LoggedEngine
from quire.step import StepLogEntry
from quire.tools.what_if.calibration import Calibration
from quire.tools.what_if.players import Players
from quire.tools.what_if.recorded import RecordedRequest
from quire.tools.what_if.step_mix import StepMix, add_seconds
from quire.tools.what_if.step_times import StepTimes, fit_step_times
from quire.tools.what_if.what_if import (
    PLAYS,
    Prediction,
    Setting,
    Summary,
    parse_changes,
    predict_all,
)

_TIMES = {"ttft": "time to first token", "per_token": "time per token", "latency": "latency"}
_WHICH = ("median", "p95")
_LONG = 5_000
"""Steps of all settings, whose plays take some seconds: a line says what is going on, to logs and
pipes, too.
"""


class _Played:
    """All settings, by their titles, and what to be careful with."""

    def __init__(
        self, requests: Sequence[RecordedRequest], settings: Mapping[str, Setting], times: StepTimes
    ) -> None:
        self._requests, self.settings = requests, settings
        self.calibration: Calibration | None = None
        self.notes: list[str] = []
        self.play(times)

    def play(self, times: StepTimes) -> None:
        self.times = times
        expected = len(self.settings) * PLAYS
        with (
            PlayBar(expected) as bar,
            Players(self._requests, times, expected, bar.show) as players,
        ):
            found = predict_all(list(self.settings.values()), players)
        self.found = dict(zip(self.settings, found, strict=True))

    @property
    def outside(self) -> dict[StepMix, float]:
        """Seconds in steps of sizes that were not measured, where these matter."""
        seconds: dict[StepMix, float] = {}
        for found in self.found.values():
            if found.is_outside:
                seconds = add_seconds(seconds, found.outside)
        return seconds


def play_and_print(
    entries: Sequence[StepLogEntry],
    engine: LoggedEngine,
    requests: Sequence[RecordedRequest],
    what_if: Sequence[str],
    model: str | None,
    chosen: Mapping[str, Any] | None,
    json_output: bool,
) -> None:
    """As recorded and with other settings. Steps of sizes that the log does not have are measured
    on its model, opened as `chosen`; not, if that is None.
    """
    base = Setting(engine.config, engine.depth)
    settings = {"replayed": base} | {text: parse_changes(text, base) for text in what_if}
    if len(entries) * len(settings) > _LONG:
        plays = (
            f"{PLAYS} times"
            if len(settings) == 1
            else f"{PLAYS} times in each of {len(settings)} settings"
        )
        say(
            f"Playing {len(requests):,} requests of {len(entries):,} steps on a virtual clock, {plays}"
        )
    times = fit_step_times(entries, engine.costs, graph_tokens=engine.config.max_checked_tokens)
    played = _Played(requests, settings, times)
    why = (
        ""
        if chosen is None or not played.outside
        else _calibrate(played, model, engine, entries, chosen)
    )
    for title, found in played.found.items():
        played.notes += _warnings(title, found, played.times, why)
    if any(one.draft_tokens for entry in entries for one in entry.step.scheduled):
        played.notes.append(
            "The log has drafted tokens (speculation); a replay has none, so its answers take more steps."
        )
    recorded = Summary.of(derive_metrics(entries))
    if json_output:
        print(json.dumps(_as_json(played, recorded), indent=1))
    else:
        _print(played, recorded)


def _calibrate(
    played: _Played,
    model: str | None,
    engine: LoggedEngine,
    entries: Sequence[StepLogEntry],
    chosen: Mapping[str, Any],
) -> str:
    """Measures steps and plays again; why that could not be done, if so."""
    from quire.tools.verify.calibrate import SECONDS, SHARES, model_of, open_calibrator

    known = played.times.seen
    try:
        name = model_of(engine, model, chosen)[0]
        say(
            f"Measuring steps of sizes that the log does not have, on {name} (at most {SECONDS:.0f} s)"
        )
        settings = [one.config for one in played.settings.values()]
        calibrator = open_calibrator(model, engine, entries, settings, chosen)
        for share in SHARES:  # what was measured may lead to other sizes again
            with TimeBar("Measuring steps", share * SECONDS) as bar:
                show = partial(_show, bar, share * SECONDS)
                found = played.calibration = calibrator.calibrate(
                    played.outside, share * SECONDS, show
                )
            played.play(found.times)
            if not played.outside:
                break
    except QuireError as error:
        say(f"they could not be measured: {error}")
        return str(error)
    most = found.times.seen
    played.notes.append(
        f"Steps of sizes that the log does not have (up to {most.most_tokens:,} tokens and {most.most_requests:,} "
        f"requests in one; the log: {known.most_tokens:,} and {known.most_requests:,}) were measured on {found.model}: "
        f"{found.sizes} sizes in {found.seconds:.1f} s, to within about {found.error:.0%}. Steps of the log's sizes "
        f"take {found.speed:.2f} times as long here as in the log, which is allowed for."
    )
    return ""


def _show(bar: TimeBar, seconds: float, done: float) -> None:
    bar.show("", done * seconds)


def _warnings(title: str, found: Prediction, times: StepTimes, why: str) -> list[str]:
    notes = []
    if found.is_outside:
        largest = max(shape.tokens for shape in found.outside)
        most = max(shape.requests for shape in found.outside)
        notes.append(
            f"{title}: {found.share_outside:.0%} of its time and {found.tokens_outside:.0%} of its tokens are in steps "
            f"of sizes that were never measured (up to {largest:,} tokens and {most:,} requests in one; known: "
            f"{times.seen.most_tokens:,} and {times.seen.most_requests:,}){f': {why}' if why else ''}. Their times are "
            f"extrapolated and may be off by {times.far_error:.0%} at twice the size, so the figures are uncertain."
        )
    uncertain = [
        f"{_TIMES[name]}, {_WHICH[index]}, {1e3 * low:,.1f} to {1e3 * high:,.1f} ms"
        for name, index, low, high in found.uncertain()
    ]
    if uncertain:
        is_far = found.is_outside or times.is_calibrated
        cause = "were all steps 3% shorter or longer" + (
            ", or those that the log does not have as far off" * is_far
        )
        notes.append(f"{title}: {cause}: {'; '.join(uncertain)}.")
    return notes


def _as_json(played: _Played, recorded: Summary) -> dict[str, Any]:
    quality, made = played.times.quality, played.calibration
    runs: list[dict[str, Any]] = [{"setting": "recorded", "refused": 0, **recorded.as_json()}]
    for title, found in played.found.items():
        ends = {"low": found.low.as_json(), "high": found.high.as_json()}
        runs.append(
            {"setting": title, "refused": found.refused, **found.run.as_json(), **ends}
            | {"share_outside": found.share_outside, "tokens_outside": found.tokens_outside}
        )
    about = ("model", "steps", "sizes", "seconds", "speed", "error")
    calibration = None if made is None else {name: getattr(made, name) for name in about}
    return {"fit": asdict(quality), "calibration": calibration, "runs": runs, "notes": played.notes}


def _print(played: _Played, recorded: Summary) -> None:
    quality = played.times.quality
    print(
        f"Step times fitted to the log: on {quality.num_steps} steps held out they are off by "
        f"{quality.median_error:.1%} in the median, {quality.p95_error:.1%} at the 95th percentile, "
        f"{quality.total_error:+.1%} in the sum."
    )
    every = [recorded, *(found.run for found in played.found.values())]
    table = Table("", "recorded", *played.found, box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
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
    refused = [0, *(found.refused for found in played.found.values())]
    if any(refused):
        table.add_row("could never run", *(f"{count:,}" for count in refused))
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    console.print()
    console.print(table)
    for note in played.notes:
        print(note)
