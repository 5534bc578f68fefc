"""Libraries that only some tests need, while all test files are imported before the first one runs."""

from __future__ import annotations

from importlib import import_module
from typing import Any


class LateModule:
    """Stands for a module, which is imported when something of it is first used. Importing openai,
    anthropic, langchain and schemathesis takes six seconds.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # pytest looks whether it is a mock, or wraps a fixture
            raise AttributeError(name)
        return getattr(import_module(self._name), name)
