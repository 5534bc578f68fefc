"""Whether a heavy request holds up others: the slowest answer of `/health` while the server works
on it.

    python -m quire.tools.bench.server_costs.stalls  # every body, beside a server on SmolLM2
    python -m quire.tools.bench.server_costs.stalls "a megabyte of text"  # some of them

A second process asks `/health` on one connection, as often as it gets answers; the first sends one
heavy body after the other. What a body asks for may take its time, only nobody else may wait for
it: 50 ms at most on quiet cores. The last lines are an overload: how long accepted requests take
when ten times more come than fit, and refusals.
"""

from __future__ import annotations

import argparse
import http.client
import json
import multiprocessing
import os
import socket
import statistics
import sys
import tempfile
import threading
import time
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

from quire.tools.bench.server_costs.served import ENGINE, server
from quire.tools.bench.server_costs.start import end_with_servers

GOAL = 0.050
PATIENCE = 12.0
"""Seconds for one body; some ask for work that takes longer, which is cut then."""


def chat(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 1}


def bodies() -> dict[str, tuple[str, Any]]:
    """By what they try."""
    words = "word " * 750_000
    part = {"type": "text", "text": "x"}
    completion = {"prompt": "x", "max_tokens": 2}
    message = {"role": "user", "content": "x"}
    return {
        "four megabytes of text": ("/v1/completions", {"prompt": words}),
        "four megabytes without a space": ("/v1/completions", {"prompt": "x" * 4_000_000}),
        "four megabytes of chat": ("/v1/chat/completions", chat(words)),
        "a megabyte, truncated": (
            "/v1/completions",
            {**completion, "prompt": words[: 10**6], "truncate_prompt_tokens": 9},
        ),
        "a megabyte, tokenized": (
            "/tokenize",
            {"prompt": words[: 10**6], "return_token_strs": True},
        ),
        "escapes": ("/v1/completions", {"prompt": '[{"a\\": ' * 200_000}),
        "190,000 ids": ("/v1/completions", {"prompt": list(range(1000)) * 190}),
        "190,000 ids, truncated": (
            "/v1/completions",
            {"prompt": [1] * 190_000, "truncate_prompt_tokens": 5},
        ),
        "190,000 ids as text": ("/detokenize", {"tokens": [100] * 190_000}),
        "190,000 allowed ids": (
            "/v1/completions",
            {**completion, "allowed_token_ids": list(range(190_000))},
        ),
        "45,000 stop strings": ("/v1/completions", {**completion, "stop": ["ab"] * 45_000}),
        "45,000 biases": (
            "/v1/completions",
            {**completion, "logit_bias": {str(i): 1 for i in range(45_000)}},
        ),
        "45,000 unknown fields": (
            "/v1/completions",
            {**completion, **{f"f{i}": 1 for i in range(45_000)}},
        ),
        "JSON 10,000 levels deep": (
            "/v1/completions",
            b'{"prompt": ' + b"[" * 10_000 + b"]" * 10_000 + b"}",
        ),
        "8,192 messages": ("/v1/chat/completions", {"messages": [message] * 8192}),
        "9,000 parts of a message": ("/v1/chat/completions", chat([part] * 9000)),
        "9,000 items for responses": ("/v1/responses", {"input": [message] * 9000}),
        "8,000 messages for Anthropic's": (
            "/v1/messages",
            {"model": "smollm2", "max_tokens": 1, "messages": [message] * 8000},
        ),
        "2,048 texts to embed": ("/v1/embeddings", {"input": ["x " * 400] * 2048}),
        "2,048 vectors as numbers": ("/v1/embeddings", {"input": ["x"] * 2048}),
        "2,048 vectors in base64": (
            "/v1/embeddings",
            {"input": ["x"] * 2048, "encoding_format": "base64"},
        ),
        "a megabyte of single tokens": (
            "/tokenize",
            {"prompt": "0 " * 500_000, "return_token_strs": True},
        ),
        "128 answers with 20 logprobs": (
            "/v1/completions",
            {**completion, "n": 128, "max_tokens": 40, "ignore_eos": True, "logprobs": 20},
        ),
        "900 prompt logprobs, echoed by 32": (
            "/v1/completions",
            {"prompt": "so " * 900, "max_tokens": 1, "logprobs": 20, "echo": True, "n": 32},
        ),
        "256 prompts": ("/v1/completions", {"prompt": ["so " * 900] * 256, "max_tokens": 1}),
        "128 answers": ("/v1/completions", {**completion, "n": 128}),
        "an enum of 40,000": (
            "/v1/completions",
            {**completion, "guided_json": {"enum": [f"v{i}" for i in range(40_000)]}},
        ),
        "a regex of 3 MB": ("/v1/completions", {**completion, "guided_regex": "(ab|cd)" * 450_000}),
        "45,000 template arguments": (
            "/v1/chat/completions",
            {**chat("x"), "chat_template_kwargs": {"a": ["b"] * 45_000}},
        ),
        "900 prompt logprobs": (
            "/v1/completions",
            {"prompt": "so " * 900, "max_tokens": 1, "prompt_logprobs": 20},
        ),
    }


def probe(port: int, stop: Event, times: Queue[list[float]]) -> None:
    """Another client, which wants nothing but a sign of life."""
    connection = socket.create_connection(("127.0.0.1", port))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    waited = []
    while not stop.is_set():
        began = time.perf_counter()
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        answer = b""
        while not answer.endswith(b"}"):
            answer += connection.recv(4096)
        waited.append(time.perf_counter() - began)
        time.sleep(0.001)
    times.put(waited)


def post(port: int, path: str, body: bytes) -> str:
    """The status, or what happened instead."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    try:
        connection.request("POST", path, body, {"content-type": "application/json"})
        response = connection.getresponse()
        response.read()
        return str(response.status)
    except TimeoutError:
        return "cut"
    except OSError as error:
        return type(error).__name__
    finally:
        connection.close()


def measure(port: int, path: str, body: Any) -> tuple[str, float, float, float]:
    """Status, its seconds, and the longest and the median wait of the other client."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    stop = multiprocessing.Event()
    times: Queue[list[float]] = multiprocessing.Queue()
    other = multiprocessing.Process(target=probe, args=(port, stop, times))
    other.start()
    time.sleep(0.25)
    began = time.perf_counter()
    status = post(port, path, data) if path else "-"
    seconds = time.perf_counter() - began
    time.sleep(0.1 if path else 1.0)
    stop.set()
    waited = times.get()
    other.join()
    return status, seconds, max(waited), statistics.median(waited)


def overload(port: int, clients: int, seconds: float) -> str:
    """Clients that ask again as soon as they have an answer; who is refused pauses a little."""
    body = json.dumps(
        {"prompt": "Once upon a time", "max_tokens": 16, "ignore_eos": True, "temperature": 0}
    )
    accepted: list[float] = []
    refused: list[float] = []

    def ask() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        while time.monotonic() < until:
            began = time.monotonic()
            connection.request(
                "POST", "/v1/completions", body, {"content-type": "application/json"}
            )
            response = connection.getresponse()
            response.read()
            (accepted if response.status == 200 else refused).append(time.monotonic() - began)
            if response.status != 200:
                time.sleep(0.2)

    until = time.monotonic() + seconds
    threads = [threading.Thread(target=ask) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = f"{clients:3} clients: {len(accepted)} answers, median {statistics.median(accepted) * 1e3:.0f} ms, "
    found += f"longest {max(accepted) * 1e3:.0f} ms"
    if refused:
        found += f"; {len(refused)} refused, median {statistics.median(refused) * 1e3:.0f} ms"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="default: all")
    parser.add_argument("--model", default="smollm2")
    options = parser.parse_args()
    known = bodies()
    unknown = [name for name in options.names if name not in known]
    if unknown:
        parser.error(f"there is no {unknown[0]!r}; there are: {', '.join(known)}")
    end_with_servers()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as with `served`: HTTP needs a core, too
    limits = {
        "max_num_seqs": 4,
        "max_model_len": 1024,
        "kv_cache_memory": "128MiB",
        "max_queued_requests": 4,
    }
    model = {"model": options.model, "served_model_name": "smollm2"}
    worst = 0.0
    with tempfile.TemporaryDirectory() as folder:
        with server("bfloat16", Path(folder) / "steps.jsonl", {**ENGINE, **model}) as heavy:
            print(f"{'body':32} {'status':>8} {'took, ms':>9}   others waited, ms: longest  median")
            for name, (path, body) in {"nothing": ("", None), **known}.items():
                if name in (options.names or known) or not path:
                    status, seconds, longest, median = measure(heavy.port, path, body)
                    worst = max(worst, longest)
                    took = f"{seconds * 1e3:9.0f}" if path else " " * 9
                    print(
                        f"{name:32} {status:>8} {took} {longest * 1e3:28.1f} {median * 1e3:7.2f}",
                        flush=True,
                    )
        print(
            f"others waited {worst * 1e3:.1f} ms at most: {worst / GOAL:.0%} of the {GOAL * 1e3:.0f} ms they may"
        )
        if not options.names:
            with server("bfloat16", Path(folder) / "more.jsonl", {**limits, **model}) as full:
                print("4 requests run and 4 wait; more are refused:")
                for clients in (4, 8, 80):
                    print(overload(full.port, clients, 6.0), flush=True)
    sys.exit(worst > GOAL)


if __name__ == "__main__":
    main()
