"""Weights replaced on two real ranks: the bits of an engine that was loaded with them, all ranks or
none of them.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire import LLM, RequestOutput, SamplingParams
from quire.checkpoints.memory_file import MemoryFile
from quire.engine.invariants import check_invariants
from quire.errors import EngineError, ModelFormatError
from quire.models.given_weights import GivenTensors, check_tensors
from quire.models.parameters import Parameters
from quire.parallel.processes import RankProcesses
from quire.parallel.runner import ParallelRunner
from tests.models.test_given_weights import changed
from tests.parallel.test_engine import are_gone, children

OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "kv_cache_memory": "2MiB",
    "max_num_seqs": 3,
    "max_batched_tokens": 64,
    "host_cache_memory": "1MiB",
}
PROMPTS = [list(range(3, 40)), [7, 8, 9], list(range(3, 30))]
PARAMS = SamplingParams(max_tokens=14, temperature=0, ignore_eos=True, logprobs=2)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def numbers(output: RequestOutput) -> tuple[object, ...]:
    assert output.error is None, output.error
    return output.token_ids, output.logprobs, output.finish_reason


def answers(llm: LLM) -> list[tuple[object, ...]]:
    return [numbers(llm.generate(prompt, PARAMS)[0]) for prompt in PROMPTS]


def stored(folder: Path) -> dict[str, Tensor]:
    (file,) = folder.glob("*.safetensors")
    return load_file(file)


@pytest.fixture(scope="module")
def versions(random_model: Path) -> list[dict[str, Tensor]]:
    old = stored(random_model)
    return [old, changed(old, 1), changed(old, 2)]


Expected = Callable[[str], list[list[tuple[object, ...]]]]


@pytest.fixture(scope="module")
def expected(
    random_model: Path,
    versions: list[dict[str, Tensor]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Expected:
    """By version: the answers of an engine on one device that was loaded with it."""
    known: dict[str, list[list[tuple[object, ...]]]] = {}

    def of(quantization: str) -> list[list[tuple[object, ...]]]:
        if quantization not in known:
            known[quantization] = []
            for weights in versions:
                folder = tmp_path_factory.mktemp("version")
                shutil.copytree(random_model, folder, dirs_exist_ok=True)
                (file,) = folder.glob("*.safetensors")
                save_file(weights, file, {"format": "pt"})
                with LLM(folder, quantization=quantization, **OPTIONS) as llm:
                    known[quantization].append(answers(llm))
        return known[quantization]

    return of


@pytest.fixture(scope="module")
def llm(random_model: Path) -> Iterator[LLM]:
    with LLM(random_model, tensor_parallel_size=2, **OPTIONS) as one:
        yield one


@pytest.fixture(autouse=True)
def as_loaded(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "llm" in request.fixturenames:
        llm = request.getfixturevalue("llm")
        llm.update_weights(request.getfixturevalue("versions")[0].items(), mode="abort")
        while llm.has_work:
            llm.step()


def finish(llm: LLM) -> dict[str, RequestOutput]:
    outputs = {}
    while llm.has_work:
        outputs |= {one.request_id: one.output for one in llm.step() if one.output is not None}
    check_invariants(llm.engine.core.scheduler)
    return outputs


def begin(llm: LLM, num_steps: int) -> list[str]:
    names = [llm.add_request(prompt, PARAMS) for prompt in PROMPTS]
    for _ in range(num_steps):
        llm.step()
    return names


@pytest.mark.parametrize(
    "quantization",
    ["auto", *(pytest.param(one, marks=pytest.mark.slow) for one in ("int8", "int4"))],
)
def test_answers_are_those_of_an_engine_loaded_with_them(
    quantization: str, random_model: Path, versions: list[dict[str, Tensor]], expected: Expected
) -> None:
    """And after sleep at both levels."""
    wanted = expected(quantization)
    with LLM(random_model, tensor_parallel_size=2, quantization=quantization, **OPTIONS) as llm:
        assert answers(llm) == wanted[0]
        llm.update_weights(versions[1].items())
        assert answers(llm) == wanted[1]
        llm.sleep(1)
        llm.wake_up()
        assert answers(llm) == wanted[1]
        llm.sleep(2)
        with pytest.raises(EngineError, match="asleep"):
            llm.update_weights(versions[2].items())
        llm.wake_up()
        assert (answers(llm), llm.weights_version) == (wanted[0], 2)
        llm.sleep(2)
        llm.engine.wake_up(reload=False)
        with pytest.raises(EngineError, match="weights are missing"):
            llm.add_request(PROMPTS[0], PARAMS)
        reversed_pairs = reversed([(name, one.double()) for name, one in versions[2].items()])
        llm.update_weights(reversed_pairs)
        assert (answers(llm), llm.weights_version) == (wanted[2], 3)


def test_requests_are_of_one_version_or_say_so(
    llm: LLM, versions: list[dict[str, Tensor]], expected: Expected
) -> None:
    wanted = expected("auto")
    first = llm.weights_version
    names = begin(llm, 3)
    waiting = llm.add_request(PROMPTS[1], PARAMS)  # there are three rows
    llm.update_weights(versions[1].items(), mode="wait")
    outputs = finish(llm)
    assert [numbers(outputs[name]) for name in names] == wanted[0]
    assert numbers(outputs[waiting]) == wanted[1][1]
    assert [outputs[one].weights_version for one in (*names, waiting)] == [first] * 3 + [first + 1]

    names = begin(llm, 5)
    llm.update_weights(versions[2].items(), mode="abort")
    outputs = finish(llm)
    assert {outputs[name].finish_reason for name in names} == {"abort"}
    assert answers(llm) == wanted[2]

    names = begin(llm, 6)
    llm.update_weights(versions[1].items(), mode="keep")
    outputs = finish(llm)
    for prompt, name in zip(PROMPTS, names, strict=True):
        output = outputs[name]
        (_, (count, version)) = output.completions[0].metrics.weights_versions
        assert version == first + 3
        tokens = list(output.token_ids)
        rest = SamplingParams(max_tokens=14 - count, temperature=0, ignore_eos=True)
        (fresh,) = llm.generate([prompt + tokens[:count]], rest)
        assert list(fresh.token_ids) == tokens[count:]


@pytest.mark.parametrize("step", ["first", "later"])
@pytest.mark.parametrize("rank", [0, 1])
def test_what_fails_halfway_is_missing_until_it_is_replaced(
    rank: int,
    step: str,
    llm: LLM,
    versions: list[dict[str, Tensor]],
    expected: Expected,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A weight that can't be packed: on rank 1 it comes with another format."""
    runner = llm.engine.runner
    assert isinstance(runner, ParallelRunner)
    named = llm.engine.new_weights(versions[1].items())
    before = llm.weights_version
    if rank == 0:
        original, left = Parameters.update, 0 if step == "first" else 3
        kernels = type(llm.engine.decoder.kernels)
        pack_into = kernels.pack_into

        def fails(self: Any, packed: Any, loaded: Any) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise MemoryError("none")
            pack_into(self, packed, loaded)

        monkeypatch.setattr(kernels, "pack_into", fails)
        assert original
    else:  # a commit of what rank 1 has not got
        assert runner._prepared is not None
        runner._prepared = runner._prepared[0] + (1000 if step == "first" else 2000), named
    with pytest.raises((ModelFormatError, EngineError), match=r"could not be replaced|rank 1"):
        llm.engine.update_weights(named)
    monkeypatch.undo()
    assert llm.weights_version == before + 1
    with pytest.raises(EngineError, match="weights are missing"):
        llm.add_request(PROMPTS[0], PARAMS)
    down = next(name for name in versions[1] if name.endswith("0.mlp.down_proj.weight"))
    llm.update_weights([(down, versions[2][down])])
    with pytest.raises(EngineError, match="weights are missing"):
        llm.add_request(PROMPTS[0], PARAMS)
    llm.update_weights(versions[2].items())
    assert answers(llm) == expected("auto")[2]


def test_what_does_not_fit_leaves_the_old_weights_on_all_ranks(
    llm: LLM, versions: list[dict[str, Tensor]], expected: Expected
) -> None:
    new, before = versions[1], llm.weights_version
    query = next(name for name in new if name.endswith("0.self_attn.q_proj.weight"))
    down = next(name for name in new if name.endswith("0.mlp.down_proj.weight"))
    wrong: list[tuple[list[tuple[str, Tensor]], str]] = [
        ([(query, new[query])], "q_proj.weight is kept as one matrix with .*k_proj"),
        ([("model.layers.99.x", new[down])], "model.layers.99.x has no place"),
        ([(down, new[down][:-1])], "down_proj.weight should have shape"),
        ([(down, new[down].int())], "down_proj.weight must hold floating-point"),
        ([(down, new[down]), (down, new[down])], "given twice"),
    ]
    for given, said in wrong:
        with pytest.raises(ModelFormatError, match=said):
            llm.update_weights(given)
    runner = llm.engine.runner
    assert isinstance(runner, ParallelRunner)
    gathered = MemoryFile()
    gathered.write(down, new[down])
    one = gathered.checkpoint()
    own = runner._weights

    class ReadsAll:
        """Rank 0 has the tensor; the file of the others is gone."""

        decoder = own.decoder

        def read(self, _: Any) -> Any:
            return own.read(one)

    broken = one.with_tensors(dict(one.tensors))
    broken._stamps = dict.fromkeys(one._stamps, (1, 2, 3))  # type: ignore[misc]
    runner._weights = ReadsAll()  # type: ignore[assignment]
    try:
        with pytest.raises(EngineError, match=r"rank 1: .*changed while it was being loaded"):
            llm.engine.stored_weights(broken)
    finally:
        runner._weights = own
    first = llm.engine.new_weights(new.items())
    llm.engine.new_weights(new.items())
    with pytest.raises(EngineError, match="was not prepared, or another one was after it"):
        llm.engine.update_weights(first)
    assert (answers(llm), llm.weights_version) == (expected("auto")[0], before)


def test_weights_are_read_while_steps_are_computed(
    llm: LLM, versions: list[dict[str, Tensor]], expected: Expected
) -> None:
    names = begin(llm, 2)
    named = llm.engine.new_weights(versions[1].items())
    outputs = finish(llm)
    assert [numbers(outputs[name]) for name in names] == expected("auto")[0]
    llm.engine.update_weights(named)
    assert answers(llm) == expected("auto")[1]


@pytest.mark.slow
@pytest.mark.parametrize("signalled", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("phase", ["prepare", "commit", "reload"])
def test_a_rank_that_is_lost_ends_the_group_in_every_phase(
    phase: str,
    signalled: signal.Signals,
    random_model: Path,
    versions: list[dict[str, Tensor]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("quire.parallel.runner.UPDATE_SECONDS", 6.0)
    new = versions[1]
    with LLM(random_model, tensor_parallel_size=2, **OPTIONS) as llm:
        answers(llm)
        if phase == "reload":
            llm.sleep(2)
        runner = llm.engine.runner
        assert isinstance(runner, ParallelRunner)
        (pid,) = children(llm)
        send = RankProcesses.send

        def kills(self: RankProcesses, message: object) -> None:
            if type(message).__name__.lower().startswith(phase):
                os.kill(pid, signalled)
            send(self, message)

        monkeypatch.setattr(RankProcesses, "send", kills)
        said = "killed by SIGKILL" if signalled == signal.SIGKILL else "hangs"
        change = llm.wake_up if phase == "reload" else lambda: llm.update_weights(new.items())
        with pytest.raises(EngineError, match=rf"rank 1 .*{said}"):
            change()
        assert llm.engine.runner.broken is not None
        (output,) = llm.generate("a", SamplingParams(max_tokens=3))
        assert "All ranks were ended" in str(output.error)
    assert are_gone([pid])


def test_tensors_are_checked_before_there_is_room_for_them(
    llm: LLM, versions: list[dict[str, Tensor]]
) -> None:
    spec, new = llm.engine.spec, GivenTensors(versions[1]).tensors
    check_tensors(spec, new)
    down = next(name for name in new if name.endswith("0.mlp.down_proj.weight"))
    check_tensors(spec, {down: new[down]})
    wrong = dataclasses.replace(new[down], shape=(2**40, 2**40))
    with pytest.raises(ModelFormatError, match="should have shape"):
        check_tensors(spec, {down: wrong})
    with pytest.raises(ModelFormatError, match="has no place"):
        check_tensors(spec, {"x": new[down]})
