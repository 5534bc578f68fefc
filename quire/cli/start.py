"""From the command line to an engine, as quickly as this process can."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quire.engine.gc_pauses import no_collections

if TYPE_CHECKING:
    from quire.llm import LLM


def open_llm(model: str, **options: Any) -> LLM:
    """Imports the engine and loads a model."""
    with no_collections():
        from quire.llm import LLM

        return LLM(model, **options)
