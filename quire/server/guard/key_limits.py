"""What one key may do beside others: a line of `--api-key-file` is a key and, after it, its limits:

sk-gold weight=4
sk-free requests_per_minute=60 tokens_per_minute=20000 max_requests=2
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from quire.config import LEAST_WEIGHT, MOST_WEIGHT
from quire.errors import InvalidRequestError
from quire.field_checks import shown

MOST_IN_A_MINUTE = 10**12
"""Counts stand in a table of 64 bits."""


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """None: as much as the server has."""

    weight: float = 1.0
    """Its share of the engine under policy `fair`, beside those of others."""
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    """Of prompts and answers."""
    max_requests: int | None = None
    """That run or wait at a time."""

    def __post_init__(self) -> None:
        if not LEAST_WEIGHT <= self.weight <= MOST_WEIGHT:
            raise InvalidRequestError(
                "weight", f"must be from {LEAST_WEIGHT:g} to {MOST_WEIGHT:g}, not {self.weight}"
            )
        for name in ("requests_per_minute", "tokens_per_minute", "max_requests"):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= MOST_IN_A_MINUTE:
                raise InvalidRequestError(
                    name, f"must be from 1 to {MOST_IN_A_MINUTE}, not {shown(value)}"
                )

    @property
    def has_bounds(self) -> bool:
        """Whether anything is counted for it."""
        bounds = (self.requests_per_minute, self.tokens_per_minute, self.max_requests)
        return any(bound is not None for bound in bounds)


_NAMES = tuple(field.name for field in fields(KeyLimits))


def read_key(line: str) -> tuple[str, KeyLimits]:
    """A key and its limits; raises InvalidRequestError, which does not show the key."""
    key, *settings = line.split()
    found: dict[str, float | int] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals or name not in _NAMES:
            raise InvalidRequestError(
                "--api-key-file",
                f"after a key there may be {', '.join(f'{one}=NUMBER' for one in _NAMES)}, "
                f"not {setting[:64]!r}",
            )
        if name in found:
            raise InvalidRequestError("--api-key-file", f"{name} is there twice for one key")
        try:
            found[name] = float(value) if name == "weight" else int(value)
        except ValueError:
            raise InvalidRequestError(
                "--api-key-file", f"{name} must be a number, not {value[:64]!r}"
            ) from None
    try:
        return key, KeyLimits(**found)  # type: ignore[arg-type]
    except InvalidRequestError as error:
        raise InvalidRequestError("--api-key-file", str(error)) from None
