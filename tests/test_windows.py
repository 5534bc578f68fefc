"""Blocks that have left every window are given back, and no bit of an answer changes for it."""

from __future__ import annotations

import pytest
import torch

from quire.models.decoder import Decoder
from quire.sampling_params import SamplingParams
from tests.decoding import all_logits
from tests.random_models import SPECS, Bench, random_decoder
from tests.test_exactness import make_kernels


def check_long_answers(decoder: Decoder, num_prompt: int, num_new: int) -> None:
    """Two requests in company, one of them preempted again and again: their logits are those of the
    whole sequence in a cache that gives nothing back; and while they run, they hold less than that
    would.
    """
    prompts = [[(7 * i + start) % 97 for i in range(num_prompt)] for start in (0, 5)]
    params = [SamplingParams(temperature=0, max_tokens=num_new)] * 2
    bench = Bench(decoder, preempt_every=29, max_batched_tokens=64)
    got = bench.run(prompts, params)
    assert got.preemptions > 0
    for name, prompt in enumerate(prompts):
        tokens = [*prompt, *got.tokens[str(name)]]
        whole = all_logits(decoder, tokens[:-1])
        for position in range(num_prompt, len(tokens)):
            assert torch.equal(got.logits[str(name), position], whole[position - 1]), position
    config = bench.core.scheduler.config
    steps = [entry.step for entry in bench.log]
    held = [
        config.num_usable_blocks - step.num_free_blocks for step in steps if step.num_running == 2
    ]
    assert min(held[-10:]) < 2 * config.blocks_for(num_prompt)


@pytest.mark.few(1)
@pytest.mark.parametrize("family", ["mistral", "gemma3_text", "gpt_oss"])
@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_long_answers_are_exact_and_hold_less(family: str, kernels: str) -> None:
    decoder = random_decoder(SPECS[family], make_kernels(kernels, torch.float32), torch.float32)
    check_long_answers(decoder, num_prompt=120, num_new=40)
