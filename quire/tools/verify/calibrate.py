"""Opens the model of a log, if it is on this machine, and measures steps of sizes that the log does
not have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from quire.engine import SchedulerConfig
from quire.errors import QuireError
from quire.observe.step_log import LoggedEngine
from quire.step import StepLogEntry
from quire.tools.verify.replay import open_engine
from quire.tools.what_if.calibration import Calibrator, config_for

SECONDS = 10.0
"""Spent at most, loading not counted."""
SHARES = (0.6, 0.4)
"""Of them, the first time and the second: what was measured may lead to other sizes again."""


def model_of(
    logged: LoggedEngine, model: str | None, options: Mapping[str, Any]
) -> tuple[str, dict[str, Any]]:
    """The log's model, or `model` where it has another name here, and how it was opened. Raises
    QuireError where that can't be known, or not be done again.
    """
    named = logged.model
    if named is None:
        if model is None:
            raise QuireError("the log does not say its model: name it with --model")
        return model, dict(options)
    if named.tensor_parallel_size > 1:
        raise QuireError(f"its model was divided among {named.tensor_parallel_size} devices")
    asked = {name: value for name, value in options.items() if value != "auto"}
    known = {
        name: getattr(named, name) for name in ("device", "dtype", "quantization", "kv_cache_dtype")
    }
    return model or named.name, known | asked


def open_calibrator(
    model: str | None,
    logged: LoggedEngine,
    entries: Sequence[StepLogEntry],
    settings: Sequence[SchedulerConfig],
    options: Mapping[str, Any],
) -> Calibrator:
    """For steps of these settings. Raises QuireError where that can't be done. A `model` that was
    named may be downloaded, the log's own must be here.
    """
    name, chosen = model_of(logged, model, options)
    heard: list[StepLogEntry] = []
    logged = logged._replace(config=config_for(settings))
    try:
        engine = open_engine(name, logged, heard.append, offline=model is None, **chosen)
    except torch.OutOfMemoryError:
        raise QuireError(f"{name} does not fit in what is left of the device's memory") from None
    return Calibrator(engine.core, heard, engine.spec.vocab_size, name, logged, entries)
