"""Hidden states pooled into one vector per prompt: embeddings.

A prompt may be computed in chunks of any size, so the sum of its hidden states is kept between
steps. It is kept as integers (fixed point), whose sum does not depend on the order: the bits are
the same with any chunks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.runner.step_outputs import StepOutputs
from quire.step import AdmittedRequest, Pooling, ScheduledRequest

_SCALE = 2.0**28
"""Fixed-point steps per unit: finer than float32 near 1, which is the size of hidden states after a
final norm.
"""
_LARGEST = 2.0**14
"""The largest magnitude of a hidden state: two million tokens of this size can be added up in 63
bits.
"""
_ROWS_AT_ONCE = 256
_NOT_NUMBERS = "the model's hidden states are not numbers, or too large to add up"


class _Pool:
    """The pooled hidden states of the computed part of one prompt; on the device."""

    def __init__(self, kind: Pooling, num_prompt_tokens: int, device: torch.device) -> None:
        self.kind = kind
        self.num_prompt_tokens = num_prompt_tokens
        self.total = torch.zeros((), dtype=torch.int64, device=device)
        """For "mean" the sum, int64 [hidden], for "last" the last hidden state."""
        self.is_sound = torch.ones((), dtype=torch.bool, device=device)
        """Whether all hidden states were numbers below `_LARGEST`."""

    def take(self, hidden: Tensor) -> None:
        """The hidden states of the next tokens."""
        if self.kind == "last":
            self.total = hidden[-1].clone()
            return
        for begin in range(0, len(hidden), _ROWS_AT_ONCE):
            rows = hidden[begin : begin + _ROWS_AT_ONCE].double()
            self.is_sound = self.is_sound & (rows.abs() < _LARGEST).all()  # NaN is not less either
            self.total = self.total + (rows * _SCALE).round().long().sum(0)


class PoolingRows:
    """The request rows whose hidden states are wanted."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pools: dict[int, _Pool] = {}

    def admit(self, admission: AdmittedRequest) -> None:
        """A request row gets a new request, or one that was preempted and is computed again from
        its beginning.
        """
        self._pools.pop(admission.row, None)
        if admission.pooling is not None:
            self._pools[admission.row] = _Pool(
                admission.pooling, admission.num_prompt_tokens, self._device
            )

    @property
    def has_rows(self) -> bool:
        """Whether some request's hidden states are wanted."""
        return bool(self._pools)

    def add(
        self, outputs: StepOutputs, scheduled: Sequence[ScheduledRequest], hidden: Tensor
    ) -> None:
        """Takes in a step's hidden states [rows, hidden]; vectors of complete prompts go to
        `outputs`.
        """
        offset = 0
        for entry in scheduled if self._pools else ():
            pool = self._pools.get(entry.row)
            if pool is not None:
                pool.take(hidden[offset : offset + entry.num_tokens])
                if entry.start + entry.num_tokens >= pool.num_prompt_tokens:
                    del self._pools[entry.row]
                    _read_vector(outputs, entry.request_id, pool)
            offset += entry.num_tokens


def _read_vector(outputs: StepOutputs, request_id: str, pool: _Pool) -> None:
    """As long as it is: whoever wants it of length 1 divides it by its length."""
    scale = _SCALE * pool.num_prompt_tokens if pool.kind == "mean" else 1.0

    def read(tensors: Sequence[Tensor]) -> None:
        vector = (tensors[0].double() / scale).float()
        if not (tensors[1] and vector.isfinite().all()):
            outputs.errors[request_id] = _NOT_NUMBERS
            return
        outputs.pooled[request_id] = vector.numpy().astype("<f4").tobytes()

    outputs.add((pool.total, pool.is_sound), read)
