"""Logprobs: equal to their definition, bit for bit, whatever happens around the request."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire import LLM, SamplingParams
from quire.backends.select import select_kernels
from quire.engine import make_requests
from quire.errors import InvalidRequestError
from quire.kernels.weights import Weight
from quire.models.decoder import Decoder
from quire.models.linear import Rows
from quire.outputs import TokenLogprobs
from quire.sampling.logprobs import ROWS_AT_ONCE, logprobs_of_rows, read_logprobs
from quire.sampling.sampler import NOT_NUMBERS
from quire.step import RequestUpdate, TokenLogprob
from tests.decoding import all_logits
from tests.random_models import SPECS, Bench, Transcript, random_decoder

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SCENARIOS: dict[str, dict[str, Any]] = {
    "one batch": {},
    "chunks of 7": {"max_num_seqs": 4, "max_batched_tokens": 7},
    "no prefix cache": {"prefix_caching": False},
    "blocks of 4": {"block_size": 4, "max_num_seqs": 5},
    "preempted every third step": {
        "preempt_every": 3,
        "max_batched_tokens": 40,
        "max_num_seqs": 24,
    },
    "swapped every third step": {
        "preempt_every": 3,
        "num_host_blocks": 64,
        "max_batched_tokens": 40,
    },
    "hardly any memory and a host tier": {
        "num_blocks": 24,
        "num_host_blocks": 12,
        "max_batched_tokens": 96,
    },
}


def gather_logprobs(
    logits: Tensor, token_ids: Tensor, num_top: Sequence[int]
) -> list[TokenLogprob]:
    kernels = select_kernels(logits.device, torch.float32)
    return read_logprobs(
        logprobs_of_rows(logits, lambda rows: rows, token_ids, max(num_top), kernels), num_top
    )


def make_decoder(family: str, dtype: torch.dtype) -> Decoder:
    return random_decoder(SPECS[family], select_kernels(torch.device("cpu"), dtype, "auto"), dtype)


def define(logits: Tensor, token_id: int, num_top: int) -> TokenLogprob:
    """The definition, the slow and obvious way."""
    logprobs = logits.log_softmax(-1).tolist()
    order = sorted(range(len(logprobs)), key=lambda i: (-float(logits[i]), i))
    top = tuple((i, logprobs[i]) for i in order[:num_top])
    return TokenLogprob(token_id, logprobs[token_id], 1 + order.index(token_id), top)


def define_all(
    decoder: Decoder, tokens: Sequence[int], start: int, num_top: int
) -> list[TokenLogprob]:
    """The scores of tokens[start:], from logits computed without any engine."""
    logits = all_logits(decoder, tokens)
    return [define(logits[i - 1], tokens[i], num_top) for i in range(start, len(tokens))]


def workload(seed: int) -> tuple[list[list[int]], list[SamplingParams]]:
    source = random.Random(seed)
    shared = [source.randrange(97) for _ in range(90)]
    prompts, params = [], []
    for i in range(14):
        length = source.choice([1, 2, 16, 17, 33, 64, 90])
        common = source.choice([0, 16, 40, length]) % (length + 1)
        prompts.append(shared[:common] + [source.randrange(97) for _ in range(length - common)])
        params.append(
            SamplingParams(
                temperature=source.choice([0.0, 1.2]),
                top_k=source.choice([0, 5]),
                seed=i,
                max_tokens=source.choice([1, 6, 12]),
                n=source.choice([1, 1, 3]),
                logprobs=source.choice([None, 0, 3, 100]),
                prompt_logprobs=source.choice([None, 0, 2, 100]),
            )
        )
    return prompts, params


def assert_defined(
    decoder: Decoder, prompts: list[list[int]], params: list[SamplingParams], got: Transcript
) -> None:
    for i, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
        if one.prompt_logprobs is None or len(prompt) == 1:
            assert str(i) not in got.prompt_logprobs
        else:
            expected = define_all(decoder, prompt, 1, one.prompt_logprobs)
            assert got.prompt_logprobs[str(i)] == dict(enumerate(expected, start=1))
        for name in [str(i)] if one.n == 1 else [f"{i}/{k}" for k in range(one.n)]:
            answer = got.tokens[name]
            assert len(answer) == one.max_tokens
            if one.logprobs is None:
                assert got.logprobs[name] == []
            else:
                assert got.logprobs[name] == define_all(
                    decoder, prompt + answer, len(prompt), one.logprobs
                )


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_logprobs_are_what_the_definition_says_in_every_scenario(family: str, dtype: str) -> None:
    decoder = make_decoder(family, DTYPES[dtype])
    prompts, params = workload(seed=len(family))
    first: Transcript | None = None
    for name, options in SCENARIOS.items():
        got = Bench(decoder, **options).run(prompts, params)
        if first is None:
            first = got
            assert_defined(decoder, prompts, params, got)
        assert got.logprobs == first.logprobs, name
        assert got.prompt_logprobs == first.prompt_logprobs, name
        if "every third" in name:
            assert got.preemptions > 0


@pytest.mark.parametrize("boundary", [0, 1, 16, 48, 63, 64])
def test_a_prompt_in_the_cache_is_scored_all_the_same(boundary: int) -> None:
    decoder = make_decoder("mistral", torch.float32)
    source = random.Random(boundary)
    base = [source.randrange(97) for _ in range(64)]
    prompt = base[:boundary] + [source.randrange(97) for _ in range(64 - boundary)]
    asking = SamplingParams(temperature=0, max_tokens=3, logprobs=2, prompt_logprobs=3)
    warm = Bench(decoder)
    warm.run([base], [SamplingParams(max_tokens=1)], ids=["warm"])
    got = warm.run([prompt], [asking])
    assert got.cached_tokens == 0
    assert_defined(decoder, [prompt], [asking], got)
    silent = warm.run([prompt], [replace(asking, prompt_logprobs=None)])
    assert silent.cached_tokens == 48  # what the scored one computed serves the others
    assert silent.logprobs == got.logprobs


def test_several_answers_share_the_prompts_logprobs() -> None:
    decoder = make_decoder("qwen3", torch.float32)
    prompt = [random.Random(4).randrange(97) for _ in range(50)]
    params = SamplingParams(n=4, seed=1, max_tokens=5, logprobs=1, prompt_logprobs=1)
    got = Bench(decoder, max_batched_tokens=20, max_num_seqs=8).run([prompt], [params])
    assert got.cached_tokens == 3 * 49
    assert_defined(decoder, [prompt], [params], got)


def test_a_long_prompt_is_scored_a_few_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = make_decoder("llama", torch.float32)
    seen: list[int] = []
    head = decoder.logits
    monkeypatch.setattr(
        decoder,
        "logits",
        lambda hidden, **more: (seen.append(len(hidden)), head(hidden, **more))[1],
    )
    prompt = [random.Random(5).randrange(97) for _ in range(400)]
    Bench(decoder, recorded=False).run(
        [prompt], [SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=0)]
    )
    assert max(seen) <= ROWS_AT_ONCE
    assert sum(seen) == 399 + 2  # the prompt's, and the answer's two
    seen.clear()
    Bench(decoder, recorded=False).run(
        [prompt], [SamplingParams(temperature=0, max_tokens=2, logprobs=3)]
    )
    assert seen == [1, 1]


def test_logprobs_that_are_not_numbers_fail_the_one_who_asked() -> None:
    decoder = make_decoder("mistral", torch.float32)
    table = decoder.embedding(Rows(decoder.kernels), torch.arange(97)).clone()
    table[5] = float("nan")
    decoder.update({"embedding": Weight.dense(table)})
    bench = Bench(decoder)
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=0)
    for name, prompt in (("good", [1, 2, 3, 4]), ("bad", [1, 5, 3, 4])):
        bench.core.add_request(make_requests(name, prompt, params, 0)[0], 0.0)
    updates: dict[str, list[RequestUpdate]] = {"good": [], "bad": []}
    while bench.core.has_work:
        for update in bench.core.step(0.0):
            updates[update.request_id].append(update)
    assert [update.error for update in updates["bad"]] == [NOT_NUMBERS]
    assert [update.finish_reason for update in updates["good"]] == [None, None, "length"]
    assert updates["good"][0].prompt_logprobs is not None


@pytest.mark.few(1)
@pytest.mark.parametrize("vocab_size", [7, 1000, 8193])
def test_ties_go_to_the_lowest_id(vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randint(-3, 3, (2 * ROWS_AT_ONCE + 1, vocab_size), generator=generator) / 4
    logits[0] = 0.0
    logits[1, ::2] = -0.0
    tokens = torch.randint(0, vocab_size, (len(logits),), generator=generator)
    num_top = [i % 9 for i in range(len(logits))]
    expected = [define(*row) for row in zip(logits, tokens.tolist(), num_top, strict=True)]
    assert gather_logprobs(logits, tokens, num_top) == expected


def test_a_rows_scores_do_not_depend_on_its_company() -> None:
    logits = torch.randn(100, 49_152, generator=torch.Generator().manual_seed(0))
    tokens = torch.arange(100)
    together = gather_logprobs(logits, tokens, [i % 30 for i in range(100)])
    for i in (0, 1, 57, 99):
        assert gather_logprobs(logits[i : i + 1].clone(), tokens[i : i + 1], [i % 30]) == [
            together[i]
        ]


def test_scores_are_read_from_copies_of_their_tensors() -> None:
    logits = torch.randn(ROWS_AT_ONCE + 3, 50, generator=torch.Generator().manual_seed(1))
    tokens = torch.arange(len(logits)) % 50
    num_top = [i % 4 for i in range(len(logits))]
    kernels = select_kernels(torch.device("cpu"), torch.float32)
    scores = logprobs_of_rows(logits, lambda rows: rows, tokens, max(num_top), kernels)
    copies = [tensor.clone() for tensor in scores]
    expected = gather_logprobs(logits, tokens, num_top)
    tokens.zero_()  # as the tokens of a row that is somebody else's by then
    assert read_logprobs(copies, num_top) == read_logprobs(scores, num_top) == expected
    assert [len(score.top) for score in expected] == num_top


# Through the API


@pytest.fixture(scope="module")
def llm(smollm2_gguf: Path) -> Iterator[LLM]:
    with LLM(smollm2_gguf, kv_cache_memory="64MiB", max_model_len=512, max_num_seqs=8) as llm:
        yield llm


def test_a_completion_tells_the_logprobs_of_its_tokens(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=3)
    completion = llm.generate("The capital of France is", params)[0].completions[0]
    assert completion.logprobs is not None
    assert tuple(entry.token_id for entry in completion.logprobs) == completion.token_ids
    assert b"".join(entry.token_bytes for entry in completion.logprobs).decode() == completion.text
    assert "Paris" in completion.logprobs[0].text
    for entry in completion.logprobs:
        assert entry.rank == 1
        assert [item.rank for item in entry.top] == [1, 2, 3]
        assert (entry.token_id, entry.logprob) == (entry.top[0].token_id, entry.top[0].logprob)
        assert 0 >= entry.top[0].logprob >= entry.top[1].logprob >= entry.top[2].logprob
    assert completion.cumulative_logprob == sum(entry.logprob for entry in completion.logprobs)
    silent = llm.generate("The capital of France is", replace(params, logprobs=None))[
        0
    ].completions[0]
    assert (silent.token_ids, silent.logprobs, silent.cumulative_logprob) == (
        completion.token_ids,
        None,
        None,
    )


def test_logprobs_are_the_models_own_whatever_sampling_does(llm: LLM) -> None:
    plain = SamplingParams(temperature=0, max_tokens=1, logprobs=100)
    (first,) = llm.generate("Once upon a", plain)[0].completions[0].logprobs or ()
    likely = {item.token_id: item for item in first.top}
    least = first.top[-1].token_id
    bent = replace(plain, temperature=1.7, seed=3, top_k=2, logit_bias={least: 100.0}, logprobs=1)
    (entry,) = llm.generate("Once upon a", bent)[0].completions[0].logprobs or ()
    assert entry.token_id == least
    assert (entry.logprob, entry.rank) == (likely[least].logprob, 100)
    assert entry.top == first.top[:1]


def test_prompt_logprobs_of_a_prompt_seen_before_and_of_several_answers(llm: LLM) -> None:
    prompt = "The quick brown fox jumps over the lazy dog, and then the dog gets up and runs after the fox."
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=2)
    first = llm.generate(prompt, params)[0]
    assert first.prompt_logprobs is not None
    assert first.prompt_logprobs[0] is None
    scored = [entry for entry in first.prompt_logprobs if isinstance(entry, TokenLogprobs)]
    assert tuple(entry.token_id for entry in scored) == first.prompt_token_ids[1:]
    assert llm.generate(prompt, params)[0].prompt_logprobs == first.prompt_logprobs
    several = llm.generate(prompt, replace(params, temperature=1.0, n=3))[0]
    assert several.prompt_logprobs == first.prompt_logprobs
    assert sum(completion.metrics.cached_tokens for completion in several.completions) > 0
    assert llm.generate(prompt, SamplingParams(max_tokens=1))[0].prompt_logprobs is None
    assert llm.generate([[1]], params)[0].prompt_logprobs == (None,)


def test_deltas_carry_the_logprobs_of_their_tokens(llm: LLM) -> None:
    name = llm.add_request(
        "One, two, three,", SamplingParams(temperature=0, max_tokens=5, logprobs=1)
    )
    entries: list[TokenLogprobs] = []
    while llm.has_work:
        for delta in llm.step():
            assert delta.request_id == name
            assert tuple(entry.token_id for entry in delta.logprobs) == delta.token_ids
            entries += delta.logprobs
            if delta.output is not None:
                assert delta.output.completions[0].logprobs == tuple(entries)
    assert len(entries) == 5


@pytest.mark.slow
def test_best_of_returns_the_answers_with_the_highest_mean_logprob(llm: LLM) -> None:
    prompt = "My favourite animal is"
    params = SamplingParams(seed=20, max_tokens=6, n=2, best_of=5)
    output = llm.generate(prompt, params)[0]
    singles = [
        llm.generate(prompt, SamplingParams(seed=20 + i, max_tokens=6, logprobs=0))[0].completions[
            0
        ]
        for i in range(5)
    ]
    means = {one.seed: (one.cumulative_logprob or 0) / len(one.token_ids) for one in singles}
    best = sorted(means, key=lambda seed: -means[seed])[:2]
    assert [completion.seed for completion in output.completions] == best
    assert [completion.index for completion in output.completions] == [0, 1]
    for completion in output.completions:
        alone = singles[completion.seed - 20]
        assert completion.token_ids == alone.token_ids
        assert completion.cumulative_logprob == alone.cumulative_logprob
        assert completion.logprobs is None
    with_logprobs = llm.generate(prompt, replace(params, logprobs=1))[0]
    assert [one.token_ids for one in with_logprobs.completions] == [
        one.token_ids for one in output.completions
    ]
    assert all(len(one.logprobs or ()) == len(one.token_ids) for one in with_logprobs.completions)
    with pytest.raises(InvalidRequestError, match="best_of"):
        llm.stream(prompt, replace(params, n=1))


def test_a_request_that_cannot_choose_fails_alone_though_it_asks_for_logprobs(llm: LLM) -> None:
    def forbid_all(token_ids: Tensor, logits: Tensor) -> Tensor:
        return logits.fill_(float("-inf"))

    def raise_always(token_ids: Tensor, logits: Tensor) -> Tensor:
        raise ValueError("not today")

    good = SamplingParams(temperature=0, max_tokens=3, logprobs=2)
    params = [
        replace(good, logits_processors=(function,)) for function in (forbid_all, raise_always)
    ]
    outputs = llm.generate(["One, two,"] * 3, [*params, good])
    assert [output.finish_reason for output in outputs] == ["error", "error", "length"]
    assert len(outputs[2].completions[0].logprobs or ()) == 3
