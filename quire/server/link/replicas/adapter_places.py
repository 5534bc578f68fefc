"""Which engine had an adapter last: it need not read it again, and has cached what it computed."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Sequence
from typing import Any

from quire.server.link.replicas.router import PrefixRouter


class AdapterPlaces:
    """By name, the last `most` of them."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._places: OrderedDict[str, int] = OrderedDict()

    def note(self, name: str, replica: int) -> None:
        self._places[name] = replica
        self._places.move_to_end(name)
        if len(self._places) > self._most:
            self._places.popitem(last=False)

    def forget(self, name: str) -> None:
        self._places.pop(name, None)

    def preferred(self, name: str, among: Sequence[int], router: PrefixRouter) -> int | None:
        """The engine that had it last, unless others have much less to do."""
        at = self._places.get(name)
        if at is None or at not in among:
            return None
        least = min(router.num_answers(replica) for replica in among)
        return at if router.num_answers(at) <= 2 * least + 4 else None


async def answer_of_all(asked: Sequence[Awaitable[dict[str, Any]]]) -> dict[str, Any]:
    """What engines that were asked to read an adapter say: the error of one, if it has one. Those that
    can't answer (they are gone, or too busy) read it when they need it, if others could.
    """
    found = await asyncio.gather(*asked, return_exceptions=True)
    answers = [one for one in found if not isinstance(one, BaseException)]
    for one in found:
        if isinstance(one, BaseException) and not answers:
            raise one
    return next((one for one in answers if "error" in one), answers[0])
