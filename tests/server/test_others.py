"""What a key is told about others' requests."""

from __future__ import annotations

import asyncio
from typing import Any

from quire.observe.request_records import RecordBook, RequestRecord
from quire.server.link.others import OwnFrames, OwnNames, hide_others

MINE, OTHER = "chatcmpl-" + "a" * 24, "resp_" + "b" * 24
BOOK = RecordBook()
for _name, _owner in ((MINE, "me"), (OTHER, "you")):
    BOOK.add(RequestRecord(_name, "x", "/", 0.0, owner=_owner))


async def find(name: str, owner: str | None) -> RequestRecord | None:
    return BOOK.find(name, owner)


def hidden(value: Any, owner: str | None) -> Any:
    return asyncio.run(hide_others(value, find, owner))


def test_names_of_others_become_words_that_tell_nothing() -> None:
    told = {
        "request_id": MINE,
        "shared_steps_with": {f"{OTHER}/0": 3, f"{MINE}.1/0": 1},
        "text": f"waited for {OTHER}.2/1 and {OTHER}/0.",
    }
    shown = hidden(told, "me")
    assert shown["request_id"] == MINE
    assert shown["shared_steps_with"] == {"another-1": 3, f"{MINE}.1/0": 1}
    assert shown["text"] == "waited for another-2 and another-1."
    assert hidden(told, None) == told  # an admin key
    assert hidden(told, "") == told  # a server without keys


def test_a_frame_has_a_keys_own_requests_and_the_engine_in_all() -> None:
    frames = OwnFrames(OwnNames(find, "me"))
    mine, other = [1, f"{MINE}/0", 0.5, 3], [2, OTHER, 0.6, 4]
    key = {"names": [mine[:2], other[:2]], "requests": [mine, other], "blocks": [1, 2]}
    first = {
        "frame": {"steps": [[1]], "key": key, "ended": [other]},
        "queue": [[OTHER, 1.0, 2], [MINE, 1.0, 2]],
    }
    shown = asyncio.run(frames.filter(first))
    assert shown["frame"]["key"] == {"names": [mine[:2]], "requests": [mine], "blocks": [1, 2]}
    assert (shown["frame"]["ended"], shown["queue"]) == ([], [[MINE, 1.0, 2]])
    progress = {"frame": {"steps": [[2]], "progress": [1, 10, 11, 12, 2, 20, 21, 22]}, "queue": []}
    assert asyncio.run(frames.filter(progress))["frame"] == {
        "steps": [[2]],
        "progress": [1, 10, 11, 12],
    }
