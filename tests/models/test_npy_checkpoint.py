"""The .npy folder: read as numpy reads it, never unpickled; and the script that writes one."""

from __future__ import annotations

import io
import json
import runpy
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.errors import ModelFormatError, UnsupportedModelError
from quire.models.load import open_checkpoint
from tests.long_runs import examples
from tests.models.corruption import Damage, check_open_and_read, damages

SCRIPT = Path(__file__).parents[2] / "scripts" / "export_npy.py"


def npy(header: str, data_bytes: int = 0, version: int = 1, length: int | None = None) -> bytes:
    """A .npy file with exactly this header, and zeros for data."""
    width = 2 if version == 1 else 4
    size = (len(header) if length is None else length).to_bytes(width, "little")
    return b"\x93NUMPY" + bytes([version, 0]) + size + header.encode() + bytes(data_bytes)


def header(descr: str = "'<f4'", order: str = "False", shape: str = "(2, 3)") -> str:
    return f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}\n"


def saved(array: np.ndarray, version: tuple[int, int]) -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, array, version=version)
    return buffer.getvalue()


@given(
    st.lists(st.integers(1, 5), max_size=4).map(tuple),
    st.sampled_from(["float32", "float16"]),
    st.sampled_from([(1, 0), (2, 0), (3, 0)]),
)
@settings(max_examples=examples(60))
def test_arrays_of_any_shape_and_version_are_read_as_saved(
    tmp_path_factory: pytest.TempPathFactory,
    shape: tuple[int, ...],
    dtype: str,
    version: tuple[int, int],
) -> None:
    folder = tmp_path_factory.getbasetemp() / "shapes"
    folder.mkdir(exist_ok=True)
    array: np.ndarray = np.random.default_rng(0).standard_normal(shape).astype(dtype)
    (folder / "model.norm.weight.npy").write_bytes(saved(array, version))
    checkpoint = open_checkpoint(folder)
    info = checkpoint.tensors["model.norm.weight"]
    assert info.shape == shape
    assert info.dtype == {"float32": "F32", "float16": "F16"}[dtype]
    assert torch.equal(
        checkpoint.read("model.norm.weight"), torch.from_numpy(array.astype(np.float32))
    )


def test_a_tensor_larger_than_a_chunk_is_read_whole(tmp_path: Path) -> None:
    array = np.random.default_rng(0).standard_normal((3, 2**19 + 7), dtype=np.float32)
    np.save(tmp_path / "w.npy", array)
    assert torch.equal(open_checkpoint(tmp_path).read("w"), torch.from_numpy(array))


def test_the_test_vectors_are_not_weights(tmp_path: Path) -> None:
    for name in ("w", "test_tokens", "test_logits"):
        np.save(tmp_path / f"{name}.npy", np.zeros(3, np.float32))
    assert list(open_checkpoint(tmp_path).tensors) == ["w"]


BAD_FILES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", r"not a \.npy file"),
    "no magic": (b"PK\x03\x04" + bytes(40), r"not a \.npy file"),
    "unknown version": (npy(header(), 24, version=9), r"not a \.npy file"),
    "truncated header": (
        npy(header(), length=500),
        r"within the \d+ bytes of the file, got 500: .*truncated",
    ),
    "absurd header": (
        npy(header(), 24, version=2, length=2**31),
        r"at most 65536 bytes .*got 2147483648",
    ),
    "truncated data": (
        npy(header(), 20),
        r"tensor 'w': expected 24 bytes for F32 of shape \[2, 3\], got 20 bytes",
    ),
    "too much data": (npy(header(), 25), r"tensor 'w': expected 24 bytes .*got 25 bytes"),
    "absurd shape": (
        npy(header(shape="(99999999999999999, 8)")),
        r"tensor 'w': expected \d+ bytes",
    ),
    "longer number": (
        npy(header(shape=f"({'9' * 5000},)"), version=2),
        r"'w': expected a shape of whole numbers",
    ),
    "empty dimension": (npy(header(shape="(0, 3)")), r"'w': expected dimensions of at least 1"),
    "many dimensions": (
        npy(header(shape="(1,1,1,1,1,1,1,1,1)"), 4),
        r"'w': expected at most 8 dimensions, got 9",
    ),
    "broken shape": (
        npy(header(shape="(2,, 3)"), 24),
        r"'w': expected a shape of whole numbers, got '2,, 3'",
    ),
    "spaced shape": (npy(header(shape="(2 3,)"), 24), r"'w': expected a shape of whole numbers"),
    "negative shape": (npy(header(shape="(-2, 3)"), 24), r"'w': expected a header with descr"),
    "a call as shape": (npy(header(shape="(print(1),)"), 24), r"'w': expected a header with descr"),
    "records": (npy(header("[('a', '<f4')]"), 24), r"'w': expected a header with descr"),
    "key missing": (
        npy("{'descr': '<f4', 'shape': (2, 3), }", 24),
        r"'w': expected a header with descr",
    ),
    "key twice": (
        npy("{'descr': '<f4', 'descr': '<f4', 'shape': (6,)}", 24),
        r"'w': expected a header with descr",
    ),
    "column order": (
        npy(header(order="True"), 24),
        r"'w': .*got Fortran order: save np\.ascontiguousarray",
    ),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_bad_file_is_refused_naming_file_and_fault(tmp_path: Path, case: str) -> None:
    content, message = BAD_FILES[case]
    (tmp_path / "w.npy").write_bytes(content)
    with pytest.raises(ModelFormatError, match=r"w\.npy: .*" + message):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("dtype", ["<f8", ">f4", "<i4", "<c8", "|b1"])
def test_other_dtypes_are_unsupported(tmp_path: Path, dtype: str) -> None:
    np.save(tmp_path / "w.npy", np.zeros((2, 3), np.dtype(dtype)))
    with pytest.raises(
        UnsupportedModelError, match=r"tensor 'w' is stored as '.*': save it as little-endian"
    ):
        open_checkpoint(tmp_path)


class Bomb:
    """Leaves a mark when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return Path.touch, (self.mark,)  # type: ignore[return-value]


def test_pickled_objects_are_refused_and_not_run(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    array = np.empty(1, object)
    array[0] = Bomb(mark)
    np.save(tmp_path / "w.npy", array, allow_pickle=True)
    with pytest.raises(
        UnsupportedModelError, match="holds Python objects, which Quire never unpickles"
    ):
        open_checkpoint(tmp_path)
    assert not mark.exists()
    np.load(tmp_path / "w.npy", allow_pickle=True)
    assert mark.exists()  # so the file above would have done it


def test_links_out_of_the_folder_are_not_followed(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros(3, np.float32))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "w.npy").symlink_to(tmp_path / "x.npy")
    with pytest.raises(ModelFormatError, match=r"w\.npy: unsafe link"):
        open_checkpoint(folder)


INTACT = saved(np.random.default_rng(0).standard_normal((4, 5)).astype(np.float32), (1, 0))


@given(damages(128))
@settings(max_examples=examples(300))
def test_a_damaged_file_is_read_or_refused_and_nothing_else(
    tmp_path_factory: pytest.TempPathFactory, steps: list[Damage]
) -> None:
    data = INTACT
    for damage in steps:
        data = damage(data) or b"\0"
    folder = tmp_path_factory.getbasetemp() / "damaged_npy"
    folder.mkdir(exist_ok=True)
    (folder / "w.npy").write_bytes(data)
    check_open_and_read(folder)


@given(st.text(alphabet="{}[]()',: 0123456789TrueFalsdcshpot_n<f4\n", max_size=120))
@settings(max_examples=examples(200))
def test_any_header_is_read_or_refused_and_nothing_else(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    folder = tmp_path_factory.getbasetemp() / "npy_headers"
    folder.mkdir(exist_ok=True)
    (folder / "w.npy").write_bytes(npy(text, 24))
    check_open_and_read(folder)


def test_the_undamaged_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "w.npy").write_bytes(INTACT)
    assert check_open_and_read(tmp_path)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the script writes; tests/models/test_npy_golden.py runs it as a user does."""
    folder = tmp_path_factory.mktemp("exported")
    runpy.run_path(str(SCRIPT))["export"](folder, 0)
    return folder


def test_the_exported_model_has_the_shapes_of_its_config(exported: Path) -> None:
    config = json.loads((exported / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    sizes = (config["num_hidden_layers"], config["num_attention_heads"], config["hidden_size"])
    assert (*sizes, config["intermediate_size"], config["vocab_size"]) == (2, 4, 256, 1024, 16384)
    tensors = open_checkpoint(exported).tensors
    assert len(tensors) == 2 * 9 + 3
    assert (
        tensors["model.embed_tokens.weight"].shape
        == tensors["lm_head.weight"].shape
        == (16384, 256)
    )
    assert tensors["model.layers.1.self_attn.q_proj.weight"].shape == (256, 256)
    assert tensors["model.layers.1.mlp.gate_proj.weight"].shape == (1024, 256)
    assert tensors["model.layers.1.mlp.down_proj.weight"].shape == (256, 1024)
    tokens, logits = np.load(exported / "test_tokens.npy"), np.load(exported / "test_logits.npy")
    assert logits.shape == (len(tokens), 16384)
    assert logits.dtype == np.float32
    assert 0 <= tokens.min() <= tokens.max() < 16384
    # Of size one and not constant: a loader that gets weights wrong can't match them by accident.
    assert 0.5 < logits.std() < 5


def test_the_export_depends_on_the_seed_alone(exported: Path, tmp_path: Path) -> None:
    script = runpy.run_path(str(SCRIPT))
    again, other = tmp_path / "again", tmp_path / "other"
    script["export"](again, 0)
    script["export"](other, 7)
    names = sorted(path.name for path in exported.iterdir())
    assert names == sorted(path.name for path in again.iterdir())
    for name in names:
        assert (again / name).read_bytes() == (exported / name).read_bytes()
    for name in ("lm_head.weight.npy", "test_tokens.npy", "test_logits.npy"):
        assert (other / name).read_bytes() != (exported / name).read_bytes()
