"""Every parameter, alone and with others, against the plain float64 definition."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from quire.sampling_params import ResolvedTokens, SamplingParams, StructuredOutput
from tests.long_runs import short_or_long
from tests.runner.sampling_definition import NEVER, Unclear, before_temperature, kept, probabilities
from tests.runner.sampling_support import Job, RecordingKernels, run

VOCAB = 12
tokens = st.integers(0, VOCAB - 1)
# Values whose products and sums are exact in float32, so that ties are ties in float64 too.
dyadic = st.integers(-16, 16).map(lambda i: i / 4)

FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "top_k": st.integers(1, VOCAB + 1),
    "top_p": st.sampled_from([0.0137, 0.31713, 0.77177, 0.93371]),
    "min_p": st.sampled_from([0.0113, 0.0911, 0.3313, 0.9771]),
    "typical_p": st.sampled_from([0.0137, 0.23713, 0.67177, 0.93371]),
    "top_n_sigma": st.sampled_from([0.3137, 1.0971, 2.2371]),
    "xtc_probability": st.sampled_from([0.5, 1.0]),
    "xtc_threshold": st.sampled_from([0.0171, 0.1013, 0.4]),
    "repetition_penalty": st.sampled_from([0.5, 2.0]),
    "presence_penalty": st.sampled_from([-1.5, 0.5]),
    "frequency_penalty": st.sampled_from([-0.25, 0.5]),
    "no_repeat_ngram_size": st.integers(1, 4),
    "dry_multiplier": st.sampled_from([0.5, 2.0]),
    "dry_base": st.sampled_from([1.0, 1.5, 2.0]),
    "dry_allowed_length": st.integers(1, 4),
    "logit_bias": st.dictionaries(tokens, dyadic, max_size=4),
    "allowed_token_ids": st.lists(tokens, min_size=3, max_size=VOCAB, unique=True),
    "min_tokens": st.integers(0, 8),
    "stop_token_ids": st.lists(tokens, max_size=2),
    "ignore_eos": st.booleans(),
}


@st.composite
def jobs(draw: st.DrawFn, fields: tuple[str, ...]) -> Job:
    # Few distinct tokens and a repeated stretch, so that there are repetitions of all lengths.
    piece = draw(st.lists(st.integers(0, 4), min_size=1, max_size=5))
    history = piece * draw(st.integers(1, 4)) + draw(st.lists(st.integers(0, 4), max_size=3))
    prompt = draw(st.integers(1, len(history)))
    words = st.lists(st.integers(0, 4), min_size=1, max_size=3).map(tuple)
    mask = None
    if "structured" in fields:
        mask = torch.tensor(draw(st.lists(st.booleans(), min_size=VOCAB, max_size=VOCAB)))
    params = SamplingParams(
        temperature=draw(st.sampled_from([0.5, 1.0, 2.0])),
        seed=draw(st.integers(0, 2**64 - 1)),
        structured=None if mask is None else StructuredOutput(regex="x"),
        **{field: draw(FIELDS[field]) for field in fields if field in FIELDS},
    )
    resolved = ResolvedTokens(
        tuple(draw(st.lists(words, max_size=3))) if "bad_words" in fields else (),
        tuple(sorted(draw(st.sets(st.integers(0, 4), max_size=2))))
        if "dry_multiplier" in fields
        else (),
    )
    return Job(params, history[:prompt], history[prompt:], resolved, eos=(5, VOCAB + 3), mask=mask)


@pytest.fixture(scope="module")
def kernels() -> RecordingKernels:
    return RecordingKernels()


def check(logits: list[float], job: Job, kernels: RecordingKernels) -> None:
    expected = before_temperature(logits, job)
    row = torch.tensor([logits])
    sampled, scores = run(row, [job], kernels)
    if all(score == NEVER for score in expected):
        assert sampled.failures().keys() == {0}
        return
    assert not sampled.failures()
    greedy, plain = run(row, [replace(job, params=replace(job.params, temperature=0.0))], kernels)
    # Equal but for the rounding of a power of dry_base.
    torch.testing.assert_close(
        plain[0].double(), torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=0
    )
    assert greedy.token_ids.item() == expected.index(max(expected))
    try:
        left = kept([score / job.params.temperature for score in expected], job)
    except Unclear:
        assume(False)
    assert [score == NEVER for score in scores[0].tolist()] == [score == NEVER for score in left]
    torch.testing.assert_close(
        scores[0].softmax(-1),
        torch.tensor(probabilities(left)),
        rtol=1e-5,
        atol=1e-6,
        check_dtype=False,
    )
    assert left[sampled.token_ids.item()] != NEVER


PAIRS = [(name,) for name in FIELDS if not name.startswith(("dry_", "xtc_"))]
PAIRS += [("xtc_probability", "xtc_threshold"), ("structured",), ("bad_words",)]
PAIRS += [("dry_multiplier", "dry_base", "dry_allowed_length"), ("min_tokens", "stop_token_ids")]
logits_rows = st.lists(dyadic, min_size=VOCAB, max_size=VOCAB)


@pytest.mark.few(6)
@pytest.mark.parametrize("fields", PAIRS, ids="+".join)
@settings(max_examples=25, deadline=None)
@given(data=st.data(), logits=logits_rows)
def test_one_parameter(
    fields: tuple[str, ...], data: st.DataObject, logits: list[float], kernels: RecordingKernels
) -> None:
    check(logits, data.draw(jobs(fields)), kernels)


@settings(max_examples=short_or_long(300, 300, quick=60), deadline=None)
@given(data=st.data(), logits=logits_rows)
def test_any_combination(
    data: st.DataObject, logits: list[float], kernels: RecordingKernels
) -> None:
    names = [*FIELDS, "structured", "bad_words"]
    fields = data.draw(
        st.lists(st.sampled_from(names), unique=True, min_size=2, max_size=len(names))
    )
    check(logits, data.draw(jobs(tuple(fields))), kernels)


WIDE: dict[str, dict[str, Any]] = {
    "top_k": {"top_k": 700},
    "nucleus in the head": {"top_p": 0.1871},
    "nucleus beyond the head": {"top_p": 0.9713},
    "typical": {"typical_p": 0.1871},
    "typical beyond the head": {"typical_p": 0.9713},
    "min_p": {"min_p": 0.0013},
    "top_n_sigma": {"top_n_sigma": 1.0971},
    "xtc": {"xtc_probability": 1.0, "xtc_threshold": 0.00171},
    "all": {"top_n_sigma": 3.7, "top_k": 4000, "top_p": 0.95, "min_p": 0.0007, "typical_p": 0.9}
    | {"xtc_probability": 1.0, "xtc_threshold": 0.0037},
}


@pytest.mark.few(1)
@pytest.mark.parametrize("vocab_size", [8191, 8193, 32000, 49152, 151936])
def test_wide_vocabularies(vocab_size: int, kernels: RecordingKernels) -> None:
    """Among so many tokens some always lie at a limit's edge: those float32 may put on the other
    side.
    """
    logits = (
        torch.randn(len(WIDE), vocab_size, generator=torch.Generator().manual_seed(vocab_size))
        * 1.5
    )
    jobs = [Job(SamplingParams(temperature=0.75, seed=1, **filters)) for filters in WIDE.values()]
    sampled, scores = run(logits, jobs, kernels)
    for name, job, row, own, token in zip(
        WIDE, jobs, logits, scores, sampled.token_ids, strict=True
    ):
        expected = torch.tensor(
            kept((row.double() / 0.75).tolist(), job, near=0.0), dtype=torch.float64
        )
        wrong = (own == NEVER) != (expected == NEVER)
        assert wrong.sum() <= 2, name
        assert (row.double() / 0.75).softmax(-1)[wrong].sum() < 1e-3, name
        assert 0 < (own != NEVER).sum() < vocab_size
        assert own[token] != NEVER


def test_nothing_left_is_that_rows_failure_alone(kernels: RecordingKernels) -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0]]).repeat(3, 1)
    for changes in (
        {},
        {"temperature": 0.0},
        {"top_p": 0.5, "typical_p": 0.5, "top_n_sigma": 1.0, "min_p": 0.1, "top_k": 2},
    ):
        stuck = Job(
            SamplingParams(allowed_token_ids=(1,), xtc_probability=1.0, seed=1, **changes),
            resolved=ResolvedTokens(bad_word_ids=((1,),)),
        )
        fine = Job(SamplingParams(seed=1))
        sampled, _ = run(logits, [fine, stuck, fine], kernels)
        assert list(sampled.failures()) == [1]
        alone, _ = run(logits[:1], [fine], kernels)
        assert sampled.token_ids[0] == sampled.token_ids[2] == alone.token_ids[0]
