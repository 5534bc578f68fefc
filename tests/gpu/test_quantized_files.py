"""Files with quantised weights, loaded onto a GPU: what is computed as stored means what the
expanded file means.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quire.backends.select import select_kernels
from quire.models.load import open_model
from tests.decoding import all_logits, load_decoder
from tests.gpu.support import DEVICE
from tests.models.test_foreign_quantization import (
    FLOAT,
    awq,
    by_block,
    by_channel,
    compressed,
    gptq,
    pack_quantized,
    rewrite,
    write_plain,
)
from tests.models.test_quantized_loading import EXPERTS, LLAMA, MIXED, TOKENS, write_blocks

pytestmark = pytest.mark.gpu
BLOCK = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
BY_64: dict[str, Any] = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64}
FOLDERS = {
    "fp8 by channel": (
        compressed("float-quantized", **FLOAT, strategy="channel"),
        by_channel("_scale"),
    ),
    "fp8 by block": (BLOCK, by_block),
    "awq": (
        {"quant_method": "awq", "version": "gemm", "zero_point": True, "bits": 4, "group_size": 64},
        awq(64),
    ),
    "gptq": (
        {
            "quant_method": "gptq",
            "desc_act": False,
            "checkpoint_format": "gptq",
            "bits": 4,
            "group_size": 32,
        },
        gptq(32, 1, False),
    ),
    "pack-quantized": (
        compressed("pack-quantized", symmetric=True, **BY_64),
        pack_quantized(64, True),
    ),
}


def check(path: Path, equal: bool) -> None:
    kernels = select_kernels(DEVICE, torch.bfloat16)
    stored, expanded = (
        load_decoder(open_model(path), kernels, torch.bfloat16, DEVICE, quantization=one)
        for one in ("auto", "none")
    )
    assert stored.nbytes < expanded.nbytes
    assert any(not weight.is_dense for weight in stored.weights.values())
    found, meant = all_logits(stored, TOKENS), all_logits(expanded, TOKENS)
    if equal:  # codes become the expanded weight's numbers within the product
        assert torch.equal(found, meant)
    else:  # scales of 4 bits, or rows, are rounded, too
        assert (found - meant).norm() < 0.1 * meant.norm()


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q8_0", "Q4_K", "Q6_K", "mixed"])
@pytest.mark.parametrize("architecture", ["llama", "qwen3moe"])
def test_gguf(architecture: str, name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    config = LLAMA if architecture == "llama" else EXPERTS
    write_blocks(
        path,
        config,
        lambda tensor: MIXED.get(tensor.split(".")[-2]) if name == "mixed" else name,
        architecture,
    )
    check(path, equal=name in ("Q5_0", "Q8_0", "Q6_K"))


@pytest.mark.parametrize("kind", FOLDERS)
def test_what_other_tools_write(kind: str, tmp_path: Path) -> None:
    plain, out = tmp_path / "plain", tmp_path / "out"
    out.mkdir()
    write_plain(plain)
    rewrite(plain, out, *FOLDERS[kind])
    check(out, equal=False)


@pytest.mark.parametrize("quantization", ["int8", "fp8", "int4"])
def test_what_is_quantised_while_it_is_loaded(quantization: str, tmp_path: Path) -> None:
    write_plain(tmp_path)
    kernels = select_kernels(DEVICE, torch.bfloat16)
    made, full = (
        load_decoder(open_model(tmp_path), kernels, torch.bfloat16, DEVICE, quantization=one)
        for one in (quantization, "none")
    )
    assert made.nbytes < full.nbytes
    found, meant = all_logits(made, TOKENS), all_logits(full, TOKENS)
    assert (found - meant).norm() < 0.3 * meant.norm()
