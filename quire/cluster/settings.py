"""What is set about a server on Ray: `args` in its configuration file, or NAME=VALUE behind `serve
run`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from quire.errors import InvalidRequestError
from quire.server.config import EngineShare, ServerConfig
from quire.server.link.replicas.scaling import ScalingRule

_WHOLE = ("min_replicas", "max_replicas", "gpus_per_replica", "target_queue")
_REAL = ("cpus_per_replica", "http_cpus", "up_seconds", "down_seconds", "schedule_seconds")
_OURS = (
    "model",
    "engine",
    "replicas",
    "share",
    "host",
    "port",
    "api_keys",
    "tls_certificate",
    "tls_key",
)
"""Fields of ServerConfig that are set otherwise here."""
_NOT_HERE = {
    "http_workers": "the HTTP side is one process of Ray Serve; run several applications behind a load balancer",
    "store": "a folder is not on every machine of a cluster, so responses are kept in the HTTP side's memory",
    "batches": "a folder is not on every machine of a cluster; `quire batch --ray` answers files on it",
    "max_batch_bytes": "there are no batches",
}
"""Fields that `quire serve` has and a server on Ray does not, and why."""
HTTP_NODES = ("head", "any")


@dataclass(frozen=True, slots=True)
class RaySettings:
    """One model, its engines, and the HTTP side before them."""

    model: str = "smollm2"
    min_replicas: int = 1
    max_replicas: int = 1
    target_queue: int = 8
    """Requests per engine that may wait for their first token; beyond, an engine is added."""
    up_seconds: float = 5.0
    down_seconds: float = 120.0
    """For which there have to be too few engines, or too many, before that is changed."""
    gpus_per_replica: int = 0
    """GPUs of each engine, all on one machine: the engine's tensor_parallel_size, or 0 for the CPU."""
    cpus_per_replica: float = 1.0
    """Cores that Ray keeps for each engine; on the CPU, its threads."""
    http_cpus: float = 1.0
    http_node: str = "head"
    """Where the HTTP side runs, which all streams pass: on the head's machine, without which there
    is no cluster, or on any, where the loss of that machine cuts them. A head that has no room for
    it (`http_cpus`) is not waited for.
    """
    schedule_seconds: float = 600.0
    """For the cluster to make room for an engine."""
    api_key_file: str | None = None
    """Keys that clients must send, one per line."""
    server: Mapping[str, Any] = field(default_factory=dict)
    """Options of `quire serve`, by the names of `quire.server.config.ServerConfig`."""
    engine: Mapping[str, Any] = field(default_factory=dict)
    """By the names of `quire.config.EngineConfig`."""

    def __post_init__(self) -> None:
        self.rule()
        if self.gpus_per_replica < 0 or self.cpus_per_replica < 0:
            raise InvalidRequestError(
                "gpus_per_replica", "and cpus_per_replica must not be negative"
            )
        for name in _REAL:
            if not 0 <= getattr(self, name) < 1e9:
                raise InvalidRequestError(
                    name, f"must be a number that is not negative, not {getattr(self, name)!r}"
                )
        if self.http_node not in HTTP_NODES:
            raise InvalidRequestError(
                "http_node", f"must be one of {', '.join(HTTP_NODES)}, not {self.http_node!r}"
            )
        wanted = self.engine.get("tensor_parallel_size", 1)
        if self.gpus_per_replica and wanted != self.gpus_per_replica:
            raise InvalidRequestError(
                "gpus_per_replica",
                f"is {self.gpus_per_replica}, but the engine's tensor_parallel_size is {wanted}",
            )
        for name in self.server:
            if name in _OURS:
                raise InvalidRequestError(
                    f"server.{name}", "is not set here: Ray or another setting has it"
                )
            if name in _NOT_HERE:
                raise InvalidRequestError(
                    f"server.{name}", f"is not done on Ray: {_NOT_HERE[name]}"
                )
            if name not in ServerConfig.__slots__:
                raise InvalidRequestError(f"server.{name}", "is no option of the server")
        self.config(())

    @classmethod
    def of(cls, args: Mapping[str, Any]) -> RaySettings:
        """From settings by name. Numbers may be text, as a command line has them."""
        known = cls.__dataclass_fields__
        values: dict[str, Any] = {}
        for name, value in args.items():
            if name not in known:
                raise InvalidRequestError(name, f"is no setting; there are: {', '.join(known)}")
            try:
                values[name] = (
                    int(value) if name in _WHOLE else float(value) if name in _REAL else value
                )
            except (TypeError, ValueError):
                raise InvalidRequestError(name, f"must be a number, not {value!r}") from None
        return cls(**values)

    def rule(self) -> ScalingRule:
        return ScalingRule(
            self.min_replicas,
            self.max_replicas,
            self.target_queue,
            self.up_seconds,
            self.down_seconds,
        )

    def config(self, keys: tuple[str, ...]) -> ServerConfig:
        """Of the HTTP side: with a place for one engine more than there may be, for the time of a
        change.
        """
        engine = {**({} if self.gpus_per_replica else {"device": "cpu"}), **self.engine}
        return ServerConfig(
            model=self.model,
            engine=engine,
            replicas=self.max_replicas + 1,
            api_keys=keys,
            **dict(self.server),
        )

    def keys(self) -> tuple[str, ...]:
        if self.api_key_file is None:
            return ()
        lines = Path(self.api_key_file).read_text(encoding="utf-8").splitlines()
        found = tuple(line.strip() for line in lines if line.strip())
        if not found:
            raise InvalidRequestError("api_key_file", f"{self.api_key_file} holds no key")
        return found

    @property
    def bundle(self) -> dict[str, float]:
        """What an engine needs, on one machine."""
        needed = {"CPU": self.cpus_per_replica, "GPU": float(self.gpus_per_replica)}
        return {name: amount for name, amount in needed.items() if amount}

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def engine_parts(config: ServerConfig) -> list[ServerConfig]:
    """The configuration of each engine: Ray gives it its devices and cores."""
    shares = (
        EngineShare({}, f"engine {number}", block_events=True) for number in range(config.replicas)
    )
    return [replace(config, replicas=1, share=share) for share in shares]
