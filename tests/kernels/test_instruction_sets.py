"""The same numbers on every instruction set: the kernels of a quantised model are built for
several, by gcc and by clang, run here or under an emulator, and must print the same digests (see
digest.cpp).
"""

from __future__ import annotations

import hashlib
import platform
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest

from quire.backends.cpu import build
from quire.process import native_library
from tests.kernels.cpu_support import load_level
from tests.long_runs import IS_LONG

FOLDER = Path(build.__file__).parent
IS_X86 = platform.machine() == "x86_64"
BETWEEN = ("skylake-avx512", "cascadelake")
"""Levels for which no other test has a library."""
# bits may not depend on how much is optimised, either
FLAGS = [flag for flag in build.FLAGS if flag != "-O3"]


def x86_levels() -> dict[str, list[str]]:
    """What this machine can run, from the least: plain C, AVX2, AVX-512 without and with dot
    products, the best.
    """
    # qemu knows these
    flags = native_library.cpu_features().split() if IS_X86 else ["avx2", "fma", "f16c", "bmi2"]
    levels: dict[str, list[str]] = {"x86-64": [], "x86-64-v3": ["avx2", "fma", "f16c", "bmi2"]}
    levels |= {
        "skylake-avx512": ["avx512bw", "avx512vl", "avx512dq"],
        "cascadelake": ["avx512_vnni", "avx512vl"],
    }
    return {level: needed for level, needed in levels.items() if set(needed) <= set(flags)}


def run_library(architecture: str, folder: Path) -> str:
    """The digests of the library that the tests of the kernels use, which is built by now or will
    be used by them.
    """
    library = Path(load_level(architecture)._name)
    program = folder / f"library-{architecture}"
    source = Path(__file__).with_name("digest.cpp")
    link = [str(library), f"-Wl,-rpath,{library.parent}"]
    command = ["g++", *FLAGS, "-O1", f"-I{FOLDER}", str(source), *link, "-o", str(program)]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    return subprocess.run([program], check=True, capture_output=True, text=True, timeout=120).stdout


def optimisation(compiler: str, architecture: str) -> str:
    """None in the short form where it shows as much and compiles in a third of the time: clang
    fuses products and sums without it, too, the least x86 can't, and of levels between those that
    libraries are built for the instructions that are chosen matter.
    """
    is_plain = architecture in ("x86-64", *BETWEEN)
    return "-O0" if not IS_LONG and ("clang" in compiler or is_plain) else "-O1"


@cache
def macros(compiler: str, architecture: str) -> dict[str, str]:
    """What an instruction set defines."""
    command = [compiler, build.machine_flag(architecture), "-dM", "-E", "-x", "c++", "/dev/null"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    return dict(re.findall(r"^#define (\w+) (.*)$", done.stdout, re.MULTILINE))


@cache
def words(source: Path) -> frozenset[str]:
    """All words of a file and of the files beside it that it includes."""
    text = source.read_text()
    found = frozenset(re.findall(r"\w+", text))
    included = [FOLDER / name for name in re.findall(r'#include "(.+?)"', text)]
    return found.union(*(words(path) for path in included))


def what_shapes(compiler: str, architecture: str, source: Path) -> str:
    """A name for what becomes of a file on an instruction set. Nothing is optimised on levels
    between, so there it is the same for two of them between whose macros the file does not tell a
    difference.
    """
    if architecture not in BETWEEN or optimisation(compiler, architecture) != "-O0":
        return architecture
    seen = sorted(
        item for item in macros(compiler, architecture).items() if item[0] in words(source)
    )
    return "between-" + hashlib.sha256(repr(seen).encode()).hexdigest()[:12]


def run(compiler: str, architecture: str, emulator: list[str], folder: Path) -> str:
    program = folder / f"{compiler}-{architecture}"
    sources = [path for path in sorted(FOLDER.glob("*.cpp")) if path.stem != "sampling"]
    flags = [
        *FLAGS,
        optimisation(compiler, architecture),
        build.machine_flag(architecture),
        f"-I{FOLDER}",
    ]

    def compiled(source: Path) -> str:
        target = (
            folder / f"{compiler}-{what_shapes(compiler, architecture, source)}-{source.stem}.o"
        )
        if not target.exists():
            unfinished = target.with_suffix(".part")  # of this process: the folder is its own
            command = [compiler, *flags, "-c", str(source), "-o", str(unfinished)]
            subprocess.run(command, check=True, capture_output=True, timeout=300)
            unfinished.rename(target)
        return str(target)

    with ThreadPoolExecutor(2) as compilers:
        objects = list(compilers.map(compiled, [Path(__file__).with_name("digest.cpp"), *sources]))
    subprocess.run(
        [compiler, "-pthread", *objects, "-o", str(program)],
        check=True,
        capture_output=True,
        timeout=60,
    )
    done = subprocess.run(
        [*emulator, str(program)], check=True, capture_output=True, text=True, timeout=120
    )
    return done.stdout


@cache
def expected(folder: Path) -> str:
    return run_library("native", folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not shutil.which("g++"):
        pytest.skip("no g++ here")
    return tmp_path_factory.mktemp("digests")


def foreign_levels() -> list[tuple[str, str, list[str]]]:
    """Compiler, architecture and emulator of the other kind of machine."""
    name = "aarch64" if IS_X86 else "x86_64"
    # where Debian keeps its libraries
    emulator = [f"qemu-{name}", "-cpu", "max", "-L", f"/usr/{name}-linux-gnu"]
    levels = ["armv8-a", "armv8.2-a+dotprod"] if IS_X86 else list(x86_levels())
    return [(f"{name}-linux-gnu-g++", level, emulator) for level in levels]


def native_levels() -> list[str]:
    return list(x86_levels()) if IS_X86 else ["armv8-a"]


@pytest.mark.slow
@pytest.mark.parametrize("level", native_levels())
def test_every_instruction_set_of_this_machine_gives_the_same_bits(
    level: str, folder: Path
) -> None:
    found = run("g++", level, [], folder) if level in BETWEEN else run_library(level, folder)
    assert found == expected(folder)
    assert len(set(expected(folder).split("\n"))) > 40


@pytest.mark.soak
def test_clang_gives_the_same_bits(folder: Path) -> None:
    if not shutil.which("clang++"):
        pytest.skip("no clang++ here")
    assert run("clang++", "native", [], folder) == expected(folder)


@pytest.mark.soak
@pytest.mark.parametrize(("compiler", "level", "emulator"), foreign_levels())
def test_other_machines_give_the_same_bits(
    compiler: str, level: str, emulator: list[str], folder: Path
) -> None:
    missing = [name for name in (compiler, emulator[0]) if not shutil.which(name)]
    if missing:
        pytest.skip(
            f"{' and '.join(missing)} not installed (Debian has g++-aarch64-linux-gnu and qemu-user, say)"
        )
    assert run(compiler, level, emulator, folder) == expected(folder)
