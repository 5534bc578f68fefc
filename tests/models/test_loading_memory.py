"""Reading a checkpoint needs little memory beside the parameters it fills."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.models.gguf_bytes import TYPE_IDS, Gguf, Tensor

RESIDENT = """
import sys, torch
from pathlib import Path
from quire.models.load import open_checkpoint, read_piece

def resident(kind):
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(kind)).split()[1]) * 1024

checkpoint = open_checkpoint(Path(sys.argv[1]))
"""

MEASURE = (
    RESIDENT
    + """
targets = {name: torch.zeros(info.shape, dtype=torch.bfloat16) for name, info in checkpoint.tensors.items()}
before = resident("VmRSS")
Path("/proc/self/clear_refs").write_text("5")
for name, target in targets.items():
    checkpoint.read_into(name, target)
print(resident("VmHWM") - before)
"""
)


QUANTIZE = (
    RESIDENT
    + """
from quire.kernels.formats import FORMATS
from quire.models.pieces import Piece
rooms = {name: FORMATS[sys.argv[2]].empty(info.shape) for name, info in checkpoint.tensors.items()}
for room in rooms.values():
    for tensor in room:
        tensor.zero_()
before = resident("VmRSS")
Path("/proc/self/clear_refs").write_text("5")
for name, room in rooms.items():
    read_piece(checkpoint, Piece(name, name), FORMATS[sys.argv[2]], room)
print(resident("VmHWM") - before)
"""
)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="measures through /proc")
@pytest.mark.parametrize("name", ["INT8", "Q4_0"])
def test_quantising_takes_little_memory_beside_the_result(tmp_path: Path, name: str) -> None:
    """Never a whole tensor of plain numbers: this one has 64 MiB in float32."""
    save_file({"w": torch.zeros(16384, 1024, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", QUANTIZE, str(tmp_path), name]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) < 40 * 2**20


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="measures through /proc")
@pytest.mark.parametrize("format", ["safetensors", "gguf"])
def test_loading_takes_little_memory_beside_the_parameters(tmp_path: Path, format: str) -> None:
    tensors = {f"w{i}": torch.zeros(8192, 1024, dtype=torch.bfloat16) for i in range(4)}
    one = tensors["w0"].nbytes
    if format == "safetensors":
        save_file(tensors, tmp_path / "model.safetensors")
        # The page cache of the tensor being read is mapped and counts, that of those before it must
        # not.
        path, limit = tmp_path, one + 8 * 2**20
    else:
        # Usually 15, on a busy machine once 16.7; a whole tensor beside it would be 16 more, or 32
        # in float32.
        path, limit = tmp_path / "m.gguf", 22 * 2**20
        path.write_bytes(
            Gguf(tensors=[Tensor(name, (8192, 1024), TYPE_IDS["Q4_1"]) for name in tensors]).build()
        )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", MEASURE, str(path)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) < limit
