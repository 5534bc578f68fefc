"""A pool whose engines come and go: more of them while the queue is long, fewer when they have
nothing to do, and new ones in place of the old when their options change. Nobody loses an answer by
that.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import msgspec

from quire.errors import QuireError
from quire.observe.prometheus import ServerMetrics
from quire.server.config import ServerConfig
from quire.server.link import messages
from quire.server.link.replicas.pool import ReplicaPool
from quire.server.link.replicas.replica import Replica
from quire.server.link.replicas.scaling import Scaler, ScalingRule

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 0.5


class ElasticPool(ReplicaPool):
    """Places for as many engines as the rule allows, and one more for the time of a change."""

    def __init__(
        self,
        config: ServerConfig,
        metrics: ServerMetrics,
        on_failure: Callable[[], None],
        rule: ScalingRule,
    ) -> None:
        self._rule = rule
        self._here: set[int] = set()
        """The places with an engine that is to stay."""
        self._leaving: set[int] = set()
        super().__init__(config, metrics, on_failure)
        self._scaler = Scaler(rule)
        self._scaling: asyncio.Task[None] | None = None
        self._changing = asyncio.Lock()

    async def start(self) -> messages.Ready:
        """Starts as many engines as there are at least."""
        self._here = set(range(self._rule.lowest))
        ready = await super().start()
        self._scaling = asyncio.create_task(self._scale())
        return ready

    async def stop(self) -> None:
        if self._scaling is not None:
            self._scaling.cancel()
            await asyncio.gather(self._scaling, return_exceptions=True)
        await super().stop()

    @property
    def ready(self) -> messages.Ready | None:
        """With as many rows as there may be: who waits for more engines has to be let in."""
        found = [replica.ready for replica in self.replicas if replica.ready is not None]
        if not found:
            return None
        rows = max(ready.max_num_seqs for ready in found)
        shortest = min(ready.max_model_len for ready in found)
        return msgspec.structs.replace(
            found[-1], max_model_len=shortest, max_num_seqs=rows * self._rule.highest
        )

    @property
    def num_engines(self) -> int:
        return len(self._here)

    # Changes

    async def grow(self) -> bool:
        """One more engine; False if it can't be had, which is tried again when the queue is still
        long.
        """
        async with self._changing:
            number = await self._add()
            return number is not None

    async def shrink(self) -> None:
        """One engine less: the one with the least to do, as soon as it is done with that."""
        async with self._changing:
            live = [number for number in self._here if self.replicas[number].state == "ready"]
            if len(live) > 1:
                await self._retire(
                    min(live, key=lambda number: (self.router.load(number), -number))
                )

    async def replace_all(self, config: ServerConfig, rule: ScalingRule | None = None) -> None:
        """New engines with these options for the old, one after the other, while requests go on. An
        answer stays with its engine unless another one makes the same of it.
        """
        async with self._changing:
            self._config = config
            self._parts = self._divide(config)
            if rule is not None:
                self._rule, self._scaler = rule, Scaler(rule)
            for old in sorted(self._here):
                if await self._add() is None:
                    raise QuireError(
                        "an engine with the new options could not be started; the old ones stay"
                    )
                await self._retire(old)

    async def _add(self) -> int | None:
        free = [
            number
            for number in range(len(self.replicas))
            if number not in self._here | self._leaving
        ]
        if not free:
            return None
        number = free[0]
        replica = self.replicas[number] = self._new_replica(self._parts[number], number)
        self._here.add(number)
        try:
            await replica.start()
        except BaseException as error:
            self._here.discard(number)
            if not isinstance(error, Exception):
                raise
            logger.error("another engine could not be started: %s", error)
            return None
        logger.info("engine %d is here; %d in all", number, self.num_engines)
        return number

    async def _retire(self, number: int) -> None:
        """Gives it nothing more, waits for what it has, moves what takes too long, and ends it."""
        self._here.discard(number)
        self._leaving.add(number)
        self.look_at(self.replicas[number])
        end = time.monotonic() + self._config.drain_seconds
        while self.relays_at(number) and time.monotonic() < end:
            await asyncio.sleep(min(_LOOK_SECONDS, self._config.drain_seconds) / 10)
        for relay in self.relays_at(number):
            self.replicas[number].abort([relay.message.request_id])
            self.move(relay)
        await self.replicas[number].stop()
        self._leaving.discard(number)
        logger.info("engine %d has left; %d in all", number, self.num_engines)

    async def _scale(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            change = self.decide(time.monotonic())
            try:
                if change > 0:
                    await self.grow()
                elif change < 0:
                    await self.shrink()
            except Exception:
                logger.exception("the number of engines could not be changed")

    def decide(self, now: float) -> int:
        """What the rule says about what is there."""
        relays = list(self._relays.values())
        waiting = sum(relay.is_waiting for relay in relays)
        running = sum(len(relay.outputs) for relay in relays)
        rows = max(
            (ready.max_num_seqs for one in self.replicas if (ready := one.ready) is not None),
            default=1,
        )
        return self._scaler.decide(now, self.num_engines, waiting, running, rows)

    # What differs from a pool of a fixed size

    def _divide(self, config: ServerConfig) -> list[ServerConfig]:
        self._parts = super()._divide(config)
        return self._parts

    def _takes_requests(self, replica: Replica) -> bool:
        return super()._takes_requests(replica) and replica.number not in self._leaving

    def _present(self) -> list[Replica]:
        return [self.replicas[number] for number in sorted(self._here | self._leaving)]

    def failed(self, number: int) -> None:
        """One that could not be started again leaves its place, for another to be tried when the
        queue is long.
        """
        self._here.discard(number)
        if self._here:
            logger.error("engine %d is given up; %d are left", number, len(self._here))
            return
        self._here.add(number)  # so that the state says what became of it
        self._give_up()
