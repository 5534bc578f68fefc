"""A call's answer as server-sent events: what has come is written once per turn of the event loop.

While a client reads as fast as it is written to, nobody is woken for a token: when the engine's
step has been taken in, `_write_now` puts what is new into the connection. A task does the rest: the
beginning and the end, parts that take long to write, and a client that lags, whose events wait in
the call (bounded, `EngineCall`) and are told together, in one, once it reads again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from starlette.types import Scope, Send

from quire.server.calls.engine_call import EngineCall
from quire.server.calls.generation import GenerationEvent
from quire.server.errors import ApiError
from quire.server.http_responses import DIRECT_BODY, DirectBody, EventStream
from quire.server.tasks import NextTurn

logger = logging.getLogger(__name__)


class StreamWriter(Protocol):
    """What a stream needs of an API's writer (`lifecycle.Writer`)."""

    call: EngineCall
    is_long: bool

    def begin(self) -> Iterable[bytes]: ...

    def text_writer(
        self, index: int, is_reasoning: bool = False
    ) -> Callable[[str], bytes | None] | None: ...

    def chunk(self, event: GenerationEvent) -> Iterable[bytes]: ...

    may_take_long: bool

    def is_long_chunk(self, event: GenerationEvent) -> bool: ...

    def finish(self) -> Iterable[bytes]: ...

    def error_event(self, path: str, error: ApiError, request_id: str) -> bytes: ...


class CallStream(EventStream):
    """Streams what a writer makes of its call."""

    def __init__(
        self, writer: StreamWriter, end: Callable[[], None], headers: Mapping[str, str]
    ) -> None:
        super().__init__(writer.error_event, end, headers)
        self._writer = writer
        self._call = writer.call
        self._direct: DirectBody | None = None
        self._waiting: asyncio.Future[None] | None = None
        """Of the task, while it has nothing to do."""
        self._texts: dict[int, _NewText] = {}
        self.is_idle = False
        """The task has nothing to do, so what comes may be written."""

    async def _write_events(self, scope: Scope, send: Send) -> None:
        self._direct = scope.get("extensions", {}).get(DIRECT_BODY)
        await _send_all(send, self._writer.begin())
        self._call.on_news = self._news
        try:
            while not (self._call.is_over and not self._call.has_events):
                for event in self._call.take():
                    written = self._writer.chunk(event)
                    is_long = self._writer.may_take_long and self._writer.is_long_chunk(event)
                    await _send_all(
                        send, await asyncio.to_thread(list, written) if is_long else written
                    )
                    self._begun(event)
                if not self._call.has_events and not self._call.is_over:
                    self._waiting = asyncio.get_running_loop().create_future()
                    self.is_idle = True
                    await self._waiting
                    self.is_idle = False
        finally:
            self._waiting = self._call.on_news = None
            self.is_idle = False
        self._call.raise_error()
        finished = self._writer.finish()
        await _send_all(
            send, await asyncio.to_thread(list, finished) if self._writer.is_long else finished
        )

    def _news(self) -> None:
        """Events have come, or the end."""
        self._call.is_told = False
        if self._waiting is None or self._waiting.done():
            return  # the task is at it
        if self._direct is None or self._direct.is_blocked or self._call.is_over:
            self._wake()
            return
        try:
            self._write_now(self._direct)
        except Exception as error:
            self.fail(error)

    def _write_now(self, direct: DirectBody) -> None:
        writer, events = self._writer, self._call.take()
        if writer.may_take_long and any(map(writer.is_long_chunk, events)):
            self._call.put_back(events)
            self._wake()
            return
        if len(events) == 1:
            data = b"".join(writer.chunk(events[0]))
        else:
            data = b"".join([piece for event in events for piece in writer.chunk(event)])
        for event in events:
            if event.index not in self._texts:
                self._begun(event)
        if data:
            self._call.next_turn.write(direct.write, data)

    def _begun(self, event: GenerationEvent) -> None:
        """The first event of a choice was written: from now on its text comes without any."""
        if event.index in self._texts or self._direct is None:
            return
        write = self._writer.text_writer(event.index)
        if write is not None:
            write_reasoning = self._writer.text_writer(event.index, is_reasoning=True)
            text = _NewText(
                self, event.index, self._direct, self._call.next_turn, write, write_reasoning
            )
            self._texts[event.index] = text
            self._call.write_text_to(event.index, text)

    # For `_NewText`

    def put_back(self, event: GenerationEvent) -> None:
        """What could not be written now. No event has come since, or it waits: so this goes before
        all that do.
        """
        self._call.put_back([event])
        self._news()

    def fail(self, error: Exception) -> None:
        """What has come can't be written."""
        if self._waiting is not None and not self._waiting.done():
            self.is_idle = False
            self._waiting.set_exception(error)

    def _wake(self) -> None:
        assert self._waiting is not None
        self.is_idle = False
        self._waiting.set_result(None)


class _NewText:
    """What a choice gained in this turn of the event loop (`quire.server.calls.engine_call.TextSink`)."""

    __slots__ = (
        "_direct",
        "_index",
        "_is_reasoning",
        "_next_turn",
        "_stream",
        "_text",
        "_token_ids",
        "_write",
        "_write_reasoning",
    )

    def __init__(
        self,
        stream: CallStream,
        index: int,
        direct: DirectBody,
        next_turn: NextTurn,
        write: Callable[[str], bytes | None],
        write_reasoning: Callable[[str], bytes | None] | None,
    ) -> None:
        self._stream = stream
        self._index = index
        self._direct = direct
        self._next_turn = next_turn
        self._write = write
        self._write_reasoning = write_reasoning
        self._is_reasoning = False
        self._text = ""
        self._token_ids: tuple[int, ...] = ()

    def push(self, text: str, token_ids: tuple[int, ...], is_reasoning: bool = False) -> bool:
        if not self._text:
            if is_reasoning and self._write_reasoning is None:
                return False
            self._text = text
            self._token_ids = token_ids
            self._is_reasoning = is_reasoning
            self._next_turn.add(self._tell)
        elif is_reasoning == self._is_reasoning:
            self._text += text
            self._token_ids += token_ids
        else:
            return False
        return True

    def _tell(self) -> None:
        """Writes it; if that can't be done now, an event tells of it."""
        text, self._text = self._text, ""
        stream, direct = self._stream, self._direct
        write = self._write_reasoning if self._is_reasoning else self._write
        if stream.is_idle and not direct.is_blocked and write is not None:
            try:
                data = write(text)
            except Exception as error:
                stream.fail(error)
                return
            if data is not None:
                if data:
                    self._next_turn.write(direct.write, data)
                return
        content, reasoning = ("", text) if self._is_reasoning else (text, "")
        stream.put_back(
            GenerationEvent(self._index, text, content, reasoning, token_ids=self._token_ids)
        )


async def _send_all(send: Send, pieces: Iterable[bytes]) -> None:
    data = b"".join(pieces)
    if data:
        await send({"type": "http.response.body", "body": data, "more_body": True})
