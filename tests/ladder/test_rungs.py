"""All rungs say the same; and who leaves a batch early makes room at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from quire import LLM
from quire.backends.cpu.kernels import CpuKernels
from quire.kernels.reference import ReferenceKernels
from quire.sampling_params import SamplingParams
from quire.tools.bench.jobs import Job, Lengths, TokenSource, random_jobs
from quire.tools.bench.ladder import experiments
from quire.tools.bench.ladder.engines import LadderEngines
from quire.tools.bench.ladder.rungs import find_rungs
from quire.tools.bench.ladder.settings import QUICK
from quire.tools.ladder.naive import generate_naive


@pytest.fixture
def llm(tiny_model: Path) -> Iterator[LLM]:
    with LLM(
        tiny_model, dtype="float32", max_num_seqs=2, kv_cache_memory="16MiB", max_model_len=256
    ) as llm:
        yield llm


@pytest.mark.slow
def test_all_rungs_give_identical_tokens_on_smollm2_in_float32(smollm2_gguf: Path) -> None:
    with LadderEngines(str(smollm2_gguf), "cpu", "float32", max_model_len=128) as engines:
        jobs = random_jobs(
            2, Lengths(1, 3), Lengths(2, 3), TokenSource(0, engines.spec.vocab_size), shared=16
        )
        rungs = find_rungs(engines, jobs, max_num_seqs=2)
        runs = {rung.number: rung.run("only pass") for rung in rungs if rung.run is not None}
        assert {1, 2, 3, 4, 5, 6, 7, 10} == runs.keys()
        assert {len(answer) for answer in runs[1].tokens} <= {2, 3}
        assert len({run.tokens for number, run in runs.items() if number != 7}) == 1
        by_number = {rung.number: rung for rung in rungs}
        assert by_number[6].kernels == by_number[7].kernels == "cpu"
        # Computed as the file stores them: other numbers, the same in the engine as in the naive
        # loop.
        assert by_number[7].expected is not None
        assert runs[7].tokens == by_number[7].expected()
        assert 5 * by_number[7].weight_bytes < by_number[6].weight_bytes


@pytest.mark.gpu
def test_on_a_gpu_rungs_on_the_same_kernels_give_identical_tokens(smollm2_gguf: Path) -> None:
    with LadderEngines(str(smollm2_gguf), "cuda", "float32", max_model_len=128) as engines:
        jobs = random_jobs(
            5, Lengths(2, 6), Lengths(8, 16), TokenSource(0, engines.spec.vocab_size), shared=32
        )
        said: dict[str, set[tuple[tuple[int, ...], ...]]] = {}
        for rung in find_rungs(engines, jobs, max_num_seqs=3):
            if rung.run is not None:
                said.setdefault(rung.kernels, set()).add(rung.run("only pass").tokens)
    assert "reference" in said
    assert {kernels: len(answers) for kernels, answers in said.items()} == dict.fromkeys(said, 1)


@pytest.mark.slow
def test_the_model_itself_is_asked_and_not_a_copy_of_the_first_rung(tiny_model: Path) -> None:
    with LadderEngines(str(tiny_model), "cpu", "float32", max_model_len=128) as engines:
        jobs = random_jobs(
            4, Lengths(2, 6), Lengths(5, 9), TokenSource(0, engines.spec.vocab_size), shared=32
        )
        rungs = [rung for rung in find_rungs(engines, jobs, max_num_seqs=2) if rung.run is not None]
        runs = [rung.run("pass") for rung in rungs if rung.run is not None]
        decoder = engines.get(kernels="reference", max_num_seqs=2).engine.decoder
        assert runs[0].tokens == tuple(
            tuple(generate_naive(decoder, job.token_ids, job.max_tokens)) for job in jobs
        )
        for rung, run in zip(rungs, runs, strict=True):
            assert run.tokens == (runs[0].tokens if rung.expected is None else rung.expected())
        assert [rung.number for rung in rungs if rung.expected is not None] == [7]
        for run in runs:
            assert len(run.latencies) == len(jobs)
            assert 0 < min(run.latencies) <= max(run.latencies) <= run.seconds
        by_number = {rung.number: run for rung, run in zip(rungs, runs, strict=True)}
        assert by_number[1].cache_bytes == 0
        # Two requests at once hold more than one; sharing the common tokens can only hold less.
        assert by_number[3].cache_bytes < by_number[5].cache_bytes <= by_number[4].cache_bytes


def test_a_new_salt_finds_nothing_of_another_pass(tiny_model: Path) -> None:
    with LadderEngines(str(tiny_model), "cpu", "float32", max_model_len=128) as engines:
        jobs = [Job(tuple(range(40)), 2)]
        rung = next(rung for rung in find_rungs(engines, jobs, 1) if rung.number == 5)
        assert rung.run is not None
        log = engines.get(kernels="reference", prefix_caching=True, max_num_seqs=1).engine.step_log
        assert log is not None
        rung.run("a")
        rung.run("b")
        rung.run("b")
        cached = [admission.num_cached_tokens for entry in log for admission in entry.step.admitted]
        assert cached == [0, 0, 32]


def test_rungs_that_cannot_run_say_why(tiny_model: Path) -> None:
    with LadderEngines(str(tiny_model), "cpu", "float32", max_model_len=128) as engines:
        rungs = find_rungs(engines, [Job((1,), 1)], 1)
    assert [rung.number for rung in rungs] == list(range(1, 11))
    missing = {rung.number: rung.missing for rung in rungs if rung.run is None}
    assert set(missing) == {8, 9}
    assert "GPU" in missing[8]
    assert all(len(reason) > 15 for reason in missing.values())


def test_weights_are_quantised_as_the_file_and_the_kernels_allow(tiny_model: Path) -> None:
    kernels = CpuKernels()
    with LadderEngines(str(tiny_model), "cpu", "float32", max_model_len=128) as engines:
        assert engines.quantizations(kernels) == ("int8", "int4")
        engines.block_formats = ["Q3_K", "Q4_1"]
        assert engines.quantizations(kernels) == ("auto",)
        engines.block_formats = ["Q3_K"]
        assert engines.quantizations(kernels) == ()
        missing = next(
            rung for rung in find_rungs(engines, [Job((1,), 1)], 1) if rung.number == 7
        ).missing
        assert missing == "no kernel computes with Q3_K as it is stored"
        engines.block_formats = []
        assert engines.quantizations(ReferenceKernels()) == ()


def test_a_short_request_leaves_first_and_another_takes_its_place_in_the_same_step(
    llm: LLM,
) -> None:
    greedy = {"temperature": 0.0, "ignore_eos": True}
    lengths = [2, 6, 3]
    params = [SamplingParams(max_tokens=length, **greedy) for length in lengths]  # type: ignore[arg-type]
    outputs = llm.generate([[1, 2, 3], [4, 5, 6], [7, 8, 9]], params, progress=False)
    short, long, waiting = (output.request_id for output in outputs)
    assert [len(output.token_ids) for output in outputs] == lengths
    log = llm.engine.step_log
    assert log is not None
    steps = [entry.step for entry in log]
    assert [entry.request_id for entry in steps[0].scheduled] == [short, long]
    change = next(step for step in steps if any(gone.request_id == short for gone in step.finished))
    gone = next(one for one in change.finished if one.request_id == short)
    assert [(new.request_id, new.row) for new in change.admitted] == [(waiting, gone.row)]
    assert {entry.request_id for entry in change.scheduled} == {long, waiting}
    assert change.step_id == 2  # after its two tokens, not a step later


def test_the_table_of_early_leavers_shows_the_same(llm: LLM) -> None:
    table = experiments.leaving_early(llm, replace(QUICK, max_num_seqs=2))
    rows = {row[0]: row[1:] for row in table.rows}
    assert rows[0] == ("A B", "", "A B", 12)
    assert rows[3] == ("B C", "A", "C", 7)
    assert experiments.SEEN_LATE not in table.note


def test_with_two_steps_in_flight_the_table_says_why_who_leaves_is_seen_late(llm: LLM) -> None:
    llm.engine.core.depth = 2
    table = experiments.leaving_early(llm, replace(QUICK, max_num_seqs=2))
    rows = {row[0]: row[1:] for row in table.rows}
    assert rows[3] == ("B", "", "", 1)
    assert rows[4] == ("B C", "A", "C", 7)
    assert table.note.endswith(experiments.SEEN_LATE)


def test_memory_is_counted_in_whole_blocks(tiny_model: Path) -> None:
    with LadderEngines(str(tiny_model), "cpu", "float32") as engines:
        table = experiments.memory_of_allocations(engines.get(max_num_seqs=2).engine.decoder, QUICK)
    contiguous, large, small = (row[1].value for row in table.rows)  # type: ignore[union-attr]
    used = table.rows[0][2].value  # type: ignore[union-attr]
    per_token = 2 * 2 * 2 * 16 * 4  # both sides, layers, heads, head size, bytes
    assert contiguous == 100 * 512 * per_token
    assert used < small < large < contiguous
    assert small - used < 100 * 16 * per_token
    assert small % (16 * per_token) == 0
