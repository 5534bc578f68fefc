"""How many engines there should be, by the length of the queue. Pure: time is an argument."""

from __future__ import annotations

from dataclasses import dataclass

from quire.errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class ScalingRule:
    """When engines are added and taken away."""

    lowest: int = 1
    highest: int = 1
    target_queue: int = 8
    """Requests per engine that may wait for their first token; beyond, there are too few engines."""
    up_seconds: float = 5.0
    """For which the queue has to be too long."""
    down_seconds: float = 120.0
    """For which one engine less would have been enough."""

    def __post_init__(self) -> None:
        if not 1 <= self.lowest <= self.highest:
            raise InvalidRequestError(
                "min_replicas",
                f"must be from 1 to max_replicas ({self.highest}), not {self.lowest}",
            )
        if self.target_queue < 1:
            raise InvalidRequestError(
                "target_queue", f"must be at least 1, not {self.target_queue}"
            )
        if min(self.up_seconds, self.down_seconds) < 0:
            raise InvalidRequestError("up_seconds", "and down_seconds must not be negative")


class Scaler:
    """Follows the queue and says when there is a change to be made."""

    def __init__(self, rule: ScalingRule) -> None:
        self.rule = rule
        self._too_few_since: float | None = None
        self._too_many_since: float | None = None

    def decide(
        self, now: float, num_engines: int, num_waiting: int, num_running: int, rows: int
    ) -> int:
        """1: one more engine, -1: one less, 0: as it is. `num_waiting` requests have no token yet,
        `num_running` answers are on their way, and each engine computes `rows` at a time. Call it
        regularly.
        """
        rule = self.rule
        if num_engines < rule.lowest:
            return 1
        if num_engines > rule.highest:
            return -1
        too_few = num_waiting > rule.target_queue * num_engines
        fewer = num_engines - 1
        too_many = (
            num_waiting <= rule.target_queue * fewer // 2 and num_running <= rows * fewer // 2
        )
        self._too_few_since = _since(
            self._too_few_since, too_few and num_engines < rule.highest, now
        )
        self._too_many_since = _since(
            self._too_many_since, too_many and num_engines > rule.lowest, now
        )
        if self._too_few_since is not None and now - self._too_few_since >= rule.up_seconds:
            self._too_few_since = now
            return 1
        if self._too_many_since is not None and now - self._too_many_since >= rule.down_seconds:
            self._too_many_since = now
            return -1
        return 0


def _since(before: float | None, holds: bool, now: float) -> float | None:
    return None if not holds else now if before is None else before
