"""A library of C++ sources, compiled on first use and kept.

It has a plain C interface and needs no foreign headers, so a build takes seconds. It is kept under
a name made from everything that shapes it, so a changed source, flag, compiler or CPU gives a new
file.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import platform
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path

from quire.config import cache_dir
from quire.errors import DeviceError
from quire.process.child_group import ChildGroup
from quire.process.granted import granted_cores
from quire.process.life import sign_of_life
from quire.process.temporary_folders import temporary_folder

logger = logging.getLogger(__name__)

_BUILD_SECONDS = 600.0  # for one file: much else may go on
_LOCK_SECONDS = 0.1
_SIGN_SECONDS = 1.0
_DIGEST_BYTES = hashlib.sha256().digest_size

progress: list[Callable[[int, int], None]] = []
"""Whoever shows how a build goes on: told the bytes of source compiled and in all, first with none."""


def build_library(folder: Path, flags: list[str], name: str) -> Path:
    """The file compiled from a folder's sources, built if need be. `name` says what it is, to
    people and in the file's name. Raises DeviceError when there is no compiler or the build fails;
    the message says what to do.
    """
    compiler = find_compiler()
    path = cache_dir() / "kernels" / f"{name.lower()}-{fingerprint(folder, compiler, flags)}.so"
    if not is_whole(path):
        compile_library([*compiler, *flags], sorted(folder.glob("*.cpp")), path, name)
    return path


def is_whole(path: Path) -> bool:
    """Whether a library is there as it was built. The linker maps whatever it finds, and a page
    that is missing ends the process (SIGBUS) the moment it is touched.
    """
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
    raise DeviceError(
        "No C++ compiler was found (g++, clang++ or c++; or name one in CXX): install g++."
    )


def fingerprint(folder: Path, compiler: list[str], flags: list[str]) -> str:
    digest = hashlib.sha256()
    for path in sorted([*folder.glob("*.cpp"), *folder.glob("*.h")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    digest.update(
        repr((compiler, _identity(compiler), flags, platform.machine(), cpu_features())).encode()
    )
    return digest.hexdigest()[:20]


def _identity(compiler: list[str]) -> list[tuple[str, int, int]]:
    """The programs in a command (a compiler, perhaps behind ccache): an update changes their files.
    Asking them for their version would take longer than all else here.
    """
    programs = [Path(found).resolve() for word in compiler if (found := shutil.which(word))]
    return [
        (str(program), (stat := program.stat()).st_size, stat.st_mtime_ns) for program in programs
    ]


def cpu_features() -> str:
    """What -march=native depends on: a home folder may be shared by different machines."""
    try:
        info = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    found = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", info, re.MULTILINE)
    return found.group(1) if found else platform.processor()


@contextlib.contextmanager
def _alone_in(folder: Path, name: str) -> Iterator[bool]:
    """Waits until no other process builds there. False where there are no locks, or the other one
    does not come to an end: then several build the same.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        yield _lock(descriptor, name)
    finally:
        os.close(descriptor)


def _lock(descriptor: int, name: str) -> bool:
    deadline = time.monotonic() + _BUILD_SECONDS
    is_first = True
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            if is_first:
                logger.info("another process compiles the %s kernels: waiting for it", name)
            is_first = False
        except OSError:
            return False
        else:
            return True
        sign_of_life()
        time.sleep(_LOCK_SECONDS)


@contextlib.contextmanager
def _build_folder(path: Path, is_alone: bool) -> Iterator[Path]:
    """Where a library's objects are compiled. Whoever is alone finds those that a build which was
    interrupted has finished, and takes away what other ones have left.
    """
    if not is_alone:
        with temporary_folder("own-build-", path.parent) as folder:
            yield folder
        return
    folder = path.parent / f"build-{path.stem}"
    for other in path.parent.glob("build-*"):
        if other.is_symlink() or not other.is_dir():
            other.unlink()
        elif other != folder:
            shutil.rmtree(other, ignore_errors=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    try:
        yield folder
    finally:
        for unfinished in folder.glob("*.part"):
            unfinished.unlink()
        if is_whole(path):
            shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # it holds objects for the next one to try
            folder.rmdir()


def compile_library(command: list[str], sources: list[Path], path: Path, name: str) -> None:
    """Builds in a folder of its own and renames the result, so that nobody finds half of it. Files
    are compiled side by side; the compilers end with this process, and objects they have finished
    are there for the next try.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _alone_in(path.parent, name) as is_alone:
            if is_whole(path):  # somebody else has been quicker
                return
            logger.info(
                "compiling the %s kernels (once for this CPU and compiler, about half a minute)",
                name,
            )
            cores = min(os.cpu_count() or 1, granted_cores(Path("/")))
            with (
                _build_folder(path, is_alone) as folder,
                ThreadPoolExecutor(cores) as threads,
                # it ends first, so that nobody waits for a compiler that is of no more use
                ChildGroup() as group,
            ):
                try:
                    _compile(_Compiler(command, group), sources, folder / path.name, threads)
                except BaseException:
                    threads.shutdown(wait=False, cancel_futures=True)
                    raise
                os.replace(folder / path.name, path)
    except (OSError, subprocess.TimeoutExpired) as error:
        what = f"The {name} kernels can't be built with {command[0]} in {path.parent}: {error}"
        raise DeviceError(
            f"{what}; install g++, make room there, or name another folder in QUIRE_HOME."
        ) from error


class _Compiler:
    """Runs the compiler; a file is there whole or not at all."""

    def __init__(self, command: list[str], group: ChildGroup) -> None:
        self._command = command
        self._group = group

    def make(self, target: Path, *arguments: str) -> None:
        if is_whole(target):  # by an earlier try
            return
        part = target.with_name(f"{target.name}.part")
        done = self._group.run([*self._command, *arguments, "-o", str(part)], _BUILD_SECONDS)
        if done.returncode != 0:
            logger.debug("%s", done.stderr)
            lines = done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"]
            raise OSError(next((line for line in lines if "error" in line), lines[-1]))
        digest = hashlib.sha256(part.read_bytes()).digest()
        with part.open("ab") as file:  # what stands behind its end is of no meaning to the linker
            file.write(digest)
        os.chmod(part, 0o700)
        os.replace(part, target)


def _compile(
    compiler: _Compiler, sources: list[Path], library: Path, threads: ThreadPoolExecutor
) -> None:
    # The longest first, so that nobody waits for it at the end.
    sources = sorted(sources, key=lambda source: -source.stat().st_size)
    objects = [library.with_name(f"{source.stem}.o") for source in sources]
    sizes: dict[Future[None], int] = {}
    for source, target in zip(sources, objects, strict=True):
        job = threads.submit(compiler.make, target, "-c", str(source))
        sizes[job] = source.stat().st_size
    total = sum(sizes.values())
    for done in _attended(sizes):
        for report in progress:
            report(sum(sizes[job] for job in done), total)
    for _ in _attended([threads.submit(compiler.make, library, "-shared", *map(str, objects))]):
        pass


def _attended(jobs: Collection[Future[None]]) -> Iterator[set[Future[None]]]:
    """Those that are done, each time there are more of them, first none. A job that runs is life;
    it has a limit of its own.
    """
    done: set[Future[None]] = set()
    yield done
    while len(done) < len(jobs):
        finished, _ = wait(set(jobs) - done, timeout=_SIGN_SECONDS, return_when=FIRST_COMPLETED)
        sign_of_life()
        for job in finished:
            job.result()
        done |= finished
        if finished:
            yield done
