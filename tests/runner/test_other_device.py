"""A device of another kind needs a `Device` and kernels, nothing else: the engine runs on one it
has never seen.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.assemble import Engine, assemble
from quire.backends.select import device_of, select_kernels
from quire.config import EngineConfig
from quire.engine import make_requests
from quire.models.decoder import Decoder
from quire.runner.adapters import AdapterSlots
from quire.runner.graphs import DecodeGraphs
from quire.runner.kv_cache import KVCache
from quire.runner.request_rows import RequestRows
from quire.runner.runner import Runner
from quire.runner.step_outputs import PendingStep, StepOutputs
from quire.sampling.upload import Uploader
from quire.sampling_params import SamplingParams
from quire.server.link.engine_memory import EngineMemory
from tests.adapters import random_adapter
from tests.late_device import LateDevice, use_late_device
from tests.long_runs import IS_LONG
from tests.quick_interpreter import quicken
from tests.random_models import SPECS, Bench, random_decoder
from tests.test_exactness import workload

CPU = torch.device("cpu")
PROMPTS = [
    [(7 * i + start) % 97 for i in range(length)]
    for start, length in ((0, 3), (5, 40), (5, 33), (9, 1))
]


def halve(history: Tensor, scores: Tensor) -> Tensor:
    return scores / 2


PARAMS = [
    SamplingParams(temperature=0, max_tokens=12),
    SamplingParams(
        temperature=1.0, seed=3, top_p=0.9, max_tokens=9, logprobs=2, repetition_penalty=1.2
    ),
    SamplingParams(temperature=0.7, seed=4, top_k=5, max_tokens=14, logits_processors=(halve,)),
    SamplingParams(temperature=1.3, seed=5, max_tokens=10, n=2, logit_bias={3: 1.0}),
]


def answers(engine: Engine) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for name, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        for request in make_requests(str(name), prompt, params, params.seed or 0):
            engine.core.add_request(request, 0.0)
    now = 0.0
    while engine.core.has_work:
        now += 1.0
        for update in engine.core.step(now):
            assert update.error is None
            found.setdefault(update.request_id, []).extend(update.new_token_ids)
    return found


def make_engine(family: str, speculation: str) -> Engine:
    decoder = random_decoder(SPECS[family], select_kernels(CPU, torch.float32), torch.float32)
    config = EngineConfig(
        device="cpu",
        speculation=speculation,
        max_model_len=64,
        max_num_seqs=3,
        max_batched_tokens=64,
        kv_cache_memory="1MiB",
    )
    return assemble(decoder, config, name="tiny")


@pytest.mark.parametrize(("family", "speculation"), [("gpt_oss", "off"), ("qwen3", "ngram")])
def test_an_engine_on_another_device_gives_the_same_answers(
    family: str, speculation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = make_engine(family, speculation)
    expected = answers(usual)
    assert usual.core.depth == 1
    use_late_device(monkeypatch)
    engine = make_engine(family, speculation)
    assert engine.core.depth == 2
    assert "on a late device, float32" in engine.description
    assert "activations 1.0 MiB, graphs 1.0 MiB" in engine.description
    assert answers(engine) == expected
    engine.runner.release()
    used = LateDevice.used
    assert used["peak_memory"] == 2  # of the largest step, and of the largest graph
    assert min(used[name] for name in ("to_host", "pinned", "return_freed_memory")) > 0


@pytest.mark.few(1)
@pytest.mark.parametrize("family", ["qwen3", "gemma3_text"])
def test_blocks_on_the_host_and_logits_are_the_same(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With little room, a host tier, preemption, and two steps in flight."""

    def run(depth: int) -> tuple[dict[str, list[int]], dict[tuple[str, int], Tensor], int]:
        decoder = random_decoder(SPECS[family], select_kernels(CPU, torch.float32), torch.float32)
        sizes = {
            "num_blocks": 16,
            "num_host_blocks": 64,
            "max_num_seqs": 8,
            "max_batched_tokens": 96,
        }
        found = Bench(decoder, preempt_every=4, depth=depth, **sizes).run(
            *workload(12, seed=1, longest=100)
        )
        return found.tokens, found.logits, found.host_tokens

    tokens, logits, _ = run(1)
    use_late_device(monkeypatch)
    late_tokens, late_logits, host_tokens = run(2)
    assert late_tokens == tokens
    assert late_logits.keys() == logits.keys()
    assert all(torch.equal(late_logits[place], logits[place]) for place in logits)
    assert host_tokens > 0


def test_results_are_not_read_before_they_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    use_late_device(monkeypatch)
    seen: list[list[int]] = []
    outputs, source = StepOutputs(0), torch.arange(4)
    outputs.add([source], lambda tensors: seen.append(tensors[0].tolist()))
    pending = PendingStep(outputs, device_of(CPU).copy_stream())
    source.fill_(7)  # the next step's
    assert not seen
    pending.result()
    assert seen == [[0, 1, 2, 3]]


def test_a_buffer_is_not_written_before_its_last_copy_is_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_late_device(monkeypatch)
    uploader = Uploader(CPU)
    arrays = (
        np.arange(5),
        np.zeros((0, 3), np.float32),
        np.array([True, False]),
        np.arange(6.0).reshape(2, 3).T,
    )
    for _ in range(10):
        for array, tensor in zip(arrays, uploader.upload(*arrays), strict=True):
            assert np.array_equal(tensor.numpy(), array)
    # some are used again, none while its event has not come
    assert 1 < LateDevice.used["pinned"] < 10


def test_memory_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(EngineMemory(CPU).look(1.0)) == {"engine_resident_memory"}
    use_late_device(monkeypatch)
    found = EngineMemory(CPU).look(1.0)
    used = {name: size for name, size in found.items() if name.startswith("gpu")}
    assert used == {
        "gpu_memory_used": 2**28,
        "gpu_memory_total": 2**29,
        "gpu_memory_allocated": 2**20,
    }


def graph_runner(
    decoder: Decoder, num_blocks: int, max_num_seqs: int, adapters: AdapterSlots | None = None
) -> Runner:
    """As `Bench` makes one, with graphs of up to that many rows."""
    cache = KVCache(decoder.spec, num_blocks, 0, 16, decoder.dtype, CPU)
    rows = RequestRows(max_num_seqs, 1024, 16, CPU)
    pool = device_of(CPU).graph_pool()
    assert pool is not None
    graphs = DecodeGraphs(decoder, cache.layers, rows, max_num_seqs, pool)
    graphs.warm_up()
    return Runner(decoder, cache, rows, graphs=graphs, adapters=adapters)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has graphs of its own: tests/gpu")
@pytest.mark.parametrize("first_prompt", [[5, 6, 7], [5, 6, 7, 8, 9, 10, 11]])
def test_graphs_of_another_device_give_the_same_answers(
    first_prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the kernels that have work lists for graphs, in their interpreter. The longer prompt
    comes in pieces that are as large as a graph: what follows them is read from the request rows.
    """
    pytest.importorskip("triton", reason="Triton is not installed")
    from quire.backends.triton.kernels import TritonKernels

    quicken()
    use_late_device(monkeypatch)
    spec = SPECS["llama"]
    decoder = random_decoder(replace(spec, layers=spec.layers[:1]), TritonKernels(), torch.float32)
    params = [
        SamplingParams(temperature=0, max_tokens=5),
        SamplingParams(temperature=0.7, seed=4, max_tokens=4),
    ]

    def run(has_graphs: bool) -> dict[str, list[int]]:
        sizes = {} if len(first_prompt) == 3 else {"max_batched_tokens": 2}
        bench = Bench(decoder, max_num_seqs=2, depth=2, observes=False, **sizes)
        if has_graphs:
            bench.core.runner = bench.runner = graph_runner(decoder, num_blocks=512, max_num_seqs=2)
        return bench.run([first_prompt, [8, 9]], params).tokens

    expected = run(has_graphs=False)
    assert not LateDevice.used["capture"]
    assert run(has_graphs=True) == expected
    assert LateDevice.used["replay"] >= 2


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu/test_adapters.py has this")
@pytest.mark.parametrize(
    ("kinds", "fewest_replays"),
    [
        (("copies", "pair", ""), 4),
        *([(("", "", ""), 8), (("tokens", "", "copies"), 4)] if IS_LONG else []),
    ],
)
def test_graphs_with_adapters_give_the_same_answers(
    kinds: tuple[str, ...],
    fewest_replays: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """A graph for steps with adapters beside those without, replayed with other slots, and with
    other adapters in them. Steps with adapters of embedding and head have none.
    """
    pytest.importorskip("triton", reason="Triton is not installed")
    from quire.backends.triton.kernels import TritonKernels

    quicken()
    use_late_device(monkeypatch)
    spec = replace(SPECS["qwen2"], layers=SPECS["qwen2"].layers[:1])
    decoder = random_decoder(spec, TritonKernels(torch.float16), torch.float16)
    paths = [
        random_adapter(tmp_path / str(i), decoder, i, 3 + i, kind=kind)
        for i, kind in enumerate(kinds)
    ]
    params = [SamplingParams(temperature=0, max_tokens=new) for new in (6, 4)]

    def run(has_graphs: bool) -> list[dict[str, list[int]]]:
        bench = Bench(decoder, max_num_seqs=2, depth=2, observes=False, adapters=paths, max_loras=2)
        runner = bench.runner
        if has_graphs:
            bench.core.runner = bench.runner = graph_runner(decoder, 512, 2, runner.adapters)
        return [
            bench.run([[5, 6, 7], [8, 9]], params, adapters=chosen).tokens
            for chosen in ([1, 0], [2, 3], [0, 0], [3, 2])
        ]

    expected = run(has_graphs=False)
    assert expected[0] != expected[1] != expected[2]
    before = LateDevice.used["replay"]
    assert run(has_graphs=True) == expected
    assert LateDevice.used["replay"] >= before + fewest_replays
