"""Weights in GGUF files, dequantised chunk by chunk on their way into the parameters."""

from __future__ import annotations

from typing import BinaryIO

from torch import Tensor

from quire.models.checkpoint import CheckedCheckpoint, Chunk, TensorInfo, chunks_of
from quire.models.files import read_exact
from quire.models.gguf_file import GgufFile
from quire.models.gguf_quants import BLOCK_LAYOUTS, dequantize


class GgufCheckpoint(CheckedCheckpoint):
    """Reads the tensors of a GGUF model whose header has been read and checked."""

    def __init__(self, header: GgufFile) -> None:
        super().__init__(header.tensors, header.stamps)
        self.metadata = header.metadata

    def _read_tensor(self, file: BinaryIO, info: TensorInfo, target: Tensor) -> None:
        for chunk in chunks_of(info.shape):
            # Nothing of a chunk has a name here, so it is gone before the next one comes.
            target[chunk.index].copy_(_read_chunk(file, info, chunk))


def _read_chunk(file: BinaryIO, info: TensorInfo, chunk: Chunk) -> Tensor:
    # Chunks begin and end at block boundaries: rows are whole blocks, and so is the largest chunk.
    layout = BLOCK_LAYOUTS[info.dtype]
    offset = info.offset + chunk.start // layout.num_elements * layout.num_bytes
    num_bytes = chunk.num_elements // layout.num_elements * layout.num_bytes
    return dequantize(read_exact(file, info.file, offset, num_bytes), info.dtype).view(chunk.shape)
