"""Python functions that requests bring along."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.sampling.draws import Draws, Indices
from quire.sampling.feature import Failures, Feature
from quire.sampling_params import LogitsProcessor
from quire.step import Admission


class LogitsProcessors(Feature):
    """Calls `logits_processors`, once for each draw. A user's function may do anything, also wait
    for the device.

    If one raises or does not return logits, that draw fails. Whether it returned NaN or infinity is
    found on the device; such logits are not used.
    """

    switches = ("logits_processors",)

    def prepare(self, admission: Admission) -> tuple[LogitsProcessor, ...]:
        return admission.params.logits_processors

    def apply_(self, logits: Tensor, draws: Draws, which: Indices) -> Failures:
        failures: dict[int, str | Tensor] = {}
        for row, processors in zip(which.tolist(), self.prepared_of(draws, which), strict=True):
            history = draws.token_ids[draws.request_rows[row], : draws.positions[row]].clone()
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
