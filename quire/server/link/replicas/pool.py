"""Several engines that look like one. Each has a process and a supervisor of its own; a router says
which of them gets a request, and when one is lost its requests go on elsewhere: tokens and seeds
decide the rest of an answer, so whoever reads it sees no difference.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from quire.observe.block_names import BlockNamer, Names
from quire.observe.prometheus import ServerMetrics
from quire.server.config import ServerConfig
from quire.server.errors import ApiError
from quire.server.link import messages
from quire.server.link.engine_client import EngineClient, Listener, State, going_down, unavailable
from quire.server.link.replicas.adapter_places import AdapterPlaces, answer_of_all
from quire.server.link.replicas.metrics import PoolMetrics
from quire.server.link.replicas.relay import Relay
from quire.server.link.replicas.replica import Replica
from quire.server.link.replicas.router import PrefixRouter
from quire.server.link.replicas.shares import divide
from quire.server.link.replicas.weights import PoolWeights

logger = logging.getLogger(__name__)

_LONGEST_TIMER = 86400.0
_REMEMBERED = 4096
"""Requests of which it is known where they were, running or not."""


class ReplicaPool:
    """As many engines as there are parts of the machine."""

    def __init__(
        self, config: ServerConfig, metrics: ServerMetrics, on_failure: Callable[[], None]
    ) -> None:
        """`on_failure` is called when none of the engines is left."""
        self._config = config
        self._on_failure = on_failure
        self._server_metrics = metrics
        parts = self._divide(config)
        self._metrics = PoolMetrics(metrics, is_single=len(parts) == 1)
        self.router = PrefixRouter(len(parts))
        self._namer = BlockNamer(self.router.block_size)
        self.replicas = [self._new_replica(part, number) for number, part in enumerate(parts)]
        self._relays: dict[str, Relay] = {}
        """By the request's id."""
        self._owners: dict[str, Relay] = {}
        """By an answer's id."""
        self._stranded: dict[Relay, asyncio.TimerHandle] = {}
        """Requests whose engine is gone while no other could take them, and when they give up."""
        self._adapters = AdapterPlaces(_REMEMBERED)
        self._last_at: OrderedDict[str, int] = OrderedDict()
        """Which engine had a request last, of those that may still be asked about."""
        self._is_stopped = False
        self.weights = PoolWeights(self._present, self._look_at_all)

    def _divide(self, config: ServerConfig) -> list[ServerConfig]:
        """The configuration of each engine."""
        return divide(config)

    def _new_replica(self, config: ServerConfig, number: int) -> Replica:
        return Replica(config, self._server_metrics.of_engine(str(number)), self, number)

    # Its life

    async def start(self) -> messages.Ready:
        """Starts the engines and waits for them; raises QuireError if one of them fails."""
        starting = [asyncio.create_task(replica.start()) for replica in self._present()]
        try:
            await asyncio.gather(*starting)
        except BaseException:
            for task in starting:
                task.cancel()
            await asyncio.gather(*starting, return_exceptions=True)
            await self.stop()
            raise
        ready = self.ready
        assert ready is not None
        return ready

    async def stop(self) -> None:
        """Ends all engine processes; what is running is lost."""
        self._is_stopped = True
        await asyncio.gather(*(replica.stop() for replica in self.replicas))
        self._fail_stranded(going_down())

    def abandon(self) -> None:
        """Tells everybody who waits that the server is going down."""
        for replica in self.replicas:
            replica.abandon()
        self._fail_stranded(going_down())

    @property
    def state(self) -> State:
        """The best that one of them is in."""
        if self._is_stopped:
            return "stopped"
        states = {replica.state for replica in self._present()} or {"starting"}
        order: tuple[State, ...] = ("ready", "restarting", "starting", "failed", "stopped")
        return next(state for state in order if state in states)

    @property
    def ready(self) -> messages.Ready | None:
        """All of them as one: what each can take, and as many requests and blocks as they have
        together.
        """
        known = [replica for replica in self.replicas if replica.ready is not None]
        known.sort(key=lambda one: not self.weights.serves(one))
        found = [replica.ready for replica in known if replica.ready is not None]
        if not found:
            return None
        return msgspec.structs.replace(
            found[0],
            max_model_len=min(ready.max_model_len for ready in found),
            max_num_seqs=sum(ready.max_num_seqs for ready in found),
            num_blocks=sum(ready.num_blocks for ready in found),
        )

    @property
    def engines(self) -> Sequence[EngineClient]:
        return self._present()

    @property
    def seconds_silent(self) -> float:
        """Of the one that spoke last."""
        return min(
            (replica.seconds_silent for replica in self.replicas if replica.state == "ready"),
            default=0.0,
        )

    @property
    def is_stalled(self) -> bool:
        live = [replica for replica in self.replicas if replica.state == "ready"]
        return bool(live) and all(replica.is_stalled for replica in live)

    def describe_replicas(self) -> list[dict[str, Any]]:
        """How each of them is, for /health."""
        return [
            {
                "replica": replica.number,
                "status": self._status(replica),
                "load": self.router.load(replica.number),
                "cached_blocks": self.router.num_cached_blocks(replica.number),
            }
            for replica in self._present()
        ]

    def _status(self, replica: Replica) -> str:
        if replica.is_stalled:
            return "stalled"
        is_outdated = replica.state == "ready" and not self.weights.serves(replica)
        return "outdated" if is_outdated else replica.state

    def _present(self) -> list[Replica]:
        """Those there are, or are to be."""
        return self.replicas

    # Requests

    def add(self, message: messages.AddRequest, listener: Listener) -> None:
        """Hands a request to the engine that suits it best."""
        if not self.router.has_open and not self._candidates():
            raise unavailable()
        relay = Relay(message, listener, self.router, self.over, self.move)
        self._relays[message.request_id] = relay
        self._owners.update(dict.fromkeys(relay.answer_ids, relay))
        try:
            self._place(relay, message)
        except ApiError:
            self.over(relay)
            raise

    def abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            relay = self._relays.get(request_id)
            if relay is not None:
                assignment = relay.assignment
                self.over(relay)
                if assignment is not None:
                    self.replicas[assignment.replica].abort([request_id])

    def end(self, request_id: str) -> None:
        relay = self._owners.get(request_id)
        if relay is None:
            return
        relay.end(request_id)
        if (
            relay.assignment is not None
            and self.replicas[relay.assignment.replica].state == "ready"
        ):
            self.replicas[relay.assignment.replica].end(request_id)

    async def describe(self, request_id: str) -> dict[str, Any] | None:
        """What the log of the engine that has it, or had it last, says about a request."""
        # of several prompts, the first
        at = {self._last_at.get(request_id), self._last_at.get(f"{request_id}.0")}
        busy: TimeoutError | None = None
        for replica in sorted(self.replicas, key=lambda one: one.number not in at):
            try:
                record = await replica.describe(request_id)
            except TimeoutError as error:
                busy = error
                continue
            if record is not None:
                return {**record, "replica": replica.number}
        if busy is not None:  # it may be the one that knows
            raise busy
        return None

    async def load_adapter(self, adapter: messages.AdapterFolder) -> dict[str, Any]:
        """By all that are there; what one of them finds wrong with it is wrong. One that comes later
        reads it when it needs it.
        """
        live = [replica for replica in self.replicas if replica.state == "ready"]
        if not live:
            raise unavailable()
        self._adapters.note(adapter.name, live[0].number)
        return await answer_of_all([replica.load_adapter(adapter) for replica in live])

    async def control(self, action: str, seconds: float, **arguments: Any) -> dict[str, Any]:
        return await self.weights.control(action, seconds, **arguments)

    def unload_adapter(self, name: str) -> None:
        self._adapters.forget(name)
        for replica in self.replicas:
            replica.unload_adapter(name)

    # What the engines tell

    def joined(self, replica: Replica) -> None:
        """An engine is ready, for the first time or again: with an empty cache."""
        ready = replica.ready
        assert ready is not None
        if ready.block_size != self._namer.block_size:
            self._namer = BlockNamer(ready.block_size)
        self.router.join(
            replica.number, ready.block_size, ready.num_blocks, ready.max_num_seqs, ready.window
        )
        self._metrics.up(replica.number, True)
        self.weights.joined(replica)
        self._look_at_all()

    def _look_at_all(self) -> None:
        """Some take requests now that did not, or the other way round."""
        for replica in self._present():
            self.look_at(replica)
        if not self._candidates():
            return
        for relay in list(self._stranded):
            if relay in self._stranded:  # the call of one that fails takes its others along
                self._stranded.pop(relay).cancel()
                self._send_again(relay)

    def left(self, replica: Replica) -> None:
        """An engine is lost; its requests are told next."""
        self.router.leave(replica.number)
        self._metrics.up(replica.number, False)
        self.weights.settle()

    def failed(self, number: int) -> None:
        """An engine could not be started again and again."""
        left = sum(
            replica.state in ("ready", "restarting", "starting") for replica in self.replicas
        )
        if left:
            logger.error("replica %d is given up; %d are left", number, left)
        else:
            self._give_up()

    def _give_up(self) -> None:
        """No engine is left."""
        self._fail_stranded(unavailable("no engine could be started again; the server goes down"))
        self._on_failure()

    # What the relays tell

    def over(self, relay: Relay) -> None:
        """Nothing more comes of it."""
        if self._relays.get(relay.message.request_id) is not relay:
            return
        del self._relays[relay.message.request_id]
        for request_id in relay.answer_ids:
            del self._owners[request_id]
        if relay in self._stranded:
            self._stranded.pop(relay).cancel()
        self._release(relay)

    def move(self, relay: Relay) -> None:
        """Its engine is gone: another one goes on with it, now or when there is one."""
        if self._relays.get(relay.message.request_id) is not relay:
            # whoever waited for it has left, perhaps because another prompt of the call was lost
            # just now
            return
        self._release(relay)
        relay.confirm_ends()
        if not relay.outputs:
            self.over(relay)
            return
        self._send_again(relay)

    def look_at(self, replica: Replica) -> None:
        """One that may hang is not chosen while there are others."""
        self.router.set_open(
            replica.number, self._takes_requests(replica) and not replica.is_suspect
        )

    def relieve(self, replica: Replica) -> None:
        """An engine has work and has been silent for long. What others have room for goes on there,
        once: the step may just take long, and then it will elsewhere. If it is heard of again, it
        has only lost these requests.
        """
        moved = 0
        silent = replica.seconds_silent
        for relay in self.relays_at(replica.number):
            if relay.was_relieved or not self._has_room(relay, replica.number):
                continue
            replica.forsake(relay.message.request_id)
            relay.relieve()
            self.move(relay)
            moved += 1
        if moved:
            what = "replica %d has work and has been silent for %.0f s: %d of its requests go on elsewhere"
            logger.warning(what, replica.number, silent, moved)

    def _has_room(self, relay: Relay, number: int) -> bool:
        """Whether an engine that is well would run it at once. The one it is at counts as silent."""
        others = (
            one
            for one in self._candidates(relay)
            if one != number and not self.replicas[one].is_suspect
        )
        return any(self.router.has_room(one, len(relay.outputs)) for one in others)

    def relays_at(self, number: int) -> list[Relay]:
        return [
            relay
            for relay in self._relays.values()
            if relay.assignment is not None and relay.assignment.replica == number
        ]

    def _send_again(self, relay: Relay) -> None:
        if not self._candidates(relay):
            self._strand(relay)
            return
        message = relay.again()
        if isinstance(message, ApiError):
            self.over(relay)
            relay.listener.fail(message)
            return
        self._metrics.moved(bool(any(relay.outputs.values())))
        self._place(relay, message)

    def _strand(self, relay: Relay) -> None:
        """There is no engine for it, until one comes or its time is over."""
        if self._is_stopped or self.state == "failed":
            self._refuse(relay)
        elif any(relay.outputs.values()) and not self.weights.may_come(relay.fingerprint):
            self._refuse(
                relay, "none has the weights any more that it was begun with; send it again"
            )
        else:
            seconds = min(self._config.queue_seconds, _LONGEST_TIMER)
            self._stranded[relay] = asyncio.get_running_loop().call_later(
                seconds, self._refuse, relay
            )

    def _refuse(self, relay: Relay, why: str = "none has taken its place; try again later") -> None:
        self.over(relay)
        relay.listener.fail(unavailable(f"its engine was lost, and {why}"))

    def _fail_stranded(self, error: ApiError) -> None:
        for relay in list(self._stranded):
            self.over(relay)
            relay.listener.fail(error)

    def _place(self, relay: Relay, message: messages.AddRequest) -> None:
        num_tokens = message.num_prompt_tokens
        num_answers = len(relay.outputs)
        blocks = self._block_names(message)
        # Only an answer that has begun may be bound to some of them: looking at each takes long
        # where there are many.
        is_free = (
            self.router.has_open
            and not any(relay.outputs.values())
            and message.params.get("weights_version") is None
        )
        candidates = None if is_free else self._candidates(relay)
        if message.adapter is not None:
            among = self._candidates() if candidates is None else candidates
            preferred = self._adapters.preferred(message.adapter.name, among, self.router)
            candidates = candidates if preferred is None else [preferred]
        assignment = self.router.place(blocks, num_tokens, num_answers, candidates)
        relay.assignment = assignment
        relay.fingerprint = self._fingerprint(self.replicas[assignment.replica])
        self._last_at[message.request_id] = assignment.replica
        if message.adapter is not None:
            self._adapters.note(message.adapter.name, assignment.replica)
        if len(self._last_at) > _REMEMBERED:
            self._last_at.popitem(last=False)
        self._metrics.placed(assignment.replica, num_tokens, assignment.num_cached)
        self.replicas[assignment.replica].add(message, relay, relay.outputs, relay.computed)

    def _block_names(self, message: messages.AddRequest) -> Names:
        """Those of its prompt, by which the router finds it in caches. Blocks that an adapter
        computed are known by its content, which this process has not read: there it finds none.
        """
        if message.adapter is not None:
            return self._namer.names(b"")
        return self._namer.names(message.prompt, message.params.get("cache_salt"))

    def _release(self, relay: Relay) -> None:
        if relay.assignment is not None:
            self.router.close(relay.assignment)
            relay.assignment = None

    def _candidates(self, relay: Relay | None = None) -> list[int]:
        """Engines that take requests, or this one: an answer that has begun goes on only where the
        same tokens come of it. One that may hang takes them only where there is no other.
        """
        live = [replica for replica in self.replicas if self._takes_requests(replica)]
        wanted = None if relay is None else relay.message.params.get("weights_version")
        if wanted is not None:  # during an update, some may have it
            live = [
                replica
                for replica in self.replicas
                if replica.state == "ready" and replica.weights_version == wanted
            ] or live
        if relay is not None and relay.fingerprint is not None and any(relay.outputs.values()):
            live = [replica for replica in live if self._fingerprint(replica) == relay.fingerprint]
        lively = [replica.number for replica in live if not replica.is_suspect]
        return lively or [replica.number for replica in live]

    def _takes_requests(self, replica: Replica) -> bool:
        return replica.state == "ready" and self.weights.serves(replica)

    @staticmethod
    def _fingerprint(replica: Replica) -> str | None:
        return None if replica.ready is None else replica.ready.fingerprint
