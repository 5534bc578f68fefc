"""config.json: both ways of writing rope, defaults that depend on the family, and errors that name
the field.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.errors import ModelFormatError, QuireError, UnsupportedModelError
from quire.models.model_config import read_config
from quire.models.rope import cos_sin_table
from quire.models.spec import RopeSpec
from tests.long_runs import examples

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 100,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
}


def write(folder: Path, **changes: Any) -> Path:
    path = folder / "config.json"
    path.write_text(
        json.dumps({key: value for key, value in (LLAMA | changes).items() if value != "absent"})
    )
    return path


def test_the_older_way_of_writing_rope_means_the_same(tmp_path: Path) -> None:
    scaling = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    }
    old = read_config(
        write(tmp_path, rope_theta=5e5, rope_scaling={"rope_type": "llama3", **scaling})
    )
    new = read_config(
        write(tmp_path, rope_parameters={"rope_theta": 5e5, "rope_type": "llama3", **scaling})
    )
    assert old == new
    assert old.layers[0].rope == RopeSpec(
        5e5, "llama3", 8.0, 256, low_freq_factor=1.0, high_freq_factor=4.0
    )


def test_yarn_extends_the_longest_sequence(tmp_path: Path) -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    assert read_config(write(tmp_path, rope_scaling=scaling)).max_position == 4096


def test_an_absent_window_is_the_familys_and_null_is_none(tmp_path: Path) -> None:
    mistral = {"architectures": ["MistralForCausalLM"]}
    windows = [
        read_config(write(tmp_path, **mistral, sliding_window=value)).layers[0].mixer.sliding_window
        for value in ("absent", None, 77)
    ]
    assert windows == [4096, None, 77]


def test_end_tokens_come_from_both_files(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 2]}')
    assert read_config(write(tmp_path)).eos_token_ids == (2, 7)


def test_an_unknown_architecture_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(
        UnsupportedModelError, match=r"BertModel.*LlamaForCausalLM.*Qwen3MoeForCausalLM"
    ):
        read_config(write(tmp_path, architectures=["BertModel"]))


@pytest.mark.parametrize(
    "architecture",
    [
        "PhimoeForCausalLM",
        "OlmoForCausalLM",
        "Glm4vForConditionalGeneration",
        "GPTNeoForCausalLM",
        "KimiK25ForConditionalGeneration",
    ],
)
def test_near_relatives_are_not_run_by_accident(tmp_path: Path, architecture: str) -> None:
    with pytest.raises(
        UnsupportedModelError, match=f"{architecture} is not supported.*Gemma3ForCausalLM.*GptOss"
    ):
        read_config(write(tmp_path, architectures=[architecture]))


@pytest.mark.parametrize("kind", ["CausalLM", "ConditionalGeneration"])
def test_gemma_3n_is_refused_by_what_it_does(tmp_path: Path, kind: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"Gemma3nFor{kind} keeps several.*AltUp"):
        read_config(write(tmp_path, architectures=[f"Gemma3nFor{kind}"]))


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("Qwen3_5ForCausalLM", {"linear_num_value_heads": 3}, "3 value heads can't share 16 key"),
        ("Qwen3_5ForCausalLM", {"linear_num_key_heads": 0}, "linear_num_key_heads should be"),
        ("Qwen3_5ForCausalLM", {"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim should be"),
        ("Qwen3_5ForCausalLM", {"linear_key_head_dim": 10**30}, "linear_key_head_dim should be"),
        ("GraniteMoeHybridForCausalLM", {"mamba_n_heads": 7}, "mamba_n_heads should be a divisor"),
        ("GraniteMoeHybridForCausalLM", {"mamba_n_groups": 3}, "mamba_n_heads should be a divisor"),
        (
            "GraniteMoeHybridForCausalLM",
            {"time_step_limit": [0.1]},
            "time_step_limit should be two numbers",
        ),
        ("Lfm2ForCausalLM", {"conv_L_cache": 0}, "conv_L_cache should be"),
        ("Lfm2ForCausalLM", {"layer_types": ["conv"]}, "layer_types should be"),
    ],
)
def test_sizes_of_layers_with_a_state_are_checked(
    tmp_path: Path, architecture: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelFormatError, match=message):
        read_config(write(tmp_path, architectures=[architecture], **changes))


def test_a_kind_of_layer_that_a_family_lacks_is_refused(tmp_path: Path) -> None:
    for kinds in (["attention", "kda"], ["mamba"] * 7):
        with pytest.raises(ModelFormatError, match="layer_types should be"):
            read_config(
                write(tmp_path, architectures=["GraniteMoeHybridForCausalLM"], layer_types=kinds)
            )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["Gemma2ForCausalLM"], "hidden_activation": "quick_gelu"},
            "hidden_activation 'quick_gelu'",
        ),
        (
            {"architectures": ["Gemma2ForCausalLM"], "use_bidirectional_attention": True},
            "later tokens",
        ),
        (
            {"architectures": ["Gemma3ForCausalLM"], "attn_logit_softcapping": 30.0},
            "attn_logit_softcapping",
        ),
        (
            {"architectures": ["Glm4ForCausalLM"], "partial_rotary_factor": 0.2},
            "partial_rotary_factor 0.2",
        ),
        ({"architectures": ["OlmoeForCausalLM"], "clip_qkv": 8.0}, "clip_qkv 8.0"),
        ({"architectures": ["CohereForCausalLM"], "use_qk_norm": True}, "use_qk_norm True"),
        ({"architectures": ["StableLmForCausalLM"], "qk_layernorm": True}, "qk_layernorm True"),
        ({"architectures": ["Ernie4_5_MoeForCausalLM"], "use_bias": True}, "use_bias true"),
        (
            {"architectures": ["GemmaForCausalLM"], "use_bidirectional_attention": True},
            "use_bidirectional_attention True",
        ),
    ],
)
def test_what_a_family_never_has_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        read_config(write(tmp_path, **changes))


def test_the_limit_chooses_the_long_or_the_short_factors() -> None:
    """Not a sequence's length: with a limit up to the original context the short ones, above it the
    long ones.
    """
    long = RopeSpec(
        kind="factors", freq_factors=(2.0, 3.0), short_factors=(1.0, 1.5), original_max_position=32
    )
    short = RopeSpec(kind="factors", freq_factors=(1.0, 1.5))
    assert torch.equal(cos_sin_table(long, 4, 32), cos_sin_table(short, 4, 32))
    only_long = RopeSpec(kind="factors", freq_factors=(2.0, 3.0))
    assert torch.equal(cos_sin_table(long, 4, 33), cos_sin_table(only_long, 4, 33))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": "absent"}, "hidden_size is missing"),
        ({"hidden_size": -4}, "hidden_size should be a whole number"),
        ({"hidden_size": 10**12}, "hidden_size should be a whole number"),
        ({"num_hidden_layers": 10**7}, "num_hidden_layers"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"rms_norm_eps": -1}, "rms_norm_eps"),
        ({"rms_norm_eps": float("nan")}, "NaN"),
        ({"num_key_value_heads": 3}, "4 attention heads can't share 3"),
        ({"head_dim": 7}, "head_dim is 7"),
        ({"hidden_size": 66}, "hidden_size should be a multiple of the 4 attention heads"),
        ({"hidden_size": 2}, "hidden_size should be a multiple of the 4 attention heads"),
        ({"rope_scaling": [1]}, "rope_scaling should be an object"),
        ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"eos_token_id": -1}, "eos_token_id"),
    ],
)
def test_a_wrong_value_is_named_with_its_file(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    path = write(tmp_path, **changes)
    with pytest.raises(ModelFormatError, match=message) as caught:
        read_config(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "quick_gelu"}, "hidden_act 'quick_gelu'"),
        ({"rope_scaling": {"type": "mrope", "factor": 2}}, "rope type 'mrope'"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2, "partial_rotary_factor": 0.5}},
            "partial_rotary_factor 0.5",
        ),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        read_config(write(tmp_path, **changes))


@pytest.mark.parametrize("text", ["", "[]", "{", '"x"', "[" * 100_000, "\x00"])
def test_a_broken_file_is_an_error_with_its_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ModelFormatError, match=r"config\.json"):
        read_config(path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)


@settings(max_examples=examples(200))
@given(
    st.dictionaries(
        st.sampled_from([*LLAMA, "rope_scaling", "rope_theta", "head_dim"]), JSON, max_size=3
    )
)
def test_any_values_give_a_spec_or_our_error(
    tmp_path_factory: pytest.TempPathFactory, changes: dict[str, Any]
) -> None:
    folder = tmp_path_factory.mktemp("config")
    with contextlib.suppress(QuireError):
        read_config(write(folder, **changes))


WINDOWS = {"layer_types": ["full_attention", "sliding_attention"]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["Qwen3ForCausalLM"], "use_sliding_window": False, **WINDOWS},
            "use_sliding_window should be true",
        ),
        ({"architectures": ["SmolLM3ForCausalLM"], **WINDOWS}, "sliding_window should be a number"),
        (
            {"architectures": ["MistralForCausalLM"], "sliding_window": None, **WINDOWS},
            "sliding_window should be a number",
        ),
        (
            {"architectures": ["Glm4MoeForCausalLM"], "n_routed_experts": 8, "n_group": 3},
            "n_group should be a divisor of 8",
        ),
        (
            {"architectures": ["HunYuanMoEV1ForCausalLM"], "moe_topk": [1, 2]},
            "moe_topk should be the same number in all layers",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_named(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelFormatError, match=message):
        read_config(write(tmp_path, **changes))


def test_layer_types_of_a_mistral_model_say_which_layers_have_the_window(tmp_path: Path) -> None:
    mistral = {"architectures": ["MistralForCausalLM"], "sliding_window": 16}
    by_layer = read_config(write(tmp_path, **mistral, **WINDOWS))
    assert [one.attention and one.attention.sliding_window for one in by_layer.layers] == [None, 16]


def test_rope_scaling_counts_more_than_rope_parameters_beside_it(tmp_path: Path) -> None:
    added = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    plain = {"rope_type": "default", "rope_theta": 5e5}
    both = read_config(write(tmp_path, rope_parameters=plain, rope_scaling=added))
    assert both == read_config(write(tmp_path, rope_scaling=added))


def test_of_two_original_lengths_the_outer_one_counts(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    spec = read_config(write(tmp_path, rope_parameters=yarn, original_max_position_embeddings=128))
    assert spec.layers[0].rope is not None
    assert spec.layers[0].rope.original_max_position == 128
