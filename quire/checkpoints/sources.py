"""From what a user writes after `--model` to files on this machine; and which models are here
already.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from quire.checkpoints.catalogue import CATALOGUE
from quire.checkpoints.download import ALIASES, Progress, alias_path, fetch_alias, is_cached
from quire.checkpoints.files import no_weights_error, weight_kinds
from quire.checkpoints.hub import fetch_from_hub, parse_hub_id
from quire.config import cache_dir
from quire.errors import ModelNotFoundError, UnsupportedModelError
from quire.process.life import sign_of_life

Kind = Literal["huggingface", "gguf", "npy"]


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model's files, found."""

    name: str
    """As the user wrote it."""
    kind: Kind
    path: Path
    """The folder, or the `.gguf` file."""
    origin: str
    """Where it came from, in words."""


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model on this machine."""

    name: str
    """What to give as `--model`."""
    path: Path
    format: str
    num_bytes: int
    """Size of the weights on disk."""
    source: str


def resolve(model: str, *, offline: bool = False, progress: Progress | None = None) -> ModelSource:
    """Finds a model, downloading it if need be (`offline` forbids that).

    `model` is, in this order: an existing path (a folder in Hugging Face layout, a `.gguf` file, a
    folder of `.npy` files), a short name such as `smollm2` or `qwen3-0.6b`, or a Hugging Face id `org/name`, with
    `@revision` for another than the main one and `:FILE.gguf` for one GGUF file of the repository.
    So an existing local path always wins: a folder called `smollm2` in the current directory hides
    the alias.
    """

    def report(done: int, total: int | None) -> None:
        sign_of_life()
        if progress is not None:
            progress(done, total)

    path = Path(model).expanduser()
    if model and _exists(path):
        return _local(model, path)
    alias = ALIASES.get(model)
    if alias is not None:
        if offline and not is_cached(alias):
            raise ModelNotFoundError(
                f"{model} is not in Quire's cache ({alias_path(alias)}) and offline mode is on: "
                f"run `quire pull {model}` with network once"
            )
        return ModelSource(model, "gguf", fetch_alias(alias, report), alias.source)
    repo = CATALOGUE[model].repo if model in CATALOGUE else model
    hub_id = None if _looks_like_path(model) else parse_hub_id(repo)
    if hub_id is None:
        raise _not_found(model, path)
    try:
        found = fetch_from_hub(hub_id, offline=offline, progress=report)
    except ModelNotFoundError as error:
        raise ModelNotFoundError(
            f"{model!r} was not found: no file or folder {path}; {error}"
        ) from error
    kind: Kind = "gguf" if hub_id.gguf else "huggingface"
    return ModelSource(model, kind, found, f"Hugging Face hub, {hub_id}")


def list_models() -> list[LocalModel]:
    """What is on this machine, in Quire's cache and in the Hugging Face cache, sorted by name."""
    return sorted([*_quire_models(), *_hub_models()], key=lambda model: model.name)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # too long, or with characters no path can have
        return False


def _local(model: str, path: Path) -> ModelSource:
    if path.is_file():
        if path.suffix.lower() == ".gguf":
            return ModelSource(model, "gguf", path, "local file")
        raise UnsupportedModelError(
            f"{path}: a single file must be a .gguf; for other formats give the folder with its config.json"
        )
    if not path.is_dir():
        raise UnsupportedModelError(f"{path}: neither a file nor a folder")
    kinds = weight_kinds(path)
    if "safetensors" in kinds or "npy" in kinds:
        if not (path / "config.json").is_file():
            raise ModelNotFoundError(
                f"{path}: there are weights but no config.json; put the model's there"
            )
        return ModelSource(
            model, "huggingface" if "safetensors" in kinds else "npy", path, "local folder"
        )
    gguf_files = sorted(entry for entry in path.iterdir() if entry.suffix.lower() == ".gguf")
    if len(gguf_files) == 1:
        return ModelSource(model, "gguf", gguf_files[0], "local folder")
    error = no_weights_error(path, kinds)
    if model in ALIASES:
        raise type(error)(
            f"{error}. (This folder hides the alias {model}: run Quire from another folder.)"
        )
    raise error


def _looks_like_path(model: str) -> bool:
    return (
        model.startswith((".", "/", "~"))
        or "\\" in model
        or (model.endswith(".gguf") and ":" not in model)
    )


def _not_found(model: str, path: Path) -> ModelNotFoundError:
    tried = [
        f"no file or folder {path}",
        "no short name (`quire models --available` lists them)",
    ]
    if not _looks_like_path(model):
        tried.append("not of the form org/name, so not a Hugging Face id")
    close = difflib.get_close_matches(model.lower(), [*ALIASES, *CATALOGUE], n=1)
    hint = f"Did you mean {close[0]}? " if close else ""
    return ModelNotFoundError(
        f"{model!r} was not found: {'; '.join(tried)}. {hint}Give a short name, the path of a folder or .gguf "
        "file, or a Hugging Face id such as org/name"
    )


def _quire_models() -> list[LocalModel]:
    folder = cache_dir() / "models"
    found = []
    for path in sorted(folder.glob("*/*.gguf")) if folder.is_dir() else ():
        alias = ALIASES.get(path.parent.name)
        name, source = str(path), "put there by hand"
        if alias is not None and path == alias_path(alias):
            name, source = alias.name, alias.source
        found.append(LocalModel(name, path, "gguf", path.stat().st_size, source))
    return found


def _hub_models() -> list[LocalModel]:
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        cache = scan_cache_dir(constants.HF_HUB_CACHE)
    except CacheNotFound:
        return []
    found = []
    source = "Hugging Face hub"
    for repo in cache.repos:
        if repo.repo_type != "model":
            continue
        for revision in repo.revisions:
            # The main revision needs no mention; others are named by branch or tag, else by commit.
            names = sorted(revision.refs)
            suffix = "" if "main" in names else f"@{names[0] if names else revision.commit_hash}"
            name = f"{repo.repo_id}{suffix}"
            weights = 0
            for file in revision.files:
                path = file.file_path
                if path.suffix == ".safetensors":
                    weights += file.size_on_disk
                elif path.suffix == ".gguf":
                    label = f"{name}:{path.relative_to(revision.snapshot_path)}"
                    found.append(LocalModel(label, path, "gguf", file.size_on_disk, source))
            if weights:
                found.append(
                    LocalModel(name, revision.snapshot_path, "safetensors", weights, source)
                )
    return found
