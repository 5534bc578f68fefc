"""Several ranks on GPUs: the same bits as on one.

Two ranks share the one GPU there may be, which NCCL refuses: what they gather goes through the host
with gloo, and without graphs. NCCL and graphs with gathers in them are exercised by a group of one
rank; and by two, where there are two GPUs.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch._C import _distributed_c10d as c10d

from quire import LLM, SamplingParams
from quire.backends.select import pick_device, select_kernels
from quire.kernels.weights import Weight
from quire.models.decoder import Decoder
from quire.models.model_config import read_config
from quire.models.names import huggingface_pieces
from quire.parallel.division import Division
from quire.parallel.group import Group
from quire.parallel.kernels import DividedSource, parallel_kernels
from quire.tools.bench.random_checkpoint import write_tokenizer
from quire.tools.bench.shapes import CONFIGS
from tests.gpu.support import DEVICE, GpuEngine, Job, shape_of
from tests.parallel.ranks import whole_weights

pytestmark = pytest.mark.gpu

VOCABULARY = 8192
FEWER = {
    "num_hidden_layers": 3,
    "vocab_size": VOCABULARY,
    "num_experts": 16,
    "eos_token_id": VOCABULARY - 1,
}


def write_model(shape: str, folder: Path, **changes: Any) -> Path:
    config = CONFIGS[shape] | {
        name: value for name, value in FEWER.items() if name in CONFIGS[shape] or name[0] == "e"
    }
    (folder / "config.json").write_text(json.dumps(config | changes))
    spec = read_config(folder / "config.json")
    generator = torch.Generator().manual_seed(0)
    parameters = spec.parameters()
    weights = {}
    for piece in huggingface_pieces(spec, ()):
        size = piece.shape(parameters[piece.parameter])
        values = torch.randn(math.prod(size), generator=generator).view(size)
        values = 1 + 0.1 * values if "norm" in piece.name else values * (2.0 / size[-1] ** 0.5)
        weights[piece.name] = values.to(torch.bfloat16)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(VOCABULARY, folder)
    return folder


def answers(folder: Path, **options: Any) -> list[Any]:
    prompts = [
        [(7 * i + j) % VOCABULARY for i in range(length)]
        for j, length in enumerate((5, 40, 300, 900))
    ]
    params = [
        SamplingParams(max_tokens=40, temperature=j % 2, seed=j, logprobs=2 * j, ignore_eos=True)
        for j in range(4)
    ]
    with LLM(
        folder, dtype="bfloat16", kv_cache_memory="1GiB", max_model_len=2048, **options
    ) as llm:
        found: list[Any] = []
        for _ in range(3):  # graphs are captured on the way
            outputs = llm.generate(prompts, params)
            assert all(output.error is None for output in outputs), [
                output.error for output in outputs
            ]
            found.append([(output.token_ids, output.completions[0].logprobs) for output in outputs])
        (alone,) = llm.generate([prompts[0]], params[0])
        return [*found, alone.token_ids]


SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("qwen3-0.6b", {}),
    "experts": ("qwen3-30b-a3b", {}),
    "heads that do not come out even": (
        "qwen3-0.6b",
        {"num_attention_heads": 9, "num_key_value_heads": 3},
    ),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_two_ranks_on_one_gpu(shape: str, tmp_path: Path) -> None:
    name, changes = SHAPES[shape]
    folder = write_model(name, tmp_path, **changes)
    expected = answers(folder, device="cuda")
    assert len({tokens for tokens, _ in expected[0]}) == 4
    assert answers(folder, device="cuda:0", tensor_parallel_size=2) == expected


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU here")
@pytest.mark.parametrize("shape", SHAPES)
def test_two_gpus(shape: str, tmp_path: Path) -> None:
    name, changes = SHAPES[shape]
    folder = write_model(name, tmp_path, **changes)
    assert answers(folder, device="cuda", tensor_parallel_size=2) == answers(folder, device="cuda")


@pytest.mark.parametrize("shape", ["qwen3-0.6b", "qwen3-30b-a3b"])
def test_gathers_of_nccl_in_graphs(shape: str) -> None:
    """One rank, whose gathers go through NCCL, alone and within graphs."""
    spec = replace(shape_of(shape, 3), vocab_size=VOCABULARY)
    if shape == "qwen3-30b-a3b":
        spec = spec.with_layers(mlp=replace(spec.layers[0].mlp, num_experts=16))
    dtype = torch.bfloat16
    weights = {
        name: Weight.dense(one.tensor.to(DEVICE))
        for name, one in whole_weights(spec, dtype).items()
    }
    group = Group(c10d.HashStore(), 0, 1, pick_device("cuda:0"), False, 60.0)
    division = Division(spec, 0, 1)
    kernels = parallel_kernels(select_kernels(DEVICE, dtype), group, division)
    assert kernels.decode_lists(1, 1, 1, spec.head_shapes[0]), "no graphs"
    decoders = (
        Decoder(spec, select_kernels(DEVICE, dtype), dict(weights), dtype),
        Decoder(spec, kernels, DividedSource(dict(weights), division), dtype),
    )
    params = SamplingParams(max_tokens=60, temperature=0.5, seed=1, ignore_eos=True)
    jobs = [Job([(7 * i + j) % VOCABULARY for i in range(30)], params) for j in range(6)]
    plain, gathered = (
        GpuEngine(one, kv_cache_memory="256MiB", max_num_seqs=8).run(jobs) for one in decoders
    )
    assert group.num_gathers > 0
    assert gathered.errors == {}
    assert gathered.tokens == plain.tokens
