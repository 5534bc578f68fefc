"""How tokens are chosen and when an answer ends: OpenAI's fields, those vLLM's users send, and our
own, which every API takes; and how they become sampling parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, GetCoreSchemaHandler, GetJsonSchemaHandler, PrivateAttr, create_model
from pydantic_core import CoreSchema, core_schema

from quire.errors import InvalidRequestError
from quire.field_checks import Flag, Number, Strings, TokenIds, Values, parameters
from quire.sampling_defaults import DEFAULTED
from quire.sampling_params import SamplingParams
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

TABLE = parameters(SamplingParams)
_ELSEWHERE = {
    "temperature",
    "top_p",
    "n",
    "stop",
    "max_tokens",
    "best_of",
    "logprobs",
    "logprob_token_ids",
    "prompt_logprobs",
}
"""Parameters that some API lacks, or calls or limits differently: each declares them itself."""


class FromTable:
    """Annotates a field of a body: what it may be and what it is for, as `SamplingParams` has it
    under that name, within other limits where an API has its own.
    """

    def __init__(self, name: str, low: float | None = None, high: float | None = None) -> None:
        self._name = name
        values = TABLE[name].values
        if isinstance(values, Number):
            values = values.within(low, high)
        elif isinstance(values, TokenIds) and high is not None:
            values = TokenIds(int(high), values.least)
        self._values = values

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        written = handler(schema)
        for branch in written.get("anyOf", [written]):
            if branch["type"] in ("integer", "number", "array"):
                branch.update(_limits(self._values))
        written["description"] = TABLE[self._name].help
        return written

    def _check(self, value: Any) -> Any:
        if value is not None:
            try:
                self._values.check(self._name, value)
            except InvalidRequestError as error:
                raise ValueError(str(error).removeprefix(f"{error.field}: ")) from None
        return value


def _limits(values: Values) -> dict[str, Any]:
    """As JSON schemas say it."""
    if isinstance(values, Number):
        return values.limits()
    if isinstance(values, TokenIds):
        return {"minItems": values.least, "maxItems": values.most}
    return {"maxItems": values.most} if isinstance(values, Strings) else {}


def _fields() -> dict[str, Any]:
    """Of all parameters that every API has under its own name. Null means "not given"."""
    found = {}
    for name, one in TABLE.items():
        if one.api and name not in _ELSEWHERE:
            default = list(one.default) if isinstance(one.default, tuple) else one.default
            default = None if name in DEFAULTED else default  # the model's
            found[name] = Annotated[_json_type(one.values) | None, FromTable(name)], default
    return found


def _json_type(values: Values) -> Any:
    if isinstance(values, Number):
        return values.kind
    if isinstance(values, Flag):
        return bool
    if isinstance(values, TokenIds):
        return list[int]
    return list[str] if isinstance(values, Strings) else str


if TYPE_CHECKING:

    class TableFields(ConstraintFields):
        pass
else:
    TableFields = create_model("TableFields", __base__=ConstraintFields, **_fields())


class TokenChoice(TableFields):
    """What all four APIs for text take, so that the exact answer can be had by any of them."""

    logit_bias: dict[str, float] | None = None
    seed: Annotated[int | None, FromTable("seed", low=-(2**63))] = None
    top_k: Annotated[int | None, FromTable("top_k", low=-1)] = None
    """0 or -1: all."""
    cache_salt: Annotated[str | None, FromTable("cache_salt")] = Field(None, min_length=1)
    _defaults: Mapping[str, float] = PrivateAttr(default_factory=dict)

    def use_defaults(self, defaults: Mapping[str, float]) -> None:
        self._defaults = defaults

    def effective(self, name: str) -> Any:
        """A parameter as it is used: given, the model's default, or neutral."""
        given = getattr(self, name)
        return self._defaults.get(name, TABLE[name].default) if given is None else given

    def sampling_params(self, stop: str | list[str] | None, **more: Any) -> SamplingParams:
        """`more` are parameters that an API names or defaults differently."""
        names = type(self).model_fields.keys() & TABLE.keys() - {"logit_bias", *more}
        given = present(**{name: getattr(self, name) for name in names})
        given = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in given.items()
        }
        given["stop"] = (stop,) if isinstance(stop, str) else tuple(stop or ())
        if self.top_k is not None:
            given["top_k"] = max(0, self.top_k)
        if self.seed is not None:
            given["seed"] = self.seed % 2**64
        tier = TIERS.get(getattr(self, "service_tier", None) or "", 0)
        if tier and not given.get("priority"):
            given["priority"] = tier
        if self.logit_bias:
            given["logit_bias"] = {_token_id(name): bias for name, bias in self.logit_bias.items()}
        return SamplingParams(**{**self._defaults, **given, **more})


ServiceTier = Literal["auto", "default", "flex", "priority"]
TIERS = {"flex": 100, "priority": -100}
"""Classes of requests that OpenAI's clients ask for, as priorities: the lowest goes first."""


def tier_of(asked: str | None) -> str:
    """The class that a request got."""
    return asked if asked in TIERS else "default"


def tier_field(body: TokenChoice) -> dict[str, str]:
    """What an error about a priority that came from a class names (`GenerationRequest.fields`)."""
    return {} if getattr(body, "priority", 0) else {"priority": "service_tier"}


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

    n: Annotated[int | None, FromTable("n")] = TABLE["n"].default
    temperature: Annotated[float | None, FromTable("temperature")] = None
    top_p: Annotated[float | None, FromTable("top_p")] = None
    stop: str | list[str] | None = None
    prompt_logprobs: Annotated[int | None, FromTable("prompt_logprobs", high=MAX_TOP_LOGPROBS)] = (
        None
    )
    logprob_token_ids: Annotated[
        list[int] | None, FromTable("logprob_token_ids", high=MAX_TOP_LOGPROBS)
    ] = None
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
    "lora_request": "name the adapter as the model",
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
