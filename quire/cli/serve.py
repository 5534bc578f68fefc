"""`quire serve`: a server for clients of OpenAI's and Anthropic's APIs."""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer
from typer import Option

from quire.cli import options
from quire.cli.option_groups import FileOptions, OptionGroup, with_groups
from quire.config import Duration, parse_bytes
from quire.errors import InvalidRequestError, QuireError, reason

if TYPE_CHECKING:
    from quire.server.config import ServerConfig
    from quire.server.guard.key_limits import KeyLimits

_KEY_VARIABLE = "QUIRE_API_KEY"
_ADMIN_VARIABLE = "QUIRE_ADMIN_KEY"
_KEY_HELP = (
    f"A key clients must send. Repeat for several; also from {_KEY_VARIABLE}, separated by commas."
)


@dataclass(frozen=True)
class ServerOptions(OptionGroup):
    """Who is served, and how long and how much."""

    section: ClassVar[str] = "server"
    host: Annotated[str, Option(metavar="H", help="Address to listen on; 0.0.0.0 is all.")] = (
        "127.0.0.1"
    )
    port: Annotated[int, Option(metavar="P", help="Port to listen on; 0 takes a free one.")] = 8000
    replicas: Annotated[
        int,
        Option(
            metavar="N",
            help="Engines, each with a copy of the model and its own GPUs or share of the cores.",
        ),
    ] = 1
    served_model_name: Annotated[
        list[str] | None,
        Option(metavar="NAME", help="What clients call the model. Repeat for several."),
    ] = None
    lora: Annotated[
        list[str] | None,
        Option(metavar="NAME=PATH", help="An adapter that clients may name. Repeat for several."),
    ] = None
    lora_dir: Annotated[
        Path | None,
        Option(metavar="DIR", help="A folder of adapters; each is read when it is first named."),
    ] = None
    weights_dir: Annotated[
        Path | None,
        Option(
            metavar="DIR",
            help="Where files may lie that replace the model's weights; an admin key asks for it.",
        ),
    ] = None
    api_key: Annotated[list[str] | None, Option(metavar="KEY", help=_KEY_HELP)] = None
    api_key_file: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help="Further keys, one per line; after a key: weight=, requests_per_minute=, …",
        ),
    ] = None
    admin_key: Annotated[
        list[str] | None,
        Option(
            metavar="KEY",
            help=f"A key that also sees other keys' requests, files and batches; also from {_ADMIN_VARIABLE}.",
        ),
    ] = None
    http_workers: Annotated[
        int, Option(metavar="N", help="Processes that serve HTTP; more for 10,000 tokens/s.")
    ] = 1
    max_queued_requests: Annotated[
        int, Option(metavar="N", help="Answers that may wait; beyond, clients get 429.")
    ] = 256
    max_queued_tokens: Annotated[int, Option(metavar="N", help="Prompt tokens that may wait.")] = (
        1_000_000
    )
    max_first_token: Annotated[
        str | None,
        Option(
            metavar="T",
            help="Refuse a request at once whose first token would come later, such as 10s.",
        ),
    ] = None
    request_timeout: Annotated[float, Option(metavar="S", help="Seconds a request may take.")] = (
        600.0
    )
    queue_timeout: Annotated[
        float, Option(metavar="S", help="Seconds a request may wait to begin.")
    ] = 120.0
    drain_timeout: Annotated[
        float, Option(metavar="S", help="Seconds requests get after SIGTERM.")
    ] = 60.0
    stall_timeout: Annotated[
        float, Option(metavar="S", help="Seconds without progress before /ready says no.")
    ] = 30.0
    hang_timeout: Annotated[
        float, Option(metavar="S", help="Seconds without progress before the engine is restarted.")
    ] = 120.0
    store: Annotated[
        Path | None,
        Option(metavar="DIR", help="Keep responses in this folder too: they outlive a restart."),
    ] = None
    stored_responses: Annotated[
        int, Option(metavar="N", help="Responses kept for clients to go on with; 0: none.")
    ] = 1024
    stored_hours: Annotated[float, Option(metavar="H", help="Hours each of them is kept.")] = 24.0
    batches: Annotated[
        Path | None,
        Option(
            metavar="DIR", help="Serve /v1/files and /v1/batches, and keep them in this folder."
        ),
    ] = None
    max_batch_size: Annotated[str, Option(metavar="M", help="Bytes of all files in it.")] = "1GiB"
    max_batch_size_per_key: Annotated[
        str | None,
        Option(metavar="M", help="Bytes of one key's files in it; default: an even share."),
    ] = None
    start_timeout: Annotated[
        float,
        Option(
            metavar="S", help="Seconds without progress before an engine that starts is given up."
        ),
    ] = 120.0
    max_body_size: Annotated[str, Option(metavar="M", help="Largest request body.")] = "4MiB"
    cors_origin: Annotated[
        list[str] | None,
        Option(metavar="URL", help="Let web pages of this origin in. Repeat for several."),
    ] = None
    allowed_host: Annotated[
        list[str] | None,
        Option(metavar="NAME", help="Serve only this Host header. Repeat for several."),
    ] = None
    page: Annotated[
        bool, Option(help="Serve a page at / to talk to the model and to watch the engine.")
    ] = True
    tls_cert: Annotated[
        Path | None, Option(metavar="FILE", help="Certificate (PEM): serve HTTPS.")
    ] = None
    tls_key: Annotated[Path | None, Option(metavar="FILE", help="The certificate's key (PEM).")] = (
        None
    )
    otlp_traces_endpoint: Annotated[
        str | None,
        Option(
            metavar="URL", help="Send spans of requests there: http://localhost:4318/v1/traces."
        ),
    ] = None
    log_format: Annotated[str, Option(metavar="human|json", help="How the log is written.")] = (
        "human"
    )
    log_level: Annotated[
        str, Option(metavar="debug|info|warning|error", help="What is logged.")
    ] = "info"

    def check(self) -> None:
        check_installed("the server")
        self.config("", {})

    def config(self, model: str, engine: dict[str, Any]) -> ServerConfig:
        """What the server is started with."""
        from quire.server.adapters import parse_adapters
        from quire.server.config import ServerConfig

        from_file = _keys_of_file(self.api_key_file)
        return ServerConfig(
            model=model,
            engine=engine,
            replicas=self.replicas,
            served_model_names=tuple(self.served_model_name or ()),
            adapters=parse_adapters(self.lora or ()),
            adapter_folder=_folder("--lora-dir", self.lora_dir),
            weights_folder=_folder("--weights-dir", self.weights_dir),
            host=self.host,
            port=self.port,
            api_keys=(*_keys(self.api_key or [], _KEY_VARIABLE), *from_file),
            key_limits=from_file,
            admin_keys=_keys(self.admin_key or [], _ADMIN_VARIABLE),
            cors_origins=tuple(self.cors_origin or ()),
            allowed_hosts=tuple(self.allowed_host or ()),
            page=self.page,
            tls_certificate=_readable("--tls-cert", self.tls_cert),
            tls_key=_readable("--tls-key", self.tls_key),
            max_body_bytes=parse_bytes("--max-body-size", self.max_body_size, low=1),
            http_workers=self.http_workers,
            max_queued_requests=self.max_queued_requests,
            max_queued_tokens=self.max_queued_tokens,
            first_token_seconds=None
            if self.max_first_token is None
            else Duration().check("--max-first-token", self.max_first_token),
            request_seconds=self.request_timeout,
            queue_seconds=self.queue_timeout,
            drain_seconds=self.drain_timeout,
            stall_seconds=self.stall_timeout,
            hang_seconds=self.hang_timeout,
            store=None if self.store is None else self.store.absolute(),
            stored_responses=self.stored_responses,
            stored_seconds=self.stored_hours * 3600,
            batches=None if self.batches is None else self.batches.absolute(),
            max_batch_bytes=parse_bytes("--max-batch-size", self.max_batch_size, low=1),
            max_batch_bytes_per_key=_bytes_or_none(
                "--max-batch-size-per-key", self.max_batch_size_per_key
            ),
            start_seconds=self.start_timeout,
            otlp_traces_endpoint=self.otlp_traces_endpoint,
            log_format=self.log_format,
            log_level=self.log_level,
        )


@with_groups
def serve(
    model: options.ModelByPlace = options.DEFAULT_MODEL,
    server: ServerOptions = ServerOptions(),  # noqa: B008
    engine: options.EngineOptions = options.EngineOptions(),  # noqa: B008
    settings: FileOptions = FileOptions(),  # noqa: B008
) -> None:
    """Serve a model over HTTP, for clients of OpenAI's and Anthropic's APIs.

    \b
    quire serve
    quire serve Qwen/Qwen3-0.6B --port 8080 --api-key secret
    quire serve --print-config > quire.toml && quire serve --config quire.toml
    quire serve --model Qwen/Qwen3-0.6B --device cpu --quantization int4 --kv-cache-dtype int8
    quire serve Qwen/Qwen3-32B --tensor-parallel-size 4 --batches ./batches --http-workers 4
    quire serve Qwen/Qwen3-8B --replicas 4
    curl localhost:8000/v1/chat/completions -H 'content-type: application/json' \\
         -d '{"messages": [{"role": "user", "content": "Hello!"}]}'
    """
    from quire.server.run import serve as run_server

    raise typer.Exit(run_server(server.config(model, engine.keywords())))


def check_installed(who: str) -> None:
    """What the server's code needs beside the engine's."""
    try:
        for name in (
            "fastapi",
            "httptools",
            "msgspec",
            "prometheus_client",
            "python_multipart",
            "uvicorn",
        ):
            importlib.import_module(name)
    except ImportError as error:
        raise QuireError(f"{who} needs {error.name}: pip install 'quire[server]'") from None


def _bytes_or_none(option: str, value: str | None) -> int | None:
    return None if value is None else parse_bytes(option, value, low=1)


def _keys(given: list[str], variable_name: str) -> tuple[str, ...]:
    variable = os.environ.get(variable_name, "")
    return (*given, *filter(None, (key.strip() for key in variable.split(","))))


def _keys_of_file(file: Path | None) -> dict[str, KeyLimits]:
    from quire.server.guard.key_limits import read_key

    if file is None:
        return {}
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequestError(
            "--api-key-file", f"{file} can't be read: {reason(error)}"
        ) from None
    found = [read_key(line) for line in lines if line.strip()]
    if not found:
        raise InvalidRequestError("--api-key-file", f"{file} holds no key")
    return dict(found)


def _folder(field: str, folder: Path | None) -> Path | None:
    if folder is None:
        return None
    if not os.path.isdir(folder):
        raise InvalidRequestError(field, f"there is no folder {folder}")
    return folder.absolute()


def _readable(field: str, file: Path | None) -> Path | None:
    if file is not None and not os.path.isfile(file):  # False, too, for what can't be a path
        raise InvalidRequestError(field, f"there is no file {file}")
    return file
