"""A build of a native library that is slow, killed, or met by another one. The compilers are
scripts.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from quire.errors import DeviceError
from quire.process import life, native_library
from quire.process.child_group import ChildGroup
from quire.process.native_library import compile_library, is_whole

ROOT = Path(__file__).parents[2]
BUILD = """
import sys
from pathlib import Path
from quire.process.native_library import compile_library
compiler, sources, path = sys.argv[1:]
compile_library([compiler], sorted(Path(sources).glob("*.cpp")), Path(path), "CPU")
"""


class Project:
    """Three sources, one of which takes as long as it is told."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sources = folder / "sources"
        self.sources.mkdir()
        for name in ("one", "slow", "two"):
            (self.sources / f"{name}.cpp").write_text("// " + name)
        self.path = folder / "kernels" / "cpu-1234.so"
        self.log = folder / "log"
        self.slowness = folder / "slowness"
        self.slow_for(0)
        self.compiler = folder / "compiler"
        # As g++ does, it has another program do the work.
        self.compiler.write_text(f"""#!/bin/sh
for last; do :; done
case " $* " in *" -shared "*) echo link >> {self.log};; *) basename "$2" >> {self.log};; esac
case " $* " in *slow.cpp*) sh -c 'sleep "$(cat {self.slowness})"';; esac
echo made > "$last"
""")
        self.compiler.chmod(0o700)

    def slow_for(self, seconds: float) -> None:
        self.slowness.write_text(f"{seconds}")

    def start(self) -> subprocess.Popen[bytes]:
        """A build in a process of its own."""
        command = [
            sys.executable,
            "-c",
            BUILD,
            str(self.compiler),
            str(self.sources),
            str(self.path),
        ]
        return subprocess.Popen(command, cwd=ROOT)

    def build(self) -> None:
        compile_library([str(self.compiler)], sorted(self.sources.glob("*.cpp")), self.path, "CPU")

    def compiled(self) -> list[str]:
        return sorted(self.log.read_text().split()) if self.log.exists() else []


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


def wait_for(condition: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def processes_of(folder: Path) -> list[int]:
    """Those whose command names a folder, or that sleep as its compiler told them to."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if str(folder) in command or command.startswith("sleep 77.25"):
            found.append(int(entry.name))
    return found


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs Linux's list of processes")
def test_a_killed_build_leaves_no_compiler_and_the_next_goes_on_where_it_was(
    project: Project,
) -> None:
    project.slow_for(77.25)
    builder = project.start()
    objects = project.path.parent / "build-cpu-1234"
    wait_for(lambda: is_whole(objects / "one.o") and is_whole(objects / "two.o"))
    assert processes_of(project.folder)
    builder.send_signal(signal.SIGKILL)
    builder.wait()
    wait_for(lambda: not processes_of(project.folder))  # it would sleep for longer
    assert project.compiled() == ["one.cpp", "slow.cpp", "two.cpp"]
    project.log.unlink()
    project.slow_for(0)
    project.build()
    assert project.compiled() == ["link", "slow.cpp"]
    assert is_whole(project.path)
    assert list(project.path.parent.iterdir()) == [project.path]


def test_leftovers_of_other_builds_are_taken_away(project: Project) -> None:
    """A compiler that outlived its parent may have written into a folder while that was removed: no
    lock is in it.
    """
    folder = project.path.parent
    folder.mkdir()
    (folder / "build-abc").mkdir()
    (folder / "build-abc" / "rowwise.o").write_text("half")
    (folder / "build-link").symlink_to(project.sources)
    (folder / "build-file").write_text("?")
    (folder / "build-cpu-1234").mkdir()
    (folder / "build-cpu-1234" / "one.o").write_text("truncated")
    project.build()
    assert list(folder.iterdir()) == [project.path]
    assert project.compiled() == ["link", "one.cpp", "slow.cpp", "two.cpp"]
    assert len(list(project.sources.iterdir())) == 3


def test_compiling_is_life(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_library, "_SIGN_SECONDS", 0.05)
    signs: list[float] = []
    monkeypatch.setattr(life, "listeners", [lambda: signs.append(time.monotonic())])
    project.slow_for(1)
    start = time.monotonic()
    project.build()
    moments = [start, *signs, time.monotonic()]
    assert max(after - before for before, after in itertools.pairwise(moments)) < 0.7
    assert len(signs) >= 8


def test_waiting_for_another_build_is_life_and_one_builds_at_a_time(
    project: Project, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    signs: list[float] = []
    monkeypatch.setattr(life, "listeners", [lambda: signs.append(time.monotonic())])
    project.path.parent.mkdir()
    lock = os.open(project.path.parent, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    threading.Timer(0.5, os.close, [lock]).start()
    with caplog.at_level("INFO"):
        project.build()
    assert len(signs) >= 3
    assert "another process compiles" in caplog.text
    assert is_whole(project.path)


@pytest.mark.slow
def test_one_that_never_ends_is_not_waited_for_for_ever(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped, perhaps, while it held the lock: the other one's folder is left alone."""
    monkeypatch.setattr(native_library, "_BUILD_SECONDS", 0.5)
    theirs = project.path.parent / "build-cpu-1234"
    theirs.mkdir(parents=True)
    (theirs / "one.o").write_text("theirs")
    lock = os.open(project.path.parent, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        project.build()
    finally:
        os.close(lock)
    assert is_whole(project.path)
    assert sorted(path.name for path in project.path.parent.iterdir()) == [
        "build-cpu-1234",
        "cpu-1234.so",
    ]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs Linux's list of processes")
def test_a_compiler_that_takes_too_long_is_ended_with_what_it_started(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_library, "_BUILD_SECONDS", 0.5)
    project.slow_for(77.25)
    with pytest.raises(DeviceError, match="timed out"):
        project.build()
    wait_for(lambda: not processes_of(project.folder))  # it would sleep for longer


def test_one_source_that_fails_keeps_the_objects_of_the_others(project: Project) -> None:
    working = project.compiler.read_text()
    project.compiler.write_text(
        working.replace("echo made", 'case "$2" in *slow.cpp) sleep 0.3; exit 1;; esac; echo made')
    )
    with pytest.raises(DeviceError, match="install g"):
        project.build()
    assert len(list((project.path.parent / "build-cpu-1234").iterdir())) == 2
    project.log.unlink()
    project.compiler.write_text(working)
    project.build()
    assert project.compiled() == ["link", "slow.cpp"]


def test_a_group_ends_with_the_block_that_needs_it() -> None:
    start = time.monotonic()
    with ChildGroup() as group:
        process = group.start(["sh", "-c", "sleep 60; echo late"], dict(os.environ))
        assert os.getpgid(process.pid) != os.getpgid(0)
    assert process.wait(50) == -signal.SIGKILL
    assert time.monotonic() - start < 50  # it would have slept for a minute
    assert process.stdout is not None
    process.stdout.close()


def test_signs_of_life_are_passed_on_at_a_bounded_rate_from_any_thread() -> None:
    told: list[float] = []
    heartbeat = life.Heartbeat(lambda: told.append(time.monotonic()), seconds=0.1)
    deadline = time.monotonic() + 0.55

    def work() -> None:
        while time.monotonic() < deadline:
            heartbeat()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 2 <= len(told) <= 5
