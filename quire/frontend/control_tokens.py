"""Keeps text in a request from becoming control tokens.

A rendered chat is one string, in which the template's `<|im_end|>` and a user's look the same. So
before rendering, the first character of each control token's text inside the request's strings is
replaced by a *placeholder*: a private-use character that occurs nowhere in the request or the
template. The template can strip, split, slice and test that text as usual, but nothing it does
makes a control token of it. After rendering, every control token still found is the template's own,
and the stretches between that have placeholders are restored and encoded as plain text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

from tokenizers import AddedToken

from quire.errors import InvalidRequestError

_PRIVATE_USE = (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))


class ControlTokens:
    """The tokens of one tokenizer and template that a request's text must not produce.

    `special` are the tokenizer's special tokens, never allowed in any string of a request.
    `markers` are added tokens that are not special but that the template writes itself (Qwen's
    `<tool_response>`), or that look like special ones (`<|user|>`): they are not allowed either,
    except in what the assistant said or thought, where they are the model's own words.
    """

    def __init__(self, added: Iterable[AddedToken], template_source: str) -> None:
        tokens = [token for token in added if token.content]
        special = {token.content for token in tokens if token.special}
        markers = {
            token.content
            for token in tokens
            if not token.special
            and not token.content.isspace()
            and (token.content in template_source or re.fullmatch(r"<\|.*\|>", token.content))
        }
        self.special = frozenset(special)
        self.special_pattern = _any_of(map(re.escape, _longest_first(special)))
        self.pattern = _any_of(map(re.escape, _longest_first(special | markers)))
        control = {token.content: token for token in tokens if token.content in special | markers}
        self._in_rendered = _any_of(
            _with_stripped_space(control[text]) for text in _longest_first(control)
        )

    def stretches(self, rendered: str) -> Iterator[tuple[int, int]]:
        """The parts of a rendered text between its control tokens, as (start, end); empty ones left
        out.
        """
        start = 0
        for match in self._in_rendered.finditer(rendered):
            if match.start() > start:
                yield start, match.start()
            start = match.end()
        if start < len(rendered):
            yield start, len(rendered)


class Placeholders:
    """Replaces the beginnings of control tokens in one request's strings, and puts them back."""

    def __init__(self, control: ControlTokens, request: object, template_source: str) -> None:
        texts = [template_source, *_strings(request)]
        used = set().union(*texts)
        unused = (char for char in map(chr, chain(*_PRIVATE_USE)) if char not in used)
        self._free = (char for char in unused if not any(_escape(char) in text for text in texts))
        self._control = control
        self._chosen: dict[tuple[str, bool], str] = {}

    def hide(self, value: Any, pattern: re.Pattern[str]) -> Any:
        """Nested lists and objects with the first character of every match of `pattern` replaced,
        in keys too.
        """
        if isinstance(value, str):
            # A match may hold or overlap another one, so this goes on until none is left.
            while pattern.search(value):
                value = pattern.sub(self._hidden, value)
            return value
        if isinstance(value, dict):
            return {
                self.hide(key, pattern): self.hide(item, pattern) for key, item in value.items()
            }
        if isinstance(value, list):
            return [self.hide(item, pattern) for item in value]
        return value

    def restore(self, text: str) -> tuple[str, list[int]] | None:
        """Undoes `hide`: the text as the request had it, and the positions that no token may reach
        across. None where there is nothing to undo.

        Special tokens can't come back, since plain encoding does not know them; markers could, so
        each is cut after its first character. A template may have written a placeholder as a JSON
        escape.
        """
        originals = {placeholder: key for key, placeholder in self._chosen.items()}
        originals |= {_escape(placeholder): key for key, placeholder in self._chosen.items()}
        pieces = re.split(f"({'|'.join(map(re.escape, originals))})", text) if originals else [text]
        if len(pieces) == 1:
            return None
        cuts: list[int] = []
        position = 0
        for index, piece in enumerate(pieces):
            if index % 2:  # re.split puts what matched at the odd places
                piece, is_special = originals[piece]
                pieces[index] = piece
                if not is_special:
                    cuts.append(position + 1)
            position += len(piece)
        return "".join(pieces), [cut for cut in cuts if cut < position]

    def _hidden(self, match: re.Match[str]) -> str:
        token = match[0]
        key = (token[0], token in self._control.special)
        if key not in self._chosen:
            placeholder = next(self._free, None)
            if placeholder is None:
                raise InvalidRequestError("messages", "use every private-use character there is")
            self._chosen[key] = placeholder
        return self._chosen[key] + token[1:]


def holds(value: object, pattern: re.Pattern[str]) -> bool:
    """Whether any string in nested lists and objects, keys included, has a match."""
    return any(pattern.search(text) for text in _strings(value))


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)


def _escape(char: str) -> str:
    return json.dumps(char)[1:-1]


def _longest_first(texts: Iterable[str]) -> list[str]:
    return sorted(texts, key=lambda text: (-len(text), text))


def _any_of(alternatives: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(alternatives) or r"(?!)")


def _with_stripped_space(token: AddedToken) -> str:
    """Some added tokens swallow the white space beside them."""
    before, after = (r"\s*" if flag else "" for flag in (token.lstrip, token.rstrip))
    return f"{before}{re.escape(token.content)}{after}"
