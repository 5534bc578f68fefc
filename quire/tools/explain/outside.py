"""What a server spends on a request besides its engine, as further parts of an explanation: each
answer's time then is that from the request's first byte to the last one of its response.
"""

from __future__ import annotations

import time
from typing import Any

from quire.observe.request_records import RequestRecord


def add_grammar(explanation: dict[str, Any], seconds: float) -> None:
    """Before a request came to the engine, its grammar was compiled for so long."""
    for answer in explanation["answers"]:
        _add_before(answer, "grammar", seconds)


def add_outside(explanation: dict[str, Any], record: RequestRecord) -> None:
    """The server's own part of each answer's time: `network` and `outside`, before the engine had
    it and after it; and `others`, while other answers to the same request went on.
    """
    answers = explanation["answers"]
    timings = record.timings
    came = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(record.created))
    ends = [
        one["arrival"] + one["total_seconds"] - one["parts"].get("grammar", 0.0) for one in answers
    ]
    total = timings.get("answered") or timings.get("total")
    reading = timings.get("reading") or 0.0
    network = timings.get("network") or 0.0
    for answer, end in zip(answers, ends, strict=True):
        answer["came"] = came
        answer["is_running"] = answer["finish_reason"] is None and record.state in (
            "queued",
            "running",
        )
        if total is None:
            continue
        others = max(ends) - end
        outside = max(0.0, total - network - others - answer["total_seconds"])
        before = max(0.0, end - answer["total_seconds"] - reading - record.started)
        # unknown of an engine on another machine
        before = min(before, outside) if record.started else 0.0
        _add_before(answer, "outside", before)
        _add_before(answer, "network", reading)
        _add_after(answer, "others", others)
        _add_after(answer, "outside", outside - before)
        _add_after(answer, "network", network - reading)


def _add_before(answer: dict[str, Any], part: str, seconds: float) -> None:
    """All else comes later by so much: times are those since the request came."""
    for event in (*answer["admissions"], *answer["preemptions"]):
        event["seconds"] += seconds
    for segment in answer["segments"]:
        segment["start"] += seconds
        segment["end"] += seconds
    if answer["first_token_seconds"] is not None:
        answer["first_token_seconds"] += seconds
    _count(answer, part, seconds)
    if seconds > 0:
        answer["segments"].insert(0, {"part": part, "start": 0.0, "end": seconds, "step": None})


def _add_after(answer: dict[str, Any], part: str, seconds: float) -> None:
    start = answer["total_seconds"]
    _count(answer, part, seconds)
    if seconds > 0:
        answer["segments"].append(
            {"part": part, "start": start, "end": start + seconds, "step": None}
        )


def _count(answer: dict[str, Any], part: str, seconds: float) -> None:
    answer["parts"][part] = answer["parts"].get(part, 0.0) + seconds
    answer["total_seconds"] += seconds
