"""Building the C++ kernels, falling back without them, and choosing kernels."""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from quire.backends.cpu import build
from quire.backends.cpu.kernels import CpuKernels
from quire.backends.select import select_kernels
from quire.errors import DeviceError
from quire.kernels.ops import Activation
from quire.process import native_library

needs_compiler = pytest.mark.skipif(
    not any(shutil.which(name) for name in ("g++", "clang++", "c++")), reason="no C++ compiler here"
)


@pytest.mark.skipif(
    not Path("/proc/self/maps").exists(), reason="needs Linux's list of loaded libraries"
)
def test_kernels_bring_no_second_openmp(kernels: CpuKernels) -> None:
    kernels.gate(torch.ones(600, 600), Activation.SILU)
    loaded = set(
        re.findall(r"\S*/lib(?:gomp|iomp5|omp)[^/\s]*\.so\S*", Path("/proc/self/maps").read_text())
    )
    # Packages that other tests import may have one of their own (sentencepiece does): in a folder
    # "name.libs".
    assert len([path for path in loaded if not re.search(r"/(?!torch)[^/]+\.libs/", path)]) == 1, (
        loaded
    )


def test_without_a_compiler_the_reference_takes_over_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    build.load_library.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with caplog.at_level(logging.WARNING):
        chosen = select_kernels(torch.device("cpu"), torch.float32)
    assert chosen.name == "reference"
    assert len(caplog.records) == 1
    assert "install g++" in caplog.text
    with pytest.raises(DeviceError, match="compiler"):
        select_kernels(torch.device("cpu"), torch.float32, "cpu")


def test_a_failing_compiler_is_reported_with_its_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiler = tmp_path / "broken"
    compiler.write_text("#!/bin/sh\necho 'out of luck' >&2\nexit 1\n")
    compiler.chmod(0o755)
    build.load_library.cache_clear()
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("QUIRE_HOME", str(tmp_path / "home"))
    with pytest.raises(DeviceError, match="out of luck"):
        build.load_library()
    assert list((tmp_path / "home" / "kernels").iterdir()) == []


def test_another_compiler_of_the_same_name_builds_anew(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fingerprint(*command: str) -> str:
        return native_library.fingerprint(Path(build.__file__).parent, list(command), ["-O3"])

    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("g++", "ccache"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    first = fingerprint("g++"), fingerprint("ccache", "g++")
    assert (fingerprint("g++"), fingerprint("ccache", "g++")) == first
    assert first[0] != first[1]
    (tmp_path / "g++").write_text("#!/bin/sh\n# updated\n")
    assert not {fingerprint("g++"), fingerprint("ccache", "g++")} & set(first)
    monkeypatch.setattr(subprocess, "run", None)  # nothing is started for it
    fingerprint("g++")


@pytest.mark.slow
@needs_compiler
def test_builds_at_the_same_time_do_not_meet(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Two processes want kernels in one empty folder: one builds, both can use the result and only
    one file is left. Their compiler remembers the library from an earlier time, as ccache would.
    """
    quick = tmp_path / "quick"
    library = build.load_library()._name
    quick.write_text(f"""#!/bin/sh
for last; do :; done
sleep 0.1
case " $* " in *" -shared "*) echo linked >> {tmp_path}/log; cp {library} "$last";; *) echo compiled > "$last";; esac
""")
    quick.chmod(0o700)
    monkeypatch.setenv("CXX", str(quick))
    code = "import torch; from quire.backends.select import select_kernels as s; "
    code += "from quire.kernels.ops import Activation as A; "
    code += "print(s(torch.device('cpu'), torch.float32, 'cpu').gate(torch.zeros(1, 4), A.SILU).tolist())"
    monkeypatch.setenv("QUIRE_HOME", str(tmp_path / "home"))
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", code]
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root) for _ in range(2)
    ]
    assert [process.communicate()[0].strip() for process in running] == ["[[0.0, 0.0]]"] * 2
    assert len(list((tmp_path / "home" / "kernels").iterdir())) == 1
    assert (tmp_path / "log").read_text() == "linked\n"


@needs_compiler
def test_two_libraries_in_one_process_share_nothing() -> None:
    """What has the same name in both would be one thing: a table of the first one, of another size
    than the second one expects, its threads or its memory.
    """
    if not shutil.which("nm"):
        pytest.skip("no nm here")
    command = ["nm", "-D", "-C", "--defined-only", build.load_library()._name]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    # "address type name": of these the loader makes one for all libraries (V, W, u), or takes the first
    names = [line.split(maxsplit=2)[2] for line in done.stdout.splitlines()]
    assert not [name for name in names if "quire::" in name and "std::" not in name]
    assert "quire_attention_float32" in names


@needs_compiler
def test_a_library_that_is_not_whole_is_built_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Truncated (the process would end with SIGBUS), empty, changed, and what a killed build left
    behind.
    """
    source = tmp_path / "source.cpp"
    source.write_text(
        '#include "arguments.h"\nextern "C" { QUIRE_EXPORT int number() { return 7; } }\n'
    )
    shutil.copy(Path(build.__file__).with_name("arguments.h"), tmp_path)
    monkeypatch.setattr(build, "_SOURCE_FOLDER", tmp_path)
    monkeypatch.setenv("QUIRE_HOME", str(tmp_path / "home"))
    load = build.load_library.__wrapped__
    assert load().number() == 7
    (library,) = (tmp_path / "home" / "kernels").iterdir()
    whole = library.read_bytes()
    (library.parent / "build-left").mkdir()
    (library.parent / "build-left" / ".quire-temporary-folder").touch()
    for broken in (
        whole[:4096],
        whole[: len(whole) // 2],
        b"",
        whole[:-1],
        whole[:100] + b"x" + whole[101:],
    ):
        library.unlink()  # the old one is in use
        library.write_bytes(broken)
        assert load().number() == 7
        assert native_library.is_whole(library)
    assert list(library.parent.iterdir()) == [library]


@pytest.mark.slow
@needs_compiler
def test_a_build_without_room_says_what_to_do(tmp_path: Path) -> None:
    """A limit on the size of files, like a full disk: one line, and the reference kernels go on."""
    source = tmp_path / "sources" / "source.cpp"  # quickly compiled, and large then
    source.parent.mkdir()
    source.write_text("extern const int numbers[10000] = {1};\n")
    code = "import resource, sys, torch; resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000)); "
    code += "from pathlib import Path; from quire.backends.cpu import build; build._SOURCE_FOLDER = Path(sys.argv[1]); "
    code += "from quire.backends.select import select_kernels as s; print(s(torch.device('cpu'), torch.float32).name)"
    environment = {**os.environ, "QUIRE_HOME": str(tmp_path)}
    command = [sys.executable, "-c", code, str(source.parent)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=environment,
        cwd=Path(__file__).parents[2],
        check=True,
    )
    assert done.stdout == "reference\n"
    assert "QUIRE_HOME" in done.stderr
    assert done.stderr.count("\n") == 1
    assert list((tmp_path / "kernels").iterdir()) == []


@needs_compiler
@pytest.mark.parametrize(
    ("device", "dtype", "name", "expected"),
    [
        ("cpu", torch.float32, "auto", "cpu"),
        ("cpu", torch.bfloat16, "cpu", "cpu"),
        ("cpu", torch.bfloat16, "reference", "reference"),
        ("cpu", torch.float16, "auto", "reference"),
    ],
)
def test_select_kernels(device: str, dtype: torch.dtype, name: str, expected: str) -> None:
    assert select_kernels(torch.device(device), dtype, name).name == expected


def test_a_gpu_gets_triton_or_the_reference_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # as if triton were not installed
    monkeypatch.setitem(sys.modules, "quire.backends.triton.kernels", None)
    assert select_kernels(torch.device("cuda"), torch.bfloat16).name == "reference"
    assert "pip install triton" in caplog.text
    with pytest.raises(DeviceError, match="pip install triton"):
        select_kernels(torch.device("cuda"), torch.bfloat16, "triton")
    monkeypatch.undo()
    pytest.importorskip("triton")
    assert select_kernels(torch.device("cuda"), torch.bfloat16).name == "triton"


def test_select_kernels_refuses_what_it_does_not_have() -> None:
    with pytest.raises(DeviceError, match="triton"):
        select_kernels(torch.device("cpu"), torch.float32, "triton")
    with pytest.raises(DeviceError, match="float16"):
        select_kernels(torch.device("cpu"), torch.float16, "cpu")
