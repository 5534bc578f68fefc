"""Folders of models that also see: their text part is run, and the rest is left out by name."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from quire.backends.cpu.kernels import CpuKernels
from quire.models.load import open_model
from quire.models.names import names_not_for_text
from tests.decoding import all_logits, load_decoder
from tests.models.random_configurations import draw_values, random_model

_TOWER = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3_text": ("Gemma3", _TOWER),
    "mistral": ("Mistral3", _TOWER),
    "ministral3": ("Mistral3", _TOWER),
    "llama4_text": (
        "Llama4",
        {**_TOWER, "vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16},
    ),
    "gemma4_text": ("Gemma4", {**_TOWER, "num_key_value_heads": 2, "head_dim": 8}),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("family", CASES)
def test_the_text_part_is_run_and_the_towers_are_left_out(family: str, tmp_path: Path) -> None:
    rng = Random(family)
    kind, tower = CASES[family]
    values = draw_values(rng, family)
    text = transformers.CONFIG_MAPPING[family](**values).to_dict()
    whole = getattr(transformers, f"{kind}Config")(text_config=text, vision_config=tower)
    whole.text_config._attn_implementation = "eager"
    torch.manual_seed(1)
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(whole).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.1)
    model.save_pretrained(tmp_path)
    prompt = [rng.randrange(3, values["vocab_size"]) for _ in range(17)]
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0]
    files = open_model(tmp_path)
    assert names_not_for_text(files.spec, files.checkpoint.tensors.keys())
    decoder = load_decoder(files, CpuKernels(), torch.float32, torch.device("cpu"))
    torch.testing.assert_close(all_logits(decoder, prompt), expected, atol=1e-4, rtol=1e-4)


def test_files_of_before_transformers_5_are_read(tmp_path: Path) -> None:
    """`language_model.` stood in front of all names of the text part, of the head's, too."""
    rng = Random(3)
    values = draw_values(rng, "mistral") | {"tie_word_embeddings": False}
    model = random_model(transformers.CONFIG_MAPPING["mistral"](**values), 0)
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = {f"language_model.{name}": tensor for name, tensor in load_file(file).items()}
    tensors["vision_tower.ln_pre.weight"] = torch.ones(4)
    save_file(tensors, file, {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    whole = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": config}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    prompt = [rng.randrange(values["vocab_size"]) for _ in range(9)]
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0]
    decoder = load_decoder(open_model(tmp_path), CpuKernels(), torch.float32, torch.device("cpu"))
    torch.testing.assert_close(all_logits(decoder, prompt), expected, atol=1e-4, rtol=1e-4)
