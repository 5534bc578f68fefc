"""The life of one API call, the same for every API: its body is read and checked, the engine admits
it and works on it, a writer puts what comes back into the form of the API, streamed or whole, and
its end is recorded.

An API is a body (`protocol`), a `Writer`, and the route that `endpoint` makes of the two.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Generic, TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import Response

from quire.errors import InvalidRequestError
from quire.server.api.body import ApiRequest
from quire.server.api.call_stream import CallStream
from quire.server.api.sampling import SamplingFields
from quire.server.calls.engine_call import EngineCall
from quire.server.calls.generation import GenerationEvent, GenerationRequest
from quire.server.errors import ApiError, error_body
from quire.server.guard import connection
from quire.server.guard.auth import owner_of
from quire.server.http_responses import JsonResponse, LargeJsonResponse, data_event
from quire.server.service import get_service, renamed
from quire.server.stored.store import OwnResponses

RequestT = TypeVar("RequestT", bound=ApiRequest)
_MANY_EVENTS = 2000
"""Of a call that is answered as a whole: putting more together takes long."""


class Writer(ABC, Generic[RequestT]):
    """Puts one call's events into the form of an API. `begin`, `chunk` and `finish` write a stream,
    `whole` the one body for those who wait.
    """

    MEDIA_TYPE: ClassVar[str] = "text/event-stream; charset=utf-8"
    """Of its streams."""
    STREAMS: ClassVar[bool] = True
    """Whether a body that asks for a stream gets one; else it is refused."""

    def __init__(
        self, body: RequestT, call: EngineCall, model: str, fingerprint: str, stored: OwnResponses
    ) -> None:
        self.body = body
        self.call = call
        self.response_id = call.request.response_id
        self.model = model
        """As the client named it."""
        self.fingerprint = fingerprint
        self.created = int(time.time())
        self.stored = stored
        """Where the response is kept, if this API does that."""
        params, pooling = call.request.params, call.request.pooling
        self.is_long = (
            params.logprobs is not None or params.prompt_logprobs is not None or pooling is not None
        )
        """Writing the whole body may take long: others must not wait for it."""

    def begin(self) -> Iterable[bytes]:
        """What comes before the first event."""
        return ()

    def text_writer(
        self, index: int, is_reasoning: bool = False
    ) -> Callable[[str], bytes | None] | None:
        """Writes what most events of a choice tell: more content, or more reasoning, and nothing
        else; it gives None if other events must go first. There is none before the choice has
        begun, and if its chunks tell more than text.
        """
        return None

    def chunk(self, event: GenerationEvent) -> Iterable[bytes]:
        """What is written for an event."""
        text, reasoning = event.content, event.reasoning
        is_more = event.tool_calls or event.logprobs or event.finish_reason is not None
        if not is_more and (not text or not reasoning):
            write = self.text_writer(event.index, bool(reasoning))
            written = (
                write(text or reasoning) if write is not None and (text or reasoning) else None
            )
            if written is not None:
                return (written,)
        return self.chunks(event)

    def chunks(self, event: GenerationEvent) -> Iterable[bytes]:
        """The same for events of all kinds."""
        raise NotImplementedError("this API does not stream")

    may_take_long = False
    """Whether there are events for which `is_long_chunk` is true."""

    def is_long_chunk(self, event: GenerationEvent) -> bool:
        """Whether writing it takes so long that others must not wait for it."""
        return False

    def finish(self) -> Iterable[bytes]:
        """What comes after the last event."""
        return ()

    def error_event(self, path: str, error: ApiError, request_id: str) -> bytes:
        """How a stream that began well tells its end; clients of OpenAI raise it."""
        return data_event(error_body(path, error, request_id))

    def close(self) -> None:
        """A stream is over, whichever way it ended."""

    @abstractmethod
    def whole(self, events: list[GenerationEvent]) -> dict[str, Any]:
        """The body made of all events."""


def endpoint(
    kind: type[RequestT], writer: type[Writer[RequestT]], name: str, about: str, tag: str
) -> APIRouter:
    """The route of an API; `name` and `about` are shown in /docs."""
    router = APIRouter()

    @connection.cancel_on_disconnect
    async def create(request: Request) -> Response:
        return await answer(request, kind, writer)

    options: dict[str, Any] = {"name": name, "description": about, "tags": [tag]}
    if "stream" in kind.model_fields and writer.STREAMS:
        events = {"text/event-stream": {"schema": {"type": "string"}}}
        options["responses"] = {
            200: {
                "description": "The answer, or its events if `stream` is true.",
                "content": events,
            }
        }
    router.add_api_route(
        kind.ENDPOINT,
        create,
        methods=["POST"],
        openapi_extra=connection.body_schema(kind),
        **options,
    )
    return router


async def answer(
    request: Request, kind: type[RequestT], writer_kind: type[Writer[RequestT]]
) -> Response:
    """One call from its body to its response."""
    body = await connection.read_body(request, kind)
    service = get_service(request)
    model = service.check_model(body.served_name)
    body.check_model_limits(service.ready.hidden_size)
    request_id = connection.name_request(
        request, body.request_id if isinstance(body, SamplingFields) else None
    )
    stored = service.responses_of(request)

    def make() -> GenerationRequest:
        body.recall(stored)
        return body.to_generation(connection.new_id(kind.ID_PREFIX), request_id)

    try:
        # What was stored may be long, however short the body is.
        wanted = await (
            asyncio.to_thread(make) if body.recalls else connection.convert(request, make)
        )
    except InvalidRequestError as error:
        raise renamed(error, kind.FIELDS) from None
    call = await service.start(wanted, request.headers, owner_of(request.scope))
    request.state.record = call.record
    service.calls[owner_of(request.scope), wanted.response_id] = call
    try:
        writer = writer_kind(body, call, model, service.ready.fingerprint, stored)
        headers = connection.ignored_header(
            [*request.state.ignored, *wanted.ignored, *call.ignored]
        )
        if call.prompts[0].is_clamped:
            headers["x-quire-clamped"] = f"max_tokens={call.prompts[0].params.max_tokens}"
        if wanted.stream:

            def end() -> None:
                call.abort()
                writer.close()

            return CallStream(writer, end, {"content-type": writer.MEDIA_TYPE, **headers})
        events = await call.all()
    except BaseException:
        call.abort()
        raise

    if writer.is_long or len(events) > _MANY_EVENTS:
        return await service.in_thread(LargeJsonResponse.of, lambda: writer.whole(events), headers)
    return JsonResponse(writer.whole(events), headers=headers)
