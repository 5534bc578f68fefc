"""The router against plain models of what it does: sets of blocks, chains of hashes, the least work."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from bench.router import chat_runs
from quire.engine import EngineCore, Request, Scheduler, SchedulerConfig
from quire.engine.block_key import sha256_digest
from quire.observe.cache_events import NAME_BYTES, CacheEvents
from quire.sampling_params import SamplingParams
from quire.server.replicas.block_names import CHUNK_BLOCKS, BlockNamer, NameSet, read_names
from quire.server.replicas.router import ANSWER_TOKENS, HOME_TOKENS, QUEUED_TOKENS, Assignment, PrefixRouter
from quire.simulate.fake_runner import FakeRunner

ALL = (0, 1, 2)


def packed(names: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(names)}Q", *names)


class TestNameSet:
    @given(st.lists(st.tuples(st.booleans(), st.integers(0, 300).map(lambda n: n * 2**56 % (2**64 - 1) + n % 7))))
    def test_is_a_set(self, changes: list[tuple[bool, int]]) -> None:
        """Names that collide much: most of them differ only where a small table does not look."""
        names, wanted = NameSet(), set[int]()
        for is_added, name in changes:
            (names.add if is_added else names.discard)(name)
            (wanted.add if is_added else wanted.discard)(name)
            assert len(names) == len({name or 1 for name in wanted})
        for _, name in changes:
            assert (name in names) == ((name or 1) in {one or 1 for one in wanted})

    def test_grows_and_empties(self) -> None:
        names = NameSet(expected=10)
        values = [n * 0x9E3779B97F4A7C15 % 2**64 for n in range(1, 1001)]
        for name in values:
            names.add(name)
            names.add(name)
        assert len(names) == 1000
        assert all(name in names for name in values)
        for name in values[::2]:
            names.discard(name)
            names.discard(name)
        assert [name in names for name in values] == [False, True] * 500
        assert len(names) == 500


class TestNames:
    @settings(max_examples=30)
    @given(
        st.lists(st.integers(0, 2**31 - 1), max_size=40),
        st.integers(1, 4),
        st.sampled_from([None, "", "salt", "ä\ud800"]),
        st.integers(0, 2 * CHUNK_BLOCKS),
    )
    def test_they_are_the_engines(self, tail: list[int], block_size: int, salt: str | None, num_shared: int) -> None:
        namer = BlockNamer(block_size)
        prompts = [list(range(num_shared)), list(range(num_shared)) + tail, tail, list(range(num_shared)) + tail]
        for prompt in prompts:
            digest, wanted = b"", []
            extra = () if salt is None else (salt,)
            for first in range(0, (len(prompt) - 1) // block_size * block_size, block_size):
                digest = sha256_digest(digest, tuple(prompt[first : first + block_size]), extra)
                extra = ()
                wanted.append(int.from_bytes(digest[:NAME_BYTES], "little"))
            assert namer.names(prompt, salt) == wanted

    def test_memory_is_bounded(self) -> None:
        namer = BlockNamer(1, most_chunks=3)
        prompts = [[prompt] * 100 for prompt in range(5)]
        wanted = [BlockNamer(1).names(prompt) for prompt in prompts]
        for _ in range(2):
            assert [namer.names(prompt) for prompt in prompts] == wanted
        assert len(namer._seen) == 3


class RouterMachine(RuleBasedStateMachine):
    """A router and a model that looks at everything anew for every choice."""

    def __init__(self) -> None:
        super().__init__()
        self.router = PrefixRouter(3)
        self.cached: list[set[int]] = [set(), set(), set()]
        self.open: list[tuple[Assignment, list[int], dict[str, int]]] = []
        """With the blocks that were read, the tokens to compute and the answers."""
        for number in ALL:
            self.router.join(number, 4, 20, 2)

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

    @rule(replica=st.sampled_from(ALL), stored=st.sets(st.integers(1, 30)), removed=st.sets(st.integers(1, 30)))
    def note(self, replica: int, stored: set[int], removed: set[int]) -> None:
        removed -= stored
        self.router.note_blocks(replica, packed(sorted(stored)), packed(sorted(removed)))
        self.cached[replica] = (self.cached[replica] - removed) | stored

    @rule(
        start=st.integers(1, 25),
        length=st.integers(0, 5),
        rest=st.integers(1, 4),
        answers=st.integers(1, 3),
        candidates=st.sets(st.sampled_from(ALL), min_size=1),
    )
    def place(self, start: int, length: int, rest: int, answers: int, candidates: set[int]) -> None:
        names = list(range(start, start + length))
        leading = {}
        for number in candidates:
            here = self.cached[number] | self.expected(number)
            leading[number] = next((place for place, name in enumerate(names) if name not in here), length)
        work = {}
        for number in candidates:
            new = length - leading[number] + 1  # and the block with the rest
            room = 20 - len(self.cached[number]) - len(self.expected(number))
            work[number] = self.load(number) - 4 * leading[number] + 4 * min(new, max(0, new - room))
        # Chunks of one block: the router stops reading after the first that nobody has.
        chunks = [names[place : place + 1] for place in range(length)]
        assignment = self.router.place(iter(chunks), 4 * length + rest, answers, sorted(candidates))
        read = names[: min(length, max(leading.values()) + 1)]
        assert assignment.replica in candidates
        assert assignment.num_cached == 4 * leading[assignment.replica]
        # Nobody has less to do, but for what it is worth to go where the conversation was.
        assert work[assignment.replica] <= min(work.values()) + HOME_TOKENS
        counts = {"waiting": 4 * length + rest - assignment.num_cached, "answers": answers}
        self.open.append((assignment, read, counts))

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
        self.cached[replica] = set()
        for assignment, _, _ in lost:  # late, when the replica is another one
            self.router.close(assignment)

    @invariant()
    def loads_agree(self) -> None:
        for number in ALL:
            assert self.router.load(number) == self.load(number)
            assert set(self.router._replicas[number].expected) == self.expected(number)
            assert self.router.num_cached_blocks(number) == len(self.cached[number])


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
            assignment = router.place([], 10, 1, ALL)
            chosen.append(assignment.replica)
            router.close(assignment)
        assert chosen == [0, 1, 2, 0, 1, 2]

    def test_where_most_of_the_prompt_lies(self) -> None:
        router = new_router()
        router.note_blocks(1, packed([1, 2]), b"")
        router.note_blocks(2, packed([1, 2, 3, 9]), b"")
        assignment = router.place([[1, 2, 3, 4]], 70, 1, ALL)
        assert (assignment.replica, assignment.num_cached, assignment.waiting_tokens) == (2, 48, 22)
        assert router.place([[1, 2, 3, 4]], 70, 1, (0, 1)).replica == 1

    def test_unless_it_is_much_busier(self) -> None:
        router = new_router()
        router.note_blocks(1, packed(list(range(1, 101))), b"")
        prompt = [list(range(1, 101))]
        for _ in range(20):  # each adds an answer; from the fifth on they wait for a row
            router.place(prompt, 1601, 1, ALL)
        counts = [router._replicas[number].num_answers for number in ALL]
        assert counts[1] > counts[0] > 0
        assert counts[1] > counts[2] > 0

    def test_a_prompt_that_is_being_computed_counts_as_cached_there(self) -> None:
        router = new_router()
        first = router.place([[1, 2, 3, 4, 5, 6, 7, 8]], 130, 1, ALL)
        second = router.place([[1, 2, 3, 4, 5, 6, 7, 8]], 135, 1, ALL)
        assert (second.replica, second.num_cached) == (first.replica, 128)
        for assignment in (first, second):
            router.close(assignment)
        assert not router._replicas[first.replica].expected

    def test_a_conversation_stays_where_it_was_though_its_blocks_are_gone(self) -> None:
        router = new_router()
        for turn in range(1, 5):
            assignment = router.place([list(range(turn))], 16 * turn + 1, 1, ALL)
            router.close(assignment)
            assert assignment.replica == 0
            router.note_blocks(0, b"", packed(list(range(turn))))

    def test_a_full_cache_is_spared(self) -> None:
        """A little of the prompt lies there, but the rest would take the place of what others come back for."""
        router = new_router()
        router.note_blocks(1, packed(list(range(1000))), b"")
        assert router.place([[0, 1, 2, *range(5000, 5010)]], 13 * 16 + 1, 1, ALL).replica != 1
        assert router.place([[*range(12), 6000]], 13 * 16 + 1, 1, ALL).replica == 1

    @given(st.lists(st.integers(0, 40), min_size=3, max_size=3), st.integers(1, 3))
    def test_any_number_of_chunks(self, depths: list[int], size: int) -> None:
        """Replicas that have different parts of one prompt from its start, read in chunks of any size."""
        router = new_router()
        names = list(range(100, 140))
        for number, depth in enumerate(depths):
            router.note_blocks(number, packed(names[:depth]), b"")
        chunks = [names[first : first + 5 * size] for first in range(0, 40, 5 * size)]
        found, leading = router._walk(iter(chunks), ALL)
        assert [leading[number] for number in ALL] == depths
        assert found == names[: min(40, (max(depths) // (5 * size) + 1) * 5 * size)]

    def test_homes_are_bounded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("quire.server.replicas.router._MOST_HOMES", 10)
        router = new_router()
        for name in range(50):
            router.close(router.place([[name]], 20, 1, ALL))
        assert list(router._homes) == list(range(40, 50))


@pytest.mark.parametrize("num_host_blocks", [0, 6])
def test_engines_tell_what_they_have(num_host_blocks: int) -> None:
    """A small cache under much load: what the events add up to is what is in the cache and its host tier."""
    config = SchedulerConfig(
        num_blocks=12, max_num_seqs=3, max_batched_tokens=16, max_model_len=64, block_size=4,
        num_host_blocks=num_host_blocks,
    )  # fmt: skip
    scheduler = Scheduler(config)
    events = CacheEvents(scheduler.blocks)
    core = EngineCore(scheduler, FakeRunner(config, 50))
    told: set[int] = set()
    num_removed = 0
    for number in range(12):
        prompt = tuple(range(number % 4, number % 4 + 9 + number % 3))
        core.add_request(Request(f"r{number}", prompt, SamplingParams(max_tokens=7), seed=number), float(number))
        while core.has_work and (number % 3 == 2 or scheduler.table.waiting):
            core.step(float(number))
            stored, removed = (set(read_names(one)) for one in events.take())
            assert not stored & removed
            num_removed += len(removed)
            told = (told - removed) | stored
            cached = {
                digest
                for digest, block in scheduler.blocks.cache.items()
                if not scheduler.blocks.cache.is_partial(block.key)
            }
            cached |= {digest for digest, _, _ in scheduler.blocks.host.items()}
            assert told == {int.from_bytes(digest[:NAME_BYTES], "little") for digest in cached}
    assert told
    assert num_removed
    names = BlockNamer(4).names((*prompt, 0))
    assert names[0] in told


def test_fifty_conversations_over_three_replicas() -> None:
    """In virtual time, with the real scheduler and cache: nearly what one engine finds in its cache, which has seen
    everything, and answers begin earlier than with round robin."""
    runs = chat_runs(conversations=50, turns=3)
    single, routed, in_turn = (runs[name] for name in ("one engine", "router", "round robin"))
    assert single.prompt_tokens == routed.prompt_tokens == in_turn.prompt_tokens
    assert routed.hit_rate >= 0.95 * single.hit_rate > 1.2 * in_turn.hit_rate
    assert routed.quantile(0.5) < in_turn.quantile(0.5)
    assert routed.quantile(0.95) < in_turn.quantile(0.95)
    assert sorted(routed.each)[1] > 0
