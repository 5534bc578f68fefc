"""What an absent key means, compared with the installed transformers."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from quire.models.defaults import DEFAULTS, defaults_of
from quire.models.families import FAMILIES
from quire.models.model_config import read_config
from tests.models.random_configurations import NEUTRAL, config_class, fields_of

NAMES = [family.name for family in FAMILIES]
SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
}
"""What every config.json must say."""
NO_DEFAULT = ("time_step_limit", "mamba_d_head")
"""Read by rules of their own."""
NEEDED: dict[str, dict[str, Any]] = {
    "granitemoehybrid": {"mamba_n_heads": 4, "layer_types": ["attention"] * 6},
    "olmo_hybrid": {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "rope_parameters": None,
    },
    "nemotron_h": {"layers_block_type": ["mamba", "attention", "moe"] * 2},
    "falcon_h1": {"mamba_n_heads": 4, "mamba_d_ssm": 64},
    "bamba": {"mamba_n_heads": 4, "attn_layer_indices": [1, 4]},
    "gpt2": {"n_embd": 64, "n_layer": 6, "n_head": 4},
    "gptj": {"n_embd": 64, "n_layer": 6, "n_head": 4, "rotary_dim": 8},
    "opt": {"ffn_dim": 32},
    "bloom": {"n_layer": 6, "n_head": 4},
    "mpt": {"d_model": 64, "n_layers": 6, "n_heads": 4},
    "deepseek_v2": {"num_key_value_heads": 4, "num_experts_per_tok": 2},
    "deepseek_v3": {"num_key_value_heads": 4},
    "glm4_moe_lite": {"num_key_value_heads": 4},
    "kimi_linear": {"num_key_value_heads": 4},
    "mistral4": {"num_key_value_heads": 4},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2},
}
"""What else a small model of a family must say: what its class assumes is for a large one."""


@pytest.mark.parametrize("family", NAMES)
def test_an_absent_key_means_what_transformers_assumes(family: str) -> None:
    known = {
        name: value
        for name, value in fields_of(family).items()
        if value is not None and name not in (*SIZES, *NO_DEFAULT, "rope_parameters")
    }
    ours = defaults_of(family)
    assert {name: ours.get(name) for name in known} == known
    theta = config_class(family).default_theta
    assert ours["rope_theta"] == (theta["global"] if isinstance(theta, dict) else theta)


@pytest.mark.parametrize("family", NAMES)
def test_a_default_is_of_a_field_that_the_family_has(family: str) -> None:
    known = {field.name for field in dataclasses.fields(config_class(family))}
    extra = {"rope_theta", "partial_rotary_factor", "intermediate_size"}
    assert DEFAULTS.get(family, {}).keys() <= known | extra
    assert not DEFAULTS.get(family, {}).keys() & NEUTRAL


@pytest.mark.parametrize("family", NAMES)
def test_a_config_without_optional_keys_reads_as_the_one_that_transformers_writes(
    family: str, tmp_path: Path
) -> None:
    values = {**SIZES, "num_key_value_heads": 2, **NEEDED.get(family, {})}
    written = config_class(family)(**values)
    said = {key: values[key] for key in values if key in SIZES or key in NEEDED.get(family, {})}
    if values["num_key_value_heads"] != fields_of(family).get("num_key_value_heads"):
        said["num_key_value_heads"] = values["num_key_value_heads"]
    architecture = next(one.architectures[0] for one in FAMILIES if one.name == family)

    def read(kind: str, config: dict[str, Any]) -> Any:
        folder = tmp_path / kind
        folder.mkdir()
        (folder / "config.json").write_text(
            json.dumps({"eos_token_id": 2, **config, "architectures": [architecture]})
        )
        return read_config(folder / "config.json")

    whole = json.loads(written.to_json_string(use_diff=False))
    whole |= {"eos_token_id": 2, "bos_token_id": None}
    assert read("short", said) == read("whole", whole)
