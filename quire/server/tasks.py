"""Tasks that end with the block that needs them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")


@contextlib.asynccontextmanager
async def running(*coroutines: Coroutine[Any, Any, Any]) -> AsyncIterator[list[asyncio.Task[Any]]]:
    """Runs them at the same time until one is done; whatever still runs at the end of the block is
    cancelled.
    """
    tasks = [asyncio.create_task(one) for one in coroutines]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class RunningTimeClock:
    """Seconds in which this process ran. Those in which everything was paused (a container, a
    laptop asleep) do not count: whoever was silent then had no chance to speak.
    """

    def __init__(self, interval: float) -> None:
        self.interval = interval
        """Between two looks; so long may a pause be that is not noticed."""
        self.now = 0.0

    async def run(self) -> None:
        """Keeps the clock going."""
        while True:
            before = time.monotonic()
            await asyncio.sleep(self.interval)
            self.now += min(time.monotonic() - before, 2 * self.interval)


async def in_thread(function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """Runs it beside the event loop, and to its end even if whoever waits is cancelled: what it
    works on may be closed then.
    """
    work = asyncio.ensure_future(asyncio.to_thread(function, *args, **kwargs))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.gather(work, return_exceptions=True)
        raise
