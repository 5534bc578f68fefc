"""Targets of token times and shares change when tokens come, not which: the same bits."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.engine.token_times import LEAST_PROMPT_TOKENS
from quire.observe.step_log import read_step_log
from tests.frontend.templates import QWEN
from tests.server.random_model import write_model

SETTINGS = {"max_num_seqs": 4, "max_model_len": 256, "kv_cache_memory": "8MiB"}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = tmp_path_factory.mktemp("model")
    write_model(made, QWEN)
    return str(made)


def answers(model: str, **settings: Any) -> list[tuple[Any, ...]]:
    """Tokens and logprobs, in full."""
    source = random.Random(1)
    prompts = [
        [source.randrange(5, 90) for _ in range(150 if number % 3 == 2 else 5)]
        for number in range(9)
    ]
    params = [
        SamplingParams(
            temperature=0.8, seed=number, max_tokens=6 + 5 * (number % 3), ignore_eos=True,
            logprobs=3, tenant="ab"[number % 2] if "policy" in settings else "",
        )
        for number in range(9)
    ]  # fmt: skip
    with LLM(model, **SETTINGS, **settings) as llm:
        found = llm.generate(prompts, params)
    return [(one.completions[0].token_ids, one.completions[0].logprobs) for one in found]


def test_answers_with_targets_and_shares_have_the_bits_of_answers_without(
    tiny: str, tmp_path: Path
) -> None:
    log = tmp_path / "steps.jsonl"
    expected = answers(tiny)
    assert answers(tiny, target_token_time=1e-4, step_log=str(log)) == expected
    steps = [entry.step for entry in read_step_log(log)]
    promised = [step for step in steps if step.promise is not None]
    assert any(
        step.promise.prompt_tokens == LEAST_PROMPT_TOKENS for step in promised if step.promise
    )
    assert any(step.scheduled and not step.num_decodes for step in promised)
    chunks = [one for step in promised for one in step.scheduled[step.num_decodes :]]
    assert any(not one.samples for one in chunks)  # prompts were cut where they were not before
    both = {"policy": "fair", "tenant_weights": "a=3", "target_token_time": 0.02}
    assert answers(tiny, **both, target_first_token=0.05, gives_way="token_time") == expected
