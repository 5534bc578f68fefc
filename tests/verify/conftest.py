"""A tiny random model with the tokens of bytes, so that a whole round takes a second or two."""

from __future__ import annotations

from dataclasses import replace

import torch

from quire.assemble import assemble
from quire.config import EngineConfig
from quire.kernels.ops import Kernels
from quire.tools.verify.engines import Model
from tests.random_models import SPECS, random_decoder


def make_model(kernels: Kernels) -> Model:
    spec = replace(SPECS["llama"], vocab_size=256)
    decoder = random_decoder(spec, kernels, torch.float32)
    config = EngineConfig(
        max_num_seqs=1, max_batched_tokens=64, kv_cache_memory="1MiB", device="cpu"
    )
    return Model.around(assemble(decoder, config, name="tiny", eos_token_ids=(255,)))
