"""What several engines say of an adapter that all were asked to read."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from quire.server.link.replicas.adapter_places import answer_of_all

RANK, WRONG = {"rank": 4}, {"error": "a tensor has no place"}


async def say(what: dict[str, Any] | Exception) -> dict[str, Any]:
    if isinstance(what, Exception):
        raise what
    return what


def answers(*said: dict[str, Any] | Exception) -> dict[str, Any]:
    async def ask() -> dict[str, Any]:
        return await answer_of_all([say(one) for one in said])

    return asyncio.run(ask())


def test_what_one_engine_finds_wrong_is_wrong() -> None:
    assert answers(RANK, WRONG, RANK) == WRONG


def test_an_engine_that_can_not_answer_is_not_waited_for() -> None:
    assert answers(TimeoutError(), RANK) == RANK


def test_somebody_must_have_read_it() -> None:
    with pytest.raises(TimeoutError):
        answers(TimeoutError(), TimeoutError())
