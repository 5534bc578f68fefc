"""Starting and stopping: signals, ports, models that are not there, orphans."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cli.in_process import quire_here
from tests.server.forked import fork_context
from tests.server.harness import ROOT, SMALL_ENGINE, Server, engines_of, free_port, wait_for

LONG = {"prompt": "Count: 1, 2, 3,", "max_tokens": 900, "ignore_eos": True, "temperature": 0}


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def stream_in_background(
    server: Server, body: dict[str, Any]
) -> tuple[threading.Thread, list[Any]]:
    events: list[Any] = []

    def read() -> None:
        try:
            events.extend(server.stream("/v1/completions", body))
        except Exception as error:
            events.append(error)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    wait_for(lambda: server.metric("vllm:num_requests_running") == 1, what="the request")
    return thread, events


def write_modules(path: str) -> None:
    Path(path).write_text("\n".join(sys.modules))


def test_servers_of_tests_are_forked_with_all_that_they_import(tmp_path: Path) -> None:
    """Each of a hundred would take a second of a processor for it."""
    path = tmp_path / "modules"
    process = fork_context().Process(target=write_modules, args=(str(path),))
    process.start()
    process.join()
    imported = set(path.read_text().splitlines())
    assert imported >= {
        "fastapi",
        "jinja2",
        "prometheus_client",
        "quire.server.link.engine_process",
        "quire.server.run",
        "torch",
    }


@pytest.fixture
def server(small_model: str) -> Iterator[Server]:
    """Slow enough for a request to be there when a signal comes."""
    with Server(faults=True, model=small_model, engine=SMALL_ENGINE) as server:
        server.fault_file.write_text("slow 0.02")
        yield server


def test_sigterm_lets_requests_end_and_takes_no_new_ones(server: Server) -> None:
    """Somebody who watches is not waited for."""
    pid = server.engine_pid
    watcher = threading.Thread(target=server.get, args=("/page/watch",), daemon=True)
    watcher.start()
    thread, events = stream_in_background(server, {**LONG, "max_tokens": 60})
    assert server.process is not None
    server.process.send_signal(signal.SIGTERM)
    wait_for(lambda: "no new requests" in server.log, what="the signal")
    wait_for(lambda: server.health() == 0, what="the closed door")
    thread.join(60)
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    assert server.process.wait(60) == 0
    wait_for(lambda: not is_alive(pid), what="the engine's end")
    watcher.join(60)
    assert not watcher.is_alive()


def test_a_second_sigterm_ends_at_once(server: Server) -> None:
    pid = server.engine_pid
    thread, events = stream_in_background(server, LONG)
    assert server.process is not None
    server.process.send_signal(signal.SIGTERM)
    wait_for(lambda: "no new requests" in server.log, what="the signal")
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(60) == 128 + signal.SIGTERM
    wait_for(lambda: not is_alive(pid), what="the engine's end")
    thread.join(60)
    assert not thread.is_alive()
    assert events[-1]["error"]["code"] == "shutting_down"
    assert "Traceback" not in server.log


def test_under_nohup_a_hangup_ends_nothing(small_model: str) -> None:
    environment = {"QUIRE_TEST_NOHUP": "1"}
    with Server(model=small_model, engine=SMALL_ENGINE, environment=environment) as server:
        assert server.process is not None
        server.process.send_signal(signal.SIGHUP)
        server.assert_sound()  # takes requests, so the signal has been seen by then
        assert server.process.poll() is None
        assert "no new requests" not in server.log


def test_the_engine_does_not_outlive_a_killed_server(small_model: str, tmp_path: Path) -> None:
    environment = {"TMPDIR": str(tmp_path)}
    with Server(model=small_model, engine=SMALL_ENGINE, environment=environment) as server:
        _kill_server(server)
    assert list(tmp_path.glob("quire-*")) == []


def _kill_server(server: Server) -> None:
    pid = server.engine_pid
    assert server.process is not None
    # What a supervisor sends to the whole group first must not end the engine.
    os.kill(pid, signal.SIGTERM)
    os.kill(pid, signal.SIGINT)
    server.assert_sound()
    server.process.kill()
    server.process.wait()
    wait_for(lambda: not is_alive(pid), what="the engine's end")


def start(fields: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    code = "import sys; from quire.cli.main import main; sys.argv = ['quire', 'serve', *sys.argv[1:]]; main()"
    arguments = [text for name, value in fields.items() for text in (f"--{name}", str(value))]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        env=environment,
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.slow
def test_a_port_in_use_is_known_before_the_model_is_loaded() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        done = start({"port": other.getsockname()[1]})
    assert done.returncode == 1
    assert "can't listen on 127.0.0.1" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tls-cert": "/nonexistent.pem"}, "there is no file"),
        ({"log-format": "xml"}, "log_format"),
        ({"api-key-file": "/nonexistent"}, "can't be read"),
        ({"max-num-seqs": 0}, "max_num_seqs"),
        ({"port": 70000}, "port"),
    ],
)
def test_options_that_cannot_be_say_why(fields: dict[str, Any], message: str) -> None:
    arguments = [
        text
        for name, value in {"port": free_port(), **fields}.items()
        for text in (f"--{name}", str(value))
    ]
    done = quire_here("serve", *arguments)
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": "no/such/folder"}, "no/such/folder"),
        ({"kv-cache-memory": "100KiB"}, "Raise kv_cache_memory"),
    ],
)
def test_what_cannot_be_served_says_why(fields: dict[str, Any], message: str) -> None:
    done = start({"port": free_port(), **fields})
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_the_command_line_serves(tmp_path: Path, smollm2_gguf: Path) -> None:
    """With keys from flag, file and environment, and JSON in the log. The HTTP process has no
    torch, which takes seconds to import, and 200 MB: of a GGUF file it reads the tokenizer alone.
    """
    keys = tmp_path / "keys"
    keys.write_text("from-file\n\n")
    port = free_port()
    code = "import sys; from quire.cli.main import main; sys.argv = ['quire', 'serve', *sys.argv[1:]]; main()"
    arguments = [
        "--port",
        str(port),
        "--api-key",
        "from-flag",
        "--api-key-file",
        str(keys),
        "--log-format",
        "json",
    ]
    arguments += ["--no-page"]
    arguments += [
        "--model",
        str(smollm2_gguf),
        "--served-model-name",
        "small",
        "--kv-cache-memory",
        "64MiB",
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "QUIRE_API_KEY": "from-env, two",
    }
    log = tmp_path / "log"
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-c", code, *arguments],
            cwd=ROOT,
            env=environment,
            stderr=file,
            stdout=file,
        )
    try:
        wait_for(
            lambda: "serving small at" in log.read_text() or process.poll() is not None,
            "the server",
        )
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", verify=False) as client:
            for key, status in {
                "from-flag": 200,
                "from-file": 200,
                "from-env": 200,
                "two": 200,
                "other": 401,
            }.items():
                response = client.get("/v1/models", headers={"authorization": f"Bearer {key}"})
                assert response.status_code == status, key
            page = client.get("/", headers={"authorization": "Bearer two", "accept": "text/html"})
            assert page.status_code == 404
        has_torch = [
            "libtorch" in Path(f"/proc/{pid}/maps").read_text()
            for pid in (process.pid, *engines_of(process.pid))
        ]
        assert has_torch == [False, True]
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.strip()]
    requests = [line for line in lines if line["message"] == "request"]
    assert {line["status"] for line in requests} == {200, 401, 404}
    assert all(line["request_id"] and line["process"] == "server" for line in requests)
    assert "from-flag" not in log.read_text()
