"""How a request is sampled that does not say: one rule for the page, `quire run` and `chat`, every
API and `LLM`.

What a request names counts. For the rest the model's own defaults count (generation_config.json, or
`general.sampling.*` of a GGUF file); a model that has none for how tokens are chosen gets ours.
`SamplingParams()` is neutral: a Python program that makes one names everything.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from quire.errors import InvalidRequestError, ModelFormatError
from quire.field_checks import parameters
from quire.sampling_params import SamplingParams

OURS: Mapping[str, float] = MappingProxyType({"temperature": 0.7, "top_p": 0.95})
"""Answers of most models read well with these."""

_CHOOSING = ("temperature", "top_k", "top_p", "min_p", "typical_p")
DEFAULTED = (*_CHOOSING, "repetition_penalty")
"""Parameters that a model may have a default for."""

_GGUF_KEYS: Mapping[str, str] = {
    "temperature": "general.sampling.temp",
    "top_k": "general.sampling.top_k",
    "top_p": "general.sampling.top_p",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}
_TABLE = parameters(SamplingParams)


def read_defaults(written: Mapping[str, Any], place: str) -> Mapping[str, float]:
    """The defaults for requests to a model with this generation_config; `place` names the file in
    errors.
    """
    found: dict[str, float] = {}
    for name in DEFAULTED:
        value = written.get(name)
        if value is None:
            continue
        try:
            # -1 is some models' word for "all"
            found[name] = _TABLE[name].values.check(
                name, 0 if name == "top_k" and value == -1 else value
            )
        except InvalidRequestError as error:
            raise ModelFormatError(f"{place}: {error}") from None
    return found if found.keys() & set(_CHOOSING) else {**OURS, **found}


def read_gguf_defaults(metadata: Mapping[str, Any]) -> Mapping[str, float]:
    """The defaults for requests to a model in a GGUF file."""
    written = {name: metadata.get(key) for name, key in _GGUF_KEYS.items()}
    return read_defaults(written, "the GGUF file's general.sampling")
