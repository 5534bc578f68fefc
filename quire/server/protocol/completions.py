"""OpenAI's completions: text is continued as it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import Field

from quire.errors import InvalidRequestError
from quire.outputs import TokenLogprobs
from quire.server.generation import GenerationRequest, Prompt, TextPrompt, TokensPrompt
from quire.server.protocol.common import (
    MAX_TOP_LOGPROBS,
    UNSUPPORTED_EVERYWHERE,
    ResponseFormat,
    SamplingFields,
    StreamOptions,
    structured_names,
    token_name,
)

DEFAULT_MAX_TOKENS = 16
MAX_PROMPTS = 1024

TokenIds = list[int]


class CompletionRequest(SamplingFields):
    """POST /v1/completions"""

    UNSUPPORTED: ClassVar[Mapping[str, str]] = {
        **UNSUPPORTED_EVERYWHERE,
        "suffix": "the model continues texts, it does not fill gaps",
        "messages": "use /v1/chat/completions for conversations",
        "tools": "use /v1/chat/completions for tools",
    }

    model: str | None = None
    prompt: str | TokenIds | Annotated[list[str | TokenIds], Field(max_length=MAX_PROMPTS)]
    max_tokens: int | None = Field(None, ge=0)
    """0 gives no answer, for those who want the prompt's logprobs (echo)."""
    best_of: int | None = Field(None, ge=1)
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    user: str | None = Field(None, max_length=1024)
    request_id: str | None = Field(None, min_length=1, max_length=128)
    add_special_tokens: bool = True

    @property
    def no_answer(self) -> bool:
        return self.max_tokens == 0

    def to_generation(self, response_id: str, request_id: str) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options", "needs stream to be true")
        best_of = self.best_of if self.best_of is not None and self.best_of > 1 else None
        if best_of is not None and self.stream:
            raise InvalidRequestError("best_of", "can't be streamed: the best is known at the end")
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequestError("prompt_logprobs", "can't be streamed")
        if self.no_answer and not self.echo:
            raise InvalidRequestError("max_tokens", "0 needs echo to be true: there would be nothing to return")
        structured, structured_field = self.structured(self.response_format)
        prompt_logprobs = self.prompt_logprobs
        if self.echo and self.logprobs is not None:
            prompt_logprobs = max(self.logprobs, prompt_logprobs or 0)
        params = self.sampling_params(
            max_tokens=DEFAULT_MAX_TOKENS if self.max_tokens is None else max(1, self.max_tokens),
            best_of=best_of,
            logprobs=self.logprobs,
            prompt_logprobs=prompt_logprobs,
            structured=structured,
        )
        return GenerationRequest(
            response_id=response_id,
            request_id=request_id,
            prompts=tuple(self._prompts()),
            params=params,
            endpoint="/v1/completions",
            stream=bool(self.stream),
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            fields=structured_names(structured_field),
            notes={} if self.user is None else {"user": self.user},
        )

    def _prompts(self) -> list[Prompt]:
        prompt = self.prompt
        if isinstance(prompt, str):
            return [TextPrompt(prompt, self.add_special_tokens)]
        if not prompt:
            raise InvalidRequestError("prompt", "is empty")
        token_ids = tuple(one for one in prompt if isinstance(one, int))
        if token_ids:
            return [TokensPrompt(token_ids)]
        prompts: list[Prompt] = []
        for one in prompt:
            if isinstance(one, str):
                prompts.append(TextPrompt(one, self.add_special_tokens))
            elif isinstance(one, list):
                prompts.append(TokensPrompt(tuple(one)))
        return prompts


@dataclass(slots=True)
class LogprobsWriter:
    """Writes the logprobs of one choice in OpenAI's old form: parallel lists, with the place of each token in the
    text, which goes on from chunk to chunk."""

    num_top: int
    as_ids: bool
    offset: int = 0

    def write(self, entries: Sequence[TokenLogprobs | None], token_texts: Sequence[str] = ()) -> dict[str, Any]:
        """`token_texts` are used where there is no entry: the first token of a prompt."""
        tokens, logprobs, tops, offsets = [], [], [], []
        for place, entry in enumerate(entries):
            name = token_texts[place] if entry is None else token_name(entry, self.as_ids)
            text = token_texts[place] if entry is None else entry.text
            tokens.append(name)
            logprobs.append(None if entry is None else entry.logprob)
            tops.append(None if entry is None else self._top(entry))
            offsets.append(self.offset)
            self.offset += len(text)
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        # The token itself is always there, likely or not.
        found = {token_name(one, self.as_ids): one.logprob for one in reversed(entry.top[: self.num_top])}
        return found | {token_name(entry, self.as_ids): entry.logprob} if self.num_top else {}
