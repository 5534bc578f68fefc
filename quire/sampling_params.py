"""How a request is sampled and when it ends. Frozen and checked once, at the border.

The fields of `SamplingParams` are the one table of all parameters: name, neutral value (the
default: a request that does not name a field asks for nothing by it), what values are allowed, what
it is for and who may set it. Checks, request bodies, options of commands, the page's form, docs, the
step log, the server's messages and the arrays of `quire.sampling` follow from it.
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
    """What names and text in a request stand for: token ids (`quire.frontend.resolve` finds them),
    and the content of its adapter.
    """

    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    """Sequences of tokens that may not be completed."""
    dry_breaker_ids: tuple[int, ...] = ()
    """Tokens no repetition that DRY punishes extends over, ascending."""
    prediction_ids: tuple[int, ...] = ()
    """The client's own idea of the answer."""
    adapter: str = ""
    """The digest of its adapter's content; nothing: it has none."""
    adapter_name: str = ""
    """What the caller calls it, for logs; it may stand for other content later."""


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
        raise InvalidRequestError(name, f"must be a StructuredOutput, not {check.shown(value)}")
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

    temperature: float = check.real(
        1.0, 0.0, 100.0, help="0 always takes the most likely token; higher is more varied."
    )
    """What is below 1e-5 is 0."""
    top_k: int = check.whole(
        0, 0, help="Keep the k most likely tokens, and ties with the k-th; 0 keeps all."
    )
    top_p: float = check.real(
        1.0,
        0.0,
        1.0,
        low_open=True,
        help="Keep the most likely tokens whose probability reaches p, and ties; 1 keeps all.",
    )
    min_p: float = check.real(
        0.0,
        0.0,
        1.0,
        help="Keep the tokens at least this many times as likely as the likeliest; 0 keeps all.",
    )
    typical_p: float = check.real(
        1.0,
        0.0,
        1.0,
        low_open=True,
        help="Keep the tokens whose surprise is nearest the expected one, up to this probability.",
    )
    top_n_sigma: float = check.real(
        0.0,
        0.0,
        1000.0,
        help="Keep logits within this many standard deviations of the highest; 0 keeps all.",
    )
    repetition_penalty: float = check.real(
        1.0,
        0.0,
        100.0,
        low_open=True,
        help="Divide positive logits of tokens in prompt and answer by it, multiply negative ones.",
    )
    presence_penalty: float = check.real(
        0.0, -2.0, 2.0, help="Subtract it from the logits of tokens in the answer."
    )
    frequency_penalty: float = check.real(
        0.0, -2.0, 2.0, help="Subtract it from a token's logit for each time the answer has it."
    )
    no_repeat_ngram_size: int = check.whole(
        0, 0, 64, help="No n tokens in a row occur twice, prompt included; 0 allows it."
    )
    dry_multiplier: float = check.real(
        0.0,
        0.0,
        100.0,
        help="DRY: what extends a repetition of n tokens loses multiplier * base**(n - length).",
    )
    dry_base: float = check.real(1.75, 1.0, 100.0, help="DRY: how fast the penalty grows.")
    dry_allowed_length: int = check.whole(
        2, 1, 64, help="DRY: repetitions shorter than this cost nothing."
    )
    dry_sequence_breakers: tuple[str, ...] = check.strings(
        ("\n", ":", '"', "*"),
        MAX_STOP_STRINGS,
        MAX_STRING,
        help="DRY: no repetition extends over a token that contains one of these.",
    )
    xtc_probability: float = check.real(
        0.0, 0.0, 1.0, help="XTC: the chance that of the likely tokens only the least likely stays."
    )
    xtc_threshold: float = check.real(
        0.1, 0.0, 1.0, help="XTC: tokens of at least this probability are likely."
    )
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] | None = check.checked(
        None,
        _check_biases,
        f"up to {MAX_BIASES} token ids with -100 to 100 each",
        help="Added to the logits of these tokens.",
    )
    """Kept as a tuple of pairs, ascending by id."""
    allowed_token_ids: tuple[int, ...] | None = check.token_ids(
        None,
        MAX_ALLOWED_TOKENS,
        least=1,
        optional=True,
        help="Only these can be chosen, end-of-sequence tokens among them if they are to be.",
    )
    bad_words: tuple[str, ...] = check.strings(
        (), MAX_BAD_WORDS, MAX_STRING, help="Words that the answer can't contain."
    )
    """Where they are written with the tokens that the tokenizer gives them."""
    seed: int | None = check.whole(
        None,
        0,
        MAX_SEED,
        optional=True,
        help="The same request and seed always give the same answer.",
    )
    """None draws one, which the output reports."""
    max_tokens: int | None = check.whole(
        256, 1, optional=True, help="At most this many new tokens."
    )
    """None goes on until the model ends or its context is full."""
    min_tokens: int = check.whole(
        0, 0, help="End-of-sequence and stop tokens can't be chosen before this many new tokens."
    )
    ignore_eos: bool = check.flag(False, help="Go on past the model's end-of-sequence tokens.")
    stop: tuple[str, ...] = check.strings(
        (), MAX_STOP_STRINGS, MAX_STRING, help="Strings that end the answer.", page=True
    )
    """One string may be given as it is."""
    stop_token_ids: tuple[int, ...] = check.token_ids(
        (), MAX_STOP_TOKENS, help="Further tokens that end the answer."
    )
    include_stop_str_in_output: bool = check.flag(
        False, help="Leave the stop string or stop token that ended the answer in its text."
    )
    n: int = check.whole(1, 1, MAX_N, cli=False, page=False, help="How many answers.")
    """Answer i is what a request of its own with seed + i would give."""
    best_of: int | None = check.whole(
        None,
        1,
        MAX_N,
        optional=True,
        cli=False,
        page=False,
        help="Generate this many and return the n with the highest mean logprob.",
    )
    logprobs: int | None = check.whole(
        None,
        0,
        MAX_LOGPROBS,
        optional=True,
        cli=False,
        page=False,
        help="Report each answer token's logprob and those of this many most likely tokens.",
    )
    logprob_token_ids: tuple[int, ...] = check.token_ids(
        (), MAX_LOGPROBS, help="Report the logprobs of these tokens, too; needs logprobs."
    )
    prompt_logprobs: int | None = check.whole(
        None,
        0,
        MAX_LOGPROBS,
        optional=True,
        cli=False,
        page=False,
        help="Report logprobs of the prompt's tokens, too.",
    )
    skip_special_tokens: bool = check.flag(True, help="Leave special tokens out of the text.")
    spaces_between_special_tokens: bool = check.flag(
        True, cli=False, help="Changes nothing: no tokenizer that Quire accepts adds such spaces."
    )
    cache_salt: str | None = check.checked(
        None,
        _check_salt,
        f"text of up to {MAX_STRING} characters",
        optional=True,
        help="Share cached prefixes only with requests of the same salt.",
    )
    weights_version: int | None = check.whole(
        None,
        0,
        2**63 - 1,
        optional=True,
        cli=False,
        page=False,
        help="Answer by this version of the weights and no other, or refuse.",
    )
    priority: int = check.whole(
        0,
        -(2**31),
        cli=False,
        page=False,
        help="Lower goes first, under the engine's `priority` policy.",
    )
    tenant: str = check.checked(
        "",
        _check_salt,
        f"text of up to {MAX_STRING} characters",
        api=False,
        cli=False,
        page=False,
        help="Whose request it is, under the engine's `fair` policy.",
    )
    """The server takes the key that a request came with."""
    deadline: float | None = check.real(
        None,
        0.0,
        math.inf,
        low_open=True,
        high_open=True,
        optional=True,
        page=False,
        help="Seconds after which the request ends.",
    )
    """From its arrival; the finish_reason is "deadline"."""
    structured: StructuredOutput | None = check.checked(  # noqa: RUF009
        None,
        _check_structured,
        "a StructuredOutput",
        optional=True,
        api=False,
        help="The form the answer must take.",
    )
    """A mapping of StructuredOutput's fields will do. Every API has its own names for it."""
    speculation: bool = check.flag(
        True, cli=False, help="Let the engine speculate; the answer is the same either way."
    )
    prediction: str | None = check.text(
        MAX_PREDICTION,
        api=False,
        help="What the answer may be, or be like: its tokens are drafts. The answer is the same.",
    )
    """A file that is to be changed a little, say. The better it is, the sooner the answer comes."""
    logits_processors: tuple[LogitsProcessor, ...] = check.checked(
        (),
        _check_processors,
        f"up to {MAX_LOGITS_PROCESSORS} functions",
        api=False,
        help="Python functions over one row's logits; each costs a call per token.",
    )

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
