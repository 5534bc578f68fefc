"""In which formats a model's weights are kept, decided from its files before any weight is read."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from quire.checkpoints.checkpoint import Checkpoint
from quire.errors import (
    DeviceError,
    InvalidRequestError,
    ModelFormatError,
    UnsupportedModelError,
)
from quire.kernels.formats import FORMATS, PLAIN, Format
from quire.kernels.ops import AttentionSpec, Kernels
from quire.kernels.quantize import FP8, INT8, Q4_0
from quire.kernels.weights import Part, Weight
from quire.models.names import ignored_names
from quire.models.pieces import Piece
from quire.models.spec import POSITIONS, ModelSpec, Parameter

QUANTIZED = {"int8": INT8, "int4": Q4_0, "fp8": FP8}
"""The formats that `quantization` can ask for."""
MULTIPLE = 32
"""The input size of a quantised matrix must be a multiple of this."""
_STAY_PLAIN = (
    ".router.weight",
    ".shared_gate.weight",
    "_bias",
    ".key_up.weight",
    ".value_up.weight",
    POSITIONS,
)
"""Matrices that are not quantised: they are small, and errors in them cost much quality."""
ENDS = ("embedding", "head", "per_layer_embedding")


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """An opened model: its spec is known, its weights are still on disk."""

    spec: ModelSpec
    checkpoint: Checkpoint
    pieces: tuple[Piece, ...]
    divided: dict[str, Parameter] | None = None
    """The part of each parameter that this rank of tensor parallelism loads; None: all of it."""

    @property
    def parameters(self) -> dict[str, Parameter]:
        """Those of this rank: all of them, unless the model is divided."""
        return self.spec.parameters() if self.divided is None else self.divided

    def block_formats(self) -> list[str]:
        """The names of the quantised formats that its weights are stored in."""
        tensors = self.checkpoint.tensors
        infos = (tensors[piece.name] for piece in self.pieces if piece.name in tensors)
        return list(dict.fromkeys(info.dtype for info in infos if info.format.dtype is None))

    def are_quantized(self, quantization: str) -> bool:
        """Whether, with this setting, weights are quantised: in the files, or while loading."""
        return quantization in QUANTIZED or (quantization == "auto" and bool(self.block_formats()))


def quantized_format(parameter: str, shape: tuple[int, ...], quantization: str) -> Format | None:
    """The format that plain numbers for a parameter are quantised to; None: they stay plain
    numbers.
    """
    wanted = QUANTIZED.get(quantization)
    is_small = len(shape) < 2 or parameter.endswith(_STAY_PLAIN)
    return None if wanted is None or is_small or shape[-1] % MULTIPLE else wanted


@dataclass(frozen=True, slots=True)
class WeightPlan:
    """A model's parameters, and the format of each tensor that fills a part of one."""

    files: ModelFiles
    kernels: Kernels
    dtype: torch.dtype
    device: torch.device
    quantization: str
    parameters: dict[str, Parameter]
    formats: dict[str, tuple[Format, ...]]
    """For each parameter, the format of each tensor stacked in it (of the only one, where none are
    stacked).
    """

    @property
    def nbytes(self) -> int:
        """Once the kernels have packed them."""
        return sum(self.kernels.packed_bytes(list(self.stored(name))) for name in self.formats)

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(one.shape) for one in self.parameters.values())

    def describe(self) -> str:
        """For the start-up message: the formats, the one with the most bytes first, and what was
        expanded and why.
        """
        sizes: Counter[str] = Counter()
        for name in self.formats:
            for format, shape in self.stored(name):
                sizes[format.name] += format.nbytes(shape)
        blocks = [name for name, _ in sizes.most_common() if FORMATS[name].dtype is None]
        origin = "made while loading" if self.quantization in QUANTIZED else "computed as stored"
        texts = [f"{', '.join(blocks)} {origin}"] if blocks else []
        dtype = str(self.dtype).removeprefix("torch.")
        texts += [dtype] if PLAIN[self.dtype].name in sizes else []
        if expanded := self.expanded():
            why = (
                "as quantization=none asks"
                if self.quantization == "none"
                else "no kernel for it here"
            )
            texts.append(f"{', '.join(expanded)} expanded to {dtype}: {why}")
        matrices = (
            name
            for name, one in self.parameters.items()
            if len(one.shape) > 1 and one.shape[-1] % MULTIPLE
        )
        uneven = sum(not name.endswith(_STAY_PLAIN) for name in matrices)
        if uneven and self.quantization in QUANTIZED:
            texts.append(
                f"{uneven} matrices in {dtype}: their input size is no multiple of {MULTIPLE}"
            )
        return "; ".join(texts)

    def expanded(self) -> list[str]:
        """The quantised formats of which some tensor is expanded to plain numbers."""
        return list(
            dict.fromkeys(
                info.dtype
                for piece in self.files.pieces
                if (info := self.files.checkpoint.tensors[piece.name]).format.dtype is None
                and self.format_of(piece).dtype is not None
            )
        )

    def format_of(self, piece: Piece) -> Format:
        return self.formats[piece.parameter][piece.part or 0]

    def make_room(self, name: str) -> tuple[Weight, list[tuple[Tensor, ...]]]:
        """Memory for a parameter, and the views into it that each of its stacked tensors fills.
        Neighbouring tensors of the same format become one `Part` of the weight.
        """
        shape = self.parameters[name].shape
        along = max(len(shape) - 2, 0)
        parts: list[Part] = []
        room: list[tuple[Tensor, ...]] = []
        for format, stacked in groupby(self.stored(name), key=lambda one: one[0]):
            rows = [one[along] for _, one in stacked]
            tensors = format.empty((*shape[:along], sum(rows), *shape[along + 1 :]), self.device)
            parts.append(Part(format, tensors, sum(rows) if len(shape) > 1 else 1))
            split = [tensor.split_with_sizes(rows, along) for tensor in tensors]
            room += zip(*split, strict=True)
        return Weight(shape, tuple(parts)), room

    def stored(self, name: str) -> Iterator[tuple[Format, tuple[int, ...]]]:
        """Format and shape of the tensors stacked in a parameter."""
        parameter, formats = self.parameters[name], self.formats[name]
        shape, along = parameter.shape, max(len(parameter.shape) - 2, 0)
        for format, rows in zip(
            formats, parameter.rows if len(formats) > 1 else (shape[along],), strict=True
        ):
            yield format, (*shape[:along], rows, *shape[along + 1 :])


def plan_weights(
    files: ModelFiles,
    kernels: Kernels,
    dtype: torch.dtype,
    device: torch.device,
    quantization: str = "auto",
) -> WeightPlan:
    """Checks names and shapes and chooses formats: what the kernels compute with stays as it is
    stored ("auto"), all becomes plain numbers of `dtype` ("none"), or plain matrices are quantised
    ("int8", "int4").
    """
    parameters = files.parameters
    _check_can_compute(files.spec, kernels)
    check_names_and_shapes(files, parameters)
    if quantization in QUANTIZED:
        _check_can_quantize(files, kernels, device, quantization)
    tensors = files.checkpoint.tensors
    chosen: dict[str, dict[int, Format]] = {name: {} for name in parameters}
    for piece in files.pieces:
        parameter, stored = parameters[piece.parameter], tensors[piece.name].format
        shape, plain = parameter.shape, PLAIN[torch.float32 if parameter.keep_float32 else dtype]
        # On a GPU quantised formats have kernels for matrix products, not for looking up rows of
        # the embedding.
        can_stay = len(shape) > 1 and (device.type == "cpu" or piece.parameter not in ENDS)
        can_stay = can_stay and not parameter.stays_plain
        wanted = (
            quantized_format(piece.parameter, shape, quantization) if can_stay else None
        ) or plain
        if stored.dtype is None:
            stays = quantization == "auto" and can_stay and kernels.computes(stored)
            wanted = stored if stays and shape[-1] % MULTIPLE == 0 else plain
        # Experts stored one by one are stacked into one part, which has one format: plain if theirs
        # differ.
        formats = chosen[piece.parameter]
        formats[piece.part or 0] = (
            wanted if formats.get(piece.part or 0, wanted) == wanted else plain
        )
    formats_of = {
        name: tuple(formats[part] for part in sorted(formats)) for name, formats in chosen.items()
    }
    return WeightPlan(files, kernels, dtype, device, quantization, parameters, formats_of)


def _check_can_compute(spec: ModelSpec, kernels: Kernels) -> None:
    for mixer in dict.fromkeys(spec.mixers):
        if not kernels.has_kernels_for(mixer):
            what = "Kimi Delta Attention"
            if isinstance(mixer, AttentionSpec):
                what = f"attention in chunks (attention_chunk_size {mixer.chunk})"
            raise UnsupportedModelError(
                f"{spec.family} has {what}, which does not run on GPUs yet: the {kernels.name} kernels lack it. "
                'Use device="cpu".'
            )


def check_not_quantized(files: ModelFiles, quantization: str) -> None:
    """Refuses to quantise weights that are quantised already."""
    if blocks := files.block_formats():
        raise InvalidRequestError(
            "quantization",
            f"is {quantization}, but the weights are quantised already ({', '.join(blocks)}): use auto, which computes "
            "with them as they are stored, or a version of the model in F32, F16 or BF16",
        )


def _check_can_quantize(
    files: ModelFiles, kernels: Kernels, device: torch.device, quantization: str
) -> None:
    check_not_quantized(files, quantization)
    if not kernels.computes(QUANTIZED[quantization]):
        raise DeviceError(
            f'quantization="{quantization}" does not run on {device} with the {kernels.name} kernels: int8 and int4 do '
            "on a CPU where a C++ compiler is installed and on NVIDIA GPUs from Ampere on, fp8 on Hopper "
            '(bfloat16 or float16). Use another device, or quantization="none".'
        )


def check_names_and_shapes(files: ModelFiles, parameters: dict[str, Parameter]) -> None:
    """Raises ModelFormatError unless the files hold exactly the tensors that the model needs."""
    infos = files.checkpoint.tensors
    some_file = next(iter(infos.values())).file if infos else "the checkpoint"
    for piece in files.pieces:
        expected = piece.shape(parameters[piece.parameter])
        info = infos.get(piece.name)
        if info is None:
            raise ModelFormatError(
                f"{some_file}: the tensor {piece.name} of shape {_shape(expected)} is missing"
                f" (the files hold {len(infos)} tensors)"
            )
        if info.shape != expected:
            raise ModelFormatError(
                f"{info.file}: the tensor {piece.name} should have shape {_shape(expected)}"
                f" by the model's configuration, but has {_shape(info.shape)}"
            )
    known = {piece.name for piece in files.pieces} | ignored_names(files.spec, infos.keys())
    if unexpected := sorted(infos.keys() - known):
        info = infos[unexpected[0]]
        more = f" (and {len(unexpected) - 1} more)" if len(unexpected) > 1 else ""
        raise ModelFormatError(
            f"{info.file}: the tensor {info.name} of shape {_shape(info.shape)} has no place in a"
            f" {files.spec.family} model with this configuration{more}"
        )


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))
