"""Quire: an exact, readable LLM inference engine.

    from quire import LLM, SamplingParams
    with LLM("smollm2") as llm:
        print(llm.generate(["The capital of France is"], SamplingParams(temperature=0))[0].text)

Names are imported when they are first used, so `import quire` is quick and needs neither torch nor
a GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire.errors import QuireError
    from quire.frontend.adapter_names import LoRARequest
    from quire.llm import LLM
    from quire.outputs import Completion, RequestDelta, RequestOutput
    from quire.sampling_params import SamplingParams

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "Completion",
    "LoRARequest",
    "QuireError",
    "RequestDelta",
    "RequestOutput",
    "SamplingParams",
    "__version__",
]

_HOMES = {
    "LLM": "quire.llm",
    "Completion": "quire.outputs",
    "LoRARequest": "quire.frontend.adapter_names",
    "QuireError": "quire.errors",
    "RequestDelta": "quire.outputs",
    "RequestOutput": "quire.outputs",
    "SamplingParams": "quire.sampling_params",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'quire' has no attribute {name!r}")
    import importlib

    from quire.process.gc_pauses import full_collections_put_off

    with full_collections_put_off():  # nothing that is imported is garbage
        return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
