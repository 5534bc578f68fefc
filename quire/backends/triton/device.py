"""GPUs that torch calls cuda."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from quire.errors import DeviceError
from quire.kernels.device import Device, DeviceMemory, Event
from quire.process import gc_pauses

FP8_CACHE_FROM = (8, 9)  # the compute capability of Ada


class CudaDevice(Device):
    """One GPU. Nothing here asks the driver before it must."""

    kind = "cuda"
    is_gpu = True
    collectives = "nccl"
    dtypes = torch.bfloat16, torch.float16, torch.float32
    has_int8_cache = False

    @classmethod
    def count(cls) -> int:
        return torch.cuda.device_count() if torch.cuda.is_available() else 0

    @classmethod
    def find(cls, name: str) -> CudaDevice:
        if not torch.cuda.is_available():
            build = (
                f"built for CUDA {torch.version.cuda}"
                if torch.version.cuda
                else "built without CUDA"
            )
            raise DeviceError(
                f"device {name}: torch sees no GPU here (it is {build}). Use --device cpu."
            )
        index = torch.device(name).index
        index = torch.cuda.current_device() if index is None else index
        if index >= torch.cuda.device_count():
            raise DeviceError(
                f"device {name}: there are {torch.cuda.device_count()} GPUs, numbered from 0."
            )
        return cls(torch.device(cls.kind, index))

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name(self.torch_device)

    def fastest_dtype(self, is_quantized: bool) -> torch.dtype:
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16

    @property
    def has_fp8_cache(self) -> bool:
        return torch.cuda.get_device_capability(self.torch_device) >= FP8_CACHE_FROM

    def initialise(self) -> None:
        torch.empty(1, device=self.torch_device)

    def make_current(self) -> None:
        if self.torch_device.index is not None:  # else it is the current one by definition
            torch.cuda.set_device(self.torch_device)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def free_memory(self) -> int:
        return torch.cuda.mem_get_info(self.torch_device)[0]

    def memory(self) -> DeviceMemory:
        free, total = torch.cuda.mem_get_info(self.torch_device)
        return DeviceMemory(free, total, torch.cuda.memory_allocated(self.torch_device))

    def peak_memory(self, compute: Callable[[], object]) -> int:
        """Of tensors, as torch's allocator counts them."""
        self.synchronize()
        before = torch.cuda.memory_allocated(self.torch_device)
        torch.cuda.reset_peak_memory_stats(self.torch_device)
        compute()
        self.synchronize()
        return torch.cuda.max_memory_allocated(self.torch_device) - before

    def return_freed_memory(self) -> None:
        torch.cuda.empty_cache()
        gc_pauses.return_freed_memory()

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def event(self) -> Event:
        event: Event = torch.cuda.Event()
        return event

    def copy_stream(self) -> CudaCopyStream:
        return CudaCopyStream(self)

    def graph_pool(self) -> CudaGraphPool:
        return CudaGraphPool(self)


class CudaCopyStream:
    """A stream of its own, so that the next step need not wait for the copies."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device.torch_device)

    def to_host(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Event]:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            copies = [
                self._device.pinned(tensor.shape, tensor.dtype).copy_(tensor, non_blocking=True)
                for tensor in tensors
            ]
            arrived = self._device.event()
            arrived.record()
        return copies, arrived


class CudaGraphPool:
    """Captures on a stream of its own, while the device goes on computing. The first graph takes
    the memory that the others then share, so it should be the largest.
    """

    def __init__(self, device: CudaDevice) -> None:
        self._stream = torch.cuda.Stream(device.torch_device)
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, compute: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        gc_was_on = gc.isenabled()
        # a garbage collection during the capture would record its freeing of memory in the graph
        gc.disable()
        try:
            with torch.cuda.stream(self._stream):
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                compute()
                graph.capture_end()
        finally:
            if gc_was_on:
                gc.enable()
        return graph.replay

    def reset(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
