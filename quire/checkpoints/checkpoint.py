"""The one interface the loader sees, whatever format the weights are stored in.

A checkpoint is checked in full when it is opened: names, dtypes, shapes and where each tensor lies
in its file. Only then are tensors read, straight into the parameters' memory where they are stored
as they are needed, else in chunks of rows (to be converted, expanded or quantised); the temporaries
of a read stay under about 16 MiB however many rows a tensor has.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from quire.backends.select import device_of
from quire.checkpoints.compressed import from_compressed
from quire.checkpoints.files import FileStamp, open_checked, quote, read_exact_into
from quire.checkpoints.packed_weights import fp8_scales, int4_tensors
from quire.checkpoints.quantization_config import FP8_CACHE, Layout
from quire.errors import ModelFormatError, UnsupportedModelError
from quire.kernels.formats import FORMATS, Format

MAX_DIMENSIONS = 8
MAX_CHUNK_ELEMENTS = 2**19
"""At up to 20 bytes of temporaries per element: 10 MiB."""
_MAX_STAGED_BYTES = 2**23


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One stored tensor, as its file describes it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """As the format spells it: "F32", "BF16", "Q4_1"."""
    file: Path
    num_bytes: int
    """On disk."""
    offset: int
    """Where its data begins in the file."""
    scales: TensorInfo | None = None
    """Where they are a tensor of their own: `compressed.py` says how the data looks then."""
    zeros: TensorInfo | None = None
    """Likewise of zero points."""
    layout: Layout | None = None
    """Where it is one of `packed_weights.py`."""
    whole: TensorInfo | None = None
    """With such a layout, of what this is some rows."""
    first_row: int = 0

    @property
    def format(self) -> Format:
        return FORMATS[self.dtype]

    @property
    def stored_shape(self) -> tuple[int, int]:
        """Of the int32 that hold four bits each."""
        out, inner = self.shape
        assert self.layout is not None
        return {"awq": (inner, out // 8), "gptq": (inner // 8, out)}.get(
            self.layout.name, (out, inner // 8)
        )


@dataclass(frozen=True, slots=True)
class StoredCache:
    """How a checkpoint wants keys and values stored (`cache_scales.py`)."""

    format: str = ""
    """"fp8", what else its settings call it, or nothing where they say nothing."""
    scales: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    """By layer, those of keys and of values for FP8."""

    def scales_of(self, layer: int) -> tuple[float, float]:
        """What the layer's keys and values are divided by before they are stored as FP8; 1 where
        nothing is said.
        """
        return self.scales.get(layer, (1.0, 1.0))

    def check_fp8(self) -> None:
        """Refuses to store in FP8 what is to be stored in another way."""
        if self.format not in ("", FP8_CACHE):
            raise UnsupportedModelError(
                f"kv_cache_dtype fp8: the checkpoint's scales are for {self.format}, which Quire lacks. Use auto."
            )


UNSAID = StoredCache()
"""Of checkpoints that say nothing."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A contiguous part of a stored tensor."""

    index: tuple[int | slice, ...]
    """What to index the tensor with to get it."""
    start: int
    """Its first element, counted through the flattened tensor."""
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


def chunks_of(shape: tuple[int, ...], max_elements: int = MAX_CHUNK_ELEMENTS) -> Iterator[Chunk]:
    """Cuts a shape, in order, into contiguous parts of at most `max_elements`."""
    if math.prod(shape) <= max_elements:
        yield Chunk((), 0, shape)
        return
    row = math.prod(shape[1:])
    if row > max_elements:
        for i in range(shape[0]):
            for part in chunks_of(shape[1:], max_elements):
                yield Chunk((i, *part.index), i * row + part.start, part.shape)
        return
    step = max_elements // row
    for first in range(0, shape[0], step):
        last = min(first + step, shape[0])
        yield Chunk((slice(first, last),), first * row, (last - first, *shape[1:]))


class Checkpoint:
    """Weights on disk.

    Files are opened for one tensor at a time, so that many files don't use up descriptors; the
    stamp taken when a file was checked makes sure it is still the same. Several threads may read at
    once.
    """

    def __init__(
        self,
        kind: Literal["safetensors", "gguf", "npy"],
        tensors: Mapping[str, TensorInfo],
        stamps: Mapping[Path, FileStamp],
        metadata: Mapping[str, Any] | None = None,
        cache: StoredCache = UNSAID,
    ) -> None:
        self.kind = kind
        self.tensors = tensors
        """All of them by name, as named in the file; each says its format."""
        self.metadata: Mapping[str, Any] = metadata or {}
        """What a GGUF file knows of its model."""
        self.cache = cache
        self._stamps = stamps
        self._closed = False

    def with_tensors(
        self, tensors: Mapping[str, TensorInfo], cache: StoredCache | None = None
    ) -> Checkpoint:
        """The same files, described by these."""
        return Checkpoint(self.kind, tensors, self._stamps, self.metadata, cache or self.cache)

    def stamp_of(self, file: Path) -> FileStamp:
        """Of a file when it was checked."""
        return self._stamps[file]

    @torch.no_grad()
    def read_into(self, name: str, target: Tensor) -> None:
        """Fills `target` (any floating dtype, strides and device; often a view of a packed
        parameter) with numbers, whatever format they are stored in. The shapes must be equal and
        scales must be numbers, else ModelFormatError.
        """
        info = self._info(name)
        if tuple(target.shape) != info.shape:
            raise tensor_error(
                info.file, name, f"shape {list(target.shape)}", f"shape {list(info.shape)}"
            )
        if not target.is_floating_point() or target.is_meta:
            raise TypeError(f"can't read {name} into a tensor of {target.dtype} on {target.device}")
        if (
            target.dtype == info.format.dtype
            and target.device.type == "cpu"
            and target.is_contiguous()
        ):
            self._read_bytes(info, target)
            return
        for chunk, stored in self.chunks(name, copied_to=target.device):
            self._check_scales(info, *stored)
            # What a chunk expands to has no name here, so it is gone before the next one comes.
            target[chunk.index].copy_(info.format.expand(*stored).view(chunk.shape))

    def read(self, name: str) -> Tensor:
        """A small tensor as float32, in new memory."""
        target = torch.empty(self._info(name).shape, dtype=torch.float32)
        self.read_into(name, target)
        return target

    def read_stored_into(self, name: str, targets: Sequence[Tensor]) -> None:
        """Fills what `Format.empty` made for the tensor's shape, or views of it whose rows lie in
        one piece, with the tensor as it is stored, for whoever computes with its format. Scales
        that are not numbers are a ModelFormatError.
        """
        info = self._info(name)
        if info.scales is not None:
            for chunk, stored in self.chunks(name):
                for target, part in zip(targets, stored, strict=True):
                    target[chunk.index].copy_(part.view(target[chunk.index].shape))
                self._check_scales(info, *stored)
            return
        (target,) = targets
        for number, piece in enumerate([target] if target.is_contiguous() else target):
            here = (
                piece if piece.device.type == "cpu" else torch.empty(piece.shape, dtype=piece.dtype)
            )
            self._read_bytes(info, here, number * piece.nbytes)
            self._check_scales(info, here)
            if here is not piece:
                piece.copy_(here)

    def chunks(
        self, name: str, copied_to: torch.device | None = None
    ) -> Iterator[tuple[Chunk, tuple[Tensor, ...]]]:
        """The tensor as it is stored, in chunks of whole rows: larger ones if plain numbers are
        only copied from them, to a device. What one chunk holds is overwritten by the next.
        """
        info = self._info(name)
        format, scales, total = info.format, info.scales, math.prod(info.shape)
        if info.layout is not None:
            yield from self._packed_chunks(info, info.layout)
            return
        place = copied_to if format.dtype is not None else None
        most = MAX_CHUNK_ELEMENTS if place is None else _MAX_STAGED_BYTES // format.num_bytes
        most = min(total, max((most, *info.shape[-1:])))
        read_scales = (
            scales.format.expand if scales is not None and scales.dtype in FORMATS else torch.clone
        )
        # Read, not mapped: every page of a mapping is a fault of its own. Pinned, so that a GPU
        # fetches it by itself.
        pinned = device_of(place or torch.device("cpu")).pinned
        staged = pinned((info.num_bytes * most // total,), torch.uint8)
        for chunk in chunks_of(info.shape, most):
            part = staged[: info.num_bytes * chunk.num_elements // total]
            self._read_bytes(info, part, info.num_bytes * chunk.start // total)
            if scales is None:
                yield chunk, (part,)
                continue
            share = torch.empty(scales.num_bytes * chunk.num_elements // total, dtype=torch.uint8)
            self._read_bytes(scales, share, scales.num_bytes * chunk.start // total)
            where = f"{scales.file}: tensor {quote(scales.name)}"
            yield chunk, from_compressed(format, chunk.shape, part, read_scales(share), where)

    def _packed_chunks(
        self, info: TensorInfo, layout: Layout
    ) -> Iterator[tuple[Chunk, tuple[Tensor, ...]]]:
        """FP8 in chunks of rows; what other tools pack across rows, all at once."""
        whole, own = info.whole or info, slice(info.first_row, info.first_row + info.shape[0])
        assert whole.scales is not None
        scales = (
            whole.scales.format.expand(self._whole(whole.scales)).float().view(whole.scales.shape)
        )
        if layout.name != "fp8":
            zeros = (
                None
                if whole.zeros is None
                else self._whole(whole.zeros).view(torch.int32).view(whole.zeros.shape)
            )
            packed = self._whole(whole).view(torch.int32).view(whole.stored_shape)
            found = int4_tensors(layout, packed, scales, zeros)
            yield Chunk((), 0, info.shape), tuple(tensor[own] for tensor in found)
            return
        scales, inner = fp8_scales(scales, whole.shape)[own], info.shape[1]
        for chunk in chunks_of(info.shape, max(MAX_CHUNK_ELEMENTS, inner)):
            part = torch.empty(chunk.num_elements, dtype=torch.uint8)
            self._read_bytes(whole, part, own.start * inner + chunk.start)
            rows = slice(chunk.start // inner, chunk.start // inner + chunk.shape[0])
            yield chunk, (part.view(torch.float8_e4m3fn).view(chunk.shape), scales[rows])

    def _whole(self, info: TensorInfo) -> Tensor:
        stored = torch.empty(info.num_bytes, dtype=torch.uint8)
        self._read_bytes(info, stored)
        return stored

    def _read_bytes(self, info: TensorInfo, target: Tensor, start: int = 0) -> None:
        """Fills a contiguous tensor on the CPU with the stored bytes from `start` on."""
        memory = target.detach().view(-1).view(torch.uint8).numpy().data
        with open_checked(info.file, self._stamps[info.file]) as file:
            read_exact_into(file, info.file, info.offset + start, memory)

    def _check_scales(
        self, info: TensorInfo, stored: Tensor, scales: Tensor | None = None, *zeros: Tensor
    ) -> None:
        finite = (
            info.format.has_finite_scales(stored)
            if scales is None
            else bool(scales.isfinite().all())
        )
        if not finite:
            raise ModelFormatError(
                f"{info.file}: tensor {quote(info.name)}: a scale of its {info.dtype} numbers is infinite or NaN: the "
                "file is damaged or was converted wrongly; get it again, or another version of the model"
            )

    def close(self) -> None:
        """Reading afterwards is an error."""
        self._closed = True

    def _info(self, name: str) -> TensorInfo:
        if self._closed:
            raise ValueError("the checkpoint is closed")
        info = self.tensors.get(name)
        if info is None:
            files = sorted({str(info.file) for info in self.tensors.values()})
            where = (
                f"{files[0]} and {len(files) - 1} more files" if len(files) > 1 else "".join(files)
            )
            raise ModelFormatError(f"{where or 'the checkpoint'}: tensor {quote(name)} is missing")
        return info


def tensor_error(file: Path, name: str, expected: str, got: str) -> ModelFormatError:
    return ModelFormatError(f"{file}: tensor {quote(name)}: expected {expected}, got {got}")


def check_shape(file: Path, name: str, shape: tuple[int, ...]) -> None:
    """Refuses what no weight can have, so that sizes computed from it are sound."""
    if len(shape) > MAX_DIMENSIONS:
        raise tensor_error(file, name, f"at most {MAX_DIMENSIONS} dimensions", str(len(shape)))
    if any(size < 1 for size in shape):
        raise tensor_error(file, name, "dimensions of at least 1", f"shape {list(shape)}")
