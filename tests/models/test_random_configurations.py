"""Every family against transformers over configurations that nobody chose: float32 logits within
1e-4 and the same greedy tokens.
"""

from __future__ import annotations

import copy
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.backends.cpu.kernels import CpuKernels
from quire.kernels.reference import ReferenceKernels
from quire.models.families import FAMILIES
from quire.models.load import open_model
from tests.decoding import all_logits, greedy, load_decoder
from tests.long_runs import short_or_long
from tests.models.random_configurations import (
    check_greedy,
    draw_values,
    load_reference,
    reference_logits,
    save_model,
)
from tests.models.test_recurrent_families import RECURRENT

CPU = torch.device("cpu")
TRIED = [family.name for family in FAMILIES if family.name not in RECURRENT]
SEEDS = short_or_long(6, 12)


def check_configuration(family: str, seed: int, folder: Path) -> None:
    rng = Random(f"{family} {seed}")
    values = draw_values(rng, family)
    save_model(rng, family, values, folder)
    model = load_reference(folder)
    prompt = [rng.randrange(values["vocab_size"]) for _ in range(rng.choice([15, 17, 40]))]
    expected = reference_logits(model, prompt)
    files = open_model(folder)
    for kernels in (ReferenceKernels(), CpuKernels()):
        decoder = load_decoder(files, kernels, torch.float32, CPU)
        assert_as_near(all_logits(decoder, prompt), expected, model, prompt)
    check_greedy(model, prompt, greedy(decoder, prompt, 8))


def assert_as_near(found: Tensor, expected: Tensor, model: Any, prompt: list[int]) -> None:
    """Within 1e-4; where float32 itself is further off, float64 says whose error that is."""
    if (found - expected).abs().max() <= 1e-4:
        return
    exact = reference_logits(copy.deepcopy(model).double(), prompt).double()
    theirs = (expected.double() - exact).abs().max().item()
    ours = (found.double() - exact).abs().max().item()
    assert ours <= max(1e-4, 2 * theirs), f"off by {ours}, transformers by {theirs}"


@pytest.mark.few(8)
@pytest.mark.soak
@pytest.mark.parametrize("family", TRIED)
@pytest.mark.parametrize("seed", range(SEEDS))
def test_drawn_configuration_matches_transformers(family: str, seed: int, tmp_path: Path) -> None:
    check_configuration(family, seed, tmp_path)
