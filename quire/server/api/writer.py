"""Writers: how a call's events look in an API. What OpenAI's APIs write in the same way is here, too."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, Generic, TypeVar

from quire.outputs import Logprob, TokenLogprobs
from quire.server.api.body import ApiRequest
from quire.server.api.sampling import SamplingFields
from quire.server.calls.call import Call
from quire.server.calls.generation import GenerationEvent, Usage
from quire.server.errors import ApiError, error_body
from quire.server.http_responses import DONE, data_event, encode, escape_line_ends, one_line
from quire.server.stored.store import OwnResponses

RequestT = TypeVar("RequestT", bound=ApiRequest)
SamplingT = TypeVar("SamplingT", bound=SamplingFields)
_TEXT, _NUMBER = "a text that nobody writes: 6e1f0c5b2d", 7_301_926_485_203_947
"""What stands in an event for what is not known yet."""


class TextEvent:
    """An event of which only a text changes (and a number behind it): the bytes around them are
    written once, by the encoder that writes all others. The text may stand in several places.
    """

    __slots__ = ("_has_number", "_pieces", "_tail")

    def __init__(self, make: Callable[[str, int], bytes]) -> None:
        """`make` writes the event with a given text and, if it has one, number."""
        *before, last = make(_TEXT, _NUMBER).split(one_line(_TEXT))
        last, number, self._tail = last.partition(b"%d" % _NUMBER)
        self._pieces = (*before, last)
        self._has_number = bool(number)

    def write(self, text: str, number: int = 0) -> bytes:
        written = encode(text)
        if not written.isascii():
            written = escape_line_ends(written)
        event = written.join(self._pieces)
        return b"%b%d%b" % (event, number, self._tail) if self._has_number else event


class Writer(ABC, Generic[RequestT]):
    """Puts one call's events into the form of an API. `begin`, `chunk` and `finish` write a stream,
    `whole` the one body for those who wait.
    """

    MEDIA_TYPE: ClassVar[str] = "text/event-stream; charset=utf-8"
    """Of its streams."""
    STREAMS: ClassVar[bool] = True
    """Whether a body that asks for a stream gets one; else it is refused."""

    def __init__(
        self, body: RequestT, call: Call, model: str, fingerprint: str, stored: OwnResponses
    ) -> None:
        self.body = body
        self.call = call
        self.request_id = call.request_id
        self.model = model
        """As the client named it."""
        self.fingerprint = fingerprint
        self.created = int(time.time())
        self.stored = stored
        """Where the response is kept, if this API does that."""
        params = call.request.params
        pooling = call.request.pooling
        self.is_long = (
            params.logprobs is not None or params.prompt_logprobs is not None or pooling is not None
        )
        """Writing the whole body may take long: others must not wait for it."""

    def begin(self) -> Iterable[bytes]:
        """What comes before the first event."""
        return ()

    def text_chunk(self, index: int, text: str, is_reasoning: bool) -> bytes | None:
        """What most events of a choice tell: more content, or more reasoning, and nothing else.
        None if that needs other events first, or a chunk tells more than its text.
        """
        return None

    def text_writer(self, index: int, is_reasoning: bool) -> Callable[[str], bytes | None]:
        """`text_chunk` for a choice that has begun."""
        return lambda text: self.text_chunk(index, text, is_reasoning)

    def chunk(self, event: GenerationEvent) -> bytes:
        """What is written for an event."""
        content = event.content
        reasoning = event.reasoning
        if (
            (not content or not reasoning)
            and (content or reasoning)
            and event.finish_reason is None
            and not event.tool_calls
            and not event.logprobs
        ):
            written = self.text_chunk(event.index, content or reasoning, not content)
            if written is not None:
                return written
        return b"".join(self.chunks(event))

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

    def error_event(self, path: str, error: ApiError, http_request_id: str) -> bytes:
        """How a stream that began well tells its end; clients of OpenAI raise it."""
        return data_event(error_body(path, error, http_request_id))

    def close(self) -> None:
        """A stream is over, whichever way it ended."""

    @abstractmethod
    def whole(self, events: list[GenerationEvent]) -> dict[str, Any]:
        """The body made of all events."""


class ChoicesWriter(Writer[SamplingT]):
    """Bodies with a list of choices."""

    OBJECT: ClassVar[str]
    CHUNK_OBJECT: ClassVar[str]
    """What a whole body and a chunk of a stream call themselves."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        options = self.body.stream_options
        body = self.body
        # Where a chunk tells more than its text, it is different every time.
        self._tells_usage = (
            options is not None and options.include_usage and options.continuous_usage_stats
        )
        self._tells_text = not (
            self._tells_usage or body.return_token_ids or body.prompt_logprobs is not None
        )
        self._text_events: tuple[dict[int, TextEvent], dict[int, TextEvent]] = ({}, {})
        """How choices that have begun go on, with content and with reasoning."""

    shows_reasoning = False

    def text_choice(self, index: int, text: str, is_reasoning: bool) -> dict[str, Any]:
        """A choice that gained this text and nothing else."""
        raise NotImplementedError

    def text_chunk(self, index: int, text: str, is_reasoning: bool) -> bytes | None:
        prepared = self._text_events[is_reasoning].get(index)
        return None if prepared is None else prepared.write(text)

    def text_writer(self, index: int, is_reasoning: bool) -> Callable[[str], bytes | None]:
        prepared = self._text_events[is_reasoning].get(index)
        return super().text_writer(index, is_reasoning) if prepared is None else prepared.write

    def begun(self, index: int) -> None:
        """Something was said of a choice: from now on most of its chunks differ in their text
        alone.
        """
        if not self._tells_text or index in self._text_events[False]:
            return
        for kind in (False, True) if self.shows_reasoning else (False,):

            def make(text: str, _: int, kind: bool = kind) -> bytes:
                return self.chunk_of(self.text_choice(index, text, kind))

            self._text_events[kind][index] = TextEvent(make)

    def finish(self) -> Iterator[bytes]:
        options = self.body.stream_options
        if options is not None and options.include_usage:
            yield data_event(
                {
                    **self.outline(self.CHUNK_OBJECT),
                    "choices": [],
                    "usage": self.usage(),
                    **self.weights(),
                }
            )
        yield DONE

    def outline(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.request_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }

    def chunk_of(
        self, choice: dict[str, Any], usage: dict[str, Any] | None = None, **more: Any
    ) -> bytes:
        """One choice gained something. The chunk tells the usage so far (`usage`, if that is
        another) if every chunk is to tell it, null if the last one will, else nothing.
        """
        options = self.body.stream_options
        if options is not None and options.include_usage:
            more["usage"] = (usage or self.usage()) if self._tells_usage else None
        return data_event({**self.outline(self.CHUNK_OBJECT), "choices": [choice], **more})

    def whole_of(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            **self.outline(self.OBJECT),
            "choices": choices,
            "usage": self.usage(),
            **self.weights(),
        }

    def weights(self) -> dict[str, Any]:
        """The version of the weights that answered, where they were replaced or it was asked for."""
        version = self.call.weights_version
        is_asked = self.call.request.params.weights_version is not None
        return {"weights_version": version} if version or is_asked else {}

    def usage(self) -> dict[str, Any]:
        return usage_body(self.call.usage)


def usage_body(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {
            "reasoning_tokens": usage.reasoning_tokens,
            "accepted_prediction_tokens": usage.accepted_tokens,
            "rejected_prediction_tokens": usage.rejected_tokens,
        },
    }


def token_name(entry: Logprob, as_ids: bool) -> str:
    """A token as a response spells it."""
    return f"token_id:{entry.token_id}" if as_ids else entry.text


def logprob_body(entry: TokenLogprobs, as_ids: bool = False) -> dict[str, Any]:
    """A token with its logprob and those of the most likely ones, as chat and responses have it."""
    return {
        **_token_body(entry, as_ids),
        "top_logprobs": [_token_body(one, as_ids) for one in shown_beside(entry)],
    }


def shown_beside(entry: TokenLogprobs) -> Sequence[Logprob]:
    """The most likely tokens; if some were asked for by id, those and the one that was chosen, the
    likeliest first.
    """
    if not entry.named:
        return entry.top
    return sorted(
        {one.token_id: one for one in (*entry.named, entry)}.values(), key=lambda one: one.rank
    )


def _token_body(entry: Logprob, as_ids: bool) -> dict[str, Any]:
    return {
        "token": token_name(entry, as_ids),
        "logprob": entry.logprob,
        "bytes": list(entry.token_bytes),
    }


def prompt_logprobs_body(
    entries: tuple[TokenLogprobs | None, ...] | None, num_top: int
) -> list[dict[str, Any] | None] | None:
    """vLLM's form: for each position, token ids with logprob, rank and text."""
    if entries is None:
        return None
    return [None if entry is None else _position_body(entry, num_top) for entry in entries]


def _position_body(entry: TokenLogprobs, num_top: int) -> dict[str, Any]:
    found: tuple[Logprob, ...] = (entry, *entry.top[:num_top])
    return {
        str(one.token_id): {"logprob": one.logprob, "rank": one.rank, "decoded_token": one.text}
        for one in found
    }
