"""Plans against what was measured on an H200, against the allocator, and the command."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from quire.checkpoints.checkpoint import StoredCache
from quire.cli.main import app
from quire.config import EngineConfig
from quire.errors import InvalidRequestError, ModelNotFoundError
from quire.runner.layer_groups import LayerGroups
from quire.runner.memory import Needs, plan_cache
from quire.tools.bench.gpu.throughput import nano_workload
from quire.tools.bench.jobs import Lengths
from quire.tools.bench.shapes import CONFIGS, spec_of
from quire.tools.plan.devices import PCIE, PlannedDevice, Shares, named_device
from quire.tools.plan.estimate import Estimate, ExpectedLoad, PlannedTimes, estimate, serve
from quire.tools.plan.forms import Form, forms_of
from quire.tools.plan.model import PlannedModel, described_model
from quire.tools.plan.report import Findings, advice
from quire.tools.plan.token_time import plan_target
from quire.tools.plan.work import Rates
from quire.tools.plan.workload import (
    RequestLengths,
    draw_jobs,
    read_jobs,
    workload_seconds,
)

H200 = named_device("h200")
CPU = PlannedDevice("a CPU", 16 * 2**30, Rates(50e9, 1e12), Shares(), "made up")


def planned(name: str) -> PlannedModel:
    return described_model(name, spec_of(name))


def form_named(model: PlannedModel, name: str, device: PlannedDevice = H200) -> Form:
    return next(form for form in forms_of(model, device) if form.name == name)


def first(model: PlannedModel, device: PlannedDevice, load: ExpectedLoad) -> Estimate:
    return estimate(model, device, next(iter(forms_of(model, device))), load)


def test_a_checkpoint_that_wants_an_fp8_cache_holds_twice_the_tokens_on_a_gpu() -> None:
    load, plain = ExpectedLoad(2000, 500), planned("qwen3-8b")
    files = plain.files
    model = replace(plain, files=replace(files, spec=replace(files.spec, cache=StoredCache("fp8"))))
    wide, narrow = (first(one, H200, load).plan for one in (plain, model))
    assert wide is not None
    assert narrow is not None
    assert narrow.bytes_per_block == wide.bytes_per_block // 2
    assert first(model, CPU, load).form.key_dtype != torch.float8_e4m3fn
    for card, has_it in (("l4", True), ("rtx4090", True), ("b200", True), ("a100", False)):
        form = next(iter(forms_of(model, named_device(card))))
        assert (form.key_dtype == torch.float8_e4m3fn) is has_it


@cache
def jobs_of_nano() -> list[tuple[int, int]]:
    prompts, new_tokens = nano_workload()
    return list(zip(map(len, prompts), new_tokens, strict=True))


def times_of(name: str) -> PlannedTimes:
    model = planned(name)
    return PlannedTimes(model.spec, H200, next(iter(forms_of(model, H200))))


@pytest.mark.parametrize(
    ("name", "rows", "milliseconds"),
    [
        ("qwen3-0.6b", 1, 0.900),
        ("qwen3-0.6b", 32, 1.34),
        ("qwen3-0.6b", 256, 3.52),
        ("qwen3-8b", 1, 4.37),
        ("llama-3.2-1b", 1, 0.985),
        ("qwen3-30b-a3b", 1, 2.68),
    ],
)
def test_steps_of_answers_take_what_was_measured(name: str, rows: int, milliseconds: float) -> None:
    """docs/performance.md; prompts of 128 tokens and 256 new ones, so 256 on average."""
    assert 1e3 * times_of(name).step(rows, 256) == pytest.approx(milliseconds, rel=0.15)


@pytest.mark.parametrize(
    ("quantization", "rows", "milliseconds"),
    [
        *(("fp8", 1, 2.87), ("fp8", 32, 3.52), ("fp8", 256, 8.09)),
        *(("int4", 1, 3.44), ("int4", 32, 3.97), ("int4", 256, 11.6)),
    ],
)
def test_steps_with_quantised_weights_take_what_was_measured(
    quantization: str, rows: int, milliseconds: float
) -> None:
    """docs/performance.md, "Quantised weights, Qwen3-8B"."""
    model = planned("qwen3-8b")
    times = PlannedTimes(model.spec, H200, form_named(model, quantization))
    assert 1e3 * times.step(rows, 256) == pytest.approx(milliseconds, rel=0.15)


@pytest.mark.parametrize(("quantization", "tokens_per_second"), [("fp8", 67_128), ("int4", 40_979)])
def test_prompts_with_quantised_weights_take_what_was_measured(
    quantization: str, tokens_per_second: float
) -> None:
    model = planned("qwen3-8b")
    seconds = PlannedTimes(model.spec, H200, form_named(model, quantization)).prompt(*[2048] * 32)
    assert 32 * 2048 / seconds == pytest.approx(tokens_per_second, rel=0.15)


@pytest.mark.few(1)
@pytest.mark.parametrize(("quantization", "tokens_per_second"), [("fp8", 11_793), ("int4", 8_856)])
def test_whole_workloads_with_quantised_weights_take_what_was_measured(
    quantization: str, tokens_per_second: float
) -> None:
    """Nothing was fitted to these lines."""
    model = planned("qwen3-8b")
    seconds = workload_seconds(
        PlannedTimes(model.spec, H200, form_named(model, quantization)), jobs_of_nano()
    )
    assert sum(new for _, new in jobs_of_nano()) / seconds == pytest.approx(
        tokens_per_second, rel=0.15
    )


def test_a_model_divided_among_devices() -> None:
    model, load = planned("qwen3-8b"), ExpectedLoad(2000, 500)
    alone, two = (next(iter(forms_of(model, H200, ranks))) for ranks in (1, 2))
    one, half = (estimate(model, H200, form, load) for form in (alone, two))
    assert one.plan is not None
    assert half.plan is not None
    # half of the key heads, and half of the weights
    assert half.plan.num_tokens >= one.plan.num_tokens
    assert 0.5 * one.step_seconds < half.step_seconds < 0.8 * one.step_seconds
    assert one.prompt_seconds / 2 < half.prompt_seconds < one.prompt_seconds
    # Four gathers a layer, and what a link adds.
    apart = estimate(model, replace(H200, link=PCIE), two, load)
    assert apart.step_seconds > half.step_seconds + 4 * 36 * (PCIE.latency - H200.link.latency)


@pytest.mark.parametrize(("context", "milliseconds"), [(8_000, 9.38), (32_000, 23.25)])
def test_long_contexts_take_what_was_measured(context: int, milliseconds: float) -> None:
    """Nothing was fitted to these lines."""
    assert 1e3 * times_of("qwen3-8b").step(16, context) == pytest.approx(milliseconds, rel=0.15)


@pytest.mark.parametrize(
    ("name", "tokens_per_second"), [("qwen3-0.6b", 400_469), ("qwen3-8b", 41_517)]
)
def test_prompts_take_what_was_measured(name: str, tokens_per_second: float) -> None:
    assert 32 * 2048 / times_of(name).prompt(*[2048] * 32) == pytest.approx(
        tokens_per_second, rel=0.15
    )


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "tokens_per_second"),
    [("qwen3-0.6b", 24_900), ("qwen3-8b", 9_590), ("qwen3-30b-a3b", 6_261)],
)
def test_whole_workloads_take_what_was_measured(name: str, tokens_per_second: float) -> None:
    """Nothing was fitted to these lines."""
    seconds = workload_seconds(times_of(name), jobs_of_nano())
    assert sum(new for _, new in jobs_of_nano()) / seconds == pytest.approx(
        tokens_per_second, rel=0.15
    )


def test_what_fits_is_what_the_allocator_says() -> None:
    model, load = planned("qwen3-8b"), ExpectedLoad(2000, 500)
    wide = form_named(model, "float32", CPU)
    assert not estimate(model, CPU, wide, load).fits  # 30 GiB
    form = form_named(model, "int4", CPU)
    small = estimate(model, CPU, form, load)
    assert small.plan is not None
    config = EngineConfig(max_model_len=2500)
    free = CPU.memory - form.weight_bytes
    needs = Needs(weights=form.weight_bytes)
    assert small.plan == plan_cache(
        model.spec,
        config,
        config.limits(on_gpu=False),
        torch.float32,
        free,
        needs,
        LayerGroups.of(model.spec, config.block_size, torch.float32),
    )
    assert small.at_once == (small.plan.num_blocks - 1) // 157


def test_a_rate_that_is_too_high_is_said_with_what_would_do() -> None:
    model, load = planned("qwen3-8b"), ExpectedLoad(2000, 500, rate=5.0, ttft=0.5)
    found = first(model, H200, load)
    serving = serve(model, H200, found, load, 1)
    assert serving.is_possible
    assert serving.ttft < 0.5
    assert 5 < serving.most < 20
    much = ExpectedLoad(2000, 500, rate=40.0, ttft=0.5)
    serving = serve(model, H200, found, much, 1)
    assert not serving.is_possible
    (line,) = [
        line
        for line in advice(Findings(model, H200, 1, much, [found], serving))
        if "too many" in line
    ]
    assert "such devices would do" in line
    spread = serve(model, H200, found, much, 8)
    assert spread.is_possible
    strict = ExpectedLoad(2000, 500, rate=5.0, ttft=0.01)
    findings = Findings(model, H200, 1, strict, [found], serve(model, H200, found, strict, 1))
    assert any("is not kept" in line for line in advice(findings))


def run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["plan", *arguments])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.stdout


def test_a_model_whose_layers_keep_a_state(tmp_path: Path) -> None:
    """Three of four layers are recurrent; their states are counted, and that they are slow is said."""
    config = tmp_path / "config.json"
    hybrid = CONFIGS["qwen3-8b"] | {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "num_hidden_layers": 32,
        "head_dim": 256,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
    }
    config.write_text(json.dumps(hybrid))
    code, text = run("--model", str(config), "--gpu", "h200", "--requests", "16")
    assert code == 0, text
    assert "keep all tokens, chunks of 64 (" in text
    assert "each request also has two states of 50.2 MiB" in text
    assert "layers with a state don't yet" in text
    divided = ("--gpus", "2", "--tensor-parallel-size", "2")
    code, text = run("--model", str(config), "--gpu", "h200", "--requests", "16", *divided)
    assert code == 0, text
    assert "each request also has two states of 26.3 MiB" in text  # on each of the two
    with pytest.raises(InvalidRequestError, match=r"value heads .* even only with 1, 2, 4, 8, 16"):
        run("--model", str(config), "--gpu", "h200", "--gpus", "3", "--tensor-parallel-size", "3")


def test_the_command_with_nothing_but_a_config(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIGS["qwen3-8b"]))
    code, text = run(
        "--model", str(config), "--gpu", "h200", "--input", "2000", "--output", "500", "--rate", "5"
    )
    assert code == 0
    assert "It fits: dtype=auto (bfloat16), 256 such requests at once." in text
    assert "At 5 requests a second about" in text
    code, text = run("--model", str(tmp_path), "--gpu", "h200", "--gpus", "2", "--json")
    assert code == 0
    told: dict[str, Any] = json.loads(text)
    assert told["forms"][0]["requests_at_once"] == 512
    assert told["times_are"] == "estimates"
    code, text = run("--model", str(config), "--gpu", "l4", "--input", "30000", "--output", "1000")
    assert code == 0
    assert "It fits: quantization=int8" in text
    text = run(
        "--model", str(config), "--gpu", "h200", "--gpus", "4", "--tensor-parallel-size", "2"
    )[1]
    assert (
        "divided among 2 devices that gather over NVLink (computed, not measured), 2 times" in text
    )
    assert "Each group of 2 devices holds the whole model" in text


def test_what_does_not_fit_one_device_may_fit_several(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIGS["qwen3-8b"] | {"num_hidden_layers": 200}))
    code, text = run("--model", str(config), "--gpu", "l4")
    assert code == 1
    assert "does not fit" in text
    assert "Divided among 2 it would: --tensor-parallel-size 2." in text
    code, text = run("--model", str(config), "--gpu", "l4", "--tensor-parallel-size", "2", "--json")
    told: dict[str, Any] = json.loads(text)
    assert code == 0
    assert (told["device"]["count"], told["tensor_parallel_size"]) == (2, 2)
    config.write_text(
        json.dumps(CONFIGS["qwen3-8b"] | {"num_hidden_layers": 200, "intermediate_size": 122_880})
    )
    assert "Take a smaller model" in run("--model", str(config), "--gpu", "l4")[1]


def test_wrong_input_says_what_to_do(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIGS["qwen3-8b"]))
    with pytest.raises(InvalidRequestError, match="--gpu: must be one of h200, h100"):
        run("--model", str(config), "--gpu", "voodoo2")
    with pytest.raises(InvalidRequestError, match="the model was made for 40,960"):
        run("--model", str(config), "--gpu", "h200", "--input", "50000")
    with pytest.raises(
        InvalidRequestError, match="--gpus: 3 are not divisible by --tensor-parallel-size 2"
    ):
        run("--model", str(config), "--gpu", "h200", "--gpus", "3", "--tensor-parallel-size", "2")
    with pytest.raises(InvalidRequestError, match="only 32 query heads"):
        run("--model", str(config), "--gpu", "h200", "--tensor-parallel-size", "64")
    with pytest.raises(ModelNotFoundError):
        run("--model", "./nothing", "--gpu", "h200")


# A workload


def run_plan(*arguments: str) -> Any:
    done = CliRunner().invoke(app, ["plan", *arguments, "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "tokens_per_second"), [("qwen3-0.6b", 25_072), ("qwen3-8b", 9_579)]
)
@pytest.mark.parametrize("source", ["ranges", "file"])
def test_the_command_holds_its_15_percent_for_the_256_requests(
    name: str, tokens_per_second: float, source: str, tmp_path: Path
) -> None:
    """With the mean lengths alone it was 18 and 21% above what was measured: the last answers have
    few beside them.
    """
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIGS[name]))
    options = ["--requests", "256", "--input", "100-1024", "--output", "100-1024"]
    if source == "file":
        (tmp_path / "jobs").write_text(
            "# prompt answer\n\n" + "".join(f"{a} {b}\n" for a, b in jobs_of_nano())
        )
        options = ["--workload", str(tmp_path / "jobs")]
    found = run_plan(str(config), "--gpu", "h200", *options)
    assert found["requests"] == 256
    assert found["forms"][0]["workload_tokens_per_second"] == pytest.approx(
        tokens_per_second, rel=0.15
    )


def test_more_requests_than_fit_wait_for_a_place() -> None:
    class Times:
        def prompt(self, *lengths: int) -> float:
            return 10.0 * len(lengths)

        def step(self, rows: int, context: int) -> float:
            return 1.0

    jobs = [RequestLengths(5, 3)] * 4
    assert workload_seconds(Times(), jobs) == 42.0
    assert workload_seconds(Times(), jobs, 4) == 42.0
    assert workload_seconds(Times(), jobs, 2) == 44.0
    assert workload_seconds(Times(), jobs, 1) == 48.0
    assert workload_seconds(Times(), jobs, 0) == 48.0
    assert workload_seconds(Times(), [RequestLengths(5, 1)] * 3, 2) == 30.0
    assert workload_seconds(Times(), [RequestLengths(5, 3), RequestLengths(5, 9)], 1) == 30.0
    assert workload_seconds(Times(), [RequestLengths(5, 3), RequestLengths(5, 9)]) == 28.0


def test_jobs_that_are_drawn_are_always_the_same_and_cover_their_ranges() -> None:
    jobs = draw_jobs(1000, Lengths(100, 1024), Lengths(7, 7))
    assert jobs == draw_jobs(1000, Lengths(100, 1024), Lengths(7, 7))
    assert {job.answer for job in jobs} == {7}
    assert min(job.prompt for job in jobs) < 110
    assert max(job.prompt for job in jobs) > 1014


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no requests"),
        ("500", "expected the tokens"),
        ("500 0", "expected the tokens"),
        ("500 1 2", "expected the tokens"),
        ("-5 10", "expected the tokens"),
        ("1e3 10", "expected the tokens"),
        ("500 " + "9" * 5000, "expected the tokens"),
        ('{"input_tokens": 5}', "expected the tokens"),
        ('{"input_tokens": true, "output_tokens": 5}', "expected the tokens"),
        ('{"input_tokens": 5', "Expecting"),
        ("5 5\n" + '{"a":' * 20_000, "line 2"),
        ("5 5\n\ud800 5", "can't be read"),
    ],
)
def test_a_workload_that_is_wrong_is_refused_with_its_line(
    tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "jobs"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(InvalidRequestError, match=message):
        read_jobs(path)


@pytest.mark.parametrize(
    "text", ["", "0", "-5", "5-", "9-5", "1.5", "five", "1-2-3", "9" * 5000, "٣"]
)
@pytest.mark.parametrize("option", ["--input", "--output"])
def test_lengths_that_are_wrong_are_refused_by_name(option: str, text: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"{option}: must be"):
        Lengths.parse(option, text)


def test_a_workload_and_a_number_of_requests_are_not_given_together(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIGS["qwen3-0.6b"]))
    done = CliRunner().invoke(
        app, ["plan", str(config), "--gpu", "h200", "--requests", "5", "--workload", "x"]
    )
    assert done.exit_code != 0


def test_a_target_of_token_times_has_its_price() -> None:
    model, load = planned("qwen3-8b"), ExpectedLoad(8000, 500)
    found = first(model, H200, load)
    plans = [
        plan_target(model, H200, found, load, seconds) for seconds in (0.03, 0.06, 0.2, 0.0001)
    ]
    assert plans[-1] is None
    kept = [one for one in plans if one is not None]
    assert [one.token_time for one in kept] == [0.03, 0.06, 0.2]
    speeds = [one.tokens_per_second for one in kept]
    assert speeds == sorted(speeds)
    assert all(one.prompt_tokens >= 16 and 1 <= one.at_once <= found.at_once for one in kept)
    assert 0.5 < kept[-1].share < 1.1
    findings = Findings(model, H200, 2, load, [found], None, kept[0], 0.03)
    (line,) = [line for line in advice(findings) if line.startswith("A token every 30 ms")]
    assert f"{2 * kept[0].at_once} answers at once" in line
    unkept = Findings(model, H200, 1, load, [found], None, None, 0.0001)
    assert any("not kept even by one answer" in line for line in advice(unkept))
