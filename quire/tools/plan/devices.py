"""What devices can do: memory, and how fast they read and multiply."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from time import perf_counter

import torch

from quire.backends.select import pick_device, select_kernels
from quire.errors import InvalidRequestError
from quire.kernels.formats import Format
from quire.kernels.quantize import INT8, Q4_0, quantize
from quire.kernels.weights import Weight
from quire.models.weight_plan import QUANTIZED
from quire.tools.plan.work import Rates

_READ_SHARE, _MULTIPLY_SHARE = 4.5 / 4.8, 790 / 989
"""What an H200 was measured to reach of its data sheet: taken for cards that nobody has measured."""
_RESERVED = 2**30
"""Of a GPU's memory: its driver's and torch's own."""
_OUT, _IN, _COPIES = 4096, 1024, 8
"""Of the matrices that are measured on a CPU."""
_TRIES = 12
"""The best counts: beside other work most are disturbed."""


@dataclass(frozen=True, slots=True)
class Shares:
    """What our steps take beyond the bound, as measured on a card: seconds = bound / share + what
    each layer costs.
    """

    decode: float = 1.0
    prompt: float = 1.0
    layer_seconds: float = 0.0
    """Of each layer in a step of answers: kernels that wait for each other."""
    row_seconds: float = 0.0
    """Of each layer, row of a step of answers and 1024 of the hidden size: activations."""
    token_seconds: tuple[float, float] = (0.0, 0.0)
    """Of each layer and token of a prompt; and of each 1024 of the hidden size besides."""
    input_seconds: float = 0.0
    """Of each layer in a step of answers, and 1024 inputs of its matrices: codes that are expanded
    one after the other.
    """


H200_SHARES = Shares(0.9, 0.85, 22e-6, 0.12e-6, (30e-9, 7e-9))
"""Fitted to the decode and prompt lines of the table in docs/performance.md; its throughput lines
were not used.
"""
_FP8 = Shares(0.9, 1.43, 22e-6, 0.05e-6, (30e-9, 7e-9))
_CODES = Shares(0.9, 0.82, 22e-6, 0.11e-6, (30e-9, 7e-9), 1.2e-6)
"""Fitted to the decode and prefill lines of Qwen3-8B in FP8 and INT4 there. FP8 multiplies faster
than bfloat16, whose products a share is one of.
"""
_INT8 = replace(_FP8, prompt=H200_SHARES.prompt)
"""And of FP8 in groups: the same kernels for few rows, but prompts are not by cuBLAS and were not
measured.
"""


@dataclass(frozen=True, slots=True)
class Link:
    """How devices of one machine reach each other."""

    name: str
    bandwidth: float
    """Bytes a second, in each direction."""
    latency: float
    """Seconds of a gather, however little is gathered."""


NVLINK, PCIE = Link("NVLink", 450e9, 5e-6), Link("PCIe 4.0", 25e9, 10e-6)


@dataclass(frozen=True, slots=True)
class PlannedDevice:
    """One device, as the estimates see it; `quire.kernels.device.Device` is one that is there."""

    name: str
    memory: int
    """Bytes that weights, activations and cache can take."""
    rates: Rates | None
    """None on a CPU, where they depend on the format of the weights: `rates_for` measures them."""
    shares: Shares
    origin: str
    """Where these figures are from."""
    link: Link = PCIE
    capability: tuple[int, int] | None = None
    """Of a GPU, as CUDA counts them: which formats there are kernels for."""

    @property
    def is_gpu(self) -> bool:
        return self.capability is not None

    @property
    def is_measured(self) -> bool:
        """Whether times are estimates; else they are bounds."""
        return self.shares != Shares()

    def shares_for(self, format: Format) -> Shares:
        """With weights in a format."""
        if not self.is_measured or format.dtype is not None:
            return self.shares
        if format.codes in (torch.float8_e4m3fn, torch.int8):
            return _INT8 if format.codes == torch.int8 or format.group else _FP8
        return _CODES

    def rates_for(self, format: Format, dtype: torch.dtype) -> Rates:
        """With weights in a format. On a CPU they are measured, with one of about that size that
        can be made here.
        """
        if self.rates is not None:
            return self.rates
        if format.dtype is None and format not in QUANTIZED.values():
            format = Q4_0 if format.nbytes((256, 256)) < 0.85 * 256 * 256 else INT8
        return measure_cpu(format, dtype)


_HOPPER, _ADA = (9, 0), (8, 9)
_SHEETS: dict[str, tuple[str, float, float, float, Link, tuple[int, int]]] = {
    "h100": ("NVIDIA H100 SXM 80 GB", 80e9, 3.35e12, 989e12, NVLINK, _HOPPER),
    "b200": ("NVIDIA B200", 180e9, 8.0e12, 2250e12, NVLINK, (10, 0)),
    "a100": ("NVIDIA A100 80 GB", 80e9, 2.04e12, 312e12, NVLINK, (8, 0)),
    "l40s": ("NVIDIA L40S", 48e9, 0.864e12, 362e12, PCIE, _ADA),
    "l4": ("NVIDIA L4", 24e9, 0.3e12, 121e12, PCIE, _ADA),
    "rtx4090": ("NVIDIA RTX 4090", 24e9, 1.008e12, 165e12, PCIE, _ADA),
    "rtx3090": ("NVIDIA RTX 3090", 24e9, 0.936e12, 71e12, PCIE, (8, 6)),
}
"""Name, bytes, bytes read a second and bfloat16 products a second, as data sheets have them; how
several are joined; compute capability.
"""


def named_device(name: str) -> PlannedDevice:
    """A card by its short name."""
    key = name.lower().replace(" ", "").replace("-", "")
    if key == "h200":
        memory = int(139.8 * 2**30) - _RESERVED
        rates = Rates(4.5e12, 790e12)
        return PlannedDevice("NVIDIA H200", memory, rates, H200_SHARES, "measured", NVLINK, _HOPPER)
    if key not in _SHEETS:
        raise InvalidRequestError(
            "--gpu", f"must be one of h200, {', '.join(_SHEETS)}, not {name!r}"
        )
    title, size, read, multiply, link, capability = _SHEETS[key]
    rates = Rates(read * _READ_SHARE, multiply * _MULTIPLY_SHARE)
    origin = "data sheet, with the shares that were measured on an H200"
    return PlannedDevice(title, int(size) - _RESERVED, rates, H200_SHARES, origin, link, capability)


def this_device() -> PlannedDevice:
    """The device an engine would take here."""
    device = pick_device("auto")
    if device.is_gpu:
        title = device.name
        for short in ("h200", *_SHEETS):
            if short.removeprefix("rtx") in title.lower().replace(" ", ""):
                known = named_device(short)
                origin = f"free memory now; {known.origin}"
                return replace(known, name=title, memory=device.free_memory(), origin=origin)
        raise InvalidRequestError(
            "--gpu", f"{title} is not known here: name one that is like it, such as --gpu a100"
        )
    name = f"this CPU ({torch.get_num_threads()} threads)"
    return PlannedDevice(
        name, device.free_memory(), None, Shares(), "our matrix products, measured just now"
    )


@cache
def measure_cpu(format: Format, dtype: torch.dtype) -> Rates:
    """What products of our own kernels reach here with weights in a format: one row reads them,
    many multiply. The best of a few tries each; takes about a second.
    """
    kernels = select_kernels(torch.device("cpu"), dtype)
    numbers = torch.randn(_OUT, _IN)
    stored = (numbers.to(format.dtype),) if format.dtype is not None else quantize(format, numbers)
    assert stored is not None
    # Several, so that they are read from memory and not from a cache.
    weights = [
        kernels.pack(Weight.of(format, (_OUT, _IN), *(tensor.clone() for tensor in stored)))
        for _ in range(_COPIES)
    ]
    size = format.nbytes((_OUT, _IN))
    row, rows = torch.randn(1, _IN).to(dtype), torch.randn(256, _IN).to(dtype)
    reading = min(
        _seconds(lambda: [kernels.linear(row, weight) for weight in weights]) for _ in range(_TRIES)
    )
    multiplying = min(_seconds(lambda: kernels.linear(rows, weights[0])) for _ in range(_TRIES))
    return Rates(_COPIES * size / reading, 2.0 * len(rows) * _OUT * _IN / multiplying)


def _seconds(run: Callable[[], object]) -> float:
    began = perf_counter()
    run()
    return perf_counter() - began
