"""A trainer's weights by NCCL, as far as one card goes: NCCL wants a card for each rank."""

from __future__ import annotations

import socket
import threading
from contextlib import closing

import pytest
import torch

from quire.checkpoints.memory_file import MemoryFile
from quire.errors import EngineError
from quire.parallel.transfer import TransferError
from quire.server.link.weight_receiver import Place, WeightReceiver
from quire.train.transfer import WeightSender
from tests.gpu.support import DEVICE

pytestmark = pytest.mark.gpu

SECONDS = 60.0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        port: int = one.getsockname()[1]
    return port


@pytest.mark.parametrize("packed_bytes", [None, 4096])
def test_a_sender_alone_broadcasts_its_tensors(packed_bytes: int | None) -> None:
    tensors = [
        ("a", torch.arange(1000, dtype=torch.float32, device=DEVICE)),
        ("b", torch.ones(3, 700, dtype=torch.bfloat16, device=DEVICE).T),
        ("c", torch.arange(7, dtype=torch.int8)),
    ]
    before = [tensor.clone() for _, tensor in tensors]
    with WeightSender(
        free_port(), 1, backend="nccl", device=str(DEVICE), seconds=SECONDS
    ) as sender:
        sender.send(tensors, packed_bytes)
    assert all(torch.equal(one, other) for (_, one), other in zip(tensors, before, strict=True))


def test_two_ranks_on_one_card_are_told_why_they_cannot_meet() -> None:
    port = free_port()
    place = Place("127.0.0.1", port, 1, 2, "nccl", str(DEVICE), SECONDS)
    failed: list[Exception] = []

    def send() -> None:
        try:
            with WeightSender(
                port, 2, backend="nccl", device=str(DEVICE), seconds=SECONDS
            ) as sender:
                sender.send([("a", torch.ones(64, device=DEVICE))])
        except TransferError as error:
            failed.append(error)

    trainer = threading.Thread(target=send)
    trainer.start()
    with closing(MemoryFile()) as file, closing(WeightReceiver(place)) as receiver:
        file.reserve("a", "F32", (64,))
        with pytest.raises(EngineError, match=r"the transfer broke off: .*NCCL"):
            receiver.receive(file, [(0, 256)])
    trainer.join(2 * SECONDS)
    assert not trainer.is_alive()
    assert "NCCL" in str(failed[0])
