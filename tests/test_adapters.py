"""Adapters through the offline API: what a name stands for, what is shared and what is not, and
what is refused.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from quire import LLM, LoRARequest, QuireError, SamplingParams
from quire.checkpoints.adapter_files import open_adapter, read_adapter_settings
from quire.errors import (
    CapacityError,
    InvalidRequestError,
    ModelFormatError,
    NoRoomNowError,
)
from quire.frontend.adapter_names import parse_lora
from tests.adapters import SETTINGS, random_adapter, save_adapter
from tests.models.random_configurations import random_model

ENGINE: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "device": "cpu",
    "dtype": "float32",
    "kv_cache_memory": "4MiB",
    "max_model_len": 256,
    "max_num_seqs": 8,
}
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPT = list(range(5, 45))
HEAD = "base_model.model.lm_head"
QUERY = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    config = transformers.Qwen3Config(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        initializer_range=0.2,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    random_model(config, 0).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(model, **ENGINE) as llm:
        yield llm


@pytest.fixture(scope="module")
def adapters(llm: LLM, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("adapters")
    ranks = (4, 1, 16, 9)
    return [
        random_adapter(folder / str(i), llm.engine.decoder, i, rank) for i, rank in enumerate(ranks)
    ]


def tokens(llm: LLM, adapter: LoRARequest | str | None, params: SamplingParams = GREEDY) -> Any:
    return llm.generate(PROMPT, params, lora_request=adapter)[0].completions[0].token_ids


def alone(model: Path, adapter: Path | None, **options: Any) -> Any:
    """In an engine that never had another."""
    with LLM(model, **{**ENGINE, **options}) as llm:
        return tokens(llm, None if adapter is None else LoRARequest("it", 1, str(adapter)))


def test_each_prompt_has_the_adapter_that_was_asked_for(
    llm: LLM, model: Path, adapters: list[Path]
) -> None:
    asked = [None, *(LoRARequest(f"one-{i}", i, str(path)) for i, path in enumerate(adapters))]
    found = llm.generate([PROMPT] * len(asked), GREEDY, lora_request=asked)
    answers = [one.completions[0].token_ids for one in found]
    assert len(set(answers)) == len(asked)
    assert answers[0] == alone(model, None)
    assert answers[3] == alone(model, adapters[2])
    assert answers == [tokens(llm, one) for one in asked]


def test_new_content_under_an_old_name_never_meets_old_blocks(
    llm: LLM, adapters: list[Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(adapters[0], tmp_path / "changing")
    first = tokens(llm, LoRARequest("changing", 1, str(folder)))
    assert first == tokens(llm, "changing")
    for file in adapters[1].iterdir():
        (folder / file.name).unlink()  # a new file, as a trainer would write it
        shutil.copy(file, folder / file.name)
    output = llm.generate(PROMPT, GREEDY, lora_request="changing")[0]
    assert output.completions[0].token_ids == tokens(llm, LoRARequest("b", 2, str(adapters[1])))
    assert output.completions[0].token_ids != first


def test_the_same_content_under_two_names_shares_blocks_and_the_model_has_its_own(
    model: Path, adapters: list[Path], tmp_path: Path
) -> None:
    copy = shutil.copytree(adapters[0], tmp_path / "copy")

    def cached(llm: LLM, adapter: LoRARequest | None) -> int:
        output = llm.generate(PROMPT, GREEDY, lora_request=adapter)[0]
        return output.completions[0].metrics.cached_tokens

    with LLM(model, **ENGINE) as llm:
        assert cached(llm, None) == 0
        assert cached(llm, LoRARequest("a", 1, str(adapters[0]))) == 0
        assert cached(llm, LoRARequest("copy", 2, str(copy))) == 32
        assert cached(llm, LoRARequest("b", 3, str(adapters[1]))) == 0
        assert cached(llm, None) == 32
        assert len(llm.engine.runner.adapters.digests) == 2  # type: ignore[union-attr]


def test_requests_of_an_adapter_that_is_unloaded_are_answered_to_their_end(
    llm: LLM, adapters: list[Path]
) -> None:
    llm.load_adapter("leaving", adapters[3])
    expected = tokens(llm, "leaving")
    request_id = llm.add_request(PROMPT, GREEDY, lora_request="leaving")
    llm.step()
    llm.unload_adapter("leaving")
    assert "leaving" not in llm.adapters
    outputs = []
    while llm.has_work:
        outputs += [one.output for one in llm.step() if one.output is not None]
    assert [one.request_id for one in outputs] == [request_id]
    assert outputs[0].completions[0].token_ids == expected
    with pytest.raises(InvalidRequestError, match="there is no adapter 'leaving'"):
        tokens(llm, "leaving")


def test_more_adapters_than_slots_and_than_memory_change_no_answer(
    llm: LLM, model: Path, adapters: list[Path]
) -> None:
    names = [LoRARequest(f"one-{i}", i, str(path)) for i, path in enumerate(adapters)]
    expected = [tokens(llm, one) for one in names]
    size = max(one.nbytes for one in llm.engine.adapters.loaded)
    with LLM(model, **ENGINE, max_loras=1, lora_memory=5 * size) as few:
        found = few.generate([PROMPT] * 4, GREEDY, lora_request=names)
        assert [one.completions[0].token_ids for one in found] == expected
    with LLM(model, **ENGINE, lora_memory=int(1.5 * size)) as little:
        assert [tokens(little, one) for one in names * 2] == expected * 2
        assert little.engine.adapters.num_evictions >= 3
        assert little.engine.adapters.nbytes <= 1.5 * size
    with (
        LLM(model, **ENGINE, lora_memory=size // 8) as none,
        pytest.raises(CapacityError, match="lora_memory"),
    ):
        tokens(none, names[2])


def test_an_adapter_for_which_there_is_no_room_now_may_be_asked_for_again(
    llm: LLM, model: Path, adapters: list[Path]
) -> None:
    large = LoRARequest("large", 1, str(adapters[2]))
    other = LoRARequest("other", 2, str(adapters[3]))
    expected = tokens(llm, other)
    size = max(one.nbytes for one in llm.engine.adapters.loaded)
    with LLM(model, **ENGINE, lora_memory=int(1.2 * size)) as little:
        little.add_request(PROMPT, GREEDY, lora_request=large)
        with pytest.raises(NoRoomNowError, match="try again later"):
            little.add_request(PROMPT, GREEDY, lora_request=other)
        while little.has_work:
            little.step()
        assert tokens(little, other) == expected


@pytest.mark.parametrize(
    "options",
    [{"speculation": "ngram"}, {"quantization": "int8"}, {"cuda_graphs": False}],
    ids=["drafts", "int8", "not recorded"],
)
def test_answers_in_a_batch_are_those_alone(
    model: Path, adapters: list[Path], options: dict[str, Any]
) -> None:
    prompt = [7, 8, 9, 10] * 9
    params = SamplingParams(temperature=0.8, seed=3, n=2, max_tokens=10, logprobs=1)
    asked = [None, *(LoRARequest(f"one-{i}", i, str(path)) for i, path in enumerate(adapters))]

    def answers(outputs: Any) -> Any:
        return [
            [(one.token_ids, one.cumulative_logprob) for one in output.completions]
            for output in outputs
        ]

    with LLM(model, **ENGINE, **options) as llm:
        together = answers(llm.generate([prompt] * len(asked), params, lora_request=asked))
        llm.reset_prefix_cache()
        apart = [answers(llm.generate(prompt, params, lora_request=one))[0] for one in asked]
    assert together == apart
    assert len({str(one) for one in together}) == len(asked)


def test_an_adapter_of_the_head_counts_for_answers_prompt_logprobs_and_beams(
    llm: LLM, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    a, b = torch.randn(4, 64) * 0.3, torch.randn(300, 4) * 0.3
    tensors = {f"{HEAD}.lora_A.weight": a, f"{HEAD}.lora_B.weight": b}
    adapter = LoRARequest("head", 1, str(save_adapter(tmp_path / "head", tensors)))
    params = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=1, logprobs=1)
    plain, adapted = (llm.generate(PROMPT, params, lora_request=one)[0] for one in (None, adapter))
    assert plain.prompt_logprobs != adapted.prompt_logprobs
    beams = llm.beam_search(PROMPT, 2, 3, lora_request=adapter).beams
    greedy = adapted.completions[0]
    assert any(one.token_ids == greedy.token_ids for one in beams) or beams[
        0
    ].cumulative_logprob >= (greedy.cumulative_logprob or 0)
    assert "".join(llm.stream(PROMPT, params=GREEDY, lora_request=adapter)) == ""


def test_rslora_is_scaled_by_the_root_of_the_rank(llm: LLM, tmp_path: Path) -> None:
    torch.manual_seed(0)
    tensors = query_tensors(16)
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=1)
    found = []
    # by 8 / 4 and by 32 / 16, and by 8 / 16
    for number, (alpha, is_stabilized) in enumerate(((8, True), (32, False), (8, False))):
        path = tmp_path / str(number)
        save_adapter(path, tensors, r=16, lora_alpha=alpha, use_rslora=is_stabilized)
        adapter = LoRARequest(f"scaled-{number}", 1, str(path))
        found.append(llm.generate(PROMPT, params, lora_request=adapter)[0].completions[0].logprobs)
    assert found[0] == found[1] != found[2]


def test_the_step_log_names_the_adapter(model: Path, adapters: list[Path], tmp_path: Path) -> None:
    with LLM(model, **ENGINE, step_log=tmp_path / "steps.jsonl") as llm:
        tokens(llm, LoRARequest("named", 1, str(adapters[0])))
        digest = llm.engine.adapters.loaded[0].digest
    lines = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    admitted = [one for line in lines for one in line["step"]["admitted"]]
    assert admitted[0]["resolved"]["adapter"] == digest
    assert admitted[0]["resolved"]["adapter_name"] == "named"


@pytest.mark.slow  # two processes that load the model
def test_ranks_give_the_same_answers(model: Path, adapters: list[Path]) -> None:
    expected = alone(model, adapters[2])
    assert alone(model, adapters[2], tensor_parallel_size=2) == expected


# What is refused


def query_tensors(rank: int = 4, **replaced: Tensor) -> dict[str, Tensor]:
    made = {"lora_A": torch.randn(rank, 64), "lora_B": torch.randn(64, rank), **replaced}
    return {f"{QUERY}.{kind}.weight": one for kind, one in made.items()}


BAD_TENSORS: Mapping[str, tuple[dict[str, Tensor], str]] = {
    "no place": (
        {
            **query_tensors(),
            "base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight": torch.ones(4, 64),
        },
        r"layers\.9\.self_attn\.q_proj\.lora_A\.weight has no place",
    ),
    "another model": (
        query_tensors(lora_A=torch.randn(4, 128)),
        r"q_proj\.lora_A\.weight has shape \[4, 128\]",
    ),
    "another rank": (query_tensors(8), r"q_proj\.lora_A\.weight has shape \[8, 64\]"),
    "NaN": (
        query_tensors(lora_B=torch.full((64, 4), torch.nan)),
        r"lora_B\.weight has numbers that are infinite or NaN",
    ),
    "no B": ({f"{QUERY}.lora_A.weight": torch.ones(4, 64)}, "its lora_B is missing"),
    "another head": (
        {**query_tensors(), f"{HEAD}.base_layer.weight": torch.ones(300, 64)},
        "is not the model's own",
    ),
    "a norm": (
        {
            **query_tensors(),
            "base_model.model.model.layers.0.input_layernorm.weight": torch.ones(64),
        },
        "input_layernorm.weight has no place",
    ),
}


@pytest.mark.parametrize("case", BAD_TENSORS)
def test_tensors_that_do_not_fit_are_refused_by_name(llm: LLM, tmp_path: Path, case: str) -> None:
    tensors, message = BAD_TENSORS[case]
    path = save_adapter(tmp_path / "bad", tensors)
    with pytest.raises(QuireError, match=message) as caught:
        llm.load_adapter("bad", path)
    assert "adapter_model.safetensors" in str(caught.value)
    assert "bad" not in llm.adapters


BAD_SETTINGS: Mapping[str, tuple[dict[str, Any], str]] = {
    "kind": ({"peft_type": "IA3"}, "peft_type is"),
    "task": ({"task_type": "SEQ_CLS"}, "task_type is"),
    "rank": ({"r": 257}, "r should be"),
    "no rank": ({"r": None}, "r"),
    "true": ({"r": True}, "r should be"),
    "alpha": ({"lora_alpha": "8"}, "lora_alpha should be"),
    "saved modules": ({"modules_to_save": ["score"]}, "modules_to_save names 'score'"),
    "saved norm": ({"modules_to_save": ["lm_head", "norm"]}, "modules_to_save names 'norm'"),
    "saved what": ({"modules_to_save": "lm_head"}, "modules_to_save should be"),
    "tied": ({"ensure_weight_tying": True}, "ensure_weight_tying is"),
    "tokens": ({"trainable_token_indices": [3, True]}, "trainable_token_indices should be"),
    "tokens below": ({"trainable_token_indices": [3, -1]}, "trainable_token_indices should be"),
    "tokens twice": ({"trainable_token_indices": [3, 3]}, "trainable_token_indices should be"),
    "no tokens": ({"trainable_token_indices": {"lm_head": []}}, "trainable_token_indices should"),
    "tokens of what": ({"trainable_token_indices": {"q_proj": [1]}}, "names 'q_proj'"),
    "bias": ({"bias": "all"}, "bias is"),
    "changed base": ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights is"),
    "unknown": ({"use_magic": True}, "use_magic"),
    "slow pattern": ({"rank_pattern": {"(a+)+b": 3}}, "rank_pattern should be"),
    "bad pattern": ({"rank_pattern": {"[": 3}}, "rank_pattern should be"),
    "bad patterns": ({"alpha_pattern": [1]}, "alpha_pattern should be"),
}


@pytest.mark.parametrize("case", BAD_SETTINGS)
def test_settings_that_quire_lacks_are_refused_by_name(llm: LLM, tmp_path: Path, case: str) -> None:
    settings, message = BAD_SETTINGS[case]
    path = save_adapter(tmp_path / "bad", query_tensors(), **settings)
    with pytest.raises(QuireError, match=message) as caught:
        llm.load_adapter("bad", path)
    assert "adapter_config.json" in str(caught.value)


def _truncate(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])


def _replace_by_pickle(folder: Path) -> None:
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")


def _link_out(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    file.rename(folder.parent / "elsewhere.safetensors")
    file.symlink_to(folder.parent / "elsewhere.safetensors")


def _nest(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("[" * 100_000)


def _write_nothing(folder: Path) -> None:
    (folder / "adapter_config.json").write_bytes(b"\xff\xfe{")


@pytest.mark.parametrize("spoil", [_truncate, _replace_by_pickle, _link_out, _nest, _write_nothing])
def test_broken_files_are_refused(llm: LLM, tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    path = save_adapter(tmp_path / "bad", query_tensors())
    spoil(path)
    with pytest.raises(QuireError):
        llm.load_adapter("bad", path)


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".hidden", "a\nb", "x" * 201, "a..b", "-x"])
def test_names_are_plain(llm: LLM, adapters: list[Path], name: str) -> None:
    with pytest.raises(InvalidRequestError, match="lora_name"):
        llm.load_adapter(name, adapters[0])


def test_a_command_takes_a_name_and_a_folder(adapters: list[Path]) -> None:
    found = parse_lora(f"mine={adapters[0]}")
    assert (found.lora_name, found.lora_path) == ("mine", str(adapters[0]))
    for wrong in ("mine", "mine=", "mine=/nowhere", f"../x={adapters[0]}"):
        with pytest.raises(InvalidRequestError):
            parse_lora(wrong)


def test_what_is_no_adapter_is_an_error_at_once(
    llm: LLM, model: Path, adapters: list[Path]
) -> None:
    with pytest.raises(InvalidRequestError, match="lora_request"):
        tokens(llm, 3)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="2 entries for 1 prompts"):
        llm.generate([PROMPT], GREEDY, lora_request=[None, None])
    with (
        LLM(model, **ENGINE, max_loras=0) as without,
        pytest.raises(InvalidRequestError, match="max_loras=0"),
    ):
        tokens(without, LoRARequest("a", 1, str(adapters[0])))


def test_thousands_of_patterns_are_looked_through_quickly() -> None:
    """`re` remembers a few hundred compiled ones, and would compile the rest for each module."""
    names = {f"layers.{number}.self_attn.q_proj": 8 for number in range(4000)}
    settings = read_adapter_settings({**SETTINGS, "rank_pattern": names}, "adapter_config.json")
    settings.rank_of("model.layers.3999.self_attn.q_proj")
    began = time.process_time()
    ranks = [settings.rank_of(f"model.layers.{number}.mlp.up_proj") for number in range(20)]
    assert time.process_time() - began < 2
    assert ranks == [4] * 20
    assert settings.rank_of("model.layers.3999.self_attn.q_proj") == 8
    patterns = {f".*.*{number}": 8 for number in range(65)}
    with pytest.raises(ModelFormatError, match=r"rank_pattern should be .* at most 64 patterns"):
        read_adapter_settings({**SETTINGS, "rank_pattern": patterns}, "adapter_config.json")


@pytest.mark.parametrize("name", ["x" * 300, "a/" + "x" * 5000])
def test_a_folder_whose_name_is_too_long_is_none(tmp_path: Path, name: str) -> None:
    with pytest.raises(ModelFormatError, match="there is no such folder"):
        open_adapter(tmp_path / name)
