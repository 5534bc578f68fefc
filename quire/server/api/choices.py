"""What the chat and completions APIs write in the same way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, TypeVar

from quire.outputs import Logprob, TokenLogprobs
from quire.server.api.endpoint import Writer
from quire.server.api.sampling import SamplingFields
from quire.server.calls.generation import Usage
from quire.server.http_responses import DONE, TextEvent, data_event

RequestT = TypeVar("RequestT", bound=SamplingFields)


class ChoicesWriter(Writer[RequestT]):
    """Bodies with a list of choices."""

    OBJECT: ClassVar[str]
    CHUNK_OBJECT: ClassVar[str]
    """What a whole body and a chunk of a stream call themselves."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        options, body = self.body.stream_options, self.body
        # Where a chunk tells more than its text, it is different every time.
        self._tells_usage = (
            options is not None and options.include_usage and options.continuous_usage_stats
        )
        self._tells_text = not (
            self._tells_usage or body.return_token_ids or body.prompt_logprobs is not None
        )
        self._text_events: dict[tuple[int, bool], TextEvent] = {}
        """How a choice that has begun goes on, with content or with reasoning."""

    shows_reasoning = False

    def text_choice(self, index: int, text: str, is_reasoning: bool) -> dict[str, Any]:
        """A choice that gained this text and nothing else."""
        raise NotImplementedError

    def text_writer(self, index: int, is_reasoning: bool = False) -> Callable[[str], bytes] | None:
        prepared = self._text_events.get((index, is_reasoning))
        return None if prepared is None else prepared.write

    def begun(self, index: int) -> None:
        """Something was said of a choice: from now on most of its chunks differ in their text
        alone.
        """
        if not self._tells_text or (index, False) in self._text_events:
            return
        for kind in (False, True) if self.shows_reasoning else (False,):

            def make(text: str, _: int, kind: bool = kind) -> bytes:
                return self.chunk_of(self.text_choice(index, text, kind))

            self._text_events[index, kind] = TextEvent(make)

    def finish(self) -> Iterator[bytes]:
        options = self.body.stream_options
        if options is not None and options.include_usage:
            yield data_event(
                {**self.outline(self.CHUNK_OBJECT), "choices": [], "usage": self.usage()}
            )
        yield DONE

    def outline(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.response_id,
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
        return {**self.outline(self.OBJECT), "choices": choices, "usage": self.usage()}

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
