"""A server as a process of its own, and what tests ask of it."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from tests.server.forked import ForkedServer

ROOT = Path(__file__).parents[2]
ENGINE = {"kv_cache_memory": "128MiB", "max_model_len": 1024, "max_num_seqs": 16}
SMALL_ENGINE = {
    "kv_cache_memory": "4MiB",
    "max_model_len": 1024,
    "max_num_seqs": 16,
    "max_batched_tokens": 64,
    "dtype": "float32",
}
"""For the small random model; its prompts take several steps."""
KEY = "secret-key"
MEMORY_ROOM = 256 * 1024
"""KiB that a process may gain over its first canary: the cache's pages, which are touched as they
are used, and what the largest bodies leave behind.
"""
CANARY = {"prompt": "The capital of France is", "max_tokens": 8, "ignore_eos": True}


PATIENCE = 120.0
"""Seconds for anything to happen, on a machine that has much else to do: a test that wants
something to be quick has to look at something else than a clock.
"""


@cache
def _numbers(pid: int) -> Iterator[int]:
    """Where a process, by its own number, looks for free ports: pytest's are forked."""
    return itertools.count(pid * 397)


def wait_for(condition: Callable[[], Any], what: str = "it") -> Any:
    """The condition's first true value. Who waits longer asks less often: asking takes time from
    what is waited for.
    """
    start = time.monotonic()
    while (waited := time.monotonic() - start) < PATIENCE:
        value = condition()
        if value:
            return value
        time.sleep(min(0.02 + waited / 10, 0.25))
    raise AssertionError(f"waited {PATIENCE} s for {what}")


def send(server: Server, body: dict[str, Any], path: str = "/v1/completions") -> socket.socket:
    """A request on a connection of its own; closing that is leaving."""
    data = json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=60)
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n"
    connection.sendall(head.encode() + b"\r\n" + data)
    return connection


def free_port() -> int:
    """Until the server binds it, a connection could be given one of those that the system gives to
    connections: so it is of those below them, and each of pytest's processes looks elsewhere.
    """
    for number in itertools.islice(_numbers(os.getpid()), 20_000):
        with socket.socket() as one, suppress(OSError):
            one.bind(("127.0.0.1", 10_000 + number % 20_000))
            port: int = one.getsockname()[1]
            return port
    raise AssertionError("no port is free")


def engines_of(pid: int) -> Iterator[int]:
    """Engine processes that this one has started, or forked."""
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        process = Path(f"/proc/{child}")
        if (
            b"engine" in (process / "cmdline").read_bytes()
            or (process / "comm").read_text() == "engine\n"
        ):
            yield int(child)


class Server:
    """`with Server(max_queued_requests=2) as server:` any field of ServerConfig."""

    def __init__(
        self, faults: bool = False, environment: dict[str, str] | None = None, **fields: Any
    ) -> None:
        self.port = free_port()
        self.url = f"{'https' if 'tls_key' in fields else 'http'}://127.0.0.1:{self.port}"
        self._folder = tempfile.TemporaryDirectory()
        self.log_file = Path(self._folder.name) / "log"
        self.fault_file = Path(self._folder.name) / "fault"
        self.fields = {"port": self.port, "engine": ENGINE, **fields}
        self._faults = faults
        if faults:
            self.fields["engine_module"] = "tests.server.faulty_engine"
        self._environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "QUIRE_TEST_FAULT": str(self.fault_file),
            **(environment or {}),
        }
        self.process: ForkedServer | None = None
        self.baseline: list[int] = []
        self._memory: list[int] = []

    def __enter__(self) -> Self:
        self.begin()
        try:
            wait_for(self._is_up, "the server")
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def begin(self) -> None:
        """Starts it, and waits for nothing."""
        self.process = ForkedServer(self.fields, self._environment, self.log_file, self._faults)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.process is not None and self.process.poll() is None:
            for _ in range(2):
                self.process.send_signal(signal.SIGTERM)
                time.sleep(0.05)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._folder.cleanup()

    def _is_up(self) -> bool:
        assert self.process is not None
        if self.process.poll() is not None:
            raise AssertionError(f"the server ended: {self.log}")
        return "serving" in self.log and self.health() == 200

    # Talking to it

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def client(self, **options: Any) -> httpx.Client:
        options.setdefault("timeout", 60)
        # else each client reads all the world's certificates, 50 ms of them
        options.setdefault("verify", False)
        return httpx.Client(base_url=self.url, **options)

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        with self.client() as client:
            return client.post(path, json=body, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        with self.client() as client:
            return client.get(path, **options)

    def health(self) -> int:
        try:
            return httpx.get(f"{self.url}/health", timeout=5, verify=False).status_code
        except httpx.TransportError:
            return 0

    def complete(self, **fields: Any) -> dict[str, Any]:
        response = self.post(
            "/v1/completions", {"temperature": 0, "return_token_ids": True, **fields}
        )
        assert response.status_code == 200, response.text
        body: dict[str, Any] = response.json()
        return body

    def stream(
        self, path: str, body: dict[str, Any], client: httpx.Client | None = None
    ) -> Iterator[Any]:
        """The events of a stream, decoded; ends at [DONE] or when the stream does."""
        with (
            client or self.client() as opened,
            opened.stream("POST", path, json={**body, "stream": True}) as response,
        ):
            if response.status_code != 200:
                raise AssertionError(response.read().decode())
            for line in response.iter_lines():
                if line == "data: [DONE]":
                    return
                if line.startswith("data: "):
                    yield json.loads(line[6:])

    def stream_to_deadline(self, path: str, body: dict[str, Any], deadline: float) -> list[Any]:
        """The events of a stream that has begun when its deadline ends it. A busy machine may need
        longer to begin (and answer with 504, or with the error alone): then it is tried again with
        a later one.
        """
        while deadline < 8:
            with suppress(AssertionError):
                events = list(self.stream(path, {**body, "deadline": deadline}))
                if len(events) > 1:
                    return events
            deadline *= 4
        return list(self.stream(path, {**body, "deadline": deadline}))

    # What it is like inside

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        return self.metrics(name)[0]

    def metrics(self, *names: str) -> list[float]:
        """Several of them, at one moment."""
        text = self.get("/metrics").text.splitlines()
        found = [
            [line for line in text if line.startswith((name + "{", name + " "))] for name in names
        ]
        assert all(found), names
        return [sum(float(line.rsplit(" ", 1)[1]) for line in lines) for lines in found]

    @property
    def engine_pid(self) -> int:
        assert self.process is not None
        return next(engines_of(self.process.pid))

    @property
    def is_idle(self) -> bool:
        """Nothing runs or waits, and all blocks are free."""
        names = (
            "vllm:num_requests_running",
            "vllm:num_requests_waiting",
            "vllm:kv_cache_usage_perc",
        )
        return not any(self.metrics(*names))

    def canary(self) -> list[int]:
        tokens: list[int] = self.complete(**CANARY)["choices"][0]["token_ids"]
        return tokens

    def assert_sound(self) -> None:
        """What HARDENING asks after every case."""
        wait_for(lambda: self.health() == 200, "health")
        if not self.baseline:
            self.baseline = self.canary()
            assert len(self.baseline) == 8
            self._memory = self.memory()
        assert self.canary() == self.baseline
        wait_for(lambda: self.is_idle, "all blocks to be free")
        for now, before in zip(self.memory(), self._memory, strict=True):
            assert now < before + MEMORY_ROOM, f"{before} KiB have become {now}"

    def memory(self) -> list[int]:
        """KiB of the server's process and of the engine's."""
        assert self.process is not None
        return [resident(pid) for pid in (self.process.pid, self.engine_pid)]


def resident(pid: int) -> int:
    """KiB of memory that a process holds for itself."""
    with open(f"/proc/{pid}/status") as status:
        return int(next(line for line in status if line.startswith("RssAnon")).split()[1])


def error_of(response: httpx.Response, status: int, field: str | None = None) -> str:
    """The message of an error that has the right shape."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code", "request_id"}
    assert error["request_id"] == response.headers["x-request-id"]
    message: str = error["message"]
    for leak in ("Traceback", "/quire/", ".py", "0x7f", "site-packages", " object at 0x"):
        assert leak not in message, message
    if field is not None:
        assert (error["param"] or "").startswith(field), error
        assert field in message, error
    return message
