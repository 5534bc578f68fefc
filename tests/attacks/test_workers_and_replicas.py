"""What HTTP workers and engines might send, and settings of a server: refused, or harmless."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import msgspec
import numpy as np
import pytest

from quire.errors import EngineError, InvalidRequestError, QuireError
from quire.observe.block_names import pack_names
from quire.observe.prometheus import ServerMetrics
from quire.server.config import ServerConfig
from quire.server.link.engine_client import EngineClient
from quire.server.link.replicas.router import PrefixRouter

NOTHING = np.zeros(0, np.uint64)


@pytest.mark.parametrize(
    "fields",
    [
        {"replicas": 0}, {"replicas": -1}, {"replicas": 65}, {"port": -1}, {"port": 65536}, {"http_workers": 0},
        {"http_workers": 65}, {"max_queued_requests": 0}, {"max_connections": -5}, {"stall_seconds": 0},
        {"stall_seconds": float("nan")}, {"suspect_seconds": 0}, {"suspect_seconds": float("nan")}, {"hang_seconds": 1},
        {"start_seconds": -1}, {"request_seconds": 0}, {"stored_responses": -1}, {"stored_bytes": -1},
        {"log_level": "loud"}, {"log_format": "poem"}, {"api_keys": ("",)}, {"api_keys": ("ä",)},
        {"tls_key": "x"}, {"engine": {"no_such": 1}}, {"engine": {"max_num_seqs": 0}}, {"engine": {"block_size": -16}},
        {"engine": {"tensor_parallel_size": 0}}, {"engine": {"device": "toaster"}},
    ],
    ids=str,
)  # fmt: skip
def test_settings_of_a_server_that_are_wrong(fields: dict[str, Any]) -> None:
    with pytest.raises(QuireError):
        ServerConfig(**fields)


@pytest.mark.parametrize(
    "data",
    [
        b"", b"\x00", b"\xff" * 100, b"\xc1", b"\x81\xa4type", b"\xdd\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff",
        msgspec.msgpack.encode({"type": "no such"}), msgspec.msgpack.encode([1, 2]), msgspec.msgpack.encode("ready"),
        msgspec.msgpack.encode({"type": "ready"}),
        msgspec.msgpack.encode({"type": "updates", "appended_request_ids": 5}),
        b"\x91" * 10_000,
    ],
    ids=lambda data: repr(data[:12]),
)  # fmt: skip
def test_an_event_that_is_none_is_the_engine_s_fault(data: bytes) -> None:
    class Link:
        async def receive(self) -> bytes:
            return data

    async def run() -> None:
        client = EngineClient(ServerConfig(), ServerMetrics("m"), lambda: None)
        with pytest.raises(EngineError, match="can't be read"):
            await client._read(Link())  # type: ignore[arg-type]

    asyncio.run(run())


class TestRouter:
    def router(self) -> PrefixRouter:
        router = PrefixRouter(3)
        for number in range(3):
            router.join(number, 16, 10, 2)
        return router

    def test_blocks_that_are_told_twice_count_once(self) -> None:
        router = self.router()
        router.note_blocks(0, pack_names([1, 1, 2]), b"")
        router.note_blocks(0, pack_names([1, 2]), pack_names([9]))
        assert router.num_cached_blocks(0) == 2
        router.note_blocks(0, b"", pack_names([1, 1, 1]))
        assert router.num_cached_blocks(0) == 1

    @pytest.mark.parametrize("name", [0, 1, 2**52, 2**63, 2**64 - 1])
    def test_any_name_is_a_name(self, name: int) -> None:
        router = self.router()
        router.note_blocks(2, pack_names([name]), b"")
        assert router.leading(np.array([name], np.uint64), range(3)) == {0: 0, 1: 0, 2: 1}

    def test_more_blocks_than_an_engine_has(self) -> None:
        router = self.router()
        router.note_blocks(0, pack_names(list(range(1, 1000))), b"")
        assert {router.place(NOTHING, 5, 1).replica for _ in range(2)} == {1, 2}

    @pytest.mark.parametrize("num_tokens", [0, 1, 2**20, 2**31, 2**40])
    @pytest.mark.parametrize("num_answers", [1, 256, 2**20])
    def test_loads_beyond_all_measure(self, num_tokens: int, num_answers: int) -> None:
        router = self.router()
        placed = [router.place(NOTHING, num_tokens, num_answers) for _ in range(6)]
        assert sorted(one.replica for one in placed) == [0, 0, 1, 1, 2, 2]
        for one in placed:
            router.close(one)
        assert [router.load(number) for number in range(3)] == [0, 0, 0]

    def test_a_late_end_of_a_request_does_not_count_for_the_engine_s_next_life(self) -> None:
        router = self.router()
        old = router.place(np.array([5, 6], np.uint64), 40, 3, [1])
        router.leave(1)
        router.join(1, 16, 10, 2)
        new = router.place(np.array([5, 6], np.uint64), 40, 1, [1])
        router.answered(old)
        router.close(old)
        assert router.num_answers(1) == 1
        assert router.expected(1) == {5, 6}
        router.close(new)
        assert (router.load(1), router.expected(1)) == (0, set())

    @pytest.mark.parametrize("seed", range(5))
    def test_engines_that_come_and_go_a_thousand_times_leave_nothing(self, seed: int) -> None:
        source, router = random.Random(seed), self.router()
        for _ in range(1000):
            number = source.randrange(3)
            router.leave(number)
            router.join(number, 16, 10, 2)
            if source.random() < 0.3:
                router.note_blocks(number, pack_names([source.getrandbits(64)]), b"")
        for _ in range(4096):
            router.note_blocks(0, b"", pack_names([1]))
        left = sum(router.num_cached_blocks(number) for number in range(3))
        assert len(router._table) == left <= 3
        assert router._wanted.bit_count() == 3

    def test_no_candidate_is_no_choice(self) -> None:
        router = self.router()
        for number in range(3):
            router.leave(number)
        assert not router.has_open
        router.join(2, 16, 10, 2)
        assert router.place(NOTHING, 5, 1).replica == 2


def test_invalid_request_errors_name_their_field() -> None:
    with pytest.raises(InvalidRequestError, match="suspect_seconds: must be above 0"):
        ServerConfig(suspect_seconds=-1)
