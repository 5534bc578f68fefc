"""What a config.json says of how a model's weights are quantised: which layout the files have, or a
refusal by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from quire.checkpoints.fields import Fields
from quire.checkpoints.files import quote
from quire.errors import UnsupportedModelError

COMPRESSED_TENSORS = "compressed-tensors"
GROUPS = (32, 64, 128)
BLOCK = 128
FP8_CACHE = "fp8"
READABLE = (
    f"{COMPRESSED_TENSORS} (int-quantized per channel, pack-quantized int4, float-quantized FP8), fp8, modelopt (FP8), "
    "awq and gptq of 4 bits (groups of 32, 64, 128 or whole rows), and mxfp4"
)


@dataclass(frozen=True, slots=True)
class Layout:
    """How quantised weights lie in files."""

    name: str
    """int-quantized, pack-quantized, mxfp4, fp8, awq or gptq; or plain, where only keys and values
    are.
    """
    group: int = 0
    """How many inputs share a scale (4 bits); 0: a whole row."""
    symmetric: bool = True
    """Whether the zero point is the middle of the codes and not stored (pack-quantized)."""
    added_to_zeros: int = 0
    """GPTQ's first version stores zero points less one."""


def read_layout(config: Fields) -> Layout | None:
    """The layout of a model's weights by its config.json, None where they are plain numbers. Other
    ways of quantising are an UnsupportedModelError.
    """
    if "quantization_config" not in config:
        return None
    found = config.part("quantization_config")
    method = found.raw("quant_method")
    if method == "mxfp4":
        return Layout("mxfp4")
    if method == COMPRESSED_TENSORS:
        return _compressed(config.file, found)
    if method == "fp8":
        blocks = found.raw("weight_block_size")
        if blocks not in (None, [BLOCK, BLOCK]):
            raise _unsupported(config.file, f"by fp8 in blocks of {quote(blocks)}")
        return Layout("fp8")
    if method == "modelopt":
        if "quant_algo" not in found and read_cache_format(config):
            return Layout("plain")
        if found.raw("quant_algo") != "FP8":
            raise _unsupported(config.file, f"by modelopt as {quote(found.raw('quant_algo'))}")
        return Layout("fp8")
    if method in ("awq", "gptq"):
        return _four_bits(config.file, method, found)
    raise _unsupported(config.file, f"by {quote(found.string('quant_method', 'unknown'))}")


def read_cache_format(config: Fields) -> str:
    """What a model's config.json says of its cache: "fp8", what else its keys and values are
    quantised to, or nothing. It says so by `kv_cache_scheme` (compressed-tensors, ModelOpt) or by
    ModelOpt's `kv_cache_quant_algo`. The word "static" for a scheme (AutoFP8) says no more than
    that there are scales.
    """
    found = config.part("quantization_config")
    algorithm, scheme = found.raw("kv_cache_quant_algo"), found.raw("kv_cache_scheme")
    if isinstance(scheme, Mapping):
        read = {
            "num_bits": (8,),
            "type": ("float",),
            "strategy": (None, "tensor"),
            "symmetric": (None, True),
        }
        other = [
            f"{key} {quote(scheme.get(key))}"
            for key, values in read.items()
            if scheme.get(key) not in values
        ]
        return ", ".join(other) or FP8_CACHE
    if algorithm is None:
        return ""
    return FP8_CACHE if str(algorithm).upper() == "FP8" else quote(algorithm)


def _four_bits(file: str, method: str, found: Fields) -> Layout:
    bits, version = found.raw("bits"), found.raw("version")
    if bits != 4:
        raise _unsupported(file, f"by {method} to {quote(bits)} bits")
    if method == "awq" and version not in (None, "gemm", "GEMM"):
        raise _unsupported(file, f"by awq of version {quote(version)}")
    if method == "gptq" and found.raw("desc_act") is True:
        raise _unsupported(file, "by gptq with desc_act (inputs in the order of their activations)")
    group = _group(file, method, found.raw("group_size"))
    is_first = method == "gptq" and found.raw("checkpoint_format") != "gptq_v2"
    return Layout(method, group, symmetric=False, added_to_zeros=int(is_first))


def _group(file: str, method: str, size: object) -> int:
    if size in (None, -1):
        return 0
    if size not in GROUPS:
        raise _unsupported(file, f"by {method} in groups of {quote(size)}")
    assert isinstance(size, int)
    return size


def _compressed(file: str, found: Fields) -> Layout:
    name, groups = found.string("format", "unknown"), found.part("config_groups")
    if not groups.names() and "kv_cache_scheme" in found:
        return Layout("plain")
    layouts = {
        _of_weights(file, name, groups.part(group).part("weights")) for group in groups.names()
    }
    if len(layouts) != 1:
        raise _unsupported(file, f"by {COMPRESSED_TENSORS} in {len(layouts)} ways at once")
    return layouts.pop()


def _of_weights(file: str, name: str, weights: Fields) -> Layout:
    kind = {
        "int-quantized": (8, "int"),
        "pack-quantized": (4, "int"),
        "float-quantized": (8, "float"),
    }.get(name)
    if kind is None:
        raise _unsupported(file, f"by {COMPRESSED_TENSORS} as {quote(name)}")
    wanted: dict[str, tuple[object, ...]] = {"num_bits": kind[:1], "type": kind[1:]}
    if name == "int-quantized":
        wanted |= {"symmetric": (True,), "strategy": ("channel",), "group_size": (None,)}
    elif name == "pack-quantized":
        wanted |= {"strategy": ("group", "channel"), "actorder": (None, "static", "weight")}
    else:
        wanted |= {"symmetric": (True,), "strategy": ("tensor", "channel", "block")}
        wanted |= {"block_structure": (None, [BLOCK, BLOCK])}
    differing = [
        f"{key} {quote(weights.raw(key))}"
        for key, values in wanted.items()
        if weights.raw(key) not in values
    ]
    if differing:
        raise _unsupported(file, f"by {COMPRESSED_TENSORS} as {name}, with {', '.join(differing)}")
    if name == "float-quantized":
        return Layout("fp8")
    size = weights.raw("group_size") if weights.raw("strategy") == "group" else None
    return Layout(
        name,
        _group(file, f"{COMPRESSED_TENSORS} as {name}", size),
        weights.raw("symmetric") is not False,
    )


def _unsupported(file: str, how: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{file}: its weights are quantised {how}, which Quire does not read. It reads {READABLE}: use such a version, "
        'a GGUF file, or the unquantised model with quantization="int8", "int4" or "fp8".'
    )
