"""A model folder without a tokenizer: prompts and answers are token ids (vLLM's
`skip_tokenizer_init`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.errors import InvalidRequestError, ModelNotFoundError
from tests.frontend.templates import QWEN
from tests.server.random_model import write_model

ENGINE: dict[str, Any] = {
    "kv_cache_memory": "4MiB",
    "max_model_len": 256,
    "max_num_seqs": 4,
    "dtype": "float32",
}
PROMPT = [40, 41, 42, 43]
GREEDY = {"temperature": 0, "max_tokens": 8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("with-tokenizer")
    write_model(folder, QWEN)
    return folder


@pytest.fixture(scope="module")
def bare(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    bare = tmp_path_factory.mktemp("without-tokenizer")
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        (bare / name).write_bytes((folder / name).read_bytes())
    return bare


@pytest.fixture(scope="module")
def llm(bare: Path) -> Iterator[LLM]:
    with LLM(str(bare), skip_tokenizer_init=True, **ENGINE) as llm:
        yield llm


def test_tokens_are_those_of_the_model_with_its_tokenizer(llm: LLM, folder: Path) -> None:
    (found,) = llm.generate([PROMPT], SamplingParams(logprobs=2, **GREEDY))
    with LLM(str(folder), **ENGINE) as whole:
        (expected,) = whole.generate([PROMPT], SamplingParams(logprobs=2, **GREEDY))
    assert found.token_ids == expected.token_ids
    assert found.text == ""
    assert found.logprobs is not None
    assert expected.logprobs is not None
    assert [entry.logprob for entry in found.logprobs] == [
        entry.logprob for entry in expected.logprobs
    ]
    assert expected.logprobs is expected.completions[0].logprobs


def test_the_logprobs_of_named_tokens_are_those_among_the_likeliest(llm: LLM) -> None:
    (wide,) = llm.generate([PROMPT], SamplingParams(logprobs=30, **GREEDY))
    assert wide.logprobs is not None
    wanted = [entry.top[20] for entry in wide.logprobs]
    ids = tuple(dict.fromkeys(entry.token_id for entry in wanted))
    (named,) = llm.generate([PROMPT], SamplingParams(logprobs=0, logprob_token_ids=ids, **GREEDY))
    assert named.logprobs is not None
    for entry, one in zip(named.logprobs, wanted, strict=True):
        assert [other.token_id for other in entry.named] == list(ids)
        assert one in entry.named
        assert entry.top == ()
    with pytest.raises(InvalidRequestError, match="logprob_token_ids: needs logprobs"):
        SamplingParams(logprob_token_ids=(1,))


@pytest.mark.parametrize(
    "params",
    [
        {"stop": ("a",)},
        {"bad_words": ("a",)},
        {"structured": {"regex": "a"}},
        {"dry_multiplier": 1.0},
    ],
)
def test_what_needs_text_is_refused_by_name(llm: LLM, params: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match=next(iter(params))):
        llm.generate([PROMPT], SamplingParams(**GREEDY, **params))


def test_text_is_refused(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="send token ids"):
        llm.generate("text")


def test_a_folder_without_a_tokenizer_says_how_it_can_be_used(bare: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="skip-tokenizer-init"), LLM(str(bare), **ENGINE):
        pass
