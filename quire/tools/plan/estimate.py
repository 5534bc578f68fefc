"""Does it fit, how many at once, how fast: with the allocator's own rules and the bounds of bytes
and products.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from quire.config import EngineConfig, format_bytes
from quire.errors import CapacityError, InvalidRequestError
from quire.models.spec import ModelSpec
from quire.parallel.division import Division
from quire.runner.layer_groups import LayerGroups
from quire.runner.memory import CachePlan, Needs, plan_cache
from quire.tools.plan.devices import PlannedDevice
from quire.tools.plan.forms import Form
from quire.tools.plan.model import PlannedModel
from quire.tools.plan.work import Work, decode_work, gathered, layer_inputs, mlp_width, prompt_work
from quire.tools.plan.workload import RequestLengths, workload_seconds


@dataclass(frozen=True, slots=True)
class ExpectedLoad:
    """What is expected of it."""

    input_tokens: int
    output_tokens: int
    rate: float | None = None
    """Requests a second."""
    ttft: float | None = None
    """Seconds to the first token that are wanted."""
    jobs: tuple[RequestLengths, ...] = ()
    """Requests that come all at once; their mean lengths are those above."""

    @classmethod
    def of_jobs(
        cls, jobs: tuple[RequestLengths, ...], rate: float | None = None, ttft: float | None = None
    ) -> ExpectedLoad:
        prompts, answers = sum(job.prompt for job in jobs), sum(job.answer for job in jobs)
        return cls(round(prompts / len(jobs)), max(1, round(answers / len(jobs))), rate, ttft, jobs)

    @property
    def longest(self) -> int:
        return max(
            (job.prompt + job.answer for job in self.jobs),
            default=self.input_tokens + self.output_tokens,
        )

    @property
    def num_answer_tokens(self) -> int:
        return sum(job.answer for job in self.jobs)


@dataclass(frozen=True, slots=True)
class Estimate:
    """What to expect of one form on one device."""

    form: Form
    fits: bool
    why_not: str = ""
    plan: CachePlan | None = None
    at_once: int = 0
    """Requests of the load's length that the cache holds, and rows."""
    step_seconds: float = 0.0
    """Of a step with so many answers."""
    alone_seconds: float = 0.0
    """Of a step with one answer."""
    prompt_seconds: float = 0.0
    """Of one prompt of the load."""
    tokens_per_second: float = 0.0
    """Of answers, with so many at once."""
    bound: str = ""
    """What the steps of answers wait for."""
    workload_seconds: float = 0.0
    """Of the load's requests, all at once, over the engines there are."""


def estimate(
    model: PlannedModel, device: PlannedDevice, form: Form, load: ExpectedLoad, num_engines: int = 1
) -> Estimate:
    """One form, in an engine with the usual limits and sequences as long as the load's."""
    spec = Division(model.spec, 0, form.ranks).local_spec  # of the rank that has most
    length = load.input_tokens + load.output_tokens
    if load.longest > spec.max_position:
        message = f"input and output are {load.longest:,} tokens, but the model was made for {spec.max_position:,}"
        raise InvalidRequestError("--input", message)
    config = EngineConfig(max_model_len=load.longest)
    limits = config.limits(on_gpu=device.is_gpu)
    weights = -(-form.weight_bytes // form.ranks)
    free = device.memory - weights
    if free <= 0:
        return Estimate(
            form, False, f"weights of {format_bytes(weights)} in {format_bytes(device.memory)}"
        )
    needs = Needs(weights=weights)
    if device.is_gpu:
        item = form.dtype.itemsize
        activations = _activations(spec, limits.max_batched_tokens, limits.max_num_seqs, item)
        graphs = _activations(spec, limits.graph_tokens, limits.graph_tokens, item)
        needs = replace(needs, activations=activations, graphs=graphs)
    try:
        groups = LayerGroups.of(
            spec, config.block_size, form.key_dtype, form.keys_at_once, config.max_model_len
        )
        plan = plan_cache(spec, config, limits, form.key_dtype, free, needs, groups)
    except CapacityError as error:
        return Estimate(form, False, str(error).split(":")[0])
    at_once = min(limits.max_num_seqs, (plan.num_blocks - 1) // plan.blocks_at(length))
    times = PlannedTimes(model.spec, device, form)
    context = load.input_tokens + load.output_tokens // 2
    step, prompt = times.step(at_once, context), times.prompt(load.input_tokens)
    # Each request takes the engine for its prompt, and shares the steps of its answer.
    per_request = load.output_tokens * step / at_once + prompt
    # The engine with the first request has most of them.
    played = workload_seconds(times, load.jobs[::num_engines], at_once) if load.jobs else 0.0
    return Estimate(
        form,
        True,
        "",
        plan,
        at_once,
        step,
        times.step(1, context),
        prompt,
        load.output_tokens / per_request,
        times.bound(at_once, context),
        played,
    )


def _activations(spec: ModelSpec, num_tokens: int, num_scored: int, itemsize: int) -> int:
    """About what `measure_needs` finds on a card: hidden states, the widest matrix's output, and
    three copies of the scores in float32.
    """
    width = 0
    for layer in spec.layers:
        projected = (2 * mixer.input_size for mixer in layer.mixers)
        width = max(width, 3 * mlp_width(layer), *projected)
    return (
        num_tokens * (4 * spec.hidden_size + width) * itemsize
        + 3 * num_scored * spec.vocab_size * 4
    )


class PlannedTimes:
    """How long steps take."""

    def __init__(self, spec: ModelSpec, device: PlannedDevice, form: Form) -> None:
        self._spec, self._device, self._form = spec, device, form
        self._itemsize = form.itemsize(spec)
        self._rates = device.rates_for(form.format, form.dtype)
        self._shares = device.shares_for(form.format)

    def step(self, rows: int, context: int) -> float:
        """One token for each of so many answers."""
        spec, shares = self._spec, self._shares
        row = shares.row_seconds * rows * spec.hidden_size / 1024
        layer = shares.layer_seconds + shares.input_seconds * layer_inputs(spec) / 1024 + row
        seconds = self._rates.seconds(self._step_work(rows, context)) / shares.decode
        return seconds + spec.num_layers * layer + self._gathering(rows, rows)

    def prompt(self, *lengths: int) -> float:
        """Prompts of these lengths."""
        spec, shares = self._spec, self._shares
        work = prompt_work(spec, lengths, self._itemsize) / self._form.ranks
        base, more = shares.token_seconds
        token = spec.num_layers * (base + more * spec.hidden_size / 1024)
        return (
            self._rates.seconds(work) / shares.prompt
            + sum(lengths) * token
            + self._gathering(sum(lengths), len(lengths))
        )

    def bound(self, rows: int, context: int) -> str:
        work = self._step_work(rows, context)
        rates = self._rates
        reads, multiplies = work.bytes_read / rates.read_bandwidth, work.flops / rates.flops
        what = "bytes" if reads >= multiplies else "products"
        share = max(reads, multiplies) / self.step(rows, context)
        return f"{what} ({share:.0%} of a step)"

    def _step_work(self, rows: int, context: int) -> Work:
        work = decode_work(
            self._spec, [context] * rows, self._itemsize, self._form.key_dtype.itemsize
        )
        return work / self._form.ranks

    def _gathering(self, rows: int, num_scored: int) -> float:
        link = self._device.link
        times, received = gathered(
            self._spec, rows, num_scored, self._form.ranks, self._form.dtype.itemsize
        )
        return times * link.latency + received / link.bandwidth


@dataclass(frozen=True, slots=True)
class Serving:
    """What a rate of requests comes to."""

    is_possible: bool
    at_once: float
    """Requests in the engine, on average."""
    ttft: float
    """About: its own prompt, those of others that are in the way, and half a step."""
    per_token: float
    utilisation: float
    """Of the engine's time, by prompts alone."""
    most: float
    """Requests a second it could take."""


def serve(
    model: PlannedModel,
    device: PlannedDevice,
    found: Estimate,
    load: ExpectedLoad,
    num_devices: int,
) -> Serving:
    """With the rate spread over the devices, each with the whole model (or groups of them, each of
    which has it).
    """
    assert load.rate is not None
    times = PlannedTimes(model.spec, device, found.form)
    rate = load.rate / num_devices
    context = load.input_tokens + load.output_tokens // 2
    most = found.tokens_per_second / load.output_tokens * num_devices
    busy = rate * found.prompt_seconds
    at_once = 1.0
    for _ in range(200):
        if busy >= 1:
            break
        step = times.step(max(1, math.ceil(at_once)), context) / (1 - busy)
        latency = found.prompt_seconds + load.output_tokens * step
        at_once = min(0.5 * at_once + 0.5 * rate * latency, 10.0 * found.at_once)
    possible = busy < 1 and at_once <= found.at_once and load.rate <= most
    step = times.step(max(1, math.ceil(at_once)), context) / max(1 - busy, 1e-3)
    waiting = busy / max(1 - busy, 1e-3) * found.prompt_seconds / 2
    return Serving(possible, at_once, found.prompt_seconds + waiting + step / 2, step, busy, most)
