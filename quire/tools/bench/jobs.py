"""What every benchmark measures with: prompts and how many tokens to generate after them."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.errors import InvalidRequestError

# Short and common: nearly every tokenizer has one token for each, its space included.
_WORDS = (
    "the of and to in is you that it he was for on are as with his they at be this have from or one had by word but "
    "not what all were we when your can said there use an each which she do how their if will up other about out many "
    "then them these so some her would make like him into time has look two more write go see number no way"
)

Prompt = str | tuple[int, ...] | list[dict[str, Any]]
"""Text, token ids, or the messages of a chat."""


@dataclass(frozen=True, slots=True)
class Job:
    """One request."""

    prompt: Prompt
    max_tokens: int
    """How many tokens to generate; offline, whatever they are."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The prompt of a job for an engine, which has token ids."""
        assert isinstance(self.prompt, tuple)
        return self.prompt


@dataclass(frozen=True, slots=True)
class Lengths:
    """From `low` to `high` tokens, both included."""

    low: int
    high: int

    @classmethod
    def parse(cls, option: str, text: str) -> Lengths:
        """From "100" or "100-300"."""
        found = re.fullmatch(r"\s*(\d{1,9})\s*(?:-\s*(\d{1,9})\s*)?", text, re.ASCII)
        if found is None:
            raise InvalidRequestError(
                option, f"must be a number of tokens or a range such as 100-300, not {text!r}"
            )
        lengths = cls(int(found[1]), int(found[2] or found[1]))
        if not 1 <= lengths.low <= lengths.high:
            raise InvalidRequestError(
                option, f"must be at least 1, the lower number first, not {text!r}"
            )
        return lengths

    @classmethod
    def around(cls, option: str, length: int, ratio: float = 0.0) -> Lengths:
        """From 1 - ratio to 1 + ratio times the length."""
        check_least(option, length)
        if not 0 <= ratio < 1:
            raise InvalidRequestError(
                "--random-range-ratio", f"must be from 0 to below 1, not {ratio}"
            )
        return cls(max(1, round(length * (1 - ratio))), max(1, round(length * (1 + ratio))))

    def draw(self, source: random.Random) -> int:
        return source.randint(self.low, self.high)

    @property
    def mean(self) -> int:
        return round((self.low + self.high) / 2)

    def __str__(self) -> str:
        return f"{self.low:,}" if self.low == self.high else f"{self.low:,} to {self.high:,}"


class TokenSource:
    """Draws random prompts: token ids if the vocabulary's size is known, otherwise words (about a
    token each).
    """

    def __init__(self, seed: int = 0, vocab_size: int | None = None) -> None:
        if vocab_size is not None:
            check_least("--vocab-size", vocab_size)
        self.random = random.Random(seed)
        self._vocab_size = vocab_size

    def draw(self, count: int) -> tuple[Any, ...]:
        if self._vocab_size is None:
            return tuple(self.random.choices(_WORDS.split(), k=count))
        return tuple(self.random.randrange(self._vocab_size) for _ in range(count))

    def prompt(self, drawn: tuple[Any, ...]) -> Prompt:
        return " ".join(drawn) if self._vocab_size is None else drawn


def random_jobs(
    count: int, prompt: Lengths, new: Lengths, source: TokenSource, shared: int = 0
) -> list[Job]:
    """Prompts that begin with the same `shared` tokens, then have nothing in common."""
    prefix = source.draw(shared)
    return [
        Job(
            source.prompt(prefix + source.draw(prompt.draw(source.random))), new.draw(source.random)
        )
        for _ in range(count)
    ]


def prefix_jobs(
    count: int,
    source: TokenSource,
    num_prefixes: int,
    prefix_len: int,
    suffix_len: int,
    output_len: int,
) -> list[Job]:
    """Prompts that begin with one of a few prefixes, in random order."""
    prefixes = [source.draw(prefix_len) for _ in range(num_prefixes)]
    prompts = [
        source.prompt(prefixes[i % num_prefixes] + source.draw(suffix_len)) for i in range(count)
    ]
    source.random.shuffle(prompts)
    return [Job(prompt, output_len) for prompt in prompts]


def file_jobs(path: Path, count: int, output_len: int) -> list[Job]:
    """One JSON object per line: `prompt` (text or token ids) or `messages`, and perhaps
    `output_tokens`. A file with fewer lines than requests is used again from its start.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequestError("--dataset-path", f"{path} can't be read: {error}") from None
    jobs = [
        _read_job(line, f"{path} line {i}", output_len)
        for i, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not jobs:
        raise InvalidRequestError("--dataset-path", f"{path} holds no requests")
    return [jobs[i % len(jobs)] for i in range(count)]


def check_least(option: str, value: int, least: int = 1) -> None:
    """Raises InvalidRequestError if an option's value is below the least it may be."""
    if value < least:
        raise InvalidRequestError(option, f"must be at least {least}, not {value}")


def _read_job(line: str, where: str, output_len: int) -> Job:
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise InvalidRequestError("--dataset-path", f"{where} is no JSON: {error}") from None
    except RecursionError:
        raise InvalidRequestError("--dataset-path", f"{where} is nested too deeply") from None
    if not isinstance(fields, Mapping) or ("prompt" in fields) == ("messages" in fields):
        raise InvalidRequestError(
            "--dataset-path", f"{where} must be an object with either prompt or messages"
        )
    prompt = fields.get("prompt", fields.get("messages"))
    max_tokens = fields.get("output_tokens", output_len)
    if not isinstance(prompt, str | list) or not prompt:
        raise InvalidRequestError(
            "--dataset-path", f"{where}: the prompt must be text or a list, and not empty"
        )
    if not isinstance(max_tokens, int) or isinstance(max_tokens, bool) or max_tokens < 1:
        raise InvalidRequestError(
            "--dataset-path", f"{where}: output_tokens must be a number of at least 1"
        )
    if isinstance(prompt, list) and not isinstance(prompt[0], dict):
        prompt = tuple(prompt)
    return Job(prompt, max_tokens)
