"""Block pool, prefix cache and host tier against the naive model, after every rule of a random
play.
"""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from quire.engine.block_key import BlockKey
from quire.engine.block_manager import BlockManager
from quire.engine.config import SchedulerConfig
from quire.engine.invariants import check_blocks
from quire.engine.request import Request
from quire.sampling_params import SamplingParams
from tests.engine.naive_blocks import NaiveBlocks, Prefix
from tests.long_runs import short_or_long

TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=14)


class BlockMachine(RuleBasedStateMachine):
    """Requests come and go; each keeps its table, and the naive model keeps what it should be."""

    def __init__(self) -> None:
        super().__init__()
        self.holders: list[tuple[Request, list[int]]] = []
        self.count = 0

    @initialize(
        size=st.integers(1, 3),
        num_blocks=st.integers(2, 12),
        num_host=st.sampled_from([0, 0, 1, 2, 5]),
    )
    def start(self, size: int, num_blocks: int, num_host: int) -> None:
        config = SchedulerConfig(num_blocks, 1, 1, 1000, size, num_host_blocks=num_host)
        self.blocks = BlockManager(config)
        self.model = NaiveBlocks(num_blocks, size, num_host)

    def pick(self, data: st.DataObject) -> tuple[Request, list[int]]:
        return self.holders[data.draw(st.integers(0, len(self.holders) - 1), label="holder")]

    @rule(tokens=TOKENS, salt=st.sampled_from(["", "a"]), more=st.integers(0, 3))
    def admit(self, tokens: list[int], salt: str, more: int) -> None:
        self.count += 1
        request = Request(f"r{self.count}", tuple(tokens), SamplingParams(cache_salt=salt), seed=0)
        expected = self.model.place(salt, tokens, len(tokens) + more)
        placement = self.blocks.place(request, len(tokens) + more)
        assert (placement is None) == (expected is None)
        copies = [
            (copy.source, copy.target)
            for copy in self.blocks.take_copies()
            if copy.kind == "device_to_device"
        ]
        if placement is None or expected is None:
            assert not copies
            return
        table, partial = expected
        computed = placement.num_device_tokens + placement.num_host_tokens
        num_full, num_rest = divmod(computed, self.blocks.block_size)
        assert computed < len(tokens)
        assert num_rest == (0 if partial is None else partial[1])
        assert copies == ([] if partial is None else [(partial[0], table[num_full])])
        assert placement.num_ready_blocks == self.blocks.config.blocks_for(computed)
        request.num_computed_tokens = request.num_committed_tokens = computed
        self.holders.append((request, table))

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), token=st.integers(0, 1))
    def append(self, data: st.DataObject, token: int) -> None:
        request, table = self.pick(data)
        if len(request.token_ids) == len(table) * self.blocks.block_size:
            expected = self.model.grow()
            block = self.blocks.grow(request)
            assert (block is None) == (expected is None)
            if expected is None:
                return
            table.append(expected)
        request.token_ids.append(token)

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), count=st.integers(1, 8))
    def commit(self, data: st.DataObject, count: int) -> None:
        request, table = self.pick(data)
        request.num_computed_tokens = min(
            len(request.token_ids), request.num_computed_tokens + count
        )
        request.num_committed_tokens = request.num_computed_tokens
        salt, first = request.params.cache_salt or "", request.num_published_blocks
        self.blocks.publish(request)
        self.model.publish(salt, request.token_ids, table, first, request.num_computed_tokens)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def publish_partial(self, data: st.DataObject) -> None:
        request, table = self.pick(data)
        self.blocks.publish_partial(request)
        salt = request.params.cache_salt or ""
        self.model.publish_partial(salt, request.token_ids, table, request.num_committed_tokens)

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), swap=st.booleans())
    def release(self, data: st.DataObject, swap: bool) -> None:
        request, table = self.pick(data)
        if swap:
            self.model.demote(table)
            saved = self.blocks.demote(request)
            names = self.model.names
            is_full = [block in names and self.model.is_full(names[block]) for block in table]
            assert saved == (self.model.num_host > 0 and any(is_full))
        self.blocks.release(request)
        self.model.release(table)
        self.holders = [holder for holder in self.holders if holder[0] is not request]

    @invariant()
    def everything_agrees(self) -> None:
        if not hasattr(self, "blocks"):
            return
        check_blocks(self.blocks, [request for request, _ in self.holders])
        for request, table in self.holders:
            assert [block.block_id for block in request.block_table] == table
        pool, model = self.blocks.pool, self.model
        assert [block.block_id for block in pool.free] == model.free
        assert {
            block.block_id: self.spell(block.key) for block in self.blocks.cache._blocks.values()
        } == model.names
        assert [self.spell(key) for key, _ in self.blocks.host._slots.values()] == model.host

    @staticmethod
    def spell(key: BlockKey | None) -> Prefix:
        """The whole prefix a key stands for."""
        tokens: tuple[int, ...] = ()
        salt = ""
        while key is not None:
            tokens = key.token_ids + tokens
            salt = "".join(key.extra_keys)
            key = key.parent
        return salt, tokens


@pytest.mark.soak
def test_blocks_do_what_the_naive_model_does() -> None:
    examples = short_or_long(250, 1000, quick=40)
    run_state_machine_as_test(
        BlockMachine,
        settings=settings(deadline=None, max_examples=examples, stateful_step_count=40),
    )
