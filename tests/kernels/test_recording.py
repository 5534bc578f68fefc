"""Calls that are recorded and made again: the same results in the same memory, which stays within
bounds.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from quire.backends.cpu import recording
from quire.backends.cpu.kernels import CpuKernels
from quire.kernels.ops import Activation
from quire.kernels.weights import Weight


def recorded_gate(kernels: CpuKernels, x: Tensor) -> tuple[Tensor, object]:
    found: list[Tensor] = []
    replay = kernels.record(lambda: found.append(kernels.gate(x, Activation.SILU)))
    return found[-1], replay


def test_a_recording_computes_what_its_inputs_hold_now() -> None:
    kernels = CpuKernels()
    x = torch.randn(4, 64)
    out, replay = recorded_gate(kernels, x)
    assert torch.equal(out, kernels.gate(x, Activation.SILU))
    x.copy_(torch.randn(4, 64))
    assert not torch.equal(out, kernels.gate(x, Activation.SILU))
    assert callable(replay)
    replay()
    assert torch.equal(out, kernels.gate(x, Activation.SILU))


def test_recordings_of_growing_steps_share_their_memory() -> None:
    """A server's batches grow one by one: a memory of its own for each would take half the square
    of the largest. To record one, it is computed once.
    """
    kernels = CpuKernels()
    outputs = [recorded_gate(kernels, torch.randn(rows, 512))[0] for rows in range(1, 65)]
    assert len({out.untyped_storage().data_ptr() for out in outputs}) == 1
    counted: list[int] = []
    kernels.record(lambda: counted.append(1))
    assert counted == [1]


def test_results_that_nobody_holds_give_their_memory_to_later_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of 50 results of 16 KiB one after the other, a recording has room for five; the first one is
    held all along.
    """
    monkeypatch.setattr(recording, "_MAX_BYTES", 5 * (2**14 + 64))
    kernels, weight, x = CpuKernels(), torch.rand(64) + 0.5, torch.randn(64, 128)

    def compute() -> list[Tensor]:
        first = last = kernels.gate(x, Activation.SILU)
        for _ in range(50):
            last = kernels.add_rms_norm(last, first, weight, 1e-5)[0]
        return [first, last]

    found: list[Tensor] = []
    replay = kernels.record(lambda: found.extend(compute()))
    assert replay is not None
    x.copy_(torch.randn(64, 128))
    replay()
    for got, expected in zip(found, compute(), strict=True):
        assert torch.equal(got, expected)


def test_large_results_outside_recordings_use_memory_again() -> None:
    kernels, x = CpuKernels(), torch.randn(512, 2048)
    expected = (x[:, :1024].double().sigmoid() * x[:, :1024] * x[:, 1024:]).float()
    first = kernels.gate(x, Activation.SILU)
    second = kernels.gate(x, Activation.SILU)
    assert first.data_ptr() != second.data_ptr()
    torch.testing.assert_close(first, expected)
    places = {first.data_ptr(), second.data_ptr()}
    row = first[3]  # as good as the whole of it
    del first, second
    third, fourth = kernels.gate(-x, Activation.SILU), kernels.gate(x, Activation.SILU)
    assert third.data_ptr() in places
    assert fourth.data_ptr() not in places
    assert torch.equal(row, fourth[3])


def test_what_takes_too_much_memory_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "_MAX_BYTES", 1024)
    out, replay = recorded_gate(CpuKernels(), torch.randn(4, 512))
    assert replay is None
    assert out.shape == (4, 256)  # computed all the same


def test_what_another_thread_packs_meanwhile_is_no_part_of_a_recording() -> None:
    """An adapter's rows of the head, say: the memory that they were packed from is somebody else's by
    the time the calls are made again.
    """
    kernels, x = CpuKernels(), torch.randn(4, 64)
    y, plain = torch.randn(4, 64), torch.randn(48, 64)
    found: list[Tensor] = []

    def other() -> Tensor:
        packed = kernels.pack(Weight.dense(plain)).tensor
        kernels.gate(torch.randn(4, 64), Activation.SILU)
        return packed

    def compute() -> None:
        found.append(kernels.gate(x, Activation.SILU))
        with ThreadPoolExecutor(1) as thread:
            found.append(thread.submit(other).result())
        found.append(kernels.gate(y, Activation.SILU))

    replay = kernels.record(compute)
    assert replay is not None
    first, packed, second = found
    kept = packed.clone()
    plain.zero_()
    x.copy_(torch.randn(4, 64))
    y.copy_(torch.randn(4, 64))
    replay()
    assert torch.equal(packed, kept)
    assert torch.equal(first, kernels.gate(x, Activation.SILU))
    assert torch.equal(second, kernels.gate(y, Activation.SILU))
