"""Devices: which there are, what they have, and what a GPU is told, seen by a torch.cuda that only
takes notes.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from quire.backends.cpu.device import CpuDevice
from quire.backends.select import device_class, device_of, pick_device
from quire.backends.triton.device import CudaDevice
from quire.errors import DeviceError
from quire.kernels.device import DeviceMemory
from quire.runner.dtypes import pick_dtype

CPU = CpuDevice(torch.device("cpu"))
GPU = CudaDevice(torch.device("cuda", 1))


def have_gpus(monkeypatch: pytest.MonkeyPatch, count: int, current: int = 0) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)


def test_auto_takes_a_gpu_if_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    have_gpus(monkeypatch, 0)
    assert str(pick_device("auto")) == str(pick_device("cpu")) == "cpu"
    assert device_class("auto") is CpuDevice
    have_gpus(monkeypatch, 2, current=1)
    assert [str(pick_device(name)) for name in ("auto", "cuda", "cuda:0", "cpu")] == [
        "cuda:1",
        "cuda:1",
        "cuda:0",
        "cpu",
    ]
    assert device_class("auto") is CudaDevice


def test_a_gpu_that_is_not_there_is_said_to_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    have_gpus(monkeypatch, 2)
    with pytest.raises(DeviceError, match=r"^device cuda:2: there are 2 GPUs, numbered from 0\.$"):
        pick_device("cuda:2")
    have_gpus(monkeypatch, 0)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    with pytest.raises(
        DeviceError,
        match=r"^device cuda: torch sees no GPU here \(it is built for CUDA 12\.8\)\. Use",
    ):
        pick_device("cuda")
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(DeviceError, match="built without CUDA"):
        pick_device("cuda:0")


def test_a_place_without_a_device_is_refused() -> None:
    with pytest.raises(DeviceError, match="meta; choose one of cuda, cpu"):
        device_of(torch.device("meta"))


def test_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        DeviceError,
        match=r"^dtype float16 is not supported on the CPU\. Use bfloat16 or float32\.$",
    ):
        pick_dtype("float16", CPU)
    assert pick_dtype("float16", GPU) == torch.float16
    for has_it, dtype in ((True, torch.bfloat16), (False, torch.float16)):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda has_it=has_it: has_it)
        assert pick_dtype("auto", GPU, is_quantized=True) == pick_dtype("auto", GPU) == dtype
    for has_it, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(
            "quire.backends.cpu.device._multiplies_bfloat16", lambda has_it=has_it: has_it
        )
        assert pick_dtype("auto", CPU) == dtype
        assert pick_dtype("auto", CPU, is_quantized=True) == torch.float32


def test_on_a_cpu_nothing_is_in_flight() -> None:
    assert not CPU.is_gpu
    assert CPU.copy_stream() is None
    assert CPU.graph_pool() is None
    assert CPU.memory() is None
    assert CPU.free_memory() > 0
    event = CPU.event()
    event.record()
    assert event.query()
    assert [CPU.pinned(shape, torch.int16).shape for shape in ((), (0, 3), (2, 5))] == [
        (),
        (0, 3),
        (2, 5),
    ]
    assert CPU.name == f"cpu ({torch.get_num_threads()} threads)"


class Notes(list[Any]):
    """A torch.cuda that writes down what it is told; a stream is a word, and so is what is on it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.on = "main"
        self._num_streams = 0
        notes = self

        class Stream:
            def __init__(self, device: torch.device) -> None:
                notes._num_streams += 1
                self.name = f"stream {notes._num_streams} of {device}"

            def wait_stream(self, other: str) -> None:
                notes.append((self.name, "waits for", other))

        class Event:
            def record(self) -> None:
                notes.append((notes.on, "records an event"))

        class Graph:
            def capture_begin(self, pool: str, capture_error_mode: str) -> None:
                notes.append((notes.on, "begins a capture", pool, capture_error_mode))

            def capture_end(self) -> None:
                notes.append((notes.on, "ends a capture"))

            def replay(self) -> None:
                notes.append((notes.on, "replays"))

        @contextmanager
        def stream(one: Stream) -> Iterator[None]:
            before, notes.on = notes.on, one.name
            yield
            notes.on = before

        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
        monkeypatch.setattr(torch.cuda, "stream", stream)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: notes.on)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "one pool")
        for name in ("synchronize", "reset_peak_memory_stats", "set_device"):
            monkeypatch.setattr(
                torch.cuda, name, lambda device, name=name: notes.append((name, str(device)))
            )
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: notes.append(("empty_cache",)))
        monkeypatch.setattr(
            CudaDevice, "pinned", lambda _, shape, dtype: torch.empty(shape, dtype=dtype)
        )


def test_results_are_copied_after_what_computes_them_on_a_stream_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    notes = Notes(monkeypatch)
    stream = GPU.copy_stream()
    tensors = [torch.arange(3), torch.tensor(2.5)]
    copies, _ = stream.to_host(tensors)
    assert [copy.tolist() for copy in copies] == [[0, 1, 2], 2.5]
    assert all(
        copy.data_ptr() != tensor.data_ptr() for copy, tensor in zip(copies, tensors, strict=True)
    )
    assert notes == [
        ("stream 1 of cuda:1", "waits for", "main"),
        ("stream 1 of cuda:1", "records an event"),
    ]
    assert notes.on == "main"


def test_graphs_are_captured_on_one_stream_into_one_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    notes = Notes(monkeypatch)
    pool = GPU.graph_pool()
    seen: list[bool] = []
    assert gc.isenabled()
    replays = [pool.capture(lambda: seen.append(gc.isenabled())) for _ in range(2)]
    assert seen == [False, False]  # a collection would record its freeing of memory
    assert gc.isenabled()
    own = "stream 1 of cuda:1"
    begun = own, "begins a capture", "one pool", "thread_local"
    assert notes == [(own, "waits for", "main"), begun, (own, "ends a capture")] * 2
    notes.clear()
    replays[1]()
    assert notes == [("main", "replays")]


def test_a_capture_that_fails_leaves_the_collector_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Notes(monkeypatch)

    def fail() -> None:
        raise ValueError("no memory")

    for was_on in (True, False):
        (gc.enable if was_on else gc.disable)()
        try:
            with pytest.raises(ValueError, match="no memory"):
                GPU.graph_pool().capture(fail)
            assert gc.isenabled() is was_on
        finally:
            gc.enable()


def test_readings_of_a_gpu_are_of_that_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    notes = Notes(monkeypatch)
    allocated = {"cuda:1": 100}
    peaks = {"cuda:1": 700}
    monkeypatch.setattr(torch.cuda, "mem_get_info", {GPU.torch_device: (3, 8)}.__getitem__)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: allocated[str(device)])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: peaks[str(device)])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"the GPU {device}")
    assert GPU.memory() == DeviceMemory(free=3, total=8, allocated=100)
    assert GPU.free_memory() == 3
    assert GPU.name == "the GPU cuda:1"

    def compute() -> None:
        notes.append(("compute",))
        allocated["cuda:1"] = 400

    assert GPU.peak_memory(compute) == 600
    waits = "synchronize", "cuda:1"
    assert notes == [waits, ("reset_peak_memory_stats", "cuda:1"), ("compute",), waits]
    notes.clear()
    GPU.make_current()
    GPU.return_freed_memory()
    assert notes == [("set_device", "cuda:1"), ("empty_cache",)]
