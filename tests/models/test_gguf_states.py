"""GGUF files of families whose layers keep states, against the folders of safetensors that they were
made of: names, settings, and what llama.cpp's converter does to the numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import gguf
import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from quire.errors import ModelFormatError, UnsupportedModelError
from quire.kernels.reference import ReferenceKernels
from quire.models.load import open_model
from quire.sampling_params import SamplingParams
from quire.tools.quantize import quantize_model
from tests.decoding import load_decoder
from tests.models.random_configurations import random_model
from tests.models.test_gguf_models import interleave
from tests.random_models import Bench

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
Q8_0 = gguf.GGMLQuantizationType.Q8_0
Tensors = dict[str, Tensor]
Settings = dict[str, Any]


@dataclass
class Written:
    """One family's models and how its GGUF files are written."""

    architecture: str
    config: Any
    settings: Settings
    """By the keys after the architecture's name, besides those of all families."""
    change: Callable[[Any, str, Tensor], dict[str, Tensor]]
    """What becomes of a tensor, by names that the `gguf` package knows."""
    differs: Literal["", "numbers", "scaled"] = ""
    """Whether numbers are computed anew, or even factors are already in them."""


def kv_heads(config: Any) -> list[int]:
    return [
        config.num_key_value_heads if "attention" in kind and "linear" not in kind else 0
        for kind in config.layer_types
    ]


def lfm2_tensor(config: Any, name: str, value: Tensor) -> Tensors:
    name = name.replace("expert_bias", "expert_bias.bias")
    if name.endswith("experts.gate_up_proj"):
        gate, up = value.chunk(2, 1)
        stem = name.removeprefix("model.").removesuffix("gate_up_proj")
        return {f"{stem}w1.weight": gate, f"{stem}w3.weight": up}
    if name.endswith("experts.down_proj"):
        return {name.removeprefix("model.").replace("down_proj", "w2.weight"): value}
    return {name: value.squeeze(1) if "conv.conv" in name else value}


LFM2_KINDS = ["conv", "full_attention", "conv", "full_attention"]
LFM2 = transformers.Lfm2Config(
    **SIZES, layer_types=LFM2_KINDS, conv_L_cache=4, block_auto_adjust_ff_dim=False
)
LFM2_TIED = transformers.Lfm2Config(
    **SIZES,
    layer_types=LFM2_KINDS,
    block_multiple_of=8,
    norm_eps=1e-3,
    tie_word_embeddings=True,
)
LFM2_MOE = transformers.Lfm2MoeConfig(
    **SIZES,
    layer_types=LFM2_KINDS,
    num_dense_layers=1,
    num_experts=5,
    num_experts_per_tok=2,
    moe_intermediate_size=12,
)


def lfm2_settings(config: Any) -> Settings:
    return {
        "shortconv.l_cache": config.conv_L_cache,
        "attention.layer_norm_rms_epsilon": config.norm_eps,
        "attention.head_count_kv": kv_heads(config),
    }


def mamba_tensor(name: str, value: Tensor, groups: int) -> Tensors:
    """As all converters of state spaces write it."""
    if name.endswith("A_log"):
        return {name: -value.exp()[:, None]}
    if name.endswith((".mamba.D", ".mixer.D")):
        return {name: value[:, None]}
    if name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
        return {name: value.view(groups, -1)}
    return {
        name.replace("dt_bias", "dt_proj.bias"): value.squeeze(1) if "conv1d.w" in name else value
    }


def falcon_tensor(config: Any, name: str, value: Tensor) -> Tensors:
    gate, down = config.mlp_multipliers
    attention = config.attention_in_multiplier
    factors = {
        "down_proj": down,
        "gate_proj": gate,
        "k_proj": config.key_multiplier * attention,
        "q_proj": attention,
        "v_proj": attention,
        "o_proj": config.attention_out_multiplier,
        "out_proj": config.ssm_out_multiplier,
        "in_proj": config.ssm_in_multiplier,
        "lm_head": config.lm_head_multiplier,
        "embed_tokens": config.embedding_multiplier,
    }
    if "." in name and name.endswith(".weight"):
        value = value * factors.get(name.split(".")[-2], 1.0)
    if "in_proj" in name:
        inner, states = config.mamba_d_ssm, config.mamba_n_groups * config.mamba_d_state
        parts = value.split([inner, inner, states, states, config.mamba_n_heads])
        pairs = zip(parts, config.ssm_multipliers, strict=True)
        value = torch.cat([part * factor for part, factor in pairs])
    return mamba_tensor(name, value, config.mamba_n_groups)


def falcon(**changes: Any) -> Any:
    return transformers.FalconH1Config(
        **SIZES,
        head_dim=8,
        mamba_d_ssm=48,
        mamba_n_heads=6,
        mamba_n_groups=3,
        mamba_d_head=8,
        mamba_d_state=10,
        mamba_d_conv=4,
        mamba_norm_before_gate=False,
        attention_in_multiplier=1.3,
        attention_out_multiplier=0.8,
        ssm_in_multiplier=1.2,
        ssm_out_multiplier=0.7,
        ssm_multipliers=[0.6, 1.4, 0.9, 1.1, 0.5],
        mlp_multipliers=[0.8, 1.7],
        key_multiplier=0.6,
        lm_head_multiplier=0.5,
        embedding_multiplier=2.5,
        tie_word_embeddings=False,
        **changes,
    )


FALCON = falcon(mamba_rms_norm=True)
FALCON_PLAIN = falcon(mamba_rms_norm=False, mamba_conv_bias=False)


def state_space_settings(config: Any, inner: int) -> Settings:
    return {
        "ssm.conv_kernel": config.mamba_d_conv,
        "ssm.inner_size": inner,
        "ssm.state_size": config.mamba_d_state,
        "ssm.time_step_rank": config.mamba_n_heads,
        "ssm.group_count": config.mamba_n_groups,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
    }


def granite_tensor(config: Any, name: str, value: Tensor) -> Tensors:
    block = f"blk.{name.split('.')[2]}" if name.startswith("model.layers.") else ""
    ending = "_shexp" if config.num_local_experts else ""
    if ".shared_mlp.input" in name:
        gate, up = value.chunk(2)
        return {f"{block}.ffn_gate{ending}.weight": gate, f"{block}.ffn_up{ending}.weight": up}
    if ".shared_mlp." in name:
        return {f"{block}.ffn_down{ending}.weight": value}
    if name.endswith(("input_linear.weight", "experts.gate_up_proj")):
        gate, up = value.chunk(2, 1)
        return {f"{block}.ffn_gate_exps.weight": gate, f"{block}.ffn_up_exps.weight": up}
    if name.endswith(("output_linear.weight", "experts.down_proj")):
        return {f"{block}.ffn_down_exps.weight": value}
    for part, heads in (("q", config.num_attention_heads), ("k", config.num_key_value_heads)):
        if f".{part}_proj." in name:
            value = interleave(value, heads)
    name = name.replace(".router.weight", ".router.layer.weight")
    return mamba_tensor(name, value, config.mamba_n_groups)


def granite(**changes: Any) -> Any:
    sizes = {
        "layer_types": [
            "linear_attention",
            "full_attention",
            "linear_attention",
            "linear_attention",
        ],
        "mamba_n_heads": 4,
        "mamba_n_groups": 2,
        "mamba_d_state": 10,
        "mamba_d_conv": 3,
        "num_experts_per_tok": 2,
        "attention_multiplier": 0.25,
        "embedding_multiplier": 1.5,
        "residual_multiplier": 0.5,
        "logits_scaling": 2.0,
    }
    return transformers.GraniteMoeHybridConfig(**SIZES | sizes | changes)


GRANITE = granite(num_local_experts=4, shared_intermediate_size=12, position_embedding_type=None)
GRANITE_DENSE = granite(
    num_local_experts=0,
    shared_intermediate_size=48,
    mamba_conv_bias=False,
    layer_types=["full_attention", "linear_attention", "linear_attention", "full_attention"],
)


def granite_settings(config: Any) -> Settings:
    return state_space_settings(config, 64) | {
        "attention.head_count_kv": kv_heads(config),
        "attention.scale": config.attention_multiplier,
        "embedding_scale": config.embedding_multiplier,
        "residual_scale": config.residual_multiplier,
        "logit_scale": config.logits_scaling,
        "expert_count": config.num_local_experts,
        "expert_used_count": 2,
        "expert_shared_feed_forward_length": config.shared_intermediate_size,
        "rope.scaling.finetuned": False,
        "rope.dimension_count": 8,
    }


def qwen_tensor(config: Any, name: str, value: Tensor) -> Tensors:
    if name.endswith("norm.weight") and "linear_attn" not in name:
        return {name: value + 1}
    if name.endswith("in_proj_qkvz.weight"):
        keys, heads = config.linear_key_head_dim, config.linear_num_key_heads
        own = config.linear_num_value_heads // heads * config.linear_value_head_dim
        parts = value.view(heads, -1, config.hidden_size).split([keys, keys, own, own], 1)
        query, key, values, gate = (part.flatten(0, 1) for part in parts)
        block = f"blk.{name.split('.')[2]}"
        return {
            f"{block}.attn_qkv.weight": torch.cat((query, key, values)),
            f"{block}.attn_gate.weight": gate,
        }
    if name.endswith("experts.gate_up_proj"):
        gate, up = value.chunk(2, 1)
        stem = name.removesuffix("gate_up_proj")
        return {f"{stem}gate_proj.weight": gate, f"{stem}up_proj.weight": up}
    if name.endswith("experts.down_proj"):
        return {f"{name}.weight": value}
    if name.endswith("A_log"):
        return {name: -value.exp()}
    return {
        name.replace("dt_bias", "dt_proj.bias"): value.squeeze(1) if "conv1d" in name else value
    }


QWEN = transformers.Qwen3NextConfig(
    **SIZES,
    head_dim=16,
    layer_types=["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    linear_num_key_heads=2,
    linear_num_value_heads=6,
    linear_key_head_dim=10,
    linear_value_head_dim=6,
    linear_conv_kernel_dim=3,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=8,
    shared_expert_intermediate_size=12,
    norm_topk_prob=True,
)
QWEN_SETTINGS: Settings = {
    "ssm.conv_kernel": 3,
    "ssm.inner_size": 36,
    "ssm.state_size": 10,
    "ssm.time_step_rank": 6,
    "ssm.group_count": 2,
    "full_attention_interval": 3,
    "attention.layer_norm_rms_epsilon": QWEN.rms_norm_eps,
    "attention.head_count_kv": 2,
    "attention.key_length": 16,
    "attention.value_length": 16,
    "rope.dimension_count": 4,
    "expert_count": 4,
    "expert_used_count": 2,
    "expert_feed_forward_length": 8,
    "expert_shared_feed_forward_length": 12,
}


def nemotron_tensor(config: Any, name: str, value: Tensor) -> Tensors:
    name = name.replace("model.", "backbone.", 1)
    for part, heads in (("q", config.num_attention_heads), ("k", config.num_key_value_heads)):
        if f".{part}_proj." in name:
            value = interleave(value, heads)
    if ".experts." in name:
        part = name.rpartition(".")[2]
        return {f"model.layers.{name.split('.')[2]}.mlp.experts.{part}.weight": value}
    if name.endswith("dt_bias"):
        return {name.replace("dt_bias", "dt.bias"): value}
    name = name.replace("e_score_correction_bias", "e_score_correction.bias")
    return mamba_tensor(name, value, config.n_groups)


def nemotron(mlp: str) -> Any:
    sizes = {key: size for key, size in SIZES.items() if key != "num_hidden_layers"}
    return transformers.NemotronHConfig(
        **sizes,
        layers_block_type=["linear_attention", mlp, "full_attention", mlp, "linear_attention"],
        head_dim=12,
        mamba_num_heads=6,
        mamba_head_dim=5,
        n_groups=3,
        ssm_state_size=10,
        conv_kernel=3,
        use_conv_bias=mlp == "moe",
        n_routed_experts=5,
        num_experts_per_tok=2,
        moe_intermediate_size=8,
        moe_shared_expert_intermediate_size=12,
        routed_scaling_factor=1.5,
        tie_word_embeddings=False,
    )


NEMOTRON, NEMOTRON_MOE = nemotron("mlp"), nemotron("moe")
NEMOTRON_SETTINGS: Settings = {
    "ssm.conv_kernel": 3,
    "ssm.inner_size": 30,
    "ssm.state_size": 10,
    "ssm.time_step_rank": 6,
    "ssm.group_count": 3,
    "block_count": 5,
    "attention.layer_norm_rms_epsilon": NEMOTRON.layer_norm_epsilon,
    "attention.layer_norm_epsilon": NEMOTRON.layer_norm_epsilon,
    "attention.head_count_kv": [0, 0, 2, 0, 0],
    "attention.key_length": 12,
    "attention.value_length": 12,
    "rope.scaling.finetuned": False,
    "rope.dimension_count": 8,  # hidden size by heads, whatever a head has
    "feed_forward_length": [0, 48, 0, 48, 0],
}
NEMOTRON_MOE_SETTINGS = NEMOTRON_SETTINGS | {
    "feed_forward_length": [0, 8, 0, 8, 0],
    "expert_count": 5,
    "expert_used_count": 2,
    "expert_feed_forward_length": 8,
    "expert_shared_feed_forward_length": 12,
    "expert_shared_count": 1,
    "expert_weights_norm": True,
    "expert_weights_scale": 1.5,
    "expert_group_count": 1,
}

FALCON_SETTINGS = state_space_settings(FALCON, 48) | {
    "attention.head_count_kv": 2,
    "attention.key_length": 8,
    "attention.value_length": 8,
}

MODELS: dict[str, Written] = {
    "falcon": Written("falcon-h1", FALCON, FALCON_SETTINGS, falcon_tensor, "scaled"),
    "falcon without norms": Written(
        "falcon-h1", FALCON_PLAIN, FALCON_SETTINGS, falcon_tensor, "scaled"
    ),
    "granite": Written(
        "granitehybrid", GRANITE, granite_settings(GRANITE), granite_tensor, "numbers"
    ),
    "granite without experts": Written(
        "granitehybrid", GRANITE_DENSE, granite_settings(GRANITE_DENSE), granite_tensor, "numbers"
    ),
    "qwen": Written("qwen3next", QWEN, QWEN_SETTINGS, qwen_tensor, "numbers"),
    "nemotron": Written("nemotron_h", NEMOTRON, NEMOTRON_SETTINGS, nemotron_tensor, "numbers"),
    "nemotron with experts": Written(
        "nemotron_h_moe", NEMOTRON_MOE, NEMOTRON_MOE_SETTINGS, nemotron_tensor, "numbers"
    ),
    "lfm2": Written("lfm2", LFM2, lfm2_settings(LFM2), lfm2_tensor),
    "lfm2 tied": Written(
        "lfm2", LFM2_TIED, lfm2_settings(LFM2_TIED) | {"feed_forward_length": 32}, lfm2_tensor
    ),
    "lfm2 with experts": Written(
        "lfm2moe",
        LFM2_MOE,
        lfm2_settings(LFM2_MOE)
        | {
            "expert_count": 5,
            "expert_used_count": 2,
            "expert_feed_forward_length": 12,
            "leading_dense_block_count": 1,
            "expert_gating_func": 2,
        },
        lfm2_tensor,
    ),
}


def settings_of(written: Written) -> Settings:
    config = written.config
    return {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "rope.freq_base": float(
            (getattr(config, "rope_parameters", None) or {}).get("rope_theta", 1e4)
        ),
        "vocab_size": config.vocab_size,
        **written.settings,
    }


def tensors_of(written: Written, model: Any) -> Tensors:
    config = model.config
    (number,) = (
        each for each, name in gguf.MODEL_ARCH_NAMES.items() if name == written.architecture
    )
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    found: Tensors = {}
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for changed, own in written.change(config, name, value).items():
            stored = names.get_name(changed, try_suffixes=(".weight", ".bias")) or changed
            assert stored.startswith(("blk.", "token_embd", "output")), changed
            found[stored] = own
    return found


def write(path: Path, written: Written, model: Any, settings: Settings, **changes: Any) -> None:
    """`changes` are tensors; None: it is left out."""
    writer = gguf.GGUFWriter(path, written.architecture)
    for name, value in settings.items():
        key = f"{written.architecture}.{name}"
        if isinstance(value, list):
            writer.add_array(key, value)
        elif value is not None:
            add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
            add[type(value)](key, value)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, tensor in (tensors_of(written, model) | changes).items():
        if isinstance(tensor, np.ndarray):  # bytes of blocks
            writer.add_tensor(name, tensor, raw_dtype=Q8_0)
        elif tensor is not None:
            writer.add_tensor(name, tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def logits(path: Path) -> Tensor:
    """Of what follows a prompt, which is computed in two parts."""
    files = open_model(path)
    decoder = load_decoder(files, ReferenceKernels(), torch.float32, torch.device("cpu"))
    prompt = torch.randint(3, 64, (75,), generator=torch.Generator().manual_seed(1)).tolist()
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    found = Bench(decoder, max_batched_tokens=64, max_num_seqs=2).run([prompt], [params])
    return torch.stack([found.logits["0", position] for position in range(75, 81)])


@pytest.mark.few(3)
@pytest.mark.parametrize("name", MODELS)
def test_gguf_of_layers_with_states_is_the_folder_it_was_made_of(name: str, tmp_path: Path) -> None:
    written = MODELS[name]
    model, path = random_model(written.config, seed=3), tmp_path / "model.gguf"
    model.save_pretrained(tmp_path)
    write(path, written, model, settings_of(written))
    from_gguf, from_folder = open_model(path).spec, open_model(tmp_path).spec
    if written.differs == "scaled":
        assert from_gguf.parameters() == from_folder.parameters()
    else:
        # a norm's offset is already in its weights
        assert rounded(from_gguf) == replace(rounded(from_folder), norm_offset=0.0)
    own, expected = logits(path), logits(tmp_path)
    if not written.differs:
        assert torch.equal(own, expected)
    else:
        torch.testing.assert_close(own, expected, atol=1e-5, rtol=1e-5)


def rounded(spec: Any) -> Any:
    """GGUF files hold settings in float32."""
    return replace(spec, rms_norm_eps=float(torch.tensor(spec.rms_norm_eps)))


def refuse(written: Written, path: Path, says: str, settings: Settings, **changes: Any) -> None:
    model = random_model(written.config, seed=3)
    write(path, written, model, settings_of(written) | settings, **changes)
    with pytest.raises((ModelFormatError, UnsupportedModelError), match=says):
        logits(path)


NEEDED = [
    ("nemotron", "ssm.group_count"),
    ("nemotron", "feed_forward_length"),
    ("nemotron with experts", "expert_used_count"),
    ("nemotron with experts", "expert_weights_scale"),
    ("qwen", "rope.dimension_count"),
    ("qwen", "full_attention_interval"),
    ("qwen", "ssm.state_size"),
    ("granite", "rope.scaling.finetuned"),
    ("granite", "attention.scale"),
    ("granite", "expert_count"),
    ("granite", "ssm.inner_size"),
    *(("lfm2", key) for key in ("shortconv.l_cache", "feed_forward_length")),
    *(("lfm2", key) for key in ("attention.head_count_kv", "attention.layer_norm_rms_epsilon")),
    *(("lfm2 with experts", f"expert_{key}count") for key in ("", "used_")),
    ("lfm2 with experts", "leading_dense_block_count"),
    *(
        ("falcon", f"ssm.{key}")
        for key in ("conv_kernel", "inner_size", "state_size", "time_step_rank", "group_count")
    ),
]


@pytest.mark.parametrize(("name", "key"), NEEDED)
def test_a_needed_key_that_is_left_out_is_named(name: str, key: str, tmp_path: Path) -> None:
    written = MODELS[name]
    refuse(
        written,
        tmp_path / "model.gguf",
        rf"model\.gguf: {written.architecture}\.{key} is missing",
        {key: None},
    )


REFUSED: list[tuple[str, Settings, str]] = [
    ("lfm2", {"shortconv.l_cache": 3}, r"blk\.0\.shortconv\.conv\.weight .*32 x 3 .*has 32 x 4"),
    ("lfm2", {"attention.head_count_kv": [0, 2, 0]}, r"head_count_kv should be a list of 4"),
    ("lfm2", {"attention.head_count_kv": [0, 2, 0, 4]}, r"head_count_kv should be a list of 4"),
    ("lfm2", {"attention.head_count_kv": [2, 2, 0, 2]}, r"blk\.0\.attn_q.*is missing"),
    ("lfm2", {"attention.sliding_window": 8}, r"lfm2\.attention\.sliding_window 8 is not"),
    ("falcon", {"ssm.state_size": 12}, r"blk\.0\.ssm_in\.weight should have shape 174 x 32"),
    (
        "falcon",
        {"ssm.inner_size": 46},
        r"falcon-h1\.ssm\.inner_size should be a multiple of 6 heads, but is 46",
    ),
    ("falcon", {"ssm.group_count": 4}, r"6 value heads can't share 4 key heads"),
    (
        "granite",
        {"rope.scaling.finetuned": True},
        r"rope\.scaling\.finetuned True is not supported",
    ),
    ("granite", {"ssm.inner_size": 50}, r"ssm\.inner_size should be a multiple of 4 heads"),
    ("granite", {"ssm.inner_size": 96}, r"blk\.0\.ssm_in\.weight should have shape"),
    ("granite", {"ssm.conv_kernel": 4}, r"blk\.0\.ssm_conv1d\.weight should have shape 104 x 4"),
    ("qwen", {"full_attention_interval": 2}, r"blk\.1\.attn_q.* is missing"),
    ("qwen", {"ssm.state_size": 12}, r"blk\.0\.attn_qkv\.weight should have shape 84 x 32"),
    ("qwen", {"ssm.inner_size": 40}, r"qwen3next\.ssm\.inner_size should be a multiple of 6"),
    (
        "nemotron",
        {"feed_forward_length": [0, 48, 0, 48]},
        r"feed_forward_length should be a list of 5",
    ),
    (
        "nemotron",
        {"feed_forward_length": [0, 48, 48, 48, 0]},
        r"blk\.2\.ffn_up\.weight .*is missing",
    ),
    ("nemotron", {"feed_forward_length": 48}, r"feed_forward_length should be a list"),
    ("nemotron", {"attention.head_count_kv": 2}, r"attention\.head_count_kv should be a list"),
    ("nemotron", {"ssm.state_size": 4}, r"blk\.0\.ssm_in\.weight should have shape"),
    ("nemotron with experts", {"moe_latent_size": 8}, r"moe_latent_size 8 is not supported"),
    ("lfm2 with experts", {"expert_gating_func": 1}, r"lfm2moe\.expert_gating_func 1 is not"),
]


@pytest.mark.parametrize(("name", "settings", "says"), REFUSED)
def test_settings_that_do_not_fit_are_named(
    name: str, settings: Settings, says: str, tmp_path: Path
) -> None:
    refuse(MODELS[name], tmp_path / "model.gguf", says, settings)


def test_a_tensor_of_a_state_that_is_left_out_is_named(tmp_path: Path) -> None:
    says = r"blk\.2\.shortconv\.conv\.weight of shape 32 x 4 is missing"
    refuse(
        MODELS["lfm2"], tmp_path / "model.gguf", says, {}, **{"blk.2.shortconv.conv.weight": None}
    )


def test_rates_that_are_not_negative_are_refused(tmp_path: Path) -> None:
    says = r"blk\.1\.ssm_a should have negative numbers"
    refuse(MODELS["falcon"], tmp_path / "a.gguf", says, {}, **{"blk.1.ssm_a": torch.ones(6, 1)})


def test_a_norm_of_another_size_is_refused(tmp_path: Path) -> None:
    says = r"blk\.1\.ssm_norm\.weight should have shape 48 .* has 3 x 15"
    norm = {"blk.1.ssm_norm.weight": torch.ones(3, 15)}
    refuse(MODELS["falcon"], tmp_path / "a.gguf", says, {}, **norm)


def test_a_shared_experts_gate_may_be_a_vector(tmp_path: Path) -> None:
    written, model = MODELS["qwen"], random_model(QWEN, seed=3)
    paths = [tmp_path / "row.gguf", tmp_path / "vector.gguf"]
    name = "blk.1.ffn_gate_inp_shexp.weight"
    row = tensors_of(written, model)[name]
    for path, gate in zip(paths, (row, row[0]), strict=True):
        write(path, written, model, settings_of(written), **{name: gate})
    assert torch.equal(*map(logits, paths))


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["granite", "qwen", "nemotron", "lfm2"])
def test_blocks_of_a_quantised_format_go_where_their_numbers_go(name: str, tmp_path: Path) -> None:
    written = MODELS[name]
    model, paths = random_model(written.config, seed=3), [tmp_path / "a.gguf", tmp_path / "b.gguf"]
    blocks = {
        own: gguf.quants.quantize(tensor.contiguous().numpy(), Q8_0)
        for own, tensor in tensors_of(written, model).items()
        if tensor.dim() == 2
        and tensor.shape[1] % 32 == 0
        and "_inp" not in own
        and "norm" not in own
    }
    assert any("ssm_in" in own or "attn_qkv" in own or "in_proj" in own for own in blocks)
    numbers = {
        own: torch.from_numpy(gguf.quants.dequantize(block, Q8_0)) for own, block in blocks.items()
    }
    for path, changes in zip(paths, (blocks, numbers), strict=True):
        write(path, written, model, settings_of(written), **changes)
    assert torch.equal(*map(logits, paths))


def test_such_a_file_is_not_written_in_hugging_face_layout(tmp_path: Path) -> None:
    written, path = MODELS["granite"], tmp_path / "model.gguf"
    write(path, written, random_model(written.config, seed=3), settings_of(written))
    with pytest.raises(
        UnsupportedModelError, match=r"granitemoehybrid has no form in Hugging Face"
    ):
        quantize_model(path, tmp_path / "out", "int8")
    assert not (tmp_path / "out").exists()


def test_an_architecture_that_is_not_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "gemma3n")
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModelError, match=r"'gemma3n' is not supported.* nemotron_h"):
        open_model(path)
