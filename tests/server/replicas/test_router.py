"""The router against plain models of what it does: sets of blocks, chains of hashes, the least
work.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from quire.block_groups import BlockGroup
from quire.engine import EngineCore, Request, Scheduler, SchedulerConfig
from quire.engine.block_key import BlockKey
from quire.engine.block_manager import BlockManager
from quire.observe.block_names import BlockNamer, Names, pack_names, unpack_names
from quire.observe.cache_events import CacheEvents
from quire.sampling_params import SamplingParams
from quire.server.link.messages import pack_tokens
from quire.server.link.replicas import router as router_module
from quire.server.link.replicas.block_table import BlockTable, Depths
from quire.server.link.replicas.router import (
    ANSWER_TOKENS,
    HOME_TOKENS,
    QUEUED_TOKENS,
    Assignment,
    PrefixRouter,
)
from quire.tools.bench.server_costs.router_chat import chat_runs
from quire.tools.simulate.fake_runner import FakeRunner
from tests.long_runs import examples

ALL = (0, 1, 2)


def named(names: Sequence[int]) -> Names:
    return np.array(names, np.uint64)


def naive_leading(cached: set[int], names: Sequence[int]) -> int:
    """Block by block, from the first on."""
    return next((place for place, name in enumerate(names) if name not in cached), len(names))


NAMES = st.integers(0, 400).map(lambda number: number * 2**55 % (2**64 - 1) + number % 7)
"""Many in the same bucket, so that there is no room for all."""


def depths_of(found: Depths, members: Sequence[int]) -> dict[int, int]:
    return {one: next((depth for bits, depth in found if bits >> one & 1), 0) for one in members}


def bits_of(members: Iterable[int]) -> int:
    return sum(1 << one for one in set(members))


class TestBlockTable:
    @settings(max_examples=30)
    @given(
        st.lists(
            st.tuples(st.integers(0, 2), st.booleans(), st.sets(NAMES, max_size=60)), max_size=12
        ),
        st.sampled_from([3, 9, 64, 1000]),
    )
    def test_is_a_set_for_each_member(
        self, changes: list[tuple[int, bool, set[int]]], num_members: int
    ) -> None:
        table = BlockTable()
        assert [table.join() for _ in range(num_members)] == list(range(num_members))
        members = (0, 1, num_members - 1)
        wanted: list[set[int]] = [set(), set(), set()]
        for which, is_added, names in changes:
            (table.add if is_added else table.discard)(members[which], named(sorted(names)))
            wanted[which] = wanted[which] | names if is_added else wanted[which] - names
            assert [table.count(member) for member in members] == [len(one) for one in wanted]
        for name in {name for _, _, names in changes for name in names}:
            found = depths_of(table.leading(named([name]), bits_of(members)), members)
            assert [found[member] for member in members] == [int(name in one) for one in wanted]
            assert depths_of(table.in_row(named([name]), bits_of(members), [0]), members) == found
        table.leave(1)
        for _ in range(4096):
            table.add(0, named([]))
        assert len(table) == len(wanted[0] | wanted[2])

    @settings(max_examples=40)
    @given(
        st.lists(st.integers(0, 70), min_size=5, max_size=5), st.sets(st.integers(0, 4), min_size=1)
    )
    def test_how_much_of_a_prompt_each_has(self, depths: list[int], members: set[int]) -> None:
        table = BlockTable()
        names = named(range(2**40, 2**40 + 70))
        for depth in depths:
            table.add(table.join(), names[:depth])
        found = table.leading(names, bits_of(members))
        assert depths_of(found, sorted(members)) == {one: depths[one] for one in members}
        assert not any(bits & ~bits_of(members) for bits, _ in found)

    @settings(max_examples=examples(60))
    @given(
        st.lists(st.integers(0, 7), min_size=1, max_size=40),
        st.lists(st.integers(0, 3), min_size=40, max_size=40),
    )
    def test_enough_in_a_row(self, held: list[int], steps: list[int]) -> None:
        """Against looking at every place of every member's."""
        table, names = BlockTable(), named(range(1, len(held) + 1))
        for member in range(3):
            table.join()
            table.add(member, names[[bits >> member & 1 == 1 for bits in held]])
        first = [min(place, sum(steps[:place])) for place in range(len(held))]
        first = [max(0, place - 5) if steps[0] else one for place, one in enumerate(first)]
        wanted = {}
        for member in range(3):
            ends = [
                place + 1
                for place in range(len(held))
                if all(bits >> member & 1 for bits in held[first[place] : place + 1])
            ]
            wanted[member] = max(ends, default=0)
        assert depths_of(table.in_row(names, 7, first), range(3)) == wanted

    def test_who_left_is_removed_a_part_at_a_time_and_his_bit_used_again(self) -> None:
        table, source = BlockTable(), random.Random(1)
        names = named([source.getrandbits(64) for _ in range(3000)])
        table.add(table.join(), names)
        table.add(table.join(), names[:1000])
        table.leave(0)
        assert len(table) == 3000  # nobody had to wait for it
        assert table.join() == 2
        for _ in range(4096):
            table.discard(2, named([]))
        assert len(table) == 1000
        assert table.join() == 0
        assert table.count(0) == 0
        assert depths_of(table.leading(names[:1], 0b111), range(3)) == {0: 0, 1: 1, 2: 0}

    def test_work_is_bounded_however_many_different_depths_there_are(self) -> None:
        table, names = BlockTable(), named(range(1, 1001))
        for depth in range(1, 1001):
            table.add(table.join(), names[:depth])
        found = depths_of(table.leading(names, bits_of(range(1000))), range(1000))
        assert len(set(found.values())) < 800
        assert all(0 < found[member] <= member + 1 for member in range(1000))


class TestNames:
    @settings(max_examples=30)
    @given(
        st.lists(st.integers(0, 2**31 - 1), max_size=40),
        st.integers(1, 4),
        st.sampled_from([None, "", "salt", "ä\ud800"]),
    )
    def test_all_at_once_they_are_what_they_are_one_by_one(
        self, prompt: list[int], block_size: int, salt: str | None
    ) -> None:
        namer = BlockNamer(block_size)
        name, wanted = namer.start(() if salt is None else (salt,)), []
        for first in range(0, (len(prompt) - 1) // block_size * block_size, block_size):
            name = namer.following(name, prompt[first : first + block_size])
            wanted.append(name)
        assert namer.names(pack_tokens(prompt), salt).tolist() == wanted

    def test_no_two_are_alike(self) -> None:
        """Of prompts that differ in one token, in the order of their blocks, or in their salt."""
        namer, prompt = BlockNamer(2), [1, 2, 3, 4, 5, 6, 0]
        others = [
            [1, 2, 5, 6, 3, 4, 0],
            [2, 1, 3, 4, 5, 6, 0],
            [1, 2, 3, 4, 5, 2**17 + 6, 0],
            [1] * 7,
            [0] * 7,
        ]
        found = [namer.names(pack_tokens(one)).tolist() for one in (prompt, *others)]
        found += [namer.names(pack_tokens(prompt), salt).tolist() for salt in ("", "a")]
        lasts = [names[-1] for names in found]
        assert len(set(lasts)) == len(lasts)
        assert found[0][0] == found[1][0] != found[2][0]
        assert all(len(set(names)) == len(names) for names in found)


class RouterMachine(RuleBasedStateMachine):
    """A router and a model that looks at everything anew for every choice. There are three texts,
    of which prompts are beginnings.
    """

    def __init__(self) -> None:
        super().__init__()
        self.router = PrefixRouter(3)
        self.depths = [[0, 0, 0] for _ in ALL]
        """How much of each text each replica has cached."""
        self.open: list[tuple[Assignment, list[int], dict[str, int]]] = []
        """With their blocks, the tokens to compute and the answers."""
        for number in ALL:
            self.router.join(number, 4, 20, 2)

    def cached(self, replica: int) -> set[int]:
        return {
            name
            for text, depth in enumerate(self.depths[replica])
            for name in text_names(text, depth)
        }

    def expected(self, replica: int) -> set[int]:
        return {
            name
            for assignment, names, counts in self.open
            if assignment.replica == replica and counts["waiting"]
            for name in names[assignment.num_cached // 4 :]
        }

    def load(self, replica: int) -> int:
        mine = [counts for assignment, _, counts in self.open if assignment.replica == replica]
        answers = sum(counts["answers"] for counts in mine)
        waiting = sum(counts["waiting"] for counts in mine)
        return waiting + ANSWER_TOKENS * answers + QUEUED_TOKENS * max(0, answers - 2)

    @rule(replica=st.sampled_from(ALL), text=st.sampled_from(ALL), depth=st.integers(0, 9))
    def note(self, replica: int, text: int, depth: int) -> None:
        before = self.depths[replica][text]
        stored, removed = text_names(text, depth)[before:], text_names(text, before)[depth:]
        self.router.note_blocks(replica, pack_names(stored), pack_names(removed))
        self.depths[replica][text] = depth

    @rule(
        text=st.sampled_from(ALL),
        length=st.integers(0, 9),
        rest=st.integers(1, 4),
        answers=st.integers(1, 3),
        candidates=st.sets(st.sampled_from(ALL), min_size=1),
    )
    def place(self, text: int, length: int, rest: int, answers: int, candidates: set[int]) -> None:
        names = text_names(text, length)
        leading = {
            one: naive_leading(self.cached(one) | self.expected(one), names) for one in candidates
        }
        work = {}
        for number in candidates:
            new = length - leading[number] + 1  # and the block with the rest
            room = 20 - len(self.cached(number)) - len(self.expected(number))
            work[number] = (
                self.load(number) - 4 * leading[number] + 4 * min(new, max(0, new - room))
            )
        assignment = self.router.place(named(names), 4 * length + rest, answers, sorted(candidates))
        assert assignment.replica in candidates
        assert assignment.num_cached == 4 * leading[assignment.replica]
        # Nobody has less to do, but for what it is worth to go where the conversation was.
        assert work[assignment.replica] <= min(work.values()) + HOME_TOKENS
        counts = {"waiting": 4 * length + rest - assignment.num_cached, "answers": answers}
        self.open.append((assignment, names, counts))

    @rule(which=st.integers(0, 100))
    def computed(self, which: int) -> None:
        if self.open:
            assignment, _, counts = self.open[which % len(self.open)]
            self.router.computed(assignment)
            counts["waiting"] = 0

    @rule(which=st.integers(0, 100))
    def answered(self, which: int) -> None:
        if self.open:
            assignment, _, counts = self.open[which % len(self.open)]
            if counts["answers"] > 1:
                self.router.answered(assignment)
                counts["answers"] -= 1

    @rule(which=st.integers(0, 100))
    def close(self, which: int) -> None:
        if self.open:
            assignment, _, _ = self.open.pop(which % len(self.open))
            self.router.close(assignment)
            self.router.close(assignment)
            self.router.computed(assignment)

    @rule(replica=st.sampled_from(ALL))
    def lose(self, replica: int) -> None:
        self.router.leave(replica)
        lost = [one for one in self.open if one[0].replica == replica]
        self.open = [one for one in self.open if one[0].replica != replica]
        self.router.join(replica, 4, 20, 2)
        self.depths[replica] = [0, 0, 0]
        for assignment, _, _ in lost:  # late, when the replica is another one
            self.router.close(assignment)

    @invariant()
    def loads_agree(self) -> None:
        for number in ALL:
            assert self.router.load(number) == self.load(number)
            assert self.router.expected(number) == self.expected(number)
            assert self.router.num_cached_blocks(number) == len(self.cached(number))


def text_names(text: int, count: int) -> list[int]:
    return [100 * text + place + 1 for place in range(count)]


TestRouter = RouterMachine.TestCase
TestRouter.settings = settings(max_examples=25, stateful_step_count=25)


def new_router() -> PrefixRouter:
    router = PrefixRouter(3)
    for number in ALL:
        router.join(number, 16, 1000, 4)
    return router


class TestChoices:
    def test_idle_replicas_take_turns(self) -> None:
        router = new_router()
        chosen = []
        for _ in range(6):
            assignment = router.place(named([]), 10, 1, ALL)
            chosen.append(assignment.replica)
            router.close(assignment)
        assert chosen == [0, 1, 2, 0, 1, 2]

    def test_where_most_of_the_prompt_lies(self) -> None:
        router = new_router()
        router.note_blocks(1, pack_names([1, 2]), b"")
        router.note_blocks(2, pack_names([1, 2, 3, 9]), b"")
        assignment = router.place(named([1, 2, 3, 4]), 70, 1, ALL)
        assert (assignment.replica, assignment.num_cached, assignment.waiting_tokens) == (2, 48, 22)
        assert router.place(named([1, 2, 3, 4]), 70, 1, (0, 1)).replica == 1

    def test_unless_it_is_much_busier(self) -> None:
        router = new_router()
        router.note_blocks(1, pack_names(list(range(1, 101))), b"")
        prompt = named(range(1, 101))
        for _ in range(20):  # each adds an answer; from the fifth on they wait for a row
            router.place(prompt, 1601, 1, ALL)
        counts = [router.num_answers(number) for number in ALL]
        assert counts[1] > counts[0] > 0
        assert counts[1] > counts[2] > 0

    def test_a_prompt_that_is_being_computed_counts_as_cached_there(self) -> None:
        router = new_router()
        first = router.place(named(range(1, 9)), 130, 1, ALL)
        second = router.place(named(range(1, 9)), 135, 1, ALL)
        assert (second.replica, second.num_cached) == (first.replica, 128)
        for assignment in (first, second):
            router.close(assignment)
        assert not router.expected(first.replica)

    def test_a_conversation_stays_where_it_was_though_its_blocks_are_gone(self) -> None:
        router = new_router()
        for turn in range(1, 5):
            assignment = router.place(named(range(turn)), 16 * turn + 1, 1, ALL)
            router.close(assignment)
            assert assignment.replica == 0
            router.note_blocks(0, b"", pack_names(list(range(turn))))

    def test_a_full_cache_is_spared(self) -> None:
        """A little of the prompt lies there, but the rest would take the place of what others come
        back for.
        """
        router = new_router()
        router.note_blocks(1, pack_names(list(range(1000))), b"")
        assert router.place(named([0, 1, 2, *range(5000, 5010)]), 13 * 16 + 1, 1, ALL).replica != 1
        assert router.place(named([*range(12), 6000]), 13 * 16 + 1, 1, ALL).replica == 1

    def test_more_replicas_than_a_table_has(self) -> None:
        router = PrefixRouter(150)
        for number in range(150):
            router.join(number, 16, 100, 4)
        for number, depth in ((3, 2), (63, 40), (64, 30), (149, 50)):
            router.note_blocks(number, pack_names(range(1, depth + 1)), b"")
        names = named(range(1, 61))
        assert router.leading(names, (0, 3, 63, 64, 149)) == {0: 0, 3: 2, 63: 40, 64: 30, 149: 50}
        assert router.place(names, 1000, 1, range(150)).replica == 149
        router.leave(149)
        assert router.place(names, 1000, 1, range(150)).replica == 63
        assert [router.num_cached_blocks(number) for number in (63, 64, 149)] == [40, 30, 0]

    def test_of_more_prompts_than_it_remembers_the_later_ones_have_a_home(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Homes take no more memory, however many prompts there were."""
        monkeypatch.setattr(router_module, "_MOST_HOMES", 1)
        first, second = 5, 6
        router = new_router()
        home = router.place(named([first]), 20, 1, ALL)
        router.close(home)
        again = router.place(named([first, 7]), 40, 1, ALL)
        assert again.replica == home.replica
        router.close(again)
        other = router.place(named([second]), 20, 1, ALL)
        router.close(other)
        assert other.replica != home.replica
        moved = router.place(named([first, 8]), 40, 1, ALL)
        router.close(moved)
        assert moved.replica != home.replica
        router.close(router.place(named([second]), 20, 1, [other.replica]))
        assert router.place(named([second, 9]), 40, 1, ALL).replica == other.replica


def name_of(key: BlockKey) -> int:
    """From the first block of its chain on."""
    before = BlockNamer(4).start(key.extra_keys) if key.parent is None else name_of(key.parent)
    return BlockNamer(4).following(before, key.token_ids)


PROMPTS = [(text,) * 4 + tuple(range(20)) for text in range(2)] + [tuple(range(21))]
SALTS = ((), ("salt",))


def group_of(window: int) -> BlockGroup:
    return BlockGroup("window", window) if window else BlockGroup()


class CacheMachine(RuleBasedStateMachine):
    """Blocks come into the two tiers of a cache and go in any order, so there are holes; now and
    then the router is told. It finds of every prompt what an engine would.
    """

    @initialize(window=st.sampled_from([0, 0, 4, 9]))
    def begin(self, window: int) -> None:
        """With one, some blocks in a row are enough."""
        self.window = window
        config = SchedulerConfig(12, 3, 16, 64, 4, num_host_blocks=3, groups=(group_of(window),))
        self.blocks = BlockManager(config)
        self.events = CacheEvents(self.blocks)
        self.free = [block for block in self.blocks.pool.blocks if block.block_id]
        self.router = PrefixRouter(2)
        self.router.join(1, 4, 40, 2, window)
        self.keys: list[list[BlockKey]] = []
        for prompt in PROMPTS:
            for extra in SALTS:
                keys: list[BlockKey] = []
                self.blocks.cache.extend_keys(keys, list(prompt), 5, [extra])
                self.keys.append(keys)

    @rule(text=st.integers(0, 5), places=st.sets(st.integers(0, 4)))
    def store(self, text: int, places: set[int]) -> None:
        for place in sorted(places):
            if self.free and self.blocks.cache.publish(self.keys[text][place], self.free[-1]):
                self.free.pop()

    @rule(text=st.integers(0, 5), place=st.integers(0, 4))
    def store_on_host(self, text: int, place: int) -> None:
        self.blocks.host.store(self.keys[text][place])

    @rule(text=st.integers(0, 5), place=st.integers(0, 4))
    def remove(self, text: int, place: int) -> None:
        block = self.blocks.cache.find(self.keys[text][place])
        if block is not None:
            self.blocks.cache.remove(block)
            self.free.append(block)

    @rule(slot=st.integers(0, 2))
    def drop_from_host(self, slot: int) -> None:
        self.blocks.host.drop(slot)

    @rule()
    def tell(self) -> None:
        stored, removed = self.events.take()
        assert not set(unpack_names(stored).tolist()) & set(unpack_names(removed).tolist())
        self.router.note_blocks(1, stored, removed)
        caches = (self.blocks.cache, self.blocks.host)
        num_cached = set()
        for number, (prompt, extra) in enumerate(
            (prompt, extra) for prompt in PROMPTS for extra in SALTS
        ):
            names = BlockNamer(4).names(pack_tokens((*prompt, 0)), *extra)[:5]
            found = [
                any(cache.find(key) is not None for cache in caches) for key in self.keys[number]
            ]
            kept = [self.blocks.config.first_kept(0, 4 * count) for count in range(6)]
            wanted = max(count for count in range(6) if all(found[kept[count] : count]))
            if not self.window:
                found = [place < wanted for place in range(5)]
            assert self.router.leading(names, (0, 1)) == {0: 0, 1: wanted}
            num_cached |= set(names[found].tolist())
        assert self.router.num_cached_blocks(1) == len(num_cached)


TestCaches = CacheMachine.TestCase
TestCaches.settings = settings(max_examples=25, stateful_step_count=30)


@pytest.mark.parametrize(("num_host_blocks", "window"), [(0, 0), (6, 0), (0, 6)])
def test_engines_tell_what_they_have(num_host_blocks: int, window: int) -> None:
    """A small cache under much load: what the events add up to is what is in the cache and its host
    tier, and of a prompt the router finds what the engine does.
    """
    config = SchedulerConfig(
        num_blocks=12, max_num_seqs=3, max_batched_tokens=16, max_model_len=64, block_size=4,
        num_host_blocks=num_host_blocks, groups=(group_of(window),),
    )  # fmt: skip
    scheduler = Scheduler(config)
    events = CacheEvents(scheduler.blocks)
    core = EngineCore(scheduler, FakeRunner(config, 50))
    told: set[int] = set()
    num_removed = 0
    router = PrefixRouter(1)
    router.join(0, 4, 12, 3, window)
    for number in range(12):
        prompt = tuple(range(number % 4, number % 4 + 9 + number % 3))
        request = Request(f"r{number}", prompt, SamplingParams(max_tokens=7), seed=number)
        found = scheduler.blocks.prefixes.match(request).found
        assert router.leading(BlockNamer(4).names(pack_tokens(prompt)), [0]) == {0: len(found)}
        core.add_request(request, float(number))
        while core.has_work and (number % 3 == 2 or scheduler.table.waiting):
            core.step(float(number))
            changes = events.take()
            router.note_blocks(0, *changes)
            stored, removed = (set(unpack_names(one).tolist()) for one in changes)
            assert not stored & removed
            num_removed += len(removed)
            told = (told - removed) | stored
            keys = [block.key for block in scheduler.blocks.pool.blocks]
            cached = {
                key.digest: key for key in keys if key is not None and len(key.token_ids) == 4
            }
            cached |= {digest: key for digest, (key, _) in scheduler.blocks.host._slots.items()}
            assert told == {
                name_of(key) for key in cached.values() if window or is_found(key, cached)
            }
    assert told
    assert num_removed
    assert int(BlockNamer(4).names(pack_tokens((*prompt, 0)))[0]) in told


def test_of_a_long_conversation_a_window_is_enough() -> None:
    """All layers have one: what lies before it was given up and has gone to somebody else."""
    config = SchedulerConfig(12, 3, 32, 64, block_size=4, groups=(group_of(6),))
    scheduler = Scheduler(config)
    events = CacheEvents(scheduler.blocks)
    core = EngineCore(scheduler, FakeRunner(config, 50))
    router = PrefixRouter(2)
    router.join(1, 4, 12, 3, window=6)
    for name, first, count in (("long", 0, 28), ("other", 100, 12)):
        core.add_request(
            Request(name, tuple(range(first, first + count)), SamplingParams(max_tokens=5), seed=1),
            0.0,
        )
        while core.has_work:
            core.step(0.0)
        router.note_blocks(1, *events.take())
    request = Request("next", tuple(range(28)), SamplingParams(max_tokens=1), seed=1)
    found = scheduler.blocks.prefixes.match(request).found
    assert scheduler.blocks.cache.find(request.block_keys[0]) is None
    assert len(found) == 6
    names = BlockNamer(4).names(pack_tokens(tuple(range(28))))
    assert router.leading(names, (0, 1)) == {0: 0, 1: 6}
    assert router.place(names, 28, 1, (0, 1)).num_cached == 24


def is_found(key: BlockKey, cached: dict[bytes, BlockKey]) -> bool:
    """Whether those before it are there, too."""
    return key.digest in cached and (key.parent is None or is_found(key.parent, cached))


@pytest.mark.slow
def test_fifty_conversations_over_three_replicas() -> None:
    """In virtual time, with the real scheduler and cache: nearly what one engine finds in its
    cache, which has seen everything, and answers begin earlier than with round robin.
    """
    runs = chat_runs(conversations=50, turns=3)
    single, routed, in_turn = (runs[name] for name in ("one engine", "router", "round robin"))
    assert single.prompt_tokens == routed.prompt_tokens == in_turn.prompt_tokens
    assert routed.hit_rate >= 0.95 * single.hit_rate > 1.2 * in_turn.hit_rate
    assert routed.quantile(0.5) < in_turn.quantile(0.5)
    assert routed.quantile(0.95) < in_turn.quantile(0.95)
    assert sorted(routed.each)[1] > 0
