"""Adapters on a GPU: a request has the bits that it has alone, whichever adapters the others have,
with graphs and without.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from quire.engine.invariants import check_invariants
from quire.kernels.reference import ReferenceKernels
from quire.models.decoder import Decoder
from quire.tools.bench.engine.adapters import write_adapter
from tests import test_adapters_exactness as small
from tests.adapters import KINDS, random_adapter
from tests.gpu.support import (
    DEVICE,
    GpuEngine,
    Job,
    assert_same,
    decoder_of,
    mixed_jobs,
    plain_jobs,
    shape_of,
)
from tests.gpu.test_families import gpu_spec, make_kernels
from tests.random_models import Bench, random_decoder
from tests.test_exactness import SCENARIOS as SMALL_SCENARIOS
from tests.test_exactness import assert_same as assert_same_small
from tests.test_exactness import workload

pytestmark = pytest.mark.gpu
NUM_ADAPTERS = 12
RANKS = (1, 8, 16, 33, 64)
SCENARIOS = {
    "backwards, a few at a time, small chunks, preempted": {
        "arrivals_per_step": 5,
        "preempt_every": 3,
        "max_batched_tokens": 300,
        "max_loras": 5,
    },
    "hardly any memory, a host tier": {
        "cache_tokens": 6000,
        "host_cache_memory": "1GiB",
        "preempt_every": 5,
        "max_loras": 8,
    },
    "without graphs": {"cuda_graphs": False, "max_loras": 12},
    "one step in flight": {"depth": 1, "max_loras": 3},
}


@pytest.fixture
def decoder() -> Decoder:
    return decoder_of(shape_of("qwen3-8b", num_layers=2))


def engine_with(
    decoder: Decoder, paths: list[Path], depth: int | None = None, **options: object
) -> tuple[GpuEngine, list[str]]:
    """An engine that has read the adapters, and their digests behind an empty one."""
    engine = GpuEngine(decoder, depth, **options)
    added = [engine.engine.adapters.add(str(i), path).digest for i, path in enumerate(paths)]
    return engine, ["", *added]


def test_requests_over_many_adapters_have_the_bits_they_have_alone(
    decoder: Decoder, tmp_path: Path
) -> None:
    paths = [
        write_adapter(tmp_path / str(i), decoder, RANKS[i % len(RANKS)], i)
        for i in range(NUM_ADAPTERS)
    ]
    vocab = decoder.spec.vocab_size
    plain = [*plain_jobs(100, vocab, seed=5), *mixed_jobs(24, vocab, seed=6)]
    source = random.Random(1)
    chosen = [source.choice([0, *range(NUM_ADAPTERS + 1)]) for _ in plain]
    everyone = range(len(plain))

    def jobs(digests: list[str]) -> list[Job]:
        return [
            Job(job.prompt, job.params, replace(job.resolved, adapter=digests[number]))
            for job, number in zip(plain, chosen, strict=True)
        ]

    engine, digests = engine_with(decoder, paths, max_loras=NUM_ADAPTERS)
    expected = engine.run(jobs(digests))
    assert not expected.errors
    check_invariants(engine.engine.core.scheduler)
    bare, none = GpuEngine(decoder), [""] * (NUM_ADAPTERS + 1)
    without = bare.run(jobs(none))
    own = [number for number in everyone if not chosen[number]]
    assert_same(expected, without, own)
    changed = [n for n in everyone if chosen[n] and expected.of([n]) != without.of([n])]
    assert len(changed) > len(plain) // 8
    del bare, engine
    order = random.Random(2).sample(everyone, len(plain))
    for name, options in SCENARIOS.items():
        how = {
            key: options[key] for key in ("arrivals_per_step", "preempt_every") if key in options
        }
        rest = {key: value for key, value in options.items() if key not in how}
        engine, digests = engine_with(decoder, paths, **rest)
        got = engine.run(jobs(digests), order, **how)
        assert_same(got, expected, everyone)
        if how:
            assert got.preemptions > 10, name
        del engine
    engine, digests = engine_with(decoder, paths, max_loras=2, prefix_caching=False)
    for number in everyone[::9]:
        assert_same(engine.run(jobs(digests), [number]), expected, [number])


def test_embedding_and_head_are_adapted_beside_graphs(tmp_path: Path) -> None:
    """Trained copies, tokens' rows and pairs: steps with them are computed without graphs, and keep
    nothing in graphs that are captured meanwhile. As many tokens as no tile divides.
    """
    spec = replace(shape_of("qwen3-8b", num_layers=1), vocab_size=4003)
    decoder = decoder_of(spec)
    paths = [
        random_adapter(tmp_path / str(i), decoder, i, RANKS[i % 5], size=0.05, kind=KINDS[i % 4])
        for i in range(6)
    ]
    plain = [
        *plain_jobs(30, spec.vocab_size, seed=5),
        *mixed_jobs(12, spec.vocab_size, seed=6),
    ]
    chosen = [random.Random(i).randrange(len(paths) + 1) for i in range(len(plain))]
    assert set(chosen) == set(range(7))
    everyone = range(len(plain))

    def jobs(digests: list[str]) -> list[Job]:
        return [
            Job(job.prompt, job.params, replace(job.resolved, adapter=digests[number]))
            for job, number in zip(plain, chosen, strict=True)
        ]

    engine, digests = engine_with(decoder, paths, max_loras=6)
    expected = engine.run(jobs(digests))
    assert not expected.errors
    again = engine.run(jobs(digests), everyone[::-1], arrivals_per_step=3, preempt_every=4)
    assert_same(again, expected, everyone)
    assert engine.run(jobs(["", *digests[1:2], *[""] * 5])).of(everyone) != expected.of(everyone)
    del engine
    engine, digests = engine_with(decoder, paths, max_loras=2, cuda_graphs=False)
    assert_same(engine.run(jobs(digests)), expected, everyone)
    for number in everyone[::7]:
        assert_same(engine.run(jobs(digests), [number]), expected, [number])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("family", ["qwen3_moe", "llama", "gemma2", "starcoder2"])
def test_logits_are_exact(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    kernels = make_kernels("triton", dtype)
    decoder = random_decoder(gpu_spec(family), kernels, dtype, device=str(DEVICE))
    prompts, params = workload(12, seed=7, longest=60)
    paths = small.make_adapters(tmp_path, decoder, 5)
    chosen = [random.Random(i).randrange(6) for i in range(12)]
    expected = small.solo(decoder, prompts, params, paths, chosen)
    for name in ("one batch", "chunks of 7", "swapped every third step"):
        found = Bench(decoder, adapters=paths, max_loras=3, **SMALL_SCENARIOS[name]).run(
            prompts, params, adapters=chosen
        )
        assert_same_small(found, expected)


def test_float32_logits_equal_the_cpus(tmp_path: Path) -> None:
    spec = gpu_spec("qwen3")
    prompts, params = workload(6, seed=8, longest=60)
    found = []
    for kernels, device in (
        (ReferenceKernels(), "cpu"),
        (make_kernels("triton", torch.float32), str(DEVICE)),
    ):
        decoder = random_decoder(spec, kernels, torch.float32, device=device)
        paths = [random_adapter(tmp_path / device / str(i), decoder, i, 4) for i in range(2)]
        bench = Bench(decoder, adapters=paths)
        found.append(bench.run(prompts, params, adapters=[i % 3 for i in range(6)]).logits)
    on_cpu, on_gpu = found
    first = {key: logits for key, logits in on_cpu.items() if key[1] == len(prompts[int(key[0])])}
    assert len(first) == 6
    for key, logits in first.items():
        torch.testing.assert_close(on_gpu[key].cpu(), logits, atol=5e-3, rtol=1e-3)
