"""`quire serve`: a server for clients of OpenAI's and Anthropic's APIs."""

from __future__ import annotations

import importlib
import os
from pathlib import Path

import typer

from quire.cli import options
from quire.cli import serve_options as server_options
from quire.config import parse_bytes
from quire.errors import InvalidRequestError, QuireError


def serve(
    model: options.Model = options.DEFAULT_MODEL,
    host: server_options.Host = "127.0.0.1",
    port: server_options.Port = 8000,
    served_model_name: server_options.ServedModelName = None,
    api_key: server_options.ApiKey = None,
    api_key_file: server_options.ApiKeyFile = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    max_model_len: server_options.MaxModelLen = None,
    max_num_seqs: server_options.MaxNumSeqs = None,
    max_batched_tokens: server_options.MaxBatchedTokens = None,
    kv_cache_memory: server_options.KvCacheMemory = None,
    host_cache_memory: server_options.HostCacheMemory = "0",
    prefix_caching: server_options.PrefixCaching = True,
    policy: server_options.Policy = "fcfs",
    step_log: server_options.StepLog = None,
    max_queued_requests: server_options.MaxQueuedRequests = 256,
    max_queued_tokens: server_options.MaxQueuedTokens = 1_000_000,
    request_timeout: server_options.RequestTimeout = 600.0,
    queue_timeout: server_options.QueueTimeout = 120.0,
    drain_timeout: server_options.DrainTimeout = 60.0,
    stall_timeout: server_options.StallTimeout = 30.0,
    hang_timeout: server_options.HangTimeout = 120.0,
    max_body_size: server_options.MaxBodySize = "4MiB",
    cors_origin: server_options.CorsOrigin = None,
    allowed_host: server_options.AllowedHost = None,
    tls_cert: server_options.TlsCert = None,
    tls_key: server_options.TlsKey = None,
    otlp_traces_endpoint: server_options.OtlpTracesEndpoint = None,
    log_format: server_options.LogFormat = "human",
    log_level: server_options.LogLevel = "info",
) -> None:
    """Serve a model over HTTP, for clients of OpenAI's and Anthropic's APIs.

    \b
    quire serve
    quire serve --model Qwen/Qwen3-0.6B --port 8080 --api-key secret
    curl localhost:8000/v1/chat/completions -H 'content-type: application/json' \\
         -d '{"messages": [{"role": "user", "content": "Hello!"}]}'
    """
    _check_installed()
    from quire.server.config import ServerConfig
    from quire.server.run import serve as run_server

    engine = {
        "device": device,
        "dtype": dtype,
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "max_batched_tokens": max_batched_tokens,
        "kv_cache_memory": None if kv_cache_memory is None else _fraction_or_bytes(kv_cache_memory),
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
        otlp_traces_endpoint=otlp_traces_endpoint,
        log_format=log_format,
        log_level=log_level,
    )
    raise typer.Exit(run_server(config))


def _check_installed() -> None:
    try:
        for name in ("fastapi", "httptools", "msgspec", "prometheus_client", "uvicorn", "zmq"):
            importlib.import_module(name)
    except ImportError as error:
        raise QuireError(f"the server needs {error.name}: pip install 'quire[server]'") from None


def _keys(given: list[str], file: Path | None) -> tuple[str, ...]:
    variable = os.environ.get(server_options.KEY_VARIABLE, "")
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


def _fraction_or_bytes(text: str) -> float | str:
    try:
        number = float(text)
    except ValueError:
        return text
    return number if number <= 1 else text
