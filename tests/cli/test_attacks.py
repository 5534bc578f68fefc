"""Attacks on the command line: files and options that nobody meant end in one line that says what
is wrong.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.in_process import quire_here

HUGE = "9" * 5000
DEEP = "[" * 5000 + "]" * 5000


def refused(*arguments: str | Path) -> str:
    """What a command says that fails as it should: a status, and no stack trace (which would be
    raised here).
    """
    done = quire_here(*arguments)
    assert done.returncode in (1, 2), (done.returncode, done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    assert len(done.stderr) < 20_000
    return done.stderr


TOML = [
    f"a = {DEEP}",
    "a = " + "{b = " * 2000 + "1" + "}" * 2000,
    ".".join(["a"] * 3000) + " = 1",
    f"[server]\nport = {HUGE}",
    f"[server]\nport = 0x{'f' * 5000}",
    f"[server]\nrequest_timeout = 0x{'f' * 5000}",
    f"[server]\nrequest_timeout = {HUGE}.0",
    f"[engine]\nmax_model_len = {2**70}",
    f'[engine]\nkv_cache_memory = "{HUGE}GiB"',
    f'[server]\nmax_body_size = "{HUGE}"',
    "[server]\nport = nan",
    "[server]\nhost = [1]",
    "[server]\nrequest_timeout = inf",
    "[server]\napi_key = [1, 2]",
    "[server]\n" + ".".join(["port"] * 2000) + " = 1",
    "[server]\nport = 1979-05-27",
    "[server]\npage = 'x'",
    "server = 1",
    "[[server]]\nport = 1",
    "model = 1",
    "model = {a = 1}",
    "[other]",
    "a = 1\na = 2",
    '"' * 1000,
    "\x00",
    "[engine]\nunknown = 1",
]


@pytest.mark.few(8)
@pytest.mark.parametrize("text", TOML, ids=range(len(TOML)))
def test_settings(tmp_path: Path, text: str) -> None:
    file = tmp_path / "quire.toml"
    file.write_text(text)
    refused("serve", "--config", file, "--print-config")


@pytest.mark.parametrize("data", [b"\xff\xfe", b"\x00" * 100, b"[server]\nhost = '\xff'"])
def test_settings_that_are_no_text(tmp_path: Path, data: bytes) -> None:
    file = tmp_path / "quire.toml"
    file.write_bytes(data)
    refused("serve", "--config", file, "--print-config")


def test_settings_that_are_no_file(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(link)
    for path in (tmp_path, tmp_path / "none", "/dev/null/x", "a\x00b", link, "x" * 5000):
        refused("serve", "--config", path, "--print-config")


LOGS = [
    DEEP,
    '{"version": 1, "step": ' + DEEP + "}",
    '{"version": ' + HUGE + "}",
    "null",
    "[]",
    "{}",
    '{"version": 5}',
    '{"version": 5, "step": 1}',
    '{"version": 5, "step": {"admitted": [1]}}',
    '{"version": 5, "step": {"admitted": [{"params": 1}]}}',
    '{"version": 5, "step": {"admitted": {}}}',
    '{"version": 5, "step": {"admitted": [{"params": {"structured": 1}}]}}',
    '{"version": 5, "step": {"admitted": [], "x": 1}}',
    '"' * 999,
    "\x00",
    "NaN",
]


@pytest.mark.few(8)
@pytest.mark.parametrize("text", LOGS, ids=range(len(LOGS)))
@pytest.mark.parametrize("command", ["explain", "replay"])
def test_step_logs(tmp_path: Path, text: str, command: str) -> None:
    from quire.observe.step_lines import VERSION

    file = tmp_path / "steps.jsonl"
    file.write_text(text.replace('"version": 5', f'"version": {VERSION}'))
    refused(command, file)


def test_step_logs_that_are_none(tmp_path: Path) -> None:
    file = tmp_path / "steps.jsonl"
    for data in (b"\xff", b"\x80" * 100, b"\x1f\x8b" + b"x" * 100):
        file.write_bytes(data)
        refused("explain", file)
    for path in (tmp_path, tmp_path / "none", "/dev/null/x"):
        refused("explain", path)


OPTIONS = [
    ("serve", "--port", HUGE),
    ("serve", "--port", "-1"),
    ("serve", "--port", "99999"),
    ("serve", "--port", "x"),
    ("serve", "--request-timeout", "nan"),
    ("serve", "--request-timeout", "-1"),
    ("serve", "--max-body-size", HUGE),
    ("serve", "--max-body-size", "1e9"),
    ("serve", "--max-batch-size", "0"),
    ("serve", "--max-batch-size-per-key", "-1"),
    ("serve", "--max-batch-size-per-key", "x"),
    ("serve", "--admin-key", "k"),
    ("serve", "--api-key", " "),
    ("serve", "--api-key", "ä"),
    ("serve", "--api-key", "a", "--admin-key", " "),
    ("serve", "--api-key-file", "/dev/null"),
    ("serve", "--api-key-file", "/"),
    ("serve", "--api-key-file", "a\x00b"),
    ("serve", "--http-workers", "0"),
    ("serve", "--http-workers", "99999"),
    ("serve", "--replicas", HUGE),
    ("serve", "--tls-cert", "/"),
    ("serve", "--tls-cert", "x" * 5000, "--tls-key", "x"),
    ("serve", "--log-level", "x"),
    ("serve", "--kv-cache-memory", "x" * 5000),
    ("serve", "--nothing"),
    ("batch",),
    ("batch", "/none.jsonl"),
    ("batch", "/"),
    ("batch", "/none.parquet"),
    ("batch", "a\x00b"),
    ("batch", "x" * 5000),
    ("run", "--max-tokens", HUGE, "x"),
    ("run", "--seed", "x", "x"),
    ("run", "--model", "x" * 5000, "hi"),
    ("run", "--model", "a\x00b", "hi"),
    ("bench", "serve", "--extra-body", DEEP),
    ("bench", "serve", "--extra-body", "[]"),
    ("explain", "http://127.0.0.1:1", "x"),
    ("explain", "http://[", "x"),
    ("explain", "http://127.0.0.1:99999", "x"),
    ("explain", "https://", "x"),
    ("explain", "http://127.0.0.1:1"),
    ("inspect", "/"),
    ("inspect", "/none"),
    ("inspect", "a\x00b"),
    ("inspect", "x" * 5000),
    ("verify", "x" * 5000),
    ("quantize", "x" * 5000, "y"),
    ("plan", "/none"),
    ("plan", "x" * 5000),
    ("replay", "x" * 5000),
    ("nothing",),
]


@pytest.mark.few(14)
@pytest.mark.parametrize("arguments", OPTIONS, ids=range(len(OPTIONS)))
def test_options(arguments: tuple[str, ...]) -> None:
    refused(*arguments, *(["--print-config"] if arguments[0] == "serve" else []))


@pytest.mark.parametrize("output", ["folder", "link/x", "file/x", "x" * 300])
def test_where_answers_of_a_batch_cant_go(tmp_path: Path, output: str) -> None:
    requests = tmp_path / "requests.jsonl"
    requests.write_text("{}\n")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "link")
    (tmp_path / "file").touch()
    assert "--output" in refused("batch", requests, "-o", tmp_path / output)


def test_answers_that_another_program_wrote(tmp_path: Path) -> None:
    requests, part = tmp_path / "requests.jsonl", tmp_path / "out.jsonl.part"
    requests.write_text("{}\n")
    part.write_bytes(b'{"id": "x"}\n')  # they are not touched
    assert "another request" in refused("batch", requests, "-o", tmp_path / "out.jsonl")
    assert part.read_bytes() == b'{"id": "x"}\n'
    part.unlink()
    part.symlink_to(tmp_path / "victim")
    assert "is a link" in refused("batch", requests, "-o", tmp_path / "out.jsonl")
    assert not (tmp_path / "victim").exists()
