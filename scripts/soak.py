"""Mixed requests for a long time, three in ten of them cut by their clients: does anything grow?

Starts a server, loads it in rounds, and after each round waits until it is idle: then all blocks
must be free, and a fixed request must get its known tokens. One request in ten is HTTP as no client
should write it, some answers are as large as they come, beside them files are uploaded (or cut while
they are), answered as batches (or cancelled) and deleted, and now and then both processes are
paused for a moment. Memory and descriptors of both, and what lies in the batches' folder, are noted
when the server has rested for a moment; in the second half of the run none of them may have a
slope. Before that logs of fixed size fill: of the last 4,096 steps, and of the last 2,048 requests;
where that takes longer than half of the time, the run is longer. Exits with 1 if anything is wrong.

    make soak                       10 minutes
    SOAK_SECONDS=120 make soak
    python scripts/soak.py --model path/to/model --seconds 3600
"""

from __future__ import annotations

import argparse
import asyncio
import bisect
import collections
import contextlib
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from quire.tools.bench.http_client import HttpClient, HttpError

ROOT = Path(__file__).parents[1]
CUTS = 0.3
ATTACKS = 0.1
ROUND_SECONDS = 62.0
"""Idle processes give back what they don't need once a minute at most: after shorter rounds some
would be seen before that and some after it.
"""
PAUSE_SECONDS = 25.0
"""The service is stopped for a moment once in so much time."""
WARM_UP = 1 / 2
"""Of the time asked for: caches and logs of fixed size fill first."""
LOGS = {"steps in the engine's log": 4096, "answers in the HTTP process's records": 2048}
"""What fills, and how many it holds."""
MOST_TIMES = 4
"""The time asked for, even if nothing is full by then."""
JUDGED_ROUNDS = 5
"""At least, after all that: a slow machine soaks longer."""
STORED = 64
"""Responses that the server keeps, so that the store is full early, too, and old ones make room."""
IDLE_SECONDS = 60
REST_SECONDS = 4.0
"""Without requests, after which both processes have given back what they could: they look once a
second, and wait for a silence.
"""
CANARY = {
    "prompt": "The capital of France is",
    "max_tokens": 8,
    "temperature": 0,
    "return_token_ids": True,
}
BATCH_FOLDER_SIZE = "64KiB"
"""So small that records of batches that are over must make room early."""
BATCH_SECONDS = 120
LIMITS = {"memory": (0.015, 6 * 2**20), "descriptors": (0.0, 2.0), "folder": (0.1, 16 * 2**10)}
"""What may be gained in the second half: a share of what there is, or this much."""
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "find", "parameters": SCHEMA}}
WORDS = (
    "a",
    "river",
    "runs",
    "past",
    "the",
    "old",
    "town",
    "and",
    "nobody",
    "knows",
    "how",
    "long",
    "it",
    "will",
    "hold",
)


def make_request(source: random.Random) -> tuple[str, dict[str, Any], int]:
    """A path, a body, and the status it should get."""
    text = " ".join(source.choices(WORDS, k=source.choice((3, 20, 120))))
    sampling = {
        "temperature": source.choice((0, 0.8)),
        "seed": source.randrange(100),
        "max_tokens": 24,
    }
    chat = {"messages": [{"role": "user", "content": text}], **sampling}
    form = {
        "type": "json_schema",
        "json_schema": {"name": "person", "schema": SCHEMA, "strict": True},
    }
    requests: tuple[tuple[str, dict[str, Any], int], ...] = (
        ("/v1/chat/completions", {**chat, "stream": True}, 200),
        ("/v1/chat/completions", {**chat, "n": 3, "logprobs": True, "top_logprobs": 3}, 200),
        ("/v1/chat/completions", {**chat, "stream": True, "response_format": form}, 200),
        (
            "/v1/chat/completions",
            {**chat, "stream": True, "tools": [TOOL], "tool_choice": "required"},
            200,
        ),
        (
            "/v1/completions",
            {"prompt": text, **sampling, "stream": True, "stop": ["e", "the"]},
            200,
        ),
        ("/v1/completions", {"prompt": [text, text[:9], "x"], **sampling, "ignore_eos": True}, 200),
        ("/v1/responses", {"input": text, "max_output_tokens": 16, "stream": True}, 200),
        (
            "/v1/messages",
            {"messages": chat["messages"], "max_tokens": 16, "model": "smollm2", "stream": True},
            200,
        ),
        ("/v1/embeddings", {"input": [text, "y"]}, 200),
        ("/v1/embeddings", {"input": ["y"] * 200}, 200),
        (
            "/v1/completions",
            {"prompt": text, "max_tokens": 1, "n": 4, "echo": True, "logprobs": 20},
            200,
        ),
        ("/tokenize", {"prompt": text * 100, "return_token_strs": True}, 200),
        ("/tokenize", {"prompt": text}, 200),
        ("/v1/completions", {"prompt": text, "temperature": -1}, 400),
        ("/v1/completions", {"prompt": text, "guided_regex": f"({source.randrange(1000)}"}, 400),
        ("/v1/chat/completions", {"messages": []}, 400),
    )
    return source.choice(requests)


def make_attack(source: random.Random) -> tuple[bytes, bool, int]:
    """The bytes of a request, whether the sender closes its half then, and the status it should
    get.
    """
    body = b'{"prompt": "x", "max_tokens": 4}'
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
    chunked = head + b"transfer-encoding: chunked\r\n\r\n%x\r\n%s\r\n" % (len(body), body)
    plain = head + b"content-length: %d\r\n\r\n" % len(body) + body
    trailer = b"x-%d: y\r\n" % source.randrange(10**6)
    return source.choice(
        (
            (plain, True, 200),
            (plain + b"GET /health HTTP/1.1\r\n", False, 200),
            (chunked + b"0\r\n" + trailer + b"\r\n", False, 200),
            (chunked + b"0\r\n" + trailer * 20_000, False, 431),
            (chunked + b"1;" + b"e" * 1_000_000, False, 431),
            (chunked + b"1;" + b"e" * 100_000, False, 431),
            (chunked + b"ZZ\r\n", False, 400),
            (head + b"content-length: 5000000\r\n\r\n" + b"x" * 5_000_000, False, 413),
            (head + b"x: " + b"y" * 50_000 + b"\r\n\r\n", False, 431),
        )
    )


@dataclass
class Soak:
    """One run."""

    client: HttpClient
    pids: dict[str, int]
    folder: Path
    """Of files and batches."""
    port: int = 0
    source: random.Random = field(default_factory=lambda: random.Random(0))
    counts: collections.Counter[str] = field(default_factory=collections.Counter)
    faults: list[str] = field(default_factory=list)
    samples: dict[str, list[float]] = field(default_factory=lambda: collections.defaultdict(list))
    times: list[float] = field(default_factory=list)
    filled: dict[str, float] = field(default_factory=dict)
    """When logs were full."""

    async def run(self, seconds: float, concurrency: int) -> None:
        await self.fill_cache()
        canary = await self.canary()
        start = time.monotonic()
        length = min(ROUND_SECONDS, seconds / (2 * JUDGED_ROUNDS))
        number = 0
        while not self.is_long_enough(seconds):
            end = time.monotonic() + length
            number += 1
            await asyncio.gather(
                self.pause(end), self.batches(end), *(self.work(end) for _ in range(concurrency))
            )
            self.client.close()  # its connections are no leak of the server's
            if not await self.is_idle():
                self.faults.append(
                    f"round {number}: after {IDLE_SECONDS} s without requests something still ran"
                )
            if await self.canary() != canary:
                self.faults.append(f"round {number}: the canary's tokens changed")
            await asyncio.sleep(REST_SECONDS)
            self.times.append(time.monotonic() - start)
            await self.look_at_logs()
            self.sample()
            shown = ", ".join(
                f"{name} {describe(name, values[-1])}" for name, values in self.samples.items()
            )
            print(f"{self.times[-1]:6.0f} s: {self.counts.total()} requests, {shown}", flush=True)
            if self.faults:
                return

    def first_judged(self) -> int:
        """The number of the first round of the second half in which what fills was full already."""
        if not self.times:
            return 0
        return bisect.bisect_left(
            self.times, max(self.times[-1] * WARM_UP, *self.filled.values(), 0.0)
        )

    def is_long_enough(self, seconds: float) -> bool:
        if not self.times or self.times[-1] < seconds:
            return False
        is_full = len(self.filled) == len(LOGS)
        num_judged = len(self.times) - self.first_judged()
        return (is_full and num_judged >= JUDGED_ROUNDS) or self.times[-1] >= MOST_TIMES * seconds

    async def work(self, end: float) -> None:
        while time.monotonic() < end:
            if self.source.random() < ATTACKS:
                await self.attack()
                continue
            path, body, status = make_request(self.source)
            # Some requests are over before they are cut: their place is taken by others.
            wants_cut = (
                self.counts["cut"] <= CUTS * self.counts.total() and self.source.random() < 0.7
            )
            cut = self.source.uniform(0, 1.5) if wants_cut else None
            try:
                async with asyncio.timeout(cut):
                    await self.send(path, body)
                found = 200
            except TimeoutError:
                self.counts["cut"] += 1
                continue
            except HttpError as error:
                if error.status is None:
                    self.faults.append(f"{path} {body}: {error}")
                    return
                found = error.status
            self.counts[str(found)] += 1
            if found != status:
                self.faults.append(f"{path} {body}: {found} instead of {status}")
                return

    async def attack(self) -> None:
        data, closes, status = make_attack(self.source)
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            async with asyncio.timeout(IDLE_SECONDS):
                writer.write(data)
                if closes:
                    writer.write_eof()
                answer = await reader.read()
        except OSError as error:
            answer = repr(error).encode()
        finally:
            writer.close()
        found = answer.replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"").split(b" ", 2)[1:2]
        self.counts["attack"] += 1
        if found != [b"%d" % status]:
            self.faults.append(f"{data[:200]!r}: {answer[:200]!r} instead of {status}")

    async def batches(self, end: float) -> None:
        """One batch after the other, from its upload to the end of all of its files."""
        while time.monotonic() < end:
            if self.source.random() < CUTS:
                await self.cut_upload()
                continue
            try:
                async with asyncio.timeout(BATCH_SECONDS):
                    await self.batch()
            except (httpx.HTTPError, TimeoutError) as error:
                self.faults.append(f"a batch: {error!r}")
                return

    async def batch(self) -> None:
        lines = [
            json.dumps(
                {
                    "custom_id": str(number),
                    "method": "POST",
                    "url": "/v1/completions",
                    "body": {"prompt": " ".join(self.source.choices(WORDS, k=9)), "max_tokens": 6},
                }
            )
            for number in range(4)
        ]
        content = "\n".join([*lines, "no request"]).encode()
        url = f"http://127.0.0.1:{self.port}/v1"
        async with httpx.AsyncClient(base_url=url, timeout=BATCH_SECONDS) as http:

            async def ask(method: str, path: str, **fields: Any) -> Any:
                return (await http.request(method, path, **fields)).raise_for_status().json()

            upload = {"files": {"file": ("a.jsonl", content)}, "data": {"purpose": "batch"}}
            files = [(await ask("POST", "/files", **upload))["id"]]
            body = {
                "input_file_id": files[0],
                "endpoint": "/v1/completions",
                "completion_window": "24h",
            }
            batch = await ask("POST", "/batches", json=body)
            if self.source.random() < CUTS:
                await ask("POST", f"/batches/{batch['id']}/cancel")
            while batch["status"] not in ("completed", "cancelled"):
                if batch["status"] in ("failed", "expired"):
                    self.faults.append(f"a batch ended so: {batch}")
                    return
                await asyncio.sleep(0.2)
                batch = await ask("GET", f"/batches/{batch['id']}")
            counts = batch["request_counts"]
            if batch["status"] == "completed" and (counts["completed"], counts["failed"]) != (4, 1):
                self.faults.append(f"a batch: {counts} instead of 4 answers and 1 error")
            files += [batch[name] for name in ("output_file_id", "error_file_id") if batch[name]]
            for file_id in files:
                (await http.get(f"/files/{file_id}/content")).raise_for_status()
                await ask("DELETE", f"/files/{file_id}")
        self.counts[f"batch {batch['status']}"] += 1

    async def cut_upload(self) -> None:
        """The client leaves in the midst of its file."""
        head = b"POST /v1/files HTTP/1.1\r\nhost: x\r\ncontent-length: 9000\r\n"
        head += b"content-type: multipart/form-data; boundary=b\r\n\r\n"
        part = b'--b\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n'
        _, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(head + part + b"x" * self.source.randrange(8000))
        await writer.drain()
        await asyncio.sleep(0.1)
        writer.close()
        self.counts["upload cut"] += 1

    async def pause(self, end: float) -> None:
        """Stops the whole service now and then, as a container is paused."""
        while (left := end - time.monotonic()) > 0:
            await asyncio.sleep(self.source.random() * min(PAUSE_SECONDS, left))
            for which in (signal.SIGSTOP, signal.SIGCONT):
                for pid in self.pids.values():
                    os.kill(pid, which)
                await asyncio.sleep(0.3)
            await asyncio.sleep(max(0.0, min(PAUSE_SECONDS / 2, end - time.monotonic())))

    async def send(self, path: str, body: dict[str, Any]) -> None:
        if not body.get("stream"):
            await self.client.post_json(path, body)
            return
        async with contextlib.aclosing(self.client.events(path, body)) as events:
            async for data in events:
                if data.startswith(b'{"error"'):
                    raise HttpError(data.decode())

    async def canary(self) -> list[int]:
        tokens: list[int] = (await self.client.post_json("/v1/completions", CANARY))["choices"][0][
            "token_ids"
        ]
        return tokens

    async def fill_cache(self) -> None:
        """Uses every block once, and the memory for results of the largest steps, whose rows all have
        logprobs: memory counts only when it is first touched, and would look like a leak.
        """
        for _ in range(12):
            prompt = [self.source.randrange(100) for _ in range(900)]
            await self.client.post_json("/v1/completions", {"prompt": prompt, "max_tokens": 1})
        body = {"prompt": prompt, "max_tokens": 1, "echo": True, "logprobs": 20}
        await self.client.post_json("/v1/completions", body)

    async def is_idle(self) -> bool:
        names = (
            "vllm:num_requests_running",
            "vllm:num_requests_waiting",
            "vllm:kv_cache_usage_perc",
        )
        end = time.monotonic() + IDLE_SECONDS
        while time.monotonic() < end:
            page = (await self.client.get("/metrics")).decode()
            if all(re.search(rf"^{name}\{{.*\}} 0\.0$", page, re.MULTILINE) for name in names):
                return True
            await asyncio.sleep(0.1)
        return False

    async def look_at_logs(self) -> None:
        page = (await self.client.get("/metrics")).decode()
        steps = sum(
            map(
                float,
                re.findall(r"^vllm:iteration_tokens_total_count\{.*\} (\S+)$", page, re.MULTILINE),
            )
        )
        for (name, most), found in zip(LOGS.items(), (steps, self.counts["200"]), strict=True):
            if found >= most:
                self.filled.setdefault(name, self.times[-1])

    def sample(self) -> None:
        for name, pid in self.pids.items():
            folder = Path("/proc") / str(pid)
            pages = int((folder / "statm").read_text().split()[1])
            self.samples[f"{name} memory"].append(pages * os.sysconf("SC_PAGE_SIZE"))
            self.samples[f"{name} descriptors"].append(len(list((folder / "fd").iterdir())))
        stored = [path.stat().st_size for path in self.folder.rglob("*") if path.is_file()]
        self.samples["batches folder"].append(sum(stored))

    def judge(self) -> bool:
        """Whether all is well; says what is not."""
        skipped = self.first_judged()
        for name, most in LOGS.items():
            when = (
                f"full after {self.filled[name]:.0f} s"
                if name in self.filled
                else "not full at the end"
            )
            print(f"{name}: {most:,}, {when}")
        for name, values in self.samples.items():
            if len(values) - skipped < 4:
                continue
            slope = slope_of(self.times[skipped:], values[skipped:])
            gain = slope * (self.times[-1] - self.times[skipped])
            share, smallest = LIMITS[name.split()[1]]
            allowed = max(share * values[skipped], smallest)
            print(
                f"{name}: {describe(name, values[skipped])} after {self.times[skipped]:.0f} s, "
                f"gained {describe(name, gain)} since"
            )
            if gain > allowed:
                self.faults.append(
                    f"{name}: gained {describe(name, gain)}, at most {describe(name, allowed)} are allowed"
                )
        print(", ".join(f"{key}: {count}" for key, count in sorted(self.counts.items())))
        for fault in self.faults:
            print(f"WRONG: {fault}")
        return not self.faults


def slope_of(times: list[float], values: list[float]) -> float:
    """The median of the slopes between all pairs: a few odd samples don't matter."""
    pairs = combinations(zip(times, values, strict=True), 2)
    return statistics.median(
        (later[1] - earlier[1]) / (later[0] - earlier[0]) for earlier, later in pairs
    )


def describe(name: str, value: float) -> str:
    if name.endswith("folder"):
        return f"{value / 2**10:.1f} KiB"
    return f"{value / 2**20:.1f} MiB" if name.endswith("memory") else f"{value:.0f}"


@contextlib.contextmanager
def server(model: str, folder: str) -> Iterator[tuple[str, dict[str, int]]]:
    """Its address and the ids of its two processes. `folder` is for files and batches."""
    options = [
        "--max-num-seqs=16",
        "--kv-cache-memory=128MiB",
        "--max-model-len=1024",
        "--served-model-name=smollm2",
    ]
    options += [f"--stored-responses={STORED}"]
    options += [f"--batches={folder}", f"--max-batch-size={BATCH_FOLDER_SIZE}"]
    command = [
        sys.executable,
        "-m",
        "quire.cli.main",
        "serve",
        "--port=0",
        f"--model={model}",
        *options,
    ]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, cwd=ROOT, stderr=log)
        try:
            found = None
            while found is None:
                time.sleep(0.2)
                log.seek(0)
                text = log.read()
                found = re.search(r"http://\S+:\d+", text)
                if process.poll() is not None:
                    raise SystemExit(f"the server did not start:\n{text}")
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            engine = next(
                int(pid)
                for pid in children
                if b"engine" in Path(f"/proc/{pid}/cmdline").read_bytes()
            )
            yield found[0], {"http": process.pid, "engine": engine}
            if process.poll() is not None:
                raise SystemExit(f"the server ended with {process.returncode}")
        finally:
            process.terminate()
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seconds", type=float, default=float(os.environ.get("SOAK_SECONDS", "600"))
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--concurrency", type=int, default=12)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the server must not be left behind
    with (
        tempfile.TemporaryDirectory() as folder,
        server(options.model, folder) as (url, pids),
    ):
        soak = Soak(HttpClient(url), pids, Path(folder), urlsplit(url).port or 0)
        asyncio.run(soak.run(options.seconds, options.concurrency))
        is_well = soak.judge()
    sys.exit(0 if is_well else 1)


if __name__ == "__main__":
    main()
