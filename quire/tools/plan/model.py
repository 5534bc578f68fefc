"""A model to plan for: its files, or what its config.json says that they would be."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

from quire.checkpoints.checkpoint import Checkpoint, StoredCache, TensorInfo
from quire.checkpoints.fields import Fields
from quire.checkpoints.quantization_config import COMPRESSED_TENSORS, read_cache_format, read_layout
from quire.checkpoints.quantized_tensors import format_of
from quire.checkpoints.safetensors_checkpoint import read_settings
from quire.checkpoints.sources import resolve
from quire.errors import ModelNotFoundError
from quire.kernels.formats import FORMATS
from quire.models.load import open_model
from quire.models.model_config import read_config
from quire.models.names import huggingface_pieces
from quire.models.pieces import Piece
from quire.models.spec import ModelSpec
from quire.models.weight_plan import ENDS, ModelFiles, quantized_format

_PLAIN = "BF16"
"""What weights are published in, where nothing is said of it; plans do not depend on it."""


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """A model of which the names, shapes and formats of all tensors are known, though perhaps no
    byte of them is here.
    """

    name: str
    files: ModelFiles

    @property
    def spec(self) -> ModelSpec:
        return self.files.spec

    @property
    def is_quantized(self) -> bool:
        """Whether its weights are stored in other formats than plain numbers."""
        return bool(self.files.block_formats())


def open_planned(model: str) -> PlannedModel:
    """From a config.json, a folder that has one, a .gguf file, or whatever is on this machine under
    a name.
    """
    if not model:  # else it would be the current folder
        raise ModelNotFoundError(
            "'' is no model: give a config.json, a folder with one, a .gguf file or a model's name"
        )
    path = Path(model).expanduser()
    if path.name.endswith(".json") and os.path.isfile(path):  # False, too, for what can't be a path
        return described_model(model, read_config(path), read_settings(path))
    is_folder = os.path.isdir(path)
    has_weights = is_folder and any(
        any(path.glob(f"*.{kind}")) for kind in ("safetensors", "npy", "gguf")
    )
    if is_folder and (path / "config.json").is_file() and not has_weights:
        return described_model(
            model, read_config(path / "config.json"), read_settings(path / "config.json")
        )
    files = open_model(resolve(model, offline=True).path)
    files.checkpoint.close()  # it stays known what there was to read
    return PlannedModel(model, files)


def described_model(name: str, spec: ModelSpec, settings: Fields | None = None) -> PlannedModel:
    """With the tensors that a checkpoint of such settings has, in the formats that these say."""
    settings = Fields({}, name) if settings is None else settings
    pieces = tuple(huggingface_pieces(spec, ()))
    stored = _StoredFormats.of(settings)
    parameters = spec.parameters()
    tensors: dict[str, TensorInfo] = {}
    for piece in pieces:
        shape = piece.shape(parameters[piece.parameter])
        format = stored.of_piece(piece, shape)
        tensors[piece.name] = TensorInfo(
            piece.name, shape, format, Path(name), FORMATS[format].nbytes(shape), 0
        )
    spec = replace(spec, cache=StoredCache(read_cache_format(settings)))
    return PlannedModel(name, ModelFiles(spec, Checkpoint("safetensors", tensors, {}), pieces))


@dataclass(frozen=True, slots=True)
class _StoredFormats:
    """What a config.json says of the formats of weights."""

    format: str | None
    """Of those that are quantised."""
    only_stacks: bool = False
    """Whether these are experts alone."""
    ends: tuple[str, ...] = ()
    """Which of embedding and head are, too."""
    left_out: tuple[str, ...] = ()
    """Modules that are not, as patterns."""

    @classmethod
    def of(cls, settings: Fields) -> _StoredFormats:
        layout, found = read_layout(settings), settings.part("quantization_config")
        if layout is None or layout.name == "plain":
            return cls(None)
        listed = [
            found.raw(key)
            for key in ("ignore", "modules_to_not_convert", "exclude_modules", "ignored_layers")
        ]
        left_out = tuple(
            str(one) for names in listed if isinstance(names, list | tuple) for one in names
        )
        groups = found.part("config_groups")
        parts = [groups.part(name) for name in groups.names()]
        in_blocks = "weight_block_size" in found or any(
            part.part("weights").raw("strategy") == "block" for part in parts
        )
        ends: tuple[str, ...] = ()
        if found.raw("quant_method") == COMPRESSED_TENSORS:
            has_embedding = any("Embedding" in (part.raw("targets") or ()) for part in parts)
            ends = ENDS if has_embedding else ("head",)
        return cls(format_of(layout, in_blocks), layout.name == "mxfp4", ends, left_out)

    def of_piece(self, piece: Piece, shape: tuple[int, ...]) -> str:
        """The name of a tensor's format."""
        is_end = piece.parameter in ENDS
        is_plain = self.format is None or quantized_format(piece.parameter, shape, "int8") is None
        if (
            is_plain
            or (is_end and piece.parameter not in self.ends)
            or (self.only_stacks and len(shape) < 3)
        ):
            return _PLAIN
        assert self.format is not None
        group = FORMATS[self.format].group
        is_left_out = _is_named(piece.name.removesuffix(".weight"), self.left_out)
        return _PLAIN if is_left_out or (group and shape[-1] % group) else self.format


def _is_named(module: str, patterns: Sequence[str]) -> bool:
    """Whether a list of modules has one, or what it is in: by name, by the end of it, with `*`, or
    as `re:`.
    """
    return any(
        re.match(pattern[3:], module) is not None
        if pattern.startswith("re:")
        else any(
            fnmatchcase(module, form)
            for form in (pattern, f"{pattern}.*", f"*.{pattern}", f"*.{pattern}.*")
        )
        for pattern in patterns
    )
