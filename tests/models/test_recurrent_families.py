"""Families with layers that keep a state, against transformers: float32 logits within 1e-4 and the
same greedy tokens, through the engine, with prompts in chunks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.backends.cpu.kernels import CpuKernels
from quire.kernels.ops import Kernels
from quire.kernels.reference import ReferenceKernels
from quire.models.load import open_model
from quire.models.names import ignored_names
from quire.sampling_params import SamplingParams
from tests.decoding import load_decoder
from tests.long_runs import short_or_long
from tests.random_models import WITH_STATES, Bench

RECURRENT = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "lfm2")
"""Of `FAMILIES`, those that only this file tries; Granite 4 with and without such layers is tried
in both."""


@st.composite
def settings_of(draw: st.DrawFn, family: str) -> Any:
    kv_heads = draw(st.sampled_from([1, 2]))
    layers = draw(st.integers(2, 3))
    base: dict[str, Any] = {
        "vocab_size": draw(st.sampled_from([61, 97])),
        "hidden_size": draw(st.sampled_from([32, 64])),  # C++ kernels want heads of whole eights
        "intermediate_size": draw(st.sampled_from([24, 40])),
        "num_hidden_layers": layers,
        "num_attention_heads": 2 * kv_heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": draw(st.booleans()),
        "initializer_range": 0.15,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }

    def kinds(other: str, attention: str = "full_attention") -> list[str]:
        drawn = [draw(st.sampled_from([other, attention])) for _ in range(layers - 2)]
        return [*draw(st.permutations([other, attention])), *drawn]

    if family == "lfm2":
        adjusted = draw(st.booleans())
        return transformers.Lfm2Config(
            **base,
            layer_types=kinds("conv"),
            conv_bias=draw(st.booleans()),
            conv_L_cache=draw(st.integers(2, 5)),
            block_auto_adjust_ff_dim=adjusted,
            block_multiple_of=8,
        )
    if family == "granitemoehybrid":
        heads, groups = draw(st.sampled_from([(4, 1), (4, 2), (6, 3)]))
        return transformers.GraniteMoeHybridConfig(
            **base,
            layer_types=kinds("linear_attention"),
            mamba_n_heads=heads,
            mamba_n_groups=groups,
            mamba_d_state=draw(st.sampled_from([4, 10])),
            mamba_d_conv=draw(st.integers(2, 5)),
            mamba_conv_bias=draw(st.booleans()),
            mamba_proj_bias=draw(st.booleans()),
            num_local_experts=draw(st.sampled_from([0, 4])),
            num_experts_per_tok=2,
            shared_intermediate_size=12,
            attention_multiplier=0.25,
            position_embedding_type=draw(st.sampled_from(["rope", None])),
        )
    shared = draw(st.sampled_from([1, 2, 3]))
    key_heads = draw(st.sampled_from([1, 2]))
    linear = {
        "layer_types": kinds("linear_attention"),
        "head_dim": draw(st.sampled_from([8, 16])),
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": shared * key_heads,
        "linear_key_head_dim": draw(st.sampled_from([4, 10])),
        "linear_value_head_dim": draw(st.sampled_from([6, 8])),
        "linear_conv_kernel_dim": draw(st.integers(2, 5)),
        "attention_bias": draw(st.booleans()),
    }
    experts = {
        "num_experts": 4,
        "num_experts_per_tok": draw(st.integers(1, 4)),
        "moe_intermediate_size": 8,
        "shared_expert_intermediate_size": 12,
    }
    if family == "qwen3_5_text":
        return transformers.Qwen3_5TextConfig(**base, **linear)
    if family == "qwen3_5_moe_text":
        return transformers.Qwen3_5MoeTextConfig(**base, **linear, **experts)
    return transformers.Qwen3NextConfig(
        **base, **linear, **experts, norm_topk_prob=draw(st.booleans())
    )


def random_model(config: Any, seed: int) -> Any:
    """Every parameter random; norms that add one to their weights have them around 0."""
    torch.manual_seed(seed)
    config._attn_implementation = config._experts_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).eval().float()
    has_offset = "Qwen" in type(config).__name__
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.3)
            elif "norm" in name:
                low = -0.5 if has_offset and "linear_attn" not in name else 0.5
                parameter.uniform_(low, low + 1)
            elif name.endswith(("A_log", ".D")):
                parameter.normal_()
    return model


def check(family: str, kernels: Kernels, data: st.DataObject) -> None:
    config = data.draw(settings_of(family))
    seed = data.draw(st.integers(0, 1000))
    model = random_model(config, seed)
    length = data.draw(st.sampled_from([1, 3, 63, 64, 65, 150]))
    prompt = torch.randint(
        3, config.vocab_size, (length,), generator=torch.Generator().manual_seed(seed)
    ).tolist()
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        files = open_model(Path(folder))
        decoder = load_decoder(files, kernels, torch.float32, torch.device("cpu"))
    assert files.spec.num_parameters == sum(one.numel() for one in model.parameters())
    chunk = data.draw(st.sampled_from([17, 64, 512]))
    bench = Bench(decoder, max_batched_tokens=chunk, max_num_seqs=2)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    found = bench.run([prompt], [params])
    answer = found.tokens["0"]
    with torch.inference_mode():
        expected = model(torch.tensor([prompt + answer])).logits[0].float()
    assert expected[length - 1 : -1].argmax(-1).tolist() == answer
    for position in range(length, length + len(answer)):
        torch.testing.assert_close(
            found.logits["0", position].float(), expected[position - 1], atol=1e-4, rtol=0
        )


def test_layers_for_multi_token_prediction_are_left_out() -> None:
    """Checkpoints of Qwen3-Next have them under a name of their own."""
    spec = replace(WITH_STATES["delta rule"], family="qwen3_next")
    present = {"mtp.fc.weight", "mtp.layers.0.mlp.gate.weight", "model.norm.weight"}
    assert ignored_names(spec, present) == present - {"model.norm.weight"}


@pytest.mark.soak
@pytest.mark.parametrize(
    "kernels", [CpuKernels, pytest.param(ReferenceKernels, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("family", [*RECURRENT, "granitemoehybrid"])
def test_family_with_states_matches_transformers(
    family: str, kernels: Callable[[], Kernels]
) -> None:
    made = kernels()

    @settings(max_examples=short_or_long(2, 30), deadline=None)
    @given(st.data())
    def run(data: st.DataObject) -> None:
        check(family, made, data)

    run()
