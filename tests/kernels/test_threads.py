"""The kernels' threads: any number, from any thread, in a fork; and how many there are cores for."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest
import torch

from quire.backends.cpu.kernels import CpuKernels
from quire.errors import DeviceError
from quire.kernels.ops import Activation
from quire.kernels.weights import Weight
from quire.process.granted import granted_cores


@pytest.fixture(scope="module")
def kernels() -> CpuKernels:
    try:
        return CpuKernels()
    except DeviceError as error:
        pytest.skip(str(error))


def work(kernels: CpuKernels, x: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
    """Several kinds of sharing out: tasks, and shares of rows."""
    packed = kernels.pack(Weight.dense(weight))
    return [
        kernels.linear(x, packed),
        kernels.gate(x, Activation.SILU),
        kernels.rms_norm(x, x[0], 1e-6),
    ]


@pytest.mark.usefixtures("threads")
def test_any_number_of_threads_gives_the_same_bits(kernels: CpuKernels) -> None:
    x, weight = torch.randn(70, 512), torch.randn(300, 512)
    torch.set_num_threads(1)
    expected = work(kernels, x, weight)
    for count in (2, 3, 8, 33, 2, 1):
        torch.set_num_threads(count)
        for _ in range(20):
            assert all(map(torch.equal, work(kernels, x, weight), expected))


@pytest.mark.usefixtures("threads")
def test_calls_from_several_threads_at_once(kernels: CpuKernels) -> None:
    x, weight = torch.randn(70, 512), torch.randn(300, 512)
    torch.set_num_threads(4)
    expected = work(kernels, x, weight)
    wrong: list[int] = []

    def run() -> None:
        found = (work(kernels, x, weight) for _ in range(50))
        wrong.extend(
            number for number, one in enumerate(found) if not all(map(torch.equal, one, expected))
        )

    callers = [threading.Thread(target=run) for _ in range(4)]
    for one in callers:
        one.start()
    for one in callers:
        one.join()
    assert not wrong


@pytest.mark.usefixtures("threads")
def test_a_fork_computes_alone(kernels: CpuKernels) -> None:
    """It has not got the threads, and none of them is waited for."""
    x = torch.randn(600, 512)
    torch.set_num_threads(4)
    expected = kernels.gate(x, Activation.SILU).numpy().tobytes()
    child = os.fork()
    if not child:
        signal.alarm(20)
        # Compared without torch, whose own threads a fork would wait for.
        os._exit(kernels.gate(x, Activation.SILU).numpy().tobytes() != expected)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 2**31),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, 2**31),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "200000 100000\n"}, 2),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "150000 100000\n"}, 1),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "10000 100000\n"}, 1),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "nonsense"}, 2**31),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": "300000 100000"}, 3),
        (
            {
                "proc/self/cgroup": "1:cpu:/x\n0::/a/b\n",
                "sys/fs/cgroup/a/b/cpu.max": "500000 100000",
                "sys/fs/cgroup/a/cpu.max": "400000 100000",
            },
            4,
        ),
        (
            {
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "250000",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            2,
        ),
        (
            {
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            2**31,
        ),
    ],
)
def test_a_containers_share_of_the_cores(tmp_path: Path, files: dict[str, str], cores: int) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert granted_cores(tmp_path) == cores
