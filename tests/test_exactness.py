"""The promise: the same request gives the same logits and tokens, bit for bit, whatever happens
around it.

Every scenario is compared with each request's run alone, computed in one chunk with an empty cache,
by `torch.equal` on the logits of every generated position.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.backends.select import select_kernels
from quire.checkpoints.checkpoint import StoredCache
from quire.engine import make_requests
from quire.kernels.ops import Kernels
from quire.kernels.reference import ReferenceKernels
from quire.models.decoder import Decoder
from quire.models.load import open_model
from quire.runner.recorded import RecordedSteps
from quire.sampling_params import SamplingParams
from tests.decoding import load_decoder
from tests.long_runs import IS_LONG, IS_QUICK, short_or_long
from tests.random_models import SPECS, Bench, Transcript, random_decoder

CPU = torch.device("cpu")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def make_kernels(name: str, dtype: torch.dtype) -> Kernels:
    return ReferenceKernels() if name == "reference" else select_kernels(CPU, dtype, name)


def workload(
    count: int, seed: int, longest: int = 150
) -> tuple[list[list[int]], list[SamplingParams]]:
    """Requests of mixed lengths and parameters, some with common beginnings."""
    source = random.Random(seed)
    shared = [source.randrange(97) for _ in range(longest)]
    prompts, params = [], []
    for i in range(count):
        length = source.choice([1, 2, 15, 16, 17, 31, 32, 33, 48, longest // 2, longest])
        common = source.choice([0, 0, 16, 40]) % (length + 1)
        prompts.append(shared[:common] + [source.randrange(97) for _ in range(length - common)])
        params.append(
            SamplingParams(
                temperature=source.choice([0.0, 0.0, 0.7, 1.3]),
                top_k=source.choice([0, 5]),
                top_p=source.choice([1.0, 0.8]),
                seed=source.randrange(2**64),
                max_tokens=source.choice([1, 2, 16, 24]),
            )
        )
        assert prompts[i]
    return prompts, params


def solo(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    **options: Any,
) -> Transcript:
    """Each request alone: its own engine, its prompt in one chunk, nothing cached."""
    together = Transcript()
    for i, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
        alone = Bench(decoder, num_blocks=80, max_num_seqs=1, **options).run(
            [prompt], [one], ids=[i]
        )
        together.tokens |= alone.tokens
        together.logits |= alone.logits
    return together


def assert_same(got: Transcript, expected: Transcript) -> None:
    assert got.tokens == expected.tokens
    # With several steps in flight a request is computed on for a few tokens before its end is
    # known.
    assert got.logits.keys() >= expected.logits.keys()
    for key, logits in expected.logits.items():
        assert torch.equal(got.logits[key], logits), f"request {key[0]}, position {key[1]}"


LENGTHS = [(0, 1), (40, 60), (40, 7), (16, 17), (0, 90), (32, 1), (0, 33), (40, 120)]
SHORT_LENGTHS = [(0, 1), (16, 11), (16, 3)]
"""Of the real model's prompts: tokens shared, tokens of its own."""

SCENARIOS: dict[str, dict[str, Any]] = {
    "one batch": {},
    "few rows": {"max_num_seqs": 3},
    "chunks of 7": {"max_num_seqs": 4, "max_batched_tokens": 7},
    "chunks of 16": {"max_num_seqs": 12, "max_batched_tokens": 16},
    "chunks of 64": {"max_num_seqs": 24, "max_batched_tokens": 64},
    "no prefix cache": {"prefix_caching": False},
    "blocks of 4": {"block_size": 4},
    "nothing recorded": {"recorded": False},
    "preempted every third step": {
        "preempt_every": 3,
        "max_batched_tokens": 64,
        "max_num_seqs": 24,
    },
    "swapped every third step": {
        "preempt_every": 3,
        "num_host_blocks": 64,
        "max_batched_tokens": 96,
    },
    "hardly any memory": {"num_blocks": 24, "max_batched_tokens": 96},
    "two steps in flight": {"depth": 2, "max_num_seqs": 12, "max_batched_tokens": 64},
    "three in flight, preempted": {
        "depth": 3,
        "preempt_every": 3,
        "max_batched_tokens": 64,
        "max_num_seqs": 24,
    },
    "hardly any memory and a host tier": {
        "num_blocks": 24,
        "num_host_blocks": 12,
        "max_batched_tokens": 96,
    },
}
OF_EVERY_FAMILY = (
    "one batch",
    "chunks of 7",
    "blocks of 4",
    "nothing recorded",
    "swapped every third step",
)
"""What shapes a layer's input: how many rows and tokens, where its cache lies, how a step is run."""
OF_ALL_KINDS = {"llama": "bfloat16", "smollm3": "float32", "qwen3_moe": "bfloat16"}
"""Those that meet every scenario in the short form, too, in this dtype: dense, windows, experts."""


def families_and_dtypes() -> list[tuple[str, str]]:
    """Those of all kinds in both dtypes; the others in turn in one of them, if this is not the long
    form.
    """
    both = list(DTYPES)
    return [
        (family, dtype)
        for number, family in enumerate(SPECS)
        for dtype in (both if IS_LONG or family in OF_ALL_KINDS else [both[number % 2]])
    ]


@pytest.mark.few(3)
@pytest.mark.soak
@pytest.mark.parametrize(("family", "dtype"), families_and_dtypes())
def test_every_family_is_exact_in_every_scenario(family: str, dtype: str) -> None:
    decoder = random_decoder(SPECS[family], make_kernels("auto", DTYPES[dtype]), DTYPES[dtype])
    is_whole = IS_LONG or OF_ALL_KINDS.get(family) == dtype
    count = short_or_long(16, 24) if is_whole else 10
    prompts, params = workload(count, seed=len(family))
    expected = solo(decoder, prompts, params)
    windows = [layer.mixer.sliding_window for layer in decoder.spec.layers]
    for name in SCENARIOS if is_whole else OF_EVERY_FAMILY:
        options = SCENARIOS[name]
        if "hardly" in name and any(windows):  # these need less
            options = {**options, "num_blocks": 13}
        got = Bench(decoder, **options).run(prompts, params)
        assert_same(got, expected)
        if "every third" in name or ("hardly" in name and not all(windows)):
            assert got.preemptions > 0, name
        if "swapped" in name:
            assert got.host_tokens + got.cached_tokens > 0


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("family", ["smollm3", "deepseek_v3"])
def test_a_cache_of_8_bits_is_exact_too(family: str, stored: torch.dtype, dtype: str) -> None:
    """The one of FP8 has scales, as a checkpoint may have them."""
    spec = replace(SPECS[family], cache=StoredCache("fp8", {0: (0.037, 1.9), 1: (0.4, 0.01)}))
    decoder = random_decoder(spec, make_kernels("auto", DTYPES[dtype]), DTYPES[dtype])
    prompts, params = workload(12, seed=3)
    expected = solo(decoder, prompts, params, cache_dtype=stored)
    for name, options in SCENARIOS.items():
        if (
            (
                stored == torch.int8
                and not IS_QUICK
                and (family == "smollm3") == (dtype == "float32")
            )
            or IS_LONG
            or name in (*OF_EVERY_FAMILY, "hardly any memory and a host tier")
        ):
            assert_same(
                Bench(decoder, cache_dtype=stored, **options).run(prompts, params), expected
            )
    plain = solo(decoder, prompts, params).logits
    differences = [
        (expected.logits[key] - plain[key]).abs().max()
        for key in expected.logits.keys() & plain.keys()
    ]
    assert 0 < min(differences) < 0.1 * plain[next(iter(plain))].abs().max()


def test_latent_attention_is_exact_too() -> None:
    """In a few scenarios, without experts, which take most of the time: so its steps are recorded."""
    latent = SPECS["deepseek_v3"]
    dense = replace(latent, layers=latent.layers[:1] * 2)
    decoder = random_decoder(dense, make_kernels("auto", torch.bfloat16), torch.bfloat16)
    prompts, params = workload(8, seed=4)
    expected = solo(decoder, prompts, params)
    assert RecordedSteps.fit(decoder)
    for name in (*OF_EVERY_FAMILY, "hardly any memory and a host tier"):
        assert_same(Bench(decoder, **SCENARIOS[name]).run(prompts, params), expected)


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_reference_kernels_are_exact_too(dtype: str) -> None:
    decoder = random_decoder(SPECS["qwen3_moe"], ReferenceKernels(), DTYPES[dtype])
    # Where a CPU has no instructions for it, torch's products in bfloat16 take a hundred times as
    # long.
    prompts, params = workload(
        8 if dtype == "float32" else 4, seed=5, longest=70 if dtype == "float32" else 40
    )
    expected = solo(decoder, prompts, params)
    for name in (
        "one batch",
        "chunks of 7",
        "preempted every third step",
        "hardly any memory and a host tier",
    ):
        assert_same(Bench(decoder, **SCENARIOS[name]).run(prompts, params), expected)


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", DTYPES)
def test_sixty_four_requests_in_any_order_equal_each_alone(dtype: str) -> None:
    decoder = random_decoder(SPECS["llama"], make_kernels("auto", DTYPES[dtype]), DTYPES[dtype])
    prompts, params = workload(64, seed=11)
    expected = solo(decoder, prompts, params)
    for seed in range(short_or_long(3, 3, quick=1)):
        order = list(range(64))
        random.Random(seed).shuffle(order)
        got = Bench(decoder).run([prompts[i] for i in order], [params[i] for i in order], ids=order)
        assert_same(got, expected)


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunk", [7, 1, 16, 64, 512])
def test_a_long_prompt_has_the_same_bits_in_chunks_of_any_size(chunk: int, dtype: str) -> None:
    decoder = random_decoder(SPECS["smollm3"], make_kernels("auto", DTYPES[dtype]), DTYPES[dtype])
    prompt = [random.Random(3).randrange(97) for _ in range(700)]
    params = SamplingParams(temperature=0, max_tokens=8)
    whole = Bench(decoder, max_num_seqs=1, max_batched_tokens=1024).run([prompt], [params])
    parts = Bench(decoder, max_num_seqs=1, max_batched_tokens=chunk).run([prompt], [params])
    assert parts.steps >= 700 // chunk
    assert_same(parts, whole)


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", DTYPES)
def test_prefix_hits_at_every_block_boundary_change_nothing(dtype: str) -> None:
    decoder = random_decoder(SPECS["qwen3"], make_kernels("auto", DTYPES[dtype]), DTYPES[dtype])
    source = random.Random(8)
    base = [source.randrange(97) for _ in range(130)]
    params = SamplingParams(temperature=0.9, seed=4, max_tokens=6)
    for boundary in (*range(0, 129, 16), 1, 15, 17, 129):
        prompt = base[:boundary] + [source.randrange(97) for _ in range(130 - boundary)]
        expected = Bench(decoder).run([prompt], [params])
        warm = Bench(decoder)
        warm.run([base], [SamplingParams(max_tokens=1)], ids=["warm"])
        got = warm.run([prompt], [params])
        assert got.cached_tokens == boundary // 16 * 16
        assert_same(got, expected)


@pytest.mark.parametrize("length", [16, 32, 48, 15, 17])
def test_a_prompt_that_is_wholly_cached_still_computes_one_token(length: int) -> None:
    decoder = random_decoder(SPECS["llama"], make_kernels("auto", torch.float32), torch.float32)
    prompt = [random.Random(length).randrange(97) for _ in range(length)]
    params = SamplingParams(temperature=0, max_tokens=20)
    bench = Bench(decoder)
    first = bench.run([prompt], [params])
    again = bench.run([prompt], [params])
    assert again.cached_tokens == (length - 1) // 16 * 16
    assert_same(again, first)


def test_cached_prefix_meets_preemption() -> None:
    decoder = random_decoder(SPECS["llama"], make_kernels("auto", torch.float32), torch.float32)
    prompt = [random.Random(1).randrange(97) for _ in range(64)]
    params = [SamplingParams(temperature=0.8, seed=i, max_tokens=30) for i in range(6)]
    expected = solo(decoder, [prompt] * 6, params)
    got = Bench(decoder, preempt_every=2).run([prompt] * 6, params)
    assert got.preemptions > 5
    assert got.cached_tokens > 0
    assert_same(got, expected)


@pytest.mark.few(3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [1, 2, 16, 17, 50])
def test_n_answers_equal_n_requests_with_their_seeds(length: int, dtype: str) -> None:
    decoder = random_decoder(SPECS["mistral"], make_kernels("auto", DTYPES[dtype]), DTYPES[dtype])
    prompt = [random.Random(2).randrange(97) for _ in range(length)]
    together = Bench(decoder).run(
        [prompt], [SamplingParams(seed=2**64 - 2, n=5, max_tokens=20)], ids=["r"]
    )
    seeds = [(2**64 - 2 + i) % 2**64 for i in range(5)]
    singles = solo(
        decoder, [prompt] * 5, [SamplingParams(seed=seed, max_tokens=20) for seed in seeds]
    )
    # All but the last token; of a last block that is full, none: it is not copied.
    assert together.cached_tokens == 4 * (length - 1 if length % 16 else length - 16)
    assert [together.tokens[f"r/{i}"] for i in range(5)] == [
        singles.tokens[str(i)] for i in range(5)
    ]
    assert len({tuple(tokens) for tokens in together.tokens.values()}) == 5
    for i in range(5):
        for position in range(length, length + 20):
            assert torch.equal(
                together.logits[f"r/{i}", position], singles.logits[str(i), position]
            )


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ["mistral", "qwen3_moe"])
def test_what_goes_on_from_a_partly_filled_block_equals_requests_of_their_own(
    family: str, dtype: str
) -> None:
    decoder = random_decoder(SPECS[family], make_kernels("auto", DTYPES[dtype]), DTYPES[dtype])
    bench = Bench(decoder)
    (leader,) = make_requests("leader", range(30), SamplingParams(max_tokens=20), 1)
    leader.caches_partial_block = True
    bench.core.add_request(leader, 0.0)
    bench.drive(Transcript())
    params = [SamplingParams(temperature=i % 2 * 0.8, seed=i, max_tokens=12) for i in range(9)]
    positions = [1, 16, 17, 29, 31, 32, 33, 48, 49]
    prompts = [[*leader.token_ids[:position], 96, 95] for position in positions]
    got = Transcript()
    for i, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
        bench.core.add_request(make_requests(str(i), prompt, one, one.seed or 0)[0], 20.0)
    bench.drive(got)
    assert_same(got, solo(decoder, prompts, params))
    admitted = {
        a.request_id: a.num_cached_tokens for entry in bench.log for a in entry.step.admitted
    }
    # Its 49 computed tokens lie in three full blocks and one that holds a single one.
    assert [admitted[str(i)] for i in range(9)] == [0, 16, 16, 16, 16, 32, 32, 48, 49]


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize(
    ("dtype", "weights"), [("float32", "auto"), ("float32", "none"), ("bfloat16", "none")]
)
def test_the_real_model_is_exact(dtype: str, weights: str, smollm2_gguf: Path) -> None:
    """SmolLM2: batches, chunks, prefix hits, preemption, swapping and hardly any memory."""
    kernels = make_kernels("auto", DTYPES[dtype])
    decoder = load_decoder(
        open_model(smollm2_gguf), kernels, DTYPES[dtype], CPU, 1024, quantization=weights
    )
    source = random.Random(2)
    shared = [source.randrange(3, 49_152) for _ in range(40)]
    prompts = [
        shared[:common] + [source.randrange(3, 49_152) for _ in range(length)]
        for common, length in (LENGTHS if IS_LONG else SHORT_LENGTHS)
    ]
    new_tokens = short_or_long(3, 10)
    params = [
        SamplingParams(temperature=i % 3 * 0.5, seed=i, max_tokens=new_tokens)
        for i in range(len(prompts))
    ]
    expected = solo(decoder, prompts, params)
    for name in (
        "one batch",
        "chunks of 7",
        "swapped every third step",
        "hardly any memory and a host tier",
    ):
        assert_same(Bench(decoder, **SCENARIOS[name]).run(prompts, params), expected)


def test_block_placement_does_not_matter() -> None:
    """The same request where earlier ones have left the free list in another order each time."""
    decoder = random_decoder(SPECS["qwen2"], make_kernels("auto", torch.bfloat16), torch.bfloat16)
    prompt = [random.Random(6).randrange(97) for _ in range(100)]
    params = SamplingParams(temperature=0, max_tokens=10)
    expected = Bench(decoder).run([prompt], [params])
    for seed in range(4):
        bench = Bench(decoder, num_blocks=64, prefix_caching=False)
        bench.run(*workload(10, seed), ids=[f"before-{i}" for i in range(10)])
        assert_same(bench.run([prompt], [params]), expected)
