"""Adapters of experts: all of a layer's in one pair of matrices, as PEFT keeps them, or one by one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from quire import LLM, LoRARequest, SamplingParams
from quire.errors import ModelFormatError, UnsupportedModelError
from tests.adapters import save_adapter
from tests.models.random_configurations import random_model
from tests.test_adapters import ENGINE, PROMPT, tokens

EXPERTS, HIDDEN, INNER, RANK = 6, 64, 32, 3
MODULE = "base_model.model.model.layers.1.mlp.experts"
BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One whose gate and up projections are a square matrix together."""
    folder = tmp_path_factory.mktemp("model")
    config = transformers.Qwen3MoeConfig(
        vocab_size=300,
        hidden_size=HIDDEN,
        moe_intermediate_size=INNER,
        num_experts=EXPERTS,
        num_experts_per_tok=2,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        initializer_range=0.2,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    random_model(config, 0).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(model, **ENGINE) as llm:
        yield llm


def pairs(seed: int = 0) -> dict[str, tuple[Tensor, Tensor]]:
    """For each of the two products A [experts, rank, inputs] and B [experts, outputs, rank]."""
    source = torch.Generator().manual_seed(seed)

    def make(*shape: int) -> Tensor:
        return torch.randn(shape, generator=source) * 0.3

    return {
        "gate_up": (make(EXPERTS, RANK, HIDDEN), make(EXPERTS, 2 * INNER, RANK)),
        "down": (make(EXPERTS, RANK, INNER), make(EXPERTS, HIDDEN, RANK)),
    }


def stacked(a: Tensor, b: Tensor, old: bool = False) -> tuple[Tensor, Tensor]:
    """As PEFT stores them; before 0.19 with the sides of each expert exchanged."""
    if old:
        a, b = b.mT, a.mT
    return a.reshape(-1, a.shape[-1]), b.permute(1, 2, 0).reshape(b.shape[1], -1)


def in_one(made: dict[str, tuple[Tensor, Tensor]], old: bool = False) -> dict[str, Tensor]:
    found = {}
    for product, module in (("gate_up", f"{MODULE}.base_layer"), ("down", MODULE)):
        a, b = stacked(*made[product], old)
        found |= {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
    return found


def one_by_one(made: dict[str, tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    found = {}
    (gate_up_a, gate_up_b), (down_a, down_b) = made["gate_up"], made["down"]
    for expert in range(EXPERTS):
        for name, a, b in (
            ("gate", gate_up_a[expert], gate_up_b[expert, :INNER]),
            ("up", gate_up_a[expert], gate_up_b[expert, INNER:]),
            ("down", down_a[expert], down_b[expert]),
        ):
            module = f"{MODULE}.{expert}.{name}_proj"
            found |= {f"{module}.lora_A.weight": a.clone(), f"{module}.lora_B.weight": b}
    return found


def save(folder: Path, tensors: dict[str, Tensor], **settings: Any) -> LoRARequest:
    path = save_adapter(folder, tensors, **{"r": RANK, "lora_alpha": RANK, **settings})
    return LoRARequest(folder.name, 1, str(path))


def test_experts_one_by_one_and_in_one_are_the_same_adapter(llm: LLM, tmp_path: Path) -> None:
    made = pairs()
    new = {"target_parameters": BOTH, "peft_version": "0.21.2"}
    ways = [
        save(tmp_path / "new", in_one(made), **new),
        save(tmp_path / "old", in_one(made, old=True), **{**new, "peft_version": "0.18.1"}),
        save(tmp_path / "apart", one_by_one(made)),
    ]
    plain, *found = (tokens(llm, one) for one in (None, *ways))
    assert found[0] == found[1] == found[2]
    assert found[0] != plain


def test_a_rank_of_their_own_goes_by_the_parameters_name(llm: LLM, tmp_path: Path) -> None:
    made = pairs()
    settings = {"target_parameters": BOTH, "peft_version": "0.19.0", "r": 5, "lora_alpha": 5}
    patterns = {
        one: {r".*\.gate_up_proj": RANK, "down_proj": RANK}
        for one in ("rank_pattern", "alpha_pattern")
    }
    expected = tokens(
        llm, save(tmp_path / "a", in_one(made), target_parameters=BOTH, peft_version="0.19.0")
    )
    assert tokens(llm, save(tmp_path / "b", in_one(made), **settings, **patterns)) == expected


@pytest.mark.parametrize("options", [{}, {"quantization": "int8"}, {"dtype": "bfloat16"}])
def test_answers_in_a_batch_are_those_alone(
    model: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    new = {"target_parameters": BOTH, "peft_version": "0.21.2"}
    asked = [None, *(save(tmp_path / str(i), in_one(pairs(i)), **new) for i in range(3))]
    params = SamplingParams(temperature=0.8, seed=3, n=2, max_tokens=6, logprobs=1, ignore_eos=True)

    def answers(outputs: Any) -> Any:
        return [
            [(one.token_ids, one.cumulative_logprob) for one in output.completions]
            for output in outputs
        ]

    with LLM(model, **{**ENGINE, **options}, max_loras=2) as llm:
        together = answers(llm.generate([PROMPT] * 4, params, lora_request=asked))
        llm.reset_prefix_cache()
        apart = [answers(llm.generate(PROMPT, params, lora_request=one))[0] for one in asked]
    assert together == apart
    assert len({str(one) for one in together}) == 4


@pytest.mark.slow  # two processes that load the model
def test_ranks_give_the_same_answers(model: Path, tmp_path: Path) -> None:
    new = {"target_parameters": BOTH, "peft_version": "0.21.2"}
    adapter = save(tmp_path / "it", in_one(pairs()), **new)
    with LLM(model, **ENGINE) as llm:
        expected = tokens(llm, adapter)
        assert expected != tokens(llm, None)
    with LLM(model, **ENGINE, tensor_parallel_size=2) as divided:
        assert tokens(divided, adapter) == expected


def test_layouts_that_can_not_be_told_apart_are_refused(llm: LLM, tmp_path: Path) -> None:
    adapter = save(tmp_path / "it", in_one(pairs()), target_parameters=BOTH)
    with pytest.raises(ModelFormatError, match=r"experts\.base_layer\.lora_A.*PEFT 0\.19"):
        llm.load_adapter("it", adapter.lora_path)


def test_experts_of_another_model_are_refused_by_name(llm: LLM, tmp_path: Path) -> None:
    a, b = torch.ones(4 * RANK, HIDDEN), torch.ones(2 * INNER, 4 * RANK)
    tensors = {f"{MODULE}.lora_A.weight": a, f"{MODULE}.lora_B.weight": b}
    adapter = save(tmp_path / "it", tensors, target_parameters=BOTH)
    with pytest.raises(ModelFormatError, match=r"lora_B\.weight have shapes \[12, 64\].*another"):
        llm.load_adapter("it", adapter.lora_path)


class LinearExperts(torch.nn.Module):
    """A layer's experts as products of their own: so transformers had them before version 5, when
    PEFT had DoRA for them.
    """

    def __init__(self, gate_up: Tensor, down: Tensor) -> None:
        super().__init__()

        def linear(weight: Tensor) -> torch.nn.Linear:
            made = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
            made.weight.data = weight.clone()
            return made

        self.experts = torch.nn.ModuleList(
            torch.nn.ModuleDict(
                {
                    "gate_proj": linear(gate_up[i, :INNER]),
                    "up_proj": linear(gate_up[i, INNER:]),
                    "down_proj": linear(down[i]),
                }
            )
            for i in range(EXPERTS)
        )


def dora_of_experts(model: Path, folder: Path, merged: Path) -> Path:
    """An adapter by PEFT, and the model into which PEFT merged it."""
    import peft

    torch.manual_seed(5)
    whole = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    experts = whole.model.layers[1].mlp.experts
    gate_up, down = experts.gate_up_proj.data, experts.down_proj.data
    config = peft.LoraConfig(
        r=RANK,
        lora_alpha=2 * RANK,
        use_dora=True,
        init_lora_weights=False,
        target_modules=r".*experts\.[0135]\.(gate|up|down)_proj",
    )
    adapted = peft.get_peft_model(LinearExperts(gate_up, down), config)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            grown = torch.rand_like(parameter) + 0.5
            parameter.data = parameter.data * grown if "magnitude" in name else grown - 1
    tensors = {
        name.replace("model.experts", "model.model.layers.1.mlp.experts"): one
        for name, one in peft.get_peft_model_state_dict(adapted).items()
    }
    own = adapted.merge_and_unload().experts
    for i, expert in enumerate(own):
        gate_up[i] = torch.cat([expert["gate_proj"].weight, expert["up_proj"].weight])
        down[i] = expert["down_proj"].weight
    whole.save_pretrained(merged)
    assert len(tensors) == 4 * 3 * 3
    return save_adapter(folder, tensors, r=RANK, lora_alpha=2 * RANK, use_dora=True)


def logprobs(llm: LLM, adapter: LoRARequest | None) -> tuple[Any, Tensor]:
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=1)
    (found,) = llm.generate(PROMPT, params, lora_request=adapter)[0].completions
    assert found.logprobs is not None
    return found.token_ids, torch.tensor([one.logprob for one in found.logprobs])


def test_dora_of_experts_computes_as_peft_does(llm: LLM, model: Path, tmp_path: Path) -> None:
    path = dora_of_experts(model, tmp_path / "dora", tmp_path / "merged")
    plain = logprobs(llm, None)
    found = logprobs(llm, LoRARequest("dora", 1, str(path)))
    with LLM(tmp_path / "merged", **ENGINE) as merged:
        expected = logprobs(merged, None)
    assert found[0] == expected[0]
    torch.testing.assert_close(found[1], expected[1], atol=1e-4, rtol=0)
    assert (found[1] - plain[1]).abs().max() > 1e-2


@pytest.mark.slow  # two processes that load the model
def test_dora_of_experts_on_ranks(llm: LLM, model: Path, tmp_path: Path) -> None:
    path = dora_of_experts(model, tmp_path / "dora", tmp_path / "merged")
    adapter = LoRARequest("dora", 1, str(path))
    with LLM(model, **ENGINE, tensor_parallel_size=2) as divided:
        assert logprobs(divided, adapter)[0] == logprobs(llm, adapter)[0]


def test_there_is_no_dora_of_all_experts_in_one(llm: LLM, tmp_path: Path) -> None:
    tensors = in_one(pairs()) | {f"{MODULE}.lora_magnitude_vector": torch.ones(HIDDEN)}
    tensors |= {f"{MODULE}.base_layer.lora_magnitude_vector": torch.ones(2 * INNER)}
    new = {"target_parameters": BOTH, "peft_version": "0.21.2", "use_dora": True}
    adapter = save(tmp_path / "it", tensors, **new)
    with pytest.raises(UnsupportedModelError, match=r"experts.*PEFT has no DoRA"):
        llm.load_adapter("it", adapter.lora_path)


def test_an_expert_whose_adapter_left_computes_as_before(llm: LLM, tmp_path: Path) -> None:
    new = {"target_parameters": BOTH, "peft_version": "0.21.2"}
    plain = tokens(llm, None)
    tokens(llm, save(tmp_path / "leaves", in_one(pairs(9)), **new))
    llm.unload_adapter("leaves")
    other = save_adapter(
        tmp_path / "other",
        {
            "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": torch.zeros(
                4, HIDDEN
            ),
            "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight": torch.zeros(64, 4),
        },
    )
    assert tokens(llm, LoRARequest("other", 2, str(other))) == plain
