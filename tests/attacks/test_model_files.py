"""Model files that lie: settings and headers of every wrong kind are an error of ours, in bounded
time and memory.
"""

from __future__ import annotations

import json
import struct
import time
from pathlib import Path
from typing import Any

import pytest

from quire.errors import QuireError
from quire.models.load import open_checkpoint
from quire.models.model_config import read_config

CONFIG: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
)
WRONG: list[Any] = [0, -1, 1.5, "64", None, [], {}, True, 2**70]


@pytest.mark.parametrize("field", SIZES)
@pytest.mark.parametrize("value", WRONG, ids=repr)
def test_a_size_that_is_none(tmp_path: Path, field: str, value: Any) -> None:
    """Refused, or (null: as if it were not there) a model whose sizes are numbers."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**CONFIG, field: value}))
    began = time.process_time()
    try:
        spec = read_config(path)
        assert value is None or value == 2**70
        assert isinstance(spec.hidden_size, int)
    except QuireError:
        pass
    assert time.process_time() - began < 5


@pytest.mark.parametrize(
    "text",
    [
        "", "null", "[]", "5", '"text"', "{", "{}", '{"model_type": 5}', '{"model_type": "no such family"}',
        '{"model_type": ["qwen3"]}', "[" * 50_000, '{"a":' * 20_000, '{"model_type": "qwen3", "model_type": "llama"}',
        json.dumps({**CONFIG, "rope_theta": "x"}), json.dumps({**CONFIG, "rope_theta": -1}),
        json.dumps({**CONFIG, "rope_scaling": {"type": "no such"}}), json.dumps({**CONFIG, "rope_scaling": 5}),
        json.dumps({**CONFIG, "rms_norm_eps": float("nan")}), json.dumps({**CONFIG, "rms_norm_eps": "x"}),
        json.dumps({**CONFIG, "quantization_config": {"quant_method": "no such"}}),
        json.dumps({**CONFIG, "quantization_config": 5}),
        json.dumps({**CONFIG, "hidden_act": "no such"}),
        json.dumps({**CONFIG, "num_key_value_heads": 3}), "\ufeff{}", "{" + '"x": 1,' * 10 + "}",
        '{"model_type": ' + "9" * 6000 + "}",
    ],
    ids=lambda text: text[:30],
)  # fmt: skip
def test_settings_that_are_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(QuireError):
        read_config(path)


def tensor(**fields: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16], **fields}


HEADERS: dict[str, Any] = {
    "a list": [],
    "a tensor that is a number": {"a": 5},
    "no dtype": {"a": {"shape": [2, 2], "data_offsets": [0, 16]}},
    "an unknown dtype": {"a": tensor(dtype="F7")},
    "a dtype that is a list": {"a": tensor(dtype=["F32"])},
    "no shape": {"a": {"dtype": "F32", "data_offsets": [0, 16]}},
    "a negative size": {"a": tensor(shape=[-2, -2])},
    "a broken size": {"a": tensor(shape=[2.0, 2])},
    "a size that is true": {"a": tensor(shape=[True, 4])},
    "sizes whose product overflows": {"a": tensor(shape=[2**40, 2**40])},
    "a thousand sizes": {"a": tensor(shape=[1] * 1000 + [4])},
    "offsets the wrong way round": {"a": tensor(data_offsets=[16, 0])},
    "offsets beyond the end": {"a": tensor(data_offsets=[0, 2**40])},
    "negative offsets": {"a": tensor(data_offsets=[-16, 0])},
    "three offsets": {"a": tensor(data_offsets=[0, 8, 16])},
    "too few bytes": {"a": tensor(data_offsets=[0, 8])},
    "two tensors in one place": {"a": tensor(), "b": tensor()},
    "a hole": {"a": tensor(shape=[1, 2], data_offsets=[8, 16])},
    "metadata that is a number": {"__metadata__": 5, "a": tensor()},
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_header_that_lies(tmp_path: Path, name: str) -> None:
    header = json.dumps(HEADERS[name]).encode()
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "model.safetensors").write_bytes(
        struct.pack("<Q", len(header)) + header + bytes(16)
    )
    with pytest.raises(QuireError):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("length", [0, 1, 7, 15, 2**20, 2**40, 2**63, 2**64 - 1])
def test_a_header_of_another_length(tmp_path: Path, length: int) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", length) + b'{"a":{}}' + bytes(7))
    with pytest.raises(QuireError):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "place", ["../x.safetensors", "/etc/passwd", "a/../../x", "", ".", "no\0name", "x" * 5000, 5]
)
def test_an_index_that_points_elsewhere(tmp_path: Path, place: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": place}}))
    with pytest.raises(QuireError):
        open_checkpoint(tmp_path)
