"""Layers that keep different things share blocks of equal bytes; no number lies where another one
does.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from quire.block_groups import BlockGroup, StateSpec
from quire.config import EngineConfig
from quire.errors import CapacityError, UnsupportedModelError
from quire.kernels.layer_state import LayerState, StoredPart
from quire.models.config_parts import plain_attention
from quire.runner.kv_cache import KVCache
from quire.runner.layer_groups import (
    MOST_GROUPS,
    LayerGroups,
    group_layers,
    layer_bytes,
    part_bytes,
    state_places,
)
from quire.runner.memory import CachePlan, Needs, blocks_at, plan_cache
from quire.runner.request_rows import RequestRows
from quire.sampling_params import SamplingParams
from quire.step import AdmittedRequest, BlockCopy, Step
from tests.random_models import SPECS

CPU = torch.device("cpu")
BF16, FP32 = torch.bfloat16, torch.float32
BLOCK = 16


def keys_and_values(heads: int, head_dim: int, window: int = 0, num_heads: int = 8) -> LayerState:
    part = StoredPart(heads, (head_dim,), BF16)
    return LayerState((part, part), "window" if window else "all", window, num_heads)


def recurrent(chunk: int = 64, heads: int = 32, size: int = 128) -> LayerState:
    """As of gated delta rules: key, change and decay of each token since the chunk's begin, and a
    matrix per head.
    """
    records = (
        StoredPart(heads, (size,), FP32),
        StoredPart(heads, (size,), FP32),
        StoredPart(heads, (), FP32),
    )
    return LayerState(records, "records", chunk, heads, (StoredPart(heads, (size, size), FP32),))


GEMMA_4 = [
    keys_and_values(2, 512) if i % 6 == 5 else keys_and_values(4, 256, 1024) for i in range(30)
]
LATENT = [LayerState((StoredPart(1, (576,), BF16),), num_heads=16)] * 27
QWEN_35 = [keys_and_values(4, 256, num_heads=16) if i % 4 == 3 else recurrent() for i in range(32)]
LARGE: dict[str, list[LayerState | None]] = {
    "gemma 4": [*GEMMA_4],
    "latent": [*LATENT],
    "qwen 3.5": [*QWEN_35],
}

SMALL: list[LayerState | None] = [
    recurrent(16, 3, 4),
    keys_and_values(2, 8),
    None,
    keys_and_values(1, 24, 9),
    LayerState((StoredPart(1, (9,), BF16), StoredPart(3, (), torch.int8)), num_heads=4),
    LayerState(
        (StoredPart(3, (4,), FP32), StoredPart(3, (4,), FP32), StoredPart(3, (), FP32)),
        "records",
        16,
        3,
        (StoredPart(5, (3, 7), FP32), StoredPart(2, (5,), BF16), StoredPart(7, (), FP32)),
    ),
]
"""Odd sizes of every kind, and a place that keeps nothing."""


@pytest.mark.parametrize("name", LARGE)
def test_every_place_is_in_one_group_whose_layers_fit_a_block(name: str) -> None:
    states = LARGE[name]
    groups = group_layers(states, BLOCK)
    assert sorted(place for own in groups.members for place in own) == list(range(len(states)))
    assert len(groups.members) <= MOST_GROUPS
    for members, state, kept in zip(groups.members, groups.states, groups.kept, strict=True):
        assert {states[place] for place in members} == {state}
        assert len(members) * layer_bytes(state, BLOCK) <= groups.block_bytes
        assert kept == BlockGroup(state.keeps, state.size)
    held = sum(layer_bytes(state, BLOCK) for state in states if state is not None)
    assert groups.block_bytes * len(groups.members) < 1.3 * held


def test_two_head_sizes_that_take_as_many_bytes_share_blocks_without_waste() -> None:
    groups = group_layers(LARGE["gemma 4"], BLOCK)
    assert groups.block_bytes == 5 * 2 * 2 * 512 * 2 * BLOCK
    assert groups.kept == (BlockGroup(), *(BlockGroup("window", 1024),) * 5)
    assert [len(own) for own in groups.members] == [5] * 6
    assert not groups.is_uniform  # the same bytes, another shape
    assert groups.state is None


def test_a_latent_alone_is_one_group() -> None:
    groups = group_layers(LARGE["latent"], BLOCK)
    assert (groups.members, groups.kept) == ((tuple(range(27)),), (BlockGroup(),))
    assert groups.block_bytes == 27 * 576 * 2 * BLOCK
    assert groups.is_uniform


def test_a_state_has_as_many_blocks_as_its_heads_need() -> None:
    groups = group_layers(LARGE["qwen 3.5"], BLOCK)
    assert len(groups.carried) == 24
    per_block = groups.block_bytes // (128 * 128 * 4)
    assert groups.state == StateSpec(64, -(-24 * 32 // per_block), 4096)
    assert groups.kept[0] == BlockGroup()
    assert set(groups.kept[1:]) == {BlockGroup("records", 64)}
    taken = groups.state.num_blocks * groups.block_bytes
    assert 24 * 32 * 128 * 128 * 4 <= taken < 1.1 * 24 * 32 * 128 * 128 * 4


def test_recurrent_layers_with_different_chunks_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"\[32, 64\] tokens"):
        group_layers([recurrent(64), recurrent(32)], BLOCK)


def test_blocks_hold_at_least_one_head_of_a_state() -> None:
    groups = group_layers([recurrent(16, 1, 512)], 4)
    assert groups.block_bytes >= 512 * 512 * 4
    assert groups.state is not None
    assert groups.state.num_blocks == 1


@pytest.mark.parametrize("size", [5, 9])
def test_heads_of_a_state_are_aligned_in_every_block(size: int) -> None:
    """Blocks of 50 or 162 bytes could hold one head, but in every second one it would begin amid a
    word.
    """
    state = LayerState(
        (StoredPart(1, (1,), FP32),), "records", 4, 1, (StoredPart(3, (size, size), BF16),)
    )
    cache, groups = cache_of([state, keys_and_values(1, 3)], 3, 0)
    assert groups.block_bytes % 16 == 0
    views = [cache.state_head(0, head)[1] for head in range(3)]
    assert all(
        (view[block].data_ptr() - views[0][0].data_ptr()) % 16 == 0
        for view in views
        for block in range(3)
    )


@pytest.mark.parametrize("block_bytes", [512, 700, 1024, 100_000])
def test_heads_of_a_state_are_whole_and_apart(block_bytes: int) -> None:
    carried = (
        StoredPart(5, (3, 7), FP32),
        StoredPart(7, (), FP32),
        StoredPart(3, (8, 16), FP32),
        StoredPart(4, (5,), BF16),
    )
    places, used = state_places(carried, block_bytes)
    taken: list[tuple[int, int, int]] = []
    for part, own in zip(carried, places, strict=True):
        assert len(own) == part.heads
        taken += [(number, at, at + part.bytes_per_head) for number, at in own]
    assert all(end <= block_bytes and at % 16 == 0 for _, at, end in taken)
    for (number, _, end), (other, at, _) in itertools.pairwise(sorted(taken)):
        assert number < other or end <= at
    assert {number for number, _, _ in taken} == set(range(len(used)))


def cache_of(
    states: list[LayerState | None], num_blocks: int, num_host: int
) -> tuple[KVCache, LayerGroups]:
    """Its `layers`, which attention reads, need keys and values; `places` and states need nothing."""
    groups = group_layers(states, 4)
    spec = replace(SPECS["llama"], layers=())
    return KVCache(spec, num_blocks, num_host, 4, FP32, CPU, groups=groups), groups


def contents(cache: KVCache, groups: LayerGroups, kind: int) -> list[Tensor]:
    """What a block of one group holds, or (the last kinds) each of a state: [num_blocks, ...] per
    part.
    """
    if kind < len(groups.members):
        return [part for place in groups.members[kind] for part in cache.places[place]]
    heads = [
        (part, head) for part, stored in enumerate(groups.carried) for head in range(stored.heads)
    ]
    found = (cache.state_head(part, head) for part, head in heads)
    return [view for number, view in found if number == kind - len(groups.members)]


def num_kinds(groups: LayerGroups) -> int:
    assert groups.state is not None
    return len(groups.members) + groups.state.num_blocks


def written(views: list[Tensor], block: int, source: torch.Generator) -> list[Tensor]:
    """Fills one block with random numbers; returns them."""
    for view in views:
        view[block] = torch.randint(-99, 99, view[block].shape, generator=source).to(view.dtype)
    return [view[block].clone() for view in views]


@pytest.mark.parametrize("order", range(6))
def test_no_number_lies_where_another_one_does(order: int) -> None:
    """Each block holds another kind of content, all of them are written, and all is read back."""
    cache, groups = cache_of(SMALL, 12, 0)
    assert not groups.is_uniform
    kinds, source = num_kinds(groups), torch.Generator().manual_seed(order)
    views = [contents(cache, groups, kind) for kind in range(kinds)]
    kind_of = [(block + order) % kinds for block in range(12)]
    expected = {
        block: written(views[kind_of[block]], block, source)
        for block in torch.randperm(12).tolist()
    }
    for block, numbers in expected.items():
        for view, one in zip(views[kind_of[block]], numbers, strict=True):
            assert torch.equal(view[block], one)


def test_views_have_the_shapes_that_layers_keep() -> None:
    cache, groups = cache_of(SMALL, 3, 0)
    assert set(cache.places) == {0, 1, 3, 4, 5}
    for members, state in zip(groups.members, groups.states, strict=True):
        for place in members:
            shapes = [(view.shape, view.dtype) for view in cache.places[place]]
            assert shapes == [
                ((3, part.heads, 4, *part.shape), part.dtype) for part in state.per_token
            ]
    assert part_bytes(StoredPart(3, (), torch.int8), 3) == 12  # nine bytes, in whole words
    assert groups.state is not None
    seen = set()
    for part, stored in enumerate(groups.carried):
        for head in range(stored.heads):
            number, view = cache.state_head(part, head)
            assert (view.shape, view.dtype) == ((3, *stored.shape), stored.dtype)
            seen.add(number)
    assert seen == set(range(groups.state.num_blocks))


def test_a_block_of_any_kind_is_copied_bit_for_bit() -> None:
    cache, groups = cache_of(SMALL, 8, 3)
    source = torch.Generator().manual_seed(1)
    for kind in range(num_kinds(groups)):
        views = contents(cache, groups, kind)
        numbers = written(views, 2, source)
        written(views, 5, source)
        cache.copy_blocks([BlockCopy("device_to_host", 2, 1), BlockCopy("device_to_device", 2, 6)])
        written(views, 2, source)
        cache.copy_blocks([BlockCopy("host_to_device", 1, 5)])
        for view, one in zip(views, numbers, strict=True):
            assert torch.equal(view[5], one)
            assert torch.equal(view[6], one)


def test_a_requests_blocks_are_counted_with_its_states() -> None:
    groups = group_layers(LARGE["qwen 3.5"], BLOCK)
    assert groups.state is not None
    states, records = 2 * groups.state.num_blocks, len(groups.kept) - 1
    assert blocks_at(groups, 10, BLOCK) == states + 1 + records
    # of records, a chunk at most
    assert blocks_at(groups, 1000, BLOCK) == states + 63 + 4 * records
    gemma = group_layers(LARGE["gemma 4"], BLOCK)
    assert blocks_at(gemma, 100, BLOCK) == 6 * 7
    assert blocks_at(gemma, 16_000, BLOCK) == 1000 + 5 * 65


def planned(groups: LayerGroups, memory: str, length: int | None) -> CachePlan:
    config = EngineConfig(
        device="cpu", max_model_len=length, kv_cache_memory=memory, max_num_seqs=4
    )
    spec = replace(SPECS["llama"], max_position=262_144)
    return plan_cache(
        spec, config, config.limits(on_gpu=False), BF16, 2**40, Needs(weights=0), groups
    )


def test_a_plan_leaves_room_for_states() -> None:
    groups = group_layers(LARGE["qwen 3.5"], BLOCK)
    assert groups.state is not None
    count, states = len(groups.members), 2 * groups.state.num_blocks
    plan = planned(groups, "8GiB", 4096)
    assert plan.bytes_per_block == groups.block_bytes
    # the rest is for kept states
    assert plan.nbytes <= 8 * 2**30 < plan.nbytes + 2 * count * groups.block_bytes
    assert plan.num_blocks - 1 >= states + 256 * count
    assert "every request has two" in plan.describe()
    # Just enough for one request: a little less is refused.
    span = count * groups.block_bytes
    needed = span * (257 + -(-states // count))
    assert planned(groups, str(needed), 4096).max_model_len == 4096
    with pytest.raises(CapacityError, match=re.escape(f"and {states:,} blocks of its states")):
        planned(groups, str(needed - span), 4096)
    assert planned(groups, str(needed - span), None).max_model_len == 4096 - BLOCK


def test_an_admitted_request_brings_the_tables_of_its_states() -> None:
    rows = RequestRows(4, 64, 4, CPU, (None, None), num_state_blocks=3)

    def admit(
        row: int, blocks: tuple[int, ...], states: tuple[tuple[int, ...], ...]
    ) -> AdmittedRequest:
        return AdmittedRequest(
            request_id=str(row),
            row=row,
            token_ids=(1, 2, 3),
            num_prompt_tokens=3,
            num_cached_tokens=0,
            num_host_tokens=0,
            block_ids=blocks,
            params=SamplingParams(),
            seed=0,
            eos_token_ids=(),
            arrival=0.0,
            state_ids=states,
        )

    first = admit(2, (10, 11), ((1, 2, 3), (4, 5, 6)))
    second = admit(0, (12, 13), ((7, 8, 9), (14, 15, 16)))
    rows.apply(Step(step_id=0, now=0.0, scheduled=(), admitted=(first, second)))
    assert rows.state_tables[:, 2].tolist() == [[1, 2, 3], [4, 5, 6]]
    assert rows.state_tables[:, 0].tolist() == [[7, 8, 9], [14, 15, 16]]
    assert not rows.state_tables[:, [1, 3]].any()
    assert rows.block_tables[:, 2, 0].tolist() == [10, 11]
    rows.apply(
        Step(
            step_id=1, now=0.0, scheduled=(), admitted=(admit(2, (17, 18), ((20,) * 3, (21,) * 3)),)
        )
    )
    assert rows.state_tables[:, 2].tolist() == [[20] * 3, [21] * 3]
    assert rows.state_tables[:, 0].tolist() == [[7, 8, 9], [14, 15, 16]]


def test_places_of_a_models_layers_follow_its_spec() -> None:
    """Two head sizes: attention's caches are views of the same blocks, and each mixer has its
    group's heads.
    """
    layers = SPECS["llama"].layers
    spec = replace(
        SPECS["llama"], layers=(replace(layers[0], mixer=plain_attention(4, 2, 32)), layers[1]) * 2
    )
    groups = LayerGroups.of(spec, 8, FP32)
    cache = KVCache(spec, 5, 0, 8, FP32, CPU, groups=groups)
    assert [layer.keys.shape for layer in cache.layers] == [(5, 2, 8, 32), (5, 2, 8, 16)] * 2
    assert [groups.heads[layer.group].head_dim for layer in cache.layers] == [32, 16] * 2
    assert all(layer.keys.stride(0) * 4 == groups.block_bytes for layer in cache.layers)
