"""What each of several engines on one machine gets: its own GPUs, or its share of the cores and of
the memory.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from quire.config import EngineConfig
from quire.errors import InvalidRequestError
from quire.process.granted import num_cores
from quire.server.config import EngineShare, ServerConfig

_DEVICES = "CUDA_VISIBLE_DEVICES"
_THREADS = "OMP_NUM_THREADS"


def divide(config: ServerConfig, environment: Mapping[str, str] = os.environ) -> list[ServerConfig]:
    """The configuration of each engine."""
    engine = EngineConfig.of(config.engine)
    gpus = [] if engine.device == "cpu" else visible_gpus(environment)
    if engine.device == "cuda" and not gpus:
        raise InvalidRequestError(
            "device", "is cuda, but there is no GPU here that could be given to a replica"
        )
    on_own_gpus = bool(gpus) and engine.device in ("auto", "cuda")
    count = config.replicas
    size = engine.tensor_parallel_size
    if on_own_gpus and count * size > len(gpus):
        each = "one GPU" if size == 1 else f"{size} GPUs (tensor_parallel_size)"
        raise InvalidRequestError(
            "replicas", f"are {count} with {each} each, but there are {len(gpus)} GPUs"
        )
    shares = []
    for number in range(count):
        options = dict(config.engine)
        if on_own_gpus:
            settings = {_DEVICES: ",".join(gpus[number * size : (number + 1) * size])}
        else:
            settings = (
                {}
                if _THREADS in environment or gpus
                else {_THREADS: str(max(1, num_cores() // count))}
            )
            options["kv_cache_memory"] = _part(engine, count, bool(gpus))
        if engine.step_log is not None:
            options["step_log"] = str(numbered(Path(engine.step_log), number))
        share = EngineShare(settings, f"engine {number}", block_events=True)
        shares.append(replace(config, engine=options, replicas=1, share=share))
    return shares


def numbered(path: Path, number: int) -> Path:
    """A file of its own for each engine: steps.jsonl becomes steps.0.jsonl."""
    return path.with_name(f"{path.stem}.{number}{path.suffix}")


def visible_gpus(
    environment: Mapping[str, str] = os.environ, devices: Path = Path("/dev")
) -> list[str]:
    """Those this process may use, as CUDA_VISIBLE_DEVICES names them; found without torch, which
    the HTTP process does not import.
    """
    named = environment.get(_DEVICES)
    if named is not None:
        found = []
        for one in (part.strip() for part in named.split(",")):
            if not one or one.startswith("-"):
                break  # CUDA stops at the first that is none
            found.append(one)
        return found
    numbers = (re.fullmatch(r"nvidia(\d+)", path.name) for path in devices.glob("nvidia*"))
    return [str(number) for number in sorted(int(match[1]) for match in numbers if match)]


def _part(engine: EngineConfig, count: int, on_gpu: bool) -> Any:
    """Engines on the same device share the part of its memory that one would take. A number of
    bytes is each one's.
    """
    memory = engine.limits(on_gpu=on_gpu).kv_cache_memory
    return memory / count if isinstance(memory, float) else memory
