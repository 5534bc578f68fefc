"""Answers of gpt-oss through `LLM.chat`: told as other models write theirs, reasoning and calls
between tags.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from quire import LLM, SamplingParams
from quire.frontend.tool_calls.harmony import CALL, CONTROL_TOKENS, RETURN
from tests.frontend.templates import HARMONY
from tests.server.random_model import write_model

ASK = [{"role": "user", "content": "How is it?"}]
THINK = "<|channel|>analysis<|message|>Rome has weather.<|end|><|start|>assistant"
ANSWER = f"{THINK}<|channel|>final<|message|>It is sunny.<|return|>"
CALLS = f'{THINK}<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{{"city": "Rome"}}<|call|>'
THOUGHT = "<think>\nRome has weather.\n</think>\n\n"


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder: Path = tmp_path_factory.mktemp("channels")
    write_model(folder, HARMONY, (*CONTROL_TOKENS, CALL, RETURN))
    with LLM(folder, dtype="float32", kv_cache_memory="8MiB", max_model_len=512) as llm:
        yield llm


def saying(llm: LLM, text: str, **fields: Any) -> SamplingParams:
    """Parameters by which the model says this."""
    ids = llm.engine.tokenizer.encode(text, add_special_tokens=False, allow_special=True)
    start = len(llm.encode_chat(ASK))

    def say(token_ids: Tensor, logits: Tensor) -> Tensor:
        logits[ids[min(len(token_ids) - start, len(ids) - 1)]] += 1000.0
        return logits

    ends = [
        llm.engine.tokenizer.encode(one, add_special_tokens=False, allow_special=True)[0]
        for one in (CALL, RETURN)
    ]
    given = {
        "max_tokens": len(ids),
        "temperature": 0,
        "stop_token_ids": tuple(ends),
        "logits_processors": (say,),
    }
    return SamplingParams(**given | fields)


def test_reasoning_calls_and_answers(llm: LLM) -> None:
    assert llm.chat(ASK, saying(llm, ANSWER))[0].text == f"{THOUGHT}It is sunny."
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    assert llm.chat(ASK, saying(llm, CALLS))[0].text == f"{THOUGHT}{call}"
    both = CALLS.replace("<|call|>", f"<|end|><|start|>assistant{CALLS.removeprefix(THINK)}")
    assert llm.chat(ASK, saying(llm, both))[0].text == f"{THOUGHT}{call}\n{call}"


@pytest.mark.slow
def test_a_stream_gives_the_same_in_pieces_wherever_it_is_cut_off(llm: LLM) -> None:
    params = saying(llm, ANSWER)
    assert params.max_tokens is not None
    for count in range(1, params.max_tokens + 1):
        one = saying(llm, ANSWER, max_tokens=count)
        whole = llm.chat(ASK, one)[0].text
        assert "".join(llm.stream_chat(ASK, one)) == whole
        assert f"{THOUGHT}It is sunny.".startswith(whole)


def test_stop_strings_end_it_as_they_do_in_the_server(llm: LLM) -> None:
    output = llm.chat(ASK, saying(llm, ANSWER, stop=("weather",)))[0]
    assert (output.text, output.finish_reason) == ("<think>\nRome has ", "stop")


def test_who_wants_control_tokens_gets_them(llm: LLM) -> None:
    params = saying(llm, ANSWER, skip_special_tokens=False)
    assert llm.chat(ASK, params)[0].text == ANSWER.removesuffix(RETURN)


def test_texts_to_continue_and_forms_of_answers_are_as_they_are(llm: LLM) -> None:
    assert llm.chat(ASK, SamplingParams(structured={"choice": ["a<b"]}, seed=1))[0].text == "a<b"
    raw = llm.generate([llm.encode_chat(ASK)], saying(llm, ANSWER))[0]
    assert raw.text == "analysisRome has weather.assistantfinalIt is sunny."


def test_an_answer_goes_back_into_the_conversation(llm: LLM) -> None:
    answer = {"role": "assistant", "content": llm.chat(ASK, saying(llm, ANSWER))[0].text}
    prompt = llm.decode(llm.encode_chat([*ASK, answer, *ASK]), skip_special_tokens=False)
    assert "<|channel|>final<|message|>It is sunny.<|end|>" in prompt
    assert "weather" not in prompt
