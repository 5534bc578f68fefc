"""Updates of several engines that are lost, come back and refuse at any moment: those that answer
requests have the same weights, whatever happens. Engines are played; hundreds of seeds.
"""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

import pytest

from quire.errors import InvalidRequestError
from quire.server.errors import ApiError
from quire.server.link.engine_client import unavailable
from quire.server.link.replicas.weights import PoolWeights

NUM_MATRICES = 3
NUM_SEEDS = 800


class Played:
    """An engine as `EngineController` is, with a name for the content of each matrix."""

    def __init__(self, number: int, rng: Random, world: World) -> None:
        self.number = number
        self._rng = rng
        self._world = world
        self.start()

    def start(self) -> None:
        self.process = object()
        self.ready = None
        self.state = "ready"
        self.weights_version = 0
        self.content = ["files"] * NUM_MATRICES
        self.is_broken = False
        self.is_paused = self.is_asleep = False
        self.update: dict[int, str] | None = None
        self.is_prepared = False
        self.num_running = 0

    def die(self) -> None:
        self.state = "restarting"
        self._world.weights.settle()

    def order(self, action: str, **arguments: Any) -> None:
        self.do(action, arguments)

    async def control(self, action: str, seconds: float, **arguments: Any) -> dict[str, Any]:
        process = self.process
        for moment in ("before", "after"):
            for _ in range(self._rng.randrange(3)):
                await asyncio.sleep(0)
            if self._rng.random() < self._world.risk:
                self.die()
            if self.state != "ready" or self.process is not process:
                raise unavailable()
            if moment == "before":
                found = self.do(action, arguments)
                self._world.check()
        return found

    def do(self, action: str, arguments: dict[str, Any]) -> dict[str, Any]:
        refuses = self._rng.random() < self._world.risk
        match action:
            case "pause":
                self.is_paused = True
                self.num_running = 0
            case "resume":
                if self.is_broken:
                    raise conflict("missing")
                self.is_paused = False
            case "sleep":
                self.is_asleep = True
            case "wake_up":
                self.is_asleep = False
            case "start_update":
                self.update = {}
                self.is_prepared = False
            case "abandon_update":
                self.update = None
            case "add_files":
                if self.update is None or refuses:
                    raise conflict("no update")
                self.update |= dict.fromkeys(arguments["matrices"], arguments["content"])
            case "check_update" | "prepare_update" | "commit_update":
                return self.change(action, arguments, refuses)
        return {"is_paused": self.is_paused}

    def change(self, action: str, arguments: dict[str, Any], refuses: bool) -> dict[str, Any]:
        if self.update is None or (refuses and action != "commit_update"):
            raise conflict("no update")
        if action == "prepare_update":
            self.is_prepared = True
            return {"is_complete": len(self.update) == NUM_MATRICES}
        if self.num_running and not self.is_paused:
            raise conflict("requests are being answered")
        if self.is_asleep:
            raise conflict("asleep")
        if arguments["version"] <= self.weights_version:
            raise InvalidRequestError("version", "too low")
        if action == "commit_update":
            assert self.is_prepared
            update, self.update = self.update, None
            self.weights_version = arguments["version"]
            for place, (matrix, content) in enumerate(update.items()):
                if refuses and place:
                    self.is_broken = True
                    break
                self.content[matrix] = content
            else:
                self.is_broken = self.is_broken and len(update) < NUM_MATRICES
            self._world.weights.settle()
            if self.is_broken:
                raise conflict("halfway")
        return {"weights": 1}


def conflict(message: str) -> ApiError:
    return ApiError(409, message, code="conflict")


class World:
    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.risk = self.rng.choice([0.0, 0.02, 0.1])
        self.weights = PoolWeights(lambda: self.engines, self.check)  # type: ignore[arg-type, return-value]
        self.engines = [
            Played(number, self.rng, self) for number in range(self.rng.randrange(1, 4))
        ]
        self.num_finished = 0

    def check(self) -> None:
        """Engines that answer requests have the same weights, all of one version."""
        live = [one for one in self.engines if one.state == "ready"]
        serving = [one for one in live if self.weights.serves(one)]  # type: ignore[arg-type]
        assert bool(serving) == bool(live)
        assert len({one.weights_version for one in serving}) <= 1
        sound = [one for one in serving if not one.is_broken]
        assert len({tuple(one.content) for one in sound}) <= 1
        update = self.weights._update
        if sound and (update is None or not update.is_finishing):
            # in which of them it fails is not heard at once
            assert sound == serving

    async def administer(self, name: str) -> None:
        for turn in range(8):
            others = ["add_files", "pause", "resume", "sleep", "wake_up", "state"]
            actions = [self.rng.choice(others)]
            if self.rng.random() < 0.7:
                actions = ["wake_up", "start_update", "add_files", "finish_update"]
            for action in actions:
                await self.do(action, f"{name}{turn}")

    async def do(self, action: str, content: str) -> None:
        arguments: dict[str, Any] = {}
        if action == "add_files":
            count = self.rng.choice([1, NUM_MATRICES])
            matrices = self.rng.sample(range(NUM_MATRICES), count)
            arguments = {"matrices": matrices, "content": content}
        elif action == "finish_update":
            version = None if self.rng.random() < 0.8 else self.rng.randrange(12)
            arguments = {"version": version, "abort": self.rng.random() < 0.1}
        elif action in ("pause", "sleep"):
            arguments = {"mode": "wait"}
            arguments |= {"level": 1} if action == "sleep" else {}
        try:
            found = await self.weights.control(action, 1.0, **arguments)
        except (ApiError, InvalidRequestError):
            return
        finally:
            self.check()
        self.num_finished += "weights" in found
        assert self.risk or "left_out" not in found  # only those that were lost are

    async def live(self) -> None:
        """Requests come and go, and engines that were lost come back."""
        while True:
            await asyncio.sleep(0)
            for one in self.engines:
                if one.state != "ready" and self.rng.random() < 0.2:
                    one.start()
                    self.weights.joined(one)  # type: ignore[arg-type]
                    assert one.is_asleep or one.is_paused or not self.weights._is_paused
                elif not one.is_paused and self.rng.random() < 0.2:
                    one.num_running = self.rng.randrange(2)
            self.check()

    async def play(self) -> None:
        living = asyncio.create_task(self.live())
        await asyncio.gather(*(self.administer(name) for name in ("a", "b")))
        self.risk = 0.0
        while not (living.done() or all(one.state == "ready" for one in self.engines)):
            await asyncio.sleep(0)
        living.cancel()
        (error,) = await asyncio.gather(living, return_exceptions=True)
        assert isinstance(error, asyncio.CancelledError), error
        for one in self.engines:
            one.num_running = 0
        await self.weights.control("wake_up", 1.0)
        if self.weights._update is not None:
            await self.weights.control("finish_update", 1.0, version=None, abort=True)
        await self.weights.control("start_update", 1.0)
        whole = list(range(NUM_MATRICES))
        await self.weights.control("add_files", 1.0, matrices=whole, content="last")
        found = await self.weights.control("finish_update", 1.0, version=None, abort=False)
        assert "left_out" not in found
        assert [one.content for one in self.engines] == [["last"] * NUM_MATRICES] * len(
            self.engines
        )
        assert not any(one.is_broken for one in self.engines)


@pytest.mark.parametrize("part", range(4))
def test_engines_that_answer_have_the_same_weights(part: int) -> None:
    finished = 0
    for seed in range(part, NUM_SEEDS, 4):
        world = World(seed)
        try:
            asyncio.run(world.play())
        except BaseException as error:
            raise AssertionError(f"seed {seed}: {error!r}") from error
        finished += world.num_finished
    assert finished > NUM_SEEDS / 4


@pytest.mark.parametrize("first_is_broken", [False, True])
def test_an_engine_that_joins_while_others_resume_does_as_they_do(first_is_broken: bool) -> None:
    """It was left paused for ever: the pool still was when it came."""

    async def play() -> None:
        world = World(0)
        world.risk = 0.0
        first, second = world.engines = [Played(number, Random(1), world) for number in range(2)]
        if first_is_broken:  # it refuses to resume
            first.is_broken = True
            world.weights._damaged.add(first.process)
        await world.weights.control("pause", 1.0, mode="keep")
        second.die()
        released = asyncio.Event()
        asked = asyncio.Event()
        resume = first.control

        async def slowly(action: str, seconds: float, **arguments: Any) -> dict[str, Any]:
            asked.set()
            await released.wait()
            return await resume(action, seconds, **arguments)

        first.control = slowly  # type: ignore[method-assign]
        resuming = asyncio.create_task(world.weights.control("resume", 1.0))
        await asked.wait()
        second.start()
        world.weights.joined(second)  # type: ignore[arg-type]
        released.set()
        (answer,) = await asyncio.gather(resuming, return_exceptions=True)
        assert isinstance(answer, ApiError) is first_is_broken
        assert first.is_paused == second.is_paused == first_is_broken

    asyncio.run(play())
