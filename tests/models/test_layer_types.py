"""`layer_types` says what is computed, or is refused by its name: in every family, whether its class
reads the key or not.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.errors import ModelFormatError, UnsupportedModelError
from quire.models.families import FAMILIES, family_named
from quire.models.model_config import read_config
from quire.models.spec import ModelSpec
from tests.models.test_defaults import NEEDED, SIZES

FULL, SLIDING = "full_attention", "sliding_attention"


def read(folder: Path, family: str, **values: Any) -> ModelSpec:
    said = {**SIZES, "num_key_value_heads": 2, **NEEDED.get(family, {}), "eos_token_id": 2}
    said |= {"architectures": [family_named(family).architectures[0]], **values}
    (folder / "config.json").write_text(json.dumps(said))
    return read_config(folder / "config.json")


@pytest.mark.parametrize("family", [one.name for one in FAMILIES])
def test_a_wrong_list_is_refused(family: str, tmp_path: Path) -> None:
    for kinds in ([FULL] * 5, [FULL] * 7, [FULL] * 5 + ["banana"], [], FULL, [1] * 6):
        with pytest.raises((ModelFormatError, UnsupportedModelError), match="layer_types"):
            read(tmp_path, family, layer_types=kinds)


HAVE_WINDOWS = {
    *("mistral", "gemma2", "gemma3_text", "olmo3", "cohere2", "gpt_oss", "gemma4_text"),
    *("vaultgemma", "ministral", "exaone4", "cwm", "dots1"),
}
"""Families that have a window if nothing is said."""


@pytest.mark.parametrize("family", [one.name for one in FAMILIES])
def test_a_window_that_the_other_settings_do_not_give_is_refused(
    family: str, tmp_path: Path
) -> None:
    kinds = [FULL, SLIDING] * 3
    if family in HAVE_WINDOWS:
        windows = [
            layer.attention is not None and layer.attention.sliding_window is not None
            for layer in read(tmp_path, family, layer_types=kinds).layers
        ]
        assert windows == [False, True, False, True, False, family != "gemma4_text"]
        kinds = [FULL, SLIDING, FULL, SLIDING, FULL, FULL]
    with pytest.raises((ModelFormatError, UnsupportedModelError)):
        read(tmp_path, family, layer_types=kinds, sliding_window=None)


@pytest.mark.parametrize("family", ["qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3"])
def test_qwen_has_no_window_without_use_sliding_window(family: str, tmp_path: Path) -> None:
    kinds = [FULL, SLIDING] * 3
    with pytest.raises(ModelFormatError, match=r"use_sliding_window|sliding_window|layer_types"):
        read(tmp_path, family, layer_types=kinds, use_sliding_window=False)
