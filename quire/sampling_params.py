"""How a request is sampled and when it ends. Frozen and checked once, at the border."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quire.errors import InvalidRequestError
from quire.field_checks import MAX_TOKEN_ID, check_bool, check_int, check_real, checked_ids, checked_strings

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
_MANY = 2**31 - 1

LogitsProcessor = Callable[["Tensor", "Tensor"], "Tensor"]
"""Called as `processor(token_ids, logits)`: the request's tokens so far (int64, prompt included) and its
float32 logits [vocab]; returns the logits to go on with (they may be changed in place)."""


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """The form an answer must take: exactly one of the fields is given."""

    json_schema: str | Mapping[str, Any] | None = None
    """A JSON schema, as text or as the object it stands for (kept as text)."""
    json_object: bool = False
    """Any JSON object."""
    regex: str | None = None
    """The whole answer matches it."""
    choice: tuple[str, ...] | None = None
    """The answer is one of these."""
    grammar: str | None = None
    """A context-free grammar in Lark's notation."""

    def __post_init__(self) -> None:
        check_bool("structured.json_object", self.json_object)
        given = (self.json_schema, self.regex, self.choice, self.grammar)
        if sum(value is not None for value in given) + self.json_object != 1:
            raise InvalidRequestError(
                "structured", "must give exactly one of json_schema, json_object, regex, choice, grammar"
            )
        if self.json_schema is not None and not isinstance(self.json_schema, str):
            object.__setattr__(self, "json_schema", _schema_text(self.json_schema))
        _check_text("structured.json_schema", self.json_schema, MAX_SCHEMA)
        _check_text("structured.regex", self.regex, MAX_REGEX)
        _check_text("structured.grammar", self.grammar, MAX_GRAMMAR)
        if self.choice is not None:
            choices = checked_strings("structured.choice", self.choice, MAX_CHOICES, MAX_CHOICE_TEXT)
            if not choices or sum(len(text.encode("utf-8", "replace")) for text in choices) > MAX_CHOICE_TEXT:
                raise InvalidRequestError(
                    "structured.choice", f"must hold at least one string and at most {MAX_CHOICE_TEXT} bytes in all"
                )
            object.__setattr__(self, "choice", choices)


@dataclass(frozen=True, slots=True)
class ResolvedTokens:
    """What the parameters that are text mean in the model's tokens (`quire.frontend.resolve` finds them)."""

    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    """Sequences of tokens that may not be completed."""
    dry_breaker_ids: tuple[int, ...] = ()
    """Tokens no repetition that DRY punishes extends over, ascending."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling, stopping and output controls of one request.

    The next token is `argmax(logits / temperature + Gumbel(seed, position))` after the masks, biases and
    penalties and over what the filters leave; `temperature=0` is the plain argmax, the lowest id winning
    ties. The order of everything is in `quire.runner.sampler` and docs/sampling.md.
    """

    temperature: float = 1.0
    """0 for greedy, and so is what is below 1e-5; at most 100."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all. Ties with the k-th are kept."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose probability reaches p, and ties; 1 keeps all."""
    min_p: float = 0.0
    """Keep the tokens at least this many times as likely as the likeliest; 0 keeps all."""
    typical_p: float = 1.0
    """Keep the tokens whose surprise is nearest the expected one, until their probability reaches this."""
    top_n_sigma: float = 0.0
    """Keep the tokens whose logit is within this many standard deviations of the highest; 0 keeps all."""
    repetition_penalty: float = 1.0
    """Logits of tokens in the prompt or the answer are divided by it if positive, multiplied if negative."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens in the answer."""
    frequency_penalty: float = 0.0
    """Subtracted from the logits of tokens in the answer, once for every time they are there."""
    no_repeat_ngram_size: int = 0
    """No n tokens in a row occur twice (prompt included); 0 allows it."""
    dry_multiplier: float = 0.0
    """DRY: a token that would extend a repetition of n tokens loses multiplier * base**(n - allowed length)."""
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    """Repetitions shorter than this cost nothing."""
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    """No repetition extends over a token that contains one of these."""
    xtc_probability: float = 0.0
    """XTC: the chance that, of the tokens with at least xtc_threshold probability, only the least likely stays."""
    xtc_threshold: float = 0.1
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] | None = None
    """Added to the logits of token ids, -100 to 100 each (kept as a tuple of pairs, ascending by id)."""
    allowed_token_ids: tuple[int, ...] | None = None
    """Only these can be chosen; None allows all. End-of-sequence tokens have to be listed to be allowed."""
    bad_words: tuple[str, ...] = ()
    """Words the answer can't contain, where they are written with the tokens the tokenizer gives them."""
    seed: int | None = None
    """0 to 2**64-1. Same request, same seed: same tokens. None draws one, which the output reports."""
    max_tokens: int | None = 256
    """At most this many new tokens; None goes on until the model ends or its context is full."""
    min_tokens: int = 0
    """The end-of-sequence and stop tokens can't be chosen before this many new tokens."""
    ignore_eos: bool = False
    """Go on past the model's end-of-sequence tokens."""
    stop: tuple[str, ...] = ()
    """Strings that end the answer (one string may be given as it is)."""
    stop_token_ids: tuple[int, ...] = ()
    """Further tokens that end the answer."""
    include_stop_str_in_output: bool = False
    """Leave the stop string, or the text of the stop token, that ended the answer in its text."""
    n: int = 1
    """How many answers; answer i is what a request of its own with seed + i would give."""
    best_of: int | None = None
    """Generate this many and return the `n` with the highest mean logprob."""
    logprobs: int | None = None
    """Report each answer token's logprob and those of this many most likely tokens; None reports nothing."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    spaces_between_special_tokens: bool = True
    """Leave the spaces that the tokenizer's decoder puts between special tokens that are shown. No decoder that
    Quire accepts puts any there, so neither value changes a text."""
    cache_salt: str | None = None
    """Requests share cached prefixes only with requests of the same salt."""
    priority: int = 0
    """Lower goes first, under the engine's `priority` policy."""
    deadline: float | None = None
    """Seconds from arrival after which the request ends with finish_reason "deadline"."""
    structured: StructuredOutput | None = None
    """The form the answer must take (a mapping of StructuredOutput's fields will do)."""
    logits_processors: tuple[LogitsProcessor, ...] = ()
    """Python functions over one row's logits, for the offline API; each costs a call per token."""

    def __post_init__(self) -> None:
        self._check_choice()
        self._check_penalties()
        self._check_masks()
        self._check_ending()
        self._check_output()

    def check_token_ids(self, vocab_size: int) -> None:
        """Refuses ids the model does not have; the border calls it, for only there the model is known."""
        fields = (
            ("stop_token_ids", self.stop_token_ids),
            ("allowed_token_ids", self.allowed_token_ids or ()),
            ("logit_bias", dict(self.logit_bias or ())),
        )
        for field, token_ids in fields:
            if token_ids and max(token_ids) >= vocab_size:
                wrong = next(token_id for token_id in token_ids if token_id >= vocab_size)
                raise InvalidRequestError(field, f"{wrong} is outside the vocabulary of {vocab_size}")
            if len(token_ids) > vocab_size:
                raise InvalidRequestError(
                    field, f"has {len(token_ids)} ids, more than the vocabulary of {vocab_size}: name each once"
                )

    def _check_choice(self) -> None:
        check_real("temperature", self.temperature, 0.0, 100.0)
        check_int("top_k", self.top_k, 0, _MANY)
        check_real("top_p", self.top_p, 0.0, 1.0, low_open=True)
        check_real("min_p", self.min_p, 0.0, 1.0)
        check_real("typical_p", self.typical_p, 0.0, 1.0, low_open=True)
        check_real("top_n_sigma", self.top_n_sigma, 0.0, 1000.0)
        check_real("xtc_probability", self.xtc_probability, 0.0, 1.0)
        check_real("xtc_threshold", self.xtc_threshold, 0.0, 1.0)
        if self.seed is not None:
            check_int("seed", self.seed, 0, MAX_SEED)

    def _check_penalties(self) -> None:
        check_real("repetition_penalty", self.repetition_penalty, 0.0, 100.0, low_open=True)
        check_real("presence_penalty", self.presence_penalty, -2.0, 2.0)
        check_real("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        check_int("no_repeat_ngram_size", self.no_repeat_ngram_size, 0, 64)
        check_real("dry_multiplier", self.dry_multiplier, 0.0, 100.0)
        check_real("dry_base", self.dry_base, 1.0, 100.0)
        check_int("dry_allowed_length", self.dry_allowed_length, 1, 64)
        self._store(
            "dry_sequence_breakers",
            checked_strings("dry_sequence_breakers", self.dry_sequence_breakers, MAX_STOP_STRINGS, MAX_STRING),
        )

    def _check_masks(self) -> None:
        self._store("logit_bias", _bias_pairs(self.logit_bias))
        if self.allowed_token_ids is not None:
            allowed = checked_ids("allowed_token_ids", self.allowed_token_ids, MAX_ALLOWED_TOKENS)
            if not allowed:
                raise InvalidRequestError("allowed_token_ids", "must hold at least one token id")
            self._store("allowed_token_ids", allowed)
        self._store("bad_words", checked_strings("bad_words", self.bad_words, MAX_BAD_WORDS, MAX_STRING))
        form: Any = self.structured
        if isinstance(form, Mapping):
            self._store("structured", _structured_output(form))
        elif form is not None and not isinstance(form, StructuredOutput):
            raise InvalidRequestError("structured", f"must be a StructuredOutput, not {form!r}")
        processors = self.logits_processors
        if (
            not isinstance(processors, list | tuple)
            or len(processors) > MAX_LOGITS_PROCESSORS
            or not all(callable(processor) for processor in processors)
        ):
            raise InvalidRequestError(
                "logits_processors", f"must be a list of at most {MAX_LOGITS_PROCESSORS} functions"
            )
        self._store("logits_processors", tuple(processors))

    def _check_ending(self) -> None:
        if self.max_tokens is not None:
            check_int("max_tokens", self.max_tokens, 1, _MANY)
        check_int("min_tokens", self.min_tokens, 0, _MANY)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError("min_tokens", f"is {self.min_tokens}, more than max_tokens ({self.max_tokens})")
        check_bool("ignore_eos", self.ignore_eos)
        self._store("stop", checked_strings("stop", self.stop, MAX_STOP_STRINGS, MAX_STRING))
        self._store("stop_token_ids", checked_ids("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKENS))
        check_bool("include_stop_str_in_output", self.include_stop_str_in_output)
        if self.deadline is not None:
            check_real("deadline", self.deadline, 0.0, math.inf, low_open=True, high_open=True)

    def _check_output(self) -> None:
        check_int("n", self.n, 1, MAX_N)
        if self.best_of is not None:
            check_int("best_of", self.best_of, 1, MAX_N)
            if self.best_of < self.n:
                raise InvalidRequestError("best_of", f"is {self.best_of}, less than n ({self.n})")
            if self.best_of > 1 and self.temperature == 0:
                raise InvalidRequestError("best_of", "needs a temperature above 0: greedy answers are all the same")
        for field in ("logprobs", "prompt_logprobs"):
            if getattr(self, field) is not None:
                check_int(field, getattr(self, field), 0, MAX_LOGPROBS)
        check_bool("skip_special_tokens", self.skip_special_tokens)
        check_bool("spaces_between_special_tokens", self.spaces_between_special_tokens)
        check_int("priority", self.priority, -(2**31), _MANY)
        if self.cache_salt is not None and not (
            isinstance(self.cache_salt, str) and len(self.cache_salt) <= MAX_STRING
        ):
            raise InvalidRequestError("cache_salt", f"must be a string of at most {MAX_STRING} characters")

    def _store(self, field: str, value: object) -> None:
        object.__setattr__(self, field, value)


def _bias_pairs(value: Any) -> tuple[tuple[int, float], ...]:
    """Ascending by id; a tuple of pairs is what an already checked object holds, so copies pass too."""
    if value is None:
        return ()
    pairs = list(value.items()) if isinstance(value, Mapping) else value
    well_formed = isinstance(pairs, list | tuple) and all(isinstance(p, list | tuple) and len(p) == 2 for p in pairs)
    if not well_formed or len(pairs) > MAX_BIASES:
        raise InvalidRequestError("logit_bias", f"must map at most {MAX_BIASES} token ids to numbers")
    for token_id, bias in pairs:
        check_int("logit_bias", token_id, 0, MAX_TOKEN_ID)
        check_real("logit_bias", bias, -100.0, 100.0)
    if len({int(token_id) for token_id, _ in pairs}) < len(pairs):
        raise InvalidRequestError("logit_bias", "names a token id twice")
    return tuple(sorted((int(token_id), float(bias)) for token_id, bias in pairs))


def _structured_output(fields: Mapping[str, Any]) -> StructuredOutput:
    unknown = set(fields) - set(StructuredOutput.__dataclass_fields__)
    if unknown:
        raise InvalidRequestError("structured", f"has no field {min(map(repr, unknown))}")
    return StructuredOutput(**fields)


def _schema_text(schema: Any) -> str:
    if not isinstance(schema, Mapping):
        raise InvalidRequestError("structured.json_schema", f"must be JSON text or an object, not {schema!r}")
    try:
        return json.dumps(dict(schema), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError("structured.json_schema", f"can't be written as JSON: {error}") from error


def _check_text(field: str, value: Any, longest: int) -> None:
    if value is None:
        return
    if not isinstance(value, str) or not value or len(value.encode("utf-8", "replace")) > longest:
        raise InvalidRequestError(field, f"must be a text of 1 to {longest} bytes")
