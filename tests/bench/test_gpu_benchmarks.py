"""The GPU benchmarks: their arithmetic, and that the commands run (on a tiny model, here on the
CPU).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from quire.backends.cpu.kernels import CpuKernels
from quire.tools.bench.gpu import decode, long_contexts, model, prefill, startup, throughput
from quire.tools.bench.gpu.all import run_job
from quire.tools.bench.gpu.ceiling import (
    Itemsizes,
    Rates,
    Work,
    decode_work,
    prompt_work,
    workload_work,
)
from quire.tools.bench.gpu.peers import compare
from quire.tools.bench.gpu.profiling import gpu_times
from quire.tools.bench.gpu.report import Measurement, read_results, report
from quire.tools.bench.random_checkpoint import write_checkpoint
from quire.tools.bench.random_engine import DrivenRun, random_decoder
from quire.tools.bench.report import cell_text
from quire.tools.bench.shapes import CONFIGS, spec_of
from tests.decoding import all_logits
from tests.random_models import SPECS

H200 = Rates(read_bandwidth=4.5e12, flops=790e12)


def test_shapes_have_the_parameters_their_models_have() -> None:
    millions = {
        name: round(spec_of(name).num_parameters / 1e6)
        for name in CONFIGS
        if not name.startswith("tiny")
    }
    assert millions == {
        "qwen3-0.6b": 596,
        "qwen3-8b": 8191,
        "qwen3-30b-a3b": 30_532,
        "llama-3.2-1b": 1236,
        "smollm2-135m": 135,
        "gemma-3-4b": 3880,
        "qwen3.5-9b": 8954,
        "qwen3.5-35b-a3b": 34_661,
        "gpt-oss-20b": 20_915,
        "glm-4.7-flash": 29_943,
        "deepseek-v2-lite": 15_706,
    }


def test_random_experts_are_computed_with_in_their_format() -> None:
    """As gpt-oss has them: blocks of four bits, about as large as the numbers they stand for."""
    device, kernels = torch.device("cpu"), CpuKernels()
    decoders = [
        random_decoder(
            SPECS["gpt_oss"], kernels, torch.float32, device, max_position=64, expert_format=name
        )
        for name in (None, "MXFP4")
    ]
    assert decoders[1].nbytes < decoders[0].nbytes
    plain, stored = (all_logits(decoder, list(range(20))) for decoder in decoders)
    assert stored.isfinite().all()
    assert 0.3 < float(stored.std() / plain.std()) < 3


@pytest.mark.slow
def test_the_workload_is_nano_vllms() -> None:
    prompts, new_tokens = throughput.nano_workload()
    assert len(prompts) == 256
    assert sum(new_tokens) == 133_966
    assert sum(map(len, prompts)) == 142_827
    jobs = list(zip(map(len, prompts), new_tokens, strict=True))
    seconds = H200.seconds(workload_work(spec_of("qwen3-0.6b"), jobs, itemsize=2))
    assert 133_966 / seconds == pytest.approx(40_000, rel=0.01)


def test_ceilings_count_what_must_be_read() -> None:
    small, large, sparse = (spec_of(name) for name in ("qwen3-0.6b", "qwen3-8b", "qwen3-30b-a3b"))
    # All weights but the norms, once; and 28 layers of 8 heads of 128, keys and values, two bytes
    # each.
    norms = 28 * (2 * 1024 + 2 * 128) + 1024
    keys = 28 * 2 * 8 * 128 * 2
    assert decode_work(small, [1], 2).bytes_read == 2 * (small.num_parameters - norms) + keys
    assert (
        decode_work(small, [100, 7], 2).bytes_read
        == 2 * (small.num_parameters - norms) + 107 * keys
    )
    # Of an embedding that is not the head only the rows that are looked up.
    norms = 36 * (2 * 4096 + 2 * 128) + 4096
    read = decode_work(large, [0], 2).bytes_read
    assert read == 2 * (large.num_parameters - norms - 151_936 * 4096 + 4096)
    # 8 of 128 experts for one row; nearly all for many.
    experts = 48 * 128 * 3 * 768 * 2048 * 2
    few, many = (decode_work(sparse, [0] * rows, 2).bytes_read for rows in (1, 1000))
    assert many - few == pytest.approx(experts * (1 - 8 / 128) + 999 * 2048 * 2, rel=1e-6)
    assert prompt_work(small, [2048] * 32, 2).flops == pytest.approx(
        2 * 65_536 * 440e6 + 28 * 4 * 2048 * 32 * 2048**2 / 2, rel=0.02
    )
    # Experts in MXFP4 take 17 bytes for 32 weights; all 32 of them are read for many rows.
    coded = spec_of("gpt-oss-20b")
    plain, mxfp4 = (
        decode_work(coded, [0] * 1000, itemsize).bytes_read
        for itemsize in (2, Itemsizes(2, 2, 17 / 32))
    )
    assert plain - mxfp4 == pytest.approx(24 * 32 * 3 * 2880**2 * (2 - 17 / 32), rel=1e-6)
    assert H200.seconds(Work(bytes_read=4.5e12, flops=79e12)) == 1.0


def test_busy_time_counts_overlapping_kernels_once() -> None:
    def event(name: str, start: float, duration: float, cat: str = "kernel") -> dict[str, object]:
        return {"name": name, "cat": cat, "ts": start, "dur": duration}

    times = gpu_times(
        [
            event("b", 5, 10),
            event("a", 0, 10),
            event("c", 7, 1),
            event("a", 20, 5),
            event("x", 0, 99, cat="cpu_op"),
        ]
    )
    assert times is not None
    assert (times.span, times.busy) == (25, 20)
    assert times.by_name == {"a": (2, 15.0), "b": (1, 10.0), "c": (1, 1.0)}
    assert gpu_times([event("x", 0, 99, cat="cpu_op")]) is None


def test_only_steps_of_the_whole_batch_count() -> None:
    run = DrivenRun(0.0, times=[1.0, 3.0, 3.5, 4.0, 4.5, 9.0], new_tokens=[2, 4, 4, 4, 4, 1])
    assert decode.steady_times(run, 4) == [0.5, 0.5]
    with pytest.raises(RuntimeError, match="more steps"):
        decode.steady_times(run, 8)


def test_the_table_says_how_much_is_reached() -> None:
    [line] = report([Measurement("qwen3-0.6b", "decode 1", 1.2, 0.3)], "").tables[0].markdown()[2:]
    assert (
        "| 1.20 ms | 0.300 (25%) | 0.500 (42%) | 2.19 (1.82x) | 3.77 (3.14x) | 2.26 (1.88x) |"
        in line
    )
    [line] = (
        report([Measurement("qwen3-0.6b", "throughput", 20_000, 40_000, comparable=False)], "")
        .tables[0]
        .markdown()[2:]
    )
    assert line.startswith(
        "| qwen3-0.6b | throughput | 20,000 tok/s | 40,000 (50%) | - | - | - | - |"
    )
    assert compare("tiny", "prefill", 1.0) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "arguments", "measures"),
    [
        (throughput, ["--requests", "3", "--longest", "110"], ["throughput"]),
        (
            decode,
            ["--batches", "1,3", "--steps", "48", "--profile-steps", "4"],
            ["decode 1", "decode 3"],
        ),
        (
            decode,
            ["--batches", "3", "--steps", "48", "--profile-steps", "4", "--lora", "1,2"],
            ["decode 3", "decode 3, 1 adapters", "decode 3, 2 adapters"],
        ),
        (
            prefill,
            [
                "--prompts",
                "3",
                "--length",
                "100",
                "--max-batched-tokens",
                "64",
                "--max-num-seqs",
                "8",
            ],
            ["prefill"],
        ),
        (
            model,
            [
                "decode",
                "throughput",
                "--batches",
                "1",
                "--steps",
                "48",
                "--profile-steps",
                "4",
                "--requests",
                "2",
                "--longest",
                "110",
            ],
            ["decode 1", "throughput"],
        ),
    ],
)
def test_commands_run(
    module: object,
    arguments: list[str],
    measures: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    figures = tmp_path / "figures.json"
    options = [
        "--shape",
        "tiny",
        "--device",
        "cpu",
        "--repeats",
        "1",
        "--profile",
        "--json",
        str(figures),
    ]
    monkeypatch.setattr(sys, "argv", ["bench", *options, "--profile-steps", "8", *arguments])
    module.main()  # type: ignore[attr-defined]
    shown = capsys.readouterr().out
    results = read_results(figures)
    assert [result.measure for result in results] == measures
    assert all(result.value > 0 and result.ceiling for result in results)
    for result in results:
        assert all(cell_text(cell) in shown for cell in result.row())
    for part in ("schedule", "submit", "wait", "commit"):
        assert f"us  {part}" in shown
    assert "tiny" in json.loads(figures.read_text())["facts"]["engine"]


def test_long_contexts_are_swept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = "--shape tiny --batches 1,2 --contexts 40,100 --prompts 64 --steps 4"
    monkeypatch.setattr(sys, "argv", ["bench", *arguments.split()])
    long_contexts.main()
    shown = capsys.readouterr().out
    for row in ("1 at 40", "1 at 100", "2 at 40", "2 at 100", "2 × 64"):
        assert f"| {row} | " in shown


@pytest.mark.slow
def test_startup_is_timed_from_outside_the_process(tmp_path: Path) -> None:
    write_checkpoint("tiny", tmp_path)
    seconds, parts, about = startup.time_start(tmp_path, "cpu", "float32", tmp_path / "kernels")
    assert "float32" in about
    assert [part.rsplit(" ", 1)[0] for part in parts.split(", ")][:2] == ["python", "imports"]
    assert parts.split(", ")[-1].startswith("first token")
    assert sum(
        float(word) for word in parts.replace(",", "").split() if "." in word
    ) == pytest.approx(seconds, abs=0.1)


@pytest.mark.slow
def test_a_benchmark_that_fails_is_named() -> None:
    results, problem = run_job("decode+prefill:nothing", [], seconds=60)
    assert results == []
    assert problem == "ended with status 2"
