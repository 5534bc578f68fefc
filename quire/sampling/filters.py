"""Top-k, top-p and the other filters: which tokens are left to sample from."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from quire.kernels.noise import chances
from quire.kernels.ops import FILTERS
from quire.sampling.feature import NEUTRAL, Feature
from quire.sampling.metadata import Indices, SamplingMetadata, effective_temperature
from quire.step import AdmittedRequest


class Filters(Feature):
    """Divides by the temperature, then applies the filters in the order of
    `quire.kernels.ops.FILTERS`, each to the tokens that the one before left. Not for greedy
    requests, for which they change nothing.
    """

    switches = ("top_n_sigma", "top_k", "top_p", "min_p", "typical_p", "xtc_probability")
    settings = ("xtc_threshold",)
    in_float64 = ("xtc_probability",)
    divides = True

    def is_asked(self, admission: AdmittedRequest) -> bool:
        row, top_k = admission.row, self.numbers["top_k"]
        if top_k[row] >= self.vocab_size:
            top_k[row] = 0
        filters = any(self.numbers[name][row] != getattr(NEUTRAL, name) for name in self.switches)
        return filters and effective_temperature(admission.params) > 0

    def apply_(self, logits: Tensor, metadata: SamplingMetadata, which: Indices) -> None:
        own = {name: values[metadata.request_rows[which]] for name, values in self.numbers.items()}
        strikes = chances(metadata.seeds[which], metadata.positions[which]) < own["xtc_probability"]
        own["xtc_threshold"] = np.where(strikes, own["xtc_threshold"], np.inf)
        with np.errstate(divide="ignore"):
            own["log_min_p"] = np.log(own["min_p"].astype(np.float64))
        own["temperature"] = metadata.temperatures[which]
        limits = np.empty((len(which), len(FILTERS)), np.float32)
        for column, name in enumerate(FILTERS):
            limits[:, column] = own[name]
        self.kernels.filter_rows_(logits, *self.upload(which, limits))
