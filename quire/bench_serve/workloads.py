"""Requests to measure with: random ones, ones that share prefixes, ones from a file."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.errors import InvalidRequestError

DATASETS = ("random", "prefix_repetition", "custom")

# Short and common: nearly every tokenizer has one token for each, its space included.
# fmt: off
_WORDS = (
    "the", "of", "and", "to", "in", "is", "you", "that", "it", "he", "was", "for", "on", "are", "as", "with",
    "his", "they", "at", "be", "this", "have", "from", "or", "one", "had", "by", "word", "but", "not", "what",
    "all", "were", "we", "when", "your", "can", "said", "there", "use", "an", "each", "which", "she", "do", "how",
    "their", "if", "will", "up", "other", "about", "out", "many", "then", "them", "these", "so", "some", "her",
    "would", "make", "like", "him", "into", "time", "has", "look", "two", "more", "write", "go", "see", "number",
    "no", "way",
)
# fmt: on

Prompt = str | list[int] | list[dict[str, Any]]
"""Text, token ids, or the messages of a chat."""


@dataclass(frozen=True, slots=True)
class Job:
    """One request."""

    prompt: Prompt
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Lengths:
    """How long requests are, in tokens (of words: about)."""

    input_len: int = 128
    output_len: int = 128
    range_ratio: float = 0.0
    """Lengths are drawn evenly from (1 - r) to (1 + r) times those above."""
    prefix_len: int = 0
    """Tokens that all prompts begin with, before `input_len` others."""

    def __post_init__(self) -> None:
        if self.input_len < 1 or self.output_len < 1 or self.prefix_len < 0:
            raise InvalidRequestError("--random-input-len", "lengths must be at least 1, that of the prefix 0")
        if not 0 <= self.range_ratio < 1:
            raise InvalidRequestError("--random-range-ratio", f"must be from 0 to below 1, not {self.range_ratio}")


@dataclass(frozen=True, slots=True)
class PrefixLengths:
    """Requests that share prefixes."""

    prefix_len: int = 256
    suffix_len: int = 256
    num_prefixes: int = 10
    output_len: int = 128

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) < 1:
                option = f"--prefix-repetition-{name.replace('_', '-')}"
                raise InvalidRequestError(option, f"must be at least 1, not {getattr(self, name)}")


class TokenSource:
    """Draws random prompts: words, or token ids if the vocabulary's size is known (their number is then exact)."""

    def __init__(self, seed: int, vocab_size: int | None = None) -> None:
        if vocab_size is not None and vocab_size < 1:
            raise InvalidRequestError("--vocab-size", f"must be at least 1, not {vocab_size}")
        self.random = random.Random(seed)
        self._vocab_size = vocab_size

    def draw(self, count: int) -> list[int] | list[str]:
        if self._vocab_size is None:
            return self.random.choices(_WORDS, k=count)
        return [self.random.randrange(self._vocab_size) for _ in range(count)]

    def prompt(self, *parts: Sequence[int] | Sequence[str]) -> Prompt:
        pieces = [piece for part in parts for piece in part]
        if self._vocab_size is None:
            return " ".join(map(str, pieces))
        return [int(piece) for piece in pieces]


def make_jobs(
    dataset: str,
    count: int,
    source: TokenSource,
    lengths: Lengths,
    prefix_lengths: PrefixLengths,
    path: Path | None,
    file_output_len: int,
) -> list[Job]:
    """`count` requests of one of the DATASETS."""
    if dataset == "random":
        return random_jobs(count, lengths, source)
    if dataset == "prefix_repetition":
        return prefix_jobs(count, prefix_lengths, source)
    if dataset != "custom":
        raise InvalidRequestError("--dataset-name", f"must be one of {', '.join(DATASETS)}, not {dataset!r}")
    if path is None:
        raise InvalidRequestError("--dataset-path", "says which file --dataset-name custom reads")
    return file_jobs(path, count, file_output_len)


def random_jobs(count: int, lengths: Lengths, source: TokenSource) -> list[Job]:
    """Prompts that have nothing in common but, if asked for, one prefix."""
    prefix = source.draw(lengths.prefix_len)
    jobs = []
    for _ in range(count):
        num_input = _around(lengths.input_len, lengths.range_ratio, source)
        num_output = _around(lengths.output_len, lengths.range_ratio, source)
        jobs.append(Job(source.prompt(prefix, source.draw(num_input)), num_output))
    return jobs


def prefix_jobs(count: int, lengths: PrefixLengths, source: TokenSource) -> list[Job]:
    """Prompts that begin with one of a few prefixes, in random order."""
    prefixes = [source.draw(lengths.prefix_len) for _ in range(lengths.num_prefixes)]
    jobs = [
        Job(source.prompt(prefixes[i % len(prefixes)], source.draw(lengths.suffix_len)), lengths.output_len)
        for i in range(count)
    ]
    source.random.shuffle(jobs)
    return jobs


def file_jobs(path: Path, count: int, output_len: int) -> list[Job]:
    """One JSON object per line: `prompt` (text or token ids) or `messages`, and perhaps `output_tokens`. A file with
    fewer lines than requests is used again from its start."""
    if output_len < 1:
        raise InvalidRequestError("--custom-output-len", f"must be at least 1, not {output_len}")
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequestError("--dataset-path", f"{path} can't be read: {error}") from None
    jobs = [_job(line, f"{path} line {number}", output_len) for number, line in enumerate(lines, 1) if line.strip()]
    if not jobs:
        raise InvalidRequestError("--dataset-path", f"{path} holds no requests")
    return [jobs[i % len(jobs)] for i in range(count)]


def _job(line: str, where: str, output_len: int) -> Job:
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise InvalidRequestError("--dataset-path", f"{where} is no JSON: {error}") from None
    if not isinstance(fields, Mapping) or ("prompt" in fields) == ("messages" in fields):
        raise InvalidRequestError("--dataset-path", f"{where} must be an object with either prompt or messages")
    prompt = fields.get("prompt", fields.get("messages"))
    max_tokens = fields.get("output_tokens", output_len)
    if not isinstance(prompt, str | list) or not prompt:
        raise InvalidRequestError("--dataset-path", f"{where}: the prompt must be text or a list, and not empty")
    if not isinstance(max_tokens, int) or isinstance(max_tokens, bool) or max_tokens < 1:
        raise InvalidRequestError("--dataset-path", f"{where}: output_tokens must be a number of at least 1")
    return Job(prompt, max_tokens)


def _around(length: int, ratio: float, source: TokenSource) -> int:
    low, high = round(length * (1 - ratio)), round(length * (1 + ratio))
    return source.random.randint(max(1, low), max(1, high))
