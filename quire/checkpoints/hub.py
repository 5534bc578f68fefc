"""Models from the Hugging Face hub, through huggingface_hub: its cache, token and offline mode are
used.

A model whose files are all in the cache is taken from there when the hub can't be reached.
"""

from __future__ import annotations

import errno
import io
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from threading import Lock
from typing import Any

from quire.checkpoints.download import Progress
from quire.checkpoints.files import weight_kinds
from quire.errors import ModelNotFoundError, QuireError, UnsupportedModelError

NEEDED_FILES = [
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "chat_template*",
    "special_tokens_map.json",
]
NEEDED_FILES += ["hf_quant_config.json", "*.safetensors", "*.safetensors.index.json"]
# Weights in other layouts beside the ones we read: `original/…` and the like, and Mistral's own
# format.
UNNEEDED_FILES = ["*/*", "consolidated*"]


@dataclass(frozen=True, slots=True)
class HubId:
    """`org/name`, perhaps with `@revision`, perhaps with `:FILE.gguf`."""

    repo: str
    revision: str | None = None
    gguf: str | None = None

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        return f"{self.repo}{revision}" + (f":{self.gguf}" if self.gguf else "")


def parse_hub_id(text: str) -> HubId | None:
    """The parts of a hub id, or None if the text can't be one."""
    part = r"[A-Za-z0-9][\w.-]{0,95}"
    match = re.fullmatch(
        rf"({part}/{part})(?:@([\w./-]+))?(?::([\w./ +-]+\.gguf))?", text, re.ASCII
    )
    if match is None:
        return None
    # Both end up in paths of the cache.
    for piece in (match[2], match[3]):
        if piece and (piece.startswith("/") or ".." in PurePosixPath(piece).parts):
            return None
    return HubId(match[1], match[2], match[3])


def fetch_from_hub(
    hub_id: HubId, *, offline: bool = False, progress: Progress | None = None
) -> Path:
    """The folder of a model's snapshot, or the path of the one `.gguf` file asked for."""
    if hub_id.gguf:
        # The other parts of a split model come along.
        pattern = re.sub(r"-\d{5}-of-(\d{5}\.gguf)$", r"-?????-of-\1", hub_id.gguf)
        path = _snapshot(hub_id, [pattern], [], offline, progress) / hub_id.gguf
        if not path.is_file():
            found = _found(_gguf_files(hub_id, offline))
            raise ModelNotFoundError(f"{hub_id.repo} has no file {hub_id.gguf}{found}")
        return path
    folder = _snapshot(hub_id, NEEDED_FILES, UNNEEDED_FILES, offline, progress)
    if "safetensors" in weight_kinds(folder):
        return folder
    gguf_files = _gguf_files(hub_id, offline)
    if gguf_files:
        raise UnsupportedModelError(
            f"{hub_id.repo} has only GGUF files; choose one, for example {hub_id}:{gguf_files[0]}{_found(gguf_files)}"
        )
    raise UnsupportedModelError(
        f"{hub_id.repo} has no safetensors files, and Quire never opens pickled weights (*.bin); "
        "look for a version of the model in safetensors or GGUF"
    )


def _found(names: list[str]) -> str:
    return f" (found: {', '.join(names)})" if names else ""


def _snapshot(
    hub_id: HubId, allow: list[str], ignore: list[str], offline: bool, progress: Progress | None
) -> Path:
    from huggingface_hub import errors as hub_errors
    from huggingface_hub import snapshot_download

    def download(local_files_only: bool) -> Path:
        options: dict[str, Any] = (
            {"tqdm_class": _bar_class(progress)} if progress is not None else {}
        )
        options |= {
            "allow_patterns": allow,
            "ignore_patterns": ignore,
            "local_files_only": local_files_only,
        }
        return Path(snapshot_download(hub_id.repo, revision=hub_id.revision, **options))

    try:
        return download(offline)
    except hub_errors.GatedRepoError as error:
        raise ModelNotFoundError(
            f"{hub_id.repo} is gated: accept its terms on its hub page, then log in with "
            "`hf auth login` or set HF_TOKEN"
        ) from error
    except hub_errors.RevisionNotFoundError as error:
        raise ModelNotFoundError(f"{hub_id.repo} has no revision {hub_id.revision}") from error
    except hub_errors.RepositoryNotFoundError as error:
        raise ModelNotFoundError(
            f"{hub_id.repo} is not on the Hugging Face hub, or private: check the spelling, and log in with "
            "`hf auth login` or HF_TOKEN if it is private"
        ) from error
    except Exception as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise QuireError(
                f"{hub_id}: the disk of the Hugging Face cache is full; make room, or set HF_HOME to a "
                "folder on another disk"
            ) from error
        # The transports (requests, httpx) and their errors differ between versions of
        # huggingface_hub. It falls back to the cache for some; for the others we ask once more.
        try:
            return download(True)
        except Exception:
            raise _unreachable(hub_id, error, offline) from error


def _unreachable(hub_id: HubId, error: Exception, offline: bool) -> QuireError:
    from huggingface_hub import constants

    if offline or constants.HF_HUB_OFFLINE:
        why = "offline mode is on (HF_HUB_OFFLINE or the offline option)"
    else:
        reason = (str(error).strip().splitlines() or ["no reason given"])[0]
        why = f"the hub could not be reached ({type(error).__name__}: {reason})"
    return ModelNotFoundError(
        f"{hub_id} is not complete in the Hugging Face cache at {constants.HF_HUB_CACHE}, and {why}. "
        "Fetch it once with network, or give the path of a folder or a .gguf file"
    )


def _gguf_files(hub_id: HubId, offline: bool) -> list[str]:
    """For messages: what GGUF files the repository has, as far as can be found out."""
    from huggingface_hub import HfApi, constants

    if offline or constants.HF_HUB_OFFLINE:
        return []
    try:
        names = HfApi().list_repo_files(hub_id.repo, revision=hub_id.revision)
    except Exception:  # only makes a message more helpful
        return []
    return sorted(name for name in names if name.lower().endswith(".gguf"))[:20]


def _bar_class(progress: Progress) -> type:
    """A progress bar that draws nothing and calls `progress` instead, for huggingface_hub to use."""
    from tqdm.std import tqdm  # type: ignore[import-untyped]

    lock = Lock()
    bars: list[Any] = []

    class ProgressBar(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            options.pop("name", None)  # huggingface_hub's own bars take one
            super().__init__(*args, **{**options, "file": io.StringIO(), "disable": False})
            if self.unit == "B":
                bars.append(self)

        def update(self, n: float | None = 1) -> bool | None:
            # Files come in several threads at once.
            with lock:
                drawn: bool | None = super().update(n)
                if bars:
                    # There may be a bar for bytes received and one for bytes written; the one ahead
                    # counts.
                    total = max(bar.total or 0 for bar in bars)
                    progress(int(max(bar.n for bar in bars)), int(total) or None)
                return drawn

        def display(self, *args: Any, **options: Any) -> bool:
            return True

    return ProgressBar
