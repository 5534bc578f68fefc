"""Safetensors: single files and shards read as saved, and everything that can be wrong with them is
named.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from quire.checkpoints.files import parse_json, read_json, safe_member
from quire.errors import ModelFormatError, UnsupportedModelError
from quire.models.load import open_checkpoint
from tests.long_runs import examples
from tests.models.corruption import Damage, check_open_and_read, damages

FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def random_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(3, 4, generator=generator).to(dtype) for name, dtype in FLOATS.items()
    }


def header_file(header: object, data_bytes: int = 0, length: int | None = None) -> bytes:
    """A safetensors file with exactly this header, and zeros for data."""
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (
        (len(encoded) if length is None else length).to_bytes(8, "little")
        + encoded
        + bytes(data_bytes)
    )


def entry(
    dtype: object = "F32", shape: object = (2, 3), offsets: object = (0, 24)
) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def write_sharded(folder: Path, shards: dict[str, dict[str, torch.Tensor]]) -> dict[str, str]:
    weight_map = {name: file for file, tensors in shards.items() for name in tensors}
    for file, tensors in shards.items():
        save_file(tensors, folder / file)
    write_index(folder, weight_map)
    return weight_map


def write_index(folder: Path, weight_map: object) -> None:
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )


@pytest.mark.parametrize("file", ["model.safetensors", "weights.safetensors"])
def test_a_single_file_reads_as_saved(tmp_path: Path, file: str) -> None:
    tensors = random_tensors() | {
        "scalar": torch.tensor(2.5),
        "cube": torch.arange(24.0).view(2, 3, 4),
    }
    save_file(tensors, tmp_path / file, metadata={"format": "pt"})
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        info = checkpoint.tensors[name]
        assert (info.shape, info.num_bytes) == (tuple(tensor.shape), tensor.nbytes)
        assert info.dtype == (name if name in FLOATS else "F32")
        assert torch.equal(checkpoint.read(name), tensor.float())
        for dtype in FLOATS.values():
            target = torch.zeros(*tensor.shape, 2, dtype=dtype)[..., 1]
            checkpoint.read_into(name, target)
            assert torch.equal(target, tensor.to(dtype))


def test_a_tensor_larger_than_a_chunk_is_read_whole(tmp_path: Path) -> None:
    tensors = {"rows": torch.randn(3, 300, 1024), "long": torch.randn(2, 2**19 + 3)}
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    for name, tensor in tensors.items():
        assert torch.equal(checkpoint.read(name), tensor)


def test_shards_are_read_as_one(tmp_path: Path) -> None:
    tensors = random_tensors()
    first = {"F64": tensors.pop("F64")}
    write_sharded(tmp_path, {"a.safetensors": first, "b.safetensors": tensors})
    checkpoint = open_checkpoint(tmp_path)
    for name, tensor in (first | tensors).items():
        assert torch.equal(checkpoint.read(name), tensor.float())
    assert checkpoint.tensors["F64"].file == tmp_path / "a.safetensors"


def test_a_snapshot_of_the_hugging_face_cache_is_read_through_its_links(tmp_path: Path) -> None:
    entry_folder = tmp_path / "models--org--name"
    snapshot = entry_folder / "snapshots" / "0123abcd"
    blobs = entry_folder / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    write_sharded(snapshot, {"a.safetensors": random_tensors()})
    for number, path in enumerate(sorted(snapshot.iterdir())):
        path.rename(blobs / f"blob{number}")
        path.symlink_to(Path("../../blobs") / f"blob{number}")
    assert open_checkpoint(snapshot).tensors.keys() == FLOATS.keys()


BAD_FILES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", r"truncated: expected at least 8 bytes, got 0"),
    "truncated header": (
        header_file({"w": entry()}, length=1000),
        r"expected a header of 1000 bytes",
    ),
    "absurd header": (
        header_file({}, length=2**63),
        r"at most 100000000 bytes, got 9223372036854775808",
    ),
    "not JSON": (header_file(b"{nope}"), r"not valid JSON"),
    "not UTF-8": (header_file(b'{"\xff": 1}'), r"not valid JSON"),
    "not an object": (header_file([1, 2]), r"expected a JSON object, got list"),
    "deep JSON": (header_file(b'{"a":' + b"[" * 200_000), r"nested too deeply"),
    "many values": (header_file(b"[" * 4_000_001), r"expected at most 4000000 JSON values"),
    "NaN": (header_file(b'{"w": NaN}'), r"NaN is not a JSON number"),
    "entry is a number": (
        header_file({"w": 3}),
        r"tensor 'w': expected dtype, shape and data_offsets, got 3",
    ),
    "unknown dtype": (
        header_file({"w": entry("F33")}, 24),
        r"tensor 'w': expected a dtype .*got 'F33'",
    ),
    "no dtype": (header_file({"w": entry(None)}, 24), r"tensor 'w': expected a dtype .*got None"),
    "shape of text": (
        header_file({"w": entry(shape="23")}, 24),
        r"'w': expected a shape of whole numbers, got '23'",
    ),
    "shape of truth": (
        header_file({"w": entry(shape=[True, 6])}, 24),
        r"'w': expected a shape of whole numbers",
    ),
    "negative shape": (
        header_file({"w": entry(shape=[-2, -3])}, 24),
        r"'w': expected dimensions of at least 1",
    ),
    "empty shape": (
        header_file({"w": entry(shape=[0, 2**62], offsets=[0, 0])}),
        r"dimensions of at least 1",
    ),
    "many dimensions": (
        header_file({"w": entry(shape=[1] * 9)}, 24),
        r"'w': expected at most 8 dimensions, got 9",
    ),
    "absurd shape": (
        header_file({"w": entry(shape=[2**62, 2**62])}, 24),
        r"'w': expected \d+ bytes for F32 of shape",
    ),
    "wrong size": (
        header_file({"w": entry(shape=[2, 4])}, 24),
        r"'w': expected 32 bytes for F32 .*got 24 bytes",
    ),
    "offsets swapped": (
        header_file({"w": entry(offsets=[24, 0])}, 24),
        r"'w': expected data_offsets \[begin, end\]",
    ),
    "three offsets": (
        header_file({"w": entry(offsets=[0, 1, 2])}, 24),
        r"'w': expected data_offsets",
    ),
    "negative offset": (
        header_file({"w": entry(offsets=[-24, 0])}, 24),
        r"'w': expected data_offsets",
    ),
    "offset outside": (
        header_file({"w": entry(offsets=[8, 32])}, 24),
        r"'w': expected its data within .*end at 32",
    ),
    "truncated data": (
        header_file({"w": entry()}, 20),
        r"'w': expected its data within the file's 20 bytes",
    ),
    "overlap": (
        header_file({"v": entry(), "w": entry(offsets=[12, 36])}, 36),
        r"'w': .*overlapping data",
    ),
    "hole": (
        header_file({"w": entry(offsets=[4, 28])}, 28),
        r"'w': expected data from byte 0, got 4: a hole",
    ),
    "rest": (header_file({"w": entry()}, 30), r"expected \d+ bytes by its header, got \d+"),
    "double tensor": (header_file(b'{"w": {}, "w": {}}'), r"'w' is there twice"),
    "name no library takes": (
        header_file(b'{"\\ud800":' + json.dumps(entry()).encode() + b"}", 24),
        r"not a valid",
    ),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_bad_file_is_refused_naming_file_and_fault(tmp_path: Path, case: str) -> None:
    content, message = BAD_FILES[case]
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelFormatError, match=r"model\.safetensors: .*" + message):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(("dtype", "bits"), [("I8", 8), ("F8_E4M3", 8), ("I64", 64), ("U8", 8)])
def test_a_dtype_that_holds_no_plain_weights_is_unsupported(
    tmp_path: Path, dtype: str, bits: int
) -> None:
    size = 6 * bits // 8
    (tmp_path / "model.safetensors").write_bytes(
        header_file({"w": entry(dtype, offsets=[0, size])}, size)
    )
    with pytest.raises(
        UnsupportedModelError, match=rf"tensor 'w' is stored as {dtype}; Quire loads F64, F32"
    ):
        open_checkpoint(tmp_path)


def test_control_characters_in_names_do_not_reach_the_terminal(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(header_file({"\x1b[2J" + "x" * 10_000: 3}))
    with pytest.raises(ModelFormatError) as caught:
        open_checkpoint(tmp_path)
    assert "\x1b" not in str(caught.value)
    assert len(str(caught.value)) < 500


def outside(folder: Path) -> Path:
    other = folder.parent / "outside"
    other.mkdir()
    save_file(random_tensors(), other / "x.safetensors")
    return other / "x.safetensors"


def link(folder: Path, name: str) -> None:
    (folder / name).symlink_to(outside(folder))


BAD_INDICES: dict[str, tuple[object, Callable[[Path], object], str]] = {
    "no map": ([1], lambda _: None, r"index\.json: expected a weight_map"),
    "empty map": ({}, lambda _: None, r"index\.json: expected a weight_map"),
    "number as file": (
        {"F32": 3},
        lambda _: None,
        r"index\.json: tensor 'F32': expected the name of its file, got 3",
    ),
    "pickle as shard": (
        {"F32": "a.bin"},
        lambda _: None,
        r"'F32': expected a \.safetensors file, got 'a\.bin'",
    ),
    "missing shard": (
        {"F32": "b.safetensors"},
        lambda _: None,
        r"b\.safetensors: the file is missing",
    ),
    "parent folder": (
        {"F32": "../outside/x.safetensors"},
        outside,
        r"unsafe file name '\.\./outside/x\.safe",
    ),
    "absolute": (
        {"F32": "/etc/x.safetensors"},
        lambda _: None,
        r"unsafe file name '/etc/x\.safetensors'",
    ),
    "subfolder": ({"F32": "sub/x.safetensors"}, lambda _: None, r"unsafe file name"),
    "backslash": ({"F32": "..\\x.safetensors"}, lambda _: None, r"unsafe file name"),
    "drive": ({"F32": "C:x.safetensors"}, lambda _: None, r"unsafe file name"),
    "zero byte": ({"F32": "x\0.safetensors"}, lambda _: None, r"unsafe file name"),
    "half a character": ({"F32": "\ud800.safetensors"}, lambda _: None, r"unsafe file name"),
    "long name": ({"F32": "x" * 300 + ".safetensors"}, lambda _: None, r"unsafe file name"),
    "link outside": (
        {"F32": "l.safetensors"},
        lambda f: link(f, "l.safetensors"),
        r"l\.safetensors: unsafe link",
    ),
    "link to itself": (
        {"F32": "l.safetensors"},
        lambda folder: (folder / "l.safetensors").symlink_to("l.safetensors"),
        r"l\.safetensors: ",
    ),
    "pipe": (
        {"F32": "p.safetensors"},
        lambda folder: os.mkfifo(folder / "p.safetensors"),
        r"p\.safetensors: the file is missing",
    ),
    "tensor not there": (
        {"F32": "a.safetensors", "w": "a.safetensors"},
        lambda _: None,
        r"tensor 'w': .*no such tensor",
    ),
    "tensor elsewhere": (
        {"F32": "a.safetensors", "F16": "b.safetensors"},
        lambda folder: save_file({"other": torch.ones(2)}, folder / "b.safetensors"),
        r"b\.safetensors: tensor 'F16': expected it in this file .*got it in a\.safetensors",
    ),
    "tensor twice": (
        {"F32": "a.safetensors", "w": "b.safetensors"},
        lambda folder: save_file(
            {"w": torch.ones(2), "F32": torch.ones(2)}, folder / "b.safetensors"
        ),
        r"b\.safetensors: tensor 'F32' is also in a\.safetensors",
    ),
}


@pytest.mark.parametrize("case", BAD_INDICES)
def test_a_bad_index_is_refused_naming_file_and_fault(tmp_path: Path, case: str) -> None:
    weight_map, prepare, message = BAD_INDICES[case]
    folder = tmp_path / "model"
    folder.mkdir()
    save_file(random_tensors(), folder / "a.safetensors")
    write_index(folder, weight_map)
    prepare(folder)
    with pytest.raises(ModelFormatError, match=message):
        open_checkpoint(folder)


def test_a_linked_folder_is_opened_but_links_out_of_it_are_not_followed(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file(random_tensors(), folder / "model.safetensors")
    (tmp_path / "link").symlink_to(folder)
    assert open_checkpoint(tmp_path / "link").tensors.keys() == FLOATS.keys()
    (folder / "model.safetensors").unlink()
    link(folder, "model.safetensors")
    with pytest.raises(ModelFormatError, match="unsafe link"):
        open_checkpoint(folder)


def test_links_into_the_blobs_of_another_cache_entry_are_not_followed(tmp_path: Path) -> None:
    for name in ("models--org--a", "models--org--b"):
        (tmp_path / name / "blobs").mkdir(parents=True)
        (tmp_path / name / "blobs" / "x").write_bytes(b"")
    snapshot = tmp_path / "models--org--a" / "snapshots" / "0"
    snapshot.mkdir(parents=True)
    (snapshot / "own").symlink_to("../../blobs/x")
    (snapshot / "foreign").symlink_to("../../../models--org--b/blobs/x")
    assert safe_member(snapshot, "own") == snapshot / "own"
    with pytest.raises(ModelFormatError, match="unsafe link"):
        safe_member(snapshot, "foreign")


def test_folders_without_readable_weights_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ModelFormatError, match=r"no weights found: expected \*\.safetensors"):
        open_checkpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(UnsupportedModelError, match=r"pickles .*convert them to safetensors"):
        open_checkpoint(tmp_path)
    with pytest.raises(
        UnsupportedModelError, match=r"pytorch_model\.bin: a single file must be a \.gguf"
    ):
        open_checkpoint(tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelFormatError, match="no such file or folder"):
        open_checkpoint(tmp_path / "nothing")
    for name in ("a.safetensors", "b.safetensors"):
        save_file(random_tensors(), tmp_path / name)
    with pytest.raises(ModelFormatError, match=r"got 2 other \.safetensors files"):
        open_checkpoint(tmp_path)


def test_json_beyond_its_size_limit_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"a": 1}')
    assert read_json(path) == {"a": 1}
    with pytest.raises(ModelFormatError, match="expected at most 7 bytes of JSON, got 8"):
        read_json(path, max_bytes=7)


@given(
    st.recursive(
        st.none() | st.integers() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
@settings(max_examples=examples(100))
def test_json_objects_are_parsed_as_the_json_module_does(value: Any) -> None:
    data = json.dumps({"value": value}).encode()
    assert parse_json(data, Path("x")) == {"value": value}


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("intact") / "model.safetensors"
    save_file(random_tensors(), path)
    assert check_open_and_read(path.parent)
    return path.read_bytes()


@given(damages(300))
@settings(max_examples=examples(400))
def test_a_damaged_file_is_read_or_refused_and_nothing_else(
    tmp_path_factory: pytest.TempPathFactory, intact: bytes, steps: list[Damage]
) -> None:
    folder = tmp_path_factory.getbasetemp() / "damaged"
    folder.mkdir(exist_ok=True)
    for damage in steps:
        intact = damage(intact) or b"\0"
    (folder / "model.safetensors").write_bytes(intact)
    check_open_and_read(folder)


_json_values = st.one_of(
    st.none(), st.booleans(), st.text(max_size=5), st.integers(-5, 40), st.integers(2**60, 2**70),
    st.lists(st.integers(-2, 40), max_size=4), st.sampled_from(["F32", "BF16", "I8", "F4"]),
)  # fmt: skip
_entries = st.fixed_dictionaries(
    {}, optional={"dtype": _json_values, "shape": _json_values, "data_offsets": _json_values}
)


@given(
    st.dictionaries(st.text(max_size=4), st.one_of(_json_values, _entries), max_size=3),
    st.integers(0, 40),
)
@settings(max_examples=examples(300))
def test_any_header_is_read_or_refused_and_nothing_else(
    tmp_path_factory: pytest.TempPathFactory, header: dict[str, object], data_bytes: int
) -> None:
    folder = tmp_path_factory.getbasetemp() / "headers"
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(header_file(header, data_bytes))
    check_open_and_read(folder)
