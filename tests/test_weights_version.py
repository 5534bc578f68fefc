"""Weights replaced while there are requests: each answer tells by which version it was computed, and
is what that version makes of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire import LLM, LoRARequest, RequestOutput, SamplingParams
from quire.engine.invariants import check_invariants
from quire.errors import (
    EngineError,
    InvalidRequestError,
    ModelFormatError,
    UnsupportedModelError,
)
from quire.kernels.weights import Weight
from quire.tools.explain.explain import explain_request
from quire.tools.explain.text import explanation_text
from tests.adapters import random_adapter, save_adapter
from tests.frontend.templates import QWEN
from tests.models.test_given_weights import changed
from tests.server.random_model import write_model

OPTIONS = {"max_model_len": 128, "kv_cache_memory": "1MiB", "max_num_seqs": 3}
PROMPTS = [list(range(3, 40)), [7, 8, 9], list(range(3, 30))]
PARAMS = SamplingParams(max_tokens=14, temperature=0, ignore_eos=True, logprobs=1)


def numbers(output: RequestOutput) -> tuple[object, ...]:
    return output.token_ids, output.logprobs, output.finish_reason


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("small")
    write_model(path, QWEN)
    return path


@pytest.fixture(scope="module")
def versions(folder: Path) -> list[dict[str, Tensor]]:
    (file,) = folder.glob("*.safetensors")
    old = load_file(file)
    return [old, changed(old, 1), changed(old, 2)]


@pytest.fixture(scope="module")
def expected(
    folder: Path, versions: list[dict[str, Tensor]], tmp_path_factory: pytest.TempPathFactory
) -> list[list[tuple[object, ...]]]:
    """By version: the answers of an engine that was loaded with it."""
    found = []
    for number, weights in enumerate(versions):
        path = tmp_path_factory.mktemp(f"version{number}")
        write_model(path, QWEN)
        (file,) = path.glob("*.safetensors")
        save_file(weights, file, {"format": "pt"})
        with LLM(str(path), **OPTIONS) as llm:  # type: ignore[arg-type]
            found.append([numbers(llm.generate(one, PARAMS)[0]) for one in PROMPTS])
    assert found[0] != found[1] != found[2]
    return found


@pytest.fixture
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), **OPTIONS) as llm:  # type: ignore[arg-type]
        yield llm


def finish(llm: LLM) -> dict[str, RequestOutput]:
    outputs = {}
    while llm.has_work:
        for delta in llm.step():
            if delta.output is not None:
                outputs[delta.request_id] = delta.output
    check_invariants(llm.engine.core.scheduler)
    return outputs


def begin(llm: LLM, num_steps: int) -> list[str]:
    names = [llm.add_request(prompt, PARAMS) for prompt in PROMPTS]
    for _ in range(num_steps):
        llm.step()
    return names


def test_an_answer_tells_its_version_and_old_blocks_are_never_met(
    llm: LLM, versions: list[dict[str, Tensor]], expected: list[list[tuple[object, ...]]]
) -> None:
    for number in (0, 1, 2):
        if number:
            llm.update_weights(versions[number].items(), version=10 * number)
        outputs = [llm.generate(prompt, PARAMS)[0] for prompt in PROMPTS]
        assert [numbers(one) for one in outputs] == expected[number]
        assert {one.weights_version for one in outputs} == {10 * number} == {llm.weights_version}
        assert outputs[0].metrics.cached_tokens == 0
        assert outputs[2].metrics.cached_tokens > 0
    admitted = [one for entry in llm.engine.step_log for one in entry.step.admitted]
    assert [one.weights_version for one in admitted] == [0] * 3 + [10] * 3 + [20] * 3
    for wrong in (20, 3, -1, True, 2**63, "21"):
        with pytest.raises(InvalidRequestError, match="version: must be a whole number from 21"):
            llm.update_weights(versions[0].items(), version=wrong)  # type: ignore[arg-type]
    llm.update_weights(versions[0].items())
    assert llm.weights_version == 21


def test_a_pause_waits_for_those_that_have_begun(
    llm: LLM, versions: list[dict[str, Tensor]], expected: list[list[tuple[object, ...]]]
) -> None:
    names = begin(llm, 3)
    waiting = llm.add_request(PROMPTS[1], PARAMS)  # there are three rows
    llm.update_weights(versions[1].items(), mode="wait")
    outputs = finish(llm)
    assert [numbers(outputs[name]) for name in names] == expected[0]
    assert numbers(outputs[waiting]) == expected[1][1]
    assert [outputs[name].weights_version for name in (*names, waiting)] == [0, 0, 0, 1]


def test_all_answers_to_one_prompt_are_of_one_version(
    llm: LLM, versions: list[dict[str, Tensor]]
) -> None:
    """Some of them have not begun, as there are three rows; the first have ended."""
    params = SamplingParams(max_tokens=3, n=8, seed=1, ignore_eos=True)
    expected = [one.token_ids for one in llm.generate(PROMPTS[1], params)[0].completions]
    name = llm.add_request(PROMPTS[1], params)
    for _ in range(4):
        llm.step()
    llm.update_weights(versions[1].items(), mode="wait")
    output = finish(llm)[name]
    assert [one.token_ids for one in output.completions] == expected
    assert {one.metrics.weights_versions for one in output.completions} == {((0, 0),)}


def test_aborted_requests_end_and_new_ones_see_the_new_weights(
    llm: LLM, versions: list[dict[str, Tensor]], expected: list[list[tuple[object, ...]]]
) -> None:
    names = begin(llm, 5)
    llm.update_weights(versions[1].items(), mode="abort")
    outputs = finish(llm)
    assert {outputs[name].finish_reason for name in names} == {"abort"}
    for name, whole in zip(names, expected[0], strict=True):
        tokens = outputs[name].token_ids
        assert 0 < len(tokens) < 14
        assert tokens == whole[0][: len(tokens)]  # type: ignore[index]
    assert numbers(llm.generate(PROMPTS[0], PARAMS)[0]) == expected[1][0]


def test_kept_requests_go_on_from_their_tokens_as_a_fresh_request_would(
    llm: LLM, versions: list[dict[str, Tensor]]
) -> None:
    names = begin(llm, 5)
    llm.pause("keep")
    late = llm.add_request(PROMPTS[1], PARAMS)
    assert llm.is_paused
    assert not llm.has_work
    with pytest.raises(EngineError, match="paused: resume it first"):
        llm.generate(PROMPTS[0], PARAMS)
    llm.update_weights(versions[1].items())
    llm.update_weights(versions[2].items())
    llm.resume()
    outputs = finish(llm)
    for name, prompt in zip(names, PROMPTS, strict=True):
        output = outputs[name]
        spans = output.metrics.weights_versions
        assert [version for _, version in spans] == [0, 2]
        first = spans[1][0]
        assert 0 < first < 14
        rest = SamplingParams(max_tokens=14 - first, temperature=0, ignore_eos=True, logprobs=1)
        told = explain_request(list(llm.engine.step_log), name)
        assert told is not None
        assert told["answers"][0]["weights_versions"] == list(spans)
        assert f"version 2 from token {first} on" in explanation_text(told)
        again = llm.generate([*prompt, *output.token_ids[:first]], rest)[0]
        assert again.token_ids == output.token_ids[first:]
        assert again.logprobs == output.logprobs[first:]  # type: ignore[index]
    assert outputs[late].metrics.weights_versions == ((0, 2),)


def test_a_pause_without_an_update_changes_nothing(
    llm: LLM, expected: list[list[tuple[object, ...]]]
) -> None:
    names = begin(llm, 5)
    for mode in ("keep", "wait"):
        llm.pause(mode)  # type: ignore[arg-type]
        llm.resume()
    llm.pause("keep")
    llm.sleep()
    with pytest.raises(EngineError, match="asleep"):
        llm.resume()
    llm.wake_up()
    llm.resume()
    outputs = finish(llm)
    assert [numbers(outputs[name]) for name in names] == expected[0]
    with pytest.raises(InvalidRequestError, match="mode: must be one of wait, abort, keep"):
        llm.pause("later")  # type: ignore[arg-type]


def test_what_is_refused_leaves_the_old_weights_and_goes_on(
    llm: LLM, versions: list[dict[str, Tensor]], expected: list[list[tuple[object, ...]]]
) -> None:
    names = begin(llm, 3)
    down = next(name for name in versions[1] if name.endswith("0.mlp.down_proj.weight"))
    with pytest.raises(ModelFormatError, match=r"down_proj\.weight should have shape"):
        llm.update_weights([(down, versions[1][down][:-1])], mode="keep")
    assert not llm.is_paused
    outputs = finish(llm)
    assert [numbers(outputs[name]) for name in names] == expected[0]
    assert llm.weights_version == 0


def test_an_update_that_fails_halfway_says_what_is_missing_until_it_is_there(
    llm: LLM,
    versions: list[dict[str, Tensor]],
    expected: list[list[tuple[object, ...]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernels = llm.engine.decoder.kernels
    whole, count = kernels.pack_into, 0

    def fails(target: Weight, source: Weight) -> None:
        nonlocal count
        count += 1
        if count == 4:
            raise MemoryError
        whole(target, source)

    names = begin(llm, 3)
    monkeypatch.setattr(kernels, "pack_into", fails)
    with pytest.raises(ModelFormatError, match=r"could not be replaced, \d+ of \d+ weights were"):
        llm.update_weights(versions[1].items(), mode="keep")
    assert llm.weights_version == 1
    with pytest.raises(EngineError, match="an update failed halfway"):
        llm.resume()
    with pytest.raises(EngineError, match="an update failed halfway"):
        llm.generate(PROMPTS[0], PARAMS)
    llm.update_weights(versions[2].items())
    llm.resume()
    outputs = finish(llm)
    assert {outputs[name].weights_version for name in names} == {2}
    assert numbers(llm.generate(PROMPTS[0], PARAMS)[0]) == expected[2][0]


def test_weights_read_again_after_sleep_are_a_new_version(
    llm: LLM, versions: list[dict[str, Tensor]], expected: list[list[tuple[object, ...]]]
) -> None:
    llm.sleep(level=2)
    llm.wake_up()
    assert llm.weights_version == 0
    llm.update_weights(versions[1].items())
    llm.sleep(level=1)
    llm.wake_up()
    assert llm.weights_version == 1
    assert numbers(llm.generate(PROMPTS[0], PARAMS)[0]) == expected[1][0]
    llm.sleep(level=2)
    llm.wake_up()
    assert llm.weights_version == 2
    assert numbers(llm.generate(PROMPTS[0], PARAMS)[0]) == expected[0][0]


# Adapters


def asked_for(path: Path) -> LoRARequest:
    return LoRARequest("it", 1, str(path))


def test_adapters_add_to_the_new_weights_and_no_block_is_of_another_version_or_adapter(
    llm: LLM, folder: Path, versions: list[dict[str, Tensor]], tmp_path: Path
) -> None:
    """Requests of two adapters and of none are kept by an update; their further tokens, and those of
    new ones, are those of an engine that never had other weights.
    """
    paths = [random_adapter(tmp_path / str(i), llm.engine.decoder, i) for i in range(2)]
    adapters = [None, *(LoRARequest(path.name, 1, str(path)) for path in paths)]
    prompt = PROMPTS[0]
    names = [llm.add_request(prompt, PARAMS, lora_request=one) for one in adapters]
    for _ in range(5):
        llm.step()
    llm.update_weights(versions[1].items(), mode="keep")
    kept = finish(llm)
    fresh = [llm.generate(prompt, PARAMS, lora_request=one)[0] for one in adapters]
    with LLM(str(folder), **OPTIONS) as other:  # type: ignore[arg-type]
        other.update_weights(versions[1].items())
        for name, one, output in zip(names, adapters, fresh, strict=True):
            other.reset_prefix_cache()
            assert numbers(other.generate(prompt, PARAMS, lora_request=one)[0]) == numbers(output)
            (_, version), (first, later) = kept[name].metrics.weights_versions
            assert (version, later) == (0, 1)
            assert 0 < first < 14
            rest = SamplingParams(max_tokens=14 - first, temperature=0, ignore_eos=True, logprobs=1)
            before = [*prompt, *kept[name].token_ids[:first]]
            again = other.generate(before, rest, lora_request=one)[0]
            assert again.token_ids == kept[name].token_ids[first:]
            assert again.logprobs == kept[name].logprobs[first:]  # type: ignore[index]
    assert len({output.token_ids for output in fresh}) == len(adapters)


def dora(folder: Path) -> LoRARequest:
    """Of one product of 64 by 64."""
    generator = torch.Generator().manual_seed(0)
    module = "base_model.model.model.layers.0.self_attn.o_proj"
    tensors = {
        f"{module}.lora_A.weight": torch.randn(4, 64, generator=generator),
        f"{module}.lora_B.weight": torch.randn(64, 4, generator=generator),
        f"{module}.lora_magnitude_vector": torch.rand(64, generator=generator) + 0.5,
    }
    return LoRARequest("dora", 1, str(save_adapter(folder, tensors, use_dora=True)))


def test_weights_stay_while_an_adapter_was_made_for_them(
    llm: LLM, versions: list[dict[str, Tensor]], tmp_path: Path
) -> None:
    adapter = dora(tmp_path / "dora")
    name = llm.add_request(PROMPTS[0], PARAMS, lora_request=adapter)
    llm.step()
    for mode in (None, "keep"):
        with pytest.raises(EngineError, match=r"DoRA adapters are loaded|no request runs"):
            llm.update_weights(versions[1].items(), mode=mode)  # type: ignore[arg-type]
    llm.unload_adapter("dora")  # its request goes on
    with pytest.raises(EngineError, match="DoRA adapters are loaded"):
        llm.update_weights(versions[1].items(), mode="keep")
    assert finish(llm)[name].finish_reason == "length"
    llm.update_weights(versions[1].items())


def test_no_adapter_is_made_for_weights_that_were_replaced(
    llm: LLM, folder: Path, versions: list[dict[str, Tensor]], tmp_path: Path
) -> None:
    """DoRA's norms are those of the files' weights: with others it would be wrong and look right."""
    adapter = dora(tmp_path / "dora")
    expected = numbers(llm.generate(PROMPTS[0], PARAMS, lora_request=adapter)[0])
    llm.unload_adapter("dora")
    with pytest.raises(ModelFormatError, match="should have shape"):
        llm.update_weights([("lm_head.weight", versions[1]["lm_head.weight"][:-1])])
    assert numbers(llm.generate(PROMPTS[0], PARAMS, lora_request=adapter)[0]) == expected
    llm.unload_adapter("dora")
    llm.update_weights(versions[1].items())
    for _ in range(2):
        with pytest.raises(UnsupportedModelError, match="use_dora divides by norms"):
            llm.generate(PROMPTS[0], PARAMS, lora_request=adapter)
    assert not llm.engine.adapters.loaded
    llm.sleep(level=2)
    llm.wake_up()  # which reads the files again
    assert numbers(llm.generate(PROMPTS[0], PARAMS, lora_request=adapter)[0]) == expected
