"""Memory of tensors that is given back while nobody needs it, and taken again.

The tensors, and all views of them, stay what they are: objects with their shapes. Whether they lie
where they lay:

- In host memory, always. Their pages go back to the system, the addresses stay (MADV_DONTNEED), and
  pages come again when they are written. So recorded steps stay valid.
- On a device, not. torch can free a storage and fill it again, but not at an address of our choice:
  reserving addresses without memory needs an allocator of our own below torch's. So whoever holds
  addresses, as CUDA graphs do, makes them anew. Tensors and views look them up in their storage at
  every use.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
from collections.abc import Iterable

import torch
from torch import Tensor

logger = logging.getLogger(__name__)


class TensorMemory:
    """The memory of some tensors, whole storages: nothing else may lie in them."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        storages = (tensor.untyped_storage() for tensor in tensors)
        by_address = {storage.data_ptr(): storage for storage in storages if storage.nbytes()}
        self._on_host = [one for one in by_address.values() if one.device.type == "cpu"]
        self._on_device = [
            (one, one.nbytes()) for one in by_address.values() if one.device.type != "cpu"
        ]
        self._saved: list[Tensor] | None = None
        self._is_awake = True

    def sleep(self, keep: bool) -> None:
        """Gives the memory back. With `keep`, what it held is kept in host memory, where host
        tensors lie already; else it is gone. If there is no room to keep it, nothing has changed.
        Asleep already, it can only lose what is kept.
        """
        if keep and not self._is_awake:
            return
        if keep:
            self._saved = [
                _bytes_of(storage).to("cpu", copy=True) for storage, _ in self._on_device
            ]
        else:
            self._saved = None
            for storage in self._on_host:
                _return_pages(storage.data_ptr(), storage.nbytes())
        self._is_awake = False
        for storage, _ in self._on_device:
            storage.resize_(0)

    def wake(self) -> None:
        """Takes the memory again, with what was kept; what was not kept is undefined. If there is
        too little memory, none is taken, and this can be tried again.
        """
        if self._is_awake:
            return
        try:
            for index, (storage, size) in enumerate(self._on_device):
                storage.resize_(size)
                if self._saved is not None:
                    _bytes_of(storage).copy_(self._saved[index])
        except BaseException:
            for storage, _ in self._on_device:
                storage.resize_(0)
            raise
        self._is_awake, self._saved = True, None


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """All of a storage as one tensor."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _return_pages(address: int, num_bytes: int) -> None:
    """Returns the whole pages of some memory to the system; what is read there next is undefined
    (on Linux zeros).
    """
    begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (address + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
    advice = getattr(mmap, "MADV_DONTNEED", None)
    if begin >= end or advice is None:
        return
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    if madvise(begin, end - begin, advice):
        logger.warning(
            "%d bytes were not returned to the system: error %d", end - begin, ctypes.get_errno()
        )
