"""How a request is sampled and when it ends. Frozen and checked once, at the border."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from quire.errors import InvalidRequestError

MAX_SEED = 2**64 - 1
MAX_N = 128


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling and stopping controls of one request.

    The next token is `argmax(logits / temperature + Gumbel(seed, position))` over what `top_k` and then
    `top_p` leave; `temperature=0` is the plain argmax with the lowest id winning ties.
    """

    temperature: float = 1.0
    """0 for greedy; at most 100."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all. Ties with the k-th are kept."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose probability reaches p; 1 keeps all."""
    seed: int | None = None
    """0 to 2**64-1. Same request, same seed: same tokens. None draws one, which the output reports."""
    max_tokens: int | None = 256
    """At most this many new tokens; None goes on until the model ends or its context is full."""
    min_tokens: int = 0
    """The end-of-sequence and stop tokens can't be chosen before this many new tokens."""
    ignore_eos: bool = False
    """Go on past the model's end-of-sequence tokens."""
    stop_token_ids: tuple[int, ...] = ()
    """Further tokens that end the answer."""
    n: int = 1
    """How many answers; answer i is what a request of its own with seed + i would give."""
    priority: int = 0
    """Lower goes first, under the engine's `priority` policy."""
    deadline: float | None = None
    """Seconds from arrival after which the request ends with finish_reason "deadline"."""
    cache_salt: str | None = None
    """Requests share cached prefixes only with requests of the same salt."""

    def __post_init__(self) -> None:
        _check_real("temperature", self.temperature, 0.0, 100.0)
        _check_int("top_k", self.top_k, 0, 2**31 - 1)
        _check_real("top_p", self.top_p, 0.0, 1.0, low_open=True)
        if self.seed is not None:
            _check_int("seed", self.seed, 0, MAX_SEED)
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _check_int("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError("min_tokens", f"is {self.min_tokens}, more than max_tokens ({self.max_tokens})")
        _check_bool("ignore_eos", self.ignore_eos)
        object.__setattr__(self, "stop_token_ids", _checked_ids("stop_token_ids", self.stop_token_ids))
        _check_int("n", self.n, 1, MAX_N)
        _check_int("priority", self.priority, -(2**31), 2**31 - 1)
        if self.deadline is not None:
            _check_real("deadline", self.deadline, 0.0, math.inf, low_open=True, high_open=True)
        if self.cache_salt is not None and not (isinstance(self.cache_salt, str) and len(self.cache_salt) <= 1024):
            raise InvalidRequestError("cache_salt", "must be a string of at most 1024 characters")


def _checked_ids(field: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list | tuple) or len(value) > 1024:
        raise InvalidRequestError(field, "must be a list of at most 1024 token ids")
    for token_id in value:
        _check_int(field, token_id, 0, 2**31 - 1)
    return tuple(value)


def _check_bool(field: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise InvalidRequestError(field, f"must be true or false, not {value!r}")


def _check_int(field: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise InvalidRequestError(field, f"must be a whole number, not {value!r}")
    if not low <= int(value) <= high:
        raise InvalidRequestError(field, f"must be from {low} to {high}, not {value}")


def _check_real(
    field: str, value: Any, low: float, high: float, *, low_open: bool = False, high_open: bool = False
) -> None:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise InvalidRequestError(field, f"must be a number, not {value!r}")
    number = float(value)
    too_low = number <= low if low_open else number < low
    too_high = number >= high if high_open else number > high
    if math.isnan(number) or too_low or too_high:
        words = f"{'above' if low_open else 'at least'} {low:g} and {'below' if high_open else 'at most'} {high:g}"
        raise InvalidRequestError(field, f"must be {words}, not {value!r}")
