"""An explanation in words, and as a picture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from xml.sax.saxutils import escape

from quire.config import format_bytes

TITLES = {
    "queue": "waiting to be admitted",
    "prompt": "computing the prompt",
    "decode": "computing the answer",
    "preempted": "preempted, waiting to come back",
    "recompute": "computing again what it had",
    "turn": "running, but in no step",
    "between": "between two steps",
    "ending": "after its last step",
    "grammar": "waiting for its grammar to be compiled",
    "network": "reading the request, and sending what was left when the engine was done",
    "outside": "outside the engine (text to tokens and back, on the way to it and back)",
    "others": "done, while other answers to the same request went on",
}
_COLOURS = {
    "queue": "#9aa5b1", "prompt": "#4c78a8", "decode": "#54a24b", "preempted": "#e45756", "recompute": "#f58518",
    "turn": "#b279a2", "between": "#d8d2c4", "ending": "#72b7b2", "outside": "#eeca3b", "grammar": "#ff9da6",
    "network": "#9d755d", "others": "#bab0ac",
}  # fmt: skip
_ENDS = {
    "stop": "the model ended it, or a stop string or a grammar did",
    "length": "it came to its max_tokens or to the end of the context",
    "abort": "its client left or ended it",
    "deadline": "its deadline passed",
    "error": "it failed",
}
_MOST_CHUNKS = 12


def explanation_text(explanation: Mapping[str, Any]) -> str:
    """All answers of a request, in sentences."""
    return "\n\n".join("\n".join(_sentences(answer)) for answer in explanation["answers"])


def _sentences(answer: Mapping[str, Any]) -> Iterator[str]:
    total = answer["total_seconds"]
    first = answer["first_token_seconds"]
    output = answer["output_tokens"]
    tokens = (
        f"{answer['tokens_so_far']} answer tokens so far"
        if output is None
        else f"{output} answer tokens"
    )
    yield (
        f"{answer['name']}: {answer['prompt_tokens']} prompt tokens, {tokens}, {_time(total)} in all"
        f"{'' if first is None else f', the first token after {_time(first)}'}."
    )
    yield _arrival(answer)
    if answer.get("adapter"):
        yield f"The adapter {answer['adapter']} answered it."
    versions = answer.get("weights_versions", ())
    if len(versions) > 1 or any(version for _, version in versions):
        told = [f"version {version} from token {first} on" for first, version in versions]
        yield f"Weights that were replaced computed it: {', then '.join(told)}."
    yield "Where the time went:"
    parts = [(part, seconds) for part, seconds in answer["parts"].items() if seconds > 0]
    for part, seconds in parts:
        share = 100 * seconds / total if total else 0.0
        yield f"  {_time(seconds):>10}  {share:5.1f}%  {TITLES[part]}"
    yield f"  {_time(sum(seconds for _, seconds in parts)):>10}  100.0%  in all"
    for why, wait in answer["waited_for"].items():
        whom = ", ".join(wait["because_of"])
        yield f"It waited {_time(wait['seconds'])} for {why}{f' ({whom})' if whom else ''}."
    for admission in answer["admissions"]:
        yield _admission(admission)
    yield from _chunks(answer["chunks"])
    for preemption in answer["preemptions"]:
        yield _preemption(preemption)
    yield from _decodes(answer)
    yield from _later(answer)
    yield from _cache(answer["cache"])
    if answer["drafted_tokens"]:
        yield f"Of {answer['drafted_tokens']} drafted tokens {answer['accepted_tokens']} were right."
    company = list(answer["shared_steps_with"].items())
    if company:
        names = ", ".join(f"{name} ({one['steps']})" for name, one in company[:5])
        more = f" and {len(company) - 5} more" if len(company) > 5 else ""
        yield f"It shared its {answer['steps']} steps with {names}{more}."
    reason = answer["finish_reason"]
    if reason is None:
        yield "It still runs." if answer.get("is_running") else "The log does not have its end."
    else:
        failed = "; a step it was in failed" if answer["failed_step"] else ""
        yield f"It ended with {reason!r}: {_ENDS[reason]}{failed}."


def _arrival(answer: Mapping[str, Any]) -> str:
    """By the clock where a server tells it; a log's own clock means nothing to anybody."""
    if "came" in answer:
        return f"It came at {answer['came']}."
    since = answer["seconds_after_first_step"]
    return f"It came {_time(abs(since))} {'after' if since >= 0 else 'before'} the first step of the log."


def _admission(admission: Mapping[str, Any]) -> str:
    text = f"At {_time(admission['seconds'])} it was admitted (step {admission['step']}, row {admission['row']})"
    found = admission["cached_tokens"] + admission["host_tokens"]
    if not found:
        return text + "; nothing of it was cached."
    host = f" ({admission['host_tokens']} of them on the host)" if admission["host_tokens"] else ""
    origins = ", ".join(f"{count} by {name}" for name, count in admission["computed_by"].items())
    return text + f"; {found} of its tokens were cached{host}, computed {origins or 'before'}."


def _chunks(chunks: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for number, chunk in enumerate(chunks):
        if number == _MOST_CHUNKS:
            rest = chunks[_MOST_CHUNKS:]
            seconds = _time(sum(one["seconds"] for one in rest))
            yield f"  … and {len(rest)} more chunks of {sum(one['tokens'] for one in rest)} tokens, {seconds}."
            return
        what = "computed again" if chunk["part"] == "recompute" else "computed"
        others = chunk["step_tokens"] - chunk["tokens"]
        beside = f" beside {others} of others" if others else ""
        last = chunk["start"] + chunk["tokens"] - 1
        seconds = _time(chunk["seconds"])
        yield f"  step {chunk['step']}: tokens {chunk['start']} to {last} {what}{beside}, {seconds}"


def _preemption(preemption: Mapping[str, Any]) -> str:
    waited = preemption["waited_seconds"]
    back = "never came back" if waited is None else f"was back after {_time(waited)}"
    again = preemption["recompute_seconds"]
    cost = f", and computed again for {_time(again)}" if again else ""
    kept = (
        "its blocks went to the host"
        if preemption["kind"] == "swap"
        else "its blocks were given up"
    )
    return (
        f"At {_time(preemption['seconds'])} it was preempted (step {preemption['step']}): {preemption['why']}. It had "
        f"{preemption['computed_tokens']} tokens computed, {kept}; it {back}{cost}."
    )


def _decodes(answer: Mapping[str, Any]) -> Iterator[str]:
    decodes = answer["decodes"]
    if decodes["steps"]:
        each = answer["parts"]["decode"] / decodes["steps"]
        slowest = _time(decodes["slowest_seconds"])
        tokens = decodes["slowest_tokens"]
        yield (
            f"Its answer took {decodes['steps']} steps of {_time(each)} on average; the slowest, step "
            f"{decodes['slowest_step']}, took {slowest} for {tokens} token{'s' * (tokens != 1)} of all requests in it."
        )


def _later(answer: Mapping[str, Any]) -> Iterator[str]:
    """Whose prompts its tokens waited for, the most first, and targets that were not kept."""
    later = list(answer["later_for"].items())
    if later:
        total = sum(one["seconds"] for _, one in later)
        whose = ", ".join(f"{name} ({_time(one['seconds'])})" for name, one in later[:5])
        more = f" and of {len(later) - 5} more" if len(later) > 5 else ""
        several = "s" * (len(later) > 1)
        yield f"Its tokens came {_time(total)} later in all for the prompt{several} of {whose}{more}."
    for target, steps in answer["gave_way"].items():
        yield f"In {steps} of its steps target_{target} could not be kept."


def _cache(cache: Mapping[str, Any]) -> Iterator[str]:
    if cache["blocks"]:
        size = "" if cache["bytes"] is None else f" ({format_bytes(cache['bytes'])})"
        states = f", {cache['state_blocks']} of them for states" if cache["state_blocks"] else ""
        yield f"It took {cache['blocks']} blocks of the cache{size}{states}."


def _time(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms" if abs(seconds) < 1 else f"{seconds:.3f} s"


def explanation_svg(explanation: Mapping[str, Any], width: int = 960) -> str:
    """Each answer as a bar from its arrival to its end, with a legend."""
    answers = explanation["answers"]
    longest = max((answer["total_seconds"] for answer in answers), default=0.0) or 1.0
    scale = (width - 40) / longest
    rows: list[str] = []
    top = 36
    for answer in answers:
        title = f"{answer['name']}: {_time(answer['total_seconds'])}, ended by {answer['finish_reason']}"
        rows.append(f'<text x="20" y="{top}">{escape(title)}</text>')
        for segment in answer["segments"]:
            seconds = segment["end"] - segment["start"]
            rows.append(
                f'<rect x="{20 + segment["start"] * scale:.2f}" y="{top + 8}" width="{max(seconds * scale, 0.2):.2f}" '
                f'height="26" fill="{_COLOURS[segment["part"]]}"><title>{TITLES[segment["part"]]}: {_time(seconds)}'
                "</title></rect>"
            )
        for kind, sign in (("admissions", "▲"), ("preemptions", "▼")):
            places = (20 + event["seconds"] * scale - 4 for event in answer[kind])
            rows += [f'<text x="{x:.2f}" y="{top + 48}">{sign}</text>' for x in places]
        top += 76
    shown = [part for part in TITLES if any(answer["parts"].get(part) for answer in answers)]
    for number, part in enumerate(shown):
        x = 20 + number % 2 * (width - 40) / 2
        y = top + number // 2 * 22
        rows.append(
            f'<rect x="{x:.0f}" y="{y - 11}" width="12" height="12" fill="{_COLOURS[part]}"/>'
        )
        rows.append(f'<text x="{x + 18:.0f}" y="{y}">{TITLES[part]}</text>')
    top += (len(shown) + 1) // 2 * 22
    rows.append(f'<text x="20" y="{top}">▲ admitted, ▼ preempted</text>')
    height = top + 12
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>'
        f"{''.join(rows)}</svg>\n"
    )
