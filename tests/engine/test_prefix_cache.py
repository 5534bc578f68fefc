"""Names of blocks: collisions, salts, and the host tier below the cache."""

from __future__ import annotations

import hashlib
import struct

import pytest

from quire.engine.block_manager import BlockManager
from quire.engine.host_tier import HostTier
from quire.engine.invariants import check_invariants
from quire.engine.prefix_cache import BlockKey, PrefixCache, same_prefix, sha256_digest
from tests.engine.harness import Harness, config


def colliding(parent: bytes, token_ids: tuple[int, ...], extra_keys: tuple[str, ...]) -> bytes:
    return b"always the same"


def test_digest_is_sha256_of_parent_and_little_endian_tokens() -> None:
    expected = hashlib.sha256(b"parent" + struct.pack("<3i", 1, 2, 2**31 - 1)).digest()
    assert sha256_digest(b"parent", (1, 2, 2**31 - 1), ()) == expected


def test_extra_keys_are_told_apart_whatever_they_hold() -> None:
    keys = [(), ("",), ("a",), ("ab",), ("a", "b"), ("", "ab"), ("\ud800",)]
    assert len({sha256_digest(b"", (1,), extra) for extra in keys}) == len(keys)


def test_a_cache_that_was_reset_knows_nothing() -> None:
    """Neither full blocks, nor partly filled ones, nor the host tier; and what comes after is
    cached again.
    """
    settings = config(num_blocks=12, num_host_blocks=8)
    engine = Harness(settings)
    # more than there are blocks: some go to the host
    for name, first in (("a", 0), ("b", 100), ("c", 200)):
        engine.add(name, range(first, first + 18), max_tokens=5)
        engine.run()
    blocks = engine.scheduler.blocks
    assert len(blocks.cache)
    assert len(blocks.host)
    blocks.reset()
    assert len(blocks.cache) == len(blocks.host) == 0
    assert blocks.pool.num_free == 11
    check_invariants(engine.scheduler)
    for name, expected in (("d", 0), ("e", 16)):
        (request,) = engine.add(name, range(200, 218), max_tokens=5)
        engine.run()
        assert request.cached_tokens + request.host_tokens == expected
    engine.check_answers()


@pytest.mark.parametrize("host_blocks", [0, 8])
def test_colliding_digests_never_share_blocks(host_blocks: int) -> None:
    settings = config(num_blocks=12, num_host_blocks=host_blocks)
    engine = Harness(settings, blocks=BlockManager(settings, cache=PrefixCache(4, colliding)))
    engine.add("a", range(12), max_tokens=5)
    engine.run()
    assert len(engine.scheduler.blocks.cache) == 1  # all its blocks have the same name
    engine.add("b", range(20, 32), max_tokens=5)
    engine.add("c", [*range(20, 24), *range(4, 12)], max_tokens=5)
    engine.add("d", range(12), max_tokens=5, cache_salt="other")
    engine.run()
    engine.check_answers()
    first = {a.request_id: a for step in reversed(engine.steps) for a in step.admitted}
    assert [first[name].num_cached_tokens + first[name].num_host_tokens for name in "bcd"] == [
        0,
        0,
        0,
    ]
    engine.add("again", range(12), max_tokens=5)
    engine.run()
    engine.check_answers()


def test_same_tokens_after_another_beginning_are_another_prefix() -> None:
    first = BlockKey(b"d", (1, 2), None, ())
    other = BlockKey(b"d", (3, 4), None, ())
    assert not same_prefix(BlockKey(b"e", (5, 6), first, ()), BlockKey(b"e", (5, 6), other, ()))
    assert not same_prefix(BlockKey(b"e", (5, 6), first, ()), BlockKey(b"e", (5, 6), None, ()))
    twin = BlockKey(b"d", (1, 2), None, ())
    assert same_prefix(BlockKey(b"e", (5, 6), first, ()), BlockKey(b"e", (5, 6), twin, ()))


def test_salts_keep_prefixes_apart_and_equal_salts_share() -> None:
    engine = Harness()
    for name, salt in (("plain", None), ("red", "red"), ("blue", "blue"), ("red again", "red")):
        engine.add(name, range(13), cache_salt=salt)
        engine.run()
    engine.check_answers()
    assert [request.cached_tokens for request in engine.requests.values()] == [0, 0, 0, 12]


def test_without_prefix_caching_nothing_is_shared_or_named() -> None:
    engine = Harness(config(prefix_caching=False))
    for name in ("a", "b"):
        engine.add(name, range(13))
        engine.run()
    engine.check_answers()
    assert engine.requests["b"].cached_tokens == 0
    assert len(engine.scheduler.blocks.cache) == 0


def test_least_recently_used_prefix_is_evicted_first_and_its_tail_before_its_head() -> None:
    engine = Harness(config(num_blocks=9, max_model_len=40))
    for name, start in (("old", 0), ("new", 20), ("old again", 0)):
        engine.add(name, range(start, start + 13), max_tokens=1)
        engine.run()
    assert engine.requests["old again"].cached_tokens == 12  # And now it is the most recently used.
    # Three blocks: two that hold nothing, and one of "new".
    engine.add("flood", range(100, 112), max_tokens=1)
    engine.run()
    for name, start in (("old third", 0), ("new again", 20)):
        engine.add(name, range(start, start + 13), max_tokens=1)
        engine.run()
    engine.check_answers()
    assert engine.requests["old third"].cached_tokens == 12
    # "old third" needed one more block: of "new" only the head is left.
    assert engine.requests["new again"].cached_tokens == 4


def test_blocks_evicted_from_the_device_come_back_from_the_host_and_are_shared_again() -> None:
    engine = Harness(config(num_blocks=9, num_host_blocks=16, max_model_len=40))
    engine.add("a", range(12), max_tokens=1)
    engine.run()
    engine.add("flood", range(100, 130), max_tokens=1)
    engine.run()
    engine.add("b", range(13), max_tokens=4)
    engine.add("c", range(13), max_tokens=4, seed=5)
    engine.run()
    engine.check_answers()
    assert (engine.requests["b"].host_tokens, engine.requests["b"].cached_tokens) == (12, 0)
    assert (engine.requests["c"].host_tokens, engine.requests["c"].cached_tokens) == (0, 12)


def test_host_tier_drops_the_least_recently_used_but_never_a_pinned_slot() -> None:
    tier = HostTier(2)
    a, b, c, d = (BlockKey(bytes([i]), (i,), None, ()) for i in range(4))
    assert (tier.store(a), tier.store(b)) == (0, 1)
    assert tier.store(a) is None  # Already there, and now the most recently used.
    tier.pinned.update([1])
    assert tier.store(c) == 0  # b is older, but pinned.
    tier.pinned.update([0])
    assert tier.store(d) is None
    tier.pinned.clear()
    assert tier.store(d) == 1
    assert [tier.find(key) is not None for key in (a, b, c, d)] == [False, False, True, True]
