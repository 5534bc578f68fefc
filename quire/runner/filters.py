"""Which rows draw from less than everything, and what their filters are to the kernels."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from quire.kernels.ops import FILTERS, Kernels
from quire.runner.noise import chances
from quire.runner.sampling_batch import Indices, SamplingBatch


def filtered_rows(batch: SamplingBatch, vocab_size: int) -> Indices:
    """The rows that draw from less than everything."""
    asks = (batch["top_k"] > 0) & (batch["top_k"] < vocab_size)
    asks |= (batch["top_p"] < 1) | (batch["min_p"] > 0) | (batch["typical_p"] < 1)
    asks |= (batch["top_n_sigma"] > 0) | (batch["xtc_probability"] > 0)
    return np.flatnonzero(asks & (batch["temperature"] > 0))


def filter_(logits: Tensor, batch: SamplingBatch, rows: Indices, kernels: Kernels) -> None:
    """Divides `rows` of the logits by their temperature and filters them, in place."""
    own = batch.parameters[rows]
    limits = np.empty((len(rows), len(FILTERS)), np.float32)
    top_k = own["top_k"]
    with np.errstate(divide="ignore"):
        log_min_p = np.log(own["min_p"].astype(np.float64))
    strikes = chances(own["seed"], batch.position[rows]) < own["xtc_probability"]
    by_name = {
        "temperature": own["temperature"],
        "top_n_sigma": own["top_n_sigma"],
        "top_k": np.where(top_k < logits.shape[1], top_k, 0),
        "top_p": own["top_p"],
        "log_min_p": log_min_p,
        "typical_p": own["typical_p"],
        "xtc_threshold": np.where(strikes, own["xtc_threshold"], np.inf),
    }
    for column, name in enumerate(FILTERS):
        limits[:, column] = by_name[name]
    index, on_device = batch.upload(rows, limits)
    kernels.filter_rows_(logits, index, on_device)
