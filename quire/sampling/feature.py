"""What all features of the sampler have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.kernels.ops import Kernels
from quire.sampling.draws import Draws, Indices
from quire.sampling.upload import Uploader
from quire.sampling_params import SamplingParams
from quire.step import Admission

NEUTRAL = SamplingParams()
"""Asks for nothing: every field has its neutral value."""

Failures = Mapping[int, str | Tensor]
"""What went wrong with single draws: in words, or a bool on the device that says whether something did."""

_DTYPES = {int: np.int64, float: np.float32}


class Feature:
    """Changes the logits of the requests that ask for it, and keeps what it has to know of each request row.

    A subclass names the fields of SamplingParams it uses and says in `apply_` what it does. Nothing in it waits for the
    device, and a draw's logits depend on its own request alone.
    """

    switches: ClassVar[tuple[str, ...]]
    """Fields that ask for it by a value that is not neutral."""
    settings: ClassVar[tuple[str, ...]] = ()
    """Further fields it reads."""
    in_float64: ClassVar[tuple[str, ...]] = ()
    """Those of them that are kept in float64; other reals are in float32, as the logits are."""
    divides: ClassVar[bool] = False
    """Whether it divides by the temperature on the way."""

    def __init__(self, max_num_seqs: int, vocab_size: int, kernels: Kernels, uploader: Uploader) -> None:
        self.vocab_size = vocab_size
        self.kernels = kernels
        self.upload = uploader.upload
        self.numbers: dict[str, npt.NDArray[Any]] = {}
        """By field, those that are numbers, of all request rows."""
        for name in (*self.switches, *self.settings):
            kind = type(getattr(NEUTRAL, name))
            if kind in _DTYPES:
                self.numbers[name] = np.zeros(max_num_seqs, np.float64 if name in self.in_float64 else _DTYPES[kind])
        self.prepared: dict[int, Any] = {}
        """By request row, what `prepare` returned."""

    def admit(self, admission: Admission) -> bool:
        """Takes over what a new request asks for; whether that is anything."""
        row = admission.row
        for name, values in self.numbers.items():
            values[row] = getattr(admission.params, name)
        self.prepared.pop(row, None)
        is_asked = self.is_asked(admission)
        if is_asked:
            self.prepared[row] = self.prepare(admission)
        return is_asked

    def is_asked(self, admission: Admission) -> bool:
        return any(getattr(admission.params, name) != getattr(NEUTRAL, name) for name in self.switches)

    def prepare(self, admission: Admission) -> Any:
        """What it keeps of a request that asks, besides numbers: lists of token ids as tensors, for example."""

    def active(self, draws: Draws, which: Indices) -> Indices:
        """Those of the draws `which`, whose requests ask for it, where it changes something."""
        return which

    def apply_(self, logits: Tensor, draws: Draws, which: Indices) -> Failures | None:
        """Changes the rows `which` of float32 logits [draws, vocab] in one piece."""
        raise NotImplementedError

    def of(self, name: str, draws: Draws, which: Indices) -> npt.NDArray[Any]:
        """A number of the requests that some draws belong to."""
        return self.numbers[name][draws.request_rows[which]]

    def prepared_of(self, draws: Draws, which: Indices) -> list[Any]:
        """What was prepared for the requests that some draws belong to."""
        return [self.prepared[row] for row in draws.request_rows[which].tolist()]

    def flat_places(self, which: Indices, ids: list[Tensor]) -> Tensor:
        """Where in the flattened logits the token ids of some rows lie, one row's after the other's."""
        counts = np.array([len(one) for one in ids])
        first, repeats = self.upload(which * self.vocab_size, counts)
        return first.repeat_interleave(repeats, output_size=int(counts.sum())) + torch.cat(ids)
