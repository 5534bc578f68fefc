"""Downloads from the Hugging Face hub, through the real library, from a server on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.models.local_hub import COMMIT, serve_hub

ROOT = Path(__file__).parents[2]

RESOLVE = """
import json, sys
from quire.errors import QuireError
from quire.checkpoints.sources import resolve
calls = []
try:
    source = resolve(sys.argv[1], progress=lambda done, total: calls.append((done, total)))
    print(json.dumps({"kind": source.kind, "path": str(source.path), "calls": calls}))
except QuireError as error:
    print(json.dumps({"error": type(error).__name__, "message": str(error)}))
"""


def run_resolve(model: str, endpoint: str, home: Path) -> dict[str, object]:
    """In a process of its own, since the library reads its settings once."""
    environment = {
        **os.environ,
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(home),
        "PYTHONPATH": str(ROOT),
    }
    for name in ("HF_HUB_OFFLINE", "HF_HUB_CACHE", "HF_TOKEN"):
        environment.pop(name, None)
    environment |= {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    command = [sys.executable, "-c", RESOLVE, model]
    result = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, cwd=home, timeout=60
    )
    assert result.returncode == 0, result.stderr
    answer: dict[str, object] = json.loads(result.stdout)
    answer["stderr"] = result.stderr
    return answer


WEIGHTS = bytes(3_000_000)
FULL_REPO = {
    "config.json": b"{}",
    "generation_config.json": b"{ }",
    "tokenizer.json": b"{  }",
    "tokenizer_config.json": b"{   }",
    "chat_template.jinja": b"{{ messages }}",
    "special_tokens_map.json": b"{    }",
    "model-00001-of-00001.safetensors": WEIGHTS,
    "model.safetensors.index.json": b"{     }",
    "consolidated.safetensors": b"1",
    "original/model.safetensors": b"2",
    "onnx/config.json": b"3",
    "pytorch_model.bin": b"4",
    "model-q4.gguf": b"5",
    "README.md": b"6",
    "modeling_evil.py": b"7",
}


def test_only_needed_files_are_fetched_and_the_second_time_none(tmp_path: Path) -> None:
    with serve_hub("org/name", FULL_REPO) as (endpoint, fetched):
        answer = run_resolve("org/name", endpoint, tmp_path)
        assert answer["kind"] == "huggingface", answer
        assert str(answer["path"]).endswith(f"models--org--name/snapshots/{COMMIT}")
        assert sorted(set(fetched)) == sorted(list(FULL_REPO)[:8])
        fetched.clear()
        again = run_resolve("org/name", endpoint, tmp_path)
        assert again["path"] == answer["path"]
        assert fetched == []
    # And with the server gone, from the cache.
    assert run_resolve("org/name", endpoint, tmp_path)["path"] == answer["path"]


def test_a_hub_that_cannot_be_reached_is_named_with_the_cache_that_was_searched(
    tmp_path: Path,
) -> None:
    with serve_hub("org/name", FULL_REPO) as (endpoint, _):
        pass  # so that nothing listens at its address
    answer = run_resolve("org/name", endpoint, tmp_path)
    assert answer.get("error") == "ModelNotFoundError", answer
    message = str(answer["message"])
    assert f"org/name is not complete in the Hugging Face cache at {tmp_path / 'hub'}" in message
    assert "the hub could not be reached (" in message


def test_progress_of_a_download_is_told_in_bytes_and_not_drawn(tmp_path: Path) -> None:
    with serve_hub("org/name", FULL_REPO) as (endpoint, _):
        answer = run_resolve("org/name", endpoint, tmp_path)
    calls = answer["calls"]
    assert isinstance(calls, list)
    assert calls
    total = sum(len(content) for content in list(FULL_REPO.values())[:8])
    assert calls[-1] == [total, total]
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
    assert "%" not in str(answer["stderr"])


@pytest.mark.few(1)
@pytest.mark.parametrize("model", ["org/name", "org/name@main"])
def test_one_gguf_file_is_fetched_with_its_other_parts_only(tmp_path: Path, model: str) -> None:
    files = {f"big-0000{i}-of-00002.gguf": b"GGUF" + bytes([i]) for i in (1, 2)}
    with serve_hub("org/name", {**files, "small.gguf": b"GGUF", "config.json": b"{}"}) as (
        endpoint,
        fetched,
    ):
        answer = run_resolve(f"{model}:big-00001-of-00002.gguf", endpoint, tmp_path)
    assert answer["kind"] == "gguf", answer
    assert Path(str(answer["path"])).read_bytes() == files["big-00001-of-00002.gguf"]
    assert sorted(set(fetched)) == sorted(files)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("model", "files", "error", "parts"),
    [
        (
            "org/name",
            {"a.gguf": b"", "b.gguf": b""},
            "UnsupportedModelError",
            ["org/name:a.gguf", "a.gguf, b.gguf"],
        ),
        (
            "org/name:c.gguf",
            {"a.gguf": b""},
            "ModelNotFoundError",
            ["has no file c.gguf", "found: a.gguf"],
        ),
        (
            "org/name",
            {"pytorch_model.bin": b""},
            "UnsupportedModelError",
            ["no safetensors", "never opens pickled"],
        ),
        (
            "other/name",
            {},
            "ModelNotFoundError",
            ["no file or folder other/name", "is not on the Hugging Face hub"],
        ),
    ],
)
def test_what_the_hub_cannot_give_is_said_with_what_to_do(
    tmp_path: Path, model: str, files: dict[str, bytes], error: str, parts: list[str]
) -> None:
    with serve_hub("org/name", {"config.json": b"{}", **files}) as (endpoint, fetched):
        answer = run_resolve(model, endpoint, tmp_path)
    assert answer.get("error") == error, answer
    for part in parts:
        assert part in str(answer["message"])
    assert "pytorch_model.bin" not in fetched
