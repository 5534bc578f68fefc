"""What a checkpoint says of the cache: whether keys and values are to be stored in FP8, and each
layer's scales for it.

Tools write one number for the keys of a layer and one for its values, by which they are divided
before they are stored and multiplied when they are read, under the names that vLLM reads:

    self_attn.k_scale, self_attn.v_scale                    compressed-tensors with a kv_cache_scheme, AutoFP8
    self_attn.attn.k_scale, self_attn.attn.v_scale          vLLM itself
    self_attn.k_proj.k_scale, self_attn.v_proj.v_scale      ModelOpt (self_attn.qkv_proj. where the three are one)
    self_attn.k_proj.output_scale, ...v_proj.output_scale   earlier compressed-tensors, Quark
    self_attn.kv_scale                                      earlier AutoFP8: one for both
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from quire.checkpoints.checkpoint import Checkpoint, StoredCache, TensorInfo, tensor_error
from quire.checkpoints.quantization_config import FP8_CACHE
from quire.kernels.formats import PLAIN

_NAME = re.compile(r"(?:.*\.)?(\d+)\.(?:.*\.)?(?:kv_scale|([kv])_scale|([kv])_proj\.output_scale)")
"""Of a layer's number and of which side a scale is; neither of the two letters: of both."""
_UNUSED = (".q_scale", ".q_proj.output_scale", ".prob_scale", ".prob_output_scale")
"""For engines that also round queries or the softmax's weights to FP8."""
_ENDS = (
    ".k_scale",
    ".v_scale",
    ".kv_scale",
    ".k_proj.output_scale",
    ".v_proj.output_scale",
    *_UNUSED,
)


def is_cache_scale(name: str) -> bool:
    return name.endswith(_ENDS)


def read_cache(checkpoint: Checkpoint, format: str) -> StoredCache:
    """The scales of all layers; those of a format that Quire does not have are not looked at.
    Damaged ones are a ModelFormatError.
    """
    found: dict[int, dict[str, TensorInfo]] = {}
    for name, info in checkpoint.tensors.items() if format in ("", FP8_CACHE) else ():
        if not is_cache_scale(name) or name.endswith(_UNUSED):
            continue
        match = _NAME.fullmatch(name)
        if match is None:
            raise tensor_error(
                info.file, name, "a scale of some layer's keys or values", "no layer in its name"
            )
        own = found.setdefault(int(match[1]), {})
        for side in match[2] or match[3] or "kv":
            if side in own:
                raise tensor_error(
                    info.file,
                    name,
                    "one scale for each layer's keys and values",
                    f"{own[side].name} too",
                )
            own[side] = info
    return StoredCache(format, {layer: _pair(checkpoint, own) for layer, own in found.items()})


def _pair(checkpoint: Checkpoint, own: Mapping[str, TensorInfo]) -> tuple[float, float]:
    if len(own) == 1:
        (info,), side = own.values(), {"k": "values", "v": "keys"}[next(iter(own))]
        raise tensor_error(info.file, info.name, f"a scale of the {side} beside it", "none")
    return _number(checkpoint, own["k"]), _number(checkpoint, own["v"])


def _number(checkpoint: Checkpoint, info: TensorInfo) -> float:
    kinds = [format.name for format in PLAIN.values()]
    if info.dtype not in kinds or math.prod(info.shape) != 1:
        got = f"{info.dtype} of shape {list(info.shape)}"
        raise tensor_error(
            info.file, info.name, f"one number ({', '.join(kinds)}) for all heads of its layer", got
        )
    value = checkpoint.read(info.name).item()
    if not 0 < value < math.inf:
        raise tensor_error(info.file, info.name, "a scale above zero", str(value))
    return value
