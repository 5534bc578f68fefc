"""OpenAI's completions, which continue a text as it is: POST /v1/completions"""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from pydantic import Field

from quire.errors import InvalidRequestError
from quire.outputs import Logprob, TokenLogprobs
from quire.server.api import sampling
from quire.server.api.body import MAX_TOP_LOGPROBS, present, to_prompts
from quire.server.api.endpoint import endpoint
from quire.server.api.writer import (
    ChoicesWriter,
    prompt_logprobs_body,
    shown_beside,
    token_name,
)
from quire.server.calls.generation import GenerationEvent, GenerationRequest, whole_choices

DEFAULT_MAX_TOKENS = 16
MAX_PROMPTS = 1024

TokenIds = list[int]


class CompletionRequest(sampling.SamplingFields):
    """POST /v1/completions"""

    ENDPOINT: ClassVar[str] = "/v1/completions"
    ID_PREFIX: ClassVar[str] = "cmpl-"
    UNSUPPORTED: ClassVar[Mapping[str, str]] = {
        **sampling.UNSUPPORTED,
        "suffix": "the model continues texts, it does not fill gaps",
        "messages": "use /v1/chat/completions for conversations",
        "tools": "use /v1/chat/completions for tools",
    }

    prompt: str | TokenIds | Annotated[list[str | TokenIds], Field(max_length=MAX_PROMPTS)]
    max_tokens: Annotated[int | None, sampling.FromTable("max_tokens", low=0)] = None
    """0 gives no answer, for those who want the prompt's logprobs (echo)."""
    best_of: Annotated[int | None, sampling.FromTable("best_of")] = None
    echo: bool | None = None
    logprobs: Annotated[int | None, sampling.FromTable("logprobs", high=MAX_TOP_LOGPROBS)] = None
    add_special_tokens: bool = True

    @property
    def no_answer(self) -> bool:
        return self.max_tokens == 0

    def to_generation(self) -> GenerationRequest:
        self.check_stream()
        best_of = self.best_of if self.best_of is not None and self.best_of > 1 else None
        if best_of is not None and self.stream:
            raise InvalidRequestError("best_of", "can't be streamed: the best is known at the end")
        if self.no_answer and not self.echo:
            raise InvalidRequestError(
                "max_tokens", "0 needs echo to be true: there would be nothing to return"
            )
        if self.no_answer and self.logprob_token_ids:
            raise InvalidRequestError(
                "logprob_token_ids", "is about tokens of an answer, and max_tokens is 0"
            )
        structured, fields = self.structured()
        prompt_logprobs = self.prompt_logprobs
        if self.echo and self.logprobs is not None:
            prompt_logprobs = max(self.logprobs, prompt_logprobs or 0)
        params = self.sampling_params(
            self.stop,
            max_tokens=DEFAULT_MAX_TOKENS if self.max_tokens is None else max(1, self.max_tokens),
            best_of=best_of,
            prompt_logprobs=prompt_logprobs,
            structured=structured,
            **self.logprob_params(self.logprobs),
        )
        return GenerationRequest(
            prompts=to_prompts(self.prompt, self.add_special_tokens),
            params=params,
            endpoint=self.ENDPOINT,
            stream=bool(self.stream),
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            truncation_side=self.truncation_side or "left",
            fields=fields,
            notes=present(user=self.user),
        )


class CompletionWriter(ChoicesWriter[CompletionRequest]):
    """A whole choice is written like the one chunk of a stream; the first of each choice shows the
    prompt, if it is echoed.
    """

    OBJECT: ClassVar[str] = "text_completion"
    CHUNK_OBJECT: ClassVar[str] = "text_completion"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._logprobs: dict[int, _Logprobs] = {}
        """Of the choices that have begun."""
        self.may_take_long = bool(self.body.echo) and self.body.logprobs is not None

    def text_choice(self, index: int, text: str, is_reasoning: bool) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": None}

    def chunks(self, event: GenerationEvent) -> Iterator[bytes]:
        if (
            event.text
            or event.finish_reason is not None
            or event.logprobs
            or self.body.return_token_ids
        ):
            yield self.chunk_of(self._choice(event))
            if self.body.logprobs is None and not self.body.no_answer:
                self.begun(event.index)

    def is_long_chunk(self, event: GenerationEvent) -> bool:
        """It holds as many logprobs as the prompt has tokens."""
        return self.may_take_long and event.index not in self._logprobs

    def whole(self, events: list[GenerationEvent]) -> dict[str, Any]:
        return self.whole_of(
            [self._choice(event, is_whole=True) for event in whole_choices(events)]
        )

    def usage(self) -> dict[str, Any]:
        usage = super().usage()
        if self.body.no_answer:
            usage |= {"completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
        return usage

    def _choice(self, event: GenerationEvent, is_whole: bool = False) -> dict[str, Any]:
        body = self.body
        call = self.call
        params = call.request.params
        number = event.index // params.n
        is_first = event.index not in self._logprobs
        if is_first:
            as_ids = bool(body.return_tokens_as_token_ids)
            hidden = call.tokenizer.special_token_ids if params.skip_special_tokens else frozenset()
            self._logprobs[event.index] = _Logprobs(body.logprobs or 0, as_ids, hidden)
        writer = self._logprobs[event.index]
        prompt = call.prompts[number]
        text = event.text
        token_ids = event.token_ids
        entries = event.logprobs
        if body.no_answer:
            text = ""
            token_ids = ()
            entries = ()
        logprobs = None
        if is_first and body.echo:
            # A prompt of token ids is shown as the model reads it, special tokens among it.
            shown = prompt.text
            if shown is None:
                shown = call.tokenizer.decode(prompt.token_ids, skip_special_tokens=False)
            text = shown + text
            if body.logprobs is not None:
                first = prompt.token_ids[0]
                scored = [Logprob(first, 0.0, 0, call.tokenizer.token_bytes(first))]
                scored += [one for one in call.prompt_logprobs(number) or () if one is not None]
                # Text came without control tokens; those before it are the tokenizer's.
                hidden = frozenset(
                    call.tokenizer.special_token_ids if prompt.text is not None else ()
                )
                logprobs = joined(writer.write(scored, hidden), writer.write(entries))
        elif body.logprobs is not None:
            logprobs = writer.write(entries)
        choice: dict[str, Any] = {
            "index": event.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": "length"
            if body.no_answer and event.finish_reason
            else event.finish_reason,
        }
        if is_whole:  # vLLM's clients read them, asked for or not
            choice |= {"prompt_logprobs": None, "prompt_token_ids": None, "token_ids": None}
        if event.finish_reason is not None:
            choice["stop_reason"] = None if body.no_answer else event.stop_reason
        if body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs_body(
                call.prompt_logprobs(number), body.prompt_logprobs
            )
        if body.return_token_ids:
            choice["token_ids"] = token_ids
            if is_first:
                choice["prompt_token_ids"] = prompt.token_ids
        return choice


_utf8_decoder = codecs.getincrementaldecoder("utf-8")


@dataclass(slots=True)
class _Logprobs:
    """Writes the logprobs of one choice in OpenAI's old form: parallel lists, with the place of
    each token in the text, which goes on from chunk to chunk.
    """

    num_top: int
    as_ids: bool
    hidden: frozenset[int]
    """Tokens that the answer's text leaves out: they take no place in it."""
    offset: int = 0
    _decoder: codecs.IncrementalDecoder = field(default_factory=lambda: _utf8_decoder("replace"))
    """A token may be part of a character."""

    def write(
        self, entries: Sequence[Logprob], hidden: frozenset[int] | None = None
    ) -> dict[str, list[Any]]:
        """`hidden` are those of a prompt. Its first token comes without a score: nothing precedes
        it.
        """
        tokens = []
        logprobs = []
        tops = []
        offsets = []
        for entry in entries:
            is_scored = isinstance(entry, TokenLogprobs)
            tokens.append(token_name(entry, self.as_ids))
            logprobs.append(entry.logprob if is_scored else None)
            tops.append(self._top(entry) if isinstance(entry, TokenLogprobs) else None)
            offsets.append(self.offset)
            if entry.token_id not in (self.hidden if hidden is None else hidden):
                self.offset += len(self._decoder.decode(entry.token_bytes))
        return {
            "tokens": tokens,
            "token_logprobs": logprobs,
            "top_logprobs": tops,
            "text_offset": offsets,
        }

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        """The likeliest first. The token itself is always there, likely or not."""
        shown = shown_beside(entry) if entry.named else entry.top[: self.num_top]
        found: dict[str, float] = {}
        for one in shown:
            found.setdefault(token_name(one, self.as_ids), one.logprob)
        return found | {token_name(entry, self.as_ids): entry.logprob}


def joined(first: dict[str, list[Any]], then: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """The logprobs of a prompt and of what follows it."""
    return {name: first[name] + then[name] for name in first}


router = endpoint(
    CompletionRequest,
    CompletionWriter,
    "create_completion",
    "Continues one or several texts.",
    "OpenAI",
)
