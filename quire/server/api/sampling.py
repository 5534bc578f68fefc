"""How tokens are chosen and when an answer ends: OpenAI's fields, those vLLM's users send, and our
own, which every API takes; and how they become sampling parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from quire.errors import InvalidRequestError
from quire.sampling_params import MAX_ALLOWED_TOKENS, MAX_STOP_TOKENS, SamplingParams
from quire.server.api import structure
from quire.server.api.body import (
    MAX_TOP_LOGPROBS,
    NO_TEMPLATES,
    ApiRequest,
    Body,
    present,
)
from quire.server.api.structure import ConstraintFields
from quire.server.calls.generation import TruncationSide


class TokenChoice(ConstraintFields):
    """What all four APIs for text take, so that the exact answer can be had by any of them."""

    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[str, float] | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    top_k: int | None = Field(None, ge=-1)
    """0 or -1: all. `top_k`, `min_p` and `repetition_penalty` may be null, as in vLLM."""
    min_p: float | None = Field(None, ge=0, le=1)
    typical_p: float = Field(1.0, gt=0, le=1)
    top_n_sigma: float = Field(0.0, ge=0)
    repetition_penalty: float | None = Field(None, gt=0)
    no_repeat_ngram_size: int = Field(0, ge=0)
    dry_multiplier: float = Field(0.0, ge=0)
    dry_base: float = Field(1.75, ge=1)
    dry_allowed_length: int = Field(2, ge=1)
    dry_sequence_breakers: list[str] = Field(["\n", ":", '"', "*"])
    xtc_probability: float = Field(0.0, ge=0, le=1)
    xtc_threshold: float = Field(0.1, ge=0, le=1)
    min_tokens: int = Field(0, ge=0)
    ignore_eos: bool = False
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOP_TOKENS)] | None = None
    include_stop_str_in_output: bool = False
    allowed_token_ids: Annotated[list[int], Field(max_length=MAX_ALLOWED_TOKENS)] | None = None
    bad_words: list[str] | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    cache_salt: str | None = Field(None, min_length=1)
    priority: int = 0
    deadline: float | None = Field(None, gt=0)
    """Seconds after which the request ends."""
    speculation: bool = True
    """False: no guesses. The answer is the same."""

    def sampling_params(self, stop: str | list[str] | None, **more: Any) -> SamplingParams:
        """`more` are parameters that an API names or defaults differently."""
        names = type(self).model_fields.keys() & SamplingParams.__dataclass_fields__.keys() - {
            "logit_bias",
            *more,
        }
        given = present(**{name: getattr(self, name) for name in names})
        given = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in given.items()
        }
        given["stop"] = (stop,) if isinstance(stop, str) else tuple(stop or ())
        given["top_k"] = max(0, self.top_k or 0)
        if self.seed is not None:
            given["seed"] = self.seed % 2**64
        if self.logit_bias:
            given["logit_bias"] = {_token_id(name): bias for name, bias in self.logit_bias.items()}
        return SamplingParams(**(given | more))


class StreamOptions(Body):
    include_usage: bool = False
    """Send a last chunk with the usage of the whole request."""
    continuous_usage_stats: bool = False
    """Send the usage so far with every chunk."""


class SamplingFields(TokenChoice, ApiRequest):
    """What chat and completions share."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, max_length=1024)
    request_id: str | None = Field(None, min_length=1, max_length=128)
    """The name that the body itself gives its request."""

    n: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    stop: str | list[str] | None = None
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    logprob_token_ids: Annotated[list[int], Field(max_length=MAX_TOP_LOGPROBS)] | None = None
    """Instead of the most likely tokens: report the logprobs of these, and of the one that was
    chosen.
    """
    truncate_prompt_tokens: int | None = Field(None, ge=-1)
    """Keep this many of the prompt's tokens; -1: as many as fit."""
    truncation_side: TruncationSide | None = None
    """"left" keeps the prompt's last tokens (so does null), "right" the first."""
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    def logprob_params(self, logprobs: int | None) -> dict[str, Any]:
        """Which logprobs are reported; `logprobs`: of how many of the most likely tokens, None for
        none at all.
        """
        if not self.logprob_token_ids:
            return {"logprobs": logprobs}
        if logprobs is None:
            raise InvalidRequestError("logprob_token_ids", "needs logprobs")
        return {"logprobs": 0, "logprob_token_ids": tuple(self.logprob_token_ids)}

    def check_stream(self) -> None:
        """Raises InvalidRequestError for what needs a stream and for what can't be streamed."""
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options", "needs stream to be true")
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequestError("prompt_logprobs", "can't be streamed")


UNSUPPORTED: Mapping[str, str] = {
    **structure.UNSUPPORTED,
    "use_beam_search": "beam search is part of the Python API",
    "length_penalty": "it belongs to beam search",
    "logits_processors": "code is never taken from a request",
    "kv_transfer_params": "the cache is not transferred",
    "vllm_xargs": "there are no plugins",
    "mm_processor_kwargs": "the model reads text only",
    "prompt_embeds": "prompts are text or token ids",
    "lora_request": "there are no adapters",
    "thinking_token_budget": "limit the length of the whole answer",
    "stop_regex": "stop at texts or tokens",
    "early_stopping": "it belongs to beam search",
    "ec_transfer_params": "the cache is not transferred",
    "media_io_kwargs": "the model reads text only",
    "return_token_offsets": "/tokenize has a prompt's tokens",
    "return_prompt_text": "/tokenize has a chat's tokens, /detokenize their text",
    "return_assistant_tokens_mask": "/tokenize has a chat's tokens",
    "routed_experts_prompt_start": "which experts were chosen is not reported",
    **dict.fromkeys(
        (
            "repetition_detection",
            "max_repetition_pattern_size",
            "min_repetition_pattern_size",
            "repetition_min_count",
        ),
        "no answer is ended for repeating itself: punish it by dry_multiplier or no_repeat_ngram_size",
    ),
    "chat_template": NO_TEMPLATES,
}
"""In every API for text."""


def _token_id(name: str) -> int:
    if not name.isascii() or not name.isdigit() or len(name) > 10:
        raise InvalidRequestError("logit_bias", f"has the key {name[:50]!r}, which is no token id")
    return int(name)
