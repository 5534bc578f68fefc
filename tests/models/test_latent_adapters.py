"""Adapters of what expands latents (`kv_b_proj`), which latent attention has as a matrix for each head
on either side of it. Compared with PEFT in `test_adapters_against_peft.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from quire import LLM, LoRARequest, SamplingParams
from quire.errors import UnsupportedModelError
from tests.adapters import save_adapter
from tests.models.random_configurations import random_model
from tests.models.test_latent_families import SMALL
from tests.test_adapters import ENGINE

RANK, LATENT, OUTPUTS = 3, SMALL["kv_lora_rank"], 4 * (8 + 6)
MODULE = "base_model.model.model.layers.{}.self_attn.kv_b_proj"
PROMPT = [7, 8, 9, 10] * 9


@pytest.fixture(scope="module", params=[1, 2], ids=["experts", "dense, recorded"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    settings = {**SMALL, "first_k_dense_replace": request.param, "max_position_embeddings": 256}
    random_model(transformers.DeepseekV3Config(**settings), 0).save_pretrained(folder)
    return folder


def save(folder: Path, seed: int, layers: tuple[int, ...] = (0, 1), **settings: Any) -> LoRARequest:
    torch.manual_seed(seed)
    tensors = {}
    for layer in layers:
        name = MODULE.format(layer)
        tensors[f"{name}.lora_A.weight"] = torch.randn(RANK, LATENT)
        tensors[f"{name}.lora_B.weight"] = torch.randn(OUTPUTS, RANK)
        if settings.get("use_dora"):
            tensors[f"{name}.lora_magnitude_vector"] = torch.ones(OUTPUTS)
    path = save_adapter(folder / str(seed), tensors, r=RANK, lora_alpha=RANK, **settings)
    return LoRARequest(f"a{seed}", 1 + seed, str(path))


@pytest.mark.parametrize("options", [{}, {"speculation": "ngram", "max_loras": 1}], ids=str)
def test_answers_in_a_batch_are_those_alone(
    model: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    asked = [None, save(tmp_path, 0), save(tmp_path, 1, (1,)), None, save(tmp_path, 2, (0,))]
    params = SamplingParams(temperature=0.8, seed=3, n=2, max_tokens=8, logprobs=1, ignore_eos=True)

    def answers(outputs: Any) -> Any:
        return [
            [(one.token_ids, one.cumulative_logprob) for one in output.completions]
            for output in outputs
        ]

    with LLM(model, **{**ENGINE, **options}) as llm:
        plain = answers(llm.generate(PROMPT, params))[0]  # what is recorded, is so before
        together = answers(llm.generate([PROMPT] * len(asked), params, lora_request=asked))
        llm.reset_prefix_cache()
        apart = [answers(llm.generate(PROMPT, params, lora_request=one))[0] for one in asked]
        again = answers(llm.generate(PROMPT, params))[0]
    assert together == apart
    assert plain == again == apart[0]
    assert len({str(one) for one in together}) == 4


@pytest.mark.slow  # two processes that load the model
def test_ranks_give_the_same_answers(model: Path, tmp_path: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    asked = [None, save(tmp_path, 0), save(tmp_path, 1)]

    def answers(llm: LLM) -> Any:
        found = llm.generate([PROMPT] * len(asked), params, lora_request=asked)
        return [one.completions[0].token_ids for one in found]

    with LLM(model, **ENGINE) as llm:
        expected = answers(llm)
    with LLM(model, **ENGINE, tensor_parallel_size=2) as divided:
        assert answers(divided) == expected


def test_dora_of_it_is_refused_by_name(model: Path, tmp_path: Path) -> None:
    adapter = save(tmp_path, 0, use_dora=True)
    with (
        LLM(model, **ENGINE) as llm,
        pytest.raises(UnsupportedModelError, match=r"kv_b_proj\.lora.* there is no DoRA"),
    ):
        llm.load_adapter("it", adapter.lora_path)
