"""Hidden states pooled into one vector per prompt: embeddings.

A prompt may be computed in chunks of any size, so the sum of its hidden states is kept between steps. It is kept in
whole numbers (fixed point), whose sum is the same in any order and any grouping: the same bits however the
prompt was cut, as exactness wants it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.step import Admission, Pooling, ScheduledRequest

_SCALE = 2.0**28
"""Steps per unit: finer than float32 is for numbers around 1, which is where final norms put hidden states."""
_LARGEST = 2.0**14
"""Up to this, two million tokens can be added up in 63 bits."""
_ROWS_AT_ONCE = 256
_NOT_NUMBERS = "the model's hidden states are not numbers, or too large to add up"


@dataclass(slots=True)
class _Pool:
    """One prompt, as far as it has been computed."""

    kind: Pooling
    num_prompt_tokens: int
    total: Tensor | None = None
    """int64 [hidden], for "mean"."""


class PoolingRows:
    """The permanent rows whose hidden states are wanted."""

    def __init__(self) -> None:
        self._pools: dict[int, _Pool] = {}

    def admit(self, admission: Admission) -> None:
        """A row begins anew, after a preemption too: then all of it is computed again."""
        self._pools.pop(admission.row, None)
        if admission.pooling is not None:
            self._pools[admission.row] = _Pool(admission.pooling, admission.num_prompt_tokens)

    def add(self, scheduled: Sequence[ScheduledRequest], hidden: Tensor, errors: dict[str, str]) -> dict[str, bytes]:
        """Takes in a step's hidden states [rows, hidden]; returns the vectors of the prompts that are complete."""
        pooled: dict[str, bytes] = {}
        offset = 0
        for entry in scheduled if self._pools else ():
            pool = self._pools.get(entry.row)
            if pool is not None:
                complete = entry.start + entry.num_tokens >= pool.num_prompt_tokens
                vector = _pool(pool, hidden[offset : offset + entry.num_tokens], complete)
                if complete:
                    del self._pools[entry.row]
                if vector is None:
                    errors[entry.request_id] = _NOT_NUMBERS
                elif complete:
                    pooled[entry.request_id] = vector
            offset += entry.num_tokens
        return pooled


def _pool(pool: _Pool, hidden: Tensor, complete: bool) -> bytes | None:
    """The vector if the prompt is complete, nothing yet if not; None if it can't be had."""
    if pool.kind == "last":
        return _unit_vector(hidden[-1].double()) if complete else b""
    for begin in range(0, len(hidden), _ROWS_AT_ONCE):
        rows = hidden[begin : begin + _ROWS_AT_ONCE].double()
        if not bool((rows.abs() < _LARGEST).all()):  # NaN is not less either
            return None
        part = (rows * _SCALE).round().long().sum(0)
        pool.total = part if pool.total is None else pool.total + part
    assert pool.total is not None
    return _unit_vector(pool.total.double()) if complete else b""


def _unit_vector(vector: Tensor) -> bytes | None:
    """Length 1, so neither the number of tokens nor the scale of fixed point matters."""
    norm = torch.linalg.vector_norm(vector)
    if not bool(norm.isfinite()):
        return None
    unit = vector / norm if bool(norm > 0) else vector
    return unit.float().cpu().numpy().astype("<f4").tobytes()
