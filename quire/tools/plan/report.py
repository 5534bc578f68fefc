"""A plan in words and as a table."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from quire.config import format_bytes
from quire.errors import InvalidRequestError
from quire.runner.memory import CachePlan
from quire.tools.plan.devices import PlannedDevice
from quire.tools.plan.estimate import Estimate, ExpectedLoad, Serving, estimate
from quire.tools.plan.forms import Form, forms_of
from quire.tools.plan.model import PlannedModel
from quire.tools.plan.token_time import TargetPlan

_PIPE_WIDTH = 150
_MORE_RANKS = (2, 4, 8)


class Findings(NamedTuple):
    """What was asked, and what was found."""

    model: PlannedModel
    device: PlannedDevice
    num_engines: int
    """Each of which has the whole model, on one device or divided among several."""
    load: ExpectedLoad
    found: Sequence[Estimate]
    serving: Serving | None
    target: TargetPlan | None = None
    target_token_time: float | None = None
    """That was asked for, kept or not."""


def print_plan(findings: Findings) -> None:
    """For people."""
    model, device, num_engines, load, found = findings[:5]
    console = Console(highlight=False, width=None if sys.stdout.isatty() else _PIPE_WIDTH)
    num_devices = num_engines * found[0].form.ranks
    count = f"{num_devices} x " if num_devices > 1 else ""
    rates = "" if device.rates is None else f"{device.rates}; "
    console.print(
        f"{model.name}: {model.spec.family}, {model.spec.num_parameters / 1e6:,.0f}M parameters, on {count}"
        f"{device.name} ({format_bytes(device.memory)} free; {rates}{device.origin})",
        markup=False,
        soft_wrap=True,
    )
    what = (
        f"{len(load.jobs):,} requests, all at once, in the mean of" if load.jobs else "requests of"
    )
    console.print(
        f"{what} {load.input_tokens:,} prompt and {load.output_tokens:,} answer tokens",
        markup=False,
    )
    console.print(f"{_division(device, num_engines, found[0].form.ranks)}", markup=False)
    table = Table(
        "weights in", "take", "cache, tokens", "at once", "prompt, ms", box=None, pad_edge=False
    )
    at_most = "" if device.is_measured else " at most"
    for column in (f"alone, tokens/s{at_most}", f"all, tokens/s{at_most}"):
        table.add_column(column, justify="right")
    table.add_column("steps wait for")
    for one in found:
        table.add_row(one.form.name, format_bytes(one.form.weight_bytes), *_cells(one, num_engines))
    console.print(table)
    console.print()
    for line in advice(findings):
        console.print(line, markup=False, soft_wrap=True)


def _division(device: PlannedDevice, num_engines: int, ranks: int) -> str:
    if ranks == 1:
        return ""
    repeats = f", {num_engines} times" if num_engines > 1 else ""
    return f"divided among {ranks} devices that gather over {device.link.name} (computed, not measured){repeats}\n"


def _cells(one: Estimate, num_engines: int) -> tuple[str, ...]:
    if one.plan is None:
        return "–", "–", "–", "–", "–", f"does not fit: {one.why_not}"
    return (
        f"{one.plan.num_tokens * num_engines:,}",
        f"{one.at_once * num_engines:,}",
        f"{one.prompt_seconds * 1e3:,.1f}",
        _speed(1 / one.alone_seconds),
        _speed(one.tokens_per_second * num_engines),
        one.bound,
    )


def _speed(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 600 else f"{seconds / 60:,.0f} minutes"


def advice(findings: Findings) -> Iterator[str]:
    """What follows from the table, and what to change."""
    _, device, num_engines, load, found, serving, target, target_token_time = findings
    fitting = [one for one in found if one.fits]
    if not fitting:
        yield _what_would_fit(findings)
        return
    first = fitting[0]
    ranks = first.form.ranks
    yield f"It fits: {_asked(first.form)}, {first.at_once * num_engines} such requests at once."
    best = max(fitting, key=lambda one: one.tokens_per_second)
    if best.tokens_per_second > 1.2 * first.tokens_per_second:
        times = best.tokens_per_second / first.tokens_per_second
        yield f"{_asked(best.form)} is {times:.1f} times as fast; `quire bench quality` tells its price."
    if load.jobs:
        speed = _speed(load.num_answer_tokens / first.workload_seconds)
        yield f"The {len(load.jobs):,} requests take {_duration(first.workload_seconds)}: {speed} tokens a second."
    if num_engines > 1:
        whose = (
            f"Each of the {num_engines} devices" if ranks == 1 else f"Each group of {ranks} devices"
        )
        yield f"({whose} holds the whole model and a share of the requests.)"
    assert first.plan is not None
    if len(first.plan.groups.kept) > 1 or first.plan.groups.state is not None:
        yield _what_is_kept(first.plan)
    limit = first.plan.num_tokens // (load.input_tokens + load.output_tokens)
    if limit <= first.at_once and first.at_once < 8:
        yield "The cache decides how many: shorter requests, smaller weights or more memory for it give more."
    if not device.is_measured:
        yield "Speeds are bounds here (what the weights' products alone take, attention left out), not estimates."
    if target is not None:
        yield (
            f"A token every {target.token_time * 1e3:g} ms: {target.at_once * num_engines} answers at once with "
            f"{target.prompt_tokens:,} prompt tokens beside them in a step, "
            f"{_speed(target.tokens_per_second * num_engines)} tokens a second: {target.share:.0%} of the throughput "
            "without a target."
        )
    elif target_token_time is not None:
        yield (
            f"A token every {target_token_time * 1e3:g} ms is not kept even by one answer alone "
            f"({first.alone_seconds * 1e3:,.1f} ms a step)."
        )
    if serving is None or load.rate is None:
        return
    if not serving.is_possible:
        yield (
            f"{load.rate:g} requests a second are too many: about {serving.most:.2f} is the most. "
            f"{_devices_needed(load.rate, serving.most / num_engines, ranks)}"
        )
        return
    yield (
        f"At {load.rate:g} requests a second about {serving.at_once * num_engines:.1f} run at once; the first token "
        f"comes after about {serving.ttft * 1e3:,.0f} ms, then one every {serving.per_token * 1e3:,.1f} ms; prompts "
        f"take {serving.utilisation:.0%} of the time; {serving.most:.1f} requests a second would be the most."
    )
    if load.ttft is not None:
        if serving.ttft <= load.ttft:
            yield f"A first token within {load.ttft:g} s is kept, on average: bursts of requests take longer."
        else:
            yield (
                f"A first token within {load.ttft:g} s is not kept: more devices, a smaller model, shorter prompts, or "
                "a common beginning of prompts (the prefix cache computes it once) would help."
            )


def _state_bytes(plan: CachePlan) -> int:
    """Of the state of all recurrent layers at one place; 0 if there are none."""
    state = plan.groups.state
    return 0 if state is None else state.num_blocks * plan.bytes_per_block


def _what_is_kept(plan: CachePlan) -> str:
    """Of a model whose layers differ in what they keep."""
    count, size = plan.num_blocks - 1, format_bytes(plan.bytes_per_block)
    kinds = Counter(
        "all tokens"
        if group.keeps == "all"
        else f"a window of {group.size:,}"
        if group.keeps == "window"
        else f"chunks of {group.size:,}"
        for group in plan.groups.kept
    )
    groups = ", ".join(
        kind if number == 1 else f"{kind} ({number} groups)" for kind, number in kinds.items()
    )
    text = f"The cache has {count:,} blocks of {size} for groups of layers that keep {groups}"
    if not _state_bytes(plan):
        return f"{text}."
    return (
        f"{text}; each request also has two states of {format_bytes(_state_bytes(plan))}.\n"
        "Times are those of kernels that reach the bus: those of layers with a state don't yet, and "
        "take longer (docs/performance.md, attempt 52)."
    )


def _asked(form: Form) -> str:
    """How to ask for a form, and what that is where the words don't say it."""
    if form.option.endswith(f"={form.name}"):
        return form.option
    return (
        f"{form.option}, {form.name}" if form.name.endswith(")") else f"{form.option} ({form.name})"
    )


def _devices_needed(rate: float, most: float, ranks: int) -> str:
    """`most` requests a second are for one engine, on so many devices."""
    if most <= 0:
        return ""
    return f"{(int(rate / most) + 1) * ranks} such devices would do, or shorter answers, or a smaller model."


def _what_would_fit(findings: Findings) -> str:
    model, device, _, load, found = findings[:5]
    smallest = min(found, key=lambda one: one.form.weight_bytes)
    ranks = smallest.form.ranks
    what = f"{format_bytes(smallest.form.weight_bytes)}" + (
        f" on {ranks} devices" if ranks > 1 else ""
    )
    text = f"It does not fit: the smallest form takes {what} and one device has {format_bytes(device.memory)}. "
    for more in _MORE_RANKS if device.is_gpu else ():
        if more > ranks and _fits(model, device, load, more):
            return f"{text}Divided among {more} it would: --tensor-parallel-size {more}."
    return text + "Take a smaller model, a larger device, or on a CPU int8 or int4."


def _fits(model: PlannedModel, device: PlannedDevice, load: ExpectedLoad, ranks: int) -> bool:
    try:
        return any(
            estimate(model, device, form, load).fits for form in forms_of(model, device, ranks)
        )
    except InvalidRequestError:  # it has fewer heads
        return False


def as_json(findings: Findings) -> Mapping[str, Any]:
    """For programs."""
    model, device, num_engines, load, found, serving, target, _ = findings
    return {
        "model": model.name,
        "family": model.spec.family,
        "parameters": model.spec.num_parameters,
        "device": {
            "name": device.name,
            "memory": device.memory,
            "count": num_engines * found[0].form.ranks,
            "origin": device.origin,
        },
        "tensor_parallel_size": found[0].form.ranks,
        "times_are": "estimates" if device.is_measured else "bounds",
        "input_tokens": load.input_tokens,
        "output_tokens": load.output_tokens,
        "requests": len(load.jobs) or None,
        "forms": [_form_json(one, num_engines, load) for one in found],
        "serving": None
        if serving is None
        else {name: getattr(serving, name) for name in serving.__slots__},
        "target": None
        if target is None
        else {name: getattr(target, name) for name in target.__slots__},
        "advice": list(advice(findings)),
    }


def _form_json(one: Estimate, num_engines: int, load: ExpectedLoad) -> dict[str, Any]:
    base = {
        "weights": one.form.name,
        "option": one.form.option,
        "weight_bytes": one.form.weight_bytes,
    }
    if one.plan is None:
        return {**base, "fits": False, "why_not": one.why_not}
    return {
        **base,
        "fits": True,
        "cache_tokens": one.plan.num_tokens * num_engines,
        "cache_blocks": (one.plan.num_blocks - 1) * num_engines,
        "cache_bytes": (one.plan.num_blocks - 1) * one.plan.bytes_per_block * num_engines,
        "bytes_per_block": one.plan.bytes_per_block,
        "layer_groups": [group._asdict() for group in one.plan.groups.kept],
        "state_bytes": _state_bytes(one.plan),
        "requests_at_once": one.at_once * num_engines,
        "prompt_seconds": one.prompt_seconds,
        "step_seconds": one.step_seconds,
        "step_seconds_alone": one.alone_seconds,
        "tokens_per_second": one.tokens_per_second * num_engines,
        "bound": one.bound,
        "workload_seconds": one.workload_seconds if load.jobs else None,
        "workload_tokens_per_second": load.num_answer_tokens / one.workload_seconds
        if load.jobs
        else None,
    }
