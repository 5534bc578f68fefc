"""How long an engine takes to replace all its weights with tensors on its own device.

    python -m quire.tools.bench.engine.weight_updates smollm2 --dtype float32
    python -m quire.tools.bench.engine.weight_updates --shape qwen3-8b --given bfloat16

A model from files, or random weights of a true shape. Two sets of random tensors, named as in
safetensors, replace the weights in turn: a figure is the time from the call of `update_weights` to
the device's being done with it. After each update the logprobs of a text are computed: they are
those of this set's first update, bit for bit, and not those of the other set.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from quire.assemble import Engine, assemble
from quire.backends.select import device_of, pick_device, select_kernels
from quire.config import EngineConfig
from quire.engine import make_requests
from quire.llm import LLM
from quire.models.names import huggingface_pieces
from quire.models.spec import ModelSpec
from quire.runner.dtypes import pick_dtype
from quire.sampling_params import SamplingParams
from quire.tools.bench.machine import report_facts, this_command
from quire.tools.bench.random_engine import random_decoder
from quire.tools.bench.report import Bytes, Report, Table
from quire.tools.bench.shapes import CONFIGS, spec_of
from quire.tools.bench.spread import Spread

_MAX_MODEL_LEN = 256
_CACHE = "256MiB"
_TEXT = tuple(range(10, 42))


@dataclass(slots=True)
class Updates:
    """What repeated updates took, in seconds."""

    prepared: list[float] = field(default_factory=list)
    """Checked, converted to the model's dtype, quantised, and put together as the model has them."""
    replaced: list[float] = field(default_factory=list)
    """Packed and put where the old ones lie."""


def random_tensors(
    spec: ModelSpec, dtype: torch.dtype, device: torch.device, seed: int
) -> dict[str, Tensor]:
    """All of a model's, by the names in safetensors."""
    generator = torch.Generator(device).manual_seed(seed)
    parameters = spec.parameters()
    found: dict[str, Tensor] = {}
    for piece in huggingface_pieces(spec, ()):
        made = torch.empty(piece.shape(parameters[piece.parameter]), dtype=dtype, device=device)
        found[piece.name] = made.normal_(std=0.02, generator=generator)
    return found


def logprobs_of(engine: Engine) -> tuple[float, ...]:
    """Of the text, by the present weights."""
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    (request,) = make_requests(f"score-{engine.weights_version}", _TEXT, params, seed=0)
    engine.core.add_request(request, time.monotonic())
    found: dict[int, float] = {}
    while engine.core.has_work:
        for update in engine.core.step(time.monotonic()):
            if update.error is not None:
                raise RuntimeError(update.error)
            if update.prompt_logprobs is not None:
                start, logprobs = update.prompt_logprobs
                found |= {start + i: one.logprob for i, one in enumerate(logprobs)}
    return tuple(found[i] for i in sorted(found))


def measure(engine: Engine, given: torch.dtype, repeats: int) -> Updates:
    """The first update with each set is not counted: memory is asked for then."""
    device = device_of(engine.decoder.device)
    sets = [random_tensors(engine.spec, given, engine.decoder.device, seed) for seed in (1, 2)]
    expected: dict[int, tuple[float, ...]] = {}
    updates = Updates()
    for turn in range(repeats + len(sets)):
        number = turn % len(sets)
        device.synchronize()
        begin = time.perf_counter()
        weights = engine.new_weights(sets[number].items())
        device.synchronize()
        middle = time.perf_counter()
        engine.update_weights(weights)
        device.synchronize()
        end = time.perf_counter()
        del weights
        if turn >= len(sets):
            updates.prepared.append(middle - begin)
            updates.replaced.append(end - middle)
        found = logprobs_of(engine)
        if expected.setdefault(number, found) != found:
            raise RuntimeError("an update gave other logprobs than the same weights did before")
    if expected[0] == expected[1]:
        raise RuntimeError("other weights gave the same logprobs")
    return updates


@contextmanager
def opened(options: argparse.Namespace) -> Iterator[Engine]:
    if options.shape is None:
        with LLM(
            options.model,
            device=options.device,
            dtype=options.dtype,
            quantization=options.quantization,
            kv_cache_memory=_CACHE,
            max_model_len=_MAX_MODEL_LEN,
        ) as llm:
            yield llm.engine
        return
    device = pick_device(options.device)
    dtype = pick_dtype(options.dtype, device)
    place = device.torch_device
    kernels = select_kernels(place, dtype, "auto")
    decoder = random_decoder(
        spec_of(options.shape), kernels, dtype, place, max_position=_MAX_MODEL_LEN
    )
    config = EngineConfig(
        device=str(place),
        dtype=str(dtype).removeprefix("torch."),
        kv_cache_memory=_CACHE,
        max_model_len=_MAX_MODEL_LEN,
    )
    yield assemble(decoder, config, name=options.shape)


def report(options: argparse.Namespace) -> Report:
    with opened(options) as engine:
        place = engine.decoder.device
        facts = report_facts(place, this_command())
        given = getattr(torch, options.given)
        updates = measure(engine, given, options.repeats)
        times = [
            before + after for before, after in zip(updates.prepared, updates.replaced, strict=True)
        ]
        count = engine.spec.num_parameters
        row = (
            Spread.of(times),
            Spread.of(updates.prepared),
            Spread.of(updates.replaced),
            Bytes(count * given.itemsize),
        )
        note = (
            "The median of all updates after the first with each set, then the lowest and highest."
        )
        columns = ("an update", "prepared", "replaced", "given")
        table = Table("Updates of all weights", note, columns, (row,))
        return Report(table.title, facts | {"engine": engine.description}, (table,), {})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("model", nargs="?", default="smollm2")
    which.add_argument("--shape", choices=list(CONFIGS), help="random weights, instead of a model")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--dtype", default="auto", help="auto, bfloat16, float16 or float32")
    parser.add_argument("--quantization", default="none", help="of the model; not with --shape")
    parser.add_argument(
        "--given", default="float32", choices=("float32", "bfloat16"), help="the tensors' dtype"
    )
    parser.add_argument("--repeats", type=int, default=10, help="updates that are measured")
    options = parser.parse_args()
    if options.repeats < 1:
        parser.error("--repeats must be 1 or more")
    if options.shape is not None and options.quantization != "none":
        parser.error("--quantization needs a model's files: not with --shape")
    report(options).print()


if __name__ == "__main__":
    main()
