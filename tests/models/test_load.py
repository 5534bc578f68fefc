"""Reading weights into a decoder: several tensors at a time, and what goes wrong meanwhile."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from quire import assemble
from quire.backends.cpu.device import CpuDevice
from quire.checkpoints.sources import resolve
from quire.config import EngineConfig
from quire.errors import DeviceError, ModelFormatError
from quire.kernels.reference import ReferenceKernels
from quire.models import load
from quire.models.load import Progress, open_checkpoint, open_model
from quire.tools.bench.random_checkpoint import write_checkpoint
from tests.decoding import load_decoder

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("original")
    write_checkpoint("tiny", folder)
    return folder


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    """A copy to do harm to."""
    for file in original.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def load_weights(
    folder: Path, dtype: torch.dtype, progress: Progress | None = None
) -> dict[str, torch.Tensor]:
    decoder = load_decoder(open_model(folder), ReferenceKernels(), dtype, CPU, progress=progress)
    return {name: weight.tensor for name, weight in decoder.weights.items()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weights_are_the_same_whoever_reads_them(
    original: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stored as bfloat16: one dtype is read straight into its place, the other is converted on the
    way.
    """
    together = load_weights(original, dtype)
    monkeypatch.setattr(load, "_NUM_READERS", 1)
    monkeypatch.setattr("quire.checkpoints.files._MAX_READ", 1000)
    monkeypatch.setattr("quire.checkpoints.checkpoint._MAX_STAGED_BYTES", 4096)
    alone = load_weights(original, dtype)
    stored = load_file(original / "model.safetensors")
    assert torch.equal(together["embedding"], stored["model.embed_tokens.weight"].to(dtype))
    query = stored["model.layers.1.self_attn.q_proj.weight"].to(dtype)
    assert torch.equal(together["layers.1.attention.qkv.weight"][: len(query)], query)
    assert together.keys() == alone.keys()
    assert all(torch.equal(together[name], alone[name]) for name in alone)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_target_need_not_be_in_one_piece(original: Path, dtype: torch.dtype) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    stored = load_file(original / "model.safetensors")[name]
    wide = torch.zeros(stored.shape[0], 2 * stored.shape[1], dtype=dtype)
    open_checkpoint(original).read_into(name, wide[:, ::2])
    assert torch.equal(wide[:, ::2], stored.to(dtype))
    assert not wide[:, 1::2].any()


def test_progress_is_told_from_nothing_to_all_by_the_thread_that_asked(original: Path) -> None:
    calls: list[tuple[int, int, threading.Thread]] = []
    load_weights(
        original,
        torch.bfloat16,
        lambda done, total: calls.append((done, total, threading.current_thread())),
    )
    total = sum(info.num_bytes for info in open_checkpoint(original).tensors.values())
    done = [call[0] for call in calls]
    assert done == sorted(set(done))
    assert (done[0], done[-1]) == (0, total)
    assert {call[1:] for call in calls} == {(total, threading.current_thread())}


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda file: file.unlink(), "is not a file; is the download complete"),
        (
            lambda file: file.write_bytes(file.read_bytes()[:-1]),
            "changed while it was being loaded",
        ),
    ],
)
def test_a_file_that_goes_bad_after_it_was_opened_is_an_error_like_any_other(
    folder: Path, harm: object, message: str
) -> None:
    files = open_model(folder)
    assert callable(harm)
    harm(folder / "model.safetensors")
    with pytest.raises(ModelFormatError, match=message) as caught:
        load_decoder(files, ReferenceKernels(), torch.bfloat16, CPU)
    assert str(folder / "model.safetensors") in str(caught.value)


def test_who_gives_up_in_the_middle_leaves_no_reader_behind(original: Path) -> None:
    def progress(done: int, total: int) -> None:
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load_weights(original, torch.float32, progress)
    assert not [
        thread.name for thread in threading.enumerate() if thread.name.startswith("weights")
    ]


def test_a_device_that_can_not_be_had_is_told_as_it_is_and_after_what_is_wrong_with_the_files(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is initialised in another thread while files are opened."""

    def fail(device: CpuDevice) -> None:
        assert threading.current_thread() is not threading.main_thread()
        raise DeviceError(f"{device} is broken")

    monkeypatch.setattr(CpuDevice, "initialise", fail)
    config = EngineConfig(device="cpu", dtype="float32", kv_cache_memory="16MiB", max_model_len=64)
    with pytest.raises(DeviceError, match="cpu is broken"):
        assemble.build_engine(resolve(str(folder)), config)
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ModelFormatError, match=r"tokenizer\.json"):
        assemble.build_engine(resolve(str(folder)), config)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weights_on_a_gpu_are_those_on_the_cpu(
    original: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = load_weights(original, dtype)
    # each buffer is used again and again
    monkeypatch.setattr("quire.checkpoints.checkpoint._MAX_STAGED_BYTES", 4096)
    decoder = load_decoder(open_model(original), ReferenceKernels(), dtype, torch.device("cuda"))
    assert all(
        torch.equal(there.tensor.cpu(), here[name]) for name, there in decoder.weights.items()
    )
