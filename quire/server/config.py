"""What a user may set about the server. Frozen and checked once."""

from __future__ import annotations

import ipaddress
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from quire.config import EngineConfig
from quire.errors import InvalidRequestError
from quire.server.guard.key_limits import KeyLimits
from quire.server.logs import LOG_FORMATS, LOG_LEVELS

MIB = 2**20
_MOST_WORKERS = 64
MOST_REPLICAS = 64
"""Behind one HTTP process."""


@dataclass(frozen=True, slots=True)
class EngineShare:
    """What an engine process is given beside its options: all of the machine, or as one of several
    a part of it.
    """

    environment: dict[str, str] = field(default_factory=dict)
    """Its devices and threads, where they are not all."""
    log_name: str = "engine"
    block_events: bool = False
    """Whether it tells which blocks it has cached."""


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Server options, with defaults that suit most."""

    model: str = "smollm2"
    engine: dict[str, Any] = field(default_factory=dict)
    """Engine options, by the names of `quire.config.EngineConfig`."""
    replicas: int = 1
    """Engines, each with a copy of the model and with devices, or cores, of its own."""
    served_model_names: tuple[str, ...] = ()
    """What clients may call the model; empty: as it was given here, a path by its last part."""
    adapters: tuple[tuple[str, str], ...] = ()
    """Names and folders of adapters that clients may name as their model."""
    adapter_folder: Path | None = None
    """A folder of further adapters, each by the name of its own folder; None: there is none."""
    weights_folder: Path | None = None
    """Where files lie that may replace the model's weights; None: none on a disk may."""
    host: str = "127.0.0.1"
    port: int = 8000
    """0 takes a free one."""
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    """Clients must send one of these; empty: anybody may use the server."""
    key_limits: dict[str, KeyLimits] = field(default_factory=dict, repr=False)
    """What single keys may do, and their shares under policy `fair`; by the key."""
    admin_keys: tuple[str, ...] = field(default=(), repr=False)
    """Keys like these that also see what other keys asked for: requests, the live view, files and
    batches.
    """
    cors_origins: tuple[str, ...] = ()
    """Web pages of these origins may use the server."""
    allowed_hosts: tuple[str, ...] = ()
    """Values of the Host header that are served; empty: all."""
    page: bool = True
    """Whether there is a page to talk to the model and to watch the engine, at /."""
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    max_body_bytes: int = 4 * MIB
    max_bodies_bytes: int = 256 * MIB
    """Of all requests being read or prepared at a time."""
    max_header_bytes: int = 32 * 1024
    header_seconds: float = 10.0
    """For a request's headers to arrive."""
    body_seconds: float = 30.0
    """For a request's body to arrive."""
    write_seconds: float = 30.0
    """For a client to take what is written to it."""
    http_workers: int = 1
    """Processes that serve HTTP; what they are allowed is allowed to all of them together."""
    max_connections: int = 2048
    max_queued_requests: int = 256
    """Answers that may wait beyond those that run."""
    max_queued_tokens: int = 1_000_000
    """Prompt tokens that may wait."""
    max_answers: int = 256
    """Answers one call may ask for: prompts times n (or best_of)."""
    max_buffered_tokens: int = 4096
    """Tokens a stream's reader may be behind; then the stream ends."""
    first_token_seconds: float | None = None
    """A request whose first token is not to be expected within that is refused at once."""
    request_seconds: float = 600.0
    """After which a request ends, however far it has come."""
    queue_seconds: float = 120.0
    """After which a request ends that has not begun to run."""
    drain_seconds: float = 60.0
    """For requests to end after SIGTERM."""
    stall_seconds: float = 30.0
    """Work and no sign of life for this long: not ready."""
    suspect_seconds: float = 10.0
    """Work and no sign of life for this long: what other replicas have room for goes on there."""
    hang_seconds: float = 120.0
    """Work and no sign of life for this long: the engine is restarted."""
    start_seconds: float = 120.0
    """No sign of life for this long from an engine that starts: it is killed, and tried again if it
    ran before.
    """
    store: Path | None = None
    """Folder in which responses are stored too; None: in memory alone."""
    stored_responses: int = 1024
    """Responses that are kept for clients to go on with; 0: none."""
    stored_bytes: int = 256 * MIB
    """Of all of them."""
    stored_seconds: float = 24 * 3600.0
    """How long each is kept."""
    batches: Path | None = None
    """Folder for uploaded files, batches and their answers; None: there is no /v1/files and no
    /v1/batches.
    """
    max_batch_bytes: int = 1024 * MIB
    """Of all files in it, their records and batches."""
    max_batch_bytes_per_key: int | None = None
    """Of those of one key; None: its even share."""
    otlp_traces_endpoint: str | None = None
    """Where spans of requests are sent (OTLP over HTTP); None: there are none."""
    log_format: str = "human"
    log_level: str = "info"
    engine_module: str = "quire.server.link.engine_process"
    """What the engine process runs; tests run one that breaks on demand."""
    share: EngineShare = field(default_factory=EngineShare)
    """Of an engine that is one of several; `quire.server.link.replicas.shares` divides."""

    def __post_init__(self) -> None:
        EngineConfig.of(self.engine)
        taken = {name for name, _ in self.adapters} & set(self.model_names)
        if taken:
            raise InvalidRequestError("lora", f"{min(taken)!r} is the model's own name")
        if not 1 <= self.replicas <= MOST_REPLICAS:
            raise InvalidRequestError(
                "replicas", f"must be from 1 to {MOST_REPLICAS}, not {self.replicas}"
            )
        if not 0 <= self.port <= 65535:
            raise InvalidRequestError("port", f"must be from 0 to 65535, not {self.port}")
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise InvalidRequestError("tls", "needs a certificate and its key")
        for name in ("api_keys", "admin_keys"):
            if any(not key.strip() or not key.isascii() for key in getattr(self, name)):
                raise InvalidRequestError(name, "must not be empty and must be ASCII")
        if self.admin_keys and not self.api_keys:
            raise InvalidRequestError(
                "admin_keys", "need api_keys: without them everybody sees everything"
            )
        if not self.key_limits.keys() <= set(self.api_keys):
            raise InvalidRequestError("key_limits", "are for keys of api_keys only")
        policy = self.engine.get("policy", "fcfs")
        if policy != "fair" and any(one.weight != 1 for one in self.key_limits.values()):
            raise InvalidRequestError(
                "weight", f"of a key counts under --policy fair only, not {policy}"
            )
        if policy == "priority" and self.first_token_seconds is not None:
            raise InvalidRequestError(
                "first_token_seconds",
                "can't be kept under --policy priority, where later requests may go first",
            )
        if self.log_format not in LOG_FORMATS:
            raise InvalidRequestError(
                "log_format", f"must be one of {', '.join(LOG_FORMATS)}, not {self.log_format!r}"
            )
        if self.log_level not in LOG_LEVELS:
            raise InvalidRequestError(
                "log_level", f"must be one of {', '.join(LOG_LEVELS)}, not {self.log_level!r}"
            )
        for name in self.__slots__:
            value = getattr(self, name)
            if name.startswith("max_") and value is not None and value < 1:
                raise InvalidRequestError(name, f"must be at least 1, not {value}")
            if name.endswith("_seconds") and value is not None and not 0 < value < math.inf:
                raise InvalidRequestError(name, f"must be above 0 and finite, not {value}")
        if not 1 <= self.http_workers <= _MOST_WORKERS:
            raise InvalidRequestError(
                "http_workers", f"must be from 1 to {_MOST_WORKERS}, not {self.http_workers}"
            )
        for name in ("stored_responses", "stored_bytes"):
            if getattr(self, name) < 0:
                raise InvalidRequestError(
                    name, f"must not be negative, but is {getattr(self, name)}"
                )
        if self.hang_seconds < self.stall_seconds:
            raise InvalidRequestError(
                "hang_seconds", f"must not be less than stall_seconds ({self.stall_seconds})"
            )

    @property
    def all_keys(self) -> tuple[str, ...]:
        """With which clients are let in."""
        return (*self.api_keys, *self.admin_keys)

    @property
    def model_names(self) -> tuple[str, ...]:
        # Where the files lie on this machine is nobody's business.
        # False for what is no path
        name = Path(self.model).name if os.path.exists(self.model) else self.model
        return self.served_model_names or (name,)

    @property
    def is_public(self) -> bool:
        """Whether other machines can reach the server."""
        try:
            return not ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host != "localhost"


def encode_config(config: ServerConfig) -> dict[str, Any]:
    """A server's options as plain values."""
    found = {name: getattr(config, name) for name in ServerConfig.__slots__}
    return {name: str(value) if isinstance(value, Path) else value for name, value in found.items()}


def decode_config(fields: dict[str, Any]) -> ServerConfig:
    return msgspec.convert(fields, ServerConfig, dec_hook=lambda kind, value: kind(value))
