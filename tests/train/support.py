"""Random models with a trainer's tensors, and what their engine says of tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from quire.kernels.ops import Kernels
from quire.models.decoder import Decoder
from quire.models.given_weights import GivenTensors
from quire.models.load import load_planned
from quire.models.names import huggingface_pieces
from quire.models.spec import ModelSpec
from quire.models.weight_plan import ModelFiles, plan_weights
from quire.sampling_params import SamplingParams
from quire.train import Weights
from tests.random_models import Bench


def random_tensors(spec: ModelSpec, seed: int = 0, device: str = "cpu") -> dict[str, Tensor]:
    """By the names of a checkpoint, float32 with gradients: large enough that answers wander."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    shapes = spec.parameters()
    for piece in huggingface_pieces(spec, ()):
        shape = piece.shape(shapes[piece.parameter])
        value = torch.randn(shape, generator=generator)
        is_norm = "norm" in piece.parameter
        value = 1 + 0.1 * value if is_norm else value * (2.0 / shape[-1] ** 0.5)
        tensors[piece.name] = value.to(device).requires_grad_()
    return tensors


def decoder_of(
    spec: ModelSpec, tensors: Mapping[str, Tensor], kernels: Kernels, dtype: torch.dtype
) -> Decoder:
    """One that was loaded with these tensors."""
    device = next(iter(tensors.values())).device
    plain = GivenTensors({name: one.detach() for name, one in tensors.items()})
    files = ModelFiles(spec, plain, tuple(huggingface_pieces(spec, ())))
    return load_planned(plan_weights(files, kernels, dtype, device, "none"))


def random_weights(
    spec: ModelSpec, kernels: Kernels, dtype: torch.dtype, device: str = "cpu"
) -> Weights:
    tensors = random_tensors(spec, device=device)
    return Weights(decoder_of(spec, tensors, kernels, dtype), tensors)


def sampled_and_scored(
    bench: Bench, prompts: Sequence[Sequence[int]], max_tokens: int
) -> tuple[list[list[int]], list[Tensor], list[Tensor]]:
    """Whole sequences, the logprobs of their sampled tokens, and those of all but the first token
    when the whole sequence comes as a prompt.
    """
    params = SamplingParams(
        max_tokens=max_tokens, temperature=1.0, seed=1, logprobs=0, ignore_eos=True
    )
    found = bench.run(prompts, [params] * len(prompts))
    whole = [[*prompt, *found.tokens[str(i)]] for i, prompt in enumerate(prompts)]
    sampled = [_values(found.logprobs[str(i)]) for i in range(len(prompts))]
    scoring = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, ignore_eos=True)
    scored = bench.run(whole, [scoring] * len(whole))
    by_position = [scored.prompt_logprobs[str(i)] for i in range(len(whole))]
    return whole, sampled, [_values([one[at] for at in sorted(one)]) for one in by_position]


def _values(logprobs: Sequence[object]) -> Tensor:
    return torch.tensor([one.logprob for one in logprobs])  # type: ignore[attr-defined]
