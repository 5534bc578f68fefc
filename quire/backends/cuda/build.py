"""Compiles the sources beside this file for the GPU at hand: by NVRTC, the compiler's library that
comes with every CUDA build of torch, or by nvcc. The result is kept under a name made from everything
that shapes it.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
from collections.abc import Mapping
from ctypes import byref, c_char_p, c_int, c_size_t, c_void_p
from functools import cache
from pathlib import Path

import torch

from quire.config import cache_dir
from quire.errors import DeviceError
from quire.process.temporary_folders import temporary_folder

logger = logging.getLogger(__name__)

FOLDER = Path(__file__).parent
# Products and sums are fused only where the source says so, or bits would depend on how the compiler
# arranges a loop.
FLAGS = ("-std=c++17", "-fmad=false")
_BUILD_SECONDS = 600.0
_DIGEST_BYTES = hashlib.sha256().digest_size


def translation_unit(source: str) -> str:
    """The text that is compiled: what a device has beyond C++, and then the source."""
    return f'#include "device.h"\n#include "{source}"\n'


def definitions(constants: Mapping[str, int]) -> list[str]:
    return [f"-D{name}={value}" for name, value in constants.items()]


def build(source: str, constants: Mapping[str, int], architecture: str) -> bytes:
    """The machine code of a source for an `architecture` such as sm_90. Raises DeviceError where
    there is no compiler, or it fails.
    """
    options = [*FLAGS, f"-arch={architecture}", *definitions(constants)]
    path = cache_dir() / "kernels" / f"cuda-{_fingerprint(source, options)}.cubin"
    code = _kept(path)
    if code is None:
        logger.info("compiling CUDA kernels (once for this GPU and shape, some seconds)")
        code = compile_source(source, options)
        _keep(path, code)
    return code


def compile_source(source: str, options: list[str]) -> bytes:
    library = find_nvrtc()
    if library is not None:
        return _by_nvrtc(library, source, options)
    compiler = shutil.which("nvcc")
    if compiler is None:
        raise DeviceError(
            "No CUDA compiler was found: install nvidia-cuda-nvrtc in torch's CUDA version, or nvcc."
        )
    return _by_nvcc(compiler, source, options)


def _fingerprint(source: str, options: list[str]) -> str:
    digest = hashlib.sha256()
    for path in sorted([*FOLDER.glob("*.cu"), *FOLDER.glob("*.h")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    digest.update(repr((source, options, compiler_version())).encode())
    return digest.hexdigest()[:20]


@cache
def compiler_version() -> str:
    library = find_nvrtc()
    if library is None:
        compiler = shutil.which("nvcc")
        return "" if compiler is None else repr(Path(compiler).resolve().stat().st_mtime_ns)
    major, minor = c_int(), c_int()
    library.nvrtcVersion(byref(major), byref(minor))
    return f"{major.value}.{minor.value}"


@cache
def find_nvrtc() -> ctypes.CDLL | None:
    """NVRTC of torch's CUDA version: where the loader finds it, or among the packages beside torch."""
    version = (torch.version.cuda or "").partition(".")[0]
    if not version:
        return None
    name = f"libnvrtc.so.{version}"
    packages = Path(torch.__file__).parent.parent
    folders = [*packages.glob("nvidia/*/lib"), packages / "torch" / "lib"]
    for candidate in [name, *(str(folder / name) for folder in folders)]:
        try:
            return open_nvrtc(candidate)
        except OSError:
            continue
    return None


def open_nvrtc(path: str) -> ctypes.CDLL:
    library = ctypes.CDLL(path)
    library.nvrtcGetErrorString.restype = c_char_p
    return library


def _by_nvrtc(library: ctypes.CDLL, source: str, options: list[str]) -> bytes:
    program = c_void_p()

    def call(name: str, *arguments: object) -> int:
        return int(getattr(library, f"nvrtc{name}")(*arguments))

    def text(name: str) -> bytes:
        size = c_size_t()
        call(f"Get{name}Size", program, byref(size))
        found = ctypes.create_string_buffer(size.value)
        call(f"Get{name}", program, found)
        return found.raw

    unit = translation_unit(source).encode()
    status = call("CreateProgram", byref(program), unit, b"unit.cu", 0, None, None)
    if not status:
        given = [option.encode() for option in (*options, f"-I{FOLDER}")]
        status = call("CompileProgram", program, len(given), (c_char_p * len(given))(*given))
    try:
        if status:
            log = text("ProgramLog").rstrip(b"\0").decode(errors="replace") if program else ""
            logger.debug("%s", log)
            reason = library.nvrtcGetErrorString(status).decode()
            lines = [line for line in log.splitlines() if "error" in line] or [reason]
            raise DeviceError(
                f"{source} can't be compiled by NVRTC {compiler_version()}: {lines[0]}"
            )
        return text("CUBIN")
    finally:
        call("DestroyProgram", byref(program))


def _by_nvcc(compiler: str, source: str, options: list[str]) -> bytes:
    with temporary_folder("cuda-", None) as folder:
        unit, result = folder / "unit.cu", folder / "unit.cubin"
        unit.write_text(translation_unit(source))
        command = [compiler, "-cubin", *options, f"-I{FOLDER}", str(unit), "-o", str(result)]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_BUILD_SECONDS, check=False
        )
        if done.returncode:
            logger.debug("%s", done.stderr)
            lines = [line for line in done.stderr.splitlines() if "error" in line] or ["it failed"]
            raise DeviceError(f"{source} can't be compiled by {compiler}: {lines[0]}")
        return result.read_bytes()


def _kept(path: Path) -> bytes | None:
    """What an earlier build has left, if all of it is there."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    code, digest = data[:-_DIGEST_BYTES], data[-_DIGEST_BYTES:]
    return code if hashlib.sha256(code).digest() == digest else None


def _keep(path: Path, code: bytes) -> None:
    """So that nobody finds half of it. Where nothing can be written, each start compiles."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        part.write_bytes(code + hashlib.sha256(code).digest())
        part.replace(path)
    except OSError as error:
        logger.warning("compiled kernels can't be kept in %s: %s", path.parent, error)
