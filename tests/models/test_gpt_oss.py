"""gpt-oss against transformers, from both kinds of files its experts come in: blocks of four bits
in safetensors (gate and up rows alternating) and in GGUF. The weights that transformers computes
with are those the blocks stand for.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

from quire.backends.cpu.kernels import CpuKernels
from quire.errors import ModelFormatError, UnsupportedModelError
from quire.kernels.reference import ReferenceKernels
from quire.models.load import open_model
from tests.decoding import all_logits, greedy, load_decoder
from tests.models.random_configurations import check_greedy, random_model, reference_logits

MXFP4 = gguf.GGMLQuantizationType.MXFP4
CPU = torch.device("cpu")
CONFIG = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": 12,
    "max_position_embeddings": 512,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "initializer_range": 0.2,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150_000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
    },
}


def blocks_of(model: Any) -> dict[str, np.ndarray]:
    """The experts' weights [experts, out, in] as MXFP4 of GGUF files; the model gets the numbers
    they stand for.
    """
    found: dict[str, np.ndarray] = {}
    for name, value in model.named_parameters():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            found[name] = gguf.quants.quantize(
                value.detach().transpose(1, 2).contiguous().numpy(), MXFP4
            )
            numbers = torch.from_numpy(gguf.quants.dequantize(found[name], MXFP4).copy())
            with torch.no_grad():
                value.copy_(numbers.transpose(1, 2))
    return found


@pytest.fixture(scope="module")
def model_and_blocks() -> tuple[Any, dict[str, np.ndarray]]:
    model = random_model(transformers.GptOssConfig(**CONFIG), seed=5)
    return model, blocks_of(model)


def write_safetensors(folder: Path, model: Any, blocks: dict[str, np.ndarray]) -> None:
    tensors: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        if name not in blocks:
            tensors[name] = value.contiguous()
            continue
        stored = torch.from_numpy(blocks[name].copy())
        *rows, size = stored.shape
        stored = stored.view(*rows, size // 17, 17)
        # in the order of the numbers
        codes = torch.cat((stored[..., 1:] & 15, stored[..., 1:] >> 4), -1)
        tensors[f"{name}_blocks"] = codes[..., ::2] | codes[..., 1::2] << 4
        tensors[f"{name}_scales"] = stored[..., 0].contiguous()
    save_file(tensors, folder / "model.safetensors")
    config = model.config.to_dict() | {"architectures": ["GptOssForCausalLM"]}
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config, default=str))


def write_gguf(path: Path, model: Any, blocks: dict[str, np.ndarray]) -> None:
    config, rope = model.config, CONFIG["rope_parameters"]
    writer = gguf.GGUFWriter(path, "gpt-oss")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_expert_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_sliding_window(config.sliding_window)
    writer.add_expert_count(config.num_local_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    assert isinstance(rope, dict)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GPT_OSS, config.num_hidden_layers)
    for name, value in model.state_dict().items():
        block = f"blk.{name.split('.')[2]}" if ".layers." in name else ""
        if name.endswith("gate_up_proj"):
            for i, part in enumerate(("gate", "up")):
                data = np.ascontiguousarray(blocks[name][:, i::2])
                writer.add_tensor(f"{block}.ffn_{part}_exps.weight", data, raw_dtype=MXFP4)
        elif name.endswith("experts.down_proj"):
            writer.add_tensor(f"{block}.ffn_down_exps.weight", blocks[name], raw_dtype=MXFP4)
        elif name.endswith("gate_up_proj_bias"):
            for i, part in enumerate(("gate", "up")):
                writer.add_tensor(
                    f"{block}.ffn_{part}_exps.bias", value[:, i::2].contiguous().numpy()
                )
        elif name.endswith("down_proj_bias"):
            writer.add_tensor(f"{block}.ffn_down_exps.bias", value.contiguous().numpy())
        else:
            found = names.get_name(name, try_suffixes=(".weight", ".bias"))
            found = f"{block}.attn_sinks.weight" if name.endswith("sinks") else found
            writer.add_tensor(found, value.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
def test_gpt_oss_matches_transformers(
    kind: str, model_and_blocks: tuple[Any, dict[str, np.ndarray]], tmp_path: Path
) -> None:
    model, blocks = model_and_blocks
    path = tmp_path / "model.gguf" if kind == "gguf" else tmp_path
    (write_gguf if kind == "gguf" else write_safetensors)(path, model, blocks)
    files = open_model(path)
    decoder = load_decoder(files, ReferenceKernels(), torch.float32, CPU)
    prompt = torch.randint(64, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    torch.testing.assert_close(
        all_logits(decoder, prompt), reference_logits(model, prompt), atol=1e-4, rtol=0
    )
    check_greedy(model, prompt, greedy(decoder, prompt, 64))
    # Computed as they are stored, but with activations of 8 bits.
    stored = load_decoder(files, CpuKernels(), torch.float32, CPU)
    formats = {part.format.name for part in stored.weights["layers.1.mlp.gate_up"].parts}
    assert formats == {"cpu_packed_MXFP4"}
    expected = reference_logits(model, prompt)
    error = (all_logits(stored, prompt) - expected).abs().mean() / expected.abs().mean()
    assert error < 0.03


def test_scales_that_do_not_fit_are_refused(
    model_and_blocks: tuple[Any, dict[str, np.ndarray]], tmp_path: Path
) -> None:
    model, blocks = model_and_blocks
    write_safetensors(tmp_path, model, {name: value[:, :, :17] for name, value in blocks.items()})
    with pytest.raises(ModelFormatError, match="gate_up_proj should have shape 4 x 64 x 64"):
        load_decoder(open_model(tmp_path), ReferenceKernels(), torch.float32, CPU)


def test_other_limits_are_refused(
    model_and_blocks: tuple[Any, dict[str, np.ndarray]], tmp_path: Path
) -> None:
    model, blocks = model_and_blocks
    write_safetensors(tmp_path, model, blocks)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"swiglu_limit": 6.0}))
    with pytest.raises(UnsupportedModelError, match="swiglu_limit"):
        open_model(tmp_path)
