"""Weights in GGUF files, dequantised chunk by chunk on their way into the parameters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from torch import Tensor

from quire.models.checkpoint import Chunk, ChunkedCheckpoint, ReadChunk, TensorInfo
from quire.models.files import FileStamp, open_checked, read_exact
from quire.models.gguf_file import GgufFile
from quire.models.gguf_quants import BLOCK_LAYOUTS, dequantize


class GgufCheckpoint(ChunkedCheckpoint):
    """Reads the tensors of a GGUF model whose header has been read and checked."""

    def __init__(self, header: GgufFile) -> None:
        super().__init__(header.tensors, header.stamps)
        self.metadata = header.metadata

    def _open(self, info: TensorInfo, stamp: FileStamp) -> AbstractContextManager[ReadChunk]:
        return _open_tensor(info, stamp)


@contextmanager
def _open_tensor(info: TensorInfo, stamp: FileStamp) -> Iterator[ReadChunk]:
    layout = BLOCK_LAYOUTS[info.dtype]
    with open_checked(info.file, stamp) as file:

        def read_chunk(chunk: Chunk) -> Tensor:
            # Chunks begin and end at block boundaries: rows are whole blocks, and so is the largest chunk.
            offset = info.offset + chunk.start // layout.num_elements * layout.num_bytes
            num_bytes = chunk.num_elements // layout.num_elements * layout.num_bytes
            return dequantize(read_exact(file, info.file, offset, num_bytes), info.dtype)

        yield read_chunk
