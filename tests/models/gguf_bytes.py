"""Builds GGUF files field by field, so that a test can put anything anywhere."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, field

from quire.checkpoints.gguf_types import TYPE_NAMES
from quire.kernels.formats import FORMATS

TYPE_IDS = {name: number for number, name in TYPE_NAMES.items()}


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def pair(key: str, type_id: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", type_id) + value


def u32(key: str, value: int) -> bytes:
    return pair(key, 4, struct.pack("<I", value))


def u16(key: str, value: int) -> bytes:
    return pair(key, 2, struct.pack("<H", value))


def array(key: str, type_id: int, count: int, elements: bytes) -> bytes:
    return pair(key, 9, struct.pack("<IQ", type_id, count) + elements)


@dataclass
class Tensor:
    name: str
    shape: tuple[int, ...]
    """In torch's order."""
    type_id: int = 0
    data: bytes | None = None
    """Zeros of the right size by default."""
    offset: int | None = None

    def content(self) -> bytes:
        if self.data is not None:
            return self.data
        layout = FORMATS[TYPE_NAMES[self.type_id]]
        return bytes(math.prod(self.shape) // layout.num_elements * layout.num_bytes)


@dataclass
class Gguf:
    pairs: list[bytes] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    magic: bytes = b"GGUF"
    version: int = 3
    num_tensors: int | None = None
    num_pairs: int | None = None
    alignment: int = 32

    def header(self) -> bytes:
        num_tensors = len(self.tensors) if self.num_tensors is None else self.num_tensors
        num_pairs = len(self.pairs) if self.num_pairs is None else self.num_pairs
        header = (
            self.magic
            + struct.pack("<IQQ", self.version, num_tensors, num_pairs)
            + b"".join(self.pairs)
        )
        offset = 0
        for tensor in self.tensors:
            header += text(tensor.name) + struct.pack("<I", len(tensor.shape))
            header += b"".join(struct.pack("<Q", size) for size in tensor.shape[::-1])
            header += struct.pack(
                "<IQ", tensor.type_id, offset if tensor.offset is None else tensor.offset
            )
            offset += len(self._padded(tensor.content()))
        return header

    def build(self) -> bytes:
        return self._padded(self.header()) + b"".join(
            self._padded(tensor.content()) for tensor in self.tensors
        )

    def _padded(self, data: bytes) -> bytes:
        return data + bytes(-len(data) % self.alignment)
