"""Python functions that requests bring along."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.sampling.feature import Failures, Feature
from quire.sampling.metadata import Indices, SamplingMetadata
from quire.sampling_params import LogitsProcessor
from quire.step import AdmittedRequest


class LogitsProcessors(Feature):
    """Calls `logits_processors`, once for each sample. A user's function may do anything, also wait
    for the device.

    If one raises or does not return logits, that draw fails. Whether it returned NaN or infinity is
    found on the device; such logits are not used.
    """

    switches = ("logits_processors",)

    def prepare(self, admission: AdmittedRequest) -> tuple[LogitsProcessor, ...]:
        return admission.params.logits_processors

    def apply_(self, logits: Tensor, metadata: SamplingMetadata, which: Indices) -> Failures:
        failures: dict[int, str | Tensor] = {}
        for row, processors in zip(which.tolist(), self.prepared_of(metadata, which), strict=True):
            history = metadata.token_ids[
                metadata.request_rows[row], : metadata.positions[row]
            ].clone()
            scores = logits[row].clone()
            try:
                for processor in processors:
                    scores = processor(history, scores)
                    if not isinstance(scores, Tensor) or scores.shape != logits[row].shape:
                        raise ValueError(
                            f"{processor!r} returned no logits of shape {tuple(logits[row].shape)}"
                        )
                scores = scores.to(logits)
            except (
                Exception
            ) as error:  # whatever a user's function raises must not reach the other rows
                failures[row] = f"a logits processor failed: {error!r}"
                continue
            is_bad = failures[row] = ~(scores < float("inf")).all()
            if logits.device.type != "cpu":
                scores = torch.where(is_bad, logits[row], scores)
            elif is_bad:  # on a CPU the value is there, and reading it is cheaper
                continue
            logits[row] = scores
        return failures
