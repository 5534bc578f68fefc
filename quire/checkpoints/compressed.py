"""The layouts of quantised weights in safetensors files that Quire writes, too (three of
compressed-tensors), and that of MXFP4. Those that it only reads are in `packed_weights.py`.

int-quantized and float-quantized: `NAME` int8 or FP8 [..., out, in] and `NAME_scale` [..., out, 1]:
our INT8 and FP8. pack-quantized in groups of 32: `NAME_packed` int32 [..., out, in / 8] of eight
codes each, the first in the lowest bits, and `NAME_scale` [..., out, in / 32]; a code stands for
(code - 8) * scale, as in Q4_0, which has the same codes in another order. mxfp4: `NAME_blocks`
uint8 [..., out, in / 32, 16] of two codes each and `NAME_scales` uint8 [..., out, in / 32], the
exponents of powers of two; in the MXFP4 of GGUF files these stand before each block, whose codes
have another order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quire.checkpoints.quantization_config import COMPRESSED_TENSORS
from quire.errors import UnsupportedModelError
from quire.kernels.formats import FORMATS, Format

GROUP = FORMATS["Q4_0"].num_elements
_TOKENS = {"num_bits": 8, "symmetric": True, "strategy": "token", "dynamic": True}
_WEIGHTS = {
    "int-quantized": {
        "num_bits": 8,
        "type": "int",
        "symmetric": True,
        "strategy": "channel",
        "group_size": None,
    },
    "pack-quantized": {
        "num_bits": 4,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": GROUP,
    },
    "float-quantized": {
        "num_bits": 8,
        "type": "float",
        "symmetric": True,
        "strategy": "channel",
        "group_size": None,
    },
}
"""What config.json says of the weights, by the layout's name."""
LAYOUTS = {"INT8": "int-quantized", "Q4_0": "pack-quantized", "FP8": "float-quantized"}


def quantization_config(format: Format, ignored: list[str]) -> dict[str, Any]:
    """What config.json says of weights in INT8, FP8 or Q4_0; `ignored` are the modules that stay
    plain numbers.
    """
    layout = LAYOUTS[format.name]
    tokens = _TOKENS | {"type": _WEIGHTS[layout]["type"]}
    group = {
        "targets": ["Linear", "Embedding"],
        "weights": _WEIGHTS[layout] | {"dynamic": False},
        "input_activations": tokens if format.codes is not None else None,
    }
    return {
        "quant_method": COMPRESSED_TENSORS,
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
    """A part's tensors from the bytes of whole rows that make `shape` and the scales that belong to
    them; `where` names the file and the tensor.
    """
    if format.codes is not None:
        return data.view(format.codes).view(shape), scales.float().view(shape[:-1])
    pairs = data.view(-1, GROUP // 2)
    codes = torch.stack((pairs & 15, pairs >> 4), -1).flatten(1)
    packed = codes[:, : GROUP // 2] | codes[:, GROUP // 2 :] << 4
    if scales.dtype == torch.uint8:
        return (torch.cat((scales.view(-1, 1), packed), 1).view(*shape[:-1], -1),)
    halves = scales.half().view(-1, 1)
    if not torch.equal(halves.float(), scales.float().view(-1, 1)):
        raise UnsupportedModelError(
            f"{where}: its int4 scales ({scales.dtype}) are not ones that float16 can hold"
        )
    return (torch.cat((halves.view(torch.uint8), packed), 1).view(*shape[:-1], -1),)
