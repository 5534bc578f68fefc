"""In which formats an engine can have a model's weights on a device, as the loader itself would
choose them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from quire.backends.select import pick_device, select_kernels
from quire.backends.triton.device import FP8_CACHE_FROM
from quire.checkpoints.quantization_config import FP8_CACHE
from quire.errors import DeviceError
from quire.kernels.formats import FORMATS, PLAIN, Format
from quire.models.spec import ModelSpec
from quire.models.weight_plan import QUANTIZED, WeightPlan, plan_weights
from quire.runner.dtypes import pick_dtype
from quire.tools.plan.cards import CardKernels
from quire.tools.plan.devices import PlannedDevice
from quire.tools.plan.model import PlannedModel

_ON_A_CARD = ("fp8", "int8", "int4")
_ON_A_CPU = ("int8", "int4")


@dataclass(frozen=True, slots=True)
class Form:
    """The model in one format."""

    name: str
    option: str
    """How to ask for it."""
    weight_bytes: int
    format: Format
    """Of most of its bytes."""
    dtype: torch.dtype
    key_dtype: torch.dtype
    keys_at_once: int
    """Of the kernels for it (see `Kernels`)."""
    ranks: int = 1
    """Devices that the model is divided among; `weight_bytes` are those of all of them."""

    def itemsize(self, spec: ModelSpec) -> float:
        return self.weight_bytes / spec.num_parameters


def forms_of(model: PlannedModel, device: PlannedDevice, ranks: int = 1) -> Iterator[Form]:
    """The formats that the engine offers on such a device, the usual one first; on a CPU they all
    fit one device.
    """
    # Nothing is loaded: a planned card is a place where no memory is.
    place, capability = torch.device("meta" if device.is_gpu else "cpu"), device.capability
    keys = torch.float8_e4m3fn if _has_fp8_cache(model, capability) else None
    names = set()
    for dtype, quantization, option in _choices(model, device):
        kernels = (
            select_kernels(place, dtype) if capability is None else CardKernels(capability, dtype)
        )
        try:
            plan = plan_weights(model.files, kernels, dtype, place, quantization)
        except DeviceError:  # no kernels for it
            continue
        name = _name(model, plan)
        # where nothing can stay as it is stored, all of it is expanded anyway
        if name not in names:
            names.add(name)
            yield Form(
                name,
                option,
                plan.nbytes,
                _main_format(plan),
                dtype,
                keys or dtype,
                kernels.keys_at_once,
                ranks,
            )


def _choices(model: PlannedModel, device: PlannedDevice) -> Iterator[tuple[torch.dtype, str, str]]:
    """What can be asked for: a dtype, a quantization, and in words."""
    is_card, is_quantized = device.capability is not None, model.is_quantized
    usual, quick = (
        torch.bfloat16 if is_card else pick_dtype("auto", pick_device("cpu"), quantized)
        for quantized in (is_quantized, True)
    )
    yield usual, "auto", "quantization=auto" if is_quantized else "dtype=auto"
    if is_quantized:
        yield usual, "none", "quantization=none"
    if not is_card:
        other = torch.bfloat16 if usual == torch.float32 else torch.float32
        added = "quantization=none, " if is_quantized else ""
        yield other, "none", f"{added}dtype={_spelled(other)}"
    for name in () if is_quantized else _ON_A_CARD if is_card else _ON_A_CPU:
        yield quick, name, f"quantization={name}"


def _has_fp8_cache(model: PlannedModel, capability: tuple[int, int] | None) -> bool:
    """As kv_cache_dtype="auto" decides it."""
    return (
        capability is not None
        and capability >= FP8_CACHE_FROM
        and model.spec.cache.format == FP8_CACHE
    )


def _name(model: PlannedModel, plan: WeightPlan) -> str:
    blocks = _blocks(plan)
    if plan.quantization in QUANTIZED:
        return plan.quantization
    if blocks:
        return f"as stored ({', '.join(blocks)})"
    return f"{_spelled(plan.dtype)}{' (expanded)' if model.is_quantized else ''}"


def _spelled(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _blocks(plan: WeightPlan) -> list[str]:
    """The formats, other than plain numbers, that weights are computed with in."""
    return [name for name, _ in _sizes(plan).most_common() if FORMATS[name].dtype is None]


def _main_format(plan: WeightPlan) -> Format:
    """What takes most of the products' time: the format of most numbers that are not plain, if any
    are.
    """
    blocks = _blocks(plan)
    return FORMATS[blocks[0]] if blocks else PLAIN[plan.dtype]


def _sizes(plan: WeightPlan) -> Counter[str]:
    sizes: Counter[str] = Counter()
    for name in plan.formats:
        for format, shape in plan.stored(name):
            sizes[format.name] += format.nbytes(shape)
    return sizes
