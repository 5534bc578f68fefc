"""Sampling, scoring and training agree in every bit, after each of many updates of the weights."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor

from quire import LLM, RequestOutput, SamplingParams
from quire.errors import InvalidRequestError, ModelFormatError
from quire.train import Weights, logprobs
from tests.frontend.templates import QWEN
from tests.models.test_given_weights import stored
from tests.server.random_model import write_model

TEXTS = ("the quick", "a b c d", "one two three", "once")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_model(tmp_path, QWEN)
    return tmp_path


def answers(llm: LLM, count: int, max_tokens: int, seed: int) -> list[RequestOutput]:
    params = [
        SamplingParams(
            max_tokens=max_tokens, temperature=1.0, seed=seed + i, logprobs=0, ignore_eos=True
        )
        for i in range(count)
    ]
    return llm.generate([TEXTS[i % len(TEXTS)] for i in range(count)], params, progress=False)


def sampled(output: RequestOutput) -> Tensor:
    assert output.logprobs is not None
    return torch.tensor([one.logprob for one in output.logprobs])


def scored(llm: LLM, sequences: list[list[int]]) -> list[Tensor]:
    """Of all tokens but the first."""
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    found = []
    for output in llm.generate(sequences, params, progress=False):
        assert output.prompt_logprobs is not None
        found.append(torch.tensor([one.logprob for one in output.prompt_logprobs[1:] if one]))
    return found


def count_differences(
    folder: Path, dtype: str, device: str, updates: int, count: int, max_tokens: int
) -> tuple[int, int]:
    """How many logprobs of sampled tokens were compared, after each update, and how many of them
    differ between sampling, scoring and training.
    """
    compared = differing = 0
    with LLM(
        str(folder), device=device, dtype=dtype, max_model_len=128, kv_cache_memory="16MiB"
    ) as llm:
        weights = Weights(llm)
        optimizer = torch.optim.Adam(weights.parameters(), lr=1e-3)
        before = None
        for step in range(updates):
            outputs = answers(llm, count, max_tokens, step)
            sequences = [[*one.prompt_token_ids, *one.token_ids] for one in outputs]
            starts = [len(one.prompt_token_ids) for one in outputs]
            trained = logprobs(weights, sequences, starts)
            sides = zip(outputs, trained, scored(llm, sequences), starts, strict=True)
            for output, own, whole, start in sides:
                first, second = sampled(output), whole[start - 1 :]
                assert len(own) == len(first) == len(second) == len(output.token_ids)
                alike = (own.detach().cpu() == first) & (first == second)
                compared += len(own)
                differing += int((~alike).sum())
            present = trained[0].detach()
            assert before is None or not torch.equal(present, before)  # weights did change
            before = present
            optimizer.zero_grad()
            (-torch.cat(trained).mean()).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            weights.update()
    return compared, differing


def test_no_logprob_differs_after_updates(folder: Path) -> None:
    found = count_differences(folder, "bfloat16", "cpu", updates=3, count=4, max_tokens=10)
    assert found == (120, 0)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_logprob_of_ten_thousand_differs_after_fifty_updates(folder: Path, dtype: str) -> None:
    found = count_differences(folder, dtype, "cpu", updates=50, count=8, max_tokens=25)
    assert found == (10_000, 0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_logprob_of_ten_thousand_differs_on_a_gpu(folder: Path, dtype: str) -> None:
    found = count_differences(folder, dtype, "cuda", updates=50, count=8, max_tokens=25)
    assert found == (10_000, 0)


OPTIMIZERS = [
    ("AdamW", {"fused": True}),
    ("AdamW", {"foreach": True}),
    ("AdamW", {"foreach": False}),
    ("Adam", {"fused": True}),
    ("SGD", {"fused": True}),
    ("Adagrad", {"fused": True}),
]


@pytest.mark.parametrize(("name", "options"), OPTIMIZERS)
def test_every_optimizers_steps_are_seen(name: str, options: dict[str, bool], folder: Path) -> None:
    """Fused ones change tensors whose versions stay what they were."""
    tokens = list(range(2, 12))
    with LLM(str(folder), dtype="float32", kv_cache_memory="4MiB", max_model_len=64) as llm:
        weights = Weights(llm)
        optimizer = getattr(torch.optim, name)(weights.parameters(), lr=0.01, **options)
        before: list[Tensor] = []
        for _ in range(3):
            (own,) = logprobs(weights, [tokens])
            assert torch.equal(own.detach(), scored(llm, [tokens])[0])
            assert not any(torch.equal(own.detach(), one) for one in before)
            before.append(own.detach())
            optimizer.zero_grad()
            (-own.mean()).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            with pytest.raises(ModelFormatError, match=r"call update\(\) after each of its steps"):
                logprobs(weights, [tokens])
            weights.update()
        with torch.no_grad():
            expected = llm.weights_version
            strangers = [torch.zeros(3, requires_grad=True)]
            strangers[0].grad = torch.ones(3)
            torch.optim.AdamW(strangers, fused=True).step()
            logprobs(weights, [tokens])  # no tensor of these weights has changed
            assert llm.weights_version == expected


def test_an_update_gives_what_was_changed_unseen(folder: Path) -> None:
    """Through `.data`, which is how some trainers write: nobody counts that."""
    tokens = list(range(2, 12))
    with LLM(str(folder), dtype="float32", kv_cache_memory="4MiB", max_model_len=64) as llm:
        weights = Weights(llm)
        (before,) = logprobs(weights, [tokens])
        for one in weights.parameters():
            one.data.mul_(1.5)
        weights.update()
        (after,) = logprobs(weights, [tokens])
        assert not torch.equal(before, after)
        assert torch.equal(after.detach(), scored(llm, [tokens])[0])


def test_gradients_of_weights_that_changed_meanwhile_are_refused(folder: Path) -> None:
    """Frozen ones, too, which no graph of autograd keeps; and changes that nobody counts."""
    tokens = list(range(2, 12))
    with LLM(str(folder), dtype="float32", kv_cache_memory="4MiB", max_model_len=64) as llm:
        weights = Weights(llm)
        frozen = weights.tensors["model.layers.0.mlp.down_proj.weight"].requires_grad_(False)
        optimizer = torch.optim.AdamW(weights.parameters(), fused=True)
        logprobs(weights, [tokens])[0].sum().backward()  # type: ignore[no-untyped-call]
        (late,) = logprobs(weights, [tokens])
        optimizer.step()
        with pytest.raises(ModelFormatError, match="an optimizer has changed weights"):
            late.sum().backward()  # type: ignore[no-untyped-call]
        weights.update()
        (late,) = logprobs(weights, [tokens])
        frozen.mul_(2)
        with pytest.raises(ModelFormatError, match=r"down_proj.weight has changed"):
            late.sum().backward()  # type: ignore[no-untyped-call]
        weights.update()
        with pytest.raises(ModelFormatError, match=r"call backward\(\) before update\(\)"):
            late.sum().backward()  # type: ignore[no-untyped-call]
        (now,) = logprobs(weights, [tokens])
        now.sum().backward()  # type: ignore[no-untyped-call]


def test_weights_that_nobody_needs_are_freed(folder: Path) -> None:
    with LLM(str(folder), kv_cache_memory="4MiB", max_model_len=64, dtype="float32") as llm:
        weights = weakref.ref(Weights(llm))
        gc.collect()
        assert weights() is None


def test_tensors_are_those_of_the_files(folder: Path) -> None:
    with LLM(str(folder), dtype="float32", kv_cache_memory="4MiB", max_model_len=64) as llm:
        weights = Weights(llm)
        expected = stored(folder)
        assert weights.tensors.keys() == expected.keys()
        assert all(torch.equal(one, expected[name]) for name, one in weights.tensors.items())
        llm.sleep(level=2)
        with pytest.raises(InvalidRequestError, match=r"asleep"):
            logprobs(weights, [[1, 2, 3]])


def test_a_quantized_cache_is_refused(folder: Path) -> None:
    options = {"kv_cache_dtype": "int8", "kv_cache_memory": "4MiB", "max_model_len": 64}
    with (
        LLM(str(folder), **options) as llm,  # type: ignore[arg-type]
        pytest.raises(InvalidRequestError, match=r"keeps keys and values in torch.int8"),
    ):
        Weights(llm)
