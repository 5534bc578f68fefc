"""The promise with adapters: a request has the bits that it has alone, whichever adapters the
others have, in every scenario of `test_exactness.py`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from quire.models.decoder import Decoder
from quire.sampling_params import SamplingParams
from tests.adapters import KINDS, random_adapter
from tests.long_runs import IS_LONG, short_or_long
from tests.random_models import SPECS, Bench, Transcript, random_decoder
from tests.test_exactness import DTYPES, SCENARIOS, assert_same, make_kernels, workload

RANKS = (1, 4, 16, 33)


def make_adapters(
    folder: Path, decoder: Decoder, count: int, kinds: Sequence[str] = KINDS
) -> list[Path]:
    return [
        random_adapter(
            folder / str(i),
            decoder,
            i,
            RANKS[i % len(RANKS)],
            kind=kinds[(i + i // len(RANKS)) % len(kinds)],
        )
        for i in range(count)
    ]


def solo(
    decoder: Decoder,
    prompts: list[list[int]],
    params: list[SamplingParams],
    paths: list[Path],
    chosen: list[int],
) -> Transcript:
    together = Transcript()
    for i, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
        own = [] if not chosen[i] else [paths[chosen[i] - 1]]
        alone = Bench(decoder, num_blocks=80, max_num_seqs=1, adapters=own).run(
            [prompt], [one], ids=[i], adapters=[len(own)]
        )
        together.tokens |= alone.tokens
        together.logits |= alone.logits
    return together


def check(
    folder: Path, family: str, dtype: str, count: int, num_adapters: int, names: list[str]
) -> None:
    decoder = random_decoder(SPECS[family], make_kernels("auto", DTYPES[dtype]), DTYPES[dtype])
    prompts, params = workload(count, seed=7, longest=60)
    paths = make_adapters(folder, decoder, num_adapters)
    chosen = [random.Random(i).randrange(num_adapters + 1) for i in range(count)]
    expected = solo(decoder, prompts, params, paths, chosen)
    plain = solo(decoder, prompts, params, [], [0] * count)
    differ = {str(i) for i, number in enumerate(chosen) if number}
    # the adapters do something, and only to those that have one
    for key, logits in plain.logits.items():
        if key in expected.logits and key[1] == len(prompts[int(key[0])]):
            assert torch.equal(logits, expected.logits[key]) == (key[0] not in differ)
    for name in names:
        found = Bench(decoder, adapters=paths, max_loras=3, **SCENARIOS[name]).run(
            prompts, params, adapters=chosen
        )
        assert_same(found, expected)


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ["qwen3_moe", "llama", "gemma2", "starcoder2"])
def test_requests_of_many_adapters_have_the_bits_they_have_alone(
    family: str, dtype: str, tmp_path: Path
) -> None:
    check(tmp_path, family, dtype, 12, 5, ["one batch", "chunks of 7", "swapped every third step"])


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"] if IS_LONG else ["qwen3_moe"])
def test_many_requests_over_twenty_adapters_in_every_scenario(family: str, tmp_path: Path) -> None:
    check(tmp_path, family, "float32", short_or_long(60, 200), 20, list(SCENARIOS))
