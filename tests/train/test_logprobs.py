"""`quire.train.logprobs`: the engine's values bit for bit, and gradients that are true."""

from __future__ import annotations

import copy
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _pop_mode_temporarily

from quire.backends.cpu.kernels import CpuKernels
from quire.backends.select import select_kernels
from quire.errors import InvalidRequestError, ModelFormatError
from quire.kernels import formats
from quire.kernels.quantize import INT8, quantize
from quire.kernels.weights import Weight
from quire.models.load import open_model
from quire.train import Weights, forward, logprobs
from tests.decoding import load_decoder
from tests.models.random_configurations import draw_values, load_reference, save_model
from tests.random_models import SPECS, WITH_STATES, Bench, random_decoder
from tests.train.support import decoder_of, random_tensors, random_weights, sampled_and_scored

ALL = {**SPECS, **WITH_STATES}
LENGTHS = (21, 12, 70)


def drawn_prompts(seed: int, vocab_size: int = 97) -> list[list[int]]:
    rng = Random(seed)
    return [[rng.randrange(1, vocab_size) for _ in range(length)] for length in LENGTHS]


@pytest.mark.few(4)
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_are_those_of_sampling_and_of_scoring(name: str, dtype: torch.dtype) -> None:
    weights = random_weights(ALL[name], CpuKernels(), dtype)
    check_values(weights)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in SPECS if name != "deepseek_v3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_on_a_gpu(name: str, dtype: torch.dtype) -> None:
    device = torch.device("cuda")
    weights = random_weights(SPECS[name], select_kernels(device, dtype, "auto"), dtype, "cuda")
    check_values(weights)
    sum(one.sum() for one in logprobs(weights, drawn_prompts(2))).backward()  # type: ignore[union-attr]
    assert all(one.grad.isfinite().all() for one in weights.parameters() if one.grad is not None)


def check_values(weights: Weights) -> None:
    prompts = drawn_prompts(1)
    whole, sampled, scored = sampled_and_scored(Bench(weights.decoder), prompts, 9)
    found = [one.detach().cpu() for one in logprobs(weights, whole)]
    for one, expected, answer in zip(found, scored, sampled, strict=True):
        assert torch.equal(one, expected)
        assert torch.equal(one[-len(answer) :], answer)
    answers = logprobs(weights, whole, list(LENGTHS))
    for one, answer in zip(answers, sampled, strict=True):
        assert torch.equal(one.detach().cpu(), answer)


class Float64(TorchFunctionMode):
    """The definition says float32 where it means "wide": here that is float64."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = {
            key: torch.float64 if one is torch.float32 else one
            for key, one in (kwargs or {}).items()
        }
        return func(*args, **kwargs) if func is not torch.Tensor.float else args[0].double()


@pytest.fixture
def float64_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(formats.PLAIN, torch.float64, formats.PLAIN[torch.float32])


def total(found: list[Tensor]) -> Tensor:
    """A sum in which each token counts otherwise."""
    return torch.stack(
        [(one.double() * torch.linspace(-1, 2, len(one)).double()).sum() for one in found]
    ).sum()


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ALL)
@pytest.mark.usefixtures("float64_is_plain")
def test_gradients_are_finite_differences(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the definition alone, in float64: along some random directions."""
    weights = random_weights(ALL[name], CpuKernels(), torch.float32)
    prompts = drawn_prompts(3)
    total(logprobs(weights, prompts)).backward()  # type: ignore[no-untyped-call]
    gradients = {name: one.grad for name, one in weights.tensors.items() if one.grad is not None}

    def by_definition(segment: Any, inputs: Any, trained: Any) -> Any:
        assert not trained
        parameters = {name: weights.parameter(name) for name in segment.names}
        with torch.no_grad():
            with _pop_mode_temporarily():  # for the choice of experts
                segment.exact(tuple(one.to(segment.input_dtype) for one in inputs))
            return segment.definition(tuple(inputs), parameters)

    monkeypatch.setattr(forward._Segment, "__call__", by_definition)
    monkeypatch.setattr(weights, "check", lambda: None)
    plain = {name: one.detach().double() for name, one in weights.tensors.items()}
    weights.gradient_dtype = torch.float64
    generator = torch.Generator().manual_seed(1)
    for _ in range(2):
        direction = {
            name: torch.randn(one.shape, generator=generator).double()
            * plain[name].std(correction=0).clamp_min(1e-3)
            for name, one in gradients.items()
        }
        sides = []
        for step in (1e-5, -1e-5):
            weights.tensors = {
                name: one + step * direction[name] if name in direction else one
                for name, one in plain.items()
            }
            with Float64():
                sides.append(total(logprobs(weights, prompts)))
        difference = ((sides[0] - sides[1]) / 2e-5).item()
        found = sum((gradients[name].double() * direction[name]).sum().item() for name in gradients)
        assert found == pytest.approx(difference, rel=2e-3, abs=2e-2), name


FAMILIES = (
    "llama",
    "qwen2_moe",
    "gemma2",
    "gpt_oss",
    "deepseek_v3",
    "gemma4_text",
    "starcoder2",
    "glm4_moe",
    "bloom",
    "mpt",
)


@pytest.mark.few(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    """Each within 1e-4 of its largest number; where float32 itself is further off, at most twice as
    far from float64 as transformers is.
    """
    rng = Random(f"gradients {family}")
    values = draw_values(rng, family)
    save_model(rng, family, values, tmp_path)
    model = load_reference(tmp_path)
    decoder = load_decoder(open_model(tmp_path), CpuKernels(), torch.float32, torch.device("cpu"))
    tensors = {
        name: one.detach().clone().requires_grad_()
        for name, one in model.state_dict().items()
        if one.is_floating_point()
    }
    prompts = drawn_prompts(4, values["vocab_size"])  # token 0 is padding to transformers
    total(logprobs(Weights(decoder, tensors), prompts)).backward()  # type: ignore[no-untyped-call]
    expected = reference_gradients(model, prompts)
    exact = reference_gradients(copy.deepcopy(model).double(), prompts)
    assert len(expected) > 5
    for name, theirs in expected.items():
        ours = tensors[name].grad
        ours = torch.zeros_like(theirs) if ours is None else ours
        if (ours - theirs).abs().max() <= 1e-4 * theirs.abs().max():
            continue
        off = (ours.double() - exact[name]).abs().max()
        assert off <= 2 * (theirs.double() - exact[name]).abs().max() + 1e-6, name


def reference_gradients(model: Any, prompts: list[list[int]]) -> dict[str, Tensor]:
    found = []
    for prompt in prompts:
        scores = model(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)
        found.append(scores.gather(1, torch.tensor(prompt[1:]).unsqueeze(1)).squeeze(1))
    total(found).backward()  # type: ignore[no-untyped-call]
    return {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


def test_bfloat16_has_the_gradients_of_float32_at_the_rounded_weights() -> None:
    spec = SPECS["qwen3_moe"]
    prompts, found = drawn_prompts(5), []
    for dtype in (torch.bfloat16, torch.float32):
        tensors = random_tensors(spec)
        for one in tensors.values():
            one.data = one.data.bfloat16().float()
        weights = Weights(decoder_of(spec, tensors, CpuKernels(), dtype), tensors)
        total(logprobs(weights, prompts)).backward()  # type: ignore[no-untyped-call]
        found.append(
            torch.cat([one.grad.flatten() for one in weights.parameters() if one.grad is not None])
        )
    assert torch.cosine_similarity(*found, dim=0) > 0.98


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_only_what_is_trained_gets_a_gradient_and_the_same_one(name: str) -> None:
    weights = random_weights(SPECS[name], CpuKernels(), torch.float32)
    prompts = drawn_prompts(6)
    total(logprobs(weights, prompts)).backward()  # type: ignore[no-untyped-call]
    expected = {name: one.grad for name, one in weights.tensors.items()}
    layer = f"model.layers.{len(weights.decoder.layers) - 1}"
    # one of three that are kept as one matrix, and what is in front of and behind it
    trained = {f"{layer}.self_attn.k_proj.weight", f"{layer}.input_layernorm.weight"}
    for name, one in weights.tensors.items():
        one.grad = None
        one.requires_grad_(name in trained)
    total(logprobs(weights, prompts)).backward()  # type: ignore[no-untyped-call]
    found = {name: one.grad for name, one in weights.tensors.items() if one.grad is not None}
    assert found.keys() == trained
    for name, gradient in found.items():
        assert expected[name] is not None
        torch.testing.assert_close(gradient, expected[name])


def test_weights_that_the_model_has_not_got_are_refused() -> None:
    spec = SPECS["qwen2"]
    weights, prompts = random_weights(spec, CpuKernels(), torch.float32), drawn_prompts(7)
    before = logprobs(weights, prompts)
    name = "model.layers.0.self_attn.k_proj.weight"
    with torch.no_grad():
        weights.tensors[name].mul_(1.5)
    with pytest.raises(ModelFormatError, match=r"k_proj.weight has changed .* call update\(\)"):
        logprobs(weights, prompts)
    weights.update()
    after = logprobs(weights, prompts)
    assert not torch.equal(after[0], before[0])
    other = Weights(weights.decoder, random_tensors(spec, seed=9))
    with pytest.raises(ModelFormatError, match="were replaced by others"):
        logprobs(weights, prompts)
    assert not torch.equal(logprobs(other, prompts)[0], after[0])
    weights.update()
    assert torch.equal(logprobs(weights, prompts)[0], after[0])


def test_what_has_no_gradient_is_refused() -> None:
    spec = SPECS["llama"]
    tensors = random_tensors(spec)

    def as_int8(tensor: Tensor) -> Weight:
        made = quantize(INT8, tensor.contiguous())
        assert made is not None
        return Weight.of(INT8, tuple(tensor.shape), *made)

    quantized = random_decoder(spec, CpuKernels(), torch.float32, quantize=as_int8)
    with pytest.raises(
        InvalidRequestError, match=r'as INT8, which has no gradient: .*quantization="none"'
    ):
        Weights(quantized, tensors)
    decoder = decoder_of(spec, tensors, CpuKernels(), torch.float32)
    del tensors["model.norm.weight"]
    with pytest.raises(ModelFormatError, match=r"model\.norm\.weight is missing"):
        Weights(decoder, tensors)


@pytest.mark.parametrize(
    ("tokens", "scored_from", "said"),
    [
        ([[1]], None, "sequence 0 has 1 tokens"),
        ([[1, 2]], [2], "is 2 for sequence 0"),
        ([[1, 97]], None, "not all from 0 to 96"),
        ([[1, 2]], [1, 1], "2 positions for 1 sequences"),
        ([], None, "no sequence"),
    ],
)
def test_wrong_sequences_are_refused(tokens: Any, scored_from: Any, said: str) -> None:
    weights = random_weights(SPECS["llama"], CpuKernels(), torch.float32)
    with pytest.raises(InvalidRequestError, match=said):
        logprobs(weights, tokens, scored_from)
