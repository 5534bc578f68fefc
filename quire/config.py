"""What a user may set about the engine. Frozen; what is derived from it and the machine is computed
elsewhere (`runner/memory.py`) and never written back."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypedDict

import quire.field_checks as check
from quire.errors import InvalidRequestError

_UNITS = {
    "": 1,
    "b": 1,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
}


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """How much is computed at once, and how much memory the cache may take."""

    max_num_seqs: int
    max_batched_tokens: int
    kv_cache_memory: int | float | str
    graph_tokens: int = 0
    """The most tokens of a step that runs as a CUDA graph; 0 without graphs."""


_CPU_LIMITS = EngineLimits(64, 512, 0.25)
_GPU_LIMITS = EngineLimits(256, 16384, 0.9)


@dataclass(frozen=True, slots=True)
class Memory(check.Values):
    """A number of bytes, at least `low`; or a fraction, if that is allowed."""

    low: int
    fraction: bool = False

    def check(self, name: str, value: Any) -> int | float | str:
        if self.fraction and isinstance(value, float):
            if not 0 < value <= 1:
                raise InvalidRequestError(
                    name,
                    f"as a fraction of free memory must be above 0 and at most 1, not {value}",
                )
        else:
            try:
                parse_bytes(name, value, low=self.low)
            except InvalidRequestError as error:
                if not self.fraction:
                    raise
                raise InvalidRequestError(
                    name,
                    f"{str(error).removeprefix(f'{name}: ')}; or a fraction of free memory such as 0.5",
                ) from None
        return value  # type: ignore[no-any-return]

    def read(self, text: str) -> float | str:
        """What somebody typed."""
        try:
            number = float(text)
        except ValueError:
            return text
        return number if self.fraction and number <= 1 else text

    def __str__(self) -> str:
        return "bytes (2GiB) or a fraction (0.5)" if self.fraction else "bytes (2GiB)"


@dataclass(frozen=True, slots=True)
class Duration(check.Values):
    """Seconds above 0, or text with a unit; kept as seconds."""

    def check(self, name: str, value: Any) -> float:
        seconds: float | None = None
        if isinstance(value, str):
            match = re.fullmatch(r"\s*(\d{1,9}(?:\.\d{1,9})?)\s*(ms|s|)\s*", value)
            if match:
                seconds = float(match[1]) * (0.001 if match[2] == "ms" else 1.0)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            seconds = check.as_float(value)
        if seconds is None or not 0 < seconds < 1e9:
            shown = repr(value[:64]) if isinstance(value, str) else check.shown(value)
            raise InvalidRequestError(
                name, f"must be a time above 0 such as 40ms, 1.5s or 0.04, not {shown}"
            )
        return seconds

    def __str__(self) -> str:
        return "a time (40ms, 1.5s)"


LEAST_WEIGHT, MOST_WEIGHT = 1e-6, 1e6
"""Of a tenant: its counter is tokens over its weight, which must stay a number."""


@dataclass(frozen=True, slots=True)
class Weights(check.Values):
    """Names with numbers above 0; kept as text, which commands and messages can carry."""

    def check(self, name: str, value: Any) -> str:
        pairs = value
        if isinstance(value, str):
            pairs = dict(one.rpartition("=")[::2] for one in filter(None, value.split(",")))
        try:
            weights = {tenant: check.as_float(weight) for tenant, weight in pairs.items()}
        except (AttributeError, TypeError, ValueError):
            weights = {"": 0.0}
        if any(
            not isinstance(tenant, str)
            or not tenant
            or "," in tenant
            or not LEAST_WEIGHT <= weight <= MOST_WEIGHT
            for tenant, weight in weights.items()
        ):
            shown = value[:64] if isinstance(value, str) else str(weights)[:64]
            raise InvalidRequestError(
                name,
                f"must be names with numbers from {LEAST_WEIGHT:g} to {MOST_WEIGHT:g} such as gold=4,free=1, "
                f"not {shown!r}",
            )
        return ",".join(f"{tenant}={weight:g}" for tenant, weight in weights.items())

    def __str__(self) -> str:
        return "names with numbers (gold=4,free=1)"


def read_weights(text: str) -> tuple[tuple[str, float], ...]:
    """What `Weights` keeps as text."""
    pairs = (one.rpartition("=") for one in filter(None, text.split(",")))
    return tuple((tenant, float(weight)) for tenant, _, weight in pairs)


@dataclass(frozen=True, slots=True)
class File(check.Values):
    def check(self, name: str, value: Any) -> Path | str:
        if not isinstance(value, Path | str):
            raise InvalidRequestError(name, f"must be a path, not {check.shown(value)}")
        return value

    def __str__(self) -> str:
        return "a path"


class EngineOptions(TypedDict, total=False):
    """The options of `EngineConfig` as keywords, for editors; a test keeps the two equal."""

    device: str
    dtype: str
    quantization: str
    kernels: str
    max_model_len: int | None
    max_num_seqs: int | None
    max_batched_tokens: int | None
    block_size: int
    kv_cache_memory: int | float | str | None
    kv_cache_dtype: str
    host_cache_memory: int | str
    prefix_caching: bool
    skip_tokenizer_init: bool
    cuda_graphs: bool
    tensor_parallel_size: int
    speculation: str
    num_speculative_tokens: int | None
    acceptance: str
    policy: Literal["fcfs", "priority", "fair"]
    tenant_weights: Mapping[str, float] | str
    target_token_time: float | str | None
    target_first_token: float | str | None
    gives_way: Literal["first_token", "token_time"]
    max_loras: int
    lora_memory: int | str
    lora_slot_memory: int | str | None
    step_log: Path | str | None


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Engine options, with defaults that suit most: the one table of them. Checks, options of
    commands, settings files and docs follow from it.
    """

    device: str = check.pattern(
        "auto",
        r"auto|cpu|cuda(:\d+)?",
        "auto, cpu, cuda or cuda:N",
        help="Where to compute; auto: on a GPU if there is one.",
    )
    dtype: str = check.choice(
        "auto",
        "auto",
        "float32",
        "bfloat16",
        "float16",
        help="Number format; auto: the fastest on the device.",
    )
    """auto is float32 for quantised weights on a CPU, so that every CPU gives the same answers."""
    quantization: str = check.choice(
        "auto",
        "auto",
        "none",
        "int8",
        "int4",
        "fp8",
        help="auto: quantised weights as they are; none: expand them; int8, int4, fp8 (GPU): quantise plain ones.",
    )
    """auto computes with quantised weights as they are stored where there are kernels for it, and
    expands them elsewhere. int8 and fp8 have a scale per output, int4 one per 32 numbers; plain
    weights are quantised while they are loaded.
    """
    kernels: str = check.choice(
        "auto",
        "auto",
        "reference",
        "cpu",
        "triton",
        help="auto: the fastest that run here; reference: plain torch.",
    )
    max_model_len: int | None = check.whole(
        None,
        1,
        optional=True,
        help="Longest sequence, prompt and answer; default: the model's own.",
    )
    """Or what the cache can hold, if that is less."""
    max_num_seqs: int | None = check.whole(
        None,
        1,
        optional=True,
        help="Answers computed at once; default 64 on a CPU, 256 on a GPU.",
    )
    max_batched_tokens: int | None = check.whole(
        None,
        1,
        optional=True,
        help="Tokens computed in one step; default 512 on a CPU, on a GPU 16384 (serve: 8192).",
    )
    """Longer prompts are computed in chunks."""
    block_size: int = check.whole(16, 1, help="Tokens per block of the cache.")
    kv_cache_memory: int | float | str | None = check.parameter(
        None,
        Memory(low=1, fraction=True),
        optional=True,
        cli=True,
        help="Memory for keys and values: 2GiB, or a fraction of what is free; default 0.25 on a CPU, 0.9 on a GPU.",
    )
    """Bytes (`2**30`, "2GiB") are those of all devices together; a fraction is of what weights and
    activations leave free on each one.
    """
    kv_cache_dtype: str = check.choice(
        "auto",
        "auto",
        "model",
        "int8",
        "fp8",
        help="Keys and values; int8: on a CPU; fp8: half of bfloat16; auto: on a GPU fp8 if the checkpoint says so.",
    )
    """model stores them in the model's dtype; int8 in a byte each and a scale per token and head,
    about a quarter of float32; fp8 with the checkpoint's scales if it has any, on a CPU slower than
    int8. Answers change a little with int8 and fp8.
    """
    host_cache_memory: int | str = check.parameter(
        0,
        Memory(low=0),
        cli=True,
        help="Host memory below the prefix cache, such as 4GiB; 0: none.",
    )
    prefix_caching: bool = check.flag(True, help="Share the computed blocks of equal prefixes.")
    skip_tokenizer_init: bool = check.flag(
        False, help="Load no tokenizer: prompts and answers are token ids."
    )
    """For folders without one."""
    cuda_graphs: bool = check.flag(
        True, help="Capture decode steps and launch them as a whole. Same answers."
    )
    """On a CPU they are recorded and made again without Python."""
    tensor_parallel_size: int = check.whole(
        1, 1, help="Divide the model among N GPUs (on a CPU: N processes). Same answers."
    )
    """The first GPUs (with cuda:N all on that one, which is for tests), or with the device cpu
    processes that share the cores.
    """
    speculation: str = check.pattern(
        "off",
        r"off|ngram|self|mtp|draft:.+",
        "off, ngram, self, mtp or draft:MODEL",
        help="Draft tokens and check several at once: from repetitions, a layer for it or a model. Same answers.",
    )
    """ngram: what followed the last time the same tokens occurred in the text; self: the same
    weights in 4 bits; mtp: the checkpoint's own layer for multi-token prediction; draft:MODEL: a
    smaller model with the same vocabulary.
    """
    num_speculative_tokens: int | None = check.whole(
        None,
        1,
        31,
        optional=True,
        help="Draft so many tokens at a time; without it, as many as pay. Same answers.",
    )
    """vLLM's name. A fixed number is for measuring: what pays depends on how often draft tokens are
    right and on how many requests run.
    """
    acceptance: str = check.choice(
        "exact",
        "exact",
        "rejection",
        help="Accept drafts that equal the sampled token (exact), or by rejection sampling.",
    )
    """With rejection sampling tokens keep their probabilities, but answers depend on the drafts."""
    policy: Literal["fcfs", "priority", "fair"] = check.choice(
        "fcfs",
        "fcfs",
        "priority",
        "fair",
        help="Who goes first: by arrival; by priority and arrival; or by fair shares of tenants (keys).",
    )
    """fair: the tenant for whom the fewest tokens were computed; among its own requests as priority
    does.
    """
    tenant_weights: Mapping[str, float] | str = check.parameter(
        "",
        Weights(),
        cli=True,
        help="Shares under policy fair, such as gold=4,free=1; whoever is not named has 1.",
    )
    """A server takes them from its keys' file."""
    target_token_time: float | str | None = check.parameter(
        None,
        Duration(),
        optional=True,
        cli=True,
        help="Compute prompts in pieces so small that answers get a token in this time, such as 40ms.",
    )
    """A target, not a bound: the first steps of a size are not known yet, and a few tokens of
    prompts are always computed.
    """
    target_first_token: float | str | None = check.parameter(
        None,
        Duration(),
        optional=True,
        cli=True,
        help="When a request should have its first token, such as 2s; needs target_token_time.",
    )
    gives_way: Literal["first_token", "token_time"] = check.choice(
        "first_token",
        "first_token",
        "token_time",
        help="Which of the two targets is missed where both can't be held.",
    )
    max_loras: int = check.whole(
        32, 0, 4096, help="Different adapters (LoRA) that are computed at once; 0: none are taken."
    )
    """Requests with other adapters wait for one of these to be done; adapters that nobody waits for
    stay in host memory.
    """
    lora_memory: int | str = check.parameter(
        "4GiB", Memory(low=1), cli=True, help="Host memory for loaded adapters, such as 4GiB."
    )
    """When it is full, adapters that no request has leave it, and are read again when needed."""
    lora_slot_memory: int | str | None = check.parameter(
        None,
        Memory(low=0),
        optional=True,
        cli=True,
        help="Memory of each GPU for running requests' adapters, such as 3GiB; default: what those of --lora take.",
    )
    """Half of what `kv_cache_memory` leaves free is for them, too."""
    step_log: Path | str | None = check.parameter(  # noqa: RUF009
        None, File(), optional=True, cli=True, help="Write every step to this file, as JSON lines."
    )

    def __post_init__(self) -> None:
        check.check_fields(self)

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> EngineConfig:
        """From options by name, of which an unknown one is an error that lists the known ones."""
        for name in options:
            if name not in cls.__dataclass_fields__:
                raise cls.unknown(name)
        return cls(**options)

    @classmethod
    def unknown(cls, name: str) -> InvalidRequestError:
        known = ", ".join(cls.__dataclass_fields__)
        return InvalidRequestError(name, f"is no engine option; there are: {known}")

    def limits(self, *, on_gpu: bool) -> EngineLimits:
        """The limits on a GPU or a CPU, with its defaults where none were given."""
        default = _GPU_LIMITS if on_gpu else _CPU_LIMITS
        max_num_seqs = self.max_num_seqs or default.max_num_seqs
        return EngineLimits(
            max_num_seqs,
            self.max_batched_tokens or default.max_batched_tokens,
            default.kv_cache_memory if self.kv_cache_memory is None else self.kv_cache_memory,
            max(max_num_seqs, 512) if on_gpu and self.cuda_graphs else 0,
        )


def cache_dir() -> Path:
    """`$QUIRE_HOME`, else `$XDG_CACHE_HOME/quire`, else `~/.cache/quire`."""
    if home := os.environ.get("QUIRE_HOME"):
        return Path(home).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "quire"


def parse_bytes(field: str, value: int | str, low: int = 0) -> int:
    """A number of bytes, given as one or as text with a unit such as 512MiB or 2GB."""
    number: int | None = None
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*([a-z]*)\s*", value.lower())
        if match and match[2] in _UNITS:
            number = int(float(match[1]) * _UNITS[match[2]])
    elif isinstance(value, int) and not isinstance(value, bool):
        number = value
    if number is None or number < low:
        shown = repr(value[:64]) if isinstance(value, str) else check.shown(value)
        raise InvalidRequestError(
            field, f"must be a number of bytes such as 536870912, 512MiB or 2GB, not {shown}"
        )
    return number


def format_bytes(count: int) -> str:
    """A size for people."""
    size = float(count)
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"
