"""Stop strings against a plain search of the whole text, and through the API on a real model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from quire import LLM, SamplingParams
from quire.frontend.detokenizer import IncrementalDetokenizer
from quire.frontend.stop_strings import StopAutomaton, StopMatcher, stop_automaton
from quire.step import StepLogEntry
from tests.long_runs import examples


def naive(text: str, strings: list[str]) -> tuple[int, int] | None:
    """(start, end) of the match that is complete first, the longest among those."""
    for end in range(1, len(text) + 1):
        found = [len(string) for string in strings if text[:end].endswith(string)]
        if found:
            return end - max(found), end
    return None


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    bounds = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[a:b] for a, b in pairwise(bounds)]


WORDS = st.text(alphabet="abé", min_size=1, max_size=5)


@settings(max_examples=examples(400))
@given(text=st.text(alphabet="abé", max_size=24), strings=st.lists(WORDS, min_size=1, max_size=4),
       cuts=st.lists(st.integers(0, 24), max_size=12), include=st.booleans())  # fmt: skip
@example(text="abcd", strings=["abcd", "bc"], cuts=[], include=False)
@example(text="aabaabaab", strings=["aabaac", "baabaab"], cuts=[1, 2, 3], include=False)
def test_it_finds_what_a_plain_search_finds(
    text: str, strings: list[str], cuts: list[int], include: bool
) -> None:
    matcher = StopMatcher(StopAutomaton(strings), include)
    shown = ""
    read = ""
    expected = naive(text, strings)
    for piece in pieces_of(text, cuts):
        shown += matcher.push(piece)
        read += piece
        assert (matcher.match is not None) == (naive(read, strings) is not None)
        if not include and matcher.match is None:
            # Nothing that may yet become a stop string is out, and nothing else is held back.
            longest = max(k for s in strings for k in range(len(s)) if read.endswith(s[:k]))
            assert shown == read[: len(read) - longest]
    if expected is None:
        assert shown + matcher.finish() == text
        return
    start, end = expected
    assert matcher.match == text[start:end]
    assert shown == text[: end if include else start]
    assert matcher.finish() == ""
    assert matcher.push("more") == ""


def test_a_match_that_may_not_stop_is_text_but_its_end_may_begin_another() -> None:
    matcher = StopMatcher(stop_automaton(("abab",)), include_match=False)
    assert matcher.push("xabab", may_stop=False) == "xab"
    assert matcher.match is None
    assert matcher.push("ab") == ""
    assert matcher.match == "abab"


def test_reading_takes_linear_time_on_the_worst_strings() -> None:
    steps = 0

    class Counting(StopAutomaton):
        def next(self, node: int, character: str) -> int:
            nonlocal steps
            while character not in self.children[node]:
                steps += 1
                if node == 0:
                    return 0
                node = self.fallback[node]
            steps += 1
            return self.children[node][character]

    automaton = Counting(["a" * k + "b" for k in range(900, 964)])
    steps = 0
    matcher = StopMatcher(automaton, include_match=False)
    for _ in range(5):
        matcher.push("a" * 2000 + "c")
    assert matcher.match is None
    assert steps <= 2 * 5 * 2001 + 5


# Through the API


PROMPT = "Count with me: one, two, three,"
FREE = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(smollm2_gguf: Path) -> Iterator[LLM]:
    with LLM(smollm2_gguf, kv_cache_memory="64MiB", max_model_len=512, max_num_seqs=8) as llm:
        yield llm


@pytest.fixture(scope="module")
def free(llm: LLM) -> tuple[str, tuple[int, ...]]:
    """What the model says if nothing stops it."""
    output = llm.generate(PROMPT, FREE)[0]
    return output.text, output.token_ids


def pieces(llm: LLM, token_ids: tuple[int, ...]) -> list[str]:
    """The text each token adds."""
    detokenizer = IncrementalDetokenizer(llm.engine.tokenizer, prompt_ids=[1])
    return [detokenizer.push(token_id) for token_id in token_ids]


@pytest.mark.few(2)
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_across_tokens_ends_the_answer(
    llm: LLM,
    free: tuple[str, tuple[int, ...]],
    include: bool,
    depth: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(llm.engine.core, "depth", depth)
    text, token_ids = free
    each = pieces(llm, token_ids)
    # From inside the fourth token into the sixth: it has to be put together from three.
    begin = len("".join(each[:4])) - 1
    end = len("".join(each[:5])) + 1
    stop = text[begin:end]
    begin = text.find(stop)
    end = begin + len(stop)
    count = next(i for i in range(len(each)) if len("".join(each[: i + 1])) >= end) + 1
    params = replace(
        FREE, stop=("no such text", stop), include_stop_str_in_output=include, logprobs=0
    )
    output = llm.generate(PROMPT, params)[0]
    (completion,) = output.completions
    assert completion.text == text[: end if include else begin]
    assert completion.token_ids == token_ids[:count]
    assert (completion.finish_reason, completion.stop_reason, completion.stop_token_id) == (
        "stop",
        stop,
        None,
    )
    assert len(completion.logprobs or ()) == count
    assert completion.metrics.num_output_tokens == count
    shown = ""
    for delta in llm.stream(PROMPT, params):
        shown += delta
        assert completion.text.startswith(shown)
    assert shown == completion.text
    for _ in range(2):
        llm.step()
    assert not llm.has_work
    assert llm.engine.core.scheduler.blocks.pool.num_free == llm.engine.plan.num_blocks - 1


def test_the_engine_logs_a_stop_and_computes_no_further(
    llm: LLM, free: tuple[str, tuple[int, ...]]
) -> None:
    log = llm.engine.step_log
    assert log is not None
    while llm.has_work:  # the end of an earlier request may still be to be logged
        llm.step()
    before = len(log)
    stop = free[0][3:6]
    llm.generate(PROMPT, replace(FREE, stop=stop))
    while llm.has_work:
        llm.step()
    entries: list[StepLogEntry] = list(log)[before:]
    assert [finished.reason for entry in entries for finished in entry.step.finished] == ["stop"]
    assert sum(len(entry.step.scheduled) for entry in entries) < 6


def test_text_held_back_comes_out_when_the_answer_ends_otherwise(
    llm: LLM, free: tuple[str, tuple[int, ...]]
) -> None:
    text, token_ids = free
    params = replace(FREE, stop=(text[-5:] + "never",))
    output = llm.generate(PROMPT, params)[0]
    assert (output.text, output.token_ids, output.finish_reason) == (text, token_ids, "length")
    assert output.completions[0].stop_reason is None
    assert "".join(llm.stream(PROMPT, params)) == text
    ended = llm.generate(
        PROMPT, replace(params, stop=text[:2] + "never", stop_token_ids=token_ids[1:2])
    )[0]
    assert ended.text == pieces(llm, token_ids)[0]
    assert ended.completions[0].stop_reason == ended.completions[0].stop_token_id == token_ids[1]


def test_a_stop_string_with_the_last_token_is_a_stop(
    llm: LLM, free: tuple[str, tuple[int, ...]]
) -> None:
    text, token_ids = free
    each = pieces(llm, token_ids)
    assert each[2] not in "".join(each[:2])
    output = llm.generate(PROMPT, replace(FREE, max_tokens=3, stop=each[2]))[0]
    assert (output.text, output.token_ids, output.finish_reason) == (
        "".join(each[:2]),
        token_ids[:3],
        "stop",
    )
    short = llm.generate(PROMPT, replace(FREE, max_tokens=2, stop=text[:1]))[0]
    assert (short.text, short.finish_reason, len(short.token_ids)) == ("", "stop", 1)


def test_min_tokens_keeps_early_stop_strings_as_text(
    llm: LLM, free: tuple[str, tuple[int, ...]]
) -> None:
    text, token_ids = free
    each = pieces(llm, token_ids)
    first, second = (i for i in range(5) if each[i] == ",")
    for min_tokens, last in ((0, first), (first, first), (first + 1, second), (second, second)):
        output = llm.generate(PROMPT, replace(FREE, stop=",", min_tokens=min_tokens))[0]
        assert output.token_ids == token_ids[: last + 1]
        assert output.text == "".join(each[:last])
    assert llm.generate(PROMPT, replace(FREE, stop=",", min_tokens=30))[0].text == text


def test_answers_stop_each_for_themselves(llm: LLM) -> None:
    params = SamplingParams(seed=5, n=4, max_tokens=25, stop=("e", "o"))
    several = llm.generate(PROMPT, params)[0]
    for completion in several.completions:
        alone = llm.generate(PROMPT, replace(params, n=1, seed=completion.seed))[0].completions[0]
        assert (completion.text, completion.token_ids) == (alone.text, alone.token_ids)
        assert completion.stop_reason == alone.stop_reason
        assert "e" not in completion.text
        assert "o" not in completion.text


def test_special_tokens_are_shown_only_when_asked(llm: LLM) -> None:
    bias = {2: 100.0}  # <|im_end|>, which ends answers
    params = SamplingParams(temperature=0, max_tokens=3, logit_bias=bias, ignore_eos=True)
    assert llm.generate(PROMPT, params)[0].text == ""
    shown = llm.generate(PROMPT, replace(params, skip_special_tokens=False))[0]
    assert shown.text == "<|im_end|>" * 3
    ended = replace(params, ignore_eos=False, skip_special_tokens=False)
    assert llm.generate(PROMPT, ended)[0].text == ""
    assert (
        llm.generate(PROMPT, replace(ended, include_stop_str_in_output=True))[0].text
        == "<|im_end|>"
    )
    stopped = llm.generate(PROMPT, replace(params, skip_special_tokens=False, stop="end|><|im"))[0]
    assert (stopped.text, stopped.completions[0].stop_reason) == ("<|im_", "end|><|im")


@pytest.mark.parametrize("spaces", [True, False])
def test_spaces_between_special_tokens_are_those_of_the_tokenizer(llm: LLM, spaces: bool) -> None:
    """There are none: Quire decodes as transformers' fast tokenizers do, which put no spaces for
    either value.
    """
    params = SamplingParams(
        temperature=0, max_tokens=3, logit_bias={2: 100.0}, ignore_eos=True, skip_special_tokens=False,
        spaces_between_special_tokens=spaces,
    )  # fmt: skip
    output = llm.generate(PROMPT, params)[0]
    theirs = PreTrainedTokenizerFast(tokenizer_object=llm.engine.tokenizer._backend)
    expected = theirs.decode(
        output.token_ids,
        skip_special_tokens=False,
        spaces_between_special_tokens=spaces,
        clean_up_tokenization_spaces=False,
    )
    assert output.text == expected
