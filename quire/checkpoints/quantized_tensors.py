"""Which tensors of a safetensors checkpoint are one quantised weight: its data, scales and zero
points, under the name that the weight has where it is not quantised.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from quire.checkpoints.cache_scales import is_cache_scale
from quire.checkpoints.checkpoint import TensorInfo, tensor_error
from quire.checkpoints.compressed import GROUP
from quire.checkpoints.files import quote
from quire.checkpoints.packed_weights import fp8_scale_shapes
from quire.checkpoints.quantization_config import BLOCK, Layout
from quire.kernels.formats import PLAIN

_NUMBERS = tuple(format.name for format in PLAIN.values())
_UNUSED = (".input_scale", ".g_idx", ".weight_shape")
"""Inputs are scaled row by row as they come. That a g_idx says nothing is what desc_act is for,
which is refused.
"""


def joined(tensors: Mapping[str, TensorInfo], layout: Layout) -> dict[str, TensorInfo]:
    """All weights, each as one; the scales of the cache are none of them."""
    found: dict[str, TensorInfo] = {}
    used: set[str] = {name for name in tensors if name.endswith(_UNUSED) or is_cache_scale(name)}
    for stored, info in tensors.items():
        weight = _weight(tensors, stored, info, layout)
        if weight is not None:
            found[weight.name] = weight
            used |= {
                stored,
                *(part.name for part in (weight.scales, weight.zeros) if part is not None),
            }
            used.add(f"{weight.name}_shape")
    return found | {name: info for name, info in tensors.items() if name not in used}


def _weight(
    tensors: Mapping[str, TensorInfo], stored: str, info: TensorInfo, layout: Layout
) -> TensorInfo | None:
    """What a tensor holds the data of; None where it is something else."""
    if layout.name == "mxfp4" and stored.endswith("_blocks") and info.dtype == "U8":
        return _mxfp4(tensors, stored, info)
    if layout.name == "fp8" and info.dtype == "F8_E4M3":
        return _fp8(tensors, stored, info)
    if layout.name in ("awq", "gptq") and stored.endswith(".qweight"):
        return _transposed(tensors, stored.removesuffix(".qweight"), info, layout)
    if layout.name == "int-quantized" and info.dtype == "I8":
        scales = _scales(tensors, f"{stored}_scale", info, [(*info.shape[:-1], 1)])
        return replace(info, dtype="INT8", scales=scales)
    if layout.name == "pack-quantized" and stored.endswith("_packed") and info.dtype == "I32":
        return _packed(tensors, stored.removesuffix("_packed"), info, layout)
    return None


def _mxfp4(tensors: Mapping[str, TensorInfo], stored: str, info: TensorInfo) -> TensorInfo:
    name, scales = (
        stored.removesuffix("_blocks"),
        tensors.get(stored.removesuffix("_blocks") + "_scales"),
    )
    *rows, groups, half = info.shape
    if (
        scales is None
        or scales.dtype != "U8"
        or half != GROUP // 2
        or scales.shape != (*rows, groups)
    ):
        raise tensor_error(
            info.file, stored, "blocks of 16 bytes, and as many scales", f"{list(info.shape)}"
        )
    return replace(info, name=name, shape=(*rows, groups * GROUP), dtype="MXFP4", scales=scales)


def _fp8(tensors: Mapping[str, TensorInfo], stored: str, info: TensorInfo) -> TensorInfo:
    if len(info.shape) != 2:
        raise tensor_error(
            info.file, stored, "FP8 numbers in two dimensions", f"shape {list(info.shape)}"
        )
    name = f"{stored}_scale_inv" if f"{stored}_scale_inv" in tensors else f"{stored}_scale"
    shapes = fp8_scale_shapes(info.shape)
    scales = _scales(tensors, name, info, shapes)
    is_blocks = scales.shape not in shapes[:-1]
    if is_blocks and info.shape[1] % BLOCK:
        raise tensor_error(info.file, stored, f"a multiple of {BLOCK} inputs", str(info.shape[1]))
    return replace(
        info, dtype="FP8_G128" if is_blocks else "FP8", scales=scales, layout=Layout("fp8")
    )


def _transposed(
    tensors: Mapping[str, TensorInfo], module: str, info: TensorInfo, layout: Layout
) -> TensorInfo:
    if info.dtype != "I32" or len(info.shape) != 2:
        raise tensor_error(
            info.file,
            info.name,
            "I32 in two dimensions",
            f"{info.dtype} of shape {list(info.shape)}",
        )
    first, second = info.shape
    inner, out = (first, 8 * second) if layout.name == "awq" else (8 * first, second)
    groups = _num_groups(info, inner, layout)
    scales = _scales(tensors, f"{module}.scales", info, [(groups, out)])
    zeros = _zeros(tensors, f"{module}.qzeros", info, (groups, out // 8))
    return replace(
        info,
        name=f"{module}.weight",
        shape=(out, inner),
        dtype=format_of(layout),
        scales=scales,
        zeros=zeros,
        layout=layout,
    )


def _packed(
    tensors: Mapping[str, TensorInfo], name: str, info: TensorInfo, layout: Layout
) -> TensorInfo:
    *rows, size = info.shape
    shape = (*rows, 8 * size)
    groups = _num_groups(info, shape[-1], layout)
    scales = _scales(tensors, f"{name}_scale", info, [(*rows, groups)])
    if f"{name}_g_idx" in tensors:
        raise tensor_error(
            info.file, f"{name}_g_idx", "inputs in their order", "another order (actorder)"
        )
    if format_of(layout) == "Q4_0":
        return replace(info, name=name, shape=shape, dtype="Q4_0", scales=scales)
    if len(shape) != 2:
        raise tensor_error(info.file, info.name, "two dimensions", f"shape {list(info.shape)}")
    wanted = (-(-shape[0] // 8), groups)
    zeros = None if layout.symmetric else _zeros(tensors, f"{name}_zero_point", info, wanted)
    return replace(
        info,
        name=name,
        shape=shape,
        dtype=format_of(layout),
        scales=scales,
        zeros=zeros,
        layout=layout,
    )


def format_of(layout: Layout, in_blocks: bool = False) -> str:
    """The format that weights of a layout are in, where the config.json alone is there: FP8 has
    scales of blocks or not, which the files tell by their shapes.
    """
    known = {"mxfp4": "MXFP4", "int-quantized": "INT8", "fp8": "FP8_G128" if in_blocks else "FP8"}
    if layout.name in known:
        return known[layout.name]
    is_q4_0 = layout.name == "pack-quantized" and layout.group == GROUP and layout.symmetric
    return "Q4_0" if is_q4_0 else f"INT4_G{layout.group}" if layout.group else "INT4"


def _num_groups(info: TensorInfo, inner: int, layout: Layout) -> int:
    if inner % (layout.group or 1):
        raise tensor_error(
            info.file, info.name, f"whole groups of {layout.group} inputs", f"{inner} inputs"
        )
    return inner // layout.group if layout.group else 1


def _scales(
    tensors: Mapping[str, TensorInfo], name: str, data: TensorInfo, shapes: list[tuple[int, ...]]
) -> TensorInfo:
    found = tensors.get(name)
    if (
        found is None
        or found.dtype not in _NUMBERS
        or found.shape not in shapes
        or len(data.shape) < 2
    ):
        got = "none" if found is None else f"{found.dtype} of shape {list(found.shape)}"
        expected = " or ".join(str(list(shape)) for shape in shapes)
        raise tensor_error(
            data.file, name, f"scales of shape {expected} for {quote(data.name)}", got
        )
    return found


def _zeros(
    tensors: Mapping[str, TensorInfo], name: str, data: TensorInfo, shape: tuple[int, ...]
) -> TensorInfo:
    found = tensors.get(name)
    if found is None or found.dtype != "I32" or found.shape != shape:
        got = "none" if found is None else f"{found.dtype} of shape {list(found.shape)}"
        raise tensor_error(
            data.file, name, f"zero points, I32 of shape {list(shape)}, for {quote(data.name)}", got
        )
    return found
