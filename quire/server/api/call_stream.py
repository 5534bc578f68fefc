"""A call's answer as server-sent events: what has come is written once per turn of the event loop.

While a client reads as fast as it is written to, nobody is woken for a token: when the engine's
step has been taken in, what is new is put into the connection (`_NewText`, `_news`). A task does the rest: the
beginning and the end, parts that take long to write, and a client that lags, whose events wait in
the call (bounded, `Call`) and are told together, in one, once it reads again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from starlette.types import Scope, Send

from quire.server.api.writer import Writer
from quire.server.calls.generation import GenerationEvent
from quire.server.http_responses import DIRECT_BODY, DirectBody, EventStream


class CallStream(EventStream):
    """Streams what a writer makes of its call."""

    def __init__(
        self, writer: Writer[Any], end: Callable[[], None], headers: Mapping[str, str]
    ) -> None:
        super().__init__(writer.error_event, end, headers)
        self._writer = writer
        self._call = writer.call
        self._direct: DirectBody | None = None
        self.idle: asyncio.Future[None] | None = None
        """Of the task, while it has nothing to do: what comes then is written at once."""
        self._begun: set[int] = set()
        """Choices of which something was written."""

    async def _write_events(self, scope: Scope, send: Send) -> None:
        self._direct = scope.get("extensions", {}).get(DIRECT_BODY)
        call = self._call
        writer = self._writer
        await _send(send, b"".join(writer.begin()))
        call.on_news = self._news
        try:
            while call.events or not call.is_over:
                for event in call.take():
                    is_long = writer.may_take_long and writer.is_long_chunk(event)
                    if is_long:
                        data = await asyncio.to_thread(writer.chunk, event)
                    else:
                        data = writer.chunk(event)
                    self._begin(event.index)
                    await _send(send, data)
                if not call.events and not call.is_over:
                    self.idle = asyncio.get_running_loop().create_future()
                    await self.idle
        finally:
            self.idle = call.on_news = None
        call.raise_error()
        finished = writer.finish()
        is_long = writer.is_long
        await _send(
            send, b"".join(await asyncio.to_thread(list, finished) if is_long else finished)
        )

    def _begin(self, index: int) -> None:
        """After the first event of a choice its text comes without any."""
        if index not in self._begun and self._direct is not None:
            self._begun.add(index)
            self._call.write_text_to(index, _NewText(self, index, self._writer, self._direct))

    def _news(self) -> None:
        """Events have come, or the end."""
        call = self._call
        writer = self._writer
        call.is_announced = False
        if self.idle is None:
            return  # the task is at it
        is_long = writer.may_take_long and any(map(writer.is_long_chunk, call.events))
        if self._direct is None or self._direct.is_blocked or call.is_over or is_long:
            self.wake()
            return
        try:
            events = call.take()
            data = b"".join(map(writer.chunk, events))
        except Exception as error:
            self.wake(error)
            return
        for event in events:
            self._begin(event.index)
        if data:
            call.callbacks.writes.append((self._direct, data))

    def wake(self, error: Exception | None = None) -> None:
        """Has the task do the rest; `error`: what has come can't be written."""
        idle = self.idle
        self.idle = None
        if idle is None or idle.done():
            return
        if error is None:
            idle.set_result(None)
        else:
            idle.set_exception(error)


class _NewText:
    """What a choice gained in this turn of the event loop (`quire.server.calls.call.TextSink`)."""

    __slots__ = (
        "_callbacks",
        "_direct",
        "_index",
        "_is_reasoning",
        "_stream",
        "_text",
        "_token_ids",
        "_write_text",
        "_writer",
    )

    def __init__(
        self, stream: CallStream, index: int, writer: Writer[Any], direct: DirectBody
    ) -> None:
        self._stream = stream
        self._index = index
        self._writer = writer
        self._write_text = (writer.text_writer(index, False), writer.text_writer(index, True))
        """Content, and reasoning."""
        self._direct = direct
        self._callbacks = writer.call.callbacks
        self._is_reasoning = False
        self._text = ""
        self._token_ids: tuple[int, ...] = ()

    def push(self, text: str, token_ids: tuple[int, ...], is_reasoning: bool) -> bool:
        if not self._text:
            if self._stream.idle is None or self._direct.is_blocked:
                return False
            self._text = text
            self._token_ids = token_ids
            self._is_reasoning = is_reasoning
            self._callbacks.add(self._write)
        elif is_reasoning == self._is_reasoning:
            self._text += text
            self._token_ids += token_ids
        else:
            return False
        return True

    def _write(self) -> None:
        """Comes before the news of any event that was told later."""
        text = self._text
        self._text = ""
        if self._stream.idle is None:
            return  # the client has left meanwhile, or what came before could not be written
        try:
            data = self._write_text[self._is_reasoning](text)
            if data is None:
                parts = ("", text) if self._is_reasoning else (text, "")
                event = GenerationEvent(self._index, text, *parts, (), self._token_ids)
                data = self._writer.chunk(event)
        except Exception as error:
            self._stream.wake(error)
            return
        if data:
            self._callbacks.writes.append((self._direct, data))


async def _send(send: Send, data: bytes) -> None:
    if data:
        await send({"type": "http.response.body", "body": data, "more_body": True})
