"""The base class of the sampler's features."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.kernels.ops import Kernels
from quire.sampling.metadata import Indices, SamplingMetadata
from quire.sampling.upload import Uploader
from quire.sampling_params import SamplingParams
from quire.step import AdmittedRequest

NEUTRAL = SamplingParams()
"""Every field has its neutral value, with which no feature changes anything."""

Failures = Mapping[int, str | Tensor]
"""By sample, what went wrong: a message, or a bool on the device that says whether something
did.
"""

_DTYPES = {int: np.int64, float: np.float32}


class Feature:
    """Changes the logits of the requests that ask for it, and keeps their parameters by request
    row.

    A subclass names the fields of SamplingParams it uses and changes logits in `apply_`. It must
    not wait for the device, and a sample's logits may depend on its own request only.
    """

    switches: ClassVar[tuple[str, ...]]
    """Fields that turn the feature on by a value that is not neutral."""
    settings: ClassVar[tuple[str, ...]] = ()
    """Further fields it reads."""
    in_float64: ClassVar[tuple[str, ...]] = ()
    """Fields that are kept in float64; other real numbers are float32, as the logits are."""
    divides: ClassVar[bool] = False
    """Whether `apply_` divides the logits by the temperature, so that it must not be done again."""

    def __init__(
        self, max_num_seqs: int, vocab_size: int, kernels: Kernels, uploader: Uploader
    ) -> None:
        self.vocab_size = vocab_size
        self.kernels = kernels
        self.upload = uploader.upload
        self.numbers: dict[str, npt.NDArray[Any]] = {}
        """For each field that is a number: its values by request row."""
        for name in (*self.switches, *self.settings):
            kind = type(getattr(NEUTRAL, name))
            if kind in _DTYPES:
                self.numbers[name] = np.zeros(
                    max_num_seqs, np.float64 if name in self.in_float64 else _DTYPES[kind]
                )
        self.prepared: dict[int, Any] = {}
        """By request row, what `prepare` returned."""

    def admit(self, admission: AdmittedRequest) -> bool:
        """Takes over a new request's parameters; returns whether it asks for this feature."""
        row = admission.row
        for name, values in self.numbers.items():
            values[row] = getattr(admission.params, name)
        self.prepared.pop(row, None)
        is_asked = self.is_asked(admission)
        if is_asked:
            self.prepared[row] = self.prepare(admission)
        return is_asked

    def is_asked(self, admission: AdmittedRequest) -> bool:
        """Whether a request uses this feature at all: rows that don't are never looked at."""
        return any(
            getattr(admission.params, name) != getattr(NEUTRAL, name) for name in self.switches
        )

    def prepare(self, admission: AdmittedRequest) -> Any:
        """What to keep of a request that asks, besides numbers: token ids as tensors, for example."""

    def active(self, metadata: SamplingMetadata, which: Indices) -> Indices:
        """Of the samples `which`, whose requests ask for this feature, the ones where it changes
        something.
        """
        return which

    def apply_(self, logits: Tensor, metadata: SamplingMetadata, which: Indices) -> Failures | None:
        """Changes the rows `which` of contiguous float32 logits [samples, vocab]."""
        raise NotImplementedError

    def of(self, name: str, metadata: SamplingMetadata, which: Indices) -> npt.NDArray[Any]:
        """The value of a numeric field for each of the samples `which`."""
        return self.numbers[name][metadata.request_rows[which]]

    def prepared_of(self, metadata: SamplingMetadata, which: Indices) -> list[Any]:
        """What `prepare` returned, for each of the samples `which`."""
        return [self.prepared[row] for row in metadata.request_rows[which].tolist()]

    def flat_places(self, which: Indices, ids: list[Tensor]) -> Tensor:
        """Indices into the flattened logits: of the tokens `ids[i]` of row `which[i]`, row after
        row.
        """
        counts = np.array([len(one) for one in ids])
        first, repeats = self.upload(which * self.vocab_size, counts)
        return first.repeat_interleave(repeats, output_size=int(counts.sum())) + torch.cat(ids)
