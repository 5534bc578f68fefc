"""Requests of all kinds, drawn from a seed."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from quire.frontend.tokenizer import Tokenizer
from quire.observe.step_lines import encode_params
from quire.sampling_params import SamplingParams

TEXT = (
    "The old lighthouse keeper walked down to the harbour every morning before the sun came up. He carried a small "
    'lamp in his left hand and a basket of bread in his right hand. "Good morning," he would say, and then he would '
    "tell them about the ships that had passed in the night: one, two, three, one, two, three, one, two, three. One "
    'day a young woman came to the harbour with a letter, {"name": "Ada", "country": "France"}, {"name": "Bo", '
    '"country": "Italy"}, {"name": "Cy", "country": "Spain"}, and asked the old lighthouse keeper for bread. '
)
_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "country": {"enum": ["France", "Italy", "Spain"]},
    },
    "required": ["name", "country"],
}
KINDS: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("greedy", {"temperature": 0.0, "logprobs": 2}),
    ("sampled", {"temperature": 0.8}),
    ("n answers", {"n": 3, "temperature": 1.3, "logprobs": 0}),
    ("top-k, top-p", {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "logprobs": 3}),
    (
        "penalties",
        {
            "repetition_penalty": 1.2,
            "presence_penalty": 0.4,
            "frequency_penalty": 0.2,
            "logprobs": 1,
        },
    ),
    ("prompt logprobs", {"temperature": 0.0, "prompt_logprobs": 2, "logprobs": 1}),
    ("regex", {"structured": {"regex": "[a-z]{4,12}, [0-9]{2,6}"}, "logprobs": 1}),
    ("greedy, tokens only", {"temperature": 0.0}),
    (
        "min-p, typical, XTC",
        {"min_p": 0.02, "typical_p": 0.9, "xtc_probability": 0.5, "xtc_threshold": 0.05},
    ),
    (
        "DRY, n-grams",
        {"temperature": 0.0, "dry_multiplier": 0.8, "no_repeat_ngram_size": 3, "logprobs": 0},
    ),
    (
        "bias, bad words",
        {
            "logit_bias": {5: 4.0, 9: -4.0},
            "bad_words": ("harbour",),
            "min_tokens": 2,
            "logprobs": 2,
        },
    ),
    ("JSON schema", {"structured": {"json_schema": _SCHEMA}, "temperature": 0.7}),
)
"""What requests ask for: every path through the sampler, and those around it. What an axis can't do
without is among the first three.
"""


@dataclass(frozen=True, slots=True)
class Case:
    """One request."""

    kind: str
    prompt: tuple[Any, ...]
    """Token ids; for a server, words."""
    params: SamplingParams

    @property
    def num_tokens(self) -> int:
        """The longest it can become."""
        return len(self.prompt) + (self.params.max_tokens or 1)

    def as_json(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "prompt": list(self.prompt),
            "params": encode_params(self.params),
        }


def structured_is_there() -> bool:
    return importlib.util.find_spec("llguidance") is not None


def draw_cases(
    count: int,
    seed: int,
    tokenizer: Tokenizer,
    vocab_size: int,
    longest: int = 96,
    structured: bool = True,
) -> list[Case]:
    """That many requests; every second one begins as the first one does. Lengths lie around the
    borders of blocks.
    """
    source = random.Random(seed)
    # A tokenizer may know more tokens than the model.
    text = [
        token for token in tokenizer.encode(TEXT, add_special_tokens=False) if token < vocab_size
    ] or [0]
    shared = _cut(text, source, longest)
    kinds = [kind for kind in KINDS if structured or "structured" not in kind[1]]
    cases = []
    for number in range(count):
        name, asked = kinds[number % len(kinds)]
        length = source.choice((1, 2, 15, 16, 17, 31, 33, 48, 49, longest - 1, longest))
        # one at least that is computed in chunks
        length = longest if number == 1 else min(length, longest)
        if number % 2:
            own = (
                [source.randrange(vocab_size) for _ in range(length)]
                if number % 4 == 3
                else shared[::-1]
            )
            common = source.choice((0, 16, 32)) % (length + 1)
            prompt = (shared[:common] + own)[:length]
        else:
            prompt = shared[:length]
        given: dict[str, Any] = {
            "seed": source.randrange(2**63),
            "max_tokens": source.choice((3, 6, 9, 14)),
        }
        # Answers are to be of some length; a grammar ends by itself.
        given |= {"ignore_eos": "structured" not in asked, **asked}
        if "structured" in asked:
            given["max_tokens"] = 16
        if "logit_bias" in given:
            given["logit_bias"] = {
                token % vocab_size: bias for token, bias in given["logit_bias"].items()
            }
        cases.append(Case(name, tuple(prompt), SamplingParams(**given)))
    return cases


def _cut(text: list[int], source: random.Random, length: int) -> list[int]:
    """A piece of the text, as often repeated as it takes."""
    start = source.randrange(max(1, len(text) // 2))
    return list(islice((text[(start + place) % len(text)] for place in range(length)), length))
