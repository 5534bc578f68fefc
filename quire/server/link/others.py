"""What a key is told about others' requests: that they are there, where that explains its own, and
nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from quire.observe.request_records import RequestRecord

Find = Callable[[str, str | None], Awaitable[RequestRecord | None]]
"""A request by its id, if this owner may see it."""
_REQUEST_ID = re.compile(r"\b[a-z]+[-_][0-9a-f]{24}(?:\.\d+)?(?:/\d+)?(?![0-9a-f])")
"""The engine's id of a request: the response's id, and which of its answers."""
_WHICH = re.compile(r"(?:\.\d+)?(?:/\d+)?$")
_MOST_KNOWN = 10_000


class OwnNames:
    """Which of the engine's request ids are a key's own."""

    def __init__(self, find: Find, owner: str) -> None:
        self._find = find
        self._owner = owner
        self._known: dict[str, bool] = {}

    async def has(self, request_id: str) -> bool:
        """`request_id`: the engine's."""
        response_id = _WHICH.sub("", request_id)
        if response_id not in self._known:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            self._known[response_id] = await self._find(response_id, self._owner) is not None
        return self._known[response_id]


async def hide_others(value: Any, find: Find, owner: str | None) -> Any:
    """JSON with the ids of others' requests replaced: the same one by the same word. An admin
    (None) sees them, and so does everybody where there are no keys.
    """
    if not owner:
        return value
    own = OwnNames(find, owner)
    text = msgspec.json.encode(value).decode()
    words: dict[str, str] = {}
    for request_id in dict.fromkeys(_REQUEST_ID.findall(text)):
        if not await own.has(request_id):
            words[request_id] = f"another-{len(words) + 1}"
    return (
        msgspec.json.decode(_REQUEST_ID.sub(lambda found: words.get(found[0], found[0]), text))
        if words
        else value
    )


class OwnFrames:
    """The frames of the live view as one key may see them: its own requests, and of the others what
    the engine did in all. Feed it every frame in order, beginning with one that tells everything.
    """

    def __init__(self, names: OwnNames) -> None:
        self._names = names
        self._own: set[int] = set()
        """The numbers by which frames call requests that are this key's."""

    async def filter(self, message: dict[str, Any]) -> dict[str, Any]:
        """One frame, as `quire.observe.live_view` makes it, with its queue."""
        frame = message["frame"]
        key = message["frame"].get("key")
        if key is not None:
            self._own.clear()
        for place, fields in ((key or {}, ("names", "requests")), (frame, ("requests", "ended"))):
            for field in fields:
                if field in place:
                    place[field] = [one for one in place[field] if await self._is_own(one)]
        if "progress" in frame:
            flat = frame["progress"]
            own = [flat[i : i + 4] for i in range(0, len(flat), 4) if flat[i] in self._own]
            frame["progress"] = [number for one in own for number in one]
        message["queue"] = [one for one in message["queue"] if await self._names.has(one[0])]
        return message

    async def _is_own(self, about: list[Any]) -> bool:
        """`about`: a request's number, its id, and what is told of it."""
        is_own = await self._names.has(about[1])
        if is_own:
            self._own.add(about[0])
        return is_own
