"""What a caller of the Python API gives: prompts and parameters, checked at the border, so that
what is wrong is named there and never reaches the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from quire.errors import InvalidRequestError
from quire.sampling_params import SamplingParams

Prompt = str | Sequence[int]


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """A prompt in token ids."""

    text: str | None
    token_ids: list[int]
    continues: bool
    """Whether the answer goes on with the prompt's text; in a chat it is a new turn."""


def as_prompts(prompts: object) -> list[Prompt]:
    """One prompt or several, as a list. A list of whole numbers is one prompt in token ids."""
    if isinstance(prompts, str):
        return [prompts]
    if not _is_list(prompts):
        raise _wrong("prompts", "text, a list of token ids, or a list of such prompts", prompts)
    if prompts and all(isinstance(item, int) and not isinstance(item, bool) for item in prompts):
        return [prompts]
    return list(prompts)


def check_prompt(prompt: object, vocab_size: int) -> list[int] | None:
    """The token ids of a prompt; None for text, which is yet to be encoded."""
    if isinstance(prompt, str):
        return None
    return check_token_ids(prompt, vocab_size, "prompt", "text or ")


def check_text(text: object) -> str:
    if not isinstance(text, str):
        raise _wrong("text", "text", text)
    return text


def check_token_ids(
    given: object, vocab_size: int, field: str = "token_ids", other: str = ""
) -> list[int]:
    """Token ids that a vocabulary has; `other` is what else might have been given."""
    if not _is_list(given):
        raise _wrong(field, f"{other}a list of token ids", given)
    for token_id in given:
        if isinstance(token_id, bool) or not isinstance(token_id, int):
            raise InvalidRequestError(field, f"must be {other}token ids, not {token_id!r}")
        if not 0 <= token_id < vocab_size:
            raise InvalidRequestError(
                field, f"token id {token_id} is out of vocabulary: ids are 0 to {vocab_size - 1}"
            )
    return list(given)


def as_conversations(messages: object) -> list[Any]:
    """One conversation or several, as a list; what is in one is checked where its template is
    filled.
    """
    if not _is_list(messages):
        raise _wrong("messages", "a list of messages, or a list of such lists", messages)
    return list(messages) if messages and all(_is_list(one) for one in messages) else [messages]


def as_params(params: object, count: int) -> list[SamplingParams | None]:
    """Parameters for each of `count` prompts."""
    if not _is_list(params):
        return [check_params(params)] * count
    if len(params) != count:
        raise InvalidRequestError(
            "params", f"there are {len(params)} for {count} prompts; give one, or one each"
        )
    return [check_params(one) for one in params]


def check_params(params: object) -> SamplingParams | None:
    """The parameters of one prompt; None are the defaults."""
    if params is None or isinstance(params, SamplingParams):
        return params
    raise _wrong("params", "SamplingParams, as in SamplingParams(temperature=0)", params)


def check_streamed(params: object) -> SamplingParams:
    """The parameters of an answer that is given in pieces."""
    params = check_params(params) or SamplingParams()
    if params.n != 1:
        raise InvalidRequestError("n", "a stream carries one answer; use generate for more")
    if params.best_of not in (None, 1):
        raise InvalidRequestError(
            "best_of", "can't be streamed: the best is known at the end; use generate"
        )
    return params


def check_id(request_id: object) -> str:
    if not isinstance(request_id, str) or not request_id:
        raise _wrong("request_id", "a text that is not empty", request_id)
    return request_id


def _is_list(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(
        value, str | bytes | bytearray | memoryview
    )


def _wrong(field: str, wanted: str, got: object) -> InvalidRequestError:
    shown = repr(got) if got is None or got == "" else type(got).__name__
    return InvalidRequestError(field, f"must be {wanted}, not {shown}")
