"""`quire serve`: a server for clients of OpenAI's and Anthropic's APIs."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from quire.cli import options
from quire.config import parse_bytes
from quire.errors import InvalidRequestError, QuireError

_KEY_VARIABLE = "QUIRE_API_KEY"
_KEY_HELP = f"A key clients must send. Repeat for several; also from {_KEY_VARIABLE}, separated by commas."
_CACHE_HELP = "Memory for keys and values: 2GiB, or a fraction of what is free; default 0.25 on a CPU, 0.9 on a GPU."


def serve(
    model: options.Model = options.DEFAULT_MODEL,
    host: Annotated[str, Option(metavar="H", help="Address to listen on; 0.0.0.0 is all.")] = "127.0.0.1",
    port: Annotated[int, Option(metavar="P", help="Port to listen on; 0 takes a free one.")] = 8000,
    served_model_name: Annotated[
        list[str] | None, Option(metavar="NAME", help="What clients call the model. Repeat for several.")
    ] = None,
    api_key: Annotated[list[str] | None, Option(metavar="KEY", help=_KEY_HELP)] = None,
    api_key_file: Annotated[Path | None, Option(metavar="FILE", help="Further keys, one per line.")] = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    quantization: options.Quantization = "auto",
    max_model_len: Annotated[
        int | None, Option(metavar="N", help="Longest sequence, prompt and answer; default: the model's own.")
    ] = None,
    max_num_seqs: Annotated[
        int | None, Option(metavar="N", help="Answers computed at once; default 64 on a CPU, 256 on a GPU.")
    ] = None,
    max_batched_tokens: Annotated[
        int | None, Option(metavar="N", help="Tokens computed in one step; default 512 on a CPU, 8192 on a GPU.")
    ] = None,
    tensor_parallel_size: options.TensorParallelSize = 1,
    kv_cache_dtype: options.KVCacheDtype = "auto",
    speculation: options.Speculation = "off",
    kv_cache_memory: Annotated[str | None, Option(metavar="M", help=_CACHE_HELP)] = None,
    host_cache_memory: Annotated[
        str, Option(metavar="M", help="Host memory below the prefix cache, such as 4GiB; 0: none.")
    ] = "0",
    prefix_caching: Annotated[bool, Option(help="Share the computed blocks of equal prefixes.")] = True,
    policy: Annotated[str, Option(metavar="fcfs|priority", help="Who goes first.")] = "fcfs",
    step_log: Annotated[Path | None, Option(metavar="FILE", help="Write every step to this file.")] = None,
    max_queued_requests: Annotated[
        int, Option(metavar="N", help="Answers that may wait; beyond, clients get 429.")
    ] = 256,
    max_queued_tokens: Annotated[int, Option(metavar="N", help="Prompt tokens that may wait.")] = 1_000_000,
    request_timeout: Annotated[float, Option(metavar="S", help="Seconds a request may take.")] = 600.0,
    queue_timeout: Annotated[float, Option(metavar="S", help="Seconds a request may wait to begin.")] = 120.0,
    drain_timeout: Annotated[float, Option(metavar="S", help="Seconds requests get after SIGTERM.")] = 60.0,
    stall_timeout: Annotated[float, Option(metavar="S", help="Seconds without progress before /ready says no.")] = 30.0,
    hang_timeout: Annotated[
        float, Option(metavar="S", help="Seconds without progress before the engine is restarted.")
    ] = 120.0,
    store: Annotated[
        Path | None,
        Option(metavar="DIR", help="Keep responses in this folder too: they outlive a restart."),
    ] = None,
    stored_responses: Annotated[
        int, Option(metavar="N", help="Responses kept for clients to go on with; 0: none.")
    ] = 1024,
    stored_hours: Annotated[float, Option(metavar="H", help="Hours each of them is kept.")] = 24.0,
    start_timeout: Annotated[
        float, Option(metavar="S", help="Seconds without progress before an engine that starts is given up.")
    ] = 120.0,
    max_body_size: Annotated[str, Option(metavar="M", help="Largest request body.")] = "4MiB",
    cors_origin: Annotated[
        list[str] | None, Option(metavar="URL", help="Let web pages of this origin in. Repeat for several.")
    ] = None,
    allowed_host: Annotated[
        list[str] | None, Option(metavar="NAME", help="Serve only this Host header. Repeat for several.")
    ] = None,
    batches: Annotated[
        Path | None, Option(metavar="DIR", help="Serve /v1/files and /v1/batches, and keep them in this folder.")
    ] = None,
    max_batch_size: Annotated[str, Option(metavar="M", help="Bytes of all files in it.")] = "1GiB",
    tls_cert: Annotated[Path | None, Option(metavar="FILE", help="Certificate (PEM): serve HTTPS.")] = None,
    tls_key: Annotated[Path | None, Option(metavar="FILE", help="The certificate's key (PEM).")] = None,
    otlp_traces_endpoint: Annotated[
        str | None, Option(metavar="URL", help="Send spans of requests there: http://localhost:4318/v1/traces.")
    ] = None,
    log_format: Annotated[str, Option(metavar="human|json", help="How the log is written.")] = "human",
    log_level: Annotated[str, Option(metavar="debug|info|warning|error", help="What is logged.")] = "info",
) -> None:
    """Serve a model over HTTP, for clients of OpenAI's and Anthropic's APIs.

    \b
    quire serve
    quire serve --model Qwen/Qwen3-0.6B --port 8080 --api-key secret
    quire serve --model Qwen/Qwen3-0.6B --device cpu --quantization int4 --kv-cache-dtype int8
    quire serve --model Qwen/Qwen3-32B --tensor-parallel-size 4 --batches ./batches
    curl localhost:8000/v1/chat/completions -H 'content-type: application/json' \\
         -d '{"messages": [{"role": "user", "content": "Hello!"}]}'
    """
    check_installed("the server")
    from quire.server.config import ServerConfig
    from quire.server.run import serve as run_server

    engine = {
        "device": device,
        "tensor_parallel_size": tensor_parallel_size,
        "dtype": dtype,
        "quantization": quantization,
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "max_batched_tokens": max_batched_tokens,
        "kv_cache_dtype": kv_cache_dtype,
        "speculation": speculation,
        "kv_cache_memory": None if kv_cache_memory is None else fraction_or_bytes(kv_cache_memory),
        "host_cache_memory": host_cache_memory,
        "prefix_caching": prefix_caching,
        "policy": policy,
        "step_log": None if step_log is None else str(step_log.absolute()),
    }
    config = ServerConfig(
        model=model,
        engine=engine,
        served_model_names=tuple(served_model_name or ()),
        host=host,
        port=port,
        api_keys=_keys(api_key or [], api_key_file),
        cors_origins=tuple(cors_origin or ()),
        allowed_hosts=tuple(allowed_host or ()),
        tls_certificate=_readable("--tls-cert", tls_cert),
        tls_key=_readable("--tls-key", tls_key),
        max_body_bytes=parse_bytes("--max-body-size", max_body_size, low=1),
        max_queued_requests=max_queued_requests,
        max_queued_tokens=max_queued_tokens,
        request_seconds=request_timeout,
        queue_seconds=queue_timeout,
        drain_seconds=drain_timeout,
        stall_seconds=stall_timeout,
        hang_seconds=hang_timeout,
        store=None if store is None else store.absolute(),
        stored_responses=stored_responses,
        stored_seconds=stored_hours * 3600,
        batches=None if batches is None else batches.absolute(),
        max_batch_bytes=parse_bytes("--max-batch-size", max_batch_size, low=1),
        start_seconds=start_timeout,
        otlp_traces_endpoint=otlp_traces_endpoint,
        log_format=log_format,
        log_level=log_level,
    )
    raise typer.Exit(run_server(config))


def check_installed(who: str) -> None:
    """What the server's code needs beside the engine's."""
    try:
        for name in ("fastapi", "httptools", "msgspec", "prometheus_client", "uvicorn", "zmq"):
            importlib.import_module(name)
    except ImportError as error:
        raise QuireError(f"{who} needs {error.name}: pip install 'quire[server]'") from None


def _keys(given: list[str], file: Path | None) -> tuple[str, ...]:
    variable = os.environ.get(_KEY_VARIABLE, "")
    keys = [*given, *filter(None, (key.strip() for key in variable.split(",")))]
    if file is not None:
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidRequestError("--api-key-file", f"{file} can't be read: {error}") from None
        found = [line.strip() for line in lines if line.strip()]
        if not found:
            raise InvalidRequestError("--api-key-file", f"{file} holds no key")
        keys += found
    return tuple(keys)


def _readable(field: str, file: Path | None) -> Path | None:
    if file is not None and not file.is_file():
        raise InvalidRequestError(field, f"there is no file {file}")
    return file


def fraction_or_bytes(text: str) -> float | str:
    try:
        number = float(text)
    except ValueError:
        return text
    return number if number <= 1 else text
