"""Looking inside: facts of a model, where two models part, where a NaN begins, counters and spans
offline.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

from quire import LLM, SamplingParams
from quire.backends.cpu.device import CpuDevice
from quire.backends.cpu.kernels import CpuKernels
from quire.cli.main import app
from quire.errors import InvalidRequestError
from quire.kernels.ops import AttentionSpec
from quire.kernels.reference import ReferenceKernels
from quire.observe.tracing import Tracing
from quire.tools.inspect.activations import first_bad, trace
from tests.decoding import all_logits
from tests.frontend.templates import QWEN
from tests.random_models import SPECS, random_decoder
from tests.server.random_model import write_model

GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
OPTIONS: dict[str, Any] = {"kv_cache_memory": "8MiB", "dtype": "float32", "max_num_seqs": 4}
EXPORTER = InMemorySpanExporter()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    write_model(made, QWEN)
    return made


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(EXPORTER))
    with LLM(folder, traces=Tracing(provider), **OPTIONS) as llm:
        yield llm


@pytest.fixture
def changed(folder: Path, tmp_path: Path) -> Callable[..., Path]:
    """A copy of the model with some tensors, or settings, replaced."""

    def make(change: Callable[[dict[str, Tensor]], None], **settings: Any) -> Path:
        other = tmp_path / "other"
        shutil.copytree(folder, other)
        tensors = load_file(other / "model.safetensors")
        change(tensors)
        save_file(tensors, other / "model.safetensors", {"format": "pt"})
        config = json.loads((other / "config.json").read_text())
        (other / "config.json").write_text(json.dumps(config | settings))
        return other

    return make


def inspect(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["inspect", *map(str, arguments)])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.stdout


# The command


def test_inspect_shows_settings_tensors_tokenizer_template_and_memory(folder: Path) -> None:
    code, shown = inspect(folder, "--device", "cpu")
    assert code == 0
    for text in ("4 of 16, 2 for keys and values", "hidden size        64", "model.layers.*.mlp.down_proj.weight",
                 "64 x 96", "<|im_end|>", "cache per token", "the full length of 1,024", "Chat template"):  # fmt: skip
        assert text in shown
    everything = inspect(folder, "--all")[1]
    assert "model.layers.1.mlp.down_proj.weight" in everything
    facts = json.loads(inspect(folder, "--json", "--device", "cpu", "--quantization", "int8")[1])
    shapes = {one["name"]: (one["shape"], one["format"]) for one in facts["tensors"]}
    assert shapes["model.layers.0.self_attn.k_proj.weight"] == ([32, 64], "F32")
    assert facts["spec"]["layers"] == 2
    assert "INT8" in facts["memory"]["weights"]
    assert "<|im_start|>" in facts["templates"]["default"]


def test_what_does_not_fit_is_said_and_the_rest_shown(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CpuDevice, "free_memory", lambda device: 1000)
    code, shown = inspect(folder, "--device", "cpu")
    assert code == 0
    assert "the model does not fit" in shown
    assert "Tensors: " in shown


def test_the_same_model_is_the_same(folder: Path, changed: Callable[..., Path]) -> None:
    code, shown = inspect(folder, "--against", changed(lambda tensors: None))
    assert code == 0
    assert "are the same model within 0.0001" in shown


def test_a_transpose_is_recognised(folder: Path, changed: Callable[..., Path]) -> None:
    name = "model.layers.1.self_attn.o_proj.weight"

    def transpose(tensors: dict[str, Tensor]) -> None:
        tensors[name] = tensors[name].t().contiguous()

    code, shown = inspect(folder, "--against", changed(transpose))
    assert code == 1
    weight, stage = shown.splitlines()
    original = load_file(folder / "model.safetensors")[name]
    assert weight.startswith(
        f"weight layers.1.attention.output.weight ({name}) differs from [0, 1] on"
    )
    assert f"{original[0, 1]:.6g}, " in weight
    assert f"{original[1, 0]:.6g}, " in weight
    assert "A transpose explains it" in weight
    assert stage.startswith("stage layers.1.attention differs from")


def test_a_transpose_of_another_shape_is_recognised_too(
    folder: Path, changed: Callable[..., Path]
) -> None:
    name = "model.layers.0.mlp.up_proj.weight"

    def transpose(tensors: dict[str, Tensor]) -> None:
        tensors[name] = tensors[name].t().contiguous()

    code, shown = inspect(folder, "--against", changed(transpose))
    assert code == 1
    assert f"[96, 64] here, [64, 96] there ({name}) has other sizes: " in shown
    assert "each other's transpose" in shown


def test_rows_in_another_order_are_recognised(folder: Path, changed: Callable[..., Path]) -> None:
    def interleave(tensors: dict[str, Tensor]) -> None:
        query = tensors["model.layers.0.self_attn.q_proj.weight"]
        pairs = query.view(4, 2, 8, 64).transpose(1, 2).reshape(64, 64)
        tensors["model.layers.0.self_attn.q_proj.weight"] = pairs.contiguous()

    code, shown = inspect(folder, "--against", changed(interleave))
    assert code == 1
    assert "weight layers.0.attention.qkv.weight (model.layers.0.self_attn.q_proj.weight)" in shown
    assert "the same rows in another order" in shown


def test_a_setting_that_differs_is_named_with_the_first_layer_that_feels_it(
    folder: Path, changed: Callable[..., Path]
) -> None:
    rope = {"rope_theta": 500.0, "rope_type": "default"}
    code, shown = inspect(folder, "--against", changed(lambda tensors: None, rope_parameters=rope))
    assert code == 1
    assert "setting layers.0.rope.theta: 10000.0 here, 500.0 there" in shown
    assert "stage layers.0.attention differs from" in shown
    assert "weight " not in shown


def test_numbers_that_only_float32_changed_are_the_same_setting(
    folder: Path, changed: Callable[..., Path]
) -> None:
    eps = json.loads((folder / "config.json").read_text())["rms_norm_eps"]
    as_float32 = float(torch.tensor(eps, dtype=torch.float32))
    assert as_float32 != eps
    assert (
        inspect(folder, "--against", changed(lambda tensors: None, rms_norm_eps=as_float32))[0] == 0
    )


def test_a_nan_is_traced_to_the_layer_where_it_began(
    folder: Path, changed: Callable[..., Path]
) -> None:
    def break_it(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.1.mlp.down_proj.weight"][7, 0] = float("nan")

    broken = changed(break_it)
    code, shown = inspect(broken, "--trace", "Hello", "--dtype", "float32", "--device", "cpu")
    assert code == 1
    assert "the first NaN or infinity comes from layers.1.mlp, at token 0, value 7" in shown
    with LLM(broken, **OPTIONS) as llm:
        output = llm.generate("Hello", GREEDY)[0]
    assert output.finish_reason == "error"
    assert "quire inspect MODEL --trace" in (output.error or "")
    code, shown = inspect(folder, "--trace", "Hello", "--device", "cpu")
    assert code == 0
    assert "are numbers" in shown
    assert "layers.1.attention" in shown
    code, shown = inspect(folder, "--trace", "Hello", "--device", "cpu", "--values", 3)
    (line,) = (line for line in shown.splitlines() if line.startswith("layers.1.attention.key"))
    assert len([float(value) for value in line.split()[1:]]) == 2 + 3


def test_query_key_and_value_are_those_of_the_projections() -> None:
    decoder = random_decoder(SPECS["llama"], ReferenceKernels(), torch.float32)
    stages = {stage.name: stage.values for stage in trace(decoder, [5, 17, 3])}
    (spec,) = {one for one in decoder.spec.mixers if isinstance(one, AttentionSpec)}
    heads = spec.heads
    shapes = {
        name: stages[f"layers.0.attention.{name}"].shape for name in ("query", "key", "value")
    }
    assert shapes == {
        "query": (3, heads.num_heads * heads.head_dim),
        "key": (3, heads.num_kv_heads * heads.head_dim),
        "value": (3, heads.num_kv_heads * heads.head_dim),
    }


@pytest.mark.parametrize("options", [("--values", 3), ("--trace", "a", "--values", -1)])
def test_values_are_those_of_a_trace(folder: Path, options: tuple[object, ...]) -> None:
    with pytest.raises(InvalidRequestError, match="--values"):
        inspect(folder, *options)


def test_a_wrong_tolerance_is_refused(folder: Path) -> None:
    with pytest.raises(InvalidRequestError, match="--tolerance"):
        inspect(folder, "--tolerance", -1)


@pytest.mark.few(5)
@pytest.mark.parametrize("family", SPECS)
def test_a_trace_ends_with_the_decoders_own_logits(family: str) -> None:
    for kernels in (ReferenceKernels(), CpuKernels()):
        decoder = random_decoder(SPECS[family], kernels, torch.float32)
        tokens = [5, 17, 3, 90, 41]
        stages = list(trace(decoder, tokens))
        assert torch.equal(stages[-1].values, all_logits(decoder, tokens))
        names = [stage.name for stage in stages]
        whole = [name for name in names if name.count(".") < 3]
        assert whole[:4] == ["embedding", "layers.0.attention", "layers.0.mlp", "layers.0"]
        parts = [name.rpartition(".")[2] for name in names if name.count(".") == 3]
        assert set(parts) <= {"query", "key", "value", "gate", "latent"}
        assert "query" in parts or not any(
            isinstance(one, AttentionSpec) for one in decoder.spec.mixers
        )
        assert names[-2:] == ["final_norm", "logits"]
        assert first_bad(decoder, tokens) is None
        # nothing is left behind in the decoder
        assert torch.equal(all_logits(decoder, tokens), stages[-1].values)


# LLM


def test_encode_and_decode_are_each_others_inverse(llm: LLM) -> None:
    ids = llm.encode("Größe 🙂 x")
    assert llm.decode(ids) == "Größe 🙂 x"
    assert tuple(ids) == llm.generate("Größe 🙂 x", GREEDY)[0].prompt_token_ids
    end = llm.info.eos_token_ids[0]
    assert llm.decode([end]) == ""
    assert llm.decode([end], skip_special_tokens=False) == "<|im_end|>"
    with pytest.raises(InvalidRequestError, match="text: must be text"):
        llm.encode(3)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="out of vocabulary"):
        llm.decode([10**6])
    with pytest.raises(InvalidRequestError, match="token_ids: must be a list of token ids"):
        llm.decode("text")  # type: ignore[arg-type]


def test_info_has_the_facts_as_fields(llm: LLM) -> None:
    info = llm.info
    assert (
        info.num_layers,
        info.hidden_size,
        info.num_heads,
        info.num_kv_heads,
        info.head_dim,
    ) == (2, 64, 4, 2, 16)
    assert (info.device, info.dtype, info.max_num_seqs, info.policy) == (
        "cpu",
        "float32",
        4,
        "fcfs",
    )
    assert info.weight_formats == ("F32",)
    assert info.weight_bytes == llm.engine.decoder.nbytes
    assert info.cache_bytes_per_token == 2 * 2 * 2 * 16 * 4
    assert info.cache_bytes <= 8 * 2**20
    assert info.has_chat_template


def test_metrics_count_what_the_engine_did(llm: LLM) -> None:
    before = llm.metrics
    outputs = llm.generate(["ab " * 20, "cd"], GREEDY)
    llm.generate(
        "ab " * 20, SamplingParams(temperature=0, max_tokens=20, stop=(outputs[0].text[1:3],))
    )
    after = llm.metrics
    assert after.output_tokens - before.output_tokens >= 11
    assert after.finished["length"] - before.finished["length"] == 2
    assert after.finished["stop"] - before.finished["stop"] == 1
    assert after.admissions - before.admissions == 3
    assert after.cached_tokens > before.cached_tokens  # the second time
    assert after.steps > before.steps
    assert before.steps < llm.metrics.steps  # a copy stays what it was


def test_spans_offline_say_where_the_time_went(llm: LLM) -> None:
    EXPORTER.clear()
    output = llm.generate("ab", GREEDY)[0]
    spans = {span.name: span for span in EXPORTER.get_finished_spans()}
    assert set(spans) == {"llm_request", "queue", "prompt", "decode"}
    request = spans["llm_request"]
    assert request.attributes is not None
    assert request.attributes["gen_ai.usage.completion_tokens"] == 5
    assert request.attributes["gen_ai.response.finish_reasons"] == ("length",)
    assert spans["decode"].parent is not None
    assert spans["decode"].parent.span_id == request.context.span_id
    seconds = (request.end_time - request.start_time) / 1e9  # type: ignore[operator]
    assert seconds == pytest.approx(output.metrics.finished - output.metrics.arrival, abs=1e-4)
