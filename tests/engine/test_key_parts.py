"""What a block's key says besides its tokens: who shares a block, and who must not."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.block_groups import BlockGroup, StateSpec
from quire.engine.block_key import BlockKey, KeyPart, same_prefix
from quire.engine.host_tier import HostTier
from quire.engine.prefix_cache import PrefixCache
from quire.engine.prefix_match import PrefixIndex
from quire.engine.request import Request, make_requests
from quire.sampling_params import SamplingParams
from tests.engine.harness import Harness, config

PROMPT = list(range(20))
TWO_GROUPS = (BlockGroup(), BlockGroup("window", 9))


def add(engine: Harness, name: str, parts: tuple[KeyPart, ...] = (), **params: Any) -> Request:
    """Runs a request with parts to its end, and checks its answer."""
    params = {"max_tokens": 2, **params}
    (request,) = make_requests(name, PROMPT, SamplingParams(**params), 0, key_parts=parts)
    engine.runner.key_parts[name] = parts
    engine.core.add_request(request, engine.now)
    engine.requests[name], engine.tokens[name] = request, []
    engine.run()
    engine.check_answers(name)
    return request


def test_blocks_are_shared_by_those_with_the_same_parts_only() -> None:
    engine = Harness()
    adapter, other = (KeyPart("adapter a"),), (KeyPart("adapter b"),)
    assert [add(engine, f"a{i}", adapter).cached_tokens for i in range(2)] == [0, 16]
    assert [add(engine, f"b{i}", other).cached_tokens for i in range(2)] == [0, 16]
    assert [add(engine, f"none{i}").cached_tokens for i in range(2)] == [0, 16]
    assert add(engine, "both", adapter + other).cached_tokens == 0


@pytest.mark.parametrize("groups", [(BlockGroup(),), TWO_GROUPS])
def test_blocks_before_a_part_are_shared_with_everybody(groups: tuple[BlockGroup, ...]) -> None:
    """An image in the third block: the two before it are those of a prompt without one, and of one
    with another.
    """
    engine = Harness(config(num_blocks=99, groups=groups))
    add(engine, "plain", max_tokens=1)
    assert add(engine, "image", (KeyPart("image 1", 9, 11),)).cached_tokens == 8
    assert add(engine, "same", (KeyPart("image 1", 9, 11),)).cached_tokens == 16
    assert add(engine, "another", (KeyPart("image 2", 9, 11),)).cached_tokens == 8
    assert add(engine, "plain again").cached_tokens == 16


def test_the_same_part_at_another_place_in_a_block_is_another_block() -> None:
    engine = Harness()
    add(engine, "a", (KeyPart("image", 5, 7),))
    assert add(engine, "shifted", (KeyPart("image", 6, 8),)).cached_tokens == 4
    assert add(engine, "longer", (KeyPart("image", 5, 8),)).cached_tokens == 4
    assert add(engine, "next block", (KeyPart("image", 9, 11),)).cached_tokens == 4
    assert add(engine, "same", (KeyPart("image", 5, 7),)).cached_tokens == 16


def test_a_part_without_an_end_lies_on_the_answer_too() -> None:
    engine = Harness()
    first = add(engine, "a", (KeyPart("adapter", 18),), max_tokens=20)
    engine.add("b", first.token_ids, max_tokens=1)
    engine.run()
    assert engine.requests["b"].cached_tokens == 16


@pytest.mark.parametrize("salt", ["group 1", "group 0", "state 0", "0", "0:4"])
def test_no_salt_passes_for_another_groups_block(salt: str) -> None:
    """Before, a salt "group 1" gave group 0 the keys that group 1 has without a salt."""
    state = StateSpec(chunk=4, num_blocks=1, interval=4)
    engine = Harness(
        config(num_blocks=99, groups=(*TWO_GROUPS, BlockGroup("records", 4)), state=state)
    )
    plain, salted = add(engine, "plain"), add(engine, "salted", cache_salt=salt)
    assert (plain.cached_tokens, salted.cached_tokens) == (0, 0)
    assert add(engine, "salted again", cache_salt=salt).cached_tokens == 16
    keys = [
        key
        for own in (None, salt)
        for key in keys_of((PROMPT[:6], [], own, BlockGroup("window", 9)))
    ]
    assert len({key.digest for key in keys}) == len(keys) == 2 * 3 * 2


def test_a_block_of_a_state_is_found_by_no_block_of_tokens() -> None:
    cache = PrefixCache(4)
    parent = cache.key(None, (1, 2, 3, 4), ())
    state, tokens = (
        cache.key(parent, (), ("state 0",)),
        cache.key(parent, (5, 6, 7, 8), ("state 0",)),
    )
    assert not same_prefix(state, tokens)
    assert not cache.is_partial(state)


PARTS = st.builds(
    KeyPart,
    name=st.sampled_from(["x", "y", "group 1", "0:2"]),
    start=st.integers(0, 5),
    end=st.one_of(st.none(), st.integers(0, 8)),
)
WHAT = st.tuples(
    st.lists(st.integers(0, 1), min_size=6, max_size=6),
    st.lists(PARTS, max_size=2),
    st.sampled_from([None, "", "x", "group 1", "group 0", "0"]),
    st.sampled_from([BlockGroup(), BlockGroup("window", 3)]),
)
Content = tuple[list[int], list[KeyPart], str | None, BlockGroup]


def keys_of(what: Content) -> list[BlockKey]:
    """Of three blocks of two tokens, in two groups."""
    tokens, parts, salt, group = what
    (request,) = make_requests(
        "a", tokens, SamplingParams(cache_salt=salt), 0, key_parts=tuple(parts)
    )
    index = PrefixIndex(
        config(block_size=2, groups=(BlockGroup(), group)), PrefixCache(2), HostTier(0), None
    )
    index.extend_keys(request, 3)
    return request.block_keys


def covered_by(part: KeyPart, first: int) -> list[int]:
    """Those of a block's two tokens on which a part lies."""
    return [
        at for at in (first, first + 1) if part.start <= at and (part.end is None or at < part.end)
    ]


def prefix_of(what: Content, num_blocks: int) -> tuple[object, ...]:
    """What a group's block stands for: tokens, salt, and for each block the parts on it and where
    they lie.
    """
    tokens, parts, salt, _ = what
    on_blocks = [
        [
            (one.name, covered[0], len(covered))
            for one in parts
            if (covered := covered_by(one, first))
        ]
        for first in range(0, num_blocks * 2, 2)
    ]
    return tokens[: num_blocks * 2], salt, on_blocks


@settings(max_examples=150, deadline=None)
@given(WHAT, WHAT)
def test_keys_are_equal_if_and_only_if_all_that_a_block_depends_on_is(
    one: Content, two: Content
) -> None:
    keys, others = keys_of(one), keys_of(two)
    for place, key in enumerate(keys):
        for other_place, other in enumerate(others):
            alike = prefix_of(one, place // 2 + 1) == prefix_of(two, other_place // 2 + 1)
            is_same = alike and place % 2 == other_place % 2
            assert same_prefix(key, other) == is_same
            assert (key.digest == other.digest) == is_same
