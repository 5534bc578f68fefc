"""OpenAI's completions: text is continued as it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import Field

from quire.errors import InvalidRequestError
from quire.server.api.protocol import sampling
from quire.server.api.protocol.common import MAX_TOP_LOGPROBS, present, to_prompts
from quire.server.calls.generation import GenerationRequest

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

    def to_generation(self, response_id: str, request_id: str) -> GenerationRequest:
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
            response_id=response_id,
            request_id=request_id,
            prompts=to_prompts(self.prompt, self.add_special_tokens),
            params=params,
            endpoint=self.ENDPOINT,
            stream=bool(self.stream),
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            truncation_side=self.truncation_side or "left",
            fields=fields,
            notes=present(user=self.user),
        )
