"""GGUF adapters: files that the `gguf` package wrote compute as the folders of PEFT they were made
of, and what does not fit is refused by name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from quire import LLM, LoRARequest, SamplingParams
from quire.errors import QuireError
from quire.frontend.adapter_names import parse_lora
from quire.server.adapters import ServedAdapters
from tests.adapters import save_adapter
from tests.models.random_configurations import random_model
from tests.test_adapters import ENGINE, PROMPT

RANK, HIDDEN, HEADS, KV_HEADS, SIZE, INNER, EXPERTS = 4, 64, 4, 2, 16, 48, 4
SHAPES = {
    "self_attn.q_proj": ("attn_q", HEADS * SIZE, HIDDEN),
    "self_attn.k_proj": ("attn_k", KV_HEADS * SIZE, HIDDEN),
    "self_attn.o_proj": ("attn_output", HIDDEN, HEADS * SIZE),
}
MLP = {
    "gate_proj": ("ffn_gate", INNER, HIDDEN),
    "up_proj": ("ffn_up", INNER, HIDDEN),
    "down_proj": ("ffn_down", HIDDEN, INNER),
}
COMMON: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": SIZE,
    "initializer_range": 0.2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MODELS: Mapping[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**COMMON, intermediate_size=INNER),
    "qwen3": lambda: transformers.Qwen3Config(**COMMON, intermediate_size=INNER),
    "qwen3moe": lambda: transformers.Qwen3MoeConfig(
        **COMMON, moe_intermediate_size=INNER, num_experts=EXPERTS, num_experts_per_tok=2
    ),
}


def save_model(folder: Path, architecture: str) -> Path:
    random_model(MODELS[architecture](), 0).save_pretrained(folder)
    return folder


def turned(b: Tensor, heads: int) -> Tensor:
    """Rows of queries and keys as llama.cpp has them: pairs of a rotation are neighbours."""
    return b.view(heads, 2, -1, b.shape[-1]).transpose(1, 2).reshape(b.shape)


def make(architecture: str, folder: Path) -> tuple[Path, dict[str, Tensor]]:
    """An adapter as PEFT writes it, and its tensors in GGUF's names."""
    source = torch.Generator().manual_seed(1)
    plain, converted = {}, {}

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=source) * 0.3

    def add(module: str, name: str, a: Tensor, b: Tensor, stored_b: Tensor) -> None:
        plain[f"base_model.model.model.layers.1.{module}.lora_A.weight"] = a
        plain[f"base_model.model.model.layers.1.{module}.lora_B.weight"] = b
        converted[f"blk.1.{name}.weight.lora_a"] = a
        converted[f"blk.1.{name}.weight.lora_b"] = stored_b

    for module, (name, outputs, inputs) in SHAPES.items():
        a, b = draw(RANK, inputs), draw(outputs, RANK)
        heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(name)
        is_turned = architecture == "llama" and heads is not None
        add(module, name, a, b, turned(b, heads or 1) if is_turned else b)
    for part, (name, outputs, inputs) in MLP.items():
        if architecture != "qwen3moe":
            a, b = draw(RANK, inputs), draw(outputs, RANK)
            add(f"mlp.{part}", name, a, b, b)
            continue
        all_a, all_b = draw(EXPERTS, RANK, inputs), draw(EXPERTS, outputs, RANK)
        for expert in range(EXPERTS):
            add(f"mlp.experts.{expert}.{part}", "", all_a[expert], all_b[expert], all_b[expert])
        del converted["blk.1..weight.lora_a"], converted["blk.1..weight.lora_b"]
        converted[f"blk.1.{name}_exps.weight.lora_a"] = all_a
        converted[f"blk.1.{name}_exps.weight.lora_b"] = all_b
    return save_adapter(folder, plain, r=RANK, lora_alpha=8), converted


def write(path: Path, architecture: str, tensors: Mapping[str, Tensor], **keys: str) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_type(keys.get("kind", "adapter"))
    writer.add_string("adapter.type", keys.get("adapter_type", "lora"))
    writer.add_float32("adapter.lora.alpha", float(keys.get("alpha", "8")))
    for name, tensor in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(tensor.numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.few(2)
@pytest.mark.parametrize("architecture", MODELS)
def test_a_gguf_adapter_computes_as_the_folder_it_was_made_of(
    architecture: str, tmp_path: Path
) -> None:
    folder, tensors = make(architecture, tmp_path / "peft")
    file = write(tmp_path / "it.gguf", architecture, tensors)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=2)

    def answer(llm: LLM, path: Path | None) -> Any:
        request = None if path is None else LoRARequest("it", 1, str(path))
        found = llm.generate(PROMPT, params, lora_request=request)[0].completions[0]
        return found.token_ids, found.logprobs

    with LLM(save_model(tmp_path / "model", architecture), **ENGINE) as llm:
        plain, expected, found = (answer(llm, one) for one in (None, folder, file))
    assert found == expected
    assert found != plain


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with LLM(save_model(tmp_path_factory.mktemp("model"), "qwen3"), **ENGINE) as llm:
        yield llm


A, B = torch.ones(RANK, HIDDEN), torch.ones(HIDDEN, RANK)
GOOD = {"blk.0.attn_q.weight.lora_a": A, "blk.0.attn_q.weight.lora_b": B}
BAD: Mapping[str, tuple[str, dict[str, Tensor], dict[str, str], str]] = {
    "another architecture": ("llama", GOOD, {}, r"general\.architecture is .llama.*'qwen3'"),
    "a model": ("qwen3", GOOD, {"kind": "model"}, r"general\.type is .model"),
    "a control vector": ("qwen3", GOOD, {"adapter_type": "x"}, r"adapter\.type is"),
    "NaN for alpha": ("qwen3", GOOD, {"alpha": "nan"}, r"adapter\.lora\.alpha"),
    "no place": (
        "qwen3",
        {**GOOD, "blk.9.attn_q.weight.lora_a": A},
        {},
        r"blk\.9\.attn_q\.weight\.lora_a has no place",
    ),
    "a norm": (
        "qwen3",
        {**GOOD, "blk.0.attn_norm.weight": torch.ones(HIDDEN)},
        {},
        r"attn_norm\.weight has no place",
    ),
    "the embedding": (
        "qwen3",
        {**GOOD, "token_embd.weight.lora_a": A},
        {},
        r"token_embd\.weight\.lora_a has no place",
    ),
    "another model": (
        "qwen3",
        {**GOOD, "blk.0.attn_q.weight.lora_a": torch.ones(RANK, 32)},
        {},
        r"attn_q\.weight\.lora_a has shape \[4, 32\]",
    ),
    "ranks that differ": (
        "qwen3",
        {**GOOD, "blk.0.attn_q.weight.lora_b": torch.ones(HIDDEN, 5)},
        {},
        r"attn_q\.weight\.lora_b has shape \[64, 5\]",
    ),
    "too many ranks": (
        "qwen3",
        {
            "blk.0.attn_q.weight.lora_a": torch.ones(257, HIDDEN),
            "blk.0.attn_q.weight.lora_b": torch.ones(HIDDEN, 257),
        },
        {},
        "has rank 257",
    ),
    "no B": ("qwen3", {"blk.0.attn_q.weight.lora_a": A}, {}, r"there is no .*\.lora_b"),
    "not a number": (
        "qwen3",
        {**GOOD, "blk.0.attn_q.weight.lora_b": B * torch.nan},
        {},
        r"lora_b has numbers that are infinite or NaN",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_does_not_fit_is_refused_by_name(llm: LLM, tmp_path: Path, case: str) -> None:
    architecture, tensors, keys, message = BAD[case]
    file = write(tmp_path / "bad.gguf", architecture, tensors, **keys)
    with pytest.raises(QuireError, match=message) as caught:
        llm.load_adapter("bad", file)
    assert "bad.gguf" in str(caught.value)
    assert "bad" not in llm.adapters


@pytest.mark.parametrize("end", [0, 3, 40, 300, -1])
def test_broken_files_are_refused(llm: LLM, tmp_path: Path, end: int) -> None:
    file = write(tmp_path / "bad.gguf", "qwen3", GOOD)
    file.write_bytes(file.read_bytes()[:end])
    with pytest.raises(QuireError, match=r"bad\.gguf"):
        llm.load_adapter("bad", file)


def test_any_byte_may_be_wrong(llm: LLM, tmp_path: Path) -> None:
    """Either it is refused, or it is read: nothing else happens."""
    file = write(tmp_path / "bad.gguf", "qwen3", GOOD)
    good = file.read_bytes()
    for at in range(0, 400, 3):
        file.write_bytes(good[:at] + bytes([good[at] ^ 0x41]) + good[at + 1 :])
        with contextlib.suppress(QuireError):
            llm.load_adapter("bad", file)
    assert llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=1))


def test_a_file_in_the_servers_folder_goes_by_its_name_without_the_ending(tmp_path: Path) -> None:
    file = write(tmp_path / "it.gguf", "qwen3", GOOD)
    (tmp_path / "link.gguf").symlink_to(file)
    served = ServedAdapters(folder=tmp_path)
    found = served.find("it")
    assert found is not None
    assert found.path == str(file)
    assert served.names() == ["it"]
    assert served.find("link") is None
    assert parse_lora(f"it={file}").lora_path == str(file)
