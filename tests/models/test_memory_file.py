"""Tensors gathered in memory: the same bits, nothing half, and nothing left behind."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from quire.checkpoints import memory_file
from quire.checkpoints.memory_file import MemoryFile
from quire.checkpoints.safetensors_checkpoint import open_shards
from quire.errors import CapacityError, EngineError, ModelFormatError
from quire.parallel.packs import packs

TENSORS = {
    "a": torch.randn(7, 33),
    "b": torch.randn(5).bfloat16(),
    "c": torch.randn(3, 2, 5).half().transpose(0, 2),
}


def test_tensors_come_out_as_they_were_put_in(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({name: one.contiguous() for name, one in TENSORS.items()}, path)
    for from_file in (False, True):
        gathered = MemoryFile()
        if from_file:
            gathered.copy(open_shards([path], False))
        else:
            for name, tensor in TENSORS.items():
                gathered.write(name, tensor)
        found = gathered.checkpoint()
        assert gathered.names == TENSORS.keys() == found.tensors.keys()
        for name, tensor in TENSORS.items():
            target = torch.empty(tensor.shape, dtype=tensor.dtype)
            found.read_into(name, target)
            assert torch.equal(target, tensor)
        (place,) = {info.file for info in found.tensors.values()}
        gathered.close()
        gathered.close()
        with pytest.raises(ModelFormatError):
            found.read("a")
        assert not place.exists()


def test_what_can_not_be_had_or_read_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.safetensors"
    save_file({name: one.contiguous() for name, one in TENSORS.items()}, path)
    stored = open_shards([path], False)
    gathered = MemoryFile()
    gathered.write("x", TENSORS["a"])
    end = gathered.end
    with pytest.raises(CapacityError, match="MiB of the host's memory"):
        gathered.reserve("y", "F32", (2**30, 2**20))
    monkeypatch.setattr(memory_file, "available_memory", lambda: 0)
    with pytest.raises(CapacityError, match="takes 0 MiB of the host's memory"):
        gathered.copy(stored)
    monkeypatch.undo()
    with pytest.raises(EngineError, match="forgotten"):
        gathered.copy(stored, lambda: False)
    path.write_bytes(path.read_bytes())  # another time of change
    with pytest.raises(ModelFormatError, match="changed while it was being loaded"):
        gathered.copy(stored)
    assert (gathered.end, gathered.names) == (end, {"x"})
    target = torch.empty(7, 33)
    gathered.checkpoint().read_into("x", target)
    assert torch.equal(target, TENSORS["a"])


def test_packs_are_cut_where_they_become_larger_than_they_should() -> None:
    """As vLLM's `packed_broadcast_producer` cuts them."""
    sizes = [3, 3, 3, 10, 1, 1]
    assert list(packs(sizes, 5)) == [slice(0, 2), slice(2, 4), slice(4, 6)]
    assert list(packs(sizes, 100)) == [slice(0, 6)]
    assert list(packs(sizes, 6)) == [slice(0, 3), slice(3, 4), slice(4, 6)]
    assert list(packs([], 5)) == []
