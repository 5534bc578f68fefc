"""Beam search against a search that looks at every continuation, and against transformers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from quire import LLM, SamplingParams
from quire.errors import InvalidRequestError
from quire.frontend.beam_search import Beam, BeamSearchParams, Continuations
from quire.outputs import RequestDelta
from tests.beams import search_beams
from tests.decoding import all_logits
from tests.long_runs import examples

VOCAB = 6


def fake_logprobs(tokens: Sequence[int], seed: int, coarse: bool) -> list[float]:
    """A made-up model; a coarse one gives the same logprob to many tokens, so that ties decide."""
    generator = torch.Generator().manual_seed(hash((*tokens, seed)) % 2**31)
    logits = torch.randn(VOCAB, generator=generator, dtype=torch.float64)
    values: list[float] = logits.log_softmax(-1).tolist()
    return [math.floor(value) for value in values] if coarse else values


def naive(
    params: BeamSearchParams, seed: int, coarse: bool
) -> list[tuple[tuple[int, ...], float, str]]:
    """All continuations of all beams, to the very end, as the definition says."""
    live: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    finished: list[tuple[float, tuple[int, ...], float, str]] = []
    for _ in range(params.max_tokens):
        every = []
        for index, (tokens, total) in enumerate(live):
            for token, logprob in enumerate(fake_logprobs(tokens, seed, coarse)):
                every.append((-(total + logprob), index, token))
        live_next: list[tuple[tuple[int, ...], float]] = []
        for negative, index, token in sorted(every):
            if len(live_next) == params.beam_width:
                break
            tokens = (*live[index][0], token)
            if token in params.end_token_ids:
                finished.append(
                    (-negative / len(tokens) ** params.length_penalty, tokens, -negative, "stop")
                )
            else:
                live_next.append((tokens, -negative))
        live = live_next
    finished += [(total / len(t) ** params.length_penalty, t, total, "length") for t, total in live]
    finished.sort(key=lambda item: -item[0])
    return [item[1:] for item in finished[: params.beam_width]]


@settings(max_examples=examples(150))
@given(
    width=st.integers(1, 4),
    max_tokens=st.integers(1, 6),
    penalty=st.sampled_from([-1.0, 0.0, 0.6, 1.0, 2.0]),
    ends=st.frozensets(st.integers(0, VOCAB - 1), max_size=2),
    seed=st.integers(0, 1000),
    coarse=st.booleans(),
)
def test_it_finds_what_a_search_of_everything_finds(
    width: int, max_tokens: int, penalty: float, ends: frozenset[int], seed: int, coarse: bool
) -> None:
    params = BeamSearchParams(width, max_tokens, penalty, ends)

    def expand(beams: Sequence[tuple[int, ...]]) -> list[Continuations]:
        found = []
        for tokens in beams:
            logprobs = fake_logprobs(tokens, seed, coarse)
            order = sorted(range(VOCAB), key=lambda i: (-logprobs[i], i))
            found.append([(i, logprobs[i]) for i in order[: params.num_continuations]])
        return found

    beams = search_beams(params, expand)
    assert [(b.token_ids, b.cumulative_logprob, b.finish_reason) for b in beams] == naive(
        params, seed, coarse
    )


def test_it_ends_as_soon_as_nothing_better_can_come() -> None:
    calls = 0

    def expand(beams: Sequence[tuple[int, ...]]) -> list[Continuations]:
        nonlocal calls
        calls += 1
        return [[(0, -0.01), (1, -5.0), (2, -9.0)] for _ in beams]

    beams = search_beams(BeamSearchParams(1, 1000, 1.0, frozenset({0})), expand)
    assert beams == [Beam((0,), -0.01, -0.01, "stop")]
    # The live beam loses 5 at every step: at -15, even spread over 1000 tokens, it can't become
    # better.
    assert calls == 3


@pytest.mark.parametrize("penalty", [0.0, 1.0])
def test_without_ends_it_is_the_search_of_transformers(penalty: float) -> None:
    config = LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        bos_token_id=None, eos_token_id=None, pad_token_id=0, initializer_range=0.4,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).double().eval()
    prompt = [3, 1, 4, 1, 5]
    theirs = model.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, 5), do_sample=False, num_beams=4, num_return_sequences=4,
        max_new_tokens=7, length_penalty=penalty, return_dict_in_generate=True, output_scores=True,
    )  # fmt: skip
    params = BeamSearchParams(4, 7, penalty, frozenset())

    @torch.inference_mode()
    def expand(beams: Sequence[tuple[int, ...]]) -> list[Continuations]:
        logits = model(torch.tensor([[*prompt, *tokens] for tokens in beams])).logits[:, -1]
        values, ids = logits.log_softmax(-1).topk(params.num_continuations)
        return [
            list(zip(*pair, strict=True))
            for pair in zip(ids.tolist(), values.tolist(), strict=True)
        ]

    beams = search_beams(params, expand)
    assert [list(beam.token_ids) for beam in beams] == theirs.sequences[:, 5:].tolist()
    # They keep the totals in float32.
    assert [beam.score for beam in beams] == pytest.approx(
        theirs.sequences_scores.tolist(), rel=1e-5
    )


@pytest.fixture(scope="module")
def llm(smollm2_gguf: Path) -> Iterator[LLM]:
    with LLM(
        smollm2_gguf, kv_cache_memory="64MiB", max_model_len=256, max_num_seqs=8, dtype="float32"
    ) as llm:
        yield llm


def test_a_beam_of_one_is_greedy_and_wider_ones_are_at_least_as_likely(llm: LLM) -> None:
    prompt = "The three primary colours are"
    greedy = llm.generate(
        prompt, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)
    )[0]
    one = llm.beam_search(prompt, 1, 8, ignore_eos=True)
    assert (one.text, one.beams[0].token_ids) == (greedy.text, greedy.token_ids)
    assert one.beams[0].cumulative_logprob == greedy.completions[0].cumulative_logprob
    assert one.beams[0].finish_reason == "length"
    four = llm.beam_search(prompt, 4, 8, ignore_eos=True)
    assert len({beam.token_ids for beam in four.beams}) == 4
    assert four.beams[0].score >= one.beams[0].score
    assert [beam.score for beam in four.beams] == sorted(
        (beam.score for beam in four.beams), reverse=True
    )
    assert four.beams[0].score == four.beams[0].cumulative_logprob / 8


def test_the_logprobs_are_those_of_the_sequence(llm: LLM) -> None:
    output = llm.beam_search("A cat and a", 3, 5, stop_token_ids=(30,))
    for beam in output.beams:
        tokens = [*output.prompt_token_ids, *beam.token_ids]
        logprobs = all_logits(llm.engine.decoder, tokens).double().log_softmax(-1)
        start = len(output.prompt_token_ids)
        total = sum(float(logprobs[i - 1, tokens[i]]) for i in range(start, len(tokens)))
        assert beam.cumulative_logprob == pytest.approx(total, abs=1e-4 * len(beam.token_ids))
        if beam.stop_token_id is not None:
            assert beam.stop_token_id in (2, 0, 30)
            assert beam.text == llm.engine.tokenizer.decode(beam.token_ids[:-1])


def test_every_beam_computes_one_token_per_step(llm: LLM) -> None:
    log = llm.engine.step_log
    assert log is not None
    before = len(log)
    llm.beam_search(list(range(100, 170)), 4, 6, ignore_eos=True)
    computed = [entry.step.num_tokens for entry in list(log)[before:] if entry.step.num_tokens]
    assert computed == [70, 4, 4, 4, 4, 4]
    assert llm.engine.core.scheduler.blocks.pool.num_free == llm.engine.plan.num_blocks - 1


def test_the_beams_are_those_that_requests_of_one_token_find(llm: LLM) -> None:
    prompt = llm.engine.tokenizer.encode("It was a dark and stormy")
    params = BeamSearchParams(3, 6, 1.0, frozenset(llm.engine.eos_token_ids))
    one = SamplingParams(
        temperature=0, max_tokens=1, ignore_eos=True, logprobs=params.num_continuations
    )

    def expand(beams: Sequence[tuple[int, ...]]) -> list[Continuations]:
        found: list[Continuations] = []
        for output in llm.generate([[*prompt, *tokens] for tokens in beams], one):
            logprobs = output.completions[0].logprobs
            assert logprobs is not None
            found.append([(entry.token_id, entry.logprob) for entry in logprobs[0].top])
        return found

    got = llm.beam_search(prompt, 3, 6).beams
    assert [replace(beam, text="") for beam in got] == search_beams(params, expand)


def test_a_stream_goes_on_around_a_search(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=12)
    expected = llm.generate("Once upon a time", params)[0].text
    beams = llm.beam_search("The sea is", 3, 5)
    stream = llm.stream("Once upon a time", params)
    text = next(stream)
    assert llm.beam_search("The sea is", 3, 5) == beams
    assert text + "".join(stream) == expected


def test_a_search_that_is_interrupted_leaves_nothing_behind(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = 0
    step = llm.step

    def interrupted() -> list[RequestDelta]:
        nonlocal steps
        steps += 1
        if steps == 4:
            raise KeyboardInterrupt
        return step()

    with monkeypatch.context() as patch:
        patch.setattr(llm, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.beam_search("The sea is", 3, 9)
    scheduler = llm.engine.core.scheduler
    assert not scheduler.table.requests
    assert scheduler.blocks.pool.num_free == llm.engine.plan.num_blocks - 1
    assert len(llm.beam_search("The sea is", 3, 2).beams) == 3


def test_a_context_that_is_full_ends_the_search(llm: LLM) -> None:
    output = llm.beam_search([5] * 253, 2, 50, ignore_eos=True)
    assert {len(beam.token_ids) for beam in output.beams} == {3}
    assert {beam.finish_reason for beam in output.beams} == {"length"}


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"beam_width": 0}, "beam_width"),
        ({"beam_width": 101}, "beam_width"),
        ({"beam_width": 2.5}, "beam_width"),
        ({"beam_width": 99}, "beam_width"),  # with the end tokens, more than logprobs can be had
        ({"max_tokens": 0}, "max_tokens"),
        ({"length_penalty": float("nan")}, "length_penalty"),
        ({"stop_token_ids": (49_152,)}, "stop_token_ids"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"prompt": ""}, "prompt"),
    ],
)
def test_what_cannot_be_is_refused(llm: LLM, changes: dict[str, Any], field: str) -> None:
    arguments: dict[str, Any] = {"prompt": "x", "beam_width": 2, "max_tokens": 2, **changes}
    with pytest.raises(InvalidRequestError, match=field):
        llm.beam_search(**arguments)
    assert not llm.engine.core.scheduler.table.requests
