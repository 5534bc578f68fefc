"""Constrained answers of the real model at temperature 1: whatever is finished is what was asked
for, and whatever happens around it the answer is the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, RequestOutput, SamplingParams
from quire.errors import InvalidRequestError
from quire.sampling_params import StructuredOutput
from tests.constrain.schemas import CHOICES, REGEXES, check, random_schemas
from tests.long_runs import short_or_long

PROMPT = "An example, as JSON:\n"
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "age": {"type": "integer", "minimum": 0},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    }
)
PERSON = SamplingParams(seed=3, max_tokens=60, structured=StructuredOutput(json_schema=SCHEMA))


@pytest.fixture(scope="module")
def llm(smollm2_gguf: Path) -> Iterator[LLM]:
    with LLM(smollm2_gguf, dtype="bfloat16", kv_cache_memory="512MiB", max_model_len=1024) as llm:
        yield llm


def answers(llm: LLM, wanted: Sequence[StructuredOutput]) -> list[RequestOutput]:
    params = [
        SamplingParams(seed=i, max_tokens=80, structured=structured)
        for i, structured in enumerate(wanted)
    ]
    return llm.generate([PROMPT] * len(wanted), params)


def count_finished(outputs: Sequence[RequestOutput], wanted: Sequence[StructuredOutput]) -> int:
    """Checks every finished answer, and that none failed."""
    finished = 0
    for output, structured in zip(outputs, wanted, strict=True):
        assert output.finish_reason in ("stop", "length"), (structured, output.error)
        if output.finish_reason == "stop":
            check(structured, output.text)
            finished += 1
    return finished


@pytest.mark.slow
@pytest.mark.soak
def test_many_random_schemas(llm: LLM) -> None:
    wanted = [
        StructuredOutput(json_schema=schema)
        for schema in random_schemas(seed=7, count=short_or_long(15, 200))
    ]
    # some are cut at `max_tokens`
    assert count_finished(answers(llm, wanted), wanted) >= short_or_long(10, 180)


def test_regexes_choices_and_any_json(llm: LLM) -> None:
    count = short_or_long(2, 2, quick=1)
    wanted = [StructuredOutput(regex=regex) for regex in REGEXES for _ in range(count)]
    wanted += [StructuredOutput(choice=choice) for choice in CHOICES for _ in range(count + 1)]
    wanted += [StructuredOutput(json_object=True)] * 2 * count
    outputs = answers(llm, wanted)
    assert count_finished(outputs, wanted) >= len(wanted) - 3 * count
    for output, structured in zip(outputs, wanted, strict=True):
        assert not structured.choice or output.finish_reason == "stop"


def test_masks_are_begun_before_the_model_runs(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that they are computed meanwhile, not afterwards."""
    runner = llm.engine.runner
    constrainer, kernels = runner._grammars.constrainer, runner._decoder.kernels
    assert constrainer is not None
    begin, embed = constrainer.start, kernels.embedding
    events: list[str] = []
    monkeypatch.setattr(constrainer, "start", lambda rows: (events.append("masks"), begin(rows))[1])
    monkeypatch.setattr(
        kernels, "embedding", lambda ids, weight: (events.append("model"), embed(ids, weight))[1]
    )
    llm.generate(PROMPT, PERSON)
    assert events.count("model") > 10
    assert events == ["masks", "model"] * events.count("model")


@pytest.mark.slow
def test_running_ahead_changes_nothing(llm: LLM) -> None:
    """The grammars then learn of a step's tokens only after the next step was sent off."""
    wanted = [StructuredOutput(regex=regex) for regex in REGEXES] + [
        StructuredOutput(choice=CHOICES[0])
    ] * 4
    wanted += [
        StructuredOutput(json_schema=schema)
        for schema in random_schemas(seed=8, count=short_or_long(6, 20))
    ]
    expected = [(output.token_ids, output.finish_reason) for output in answers(llm, wanted)]
    llm.engine.core.depth = 2
    try:
        assert [
            (output.token_ids, output.finish_reason) for output in answers(llm, wanted)
        ] == expected
    finally:
        llm.engine.core.depth = 1


@pytest.mark.few(1)
@pytest.mark.parametrize("turn", range(4))
def test_preempted_while_the_last_token_is_on_its_way(
    llm: LLM, turn: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of an answer is noticed although its row has gone before the grammar was told of it."""
    wanted = [StructuredOutput(choice=("yes", "no", "perhaps"))] * 6 + [
        StructuredOutput(regex="[ab]{1,4}c")
    ] * 6
    expected = [(output.token_ids, output.finish_reason) for output in answers(llm, wanted)]
    core = llm.engine.core
    steps = 0
    step = core.step

    def preempting(now: float) -> Any:
        nonlocal steps
        steps += 1
        if steps % 4 == turn:
            for request in core.scheduler.table.running.copy():
                core.scheduler.preempt(request.request_id)
        return step(now)

    monkeypatch.setattr(core, "step", preempting)
    monkeypatch.setattr(core, "depth", 2)
    outputs = answers(llm, wanted)
    assert [(output.token_ids, output.finish_reason) for output in outputs] == expected
    assert sum(output.metrics.preemptions for output in outputs) > 0


@pytest.mark.slow
def test_n_answers_equal_single_ones_and_all_obey(llm: LLM) -> None:
    output = llm.generate(PROMPT, replace(PERSON, n=4))[0]
    for completion in output.completions:
        assert completion.finish_reason == "stop"
        assert set(json.loads(completion.text)) == {"name", "age"}
        alone = llm.generate(PROMPT, replace(PERSON, seed=completion.seed))[0]
        assert alone.token_ids == completion.token_ids
    assert len({completion.text for completion in output.completions}) > 1


@pytest.mark.slow
def test_constrained_rows_do_not_touch_their_neighbours_and_the_other_way_round(llm: LLM) -> None:
    free = SamplingParams(seed=8, max_tokens=30)
    alone = [llm.generate(PROMPT, one)[0].token_ids for one in (PERSON, free)]
    together = llm.generate([PROMPT] * 6, [PERSON, free] * 3)
    assert [output.token_ids for output in together] == alone * 3


@pytest.mark.slow
def test_preemption_and_chunks_change_nothing(llm: LLM, smollm2_gguf: Path) -> None:
    params = [replace(PERSON, seed=i, ignore_eos=i % 2 == 0) for i in range(6)]
    prompt = "Here is a list of people. " * 8 + PROMPT
    expected = [llm.generate(prompt, one)[0].token_ids for one in params]
    # bytes: keys and values, layers, heads, head size, tokens, bfloat16
    block = 2 * 30 * 3 * 64 * 16 * 2
    with LLM(
        smollm2_gguf,
        dtype="bfloat16",
        kv_cache_memory=14 * block,
        max_model_len=200,
        max_num_seqs=6,
        max_batched_tokens=20,
    ) as small:
        outputs = small.generate([prompt] * 6, params)
    assert sum(output.metrics.preemptions for output in outputs) > 0
    assert [output.token_ids for output in outputs] == expected


def test_min_tokens_gives_way_where_only_an_end_can_follow(llm: LLM) -> None:
    params = SamplingParams(
        seed=1, min_tokens=30, max_tokens=50, structured=StructuredOutput(choice=("yes", "no"))
    )
    output = llm.generate("Is it? ", params)[0]
    assert output.text in ("yes", "no")
    assert output.finish_reason == "stop"


def test_a_stop_string_ends_a_constrained_answer(llm: LLM) -> None:
    output = llm.generate(PROMPT, replace(PERSON, stop=('"age"',)))[0]
    assert output.finish_reason == "stop"
    assert output.completions[0].stop_reason == '"age"'
    assert '"age"' not in output.text
    assert output.text.startswith('{"name"')


def test_logprobs_are_the_models_own_and_come_with_structure(llm: LLM) -> None:
    output = llm.generate(PROMPT, replace(PERSON, logprobs=2))[0]
    logprobs = output.completions[0].logprobs
    assert logprobs is not None
    assert [entry.token_id for entry in logprobs] == list(output.token_ids)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "structured",
    [
        StructuredOutput(json_schema='{"type": "objekt"}'),
        StructuredOutput(regex="(unclosed"),
        StructuredOutput(grammar="start: missing_rule"),
        StructuredOutput(json_schema='{"type": "integer", "multipleOf": 1234567}'),
    ],
)
def test_a_bad_or_explosive_grammar_fails_its_own_call(
    llm: LLM, structured: StructuredOutput
) -> None:
    with pytest.raises(InvalidRequestError, match="structured"):
        llm.generate(PROMPT, SamplingParams(structured=structured))
    assert llm.generate(PROMPT, PERSON)[0].finish_reason == "stop"
