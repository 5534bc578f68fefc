"""An engine around random weights of a true shape, and a way to drive it that notes the time of
every step.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from quire.assemble import Engine, assemble
from quire.backends.select import pick_device, select_kernels
from quire.config import EngineConfig
from quire.engine import EngineCore, Request, make_requests
from quire.kernels.formats import FORMATS, Format
from quire.kernels.ops import Kernels
from quire.kernels.quantize import FP8, quantize, to_codes
from quire.kernels.weights import Weight
from quire.models.decoder import Decoder
from quire.models.spec import ModelSpec
from quire.process.gc_pauses import full_collections_put_off
from quire.runner.dtypes import pick_dtype
from quire.sampling_params import SamplingParams
from quire.tools.bench.gpu.ceiling import Itemsizes, Rates, measure_rates
from quire.tools.bench.shapes import CONFIGS, spec_of

MAX_MODEL_LEN = 4096


def random_decoder(
    spec: ModelSpec,
    kernels: Kernels,
    dtype: torch.dtype,
    device: torch.device,
    std: float = 0.02,
    seed: int = 0,
    max_position: int = MAX_MODEL_LEN,
    formats: Sequence[str] = (),
    expert_format: str | None = None,
) -> Decoder:
    """Random values drawn on the device itself: norms are 1, everything else is normal. With
    `formats`, the matrices between embedding and head are in these, in turn; with an
    `expert_format`, those of experts are in that.
    """
    generator = torch.Generator(device).manual_seed(seed)
    loaded: dict[str, Weight] = {}
    for name, parameter in spec.parameters().items():
        stored = torch.float32 if parameter.keep_float32 else dtype
        value = torch.empty(parameter.shape, dtype=stored, device=device)
        if "norm" in name.rpartition(".")[2]:
            value.fill_(1.0)
        else:
            value.normal_(std=std, generator=generator)
        loaded[name] = Weight.dense(value)
        is_matrix = (
            len(parameter.shape) > 1 and name not in ("embedding", "head") and "bias" not in name
        )
        if formats and is_matrix and "router" not in name:
            format, shape = FORMATS[formats[len(loaded) % len(formats)]], tuple(parameter.shape)
            if format.dtype is None:
                parts = quantized(format, value.view(-1, shape[-1]))
                loaded[name] = Weight.of(
                    format, shape, *(part.view(*shape[:-1], *part.shape[1:]) for part in parts)
                )
        if expert_format is not None and len(parameter.shape) == 3 and not name.endswith("_bias"):
            format, shape = FORMATS[expert_format], tuple(parameter.shape)
            parts = quantized(format, value.flatten(0, 1))
            loaded[name] = Weight.of(
                format, shape, *(part.view(*shape[:-1], *part.shape[1:]) for part in parts)
            )
    del value  # so that each goes as its packed one comes
    return Decoder(spec, kernels, loaded, dtype, min(max_position, spec.max_position))


def quantized(format: Format, numbers: Tensor) -> tuple[Tensor, ...]:
    """A part's tensors of numbers [out, in], in any format that a GPU computes with."""
    rows, size = numbers.shape
    if format.has_zeros:
        groups = numbers.float().view(rows, -1, format.group or size)
        low, high = groups.amin(-1), groups.amax(-1)
        # float16, as checkpoints have them
        scales = ((high - low) / 15).clamp_min(2.0**-14).half().float()
        zeros = (-low / scales).round().clamp_(0, 15)
        codes = (
            (groups / scales.unsqueeze(-1) + zeros.unsqueeze(-1))
            .round_()
            .clamp_(0, 15)
            .to(torch.uint8)
            .view(rows, -1)
        )
        shape = (rows, size // format.group) if format.group else (rows,)
        return (
            codes[:, ::2] | codes[:, 1::2] << 4,
            scales.view(shape),
            zeros.to(torch.uint8).view(shape),
        )
    if format.group:
        codes, scales = to_codes(FP8, numbers.view(rows, -1, format.group))
        return codes.view(rows, size), scales
    if format.name == "MXFP4":  # any codes, of 2**-8 in the mean: about as large as the numbers
        blocks = _random_blocks(format, numbers)
        blocks[:, 0] = 127 - 7
        return (blocks.view(rows, -1),)
    if format.codes is None and format.name != "Q4_0":  # any bits will do
        blocks = _random_blocks(format, numbers)
        # So that codes of 0 to 15 (times factors of 0 to 63) less the minimum are about as large as
        # the numbers.
        is_q4_1 = format.name == "Q4_1"
        unit = float(numbers.float().std()) / (4 if is_q4_1 else 128)
        for at, scale in zip(
            format.scales, (unit, (-7.5 if is_q4_1 else 7.5) * unit), strict=False
        ):
            drawn = torch.rand(len(blocks), 1, device=numbers.device).mul_(0.2).add_(0.9)
            drawn *= scale
            blocks[:, at : at + 2] = drawn.half().view(torch.uint8)
        return (blocks.view(rows, -1),)
    made = quantize(format, numbers)
    assert made is not None
    return made


def _random_blocks(format: Format, numbers: Tensor) -> Tensor:
    """Any bytes, as many as the numbers take."""
    shape = (numbers.numel() // format.num_elements, format.num_bytes)
    return torch.randint(0, 256, shape, device=numbers.device).to(torch.uint8)


@dataclass(frozen=True, slots=True)
class Machine:
    """An engine to measure, and what its device could do."""

    shape: str
    """With the formats that its weights have been given."""
    engine: Engine
    rates: Rates
    formats: Sequence[str] = ()
    expert_format: str | None = None

    @property
    def core(self) -> EngineCore:
        return self.engine.core

    @property
    def spec(self) -> ModelSpec:
        return self.engine.decoder.spec

    @property
    def itemsize(self) -> Itemsizes:
        """As stored: what a format's kernel makes of it may be larger."""
        plain = float(self.engine.decoder.dtype.itemsize)
        sizes = [itemsize_of(name) for name in self.formats]
        matrices = sum(sizes) / len(sizes) if sizes else plain
        experts = matrices if self.expert_format is None else itemsize_of(self.expert_format)
        return Itemsizes(plain, matrices, experts)


def itemsize_of(format: str) -> float:
    """Bytes of a number in a long row."""
    size = 4096
    return FORMATS[format].nbytes((1, size)) / size


def add_options(parser: argparse.ArgumentParser) -> None:
    """What all the GPU benchmarks take."""
    parser.add_argument("--shape", choices=list(CONFIGS), default="qwen3-0.6b")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--dtype", default="auto", help="auto, bfloat16, float16 or float32")
    parser.add_argument(
        "--formats",
        nargs="*",
        default=(),
        help="of the matrices, in turn: FP8, INT8, INT4_G128, Q4_K ...",
    )
    parser.add_argument(
        "--expert-format", help="of the matrices of experts: MXFP4 as gpt-oss has them, FP8 ..."
    )
    parser.add_argument("--kernels", default="auto", help="auto, or a backend by its name")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--max-batched-tokens", type=int, help="default: the engine's own choice")
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    parser.add_argument(
        "--depth", type=int, help="steps in flight; default: the engine's own choice"
    )
    parser.add_argument(
        "--repeats", type=int, default=2, help="runs, of which the best counts, as with the peers"
    )
    parser.add_argument(
        "--profile",
        action="store_true",
        help="one more run: time per kernel, time per part of a step",
    )
    parser.add_argument(
        "--profile-steps", type=int, default=64, help="how many steps the profile covers"
    )
    parser.add_argument("--json", metavar="FILE", help="write the figures there too")


def open_machine(options: argparse.Namespace) -> Machine:
    """Measures the device while its memory is free, then fills it with an engine. Prints what there
    is.
    """
    found = pick_device(options.device)
    device, dtype = found.torch_device, pick_dtype(options.dtype, found)
    rates = measure_rates(device, dtype)
    config = EngineConfig(
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
        kernels=options.kernels,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=options.max_num_seqs,
        max_batched_tokens=options.max_batched_tokens,
        cuda_graphs=not options.eager,
    )
    kernels = select_kernels(device, dtype, options.kernels)
    formats = {"formats": options.formats, "expert_format": options.expert_format}
    decoder = random_decoder(spec_of(options.shape), kernels, dtype, device, **formats)
    engine = assemble(decoder, config, name=options.shape)
    if options.depth is not None:
        engine.core.depth = options.depth
    print(engine.description)
    print(f"The device {rates} (measured now). Steps in flight: {engine.core.depth}.", flush=True)
    names = [*options.formats, *([] if options.expert_format is None else [options.expert_format])]
    machine = Machine(
        " ".join([options.shape, *names]), engine, rates, options.formats, options.expert_format
    )
    capture_graphs(machine.core)
    return machine


def random_prompts(count: int, length: int, seed: int) -> list[list[int]]:
    """Prompts of which no two share a beginning; another seed gives all others."""
    source = random.Random(seed)
    return [[source.randint(0, 10_000) for _ in range(length)] for _ in range(count)]


def requests_for(
    prompts: Sequence[Sequence[int]],
    max_tokens: Sequence[int],
    prefix: str,
    temperature: float = 0.6,
) -> list[Request]:
    """One request per prompt, which runs to its full number of tokens."""
    return [
        request
        for i, (prompt, new) in enumerate(zip(prompts, max_tokens, strict=True))
        for request in make_requests(
            f"{prefix}-{i}",
            prompt,
            SamplingParams(temperature=temperature, max_tokens=new, ignore_eos=True),
            seed=i,
        )
    ]


@dataclass(slots=True)
class DrivenRun:
    """What driving the engine gave."""

    began: float
    times: list[float] = field(default_factory=list)
    """When each step returned."""
    new_tokens: list[int] = field(default_factory=list)
    """How many tokens it brought."""

    @property
    def seconds(self) -> float:
        return self.times[-1] - self.began


def drive(
    core: EngineCore, requests: Sequence[Request], before_step: Callable[[int], None] | None = None
) -> DrivenRun:
    """Runs the requests to their end. A request that fails ends the benchmark.

    `before_step` is called with the number of steps so far.
    """
    clock = time.perf_counter
    run = DrivenRun(clock())
    for request in requests:
        core.add_request(request, run.began)
    with full_collections_put_off():  # as `LLM.generate` does
        while core.has_work:
            if before_step is not None:
                before_step(len(run.times))
            updates = core.step(clock())
            run.times.append(clock())
            run.new_tokens.append(sum(len(update.new_token_ids) for update in updates))
            for update in updates:
                if update.error is not None:
                    raise RuntimeError(f"request {update.request_id} failed: {update.error}")
    expected = sum(request.params.max_tokens or 0 for request in requests)
    if sum(run.new_tokens) != expected:
        raise RuntimeError(f"{sum(run.new_tokens)} tokens came back, {expected} were asked for")
    return run


def capture_graphs(core: EngineCore) -> None:
    """A request before anything is measured, as the peers' benchmarks send one. It is long enough
    for the engine to capture its decode graphs, one after each step.
    """
    steps = 64 + core.scheduler.config.max_num_seqs // 16
    drive(core, requests_for(random_prompts(1, 16, seed=-1), [steps], "warm-up"))
