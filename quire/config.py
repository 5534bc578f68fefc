"""What a user may set about the engine. Frozen; what is derived from it and the machine is computed
elsewhere (`runner/memory.py`) and never written back."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

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
_CHOICES = {
    "dtype": ("auto", "float32", "bfloat16", "float16"),
    "quantization": ("auto", "none", "int8", "int4", "fp8"),
    "kv_cache_dtype": ("auto", "model", "int8", "fp8"),
    "kernels": ("auto", "reference", "cpu", "triton"),
    "policy": ("fcfs", "priority"),
    "acceptance": ("exact", "rejection"),
}


@dataclass(frozen=True, slots=True)
class Limits:
    """How much is computed at once, and how much memory the cache may take."""

    max_num_seqs: int
    max_batched_tokens: int
    kv_cache_memory: int | float | str
    graph_tokens: int = 0
    """The most tokens of a step that runs as a CUDA graph; 0 without graphs."""


_CPU_LIMITS = Limits(64, 512, 0.25)
_GPU_LIMITS = Limits(256, 16384, 0.9)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Engine options, with defaults that suit most."""

    device: str = "auto"
    """auto (a GPU if there is one), cpu, cuda or cuda:N."""
    dtype: str = "auto"
    """auto (what is fastest on the device; float32 for quantised weights on a CPU, so that every
    CPU gives the same answers), float32, bfloat16 or float16.
    """
    quantization: str = "auto"
    """What becomes of the weights: auto (quantised ones are computed with as they are stored, where
    there are kernels for it, and expanded elsewhere), none (all are expanded), int8 or fp8 (a scale
    per output; fp8 on a GPU) or int4 (a scale per 32 numbers), made of weights that are not
    quantised yet, while they are loaded.
    """
    kernels: str = "auto"
    """auto (the fastest that run here), reference (plain torch), cpu or triton."""
    max_model_len: int | None = None
    """The longest sequence, prompt and answer; None: the model's own limit, or what the cache can
    hold.
    """
    max_num_seqs: int | None = None
    """How many requests run at once; None: 64 on a CPU, 256 on a GPU."""
    max_batched_tokens: int | None = None
    """How many tokens one step computes at most; longer prompts are computed in chunks. None: 512
    on a CPU, 16384 on a GPU (8192 in a server).
    """
    block_size: int = 16
    """Tokens per block of the cache."""
    kv_cache_memory: int | float | str | None = None
    """Memory for keys and values: bytes (`2**30`, "2GiB") or a fraction of what weights and
    activations leave free (0.25); None: 0.25 on a CPU, 0.9 on a GPU. Bytes are those of all devices
    together, a fraction is of each one's.
    """
    kv_cache_dtype: str = "auto"
    """How keys and values are stored: model (in the model's dtype), int8 (on a CPU: a byte each and
    a scale per token and head, so about a quarter of float32), fp8 (half of bfloat16, with the
    checkpoint's scales if it has any; on a CPU slower than int8) or auto (fp8 on a GPU where the
    checkpoint says so, else model). Answers change a little.
    """
    host_cache_memory: int | str = 0
    """Memory of the host tier below the prefix cache, in bytes; 0 turns it off."""
    prefix_caching: bool = True
    """Whether requests share the computed blocks of equal prefixes."""
    skip_tokenizer_init: bool = False
    """Load no tokenizer: prompts are token ids, and so are answers, which have no text. For folders
    without one.
    """
    cuda_graphs: bool = True
    """Whether decode steps are captured and launched as a whole; on a CPU, recorded and made again
    without Python. The same bits either way.
    """
    tensor_parallel_size: int = 1
    """Over how many devices the model is divided: the first GPUs (with cuda:N all on that one,
    which is for tests), or with the device cpu over this many processes that share the cores.
    Answers don't depend on it.
    """
    speculation: str = "off"
    """Where draft tokens come from, several of which one step checks: off, ngram (what followed the
    last time the same tokens occurred in the text), self (the same weights in 4 bits) or
    draft:MODEL (a smaller model with the same vocabulary). The answers are the same with any of
    them.
    """
    acceptance: str = "exact"
    """Which guesses are accepted: exact (a guess that equals the token which would have been
    sampled: answers never change) or rejection (rejection sampling: tokens keep their
    probabilities, but answers depend on the guesses).
    """
    policy: Literal["fcfs", "priority"] = "fcfs"
    """The order of waiting requests: by arrival, or by priority and then arrival."""
    step_log: Path | str | None = None
    """A file to which every step is written as a line of JSON."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device):
            raise InvalidRequestError(
                "device", f"must be auto, cpu, cuda or cuda:N, not {self.device!r}"
            )
        if not re.fullmatch(r"off|ngram|self|draft:.+", self.speculation):
            raise InvalidRequestError(
                "speculation", f"must be off, ngram, self or draft:MODEL, not {self.speculation!r}"
            )
        for field, choices in _CHOICES.items():
            if (value := getattr(self, field)) not in choices:
                raise InvalidRequestError(
                    field, f"must be one of {', '.join(choices)}, not {value!r}"
                )
        for field in (
            "max_num_seqs",
            "max_batched_tokens",
            "max_model_len",
            "block_size",
            "tensor_parallel_size",
        ):
            value = getattr(self, field)
            if value is None and field not in ("block_size", "tensor_parallel_size"):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InvalidRequestError(
                    field, f"must be a whole number of at least 1, not {value!r}"
                )
        if isinstance(self.kv_cache_memory, float) and not 0 < self.kv_cache_memory <= 1:
            message = f"as a fraction of free memory must be above 0 and at most 1, not {self.kv_cache_memory}"
            raise InvalidRequestError("kv_cache_memory", message)
        if self.kv_cache_memory is not None and not isinstance(self.kv_cache_memory, float):
            parse_bytes("kv_cache_memory", self.kv_cache_memory, low=1)
        parse_bytes("host_cache_memory", self.host_cache_memory, low=0)

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> EngineConfig:
        """From options by name, of which an unknown one is an error that lists the known ones."""
        known = cls.__dataclass_fields__
        for name in options:
            if name not in known:
                raise InvalidRequestError(
                    name, f"is no engine option; there are: {', '.join(known)}"
                )
        return cls(**options)

    def limits(self, *, on_gpu: bool) -> Limits:
        """The limits on a GPU or a CPU, with its defaults where none were given."""
        default = _GPU_LIMITS if on_gpu else _CPU_LIMITS
        max_num_seqs = self.max_num_seqs or default.max_num_seqs
        return Limits(
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
        shown = value[:64] if isinstance(value, str) else value
        raise InvalidRequestError(
            field, f"must be a number of bytes such as 536870912, 512MiB or 2GB, not {shown!r}"
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
