"""Adapters of embedding and head: trained copies, rows of some tokens, LoRA on either. As PEFT
computes them, beside others in a batch, and what is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from quire import LLM, LoRARequest, QuireError, SamplingParams
from quire.backends.cpu.kernels import CpuKernels
from quire.kernels.reference import ReferenceKernels
from quire.models.load import open_model
from tests.adapters import save_adapter
from tests.decoding import load_decoder
from tests.models.random_configurations import random_model, reference_logits
from tests.models.test_adapters_against_peft import CPU, adapted_logits, put_adapter
from tests.test_adapters import ENGINE, GREEDY, PROMPT, QUERY, query_tensors, tokens

VOCAB, HIDDEN, RANK = 300, 64, 4
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MODELS: Mapping[str, Any] = {
    "untied": lambda: transformers.Qwen3Config(**COMMON, head_dim=16),
    "tied": lambda: transformers.Qwen3Config(**COMMON, head_dim=16, tie_word_embeddings=True),
    "scaled": lambda: transformers.Gemma3TextConfig(**COMMON, head_dim=16),
    "biased": lambda: transformers.PhiConfig(**COMMON, tie_word_embeddings=False),
    "other names": lambda: transformers.GPTNeoXConfig(**COMMON),
}
Q = ["q_proj"]
WAYS: Mapping[str, dict[str, Any]] = {
    "both copies": {"target_modules": Q, "modules_to_save": ["embed_tokens", "lm_head"]},
    "head's copy": {"target_modules": Q, "modules_to_save": ["lm_head"]},
    "embedding's copy": {"target_modules": Q, "modules_to_save": ["embed_tokens"]},
    "pairs": {"target_modules": [*Q, "embed_tokens", "lm_head"]},
    "pairs by DoRA": {"target_modules": [*Q, "embed_tokens", "lm_head"], "use_dora": True},
    "pair and copy": {"target_modules": [*Q, "embed_tokens"], "modules_to_save": ["lm_head"]},
    "tokens": {"target_modules": Q, "trainable_token_indices": [9, 250, 30, 6]},
    "tokens of the head": {
        "target_modules": Q,
        "trainable_token_indices": {"lm_head": [7, 200], "embed_tokens": [7, 9]},
    },
}
CASES = [
    *(("untied", way) for way in WAYS),
    *(("tied", way) for way in WAYS if way != "tokens of the head"),
    *(("scaled", way) for way in ("pairs", "pairs by DoRA", "tokens", "embedding's copy")),
    *(("biased", way) for way in ("both copies", "pairs", "pairs by DoRA", "tokens")),
    *(("other names", way) for way in ("both copies", "pairs", "tokens")),
]
OTHER_NAMES = {"q_proj": "query_key_value", "embed_tokens": "embed_in", "lm_head": "lm_head"}


def renamed(value: Any) -> Any:
    if isinstance(value, dict):
        return {OTHER_NAMES[name]: own for name, own in value.items()}
    return [OTHER_NAMES[one] if isinstance(one, str) else one for one in value]


def adapted_by_peft(model: Any, folder: Path, kind: str, way: str) -> Any:
    import peft

    torch.manual_seed(3)
    settings = WAYS[way]
    if kind == "other names":
        settings = {key: renamed(value) for key, value in settings.items()}
    config = peft.LoraConfig(r=RANK, lora_alpha=6, init_lora_weights=False, **settings)
    adapted = peft.get_peft_model(model, config).eval()
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name and "magnitude" not in name:
                parameter.normal_(std=0.2)
            elif parameter.requires_grad:
                parameter.mul_(torch.rand_like(parameter) + 0.5)
    adapted.save_pretrained(folder)
    return adapted


@pytest.mark.few(6)
@pytest.mark.parametrize(("kind", "way"), CASES)
def test_embedding_and_head_compute_as_peft_does(kind: str, way: str, tmp_path: Path) -> None:
    model = random_model(MODELS[kind](), 0)
    model.save_pretrained(tmp_path / "model")
    plain = reference_logits(model, PROMPT)
    adapted = adapted_by_peft(model, tmp_path / "adapter", kind, way)
    expected = reference_logits(adapted, PROMPT)
    assert (expected - plain).abs().max() > 1e-2
    files = open_model(tmp_path / "model")
    for kernels in (ReferenceKernels(), CpuKernels()):
        decoder = load_decoder(files, kernels, torch.float32, CPU)
        put_adapter(decoder, files, tmp_path / "adapter", tmp_path / "model")
        found = adapted_logits(decoder, PROMPT)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
        assert found.argmax(-1).tolist() == expected.argmax(-1).tolist()


# In an engine


@pytest.fixture(scope="module", params=["untied", "tied"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    random_model(MODELS[request.param](), 0).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[LoRARequest | None]:
    """None, and one of each kind."""
    folder, found = tmp_path_factory.mktemp("adapters"), []
    for number, way in enumerate(["both copies", "pairs by DoRA", "tokens", "head's copy"]):
        whole = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        adapted_by_peft(whole, folder / str(number), "", way)
        found.append(LoRARequest(f"a{number}", 1 + number, str(folder / str(number))))
    plain = save_adapter(folder / "plain", query_tensors())
    return [None, *found, LoRARequest("plain", 9, str(plain))]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_loras": 2},
        {"speculation": "ngram"},
        {"quantization": "int8"},
        {"dtype": "bfloat16"},
        {"cuda_graphs": False, "max_batched_tokens": 11},
    ],
    ids=str,
)
def test_answers_in_a_batch_are_those_alone(
    model: Path, adapters: list[LoRARequest | None], options: dict[str, Any]
) -> None:
    prompt = [7, 8, 9, 10] * 9
    params = SamplingParams(temperature=0.8, seed=3, n=2, max_tokens=10, logprobs=1)

    def answers(outputs: Any) -> Any:
        return [
            [(one.token_ids, one.cumulative_logprob) for one in output.completions]
            for output in outputs
        ]

    with LLM(model, **{**ENGINE, **options}) as llm:
        together = answers(llm.generate([prompt] * len(adapters), params, lora_request=adapters))
        llm.reset_prefix_cache()
        apart = [answers(llm.generate(prompt, params, lora_request=one))[0] for one in adapters]
    assert together == apart
    assert len({str(one) for one in together}) == len(adapters)


def test_slots_that_others_take_over_and_steps_that_were_recorded_keep_nothing(
    model: Path, adapters: list[LoRARequest | None]
) -> None:
    def answers(llm: LLM) -> list[Any]:
        return [tokens(llm, one) for one in (*adapters, *reversed(adapters))]

    with LLM(model, **ENGINE) as llm:
        expected = answers(llm)
        assert expected == answers(llm)
        sizes = {one.name: one.nbytes for one in llm.engine.adapters.loaded}
    with LLM(model, **ENGINE, max_loras=1, cuda_graphs=True) as one:
        assert answers(one) == expected
    rows = VOCAB * HIDDEN * 4
    assert sizes["a0"] > 2 * rows > sizes["a3"] > rows > sizes["a2"] > sizes["plain"]


def test_prompt_logprobs_and_embeddings_know_them(
    model: Path, adapters: list[LoRARequest | None]
) -> None:
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    with LLM(model, **ENGINE) as llm:
        found = [
            str(llm.generate(PROMPT, params, lora_request=one)[0].prompt_logprobs)
            for one in adapters
        ]
    assert len(set(found)) == len(adapters)


@pytest.mark.slow  # two processes that load the model
def test_ranks_give_the_same_answers(model: Path, adapters: list[LoRARequest | None]) -> None:
    def answers(llm: LLM) -> list[Any]:
        found = llm.generate([PROMPT] * len(adapters), GREEDY, lora_request=adapters)
        return [one.completions[0].token_ids for one in found]

    with LLM(model, **ENGINE) as llm:
        expected = answers(llm)
    with LLM(model, **ENGINE, tensor_parallel_size=2) as divided:
        assert answers(divided) == expected


# What is refused


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tmp_path_factory.mktemp("model")
    random_model(MODELS["untied"](), 0).save_pretrained(folder)
    with LLM(folder, **ENGINE) as llm:
        yield llm


EMBEDDING = "base_model.model.model.embed_tokens"
HEAD = "base_model.model.lm_head"
NEW = "token_adapter.trainable_tokens_delta"
SAVED: dict[str, Any] = {"modules_to_save": ["lm_head"]}
LISTED: dict[str, Any] = {"trainable_token_indices": [5, 7]}


def pair(rank: int = RANK, vocab: int = VOCAB, **replaced: Tensor) -> dict[str, Tensor]:
    made = {
        "lora_embedding_A": torch.randn(rank, vocab),
        "lora_embedding_B": torch.randn(HIDDEN, rank),
    }
    return {f"{EMBEDDING}.{kind}": one for kind, one in {**made, **replaced}.items()}


def head_pair() -> dict[str, Tensor]:
    return {
        f"{HEAD}.lora_A.weight": torch.ones(RANK, HIDDEN),
        f"{HEAD}.lora_B.weight": torch.ones(VOCAB, RANK),
    }


BAD: Mapping[str, tuple[dict[str, Tensor], dict[str, Any], str]] = {
    "copy of another size": (
        {f"{HEAD}.weight": torch.ones(VOCAB + 8, HIDDEN)},
        SAVED,
        r"lm_head\.weight has shape \[308, 64\]",
    ),
    "copy on its side": (
        {f"{HEAD}.weight": torch.ones(HIDDEN, VOCAB)},
        SAVED,
        r"lm_head\.weight has shape \[64, 300\]",
    ),
    "copy with NaN": (
        {f"{HEAD}.weight": torch.full((VOCAB, HIDDEN), torch.nan)},
        SAVED,
        r"lm_head\.weight has numbers that are infinite or NaN",
    ),
    "copy of whole numbers": (
        {f"{HEAD}.weight": torch.ones(VOCAB, HIDDEN, dtype=torch.int64)},
        SAVED,
        r"lm_head\.weight",
    ),
    "copy that is missing": (query_tensors(), SAVED, "names lm_head, of which there is no tensor"),
    "copy that nobody named": (
        {**query_tensors(), f"{HEAD}.weight": torch.ones(VOCAB, HIDDEN)},
        {},
        "is not the model's own",
    ),
    "bias of no head": (
        {f"{HEAD}.weight": torch.ones(VOCAB, HIDDEN), f"{HEAD}.bias": torch.ones(VOCAB)},
        SAVED,
        r"lm_head\.bias has no place",
    ),
    "bias of the embedding": (
        {f"{EMBEDDING}.weight": torch.ones(VOCAB, HIDDEN), f"{EMBEDDING}.bias": torch.ones(VOCAB)},
        {"modules_to_save": ["embed_tokens"]},
        r"embed_tokens\.bias has no place",
    ),
    "copy under two names": (
        {f"{HEAD}.weight": torch.ones(VOCAB, HIDDEN), "lm_head.weight": torch.ones(VOCAB, HIDDEN)},
        SAVED,
        "is the same as the tensor",
    ),
    "copy and pair": (
        {f"{HEAD}.weight": torch.ones(VOCAB, HIDDEN), **head_pair()},
        SAVED,
        "both change the head",
    ),
    "copy and pair of the embedding": (
        {f"{EMBEDDING}.weight": torch.ones(VOCAB, HIDDEN), **pair()},
        {"modules_to_save": ["embed_tokens"]},
        "both change the embedding",
    ),
    "norm": (
        {
            f"{HEAD}.weight": torch.ones(VOCAB, HIDDEN),
            "base_model.model.model.norm.weight": torch.ones(HIDDEN),
        },
        SAVED,
        r"model\.norm\.weight has no place",
    ),
    "half a pair": (
        {f"{EMBEDDING}.lora_embedding_A": torch.ones(RANK, VOCAB)},
        {},
        "its lora_embedding_B is missing",
    ),
    "another vocabulary": (pair(vocab=128), {}, r"lora_embedding_A has shape \[4, 128\]"),
    "huge rank": (pair(rank=5000), {}, r"lora_embedding_A has shape \[5000, 300\]"),
    "pair with infinity": (
        pair(lora_embedding_B=torch.full((HIDDEN, RANK), torch.inf)),
        {},
        "lora_embedding_B has numbers that are infinite",
    ),
    "magnitude without DoRA": (
        pair(lora_magnitude_vector=torch.ones(HIDDEN)),
        {},
        "use_dora is false",
    ),
    "DoRA without magnitude": (pair(), {"use_dora": True}, "lora_magnitude_vector is missing"),
    "magnitude of tokens": (
        pair(lora_magnitude_vector=torch.ones(VOCAB)),
        {"use_dora": True},
        r"lora_magnitude_vector has shape \[300\]",
    ),
    "the head's kind": (
        {f"{HEAD}.lora_embedding_A": torch.ones(RANK, VOCAB)},
        {},
        r"lm_head\.lora_embedding_A has no place",
    ),
    "the product's kind": (
        {f"{EMBEDDING}.lora_A.weight": torch.ones(RANK, VOCAB)},
        {},
        r"embed_tokens\.lora_A\.weight has no place",
    ),
    "pairs of products and tokens": (
        {f"{EMBEDDING}.{NEW}": torch.ones(2, HIDDEN), **pair()},
        LISTED,
        "both change the embedding",
    ),
    "tokens out of range": (
        {f"{EMBEDDING}.{NEW}": torch.ones(2, HIDDEN)},
        {"trainable_token_indices": [5, 300]},
        r"adapter_config\.json: trainable_token_indices has 300; .* end at 299",
    ),
    "fewer rows than tokens": (
        {f"{EMBEDDING}.{NEW}": torch.ones(1, HIDDEN)},
        LISTED,
        r"trainable_tokens_delta has shape \[1, 64\]",
    ),
    "tokens without rows": (query_tensors(), LISTED, "of the embedding, of which there is no"),
    "rows without tokens": (
        {f"{EMBEDDING}.{NEW}": torch.ones(2, HIDDEN)},
        {},
        "names no tokens of it",
    ),
    "rows of a projection": (
        {**query_tensors(), f"{QUERY}.{NEW}": torch.ones(2, HIDDEN)},
        {},
        "q_proj.token_adapter.trainable_tokens_delta has no place",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_files_that_do_not_fit_are_refused_by_name(llm: LLM, tmp_path: Path, case: str) -> None:
    tensors, settings, message = BAD[case]
    path = save_adapter(tmp_path / "bad", tensors, **settings)
    with pytest.raises(QuireError, match=message) as caught:
        llm.load_adapter("bad", path)
    assert str(path) in str(caught.value)
    assert "bad" not in llm.adapters
