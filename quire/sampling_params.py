"""How a request is sampled and when it ends. Frozen and checked once, at the border.

The fields of `SamplingParams` are the one table of all parameters: name, neutral value (the
default: a request that does not name a field asks for nothing by it) and what values are allowed.
Checks, the step log, the server's messages and the arrays of `quire.sampling` follow from it.
Whoever uses a parameter reads it by its name; each of those that change how a token is chosen
belongs to one feature in `quire.sampling`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import quire.field_checks as check
from quire.errors import InvalidRequestError

if TYPE_CHECKING:
    from torch import Tensor

MAX_SEED = 2**64 - 1
MAX_N = 128
MAX_LOGPROBS = 100
MAX_STOP_STRINGS = 64
MAX_STOP_TOKENS = 1024
MAX_BIASES = 1024
MAX_BAD_WORDS = 1024
MAX_ALLOWED_TOKENS = 2**20
MAX_STRING = 1024
MAX_LOGITS_PROCESSORS = 16
MAX_SCHEMA = MAX_GRAMMAR = MAX_CHOICE_TEXT = 256 * 1024
MAX_REGEX = 16 * 1024
MAX_CHOICES = 1024
MAX_PREDICTION = 2**20
_MANY = 2**31 - 1

LogitsProcessor = Callable[["Tensor", "Tensor"], "Tensor"]
"""Called as `processor(token_ids, logits)`: the request's tokens so far (int64, prompt included)
and its float32 logits [vocab]; returns the logits to go on with (they may be changed in place).
"""


def _check_schema(name: str, schema: Any) -> str:
    if not isinstance(schema, str | Mapping):
        raise InvalidRequestError(name, f"must be JSON text or an object, not {schema!r}")
    try:
        written = schema if isinstance(schema, str) else json.dumps(dict(schema), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(name, f"can't be written as JSON: {error}") from error
    return check.check_text(name, written, MAX_SCHEMA)


def _check_choices(name: str, value: Any) -> tuple[str, ...]:
    choices = check.checked_strings(name, value, MAX_CHOICES, MAX_CHOICE_TEXT)
    if not choices or sum(len(one.encode("utf-8", "replace")) for one in choices) > MAX_CHOICE_TEXT:
        raise InvalidRequestError(
            name, f"must hold at least one string and at most {MAX_CHOICE_TEXT} bytes in all"
        )
    return choices


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """The form an answer must take: exactly one of the fields is given."""

    json_schema: str | Mapping[str, Any] | None = check.checked(None, _check_schema, optional=True)
    """A JSON schema, as text or as the object it stands for (kept as text)."""
    json_object: bool = check.flag(False)
    """Any JSON object."""
    regex: str | None = check.text(MAX_REGEX)
    """The whole answer matches it."""
    choice: tuple[str, ...] | None = check.checked(None, _check_choices, optional=True)
    """The answer is one of these."""
    grammar: str | None = check.text(MAX_GRAMMAR)
    """A context-free grammar in Lark's notation."""
    control_tokens: tuple[str, ...] = check.strings((), MAX_CHOICES, MAX_CHOICE_TEXT)
    """Control tokens that the grammar names and the model may write; without any, it writes plain
    text only.
    """

    def __post_init__(self) -> None:
        check.check_fields(self, "structured.")
        given = (self.json_schema, self.regex, self.choice, self.grammar)
        if sum(value is not None for value in given) + self.json_object != 1:
            raise InvalidRequestError(
                "structured",
                "must give exactly one of json_schema, json_object, regex, choice, grammar",
            )


@dataclass(frozen=True, slots=True)
class ResolvedTokens:
    """Token ids for the parameters that are text (`quire.frontend.resolve` finds them)."""

    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    """Sequences of tokens that may not be completed."""
    dry_breaker_ids: tuple[int, ...] = ()
    """Tokens no repetition that DRY punishes extends over, ascending."""
    prediction_ids: tuple[int, ...] = ()
    """The client's own idea of the answer."""


def _check_biases(name: str, value: Any) -> tuple[tuple[int, float], ...]:
    """Ascending by id; a tuple of pairs is what an already checked object holds, so copies pass
    too.
    """
    if value is None:
        return ()
    pairs = list(value.items()) if isinstance(value, Mapping) else value
    well_formed = isinstance(pairs, list | tuple) and all(
        isinstance(p, list | tuple) and len(p) == 2 for p in pairs
    )
    if not well_formed or len(pairs) > MAX_BIASES:
        raise InvalidRequestError(name, f"must map at most {MAX_BIASES} token ids to numbers")
    for token_id, bias in pairs:
        check.check_int(name, token_id, 0, check.MAX_TOKEN_ID)
        check.check_real(name, bias, -100.0, 100.0)
    if len({int(token_id) for token_id, _ in pairs}) < len(pairs):
        raise InvalidRequestError(name, "names a token id twice")
    return tuple(sorted((int(token_id), float(bias)) for token_id, bias in pairs))


def _check_structured(name: str, value: Any) -> StructuredOutput:
    if isinstance(value, Mapping):
        unknown = set(value) - set(StructuredOutput.__dataclass_fields__)
        if unknown:
            raise InvalidRequestError(name, f"has no field {min(map(repr, unknown))}")
        return StructuredOutput(**value)
    if not isinstance(value, StructuredOutput):
        raise InvalidRequestError(name, f"must be a StructuredOutput, not {value!r}")
    return value


def _check_processors(name: str, value: Any) -> tuple[LogitsProcessor, ...]:
    if (
        not isinstance(value, list | tuple)
        or len(value) > MAX_LOGITS_PROCESSORS
        or not all(map(callable, value))
    ):
        raise InvalidRequestError(
            name, f"must be a list of at most {MAX_LOGITS_PROCESSORS} functions"
        )
    return tuple(value)


def _check_salt(name: str, value: Any) -> str:
    if not isinstance(value, str) or len(value) > MAX_STRING:
        raise InvalidRequestError(name, f"must be a string of at most {MAX_STRING} characters")
    return value


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling, stopping and output controls of one request.

    The next token is `argmax(logits / temperature + Gumbel(seed, position))` after the masks,
    biases and penalties and over what the filters leave; `temperature=0` is the plain argmax, the
    lowest id winning ties. The order of everything is in `quire.sampling.sampler` and
    docs/sampling.md.
    """

    temperature: float = check.real(1.0, 0.0, 100.0)
    """0 for greedy, and so is what is below 1e-5; at most 100."""
    top_k: int = check.whole(0, 0, _MANY)
    """Keep the k most likely tokens; 0 keeps all. Ties with the k-th are kept."""
    top_p: float = check.real(1.0, 0.0, 1.0, low_open=True)
    """Keep the smallest set of most likely tokens whose probability reaches p, and ties; 1 keeps
    all.
    """
    min_p: float = check.real(0.0, 0.0, 1.0)
    """Keep the tokens at least this many times as likely as the likeliest; 0 keeps all."""
    typical_p: float = check.real(1.0, 0.0, 1.0, low_open=True)
    """Keep the tokens whose surprise is nearest the expected one, until their probability reaches
    this.
    """
    top_n_sigma: float = check.real(0.0, 0.0, 1000.0)
    """Keep the tokens whose logit is within this many standard deviations of the highest; 0 keeps
    all.
    """
    repetition_penalty: float = check.real(1.0, 0.0, 100.0, low_open=True)
    """Logits of tokens in the prompt or the answer are divided by it if positive, multiplied if
    negative.
    """
    presence_penalty: float = check.real(0.0, -2.0, 2.0)
    """Subtracted from the logits of tokens in the answer."""
    frequency_penalty: float = check.real(0.0, -2.0, 2.0)
    """Subtracted from the logits of tokens in the answer, once for every time they are there."""
    no_repeat_ngram_size: int = check.whole(0, 0, 64)
    """No n tokens in a row occur twice (prompt included); 0 allows it."""
    dry_multiplier: float = check.real(0.0, 0.0, 100.0)
    """DRY: a token that would extend a repetition of n tokens loses multiplier * base**(n - allowed
    length).
    """
    dry_base: float = check.real(1.75, 1.0, 100.0)
    dry_allowed_length: int = check.whole(2, 1, 64)
    """Repetitions shorter than this cost nothing."""
    dry_sequence_breakers: tuple[str, ...] = check.strings(
        ("\n", ":", '"', "*"), MAX_STOP_STRINGS, MAX_STRING
    )
    """No repetition extends over a token that contains one of these."""
    xtc_probability: float = check.real(0.0, 0.0, 1.0)
    """XTC: the chance that, of the tokens with at least xtc_threshold probability, only the least
    likely stays.
    """
    xtc_threshold: float = check.real(0.1, 0.0, 1.0)
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] | None = check.checked(
        None, _check_biases
    )
    """Added to the logits of token ids, -100 to 100 each (kept as a tuple of pairs, ascending by
    id).
    """
    allowed_token_ids: tuple[int, ...] | None = check.token_ids(
        None, MAX_ALLOWED_TOKENS, least=1, optional=True
    )
    """Only these can be chosen; None allows all. End-of-sequence tokens have to be listed to be
    allowed.
    """
    bad_words: tuple[str, ...] = check.strings((), MAX_BAD_WORDS, MAX_STRING)
    """Words the answer can't contain, where they are written with the tokens the tokenizer gives
    them.
    """
    seed: int | None = check.whole(None, 0, MAX_SEED, optional=True)
    """0 to 2**64-1. Same request, same seed: same tokens. None draws one, which the output reports."""
    max_tokens: int | None = check.whole(256, 1, _MANY, optional=True)
    """At most this many new tokens; None goes on until the model ends or its context is full."""
    min_tokens: int = check.whole(0, 0, _MANY)
    """The end-of-sequence and stop tokens can't be chosen before this many new tokens."""
    ignore_eos: bool = check.flag(False)
    """Go on past the model's end-of-sequence tokens."""
    stop: tuple[str, ...] = check.strings((), MAX_STOP_STRINGS, MAX_STRING)
    """Strings that end the answer (one string may be given as it is)."""
    stop_token_ids: tuple[int, ...] = check.token_ids((), MAX_STOP_TOKENS)
    """Further tokens that end the answer."""
    include_stop_str_in_output: bool = check.flag(False)
    """Leave the stop string, or the text of the stop token, that ended the answer in its text."""
    n: int = check.whole(1, 1, MAX_N)
    """How many answers; answer i is what a request of its own with seed + i would give."""
    best_of: int | None = check.whole(None, 1, MAX_N, optional=True)
    """Generate this many and return the `n` with the highest mean logprob."""
    logprobs: int | None = check.whole(None, 0, MAX_LOGPROBS, optional=True)
    """Report each answer token's logprob and those of this many most likely tokens; None reports
    nothing.
    """
    logprob_token_ids: tuple[int, ...] = check.token_ids((), MAX_LOGPROBS)
    """Report the logprobs of these tokens, too, wherever logprobs are reported: needs `logprobs`."""
    prompt_logprobs: int | None = check.whole(None, 0, MAX_LOGPROBS, optional=True)
    """The same for the prompt's tokens."""
    skip_special_tokens: bool = check.flag(True)
    """Leave special tokens out of the text."""
    spaces_between_special_tokens: bool = check.flag(True)
    """Leave the spaces that the tokenizer's decoder puts between special tokens that are shown. No
    decoder that Quire accepts puts any there, so neither value changes a text.
    """
    cache_salt: str | None = check.checked(None, _check_salt, optional=True)
    """Requests share cached prefixes only with requests of the same salt."""
    priority: int = check.whole(0, -(2**31), _MANY)
    """Lower goes first, under the engine's `priority` policy."""
    deadline: float | None = check.real(
        None, 0.0, math.inf, low_open=True, high_open=True, optional=True
    )
    """Seconds from arrival after which the request ends with finish_reason "deadline"."""
    structured: StructuredOutput | None = check.checked(None, _check_structured, optional=True)  # noqa: RUF009
    """The form the answer must take (a mapping of StructuredOutput's fields will do)."""
    speculation: bool = check.flag(True)
    """Whether the engine's speculation may be used for this request. The answer is the same either
    way.
    """
    prediction: str | None = check.text(MAX_PREDICTION)
    """What the answer may be, or be like (a file that is to be changed a little): its tokens are
    guesses. The answer is the same with any prediction, and comes the sooner the better it is.
    """
    logits_processors: tuple[LogitsProcessor, ...] = check.checked((), _check_processors)
    """Python functions over one row's logits, for the offline API; each costs a call per token."""

    def __post_init__(self) -> None:
        check.check_fields(self)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                "min_tokens", f"is {self.min_tokens}, more than max_tokens ({self.max_tokens})"
            )
        if self.logprob_token_ids and self.logprobs is None:
            raise InvalidRequestError(
                "logprob_token_ids", "needs logprobs: 0 reports these tokens alone"
            )
        if self.best_of is not None and self.best_of < self.n:
            raise InvalidRequestError("best_of", f"is {self.best_of}, less than n ({self.n})")
        if self.best_of is not None and self.best_of > 1 and self.temperature == 0:
            raise InvalidRequestError(
                "best_of", "needs a temperature above 0: greedy answers are all the same"
            )

    def end_token_ids(self, eos_token_ids: tuple[int, ...]) -> tuple[int, ...]:
        """The tokens that end an answer of a model with these end-of-sequence tokens."""
        return (*(() if self.ignore_eos else eos_token_ids), *self.stop_token_ids)

    def check_token_ids(self, vocab_size: int) -> None:
        """Refuses ids outside the model's vocabulary; called by `LLM` and the server, which know
        the model.
        """
        fields = (
            ("stop_token_ids", self.stop_token_ids),
            ("logprob_token_ids", self.logprob_token_ids),
            ("allowed_token_ids", self.allowed_token_ids or ()),
            ("logit_bias", dict(self.logit_bias or ())),
        )
        for field, given in fields:
            if given and max(given) >= vocab_size:
                wrong = next(token_id for token_id in given if token_id >= vocab_size)
                raise InvalidRequestError(
                    field, f"{wrong} is outside the vocabulary of {vocab_size}"
                )
            if len(given) > vocab_size:
                raise InvalidRequestError(
                    field,
                    f"has {len(given)} ids, more than the vocabulary of {vocab_size}: name each once",
                )
