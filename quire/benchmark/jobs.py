"""What is measured with: requests of which only the lengths matter."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from quire.errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class Job:
    """A prompt in token ids, and how many tokens to generate whatever they are."""

    prompt: tuple[int, ...]
    new_tokens: int
    arrival: float = 0.0
    """Seconds after the start."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """From `low` to `high` tokens, both included."""

    low: int
    high: int

    @classmethod
    def parse(cls, field: str, text: str) -> Lengths:
        """From "100" or "100-300"."""
        low, dash, high = text.partition("-")
        if not (low.isdigit() and (high.isdigit() or not dash)):
            raise InvalidRequestError(field, f"must be a number of tokens or a range such as 100-300, not {text!r}")
        lengths = cls(int(low), int(high) if dash else int(low))
        if not 1 <= lengths.low <= lengths.high:
            raise InvalidRequestError(field, f"must be at least 1 and rise, not {text!r}")
        return lengths

    def draw(self, source: random.Random) -> int:
        return source.randint(self.low, self.high)

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low} to {self.high}"


def random_jobs(
    count: int, prompt: Lengths, new: Lengths, vocab_size: int, shared: int = 0, seed: int = 0
) -> list[Job]:
    """The same jobs for the same arguments. Their prompts begin with the same `shared` tokens, then differ."""
    source = random.Random(seed)

    def tokens(size: int) -> tuple[int, ...]:
        return tuple(source.randrange(vocab_size) for _ in range(size))

    prefix = tokens(shared)
    return [Job(prefix + tokens(prompt.draw(source)), new.draw(source)) for _ in range(count)]


def with_other_tokens(jobs: Sequence[Job], vocab_size: int, seed: int) -> list[Job]:
    """Jobs as long as these with prompts of their own: nobody finds them in a cache of prefixes."""
    source = random.Random(seed)
    return [replace(job, prompt=tuple(source.randrange(vocab_size) for _ in job.prompt)) for job in jobs]
