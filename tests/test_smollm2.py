"""The real model, from its GGUF file, against transformers loading the same file in float32."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from tests.long_runs import IS_LONG

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n    ",
    "The three laws of thermodynamics state that",
    "Q: What is 17 + 25?\nA:",
    "import numpy as np\n\nx = np.",
    "Der schnelle braune Fuchs",
    "La vie est",
    "1, 1, 2, 3, 5, 8,",
    '{"name": "Alice", "age":',
    "The mitochondria is",
    "To be, or not to be,",
    "<html>\n  <body>\n",
    "SELECT name FROM users WHERE",
    "Dear Sir or Madam,\n\n",
    "今日は",
    "🙂 🙃",
    "A",
    "The recipe needs:\n- 2 eggs\n- 100 g flour\n-",
    "In 1969, Neil Armstrong",
]


@pytest.fixture(scope="module")
def llm(smollm2_gguf: Path) -> Iterator[LLM]:
    with LLM(
        smollm2_gguf,
        dtype="float32",
        quantization="none",
        kv_cache_memory="512MiB",
        max_model_len=1024,
    ) as llm:
        yield llm


RECORDED = Path(__file__).with_name("smollm2_continuations.json")
"""The first tokens of transformers' answers, by prompt: loading the file into it takes longer than
all tests here.
"""


@pytest.fixture(scope="module")
def reference(smollm2_gguf: Path) -> Any:
    import transformers

    folder, name = str(smollm2_gguf.parent), smollm2_gguf.name
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=name, dtype=torch.float32
    )
    return model.eval()


def test_twenty_greedy_continuations_are_those_that_transformers_gave(llm: LLM) -> None:
    recorded = json.loads(RECORDED.read_text())
    assert list(recorded) == PROMPTS
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    assert {
        output.prompt: list(output.token_ids) for output in llm.generate(PROMPTS, params)
    } == recorded


@pytest.mark.soak
@pytest.mark.skipif(not IS_LONG, reason="loads the model into transformers: make soak")
def test_twenty_greedy_continuations_are_those_of_transformers(llm: LLM, reference: Any) -> None:
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    recorded = json.loads(RECORDED.read_text())
    for output in llm.generate(PROMPTS, params):
        tokens = [*output.prompt_token_ids, *output.token_ids]
        with torch.inference_mode():
            logits = reference(torch.tensor([tokens])).logits[0]
        # Each token is transformers' own choice after all before it, so the whole answer is.
        choices = logits[len(output.prompt_token_ids) - 1 : -1].argmax(-1).tolist()
        assert choices == list(output.token_ids), output.prompt
        assert len(choices) == params.max_tokens
        assert choices[:16] == recorded[output.prompt]


@pytest.mark.slow
def test_bfloat16_says_the_same_on_clear_questions(smollm2_gguf: Path, llm: LLM) -> None:
    clear = ["The capital of France is", "1, 2, 3, 4, 5,", "To be, or not to"]
    params = SamplingParams(temperature=0, max_tokens=1)
    with LLM(smollm2_gguf, dtype="bfloat16", kv_cache_memory="256MiB", max_model_len=1024) as other:
        assert "bfloat16" in other.description
        ours, theirs = other.generate(clear, params), llm.generate(clear, params)
    assert [output.token_ids for output in ours] == [output.token_ids for output in theirs]
