"""The Device of a GPU: copies beside the computation, pinned memory, events, graphs and readings."""

from __future__ import annotations

import gc

import pytest
import torch

from quire.backends.select import device_of, pick_device

pytestmark = pytest.mark.gpu

_BUSY = 200_000_000
"""Cycles, about a tenth of a second."""


def test_it_is_found_by_name_and_by_its_tensors() -> None:
    device = pick_device("auto")
    index = torch.cuda.current_device()
    assert (device.kind, str(device)) == ("cuda", f"cuda:{index}")
    assert str(device_of(torch.empty(1, device="cuda").device)) == str(device)
    assert device.is_gpu
    assert device.count() == torch.cuda.device_count()
    assert device.name == torch.cuda.get_device_name(index)


def test_results_are_copied_when_they_are_computed_and_not_before() -> None:
    device = pick_device("auto")
    stream = device.copy_stream()
    assert stream is not None
    tensors = [
        torch.zeros(1000, device=device.torch_device),
        torch.zeros((), device=device.torch_device),
    ]
    for tensor in tensors:
        tensor.add_(0)  # its kernel is loaded, which may wait
    torch.cuda._sleep(1)
    stream.to_host(tensors)[1].synchronize()  # pinned memory is there from now on
    device.synchronize()
    torch.cuda._sleep(_BUSY)
    for tensor in tensors:
        tensor.add_(7)
    torch.cuda.set_sync_debug_mode("error")
    try:
        copies, arrived = stream.to_host(tensors)
        assert not arrived.query()  # nothing has waited
    finally:
        torch.cuda.set_sync_debug_mode("default")
    arrived.synchronize()
    assert all(copy.is_pinned() and copy.device.type == "cpu" for copy in copies)
    assert [copy.unique().tolist() for copy in copies] == [[7.0], [7.0]]
    assert [copy.shape for copy in copies] == [tensor.shape for tensor in tensors]


def test_an_event_comes_after_what_was_started_before_it() -> None:
    device = pick_device("auto")
    event = device.event()
    assert event.query()  # nothing to wait for
    torch.cuda._sleep(_BUSY)
    event.record()
    assert not event.query()
    event.synchronize()
    assert event.query()


def test_pinned_memory() -> None:
    device = pick_device("auto")
    for shape in ((0, 3), (5,), (2, 3), ()):
        memory = device.pinned(shape, torch.int16)
        assert memory.shape == shape
        assert memory.is_pinned() or not memory.numel()


@torch.inference_mode()
def test_graphs_share_a_pool_and_repeat_what_was_captured() -> None:
    device = pick_device("auto")
    place = device.torch_device
    pool = device.graph_pool()
    assert pool is not None
    inputs, output = torch.zeros(512, device=place), torch.zeros(512, device=place)

    def compute(size: int) -> None:
        output[:size] = inputs[:size] * 2 + 1

    for size in (512, 16):
        compute(size)  # its kernels are loaded
    device.synchronize()
    output.zero_()
    assert gc.isenabled()
    replays = {size: pool.capture(lambda size=size: compute(size)) for size in (512, 16)}
    assert gc.isenabled()
    device.synchronize()
    assert not output.any()  # captured, not run
    for size in (16, 512):
        inputs.fill_(size)
        replays[size]()
        assert output[:size].unique().tolist() == [2.0 * size + 1]
        if size < 512:
            assert not output[size:].any()


def test_readings_of_memory() -> None:
    device = pick_device("auto")
    device.initialise()
    device.return_freed_memory()
    before = device.memory()
    assert before is not None
    assert 0 < before.free < before.total
    size = 2**24

    def compute() -> None:
        torch.empty(size, dtype=torch.uint8, device=device.torch_device)

    peak = device.peak_memory(compute)
    assert peak is not None
    assert size <= peak < 2 * size  # the allocator rounds
    held = torch.empty(size, dtype=torch.uint8, device=device.torch_device)
    after = device.memory()
    assert after is not None
    assert size <= after.allocated - before.allocated < 2 * size
    del held
    device.return_freed_memory()
    assert device.free_memory() > 0
