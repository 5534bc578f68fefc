"""Requests of every kind, drawn from a seed, for comparing answers with and without guesses."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from quire import LLM, RequestOutput, SamplingParams
from quire.sampling_params import StructuredOutput

TEXT = (
    "The old lighthouse keeper walked down to the harbour every morning before the sun came up. He carried a small "
    'lamp in his left hand and a basket of bread in his right hand. "Good morning," he would say, and then he would '
    "tell them about the ships that had passed in the night. One day a young woman came to the harbour."
)
_PROMPTS = (
    "Repeat this text, word for word: " + TEXT,
    "Count: one, two, three, one, two, three, one, two,",
    'Cities as JSON: [{"name": "Paris", "country": "France"}, {"name": "Rome", "country": "Italy"},',
    "Why is the sky blue?",
    "a b c a b c a b",
)
_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "country": {"enum": ["France", "Italy", "Spain"]},
    },
    "required": ["name", "country"],
}
_FORMS = (
    StructuredOutput(json_schema=_SCHEMA),
    StructuredOutput(regex="(one|two|three)(, (one|two|three)){2,9}"),
    StructuredOutput(
        choice=("The old lighthouse keeper walked down", "The old man", "a b c a b c a b c a b c")
    ),
    StructuredOutput(json_object=True),
)


def make_params(rng: random.Random, max_tokens: int) -> SamplingParams:
    """One request's parameters: each feature now and then, so that most have two or three."""
    given: dict[str, Any] = {"max_tokens": rng.randint(1, max_tokens), "seed": rng.randrange(2**32)}
    given["temperature"] = rng.choice([0.0, 0.0, 0.3, 0.8, 1.2])

    def sometimes(**fields: Any) -> None:
        if rng.random() < 0.15:
            given.update(fields)

    sometimes(top_k=rng.randint(1, 40), top_p=rng.uniform(0.3, 1.0))
    sometimes(min_p=0.05, typical_p=0.9)
    sometimes(repetition_penalty=rng.uniform(1.01, 1.3))
    sometimes(frequency_penalty=0.4, presence_penalty=0.2)
    sometimes(dry_multiplier=0.6, dry_allowed_length=3)
    sometimes(no_repeat_ngram_size=rng.randint(2, 6))
    sometimes(xtc_probability=0.5)
    sometimes(logit_bias={rng.randrange(1000): 3.0})
    sometimes(bad_words=("harbour", "two"))
    sometimes(logprobs=rng.randint(0, 4))
    sometimes(prompt_logprobs=1)
    sometimes(
        stop=("morning", "two, th", "b c a b c"), include_stop_str_in_output=rng.random() < 0.5
    )
    sometimes(stop_token_ids=(rng.randrange(300),), min_tokens=rng.randint(0, given["max_tokens"]))
    sometimes(n=2)
    sometimes(cache_salt="a")
    sometimes(speculation=False)
    sometimes(prediction=TEXT)
    if rng.random() < 0.3:
        given["structured"] = rng.choice(_FORMS)
    return SamplingParams(**given)


def make_requests(seed: int, count: int, max_tokens: int) -> tuple[list[str], list[SamplingParams]]:
    rng = random.Random(seed)
    prompts = [rng.choice(_PROMPTS)[: rng.choice([20, 60, 400])] for _ in range(count)]
    return prompts, [make_params(rng, max_tokens) for _ in range(count)]


def essence(outputs: Sequence[RequestOutput]) -> list[Any]:
    """What may not differ: everything but times, ids and what was guessed."""
    return [
        (
            output.prompt_logprobs,
            [
                (
                    c.text,
                    c.token_ids,
                    c.finish_reason,
                    c.stop_reason,
                    c.error,
                    c.logprobs,
                    c.cumulative_logprob,
                    c.seed,
                )
                for c in output.completions
            ],
            [
                (c.metrics.num_prompt_tokens, c.metrics.num_output_tokens)
                for c in output.completions
            ],
        )
        for output in outputs
    ]


def num_accepted(outputs: Sequence[RequestOutput]) -> tuple[int, int]:
    """(drafted, accepted) guesses of all answers."""
    metrics = [c.metrics for output in outputs for c in output.completions]
    return sum(one.drafted_tokens for one in metrics), sum(one.accepted_tokens for one in metrics)


def answers(llm: LLM, seed: int, count: int, max_tokens: int) -> list[RequestOutput]:
    return llm.generate(*make_requests(seed, count, max_tokens), progress=False)
