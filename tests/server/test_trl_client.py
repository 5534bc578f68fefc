"""TRL's stock client for a vLLM server, as far as it goes without vLLM: answers, scores and the
prefix cache. It sends weights by vLLM's own code only, between CUDA devices.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from quire import LLM, SamplingParams
from tests.server.harness import SMALL_ENGINE, Server

PROMPTS = [list(range(20, 40)), [7, 8, 9]]


@pytest.fixture(scope="module")
def server(small_model: str) -> Iterator[Server]:
    with Server(model=small_model, engine=SMALL_ENGINE) as server:
        yield server


@pytest.fixture
def client(server: Server, monkeypatch: pytest.MonkeyPatch) -> Any:
    module = pytest.importorskip(
        "trl.generation.vllm_client", reason="TRL is not installed: pip install trl"
    )
    # it asks for vLLM before it does anything, and needs it for weights only
    monkeypatch.setattr(module, "is_vllm_available", lambda *_version, **_options: True)
    return module.VLLMClient(base_url=server.url)


@pytest.mark.slow
def test_answers_and_their_logprobs_have_the_engines_bits(client: Any, small_model: str) -> None:
    own = SamplingParams(max_tokens=6, temperature=1, logprobs=0, seed=3, ignore_eos=True)
    with LLM(small_model, **SMALL_ENGINE) as llm:
        expected = llm.generate(PROMPTS, own, progress=False)
    options = {"seed": 3, "ignore_eos": True}
    found = client.generate(PROMPTS, max_tokens=6, generation_kwargs=options)
    assert found["prompt_ids"] == PROMPTS
    assert found["completion_ids"] == [list(one.token_ids) for one in expected]
    assert found["logprobs"] == [
        [[token.logprob] for token in one.logprobs or ()] for one in expected
    ]
    assert found["logprob_token_ids"] == [[[token] for token in one.token_ids] for one in expected]


@pytest.mark.slow
def test_several_answers_chats_and_patterns(client: Any) -> None:
    found = client.generate(["once", "twice"], n=3, max_tokens=4, logprobs=2)
    assert len(found["prompt_ids"]) == 2
    assert len(found["completion_ids"]) == len(found["logprobs"]) == 6
    assert all(2 <= len(top) <= 3 for one in found["logprobs"] for top in one)
    chats = [[{"role": "user", "content": "hello"}], [{"role": "user", "content": "and"}]]
    found = client.chat(chats, n=2, max_tokens=4, logprobs=None)
    assert len(found["prompt_ids"]) == 2
    assert len(found["completion_ids"]) == 4
    assert found["logprobs"] is None


@pytest.mark.slow
def test_scores_of_sequences(client: Any, small_model: str) -> None:
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    with LLM(small_model, **SMALL_ENGINE) as llm:
        outputs = llm.generate(PROMPTS, params, progress=False)
    most = 20  # as with vLLM, unless its server is told otherwise
    found = client.get_sequence_logprobs(PROMPTS, [5, 1], top_logprobs=most, chunk_size=1)
    for output, first, actual in zip(outputs, (5, 1), found["actual_logprobs"], strict=True):
        expected = [one.logprob for one in (output.prompt_logprobs or ())[first:] if one]
        # those that are not among the most likely ones are asked for all the same
        assert [value for (value,) in actual] == expected
    assert all(len(top) == most for one in found["logprobs"] for top in one)


@pytest.mark.slow
def test_the_rest_that_needs_no_vllm(client: Any) -> None:
    assert client.get_world_size() == 1
    client.reset_prefix_cache()
    with client.weight_update():
        pass
