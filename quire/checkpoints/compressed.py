"""The layouts of quantised weights in safetensors files that other engines know too: two of compressed-tensors, which
Quire reads and writes, and that of MXFP4, which it reads.

int-quantized: `NAME` int8 [..., out, in] and `NAME_scale` [..., out, 1]: our INT8. pack-quantized in groups of 32:
`NAME_packed` int32 [..., out, in / 8] of eight codes each, the first in the lowest bits, and `NAME_scale`
[..., out, in / 32]; a code stands for (code - 8) * scale, as in Q4_0, which has the same codes in another order.
mxfp4: `NAME_blocks` uint8 [..., out, in / 32, 16] of two codes each and `NAME_scales` uint8 [..., out, in / 32], the
exponents of powers of two; in the MXFP4 of GGUF files these stand before each block, whose codes have another order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quire.checkpoints.fields import Fields
from quire.checkpoints.files import quote
from quire.errors import UnsupportedModelError
from quire.kernels.formats import FORMATS, Format

METHOD = "compressed-tensors"
MXFP4 = "mxfp4"
GROUP = FORMATS["Q4_0"].num_elements
_WEIGHTS = {
    "int-quantized": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "group_size": None},
    "pack-quantized": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP},
}
"""What config.json must say of the weights, by the layout's name."""
LAYOUTS = {"INT8": "int-quantized", "Q4_0": "pack-quantized"}
_READABLE = (
    f"{METHOD} with int8 weights scaled per channel (int-quantized) or int4 weights in symmetric groups of {GROUP} "
    "(pack-quantized), and mxfp4"
)


def read_layout(config: Fields) -> str | None:
    """The layout of a model's weights by its config.json, None where they are plain numbers. Other ways of quantising
    are an UnsupportedModelError."""
    if "quantization_config" not in config:
        return None
    found = config.part("quantization_config")
    if found.raw("quant_method") == MXFP4:
        return MXFP4
    method, layout = found.string("quant_method", "unknown"), found.string("format", "unknown")
    wanted, groups = _WEIGHTS.get(layout, {}), found.part("config_groups")
    problem = f"by {quote(method)}" if method != METHOD else "" if wanted else f"by {METHOD} as {quote(layout)}"
    for name in groups.names():
        weights = groups.part(name).part("weights")
        differing = [f"{key} {quote(weights.raw(key))}" for key, value in wanted.items() if weights.raw(key) != value]
        if differing:
            problem = f"by {METHOD} as {layout}, with {', '.join(differing)}"
    if problem:
        raise UnsupportedModelError(
            f"{config.file}: its weights are quantised {problem}, which Quire does not read. It reads {_READABLE}: use "
            'such a version, a GGUF file, or the unquantised model with quantization="int8" or "int4".'
        )
    return layout


def quantization_config(format: Format, ignored: list[str]) -> dict[str, Any]:
    """What config.json says of weights in INT8 or Q4_0; `ignored` are the modules that stay plain numbers."""
    layout = LAYOUTS[format.name]
    tokens = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    group = {
        "targets": ["Linear", "Embedding"],
        "weights": _WEIGHTS[layout] | {"dynamic": False},
        "input_activations": tokens if format.has_row_scales else None,
    }
    return {
        "quant_method": METHOD,
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ignored,
    }


def to_compressed(*tensors: Tensor) -> dict[str, Tensor]:
    """A part's tensors as they are stored, by what is appended to the weight's name."""
    if len(tensors) == 2:
        return {"": tensors[0], "_scale": tensors[1].unsqueeze(-1)}
    stored = tensors[0]
    blocks = stored.view(*stored.shape[:-1], -1, FORMATS["Q4_0"].num_bytes)
    codes = torch.cat((blocks[..., 2:] & 15, blocks[..., 2:] >> 4), -1).flatten(-2)
    shape = torch.tensor(codes.shape)
    return {
        "_packed": (codes[..., ::2] | codes[..., 1::2] << 4).view(torch.int32),
        "_scale": blocks[..., :2].contiguous().view(torch.float16).squeeze(-1),
        "_shape": shape,
    }


def from_compressed(
    format: Format, shape: tuple[int, ...], data: Tensor, scales: Tensor, where: str
) -> tuple[Tensor, ...]:
    """A part's tensors from the bytes of whole rows that make `shape` and the scales that belong to them; `where` names
    the file and the tensor."""
    if format.has_row_scales:
        return data.view(torch.int8).view(shape), scales.float().view(shape[:-1])
    pairs = data.view(-1, GROUP // 2)
    codes = torch.stack((pairs & 15, pairs >> 4), -1).flatten(1)
    packed = codes[:, : GROUP // 2] | codes[:, GROUP // 2 :] << 4
    if scales.dtype == torch.uint8:
        return (torch.cat((scales.view(-1, 1), packed), 1).view(*shape[:-1], -1),)
    halves = scales.half().view(-1, 1)
    if not torch.equal(halves.float(), scales.float().view(-1, 1)):
        raise UnsupportedModelError(f"{where}: its int4 scales ({scales.dtype}) are not ones that float16 can hold")
    return (torch.cat((halves.view(torch.uint8), packed), 1).view(*shape[:-1], -1),)
