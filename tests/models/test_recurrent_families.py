"""Families with layers that keep a state, against transformers: float32 logits within 1e-4 and the
same greedy tokens, through the engine, with prompts in chunks.
"""

from __future__ import annotations

import json
import math
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
from safetensors.torch import save_file

from quire.backends.cpu.kernels import CpuKernels
from quire.errors import ModelFormatError, UnsupportedModelError
from quire.kernels.ops import Kernels
from quire.kernels.recurrent import RecurrentSpec
from quire.kernels.reference import ReferenceKernels
from quire.models.decoder import Decoder
from quire.models.load import open_model
from quire.models.model_config import read_config
from quire.models.names import huggingface_pieces, ignored_names, names_not_for_text
from quire.sampling_params import SamplingParams
from tests.decoding import load_decoder
from tests.long_runs import short_or_long
from tests.random_models import WITH_STATES, Bench

RECURRENT = (
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "lfm2",
    "lfm2_moe",
    "bamba",
    "falcon_h1",
    "nemotron_h",
    "olmo_hybrid",
    "kimi_linear",
)
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
    if family == "lfm2_moe":
        return transformers.Lfm2MoeConfig(
            **base,
            layer_types=kinds("conv"),
            conv_bias=draw(st.booleans()),
            conv_L_cache=draw(st.integers(2, 5)),
            num_dense_layers=draw(st.integers(0, 2)),
            num_experts=5,
            num_experts_per_tok=draw(st.integers(1, 5)),
            moe_intermediate_size=8,
            use_expert_bias=draw(st.booleans()),
            norm_topk_prob=draw(st.booleans()),
            routed_scaling_factor=draw(st.sampled_from([1.0, 1.7])),
        )
    if family in ("bamba", "falcon_h1"):
        return mamba_settings(draw, family, base)
    if family == "nemotron_h":
        return nemotron_settings(draw, base)
    if family == "olmo_hybrid":
        keys = draw(st.sampled_from([1, 2]))
        base["rope_parameters"] = draw(
            st.sampled_from([None, {"rope_type": "default", "rope_theta": 500.0}])
        )
        return transformers.OlmoHybridConfig(
            **base,
            layer_types=kinds("linear_attention"),
            linear_num_key_heads=keys,
            linear_num_value_heads=draw(st.sampled_from([1, 3])) * keys,
            linear_key_head_dim=draw(st.sampled_from([None, 4, 10])),
            linear_value_head_dim=draw(st.sampled_from([None, 6])),
            linear_conv_kernel_dim=draw(st.integers(2, 5)),
            linear_allow_neg_eigval=draw(st.booleans()),
            attention_bias=draw(st.booleans()),
        )
    if family == "kimi_linear":
        return kimi_settings(draw, {**base, "tie_word_embeddings": False}, kinds)
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


def kimi_settings(draw: st.DrawFn, base: dict[str, Any], kinds: Callable[[str], list[str]]) -> Any:
    groups = draw(st.sampled_from([1, 2]))
    return transformers.KimiLinearConfig(
        **{**base, "num_key_value_heads": base["num_attention_heads"]},
        layer_types=kinds("linear_attention"),
        mlp_layer_types=[
            draw(st.sampled_from(["dense", "sparse"])) for _ in range(base["num_hidden_layers"])
        ],
        linear_head_dim=draw(st.sampled_from([4, 8, 10])),
        linear_num_heads=draw(st.integers(1, 4)),
        linear_conv_kernel_dim=draw(st.integers(2, 5)),
        kv_lora_rank=draw(st.sampled_from([8, 24])),
        q_lora_rank=draw(st.sampled_from([None, 12])),
        qk_nope_head_dim=draw(st.sampled_from([4, 10])),
        qk_rope_head_dim=draw(st.sampled_from([4, 8])),
        v_head_dim=draw(st.sampled_from([6, 8])),
        attention_bias=draw(st.booleans()),
        num_local_experts=8,
        num_experts_per_tok=draw(st.integers(1, 4)),
        moe_intermediate_size=8,
        n_shared_experts=draw(st.integers(1, 2)),
        n_group=groups,
        topk_group=draw(st.integers(1, groups)),
        norm_topk_prob=draw(st.booleans()),
        routed_scaling_factor=draw(st.sampled_from([1.0, 2.4])),
        rms_norm_eps=draw(st.sampled_from([1e-5, 1e-3])),
    )


def mamba_settings(draw: st.DrawFn, family: str, base: dict[str, Any]) -> Any:
    heads, groups = draw(st.sampled_from([(4, 1), (4, 2), (6, 3)]))
    mamba = {
        **base,
        "mamba_n_heads": heads,
        "mamba_n_groups": groups,
        "mamba_d_state": draw(st.sampled_from([4, 10])),
        "mamba_d_conv": draw(st.integers(2, 5)),
        "mamba_conv_bias": draw(st.booleans()),
        "mamba_proj_bias": draw(st.booleans()),
        "attention_bias": draw(st.booleans()),
        "time_step_limit": draw(st.sampled_from([(0.0, float("inf")), (0.05, 0.6)])),
    }
    if family == "bamba":
        full = draw(st.sets(st.integers(0, base["num_hidden_layers"] - 1), min_size=1))
        return transformers.BambaConfig(
            **mamba, attn_layer_indices=sorted(full), mlp_bias=draw(st.booleans())
        )

    def factors(count: int) -> list[float]:
        return draw(st.lists(st.floats(0.3, 2), min_size=count, max_size=count))

    return transformers.FalconH1Config(
        **mamba,
        mamba_d_ssm=draw(st.sampled_from([None, 12, 36])),
        mamba_rms_norm=draw(st.booleans()),
        mamba_norm_before_gate=draw(st.booleans()),
        projectors_bias=draw(st.booleans()),
        mlp_multipliers=factors(2),
        ssm_multipliers=factors(5),
        **{f"{name}_multiplier": factors(1)[0] for name in FACTORS},
    )


FACTORS = (*("embedding", "lm_head", "key", "attention_in", "attention_out", "ssm_in", "ssm_out"),)


def nemotron_settings(draw: st.DrawFn, base: dict[str, Any]) -> Any:
    """Blocks in any order, MLPs before the first mixer or one after the other included."""
    kinds = ("linear_attention", "full_attention", "mlp", "moe")
    more = draw(st.lists(st.sampled_from(kinds), max_size=3))
    blocks = draw(st.permutations(["linear_attention", "full_attention", *more]))
    heads, groups = draw(st.sampled_from([(4, 1), (4, 2), (6, 3)]))
    base = {**base, "tie_word_embeddings": False}
    del base["num_hidden_layers"]
    return transformers.NemotronHConfig(
        **base,
        layers_block_type=blocks,
        head_dim=draw(st.sampled_from([8, 12])),
        mamba_num_heads=heads,
        mamba_head_dim=draw(st.sampled_from([5, 8])),
        n_groups=groups,
        ssm_state_size=draw(st.sampled_from([4, 10])),
        conv_kernel=draw(st.integers(2, 5)),
        use_conv_bias=draw(st.booleans()),
        use_bias=draw(st.booleans()),
        mlp_bias="moe" not in blocks and draw(st.booleans()),
        time_step_limit=draw(st.sampled_from([(0.0, float("inf")), (0.05, 0.6)])),
        n_routed_experts=5,
        num_experts_per_tok=draw(st.integers(1, 5)),
        moe_intermediate_size=8,
        moe_shared_expert_intermediate_size=12,
        norm_topk_prob=draw(st.booleans()),
        routed_scaling_factor=draw(st.sampled_from([1.0, 1.7])),
    )


def save(model: Any, folder: str, is_original: bool) -> None:
    """As the family's files are (transformers divides OLMo Hybrid's convolution otherwise than its
    published files do, and names norms of attention otherwise), or with the names that transformers
    computes with.
    """
    model.save_pretrained(folder, save_original_format=is_original)
    if model.config.model_type != "olmo_hybrid":
        return
    config, tensors = model.config, {}
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        layer = config.layer_types[int(name.split(".")[2])] if ".layers." in name else ""
        if layer == "linear_attention":
            name = name.replace("post_attention_layernorm", "feedforward_layer_norm")
            name = name.replace("input_layernorm", "attention_layer_norm")
        if "conv1d" in name:
            for side, part in zip("qkv", tensor.split([keys, keys, values]), strict=True):
                tensors[name.replace("conv1d", f"{side}_conv1d")] = part.contiguous()
        else:
            tensors[name] = tensor
    save_file(tensors, f"{folder}/model.safetensors")


def random_model(config: Any, seed: int) -> Any:
    """Every parameter random; norms that add one to their weights have them around 0."""
    torch.manual_seed(seed)
    config._attn_implementation = config._experts_implementation = "eager"
    if hasattr(config, "vision_config"):
        model = transformers.AutoModelForImageTextToText.from_config(config).eval().float()
    else:
        model = transformers.AutoModelForCausalLM.from_config(config).eval().float()
    if config.model_type == "nemotron_h":
        # This transformers takes time_step_min for the least step; the publisher's own code, and
        # all other families, take time_step_limit.
        for module in model.modules():
            if hasattr(module, "time_step_limit"):
                module.time_step_limit = tuple(config.time_step_limit)
    for name, buffer in model.named_buffers():
        if name.endswith("bias"):  # of the choice of experts
            buffer.normal_(std=0.3)
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


def check(family: str, kernels: Kernels, data: st.DataObject, config: Any = None) -> None:
    config = config or data.draw(settings_of(family))
    text = config.get_text_config()
    seed = data.draw(st.integers(0, 1000))
    model = random_model(config, seed)
    length = data.draw(st.sampled_from([1, 3, 63, 64, 65, 150]))
    prompt = torch.randint(
        3, text.vocab_size, (length,), generator=torch.Generator().manual_seed(seed)
    ).tolist()
    with TemporaryDirectory() as folder:
        save(model, folder, data.draw(st.booleans()) or family != "kimi_linear")
        files = open_model(Path(folder))
        decoder = load_decoder(files, kernels, torch.float32, torch.device("cpu"))
    stored = model.state_dict().keys()
    tensors = [*model.named_parameters(), *model.named_buffers()]
    counted = [one.numel() for name, one in tensors if name in stored and "visual" not in name]
    assert files.spec.num_parameters == sum(counted)
    assert_matches(model, decoder, prompt, data.draw(st.sampled_from([17, 64, 512])))


def assert_matches(model: Any, decoder: Decoder, prompt: list[int], chunk: int) -> None:
    """The engine, which computes the prompt in chunks, against transformers' model."""
    length = len(prompt)
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


@pytest.mark.few(1)
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_the_text_part_of_a_model_that_sees_is_loaded(family: str) -> None:
    """Settings under text_config, names with a prefix, no tensor of its part for images."""
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2}
    kind = {
        "qwen3_5": transformers.Qwen3_5Config,
        "qwen3_5_moe": transformers.Qwen3_5MoeConfig,
    }[family]

    @settings(max_examples=short_or_long(2, 20), deadline=None)
    @given(st.data())
    def run(data: st.DataObject) -> None:
        text = data.draw(settings_of(f"{family}_text"))
        config = kind(
            text_config=text.to_dict(),
            vision_config={**vision, "out_hidden_size": text.hidden_size},
            tie_word_embeddings=text.tie_word_embeddings,
        )
        check(family, CpuKernels(), data, config)

    run()


def test_that_a_model_is_read_without_its_part_for_images_is_said() -> None:
    spec = replace(WITH_STATES["delta rule"], family="qwen3_5_text")
    present = {"model.visual.blocks.0.attn.qkv.weight", "model.language_model.norm.weight"}
    assert names_not_for_text(spec, present) == {"model.visual.blocks.0.attn.qkv.weight"}
    assert names_not_for_text(WITH_STATES["convolution"], present) == set()


MAMBA = {
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


@pytest.mark.parametrize("infinity", ["Infinity", '{"__float__": "Infinity"}'])
@pytest.mark.parametrize(
    ("architecture", "heads"),
    [
        ("BambaForCausalLM", "mamba_n_heads"),
        ("FalconH1ForCausalLM", "mamba_n_heads"),
        ("NemotronHForCausalLM", "mamba_num_heads"),
    ],
)
def test_a_time_step_may_be_infinite(
    architecture: str, heads: str, infinity: str, tmp_path: Path
) -> None:
    """JSON has no such number; two ways of writing it are in published files."""
    config = {**MAMBA, "architectures": [architecture], heads: 8, "n_groups": 2}
    text = json.dumps(config | {"hybrid_override_pattern": "M*", "time_step_limit": [0.0, "X"]})
    (tmp_path / "config.json").write_text(text.replace('"X"', infinity))
    spec = read_config(tmp_path / "config.json")
    limits = {one.time_limits for one in spec.mixers if isinstance(one, RecurrentSpec)}
    assert limits == {(0.0, math.inf)}
    (tmp_path / "config.json").write_text(text.replace('"X"', "NaN"))
    with pytest.raises(ModelFormatError, match="NaN is not a JSON number"):
        read_config(tmp_path / "config.json")


@pytest.mark.parametrize(
    ("architecture", "changed", "words"),
    [
        ("NemotronHForCausalLM", {"moe_latent_size": 8}, "moe_latent_size 8"),
        ("NemotronHForCausalLM", {"mlp_hidden_act": "silu"}, "mlp_hidden_act 'silu'"),
        ("NemotronHForCausalLM", {"n_group": 2}, "n_group 2"),
        ("NemotronHForCausalLM", {"hybrid_override_pattern": "M?"}, "hybrid_override_pattern"),
        ("BambaForCausalLM", {"mamba_d_head": 7}, "mamba_d_head should be auto or 6"),
        (
            "FalconH1ForCausalLM",
            {"mlp_bias": True, "mlp_multipliers": [0.5, 1.0]},
            "mlp_bias together with mlp_multipliers",
        ),
        ("FalconH1ForCausalLM", {"ssm_multipliers": [1.0]}, "ssm_multipliers should be 5 numbers"),
    ],
)
def test_what_a_setting_changes_and_is_not_known_is_refused_by_its_name(
    architecture: str, changed: dict[str, Any], words: str, tmp_path: Path
) -> None:
    config = {**MAMBA, "architectures": [architecture], "mamba_n_heads": 8, "mamba_d_ssm": 48}
    config |= {"hybrid_override_pattern": "M*", **changed}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises((ModelFormatError, UnsupportedModelError), match=words):
        read_config(tmp_path / "config.json")


def test_blocks_of_nemotron_by_letters_and_by_words_are_the_same(tmp_path: Path) -> None:
    words = ["mlp", "mamba", "mlp", "mlp", "attention", "mamba"]
    specs = []
    for blocks in ({"hybrid_override_pattern": "-M--*M"}, {"layers_block_type": words}):
        config = {**MAMBA, "architectures": ["NemotronHForCausalLM"], **blocks}
        (tmp_path / "config.json").write_text(json.dumps(config))
        specs.append(read_config(tmp_path / "config.json"))
    assert specs[0] == specs[1]
    kinds = [(len(layer.mixers), layer.mlp is not None) for layer in specs[0].layers]
    assert kinds == [(0, True), (1, True), (0, True), (1, False), (1, False)]
    names = {piece.name for piece in huggingface_pieces(specs[0], ())}
    assert {f"backbone.layers.{i}.norm.weight" for i in range(6)} <= names
    assert "backbone.layers.2.mixer.up_proj.weight" in names
    assert not any(name.startswith("backbone.layers.6") for name in names)


@pytest.mark.few(4)
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
