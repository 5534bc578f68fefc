"""The real model with every drafter: the same answers as without, to the last logprob."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, RequestOutput, SamplingParams
from quire.engine.invariants import check_invariants
from quire.errors import InvalidRequestError
from quire.speculate.adaptive import StepTimeModel
from tests.long_runs import short_or_long
from tests.speculate.every_kind import answers, essence, make_requests, num_accepted

COUNT = short_or_long(10, 1000)


@pytest.fixture(scope="module")
def plain(smollm2_gguf: Path) -> Iterator[LLM]:
    with LLM(smollm2_gguf, max_model_len=512, kv_cache_memory="200MiB") as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(plain: LLM) -> list[Any]:
    return essence(answers(plain, 7, COUNT, 24))


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("speculation", ["ngram", "draft"])
def test_every_kind_of_request(
    expected: list[Any], smollm2_gguf: Path, speculation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Not what this machine's noise makes of it.
    monkeypatch.setattr(StepTimeModel, "observe", lambda self, entry: setattr(self, "share", 0.3))
    speculation = f"draft:{smollm2_gguf}" if speculation == "draft" else speculation
    with LLM(
        smollm2_gguf, max_model_len=512, kv_cache_memory="400MiB", speculation=speculation
    ) as llm:
        outputs = answers(llm, 7, COUNT, 24)
    drafted, accepted = num_accepted(outputs)
    assert accepted > COUNT
    assert drafted > accepted
    for index, (got, wanted) in enumerate(zip(essence(outputs), expected, strict=True)):
        assert got == wanted, index


@pytest.mark.slow
@pytest.mark.soak
def test_the_same_model_in_fewer_bits_drafts(
    smollm2_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It writes its own keys and values where the model's will be: none of them may be left when it
    counts.
    """
    monkeypatch.setattr(StepTimeModel, "observe", lambda self, entry: setattr(self, "share", 0.3))
    count = short_or_long(4, 300)
    found = []
    for speculation in ("self", "off"):
        with LLM(
            smollm2_gguf,
            quantization="none",
            max_model_len=256,
            kv_cache_memory="200MiB",
            speculation=speculation,
        ) as llm:
            found.append(answers(llm, 5, count, 12))
    drafted, accepted = num_accepted(found[0])
    assert drafted > accepted > count
    assert essence(found[0]) == essence(found[1])


@pytest.mark.slow
def test_who_cannot_draft_is_refused(smollm2_gguf: Path, tiny_model: Path) -> None:
    """Both sizes and the first token that differs; a model that is quantised already has nothing
    quicker.
    """
    with pytest.raises(
        InvalidRequestError,
        match=r"vocabulary has \d+ tokens, the model's 49152, and the first that",
    ):
        LLM(
            smollm2_gguf,
            max_model_len=64,
            kv_cache_memory="16MiB",
            speculation=f"draft:{tiny_model}",
        )
    with pytest.raises(
        InvalidRequestError, match=r'as they are stored .*use ngram, or quantization="none"'
    ):
        LLM(smollm2_gguf, max_model_len=64, kv_cache_memory="16MiB", speculation="self")


@pytest.mark.slow
def test_scarcity_chunks_streams_and_aborts(
    plain: LLM, smollm2_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few blocks, few tokens a step, a host tier, preemptions by hand, a stream that is left and
    one that is read.
    """
    monkeypatch.setattr(StepTimeModel, "observe", lambda self, entry: setattr(self, "share", 0.3))
    prompts, params = make_requests(3, 8, 16)
    params = [replace(one, deadline=None) for one in params]
    expected = essence(plain.generate(prompts, params, progress=False))
    options = {
        "max_batched_tokens": 24,
        "max_num_seqs": 6,
        "kv_cache_memory": "14MiB",
        "host_cache_memory": "4MiB",
    }
    with LLM(smollm2_gguf, max_model_len=256, speculation="ngram", **options) as llm:  # type: ignore[arg-type]
        scheduler = llm.engine.core.scheduler
        left = llm.stream("a b c a b c a b c a", SamplingParams(temperature=0, max_tokens=60))
        read = llm.stream(
            "a b c a b c a b c a", SamplingParams(temperature=0, max_tokens=30, stop=("c a b",))
        )
        names = [llm.add_request(*one) for one in zip(prompts, params, strict=True)]
        outputs: dict[str, RequestOutput] = {}
        text, number = "", 0
        while not outputs.keys() >= set(names):
            outputs |= {
                delta.request_id: delta.output for delta in llm.step() if delta.output is not None
            }
            number += 1
            if number == 12:
                next(left)
                left.close()
            running = [one for one in scheduler.table.requests.values() if one.row is not None]
            if number % 9 == 0 and running:
                scheduler.preempt(running[number % len(running)].request_id)
            check_invariants(scheduler)
        text = "".join(read)
        log = list(llm.engine.step_log)
    assert essence([outputs[name] for name in names]) == expected
    whole = plain.generate(
        "a b c a b c a b c a", SamplingParams(temperature=0, max_tokens=30, stop=("c a b",))
    )[0]
    assert text == whole.text
    assert any(step.step.preempted for step in log)
    assert any(entry.draft_tokens for step in log for entry in step.step.scheduled)
