"""The spec of a model in a GGUF file, from its metadata and the names of its tensors.

The metadata is read as config.json is, by the same functions, under the names of
`checkpoints/gguf_settings.py`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.checkpoints.checkpoint import Checkpoint
from quire.checkpoints.fields import Fields
from quire.checkpoints.gguf_settings import KEYS, gguf_settings
from quire.errors import ModelFormatError, UnsupportedModelError
from quire.models.families import FAMILIES
from quire.models.family import Family
from quire.models.model_config import spec_of
from quire.models.spec import ModelSpec


def read_gguf_spec(checkpoint: Checkpoint, file: str) -> ModelSpec:
    """A GGUF file's model. Its tensors say which biases there are: its settings don't."""
    family, config = _settings(checkpoint, file)
    spec, tensor_names = spec_of(family, config), checkpoint.tensors
    layers = (
        layer
        if layer.attention is None
        else replace(
            layer,
            qkv_bias=any(f"blk.{i}.{part}.bias" in tensor_names for part in ("attn_q", "attn_qkv")),
            output_bias=f"blk.{i}.attn_output.bias" in tensor_names,
        )
        for i, layer in enumerate(spec.layers)
    )
    spec = replace(spec, layers=tuple(layers))
    # A family's norm offset is already added to the weights in GGUF files.
    return replace(spec, norm_offset=0.0)


def config_of(checkpoint: Checkpoint, file: str) -> dict[str, Any]:
    """A config.json for the file's model. It can't say all that a GGUF file can: compare the specs
    afterwards.
    """
    if "rope_freqs.weight" in checkpoint.tensors:
        raise UnsupportedModelError(
            f"{file}: a factor for each rope frequency has no place in config.json"
        )
    family, config = _settings(checkpoint, file)
    if family.gguf_needs:  # their tensors are not those of Hugging Face's files
        raise UnsupportedModelError(
            f"{file}: a GGUF file of the family {family.name} has no form in Hugging Face layout; quantise its "
            "safetensors"
        )
    values = {
        key: config.raw(key) for key in (*KEYS, *config.names()) if key in config and "." not in key
    }
    original = config.part("rope_parameters").raw("original_max_position_embeddings")
    if original is not None:  # some families' classes read it from here
        values["original_max_position_embeddings"] = original
    return {"architectures": [family.architectures[0]], "model_type": family.name, **values}


def _settings(checkpoint: Checkpoint, file: str) -> tuple[Family, Fields]:
    """The family, and its settings by the names they have in config.json."""
    name = Fields(checkpoint.metadata, file).string("general.architecture")
    family = _find_family(name, checkpoint, file)
    for key in (*family.gguf_needs, *family.gguf_others.get(name, ())):
        if f"{name}.{key}" not in checkpoint.metadata:
            raise ModelFormatError(f"{file}: {name}.{key} is missing")
    for key in family.gguf_lists:
        Fields(checkpoint.metadata, file, f"{name}.").list_of(key, int)
    for key, value in family.gguf_fixed.items():
        if (found := checkpoint.metadata.get(f"{name}.{key}", value)) != value:
            raise UnsupportedModelError(
                f"{file}: {name}.{key} {found!r} is not supported, only {value!r} is"
            )
    return family, gguf_settings(checkpoint, file, family.gguf_settings)


def _find_family(name: str, checkpoint: Checkpoint, file: str) -> Family:
    for family in FAMILIES:
        if name not in (family.gguf, *family.gguf_others):
            continue
        has_key = not family.gguf_key or checkpoint.metadata.get(f"{name}.{family.gguf_key}")
        if has_key and (family.gguf_fits is None or family.gguf_fits(checkpoint)):
            return family
    names = (one for family in FAMILIES for one in (family.gguf, *family.gguf_others) if one)
    supported = ", ".join(dict.fromkeys(names))
    raise UnsupportedModelError(
        f"{file}: the architecture {name!r} is not supported. Supported: {supported}."
    )
