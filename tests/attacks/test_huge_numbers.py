"""Whole numbers that no float is as large as, wherever a number is read: refused, in words that can
be written.
"""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from quire.checkpoints.adapter_files import read_adapter_settings
from quire.config import EngineConfig
from quire.errors import InvalidRequestError, ModelFormatError, QuireError
from quire.models.model_config import read_config
from quire.sampling_params import SamplingParams
from tests.adapters import SETTINGS
from tests.attacks.test_model_files import CONFIG

HUGE = [10**400, -(10**400), 10**5000]
"""Python writes the last one for nobody: more than 4,300 digits."""


@pytest.mark.parametrize("value", HUGE, ids=["400", "-400", "5000"])
@pytest.mark.parametrize("table", [SamplingParams, EngineConfig])
def test_parameters(table: type[Any], value: int) -> None:
    for field in fields(table):
        if field.name == "seed" or field.name.endswith("_memory"):
            continue  # any whole number is one
        with pytest.raises(QuireError) as caught:
            table(**{field.name: value})
        assert len(str(caught.value)) < 8000


@pytest.mark.parametrize("value", HUGE[:2], ids=["400", "-400"])
@pytest.mark.parametrize("name", ["target_token_time", "target_first_token"])
def test_times(name: str, value: int) -> None:
    with pytest.raises(InvalidRequestError, match=f"{name}: must be a time above 0"):
        EngineConfig(**{"target_token_time": 1.0, name: value})


@pytest.mark.parametrize(
    "weights",
    ["a=5e-324", "a=1e-320", "a=1e300", {"a": 10**400}, {"a": 5e-324}, {"a": float("nan")}],
)
def test_weights_whose_counters_would_be_infinite(weights: Any) -> None:
    with pytest.raises(InvalidRequestError, match="tenant_weights: must be names with numbers"):
        EngineConfig(policy="fair", tenant_weights=weights)


@pytest.mark.parametrize(
    "settings",
    [
        {"lora_alpha": 10**400},
        {"alpha_pattern": {"q_proj": 10**400}},
        {"rank_pattern": {"q_proj": 10**400}},
        {"r": 10**400},
    ],
    ids=lambda settings: str(next(iter(settings))),
)
def test_adapters(settings: dict[str, Any]) -> None:
    with pytest.raises(ModelFormatError):
        read_adapter_settings({**SETTINGS, **settings}, "adapter_config.json")


@pytest.mark.parametrize(
    "settings",
    [
        {"rms_norm_eps": 10**400},
        {"rope_theta": 10**400},
        {"rope_scaling": {"rope_type": "linear", "factor": 10**400}},
        {
            "rope_scaling": {
                "rope_type": "longrope",
                "short_factor": [10**400] * 8,
                "long_factor": [1] * 8,
            }
        },
    ],
    ids=["norm", "base", "factor", "factors"],
)
def test_models_of_llamas_kind(tmp_path: Path, settings: dict[str, Any]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**CONFIG, **settings}))
    with pytest.raises(QuireError):
        read_config(path)


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        ("qwen3", {"partial_rotary_factor": 1e308}),
        ("glm", {"partial_rotary_factor": 1e308}),
        ("qwen3", {"rope_scaling": {"rope_type": "yarn", "factor": 1e308}}),
        ("lfm2", {"block_ffn_dim_multiplier": 1e308, "block_auto_adjust_ff_dim": True}),
    ],
)
def test_numbers_whose_products_are_infinite(
    tmp_path: Path, model_type: str, settings: dict[str, Any]
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**CONFIG, "model_type": model_type, **settings}))
    with pytest.raises(QuireError, match="should be a number from"):
        read_config(path)
