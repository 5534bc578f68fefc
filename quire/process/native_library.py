"""A library of C++ sources, compiled on first use and kept.

It has a plain C interface and needs no foreign headers, so a build takes seconds. It is kept under a name made from
everything that shapes it, so a changed source, flag, compiler or CPU gives a new file.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import logging
import os
import platform
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from quire.config import cache_dir
from quire.errors import DeviceError
from quire.process.temporary_folders import temporary_folder

logger = logging.getLogger(__name__)

_BUILD_SECONDS = 600  # much else may go on
_DIGEST_BYTES = hashlib.sha256().digest_size

progress: list[Callable[[int, int], None]] = []
"""Whoever shows how a build goes on: told the bytes of source compiled and in all, first with none."""


def build_library(folder: Path, flags: list[str], name: str) -> Path:
    """The file compiled from a folder's sources, built if need be. `name` says what it is, to people and in the file's
    name. Raises DeviceError when there is no compiler or the build fails; the message says what to do."""
    compiler = find_compiler()
    path = cache_dir() / "kernels" / f"{name.lower()}-{fingerprint(folder, compiler, flags)}.so"
    if not is_whole(path):
        compile_library([*compiler, *flags], sorted(folder.glob("*.cpp")), path, name)
    return path


def is_whole(path: Path) -> bool:
    """Whether a library is there as it was built. The linker maps whatever it finds, and a page that is missing ends
    the process (SIGBUS) the moment it is touched."""
    try:
        data = path.read_bytes()
    except OSError:
        return False
    return data[-_DIGEST_BYTES:] == hashlib.sha256(data[:-_DIGEST_BYTES]).digest()


def find_compiler() -> list[str]:
    named = shlex.split(os.environ.get("CXX", ""))
    for candidate in [named, ["g++"], ["clang++"], ["c++"]]:
        if candidate and shutil.which(candidate[0]):
            return candidate
    raise DeviceError("No C++ compiler was found (g++, clang++ or c++; or name one in CXX): install g++.")


def fingerprint(folder: Path, compiler: list[str], flags: list[str]) -> str:
    digest = hashlib.sha256()
    for path in sorted([*folder.glob("*.cpp"), *folder.glob("*.h")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    digest.update(repr((compiler, _identity(compiler), flags, platform.machine(), cpu_features())).encode())
    return digest.hexdigest()[:20]


def _identity(compiler: list[str]) -> list[tuple[str, int, int]]:
    """The programs in a command (a compiler, perhaps behind ccache): an update changes their files. Asking them for
    their version would take longer than all else here."""
    programs = [Path(found).resolve() for word in compiler if (found := shutil.which(word))]
    return [(str(program), (stat := program.stat()).st_size, stat.st_mtime_ns) for program in programs]


def cpu_features() -> str:
    """What -march=native depends on: a home folder may be shared by different machines."""
    try:
        info = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    found = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", info, re.MULTILINE)
    return found.group(1) if found else platform.processor()


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Waits until no other process builds there; where there are no locks, several build the same."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def compile_library(command: list[str], sources: list[Path], path: Path, name: str) -> None:
    """Builds in a folder of its own and renames the result, so that nobody finds half of it. Files are compiled side by
    side."""

    def run(*arguments: str) -> None:
        done = subprocess.run(
            [*command, *arguments],
            check=False,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_BUILD_SECONDS,
        )
        if done.returncode != 0:
            logger.debug("%s", done.stderr)
            lines = done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"]
            raise OSError(next((line for line in lines if "error" in line), lines[-1]))

    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with (
            _alone_in(path.parent),
            temporary_folder("build-", path.parent) as folder,
            ThreadPoolExecutor(os.cpu_count()) as compilers,
        ):
            if is_whole(path):  # somebody else has been quicker
                return
            objects = [str(folder / f"{source.stem}.o") for source in sources]
            library = folder / path.name
            # The longest first, so that nobody waits for it at the end.
            pairs = sorted(zip(sources, objects, strict=True), key=lambda pair: -pair[0].stat().st_size)
            logger.info("compiling the %s kernels (once for this CPU and compiler, about half a minute)", name)
            sizes = [pair[0].stat().st_size for pair in pairs]
            jobs = compilers.map(lambda pair: run("-c", str(pair[0]), "-o", pair[1]), pairs)
            for done, _ in enumerate(itertools.chain([None], jobs)):
                for report in progress:
                    report(sum(sizes[:done]), sum(sizes))
            run("-shared", *objects, "-o", str(library))
            os.chmod(library, 0o700)
            digest = hashlib.sha256(library.read_bytes()).digest()
            with library.open("ab") as file:  # what stands behind a library's end is of no meaning to the linker
                file.write(digest)
            os.replace(library, path)
    except (OSError, subprocess.TimeoutExpired) as error:
        what = f"The {name} kernels can't be built with {command[0]} in {path.parent}: {error}"
        raise DeviceError(f"{what}; install g++, make room there, or name another folder in QUIRE_HOME.") from error
