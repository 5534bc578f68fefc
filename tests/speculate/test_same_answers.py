"""The real model with every drafter: the same answers as without, to the last logprob."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from quire import LLM
from quire.speculate.adaptive import StepCosts
from tests.long_runs import short_or_long
from tests.speculate.every_kind import answers, essence, num_accepted

COUNT = short_or_long(16, 1000)


@pytest.fixture(scope="module")
def plain(smollm2_gguf: Path) -> Iterator[LLM]:
    with LLM(smollm2_gguf, max_model_len=512, kv_cache_memory="200MiB") as llm:
        yield llm


@pytest.mark.soak
@pytest.mark.parametrize("speculation", ["ngram", "draft"])
def test_every_kind_of_request(
    plain: LLM, smollm2_gguf: Path, speculation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Not what this machine's noise makes of it.
    monkeypatch.setattr(StepCosts, "observe", lambda self, entry: setattr(self, "least_chance", 0.3))
    speculation = f"draft:{smollm2_gguf}" if speculation == "draft" else speculation
    with LLM(smollm2_gguf, max_model_len=512, kv_cache_memory="400MiB", speculation=speculation) as llm:
        outputs = answers(llm, 7, COUNT, 24)
    drafted, accepted = num_accepted(outputs)
    assert accepted > COUNT
    assert drafted > accepted
    for index, (got, expected) in enumerate(zip(essence(outputs), essence(answers(plain, 7, COUNT, 24)), strict=True)):
        assert got == expected, index
