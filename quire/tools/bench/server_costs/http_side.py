"""What the HTTP side costs per streamed token, and how long tokens are on their way through it.

The engine is a fake one that gives each stream a token per step (`http_side_engine.py`), 50,000
tokens per second in all; the model is only a small tokenizer. Clients are plain sockets in
this process, whose CPU does not count. What is printed, for each number of streams and of HTTP
workers:

- tokens/s: that left the HTTP side while more were offered than it can take,
- µs/token: CPU time of all HTTP processes over the tokens, at that load and at a calm one, where
  nobody lags,
- delay: from the making of a step to a client's having its token, at both loads.

    python -m quire.tools.bench.server_costs.http_side
    python -m quire.tools.bench.server_costs.http_side --api responses --workers 1 --streams 256
    python -m quire.tools.bench.server_costs.http_side --reasoning --workers 1 --streams 256 --rate 0
    python -m quire.tools.bench.server_costs.http_side --workers 1 --streams 256 --profile profile.txt

Engine, HTTP processes and clients share this machine's cores: with fewer cores than processes the
rate says little, and the CPU per token is the figure that counts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import sys
import tempfile
import time
import urllib.request
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import uvloop
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from quire.tools.bench.server_costs.http_side_engine import FIRST_ID, NUM_IDS, VARIABLE, Board
from quire.tools.bench.server_costs.start import ServerProcess, end_with_servers, serving
from quire.tools.bench.spread import percentile_of

_TEXT = Path(__file__).parents[1] / "quality.txt"
_AT_ONCE = 100
"""Streams that are being opened."""
_READ_IDS = re.compile(rb'"token_ids":\[([\d,]+)\]')
_MOST_TOKENS = 60_000
_CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
APIS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {**_CHAT, "max_tokens": _MOST_TOKENS}),
    "completions": ("/v1/completions", {"prompt": "Hi", "max_tokens": _MOST_TOKENS}),
    "responses": (
        "/v1/responses",
        {"input": "Hi", "max_output_tokens": _MOST_TOKENS, "store": False},
    ),
    "messages": ("/v1/messages", {**_CHAT, "max_tokens": _MOST_TOKENS, "model": "bench"}),
}
_RUN = """
import json, os, sys
from quire.server.config import ServerConfig
from quire.server.run import serve
fields, profile = json.loads(sys.argv[1]), sys.argv[2]
if not profile:
    sys.exit(serve(ServerConfig(**fields)))
import cProfile, pstats
one = cProfile.Profile()
one.runcall(serve, ServerConfig(**fields))
with open(profile, "w") as out:
    pstats.Stats(one, stream=out).sort_stats("tottime").print_stats(60)
"""


@dataclass
class Figures:
    """Of one load."""

    rate: float
    micros: float
    delays: list[float] = field(repr=False)

    def __str__(self) -> str:
        if not self.delays:
            return f"{self.rate:9.0f} {self.micros:9.1f} {'-':>9} {'-':>9}"
        middle, late = (1000 * percentile_of(sorted(self.delays), one) for one in (50, 99))
        return f"{self.rate:9.0f} {self.micros:9.1f} {middle:9.1f} {late:9.1f}"


class Stream(asyncio.Protocol):
    """A client that reads and drops; one that `looks` notes how long its tokens were on their way."""

    def __init__(self, request: bytes, board: Board, looks: bool, began: asyncio.Semaphore) -> None:
        self._request = request
        self._board = board
        self._looks = looks
        self._began: asyncio.Semaphore | None = began
        self.delays: list[float] = []
        self.lost: str | None = None
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if self._began is not None:
            if not data.startswith(b"HTTP/1.1 200"):
                self.lost = data.decode(errors="replace")
            self._began.release()
            self._began = None
        if self._looks:
            now = time.monotonic()
            for found in _READ_IDS.findall(data):
                self.delays.extend(now - self._board.made(int(one)) for one in found.split(b","))

    def connection_lost(self, error: Exception | None) -> None:
        self.lost = self.lost or "the connection was closed"
        if self._began is not None:
            self._began.release()


def write_tokenizer(folder: Path, reasons: bool = False) -> None:
    """A model folder as far as the HTTP side reads it: words of a text, and a chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=FIRST_ID + NUM_IDS, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([_TEXT.read_text(encoding="utf-8")], trainer)
    assert tokenizer.get_vocab_size() == FIRST_ID + NUM_IDS
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    if reasons:  # and never comes to an end of it
        template += "{# </think> #}<think>"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").touch()


def server(workers: int, folder: Path, profile: str) -> AbstractContextManager[ServerProcess]:
    """One in front of the fake engine."""
    fields: dict[str, Any] = {
        "model": str(folder),
        "port": 0,
        "engine_module": "quire.tools.bench.server_costs.http_side_engine",
        "served_model_names": ["bench"],
        "max_connections": 8192,
        "max_queued_requests": 8192,
        "request_seconds": 3600.0,
        "log_level": "info",
        "http_workers": workers,
    }
    command = [sys.executable, "-c", _RUN, json.dumps(fields), profile]
    return serving(command=command, **{VARIABLE: str(folder / "board")})


def http_processes(server: int) -> list[int]:
    """The server and its HTTP workers."""
    found = [server]
    children = Path(f"/proc/{server}/task/{server}/children").read_text().split()
    return found + [
        int(one)
        for one in children
        if b"http_side_engine" not in Path(f"/proc/{one}/cmdline").read_bytes()
    ]


def cpu_seconds(processes: list[int]) -> float:
    """As the scheduler counts it, in nanoseconds: of the clock's ticks, a second of several
    processes has few.
    """
    files = (file for one in processes for file in Path(f"/proc/{one}/task").glob("*/schedstat"))
    return sum(int(file.read_text().split()[0]) for file in files) / 1e9


def tokens_counted(port: int) -> float:
    """By the server: of all its workers."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as response:
        text: str = response.read().decode()
    return sum(
        float(line.rpartition(" ")[2])
        for line in text.splitlines()
        if line.startswith("vllm:generation_tokens_t")
    )


async def measure(
    streams: list[Stream],
    processes: list[int],
    port: int,
    board: Board,
    rate: float,
    seconds: float,
) -> Figures:
    loop = asyncio.get_running_loop()
    board.rate = rate
    await asyncio.sleep(0.5)
    tokens = await loop.run_in_executor(None, tokens_counted, port)
    cpu = cpu_seconds(processes)
    began = time.monotonic()
    for one in streams:
        one.delays.clear()
    await asyncio.sleep(seconds)
    cpu = cpu_seconds(processes) - cpu
    elapsed = time.monotonic() - began
    delays = [delay for one in streams for delay in one.delays]
    tokens = await loop.run_in_executor(None, tokens_counted, port) - tokens
    lost = [one.lost for one in streams if one.lost is not None]
    if lost:
        raise SystemExit(f"{len(lost)} of {len(streams)} streams ended early: {lost[0]}")
    return Figures(tokens / elapsed, 1e6 * cpu / max(tokens, 1), delays)


async def run(
    port: int, server: int, board: Board, options: argparse.Namespace, num_streams: int
) -> list[Figures]:
    loop = asyncio.get_running_loop()
    path, body = APIS[options.api]
    streams: list[Stream] = []
    began = asyncio.Semaphore(0)
    looks_each = max(1, num_streams // options.looking)
    for number in range(num_streams):
        looks = number % looks_each == 0 and options.api in ("chat", "completions")
        sent = json.dumps(
            {**body, "stream": True, **({"return_token_ids": True} if looks else {})}
        ).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        head += f"content-length: {len(sent)}\r\n\r\n"
        request = head.encode() + sent
        _, stream = await loop.create_connection(
            partial(Stream, request, board, looks, began), "127.0.0.1", port
        )
        streams.append(stream)
        if number >= _AT_ONCE:
            await asyncio.wait_for(began.acquire(), 60)
    for _ in range(min(num_streams, _AT_ONCE)):
        await asyncio.wait_for(began.acquire(), 60)
    processes = http_processes(server)
    try:
        return [
            await measure(streams, processes, port, board, rate, options.seconds)
            for rate in (options.calm_rate, options.rate)
            if rate
        ]
    finally:
        board.rate = 0
        for one in streams:
            if one.transport is not None:
                one.transport.abort()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--api",
        default="chat",
        choices=list(APIS),
        help="delays are shown for chat and completions",
    )
    parser.add_argument("--streams", type=int, nargs="+", default=[256, 2000])
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument(
        "--rate", type=float, default=50_000.0, help="tokens per second the engine offers"
    )
    parser.add_argument(
        "--calm-rate", type=float, default=4000.0, help="the same for the calm load; 0: none"
    )
    parser.add_argument("--seconds", type=float, default=1.5, help="for each load")
    parser.add_argument(
        "--looking", type=int, default=8, help="streams whose tokens' delay is looked at"
    )
    parser.add_argument(
        "--reasoning",
        action="store_true",
        help="tokens are of a model's reasoning, not of its answer",
    )
    parser.add_argument(
        "--profile", default="", help="write what one process spends its time on there (workers: 1)"
    )
    options = parser.parse_args()
    end_with_servers()
    print(f"{options.api}, {os.cpu_count()} cores; delays in ms")
    print(
        f"{'':16}{'calm: tokens/s':>15} {'µs/token':>9} {'p50':>9} {'p99':>9} {'full: tokens/s':>17} {'µs/token':>9}",
        end="",
    )
    print(f" {'p50':>9} {'p99':>9}")
    for num_streams in options.streams:
        for workers in options.workers:
            with tempfile.TemporaryDirectory() as name:
                board = Board(Path(name) / "board")
                write_tokenizer(Path(name), options.reasoning)
                with server(workers, Path(name), options.profile) as started:
                    figures = uvloop.run(
                        run(started.port, started.pid, board, options, num_streams)
                    )
            shown = "        ".join(map(str, figures))
            print(f"{num_streams:5} streams x{workers}     {shown}", flush=True)


if __name__ == "__main__":
    main()
