"""Adapters of every family against transformers with PEFT: float32 logits within 1e-4 and the same
greedy tokens.
"""

from __future__ import annotations

import re
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import transformers
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from quire.backends.cpu.kernels import CpuKernels
from quire.kernels.reference import ReferenceKernels
from quire.models.adapters import AdapterLoader
from quire.models.decoder import Decoder
from quire.models.families import FAMILIES
from quire.models.load import open_model
from quire.models.weight_plan import ModelFiles
from quire.sampling_params import SamplingParams
from tests.decoding import load_decoder, make_caches, paged_batch
from tests.long_runs import short_or_long
from tests.models.random_configurations import (
    draw_values,
    load_reference,
    reference_logits,
    save_model,
)
from tests.models.test_random_configurations import assert_as_near
from tests.models.test_recurrent_families import RECURRENT, settings_of
from tests.models.test_recurrent_families import random_model as random_recurrent_model
from tests.models.test_recurrent_families import save as save_recurrent
from tests.random_models import Bench

CPU = torch.device("cpu")
FAMILY_NAMES = [family.name for family in FAMILIES if family.name not in RECURRENT]
SEEDS = short_or_long(2, 6)
OF_EXPERTS = {
    *("gate_proj", "up_proj", "down_proj", "gate", "w1", "w2", "w3"),
    *("input_linear", "output_linear", "layer", "router"),
}
PRODUCTS = (torch.nn.Linear, transformers.pytorch_utils.Conv1D)


def _is_stack(name: str, parameter: torch.Tensor) -> bool:
    """Whether it is the weights of experts."""
    return parameter.dim() == 3 and name.rpartition(".")[0].endswith(("experts", "_linear"))


def _name_of(model: Any, module: torch.nn.Module) -> str:
    return next(name for name, one in model.named_modules() if one is module)


def _has_plain_head(model: Any) -> bool:
    """Not with a bias, which PEFT leaves out; nor in a model whose settings tie it and whose file has
    one of its own: PEFT goes by the settings, Quire by the file.
    """
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    is_untied = head.weight is not embedding.weight
    return head.bias is None and not (is_untied and model.config.tie_word_embeddings)


def with_adapter(model: Any, rng: Random, folder: Path, **further: Any) -> Any:
    """The model with a random adapter on its linear layers, which is saved, too."""
    import peft

    torch.manual_seed(rng.randrange(1000))
    rank = rng.choice([1, 3, 8, 17])
    targets = {name for name, one in model.named_modules() if isinstance(one, PRODUCTS)}
    use_dora = rng.random() < 0.4
    if use_dora:  # what expands latents has none: it is refused by name
        targets = {name for name in targets if not name.endswith(".kv_b_proj")}
    if model.config.model_type in ("falcon_h1", "nemotron_h"):  # PEFT declines it there
        targets = {name for name in targets if not name.endswith(".out_proj")}
    stacks = sorted(name for name, one in model.named_parameters() if _is_stack(name, one))
    if stacks:
        # PEFT takes such names for the experts' products, too, and then changes the ranks.
        targets = {name for name in targets if name.rpartition(".")[2] not in OF_EXPERTS}
        further = {**further, "target_parameters": stacks}
    head, embedding = (
        _name_of(model, one)
        for one in (model.get_output_embeddings(), model.get_input_embeddings())
    )
    way = rng.choice(["", "head", "copies", "tokens", "pair"])
    if way != "head":
        targets.discard(head)
    if way == "copies":
        further["modules_to_save"] = rng.choice([[head], [embedding], [head, embedding]])
    elif way == "tokens" and _has_plain_head(model):
        further["trainable_token_indices"] = rng.sample(range(3, 20), 9)
    elif way == "pair":
        targets.add(embedding)
    config = peft.LoraConfig(
        r=rank,
        lora_alpha=rng.choice([1, 6, 16]),
        # one pattern: PEFT makes short names of many, which fit others, too
        target_modules="|".join(re.escape(name) for name in sorted(targets)),
        init_lora_weights=False,
        use_rslora=rng.random() < 0.3,
        use_dora=use_dora and not stacks,
        fan_in_fan_out=model.config.model_type == "gpt2",
        rank_pattern={
            "self_attn.q_proj": 5,
            r"layers\.0\.self_attn\.o_proj": 2,
            "experts.down_proj": 6,
        },
        alpha_pattern={"k_proj": 3, r".*experts\.gate_up_proj": 5},
        task_type="CAUSAL_LM",
        **further,
    )
    adapted = peft.get_peft_model(model, config).eval()
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_A" in name or "lora_B" in name:
                parameter.normal_(std=0.1 if "experts" in name else 0.2)
            elif "lora_embedding" in name:
                parameter.normal_(std=0.2)
            elif parameter.requires_grad:  # magnitudes, and what is trained as a whole
                parameter.mul_(torch.rand_like(parameter) + 0.5)
    adapted.save_pretrained(folder)
    return adapted


def adapted_logits(decoder: Decoder, tokens: list[int], num_rows: int | None = None) -> Any:
    """With the adapter in slot 0."""
    caches = make_caches(decoder, 2 + len(tokens) // 16)
    table = list(range(1, 2 + len(tokens) // 16))
    slots = torch.zeros(len(tokens), dtype=torch.int32)
    by_slot = {0: torch.arange(len(tokens))}
    with torch.inference_mode():
        hidden = decoder(
            torch.tensor(tokens),
            torch.arange(len(tokens)),
            (paged_batch([(0, len(tokens), table)], 16),),
            caches,
            slots,
            by_slot,
        )
        return decoder.logits(hidden, adapters=slots, by_slot=by_slot).float()


def put_adapter(decoder: Decoder, files: ModelFiles, folder: Path, model: Path) -> None:
    adapter = AdapterLoader(decoder, files.spec, open_base=lambda: open_model(model)).load(folder)
    for name, linear in decoder.linears.items():
        linear.take_adapters(decoder.kernels, 1)
        linear.put_adapter(0, adapter.products.get(name))


def check_family(family: str, seed: int, folder: Path) -> None:
    rng = Random(f"adapters {family} {seed}")
    values = draw_values(rng, family)
    if family == "hunyuan_v1_dense":  # this transformers fails without
        values.setdefault("head_dim", 16)
    save_model(rng, family, values, folder / "model")
    model = load_reference(folder / "model")
    prompt = [rng.randrange(values["vocab_size"]) for _ in range(19)]
    plain = reference_logits(model, prompt)
    adapted = with_adapter(model, rng, folder / "adapter")
    expected = reference_logits(adapted, prompt)
    assert (expected - plain).abs().max() > 1e-3  # the adapter does something
    files = open_model(folder / "model")
    for kernels in (ReferenceKernels(), CpuKernels()):
        decoder = load_decoder(files, kernels, torch.float32, CPU)
        put_adapter(decoder, files, folder / "adapter", folder / "model")
        found = adapted_logits(decoder, prompt)
        assert_as_near(found, expected, adapted, prompt)
        best, second = expected[-1].topk(2).values.tolist()
        if best - second > 1e-3:
            assert found[-1].argmax() == expected[-1].argmax()


@pytest.mark.few(2)
@pytest.mark.soak
@pytest.mark.parametrize("family", FAMILY_NAMES)
@pytest.mark.parametrize("seed", range(SEEDS))
def test_adapters_of_every_family_compute_as_peft_does(
    family: str, seed: int, tmp_path: Path
) -> None:
    check_family(family, seed, tmp_path)


def check_recurrent(config: Any, seed: int, folder: Path) -> None:
    """Through the engine, which knows states: greedy tokens and the logits behind them."""
    model = random_recurrent_model(config, seed)
    save_recurrent(model, str(folder / "model"), is_original=True)
    adapted = with_adapter(model, Random(f"{config.model_type} {seed}"), folder / "adapter")
    files = open_model(folder / "model")
    decoder = load_decoder(files, CpuKernels(), torch.float32, CPU)
    loader = AdapterLoader(decoder, files.spec, open_base=lambda: open_model(folder / "model"))
    bench = Bench(
        decoder, max_batched_tokens=17, max_num_seqs=2, adapters=[folder / "adapter"], loader=loader
    )
    prompt = torch.randint(3, config.vocab_size, (70,), generator=torch.Generator().manual_seed(1))
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    found = bench.run([prompt.tolist()], [params], adapters=[1])
    answer = found.tokens["0"]
    expected = reference_logits(adapted, prompt.tolist() + answer)
    assert expected[69:-1].argmax(-1).tolist() == answer
    for position in range(70, 74):
        torch.testing.assert_close(
            found.logits["0", position].float(), expected[position - 1], atol=1e-4, rtol=0
        )


@pytest.mark.few(1)
@pytest.mark.parametrize("family", [*RECURRENT, "granitemoehybrid"])
def test_adapters_of_layers_with_a_state_compute_as_peft_does(
    family: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    @settings(max_examples=SEEDS, deadline=None, database=None, phases=[Phase.generate])
    @given(st.data(), st.integers(0, 1000))
    def run(data: st.DataObject, seed: int) -> None:
        check_recurrent(data.draw(settings_of(family)), seed, tmp_path_factory.mktemp(family))

    run()
