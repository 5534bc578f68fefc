"""What a pool of engines counts: who got how much, and what had to move."""

from __future__ import annotations

from prometheus_client import Counter, Gauge

from quire.observe.prometheus import ServerMetrics


class PoolMetrics:
    """Beside those that every engine has (`ServerMetrics.of_engine`)."""

    def __init__(self, metrics: ServerMetrics, is_single: bool = False) -> None:
        """Of a single engine only what moved is shown."""
        registry = None if is_single else metrics.registry
        self._up = Gauge(
            "quire_replica_up", "Whether a replica takes requests.", ["engine"], registry=registry
        )
        text = "Requests that were given to a replica."
        self._placed = Counter("quire_replica_requests", text, ["engine"], registry=registry)
        text = "Prompt tokens of the requests that were given to a replica."
        self._tokens = Counter("quire_replica_prompt_tokens", text, ["engine"], registry=registry)
        text = "Those of them that lay, or came to lie, in its cache, as the router knew it."
        self._cached = Counter("quire_replica_cached_tokens", text, ["engine"], registry=registry)
        text = "Requests that another engine went on with after theirs was lost, by whether they had tokens."
        self._moved = Counter(
            "quire_requests_moved", text, ["had_tokens"], registry=metrics.registry
        )
        for had_tokens in ("false", "true"):
            self._moved.labels(had_tokens)

    def up(self, replica: int, is_up: bool) -> None:
        self._up.labels(str(replica)).set(is_up)

    def placed(self, replica: int, num_tokens: int, num_cached: int) -> None:
        self._placed.labels(str(replica)).inc()
        self._tokens.labels(str(replica)).inc(num_tokens)
        self._cached.labels(str(replica)).inc(num_cached)

    def moved(self, had_tokens: bool) -> None:
        self._moved.labels("true" if had_tokens else "false").inc()
