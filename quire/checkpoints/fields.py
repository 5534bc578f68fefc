"""Typed reading of a model's metadata, so that a wrong value is an error that names it and its
file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.errors import ModelFormatError
from quire.field_checks import as_float

_MISSING: Any = object()


MOST = 1e30
"""Of any number that is no size: products of a few such are still numbers."""


class Fields:
    """A mapping whose values are checked as they are taken. A value of None counts as absent. Keys
    stand there under the names that `renamed` gives them, others after the prefix.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        file: str,
        prefix: str = "",
        renamed: Mapping[str, str] | None = None,
    ) -> None:
        self._values = values
        self._prefix = prefix
        self._renamed = renamed or {}
        self.file = file

    def _name(self, key: str) -> str:
        return self._renamed.get(key, self._prefix + key)

    def __contains__(self, key: str) -> bool:
        return self.raw(key) is not None

    def declares(self, key: str) -> bool:
        """Whether the key is there at all, be it with the value null."""
        return self._name(key) in self._values

    def names(self) -> list[str]:
        return list(self._values)

    def raw(self, key: str) -> Any:
        return self._values.get(self._name(key))

    def integer(self, key: str, default: int = _MISSING, *, low: int = 1, high: int = 2**24) -> int:
        value = self._take(key, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.error(key, f"a whole number from {low} to {high}", value)
        return value

    def head_size(self, key: str, num_heads: int) -> int:
        """The size of a head where the settings don't say it: that of all of them, shared out."""
        if self.integer(key) % num_heads:
            expected = f"a multiple of the {num_heads} attention heads, as head_dim is absent"
            raise self.error(key, expected, self.raw(key))
        return self.integer(key) // num_heads

    def number(self, key: str, default: float = _MISSING, *, low: float = 0.0) -> float:
        value = self._take(key, default)
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not low <= as_float(value) <= MOST
        ):
            raise self.error(key, f"a number from {low:g} to {MOST:g}", value)
        return float(value)

    def boolean(self, key: str, default: bool = _MISSING) -> bool:
        value = self._take(key, default)
        if not isinstance(value, bool):
            raise self.error(key, "true or false", value)
        return value

    def string(self, key: str, default: str = _MISSING) -> str:
        value = self._take(key, default)
        if not isinstance(value, str):
            raise self.error(key, "a string", value)
        return value

    def list_of(self, key: str, kind: type, default: list[Any] = _MISSING) -> list[Any]:
        value = self._take(key, default)
        # A vocabulary has very many items of very few types.
        if not isinstance(value, list | tuple) or not all(
            issubclass(found, kind) for found in set(map(type, value))
        ):
            raise self.error(key, f"a list of {kind.__name__}", value)
        return list(value)

    def numbers(self, key: str) -> tuple[float, ...]:
        found = self._take(key, _MISSING)
        if not isinstance(found, list) or not all(
            isinstance(one, int | float) and 0 < as_float(one) <= MOST for one in found
        ):
            raise self.error(key, "a list of positive numbers", found)
        return tuple(map(float, found))

    def part(self, key: str) -> Fields:
        """A nested mapping; empty where it is absent."""
        value = self._take(key, {})
        if not isinstance(value, Mapping):
            raise self.error(key, "an object", value)
        return Fields(value, f"{self.file}, {key}")

    def with_values(self, changed: Mapping[str, Any]) -> Fields:
        """The same with these values changed or added."""
        return Fields({**self._values, **changed}, self.file, self._prefix, self._renamed)

    def error(self, key: str, expected: str, got: object) -> ModelFormatError:
        text = repr(got)
        shown = text if len(text) <= 80 else text[:77] + "..."
        return ModelFormatError(
            f"{self.file}: {self._name(key)} should be {expected}, but is {shown}"
        )

    def _take(self, key: str, default: Any) -> Any:
        value = self.raw(key)
        if value is not None:
            return value
        if default is _MISSING:
            raise ModelFormatError(f"{self.file}: {self._name(key)} is missing")
        return default
