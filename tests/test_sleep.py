"""Weights replaced in a running engine, and engines that sleep and wake: the answers of a fresh
one, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quire import LLM, SamplingParams
from quire.assemble import Engine, assemble
from quire.backends.select import select_kernels
from quire.config import EngineConfig
from quire.engine import make_requests
from quire.engine.invariants import check_invariants
from quire.errors import EngineError, InvalidRequestError, ModelFormatError
from quire.kernels.formats import FORMATS
from quire.kernels.quantize import quantize
from quire.kernels.tensor_memory import TensorMemory
from quire.kernels.weights import Weight
from quire.models.decoder import Decoder
from quire.models.spec import ModelSpec
from quire.runner.worker import Draft
from quire.step import TokenLogprob
from tests.parallel.ranks import whole_weights
from tests.random_models import SPECS, Bench, Transcript

CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SMALL = {
    "device": "cpu",
    "kv_cache_memory": "256KiB",
    "max_model_len": 128,
    "max_num_seqs": 4,
    "dtype": "float32",
}
PROMPTS = [list(range(1, 40)), [5], [*range(1, 33), 7, 7], list(range(90, 40, -1))]
SCORED = [
    SamplingParams(temperature=i % 2, seed=i, max_tokens=9, logprobs=2, prompt_logprobs=0)
    for i in range(4)
]
Answer = list[tuple[list[int], list[TokenLogprob]]]


def in_q8(value: Tensor) -> Weight:
    return Weight.of(FORMATS["INT8"], tuple(value.shape), *quantize(FORMATS["INT8"], value))  # type: ignore[misc]


def decoder_of(spec: ModelSpec, seed: int, dtype: torch.dtype = torch.float32) -> Decoder:
    return Decoder(spec, select_kernels(CPU, dtype), whole_weights(spec, dtype, seed=seed), dtype)


def engine_of(spec: ModelSpec, seed: int, draft: Draft | None = None, **options: Any) -> Engine:
    return assemble(
        decoder_of(spec, seed), EngineConfig(**SMALL | options), name="small", draft=draft
    )


def answers(engine: Engine) -> Answer:
    """Tokens and scores of all prompts, in one batch."""
    found: dict[str, tuple[list[int], list[TokenLogprob]]] = {}
    for number, (prompt, params) in enumerate(zip(PROMPTS, SCORED, strict=True)):
        (request,) = make_requests(str(number), prompt, params, params.seed or 0)
        engine.core.add_request(request, 0.0)
        found[str(number)] = [], []
    while engine.core.has_work:
        for update in engine.core.step(0.0):
            assert update.error is None
            found[update.request_id][0].extend(update.new_token_ids)
            found[update.request_id][1].extend(update.logprobs)
            if update.prompt_logprobs is not None:
                found[update.request_id][1].extend(update.prompt_logprobs.logprobs)
    check_invariants(engine.core.scheduler)
    return list(found.values())


@cache
def fresh_answers(family: str, seed: int) -> Answer:
    return answers(engine_of(SPECS[family], seed))


def same(one: Transcript, other: Transcript) -> bool:
    assert one.logits.keys() == other.logits.keys()
    return one.tokens == other.tokens and all(
        torch.equal(row, other.logits[key]) for key, row in one.logits.items()
    )


# Weights replaced


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", SPECS)
def test_a_decoder_with_new_weights_is_a_new_decoder(family: str, dtype: torch.dtype) -> None:
    """All of them: matrices, experts, norms, biases, sinks; prompts and steps that were recorded
    with the old ones.
    """
    spec = SPECS[family]
    bench, fresh = (Bench(decoder_of(spec, seed, dtype)) for seed in (0, 1))
    params = [GREEDY] * len(PROMPTS)
    old = bench.run(PROMPTS, params)
    bench.runner.update(whole_weights(spec, dtype, seed=1))
    bench.core.reset_prefix_cache(0.0)
    new = bench.run(PROMPTS, params)
    assert same(new, fresh.run(PROMPTS, params))
    assert new.cached_tokens < 39 * 2  # of each other, not of the first run
    assert not same(new, old)


@pytest.mark.parametrize("quantized", [None, in_q8])
def test_a_recorded_step_computes_with_the_new_weights(
    quantized: Callable[[Tensor], Weight] | None,
) -> None:
    spec, kernels = SPECS["llama"], select_kernels(CPU, torch.float32)
    recorded: list[object] = []
    record = kernels.record
    assert record is not None

    def noted(compute: Callable[[], None]) -> Callable[[], None] | None:
        recorded.append(compute)
        return record(compute)

    kernels.record = noted  # type: ignore[misc]
    decoder = Decoder(spec, kernels, whole_weights(spec, torch.float32, quantized), torch.float32)
    places = {
        name: weight.parts[0].tensors[0].data_ptr() for name, weight in decoder.weights.items()
    }
    bench = Bench(decoder)
    bench.run(PROMPTS, [GREEDY] * 4)
    count = len(recorded)
    assert count > 0
    decoder.update(whole_weights(spec, torch.float32, quantized, seed=1))
    bench.core.reset_prefix_cache(0.0)
    new = bench.run(PROMPTS, [GREEDY] * 4)
    assert len(recorded) == count, "nothing was recorded anew"
    assert {
        name: weight.parts[0].tensors[0].data_ptr() for name, weight in decoder.weights.items()
    } == places
    other = Decoder(
        spec,
        select_kernels(CPU, torch.float32),
        whole_weights(spec, torch.float32, quantized, seed=1),
        torch.float32,
    )
    assert same(new, Bench(other, recorded=False).run(PROMPTS, [GREEDY] * 4))


def test_some_weights_may_be_replaced_alone() -> None:
    spec = SPECS["qwen2"]
    names = ("layers.1.mlp.down.weight", "layers.0.attention.qkv.bias", "final_norm")
    changed = {name: whole_weights(spec, torch.float32, seed=1)[name] for name in names}
    bench = Bench(decoder_of(spec, 0))
    bench.runner.update(changed)
    loaded = whole_weights(spec, torch.float32) | {
        name: whole_weights(spec, torch.float32, seed=1)[name] for name in names
    }
    mixed = Bench(Decoder(spec, select_kernels(CPU, torch.float32), loaded, torch.float32))
    assert same(bench.run(PROMPTS, [GREEDY] * 4), mixed.run(PROMPTS, [GREEDY] * 4))


@pytest.mark.parametrize(
    ("name", "weight", "said"),
    [
        ("layers.9.mlp.down.weight", torch.zeros(64, 96), "no parameter layers.9.mlp.down.weight"),
        (
            "layers.1.mlp.down.weight",
            torch.zeros(96, 64),
            r"layers.1.mlp.down.weight has shape \[96, 64\].*\[64, 96\]",
        ),
        (
            "layers.1.mlp.down.weight",
            torch.zeros(64, 96).bfloat16(),
            "layers.1.mlp.down.weight is BF16.*F32",
        ),
        ("final_norm", torch.zeros(63), r"final_norm has shape \[63\]"),
        ("final_norm", torch.zeros(64).bfloat16(), "final_norm is BF16"),
    ],
)
def test_a_weight_that_has_no_place_is_refused_and_nothing_changes(
    name: str, weight: Tensor, said: str
) -> None:
    engine = engine_of(SPECS["mistral"], 0)
    good = whole_weights(SPECS["mistral"], torch.float32, seed=1)
    with pytest.raises(ModelFormatError, match=said):
        engine.update_weights({"embedding": good["embedding"], name: Weight.dense(weight)})
    assert answers(engine) == fresh_answers("mistral", 0)


def test_a_weight_that_fails_is_named_with_those_replaced_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = engine_of(SPECS["mistral"], 0)
    kernels = engine.decoder.kernels
    pack_into = kernels.pack_into
    down = "layers.1.mlp.down.weight"

    def fails(packed: Weight, loaded: Weight) -> None:
        if packed is engine.decoder.weights[down]:
            raise MemoryError("no room to pack it")
        pack_into(packed, loaded)

    monkeypatch.setattr(kernels, "pack_into", fails)
    new = whole_weights(SPECS["mistral"], torch.float32, seed=1)
    with pytest.raises(ModelFormatError, match=f"{down} could not be replaced, 1 of 2.*no room"):
        engine.update_weights({"head": new["head"], down: new[down]})
    monkeypatch.undo()
    engine.update_weights({name: weight for name, weight in new.items() if name != "head"})
    assert answers(engine) == fresh_answers("mistral", 1)


# Sleeping


@pytest.mark.few(1)
@pytest.mark.parametrize("family", ["llama", "gpt_oss", "glm4_moe"])
def test_an_engine_that_slept_answers_as_before(family: str) -> None:
    engine = engine_of(SPECS[family], 0, host_cache_memory="128KiB")
    before = answers(engine)
    assert before == fresh_answers(family, 0)
    engine.sleep(1)
    assert len(engine.core.scheduler.blocks.cache) == len(engine.core.scheduler.blocks.host) == 0
    engine.wake_up()
    assert answers(engine) == before
    engine.sleep(2)
    engine.wake_up()  # there are no files to read
    engine.update_weights(whole_weights(SPECS[family], torch.float32))
    assert answers(engine) == before


def test_a_draft_model_sleeps_too() -> None:
    spec = SPECS["llama"]
    draft = Draft(decoder_of(spec, 0), has_own_cache=True, description="itself")
    engine = engine_of(spec, 0, draft, speculation="draft:itself")
    before = answers(engine)
    assert before == fresh_answers("llama", 0)
    for level in (1, 2):
        engine.sleep(level)
        engine.wake_up()
        if level == 2:
            engine.update_weights(whole_weights(spec, torch.float32))
        assert answers(engine) == before
    accepted = [
        len(entry.result.tokens["0"])
        for entry in engine.step_log
        if entry.result and "0" in entry.result.tokens
    ]
    assert max(accepted[-4:]) > 1, "its drafts are as good as before"


def test_an_engine_that_lacks_weights_takes_no_requests() -> None:
    spec = SPECS["mistral"]
    engine = engine_of(spec, 0)
    engine.sleep(2)
    engine.wake_up()
    new = whole_weights(spec, torch.float32, seed=1)
    last = new.popitem()
    with pytest.raises(EngineError, match=r"\d+ weights are missing.*update_weights"):
        answers(engine)
    engine.update_weights(new)
    with pytest.raises(EngineError, match=f"1 weights are missing.*{last[0]}"):
        answers(engine)
    engine.update_weights(dict([last]))
    assert answers(engine) == fresh_answers("mistral", 1)


def test_what_can_not_be_done_asleep_is_refused() -> None:
    engine = engine_of(SPECS["mistral"], 0)
    with pytest.raises(InvalidRequestError, match="level: must be 1"):
        engine.sleep(3)
    engine.wake_up()  # is awake
    (request,) = make_requests("a", [1, 2, 3], GREEDY, 0)
    engine.core.add_request(request, 0.0)
    for call in (
        engine.sleep,
        lambda: engine.core.reset_prefix_cache(0.0),
        lambda: engine.update_weights({}),
    ):
        with pytest.raises(EngineError, match="has to wait until no request runs"):
            call()
    while engine.core.has_work:
        engine.core.step(0.0)
    step = next(iter(engine.step_log)).step
    engine.sleep()
    with pytest.raises(EngineError, match="asleep already"):
        engine.sleep()
    with pytest.raises(EngineError, match="takes no requests: wake it up"):
        answers(engine)
    with pytest.raises(EngineError, match="asleep: wake it up before"):
        engine.update_weights({})
    with pytest.raises(EngineError, match="asleep"):
        engine.runner.submit(step)
    engine.wake_up()
    assert answers(engine) == fresh_answers("mistral", 0)


@given(
    st.lists(
        st.sampled_from(["ask", "update", "partial", "sleep 1", "sleep 2", "wake", "reset"]),
        max_size=12,
    )
)
@settings(max_examples=15)
def test_whatever_happens_answers_are_those_of_a_fresh_engine(calls: list[str]) -> None:
    """`halves`: the seeds of the weights that each half of the model has now; None: they are gone."""
    spec, seed, asleep = SPECS["llama"], 0, False
    engine = engine_of(spec, 0, host_cache_memory="64KiB")
    halves: list[int | None] = [0, 0]
    for call in [*calls, "wake", "ask"]:
        if call == "ask" and (asleep or None in halves):
            with pytest.raises(EngineError, match=r"asleep|missing"):
                answers(engine)
        elif call == "ask":
            assert answers(engine) == _mixed_answers(*halves)  # type: ignore[arg-type]
        elif call in ("update", "partial"):
            seed += 1
            weights = list(whole_weights(spec, torch.float32, seed=seed % 3).items())
            some = dict(weights if call == "update" else weights[: len(weights) // 2])
            if asleep:
                with pytest.raises(EngineError, match="asleep"):
                    engine.update_weights(some)
            else:
                engine.update_weights(some)
                halves = [seed % 3, seed % 3 if call == "update" else halves[1]]
        elif call.startswith("sleep"):
            if asleep:
                with pytest.raises(EngineError, match="already"):
                    engine.sleep(1)
            else:
                engine.sleep(int(call[-1]))
                asleep, halves = True, halves if call == "sleep 1" else [None, None]
        elif call == "wake":
            engine.wake_up()
            asleep = False
        else:
            engine.core.reset_prefix_cache(0.0)
    engine.update_weights(whole_weights(spec, torch.float32))
    assert answers(engine) == fresh_answers("llama", 0)


@cache
def _mixed_answers(first: int, second: int) -> Answer:
    spec = SPECS["llama"]
    weights, others = (
        list(whole_weights(spec, torch.float32, seed=seed).items()) for seed in (first, second)
    )
    half = len(weights) // 2
    decoder = Decoder(
        spec,
        select_kernels(CPU, torch.float32),
        dict(weights[:half] + others[half:]),
        torch.float32,
    )
    return answers(assemble(decoder, EngineConfig(**SMALL), name="small"))


# The real model


@pytest.fixture(scope="module")
def llm(smollm2_gguf: Path) -> Iterator[LLM]:
    with LLM(
        smollm2_gguf,
        device="cpu",
        kv_cache_memory="64MiB",
        host_cache_memory="8MiB",
        max_model_len=512,
    ) as llm:
        yield llm


def resident() -> int:
    """Bytes of memory that this process has touched and not given back, without its files."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(
        next(line for line in status.splitlines() if line.startswith("RssAnon")).split()[1]
    )


def test_a_model_sleeps_wakes_and_answers_the_same(llm: LLM) -> None:
    prompts = ["The capital of France is", "Once upon a time " * 20]
    params = SamplingParams(temperature=0, max_tokens=10, logprobs=2)

    def found() -> list[Any]:
        outputs = llm.generate(prompts, params)
        return [(one.token_ids, one.logprobs) for output in outputs for one in output.completions]

    before, awake = found(), resident()
    weights = llm.engine.decoder.nbytes
    cache = 64 * 2**20
    llm.sleep()
    assert resident() < awake, "the cache"
    with pytest.raises(EngineError, match="asleep"):
        llm.generate(prompts, params)
    with pytest.raises(EngineError, match="asleep"):
        llm.beam_search(prompts[0], 2, 2)
    with pytest.raises(EngineError, match="asleep"):
        llm.add_request(prompts[0], params)
    assert not llm.has_work
    llm.wake_up()
    assert found() == before
    llm.sleep(level=2)
    assert awake - resident() > 0.9 * weights
    llm.wake_up()
    assert found() == before
    assert resident() - awake < 0.1 * weights + cache, "nothing is held twice"
    llm.reset_prefix_cache()
    assert llm.generate(prompts[1], params)[0].metrics.cached_tokens == 0


# Memory


def test_memory_of_tensors_is_given_back_at_its_address() -> None:
    size = 8 * 2**20
    tensor, neighbour = torch.ones(size, dtype=torch.uint8), torch.ones(1000)
    view, place = tensor.view(1024, -1)[5], tensor.data_ptr()
    memory, before = TensorMemory([tensor, view, neighbour[:0], torch.empty(0)]), resident()
    memory.sleep(keep=True)
    assert tensor.sum() == size, "host memory is where what is kept is kept"
    memory.wake()
    memory.sleep(keep=False)
    assert before - resident() > 0.9 * size
    memory.wake()
    memory.wake()
    tensor.fill_(3)
    assert tensor.data_ptr() == place
    assert view.sum() == 3 * len(view)
    assert neighbour.sum() == 1000
