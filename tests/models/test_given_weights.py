"""Weights given by a caller: the same bits as files with them, whatever is wrong with them is said
by name.
"""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire import LLM
from quire.backends.cpu.kernels import CpuKernels
from quire.errors import EngineError, ModelFormatError
from quire.models.decoder import Decoder
from quire.models.families import FAMILIES
from quire.models.given_weights import given_weights
from quire.models.load import open_model
from quire.sampling_params import SamplingParams
from tests.decoding import all_logits, load_decoder
from tests.frontend.templates import QWEN
from tests.models.random_configurations import draw_values, save_model
from tests.models.test_recurrent_families import RECURRENT
from tests.server.random_model import write_model

CPU = torch.device("cpu")
TRIED = [family.name for family in FAMILIES if family.name not in RECURRENT]


def stored(folder: Path) -> dict[str, Tensor]:
    (file,) = folder.glob("*.safetensors")
    return load_file(file)


def changed(tensors: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Other numbers, as large."""
    generator = torch.Generator().manual_seed(seed)
    new = {
        name: one + 0.1 * one.std(correction=0) * torch.randn(one.shape, generator=generator)
        for name, one in tensors.items()
        if one.is_floating_point()
    }
    return tensors | {name: one.to(tensors[name].dtype).contiguous() for name, one in new.items()}


def opened(folder: Path, tensors: dict[str, Tensor] | None = None) -> Decoder:
    if tensors is not None:
        (file,) = folder.glob("*.safetensors")
        save_file(tensors, file, {"format": "pt"})
    files = open_model(folder)
    return load_decoder(files, CpuKernels(), torch.float32, CPU)


@pytest.mark.few(2)
@pytest.mark.parametrize("family", TRIED)
def test_given_weights_are_those_of_files(family: str, tmp_path: Path) -> None:
    rng = Random(f"given {family}")
    values = draw_values(rng, family)
    save_model(rng, family, values, tmp_path)
    prompt = [rng.randrange(values["vocab_size"]) for _ in range(17)]
    decoder = opened(tmp_path)
    before = all_logits(decoder, prompt)
    new = changed(stored(tmp_path), 1)
    if "lm_head.weight" in new and decoder.spec.tie_embeddings:
        new["lm_head.weight"] = new[next(name for name in new if "embed_tokens" in name)].clone()
    items = list(new.items())
    rng.shuffle(items)
    decoder.update(given_weights(decoder, "auto", items))
    found = all_logits(decoder, prompt)
    assert not torch.equal(found, before)
    assert torch.equal(found, all_logits(opened(tmp_path, new), prompt))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_model(tmp_path, QWEN)
    return tmp_path


def answers(llm: LLM) -> list[list[int]]:
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    outputs = llm.generate(["a b c d " * 6, "the", "a b c d " * 6], params)
    return [list(output.token_ids) for output in outputs]


@pytest.mark.parametrize("quantization", ["auto", "int8"])
def test_a_model_answers_with_its_new_weights_and_old_blocks_are_gone(
    folder: Path, quantization: str
) -> None:
    options = {"max_model_len": 128, "kv_cache_memory": "4MiB", "quantization": quantization}
    old = stored(folder)
    new = changed(old, 3)
    with LLM(str(folder), **options) as llm:  # type: ignore[arg-type]
        first = answers(llm)
        llm.update_weights((name, one.double()) for name, one in new.items())
        second = answers(llm)
        llm.update_weights(old.items())
        assert answers(llm) == first
        request = llm.add_request("a b", SamplingParams(max_tokens=4, ignore_eos=True))
        with pytest.raises(EngineError, match="an update of weights has to wait"):
            llm.update_weights(new.items())
        while llm.has_work:
            llm.step()
        assert request
        llm.update_weights(new.items())
        assert answers(llm) == second
    (file,) = folder.glob("*.safetensors")
    save_file(new, file, {"format": "pt"})
    with LLM(str(folder), **options) as llm:  # type: ignore[arg-type]
        assert answers(llm) == second
    assert first != second


def test_some_weights_are_enough_but_not_a_part_of_a_matrix(folder: Path) -> None:
    old = stored(folder)
    new = changed(old, 5)
    with LLM(str(folder), max_model_len=128, kv_cache_memory="4MiB") as llm:
        before = answers(llm)
        query = next(name for name in new if name.endswith("0.self_attn.q_proj.weight"))
        down = next(name for name in new if name.endswith("0.mlp.down_proj.weight"))
        wrong: list[tuple[dict[str, Tensor], str]] = [
            ({query: new[query]}, "q_proj.weight is kept as one matrix with .*k_proj"),
            ({"model.layers.99.x": new[down]}, "model.layers.99.x has no place"),
            ({down: new[down][:-1]}, "down_proj.weight should have shape"),
            ({down: new[down].int()}, "down_proj.weight must hold floating-point"),
        ]
        for given, said in wrong:
            with pytest.raises(ModelFormatError, match=said):
                llm.update_weights(given.items())
        with pytest.raises(ModelFormatError, match="given twice"):
            llm.update_weights([(down, new[down]), (down, new[down])])
        assert answers(llm) == before
        llm.update_weights([(down, new[down])])
        assert answers(llm) != before
