"""The memory of keys and values: what it takes, and that copies carry all of it."""

from __future__ import annotations

import pytest
import torch

from quire.backends.select import device_of
from quire.errors import DeviceError
from quire.runner.dtypes import pick_cache_dtype
from quire.runner.kv_cache import KVCache, token_bytes
from quire.step import BlockCopy
from tests.random_models import SPECS

CPU = torch.device("cpu")


@pytest.mark.parametrize("by_dimension", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_a_block_takes_what_the_plan_says_and_comes_back_from_the_host(
    dtype: torch.dtype, by_dimension: bool
) -> None:
    spec, blocks = SPECS["qwen3"], 5
    cache = KVCache(spec, blocks, 2, 8, dtype, CPU, by_dimension)
    assert all(layer.keys_by_dimension == by_dimension for layer in cache.layers)
    parts = [
        [part for part in (c.keys, c.values, *c.scales) if part is not None] for c in cache.layers
    ]
    assert sum(part.nbytes for layer in parts for part in layer) == blocks * token_bytes(
        spec, 8, dtype
    )
    for part in (part for layer in parts for part in layer):
        part.copy_(torch.randint(-100, 100, part.shape))
    kept = [part[2].clone() for layer in parts for part in layer]
    cache.copy_blocks([BlockCopy("device_to_host", 2, 1), BlockCopy("device_to_device", 3, 2)])
    cache.copy_blocks([BlockCopy("host_to_device", 1, 4)])
    for layer in parts:
        for part in layer:
            assert torch.equal(part[4], kept.pop(0))
            assert torch.equal(part[2], part[3])


def test_int8_is_for_the_cpu() -> None:
    assert pick_cache_dtype("int8", torch.float32, device_of(CPU)) == torch.int8
    gpu = device_of(torch.device("cuda"))
    assert pick_cache_dtype("auto", torch.bfloat16, gpu) == torch.bfloat16
    with pytest.raises(DeviceError, match="Use fp8 or auto on a GPU"):
        pick_cache_dtype("int8", torch.bfloat16, gpu)
