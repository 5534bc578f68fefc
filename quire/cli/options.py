"""Options that several commands share: singly, and in groups (see `option_groups.py`).

Those of the engine follow from `EngineConfig`, those of sampling from `SamplingParams`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, ClassVar

from typer import Option

from quire.cli.option_groups import (
    MODEL_HELP,
    ByPlace,
    OptionGroup,
    table_option,
    table_options,
)
from quire.config import EngineConfig, Memory
from quire.errors import InvalidRequestError, reason
from quire.field_checks import parameters
from quire.sampling_defaults import DEFAULTED
from quire.sampling_params import SamplingParams, StructuredOutput

DEFAULT_MODEL = "smollm2"

Model = Annotated[str, Option("--model", "-m", metavar="M", help=MODEL_HELP)]
ModelByPlace = Annotated[
    str, Option("--model", "-m", metavar="M", help="Another way to name it."), ByPlace()
]
"""For commands whose one argument is the model: with `with_groups`."""
Seed = Annotated[int, table_option(SamplingParams, "seed")]
Device = Annotated[str, table_option(EngineConfig, "device")]
Dtype = Annotated[str, table_option(EngineConfig, "dtype")]
Quantization = Annotated[str, table_option(EngineConfig, "quantization")]
Kernels = Annotated[str, table_option(EngineConfig, "kernels")]
KVCacheDtype = Annotated[str, table_option(EngineConfig, "kv_cache_dtype")]
TensorParallelSize = Annotated[int, table_option(EngineConfig, "tensor_parallel_size")]
Verbose = Annotated[
    bool,
    Option(
        "--verbose",
        "-v",
        help="Tell more: what was loaded and what fits, what came of draft tokens and the cache.",
    ),
]
System = Annotated[str | None, Option(metavar="TEXT", help="A system message for chat models.")]

_SUITS_TERMINALS: dict[str, Any] = {**dict.fromkeys(DEFAULTED), "seed": 0}
"""Defaults of `run` and `chat`: sampled as the model wants it, and the same answer again."""


@dataclass(frozen=True)
class EngineOptions(table_options(EngineConfig)):  # type: ignore[misc]
    """How the engine computes."""

    section: ClassVar[str] = "engine"

    def keywords(self) -> dict[str, Any]:
        """For `LLM`, or `EngineConfig`."""
        found = {name: getattr(self, name) for name in self.options()}
        for name, line in parameters(EngineConfig).items():
            value = found.get(name)
            if isinstance(line.values, Memory) and value is not None:
                found[name] = line.values.read(value)
            elif isinstance(value, Path):
                found[name] = str(value.absolute())
        return found

    @classmethod
    def unknown(cls, name: str, path: Path | None) -> InvalidRequestError:
        return EngineConfig.unknown(name)

    def check(self) -> None:
        EngineConfig.of(self.keywords())


@dataclass(frozen=True)
class SamplingOptions(table_options(SamplingParams, _SUITS_TERMINALS)):  # type: ignore[misc]
    """How an answer is sampled, and where it ends."""

    json_schema: Annotated[
        Path | None,
        Option(metavar="FILE", help="Answers are JSON that fits the schema in this file."),
    ] = None

    def params(self, defaults: Mapping[str, float] = MappingProxyType({})) -> SamplingParams:
        """`defaults`: the model's, for what no option has set (`LLM.sampling_defaults`)."""
        structured = None
        if self.json_schema is not None:
            try:
                structured = StructuredOutput(
                    json_schema=self.json_schema.read_text(encoding="utf-8")
                )
            except (OSError, UnicodeDecodeError) as error:
                raise InvalidRequestError(
                    "--json-schema", f"{self.json_schema} can't be read: {reason(error)}"
                ) from None
            from quire.constrain.guidance import import_llguidance

            import_llguidance()  # a missing package is named before a model is loaded
        return SamplingParams(**{**defaults, **given_parameters(self)}, structured=structured)


_UNSET = dict.fromkeys(parameters(SamplingParams))


@dataclass(frozen=True)
class SentOptions(table_options(SamplingParams, _UNSET, ("seed", "max_tokens"))):  # type: ignore[misc]
    """Parameters of requests to a server: only what is given is sent."""


def given_parameters(group: OptionGroup) -> dict[str, Any]:
    """The sampling parameters that options have set."""
    values = {name: getattr(group, name, None) for name in parameters(SamplingParams)}
    return {name: value for name, value in values.items() if value is not None}
