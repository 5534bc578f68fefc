"""Short prompts are computed by CUDA graphs, as one decode for each token: with the bits of any
other way.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from quire.models.decoder import Decoder
from quire.runner.batch import BatchShape
from quire.runner.graphs import DecodeGraphs
from tests.gpu.support import (
    GpuEngine,
    assert_same,
    decoder_of,
    mixed_jobs,
    plain_jobs,
    run_jobs,
    shape_of,
)

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", params=["qwen3-0.6b", "llama-3.2-1b", "qwen3-30b-a3b"])
def decoder(request: pytest.FixtureRequest) -> Decoder:
    return decoder_of(shape_of(request.param, num_layers=2))


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """How many steps with tokens that don't sample were computed by a graph, and how many tokens
    they had at most.
    """
    counts = {"steps": 0, "tokens": 0, "undrawn": 0}
    run = DecodeGraphs.run

    def observed(self: DecodeGraphs, shape: BatchShape, *arguments: Any) -> Any:
        found = run(self, shape, *arguments)
        if found is not None and not shape.samples.all():
            counts["steps"] += 1
            counts["tokens"] = max(counts["tokens"], len(shape.samples))
            counts["undrawn"] += not shape.samples.any()
        return found

    with monkeypatch.context() as patch:
        patch.setattr(DecodeGraphs, "run", observed)
        yield counts


@pytest.mark.parametrize(
    "options",
    [
        {"max_batched_tokens": 512},
        {"max_batched_tokens": 100, "max_num_seqs": 20, "prefix_caching": False},
        {"max_batched_tokens": 60, "max_num_seqs": 30, "depth": 1, "preempt_every": 5},
        {"max_batched_tokens": 250, "max_num_seqs": 40, "kv_cache_dtype": "fp8"},
        {"max_batched_tokens": 200, "max_num_seqs": 40, "speculation": "ngram"},
    ],
    ids=str,
)
def test_prompts_in_graphs_change_no_bit(
    decoder: Decoder, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every kind of request; prompts that fit one step and those that need several, beside answers."""
    jobs = [*mixed_jobs(36, 10_000, seed=1), *plain_jobs(36, 10_000, seed=2, longest=300)]
    format = {name: options[name] for name in options if name == "kv_cache_dtype"}
    expected = run_jobs(decoder, jobs, cuda_graphs=False, **format)
    engine = GpuEngine(
        decoder,
        options.get("depth"),
        **{k: v for k, v in options.items() if k not in ("depth", "preempt_every")},
    )
    plain = range(36, 72)
    for _ in range(3):  # graphs are captured on the way
        engine.run(jobs, plain, arrivals_per_step=3)
    with counted(monkeypatch) as counts:
        got = engine.run(
            jobs, plain, arrivals_per_step=3, preempt_every=options.get("preempt_every", 0)
        )
        assert_same(got, expected, plain)
        assert counts["steps"] >= 8
        assert counts["tokens"] > 40
        assert_same(engine.run(jobs, arrivals_per_step=5), expected, range(72))
        if options["max_batched_tokens"] <= 100 and not options.get("prefix_caching", True):
            long = next(number for number in plain if len(jobs[number].prompt) == 300)
            assert_same(engine.run(jobs, [long]), expected, [long])
            assert counts["undrawn"] >= 2


def test_long_contexts_are_left_to_kernels_that_share_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = decoder_of(shape_of("qwen3-0.6b", num_layers=2))
    job = next(
        job for job in plain_jobs(40, 10_000, seed=4, longest=3000) if len(job.prompt) == 3000
    )
    engine = GpuEngine(
        decoder, max_model_len=4000, max_num_seqs=8, max_batched_tokens=128, prefix_caching=False
    )
    for _ in range(3):
        engine.run([job] * 2)
    with counted(monkeypatch) as counts:
        answers = engine.run([job])
    assert 0 < counts["steps"] < 20  # of 24
    expected = run_jobs(decoder, [job], max_model_len=4000, cuda_graphs=False)
    assert_same(answers, expected, range(1))


def test_what_is_needed_is_captured_first() -> None:
    decoder = decoder_of(shape_of("qwen3-0.6b", num_layers=2))
    engine = GpuEngine(decoder)
    job = next(
        job
        for job in plain_jobs(40, 10_000, seed=4)
        if job.params.max_tokens == 17 and len(job.prompt) < 100
    )
    engine.run([job])
    graphs = engine.engine.runner._graphs
    assert isinstance(graphs, DecodeGraphs)
    assert next(size for size, *_ in graphs._replays) == graphs._sizes[-1]
    assert 1 in {size for size, *_ in list(graphs._replays)[:4]}
