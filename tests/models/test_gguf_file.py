"""GGUF: headers and values read as the gguf package reads them, bit for bit; bad files refused."""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
from gguf.quants import dequantize as gguf_dequantize
from gguf.quants import quantize as gguf_quantize
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.checkpoints.checkpoint import chunks_of
from quire.checkpoints.gguf_file import read_gguf
from quire.checkpoints.gguf_types import OTHER_TYPES, TYPE_NAMES
from quire.checkpoints.sources import ModelSource
from quire.errors import ModelFormatError, UnsupportedModelError
from quire.kernels.formats import FORMATS
from quire.models.load import open_checkpoint
from quire.server.config import ServerConfig
from quire.server.http_server import open_tokenizer
from tests.long_runs import examples
from tests.models.corruption import Damage, check_open_and_read, damages
from tests.models.gguf_bytes import TYPE_IDS, Gguf, Tensor, array, pair, text, u16, u32

QUANTISABLE = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"]
K_QUANTS = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
"""Where the float16 scales of a block stand."""


def save(folder: Path, model: Gguf, name: str = "m.gguf") -> Path:
    path = folder / name
    path.write_bytes(model.build())
    return path


def small_model() -> Gguf:
    numbers = np.random.default_rng(0).standard_normal((3, 64), dtype=np.float32)
    tensors = [
        Tensor(
            name,
            numbers.shape,
            TYPE_IDS[name],
            gguf_quantize(numbers, gguf.GGMLQuantizationType[name]).tobytes(),
        )
        for name in QUANTISABLE
    ]
    pairs = [
        pair("general.architecture", 8, text("llama")),
        u32("general.alignment", 32),
        pair("x.eps", 6, struct.pack("<f", 0.5)),
        pair("x.flag", 7, b"\x01"),
        array("tokenizer.ggml.tokens", 8, 3, text("a") + text("bé") + text("")),
        array("x.scores", 6, 2, struct.pack("<2f", 1.5, -2)),
        array("x.nested", 9, 1, struct.pack("<IQ", 5, 2) + struct.pack("<2i", -1, 7)),
    ]
    return Gguf(pairs, tensors)


def expand(data: npt.NDArray[np.generic], dtype: str) -> torch.Tensor:
    """The numbers of whole blocks, flat."""
    return (
        FORMATS[dtype]
        .expand(torch.from_numpy(np.frombuffer(data.tobytes(), np.uint8).copy()))
        .view(-1)
    )


def test_layouts_and_type_numbers_are_those_of_the_gguf_package() -> None:
    for number, name in {**TYPE_NAMES, **OTHER_TYPES}.items():
        assert gguf.GGMLQuantizationType[name].value == number
    for name in TYPE_NAMES.values():
        layout = FORMATS[name]
        sizes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
        assert (layout.num_elements, layout.num_bytes) == sizes
    known = TYPE_NAMES.keys() | OTHER_TYPES.keys()
    assert {int(kind) for kind in gguf.GGMLQuantizationType if kind <= 39} == known


def test_metadata_of_every_type_is_read(tmp_path: Path) -> None:
    scalars: dict[int, tuple[str, float]] = {
        0: ("B", 200),
        1: ("b", -7),
        2: ("H", 60000),
        3: ("h", -9),
        4: ("I", 2**32 - 1),
        5: ("i", -(2**31)),
    }
    scalars |= {6: ("f", 0.25), 10: ("Q", 2**64 - 1), 11: ("q", -(2**63)), 12: ("d", 1e300)}
    pairs = [
        pair(f"k{n}", n, struct.pack("<" + code, value)) for n, (code, value) in scalars.items()
    ]
    header = read_gguf(save(tmp_path, Gguf(pairs + small_model().pairs, version=2)))
    assert header.version == 2
    for number, (_, value) in scalars.items():
        assert header.metadata[f"k{number}"] == value
    assert header.metadata["general.architecture"] == "llama"
    assert header.metadata["x.flag"] is True
    assert header.metadata["tokenizer.ggml.tokens"] == ["a", "bé", ""]
    assert header.metadata["x.scores"] == [1.5, -2.0]
    assert header.metadata["x.nested"] == [[-1, 7]]


def test_a_file_of_the_gguf_package_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "written.gguf"
    numbers = {
        f"t{i}": np.random.default_rng(i).standard_normal((2, 3, 64), dtype=np.float32)
        for i in range(3)
    }
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(64)
    writer.add_array("tokenizer.ggml.tokens", ["x", "ÿ", "你好"])
    for name, value in numbers.items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    header = read_gguf(path)
    assert header.metadata["tokenizer.ggml.tokens"] == ["x", "ÿ", "你好"]
    checkpoint = open_checkpoint(path)
    assert list(checkpoint.tensors) == list(numbers)
    for name, value in numbers.items():
        assert checkpoint.tensors[name].offset % 64 == 0
        assert checkpoint.tensors[name].shape == (2, 3, 64)
        assert torch.equal(checkpoint.read(name), torch.from_numpy(value))


@pytest.mark.slow
def test_smollm2_is_read_as_the_gguf_package_reads_it(smollm2_gguf: Path) -> None:
    reference = gguf.GGUFReader(smollm2_gguf)
    header = read_gguf(smollm2_gguf)
    fields = {key: value for key, value in reference.fields.items() if not key.startswith("GGUF.")}
    assert header.metadata.keys() == fields.keys()
    for key, value in fields.items():
        assert header.metadata[key] == value.contents(), key
    assert [info.name for info in header.tensors.values()] == [
        tensor.name for tensor in reference.tensors
    ]
    checkpoint = open_checkpoint(smollm2_gguf)
    for tensor in reference.tensors[:12]:
        info = header.tensors[tensor.name]
        assert info.shape == tuple(tensor.shape.tolist()[::-1])
        assert (info.dtype, info.offset) == (tensor.tensor_type.name, tensor.data_offset)
        expected = torch.from_numpy(gguf_dequantize(tensor.data, tensor.tensor_type).copy())
        assert torch.equal(checkpoint.read(tensor.name), expected)


@pytest.mark.parametrize("dtype", QUANTISABLE)
def test_dequantised_values_equal_those_of_gguf(dtype: str) -> None:
    numbers = np.random.default_rng(1).standard_normal((37, 96), dtype=np.float32) * 3
    kind = gguf.GGMLQuantizationType[dtype]
    data = gguf_quantize(numbers, kind)
    expected = gguf_dequantize(data, kind).reshape(-1)
    result = expand(data, dtype)
    assert torch.equal(result.float(), torch.from_numpy(expected))


@pytest.mark.parametrize("dtype", K_QUANTS)
def test_dequantised_k_quants_equal_those_of_gguf(dtype: str) -> None:
    random = np.random.default_rng(2)
    # More than one call's worth, with a rest.
    blocks = random.integers(0, 256, (2**17 // 256 + 5, FORMATS[dtype].num_bytes), dtype=np.uint8)
    for place in K_QUANTS[dtype]:
        scales = random.uniform(-2, 2, len(blocks)).astype(np.float16)
        blocks[:, place : place + 2] = scales.view(np.uint8).reshape(-1, 2)
    expected = gguf_dequantize(blocks, gguf.GGMLQuantizationType[dtype]).reshape(-1)
    assert np.isfinite(expected).all()
    assert torch.equal(expand(blocks, dtype), torch.from_numpy(expected))


@given(st.lists(st.integers(1, 9), max_size=4).map(tuple), st.integers(1, 40))
@settings(max_examples=examples(200))
def test_chunks_cover_a_shape_once_in_order_and_within_the_limit(
    shape: tuple[int, ...], limit: int
) -> None:
    numbers = torch.arange(int(np.prod(shape))).reshape(shape)
    covered = []
    for chunk in chunks_of(shape, limit):
        part = numbers[chunk.index]
        assert tuple(part.shape) == chunk.shape
        assert chunk.num_elements == part.numel() <= limit
        assert part.flatten()[0] == chunk.start
        covered += part.flatten().tolist()
    assert covered == list(range(numbers.numel()))


@pytest.mark.parametrize("dtype", ["Q4_1", "Q6_K", "F16"])
@pytest.mark.parametrize("shape", [(3, 300, 1024), (2, 2**19 + 1024)])
def test_tensors_larger_than_a_chunk_are_read_whole(
    tmp_path: Path, dtype: str, shape: tuple[int, ...]
) -> None:
    layout = FORMATS[dtype]
    num_bytes = int(np.prod(shape)) // layout.num_elements * layout.num_bytes
    # Small bytes make small float16 scales, so nothing overflows.
    data = np.random.default_rng(3).integers(0, 50, num_bytes, dtype=np.uint8)
    path = save(tmp_path, Gguf(tensors=[Tensor("w", shape, TYPE_IDS[dtype], data.tobytes())]))
    rows = data.reshape(*shape[:-1], -1)
    expected = torch.from_numpy(gguf_dequantize(rows, gguf.GGMLQuantizationType[dtype])).float()
    assert torch.equal(open_checkpoint(path).read("w"), expected.reshape(shape))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_reading_fills_a_strided_view_in_any_dtype_and_nothing_else(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    checkpoint = open_checkpoint(save(tmp_path, small_model()))
    packed = torch.nn.Parameter(torch.full((64, 9), 7, dtype=dtype))
    checkpoint.read_into("Q4_0", packed[:, 3:9:2].T)
    assert torch.equal(packed[:, 3:9:2].T, checkpoint.read("Q4_0").to(dtype))
    assert (packed[:, [0, 1, 2, 4, 6, 8]] == 7).all()


def test_reading_into_a_wrong_shape_names_tensor_expected_got_and_file(tmp_path: Path) -> None:
    path = save(tmp_path, small_model())
    with pytest.raises(
        ModelFormatError,
        match=r"m\.gguf: tensor 'F32': expected shape \[64, 3\], got shape \[3, 64\]",
    ):
        open_checkpoint(path).read_into("F32", torch.empty(64, 3))


def test_reading_what_is_not_there_or_after_close_is_an_error(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(save(tmp_path, small_model()))
    with pytest.raises(ModelFormatError, match=r"m\.gguf: tensor 'nope' is missing"):
        checkpoint.read("nope")
    with pytest.raises(TypeError, match="int32"):
        checkpoint.read_into("F32", torch.empty(3, 64, dtype=torch.int32))
    checkpoint.close()
    with pytest.raises(ValueError, match="closed"):
        checkpoint.read("F32")


def test_a_file_that_changes_while_it_is_loaded_is_noticed(tmp_path: Path) -> None:
    path = save(tmp_path, small_model())
    checkpoint = open_checkpoint(path)
    path.write_bytes(path.read_bytes()[:-64])
    with pytest.raises(ModelFormatError, match="changed while it was being loaded"):
        checkpoint.read("F32")


def with_tensor(**changes: object) -> Gguf:
    return Gguf(tensors=[Tensor(**{"name": "w", "shape": (2, 32), "type_id": 0, **changes})])  # type: ignore[arg-type]


BAD_FILES: dict[str, tuple[Gguf | bytes, str]] = {
    "empty": (b"", r"truncated: expected at least 24 bytes, got 0"),
    "no magic": (Gguf(magic=b"GGML"), r"not a GGUF file"),
    "truncated header": (small_model().build()[:200], r"truncated"),
    "truncated data": (
        small_model().build()[:-400],
        r"tensor 'Q4_1': expected its 120 bytes within the file",
    ),
    "too many tensors": (
        Gguf(num_tensors=2**62),
        r"expected at most \d+ tensors.*got 4611686018427387904",
    ),
    "more tensors than bytes": (
        Gguf(num_tensors=1000),
        r"1000 tensors: expected at least 32000 bytes, got 16: truncated",
    ),
    "too many pairs": (Gguf(num_pairs=2**63), r"metadata pairs.*got 9223372036854775808"),
    "pair without bytes": (
        Gguf([text("k")]).header(),
        r"1 metadata pairs: expected at least 13 bytes, got 9: truncated",
    ),
    "long key": (
        Gguf([struct.pack("<Q", 2**40) + bytes(40)]),
        r"key: expected a string of at most 65535 bytes",
    ),
    "long string": (
        Gguf([pair("k", 8, struct.pack("<Q", 2**25) + bytes(9))]),
        r"'k': expected 33554432 bytes",
    ),
    "long array": (
        Gguf([array("k", 4, 2**50, bytes(40))]),
        r"elements of metadata 'k'.*got 1125899906842624",
    ),
    "long strings": (
        Gguf([array("k", 8, 2, text("ab") + struct.pack("<Q", 2**60))]),
        r"'k': string 1 of 2",
    ),
    "deep arrays": (
        Gguf([array("k", 9, 1, struct.pack("<IQ", 9, 1) * 9)]),
        r"nested more than 4 deep",
    ),
    "unknown value type": (
        Gguf([pair("k", 13, bytes(8))]),
        r"'k': expected a value type from 0 to 12, got 13",
    ),
    "bad boolean": (Gguf([pair("k", 7, b"\x02")]), r"expected a boolean 0 or 1, got 2"),
    "bad text": (Gguf([pair("k", 8, text(b"\xff\xfe"))]), r"'k': expected UTF-8 text"),
    "double key": (Gguf([u32("k", 1), u32("k", 2)]), r"metadata key 'k' is there twice"),
    "odd alignment": (
        Gguf([u32("general.alignment", 24)]),
        r"alignment: expected a power of two, got 24",
    ),
    "no alignment": (
        Gguf([u32("general.alignment", 0)]),
        r"alignment: expected a power of two, got 0",
    ),
    "text as alignment": (
        Gguf([pair("general.alignment", 8, text("32"))]),
        r"expected a power of two, got '32'",
    ),
    "too many dimensions": (
        with_tensor(shape=(1, 1, 1, 2, 32)),
        r"'w': expected at most 4 dimensions, got 5",
    ),
    "empty dimension": (with_tensor(shape=(0, 32)), r"'w': expected dimensions of at least 1"),
    "absurd shape": (
        with_tensor(shape=(2**60, 2**60), data=b""),
        r"'w': expected its \d+ bytes within the file",
    ),
    "unknown type": (
        with_tensor(type_id=99, data=bytes(64)),
        r"'w': expected a type among F32.*got number 99",
    ),
    "offset outside": (with_tensor(offset=2**40), r"'w': expected its 256 bytes within the file"),
    "offset wraps": (
        with_tensor(offset=2**64 - 32),
        r"'w': expected its 256 bytes within the file",
    ),
    "misaligned": (
        with_tensor(offset=8),
        r"'w': expected an offset aligned to 32, got misaligned 8",
    ),
    "broken rows": (
        with_tensor(shape=(2, 33), type_id=3, data=bytes(99)),
        r"rows of a multiple of 32 for Q4_1, got 33",
    ),
    "double tensor": (
        Gguf(tensors=[Tensor("w", (8,)), Tensor("w", (8,))]),
        r"tensor 'w' is there twice",
    ),
    "overlap": (
        Gguf(tensors=[Tensor("v", (16,)), Tensor("w", (8,), offset=32)]),
        r"'w': .*overlaps 'v'",
    ),
    "absurd split": (
        Gguf([u32("split.count", 2**31)]),
        r"split.count: expected at most 1024 files",
    ),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_bad_file_is_refused_naming_file_and_fault(tmp_path: Path, case: str) -> None:
    content, message = BAD_FILES[case]
    path = tmp_path / "bad.gguf"
    path.write_bytes(content if isinstance(content, bytes) else content.build())
    with pytest.raises(ModelFormatError, match=r"bad\.gguf: .*" + message):
        open_checkpoint(path)


UNSUPPORTED: dict[str, tuple[Gguf, str]] = {
    "version 1": (Gguf(version=1), r"GGUF version 1; Quire reads versions 2 and 3"),
    "version 4": (Gguf(version=4), r"GGUF version 4"),
    "big-endian": (Gguf(version=3 << 24), r"big-endian"),
    "type": (
        with_tensor(type_id=20, data=bytes(64)),
        r"tensor 'w' is stored as IQ4_NL; Quire loads F32",
    ),
}


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_a_sound_file_we_cannot_read_is_called_unsupported(tmp_path: Path, case: str) -> None:
    model, message = UNSUPPORTED[case]
    with pytest.raises(UnsupportedModelError, match=r"m\.gguf: .*" + message):
        open_checkpoint(save(tmp_path, model))


def split_model(folder: Path, count: int, numbers: list[int] | None = None) -> Path:
    for i in range(count):
        pairs = [u16("split.no", (numbers or list(range(count)))[i]), u16("split.count", count)]
        data = np.full(8, i, np.float32).tobytes()
        model = Gguf([*pairs, u32("part", i)], [Tensor(f"t{i}", (8,), 0, data)])
        save(folder, model, f"big-{i + 1:05d}-of-{count:05d}.gguf")
    return folder / f"big-00001-of-{count:05d}.gguf"


def test_a_split_model_is_read_as_one_from_any_of_its_files(tmp_path: Path) -> None:
    split_model(tmp_path, 3)
    for path in sorted(tmp_path.iterdir()):
        assert read_gguf(path).metadata["part"] == 0
        checkpoint = open_checkpoint(path)
        assert list(checkpoint.tensors) == ["t0", "t1", "t2"]
        for i in range(3):
            assert torch.equal(checkpoint.read(f"t{i}"), torch.full((8,), float(i)))


def test_the_http_process_leaves_the_tokenizer_of_a_split_model_to_the_loader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which finds the first part; of a single file it reads the header itself."""
    asked: list[Path] = []
    monkeypatch.setattr("quire.load.open_tokenizer", lambda source: asked.append(source.path))
    path = split_model(tmp_path, 2)
    config = ServerConfig(model="m")
    open_tokenizer(ModelSource("split", "gguf", path, "local file"), config)
    assert asked == [path]
    with pytest.raises(ModelFormatError, match=r"m\.gguf: not a GGUF file"):
        open_tokenizer(
            ModelSource("m", "gguf", save(tmp_path, Gguf(magic=b"GGML")), "local file"), config
        )
    assert asked == [path]


def test_faults_of_split_models_are_named(tmp_path: Path) -> None:
    path = split_model(tmp_path, 2)
    renamed = tmp_path / "renamed.gguf"
    renamed.write_bytes(path.read_bytes())
    with pytest.raises(
        ModelFormatError,
        match=r"expected a name like NAME-00001-of-00002\.gguf, got 'renamed\.gguf'",
    ):
        open_checkpoint(renamed)
    (tmp_path / "big-00002-of-00002.gguf").unlink()
    with pytest.raises(ModelFormatError, match=r"big-00002-of-00002\.gguf: the file is missing"):
        open_checkpoint(path)
    with pytest.raises(
        ModelFormatError, match=r"expected split.no 1 of split.count 2, got \(0, 2\)"
    ):
        open_checkpoint(split_model(tmp_path, 2, [0, 0]))


@pytest.mark.parametrize("name", [name for name, format in FORMATS.items() if format.scales])
def test_no_format_needs_the_gguf_package(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert (
        expand(np.zeros(FORMATS[name].num_bytes, np.uint8), name).tolist()
        == [0.0] * FORMATS[name].num_elements
    )


SMALL = small_model().build()
HEADER_BYTES = len(small_model().header())


@given(damages(HEADER_BYTES))
@settings(max_examples=examples(400))
def test_a_damaged_file_is_read_or_refused_and_nothing_else(
    tmp_path_factory: pytest.TempPathFactory, steps: list[Damage]
) -> None:
    data = SMALL
    for damage in steps:
        data = damage(data) or b"\0"
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    path.write_bytes(data)
    check_open_and_read(path)


def test_the_undamaged_file_is_read(tmp_path: Path) -> None:
    assert check_open_and_read(save(tmp_path, small_model()))


def test_a_tensor_can_be_had_as_it_is_stored(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(save(tmp_path, small_model()))
    for name, info in checkpoint.tensors.items():
        (stored,) = room = info.format.empty(info.shape)
        checkpoint.read_stored_into(name, room)
        assert stored.nbytes == info.num_bytes == info.format.nbytes(info.shape)
        assert torch.equal(info.format.expand(stored).float(), checkpoint.read(name))
