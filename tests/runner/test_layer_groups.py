"""Which layers share blocks, and what that saves."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from quire.block_groups import BlockGroup
from quire.config import EngineConfig
from quire.models.spec import ModelSpec
from quire.runner.kv_cache import KVCache, token_bytes
from quire.runner.layer_groups import LayerGroups
from quire.runner.memory import Needs, plan_cache
from quire.tools.bench.shapes import spec_of
from tests.random_models import SPECS


@pytest.mark.parametrize(
    ("shape", "size", "full", "windowed", "window"),
    [
        # 5 layers without a window and 29 with one: one place stays empty
        ("gemma-3-4b", 5, 1, 6, 1024),
        ("gpt-oss-20b", 12, 1, 1, 128),
        ("qwen3-0.6b", 28, 1, 0, 0),
    ],
)
def test_groups_of_true_shapes(
    shape: str, size: int, full: int, windowed: int, window: int
) -> None:
    spec = spec_of(shape)
    groups = LayerGroups.of(spec, 16, torch.bfloat16)
    assert max(map(len, groups.members)) == size
    assert groups.kept == (BlockGroup(),) * full + (BlockGroup("window", window),) * windowed
    assert groups.is_uniform
    assert groups.block_bytes == size * token_bytes(spec, 16, torch.bfloat16) // (
        size * (full + windowed)
    )
    assert sorted(layer for own in groups.members for layer in own) == list(range(spec.num_layers))
    for group, own in enumerate(groups.members):
        kinds = {spec.layers[layer].mixers[0].sliding_window is not None for layer in own}
        assert kinds == {group >= full}
    if windowed:
        assert LayerGroups.of(spec, 16, torch.bfloat16, 512).kept[-1].size == window + 511


def test_one_group_where_no_window_is_ever_left() -> None:
    spec = spec_of("gpt-oss-20b")
    assert len(LayerGroups.of(spec, 16, torch.bfloat16, longest=128).members) == 1
    assert len(LayerGroups.of(spec, 16, torch.bfloat16, longest=129).members) == 2
    everywhere = spec_of("qwen3-0.6b").with_attention(sliding_window=4096)
    groups = LayerGroups.of(everywhere, 16, torch.bfloat16)
    assert (groups.members, groups.kept) == ((tuple(range(28)),), (BlockGroup("window", 4096),))


def test_layers_of_a_group_have_memory_of_their_own() -> None:
    spec = replace(SPECS["gemma3_text"], layers=SPECS["gemma3_text"].layers * 2)
    groups = LayerGroups.of(spec, 16, torch.float32)
    cache = KVCache(spec, 5, 0, 16, torch.float32, torch.device("cpu"), groups=groups)
    assert [layer.group for layer in cache.layers] == [1, 0, 1, 0]
    addresses = [layer.keys.data_ptr() for layer in cache.layers]
    # whichever group a block is of
    assert addresses[0] == addresses[1] != addresses[2] == addresses[3]
    held = sum({layer.keys.data_ptr(): 2 * layer.keys.nbytes for layer in cache.layers}.values())
    assert held == 5 * token_bytes(spec, 16, torch.float32, groups) // 2


def planned(spec: ModelSpec, memory: str, length: int = 65_536) -> tuple[int, float]:
    """Tokens in all, and how many requests of a length run at once."""
    config = EngineConfig(
        device="cpu", max_model_len=length, kv_cache_memory=memory, max_num_seqs=64
    )
    groups, needs = LayerGroups.of(spec, 16, torch.bfloat16, 1, length), Needs(weights=0)
    plan = plan_cache(
        spec, config, config.limits(on_gpu=False), torch.bfloat16, 2**40, needs, groups
    )
    return plan.num_tokens, (plan.num_blocks - 1) / plan.blocks_at(length)


def test_windows_make_room_for_more_requests() -> None:
    spec = spec_of("gemma-3-4b")
    plain = replace(
        spec, layers=tuple(replace(one, mixer=spec.layers[5].mixer) for one in spec.layers)
    )
    tokens, at_once = planned(spec, "64GiB")
    all_tokens, all_at_once = planned(plain, "64GiB")
    assert 0.96 * all_tokens < tokens <= all_tokens  # an empty place in 35
    assert at_once > 6 * all_at_once
