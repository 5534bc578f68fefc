"""Compares Quire's greedy answers with those of nano-vllm's own modules, on a CPU:

    git clone https://github.com/GeeeekExplorer/nano-vllm
    python scripts/nano_vllm.py nano-vllm

A random Qwen3 model answers eight prompts, once by `quire.LLM` and once by what the checkout has in
`nanovllm/models/qwen3.py`, `layers/` and `utils/loader.py`. Of nano-vllm nothing is installed;
`transformers` reads the model's settings for it. What it has for GPUs is replaced:

- flash-attn by torch's `scaled_dot_product_attention`. Triton only writes its cache, and it is
  given none: each step computes the whole sequences again, so no cache can hide a difference.
- `torch.compile` by the functions as they are written, and torch's process group by one of size 1.
- Its norms change their inputs in place: `x.float()` is a copy in bfloat16, but `x` itself in
  float32. They get float64, which they copy to float32 and compute in that as before.

Exit status 1 if a logprob differs by more than TOLERANCE, or if an answer differs where nano-vllm's
candidates are further apart than that. docs/map.md has the figures.
"""

from __future__ import annotations

import argparse
import importlib
import math
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, PretrainedConfig, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from quire import LLM, SamplingParams
from quire.outputs import RequestOutput

PROMPT_LENGTHS = (1, 2, 15, 16, 17, 64, 129, 200)
NEW_TOKENS = 32
NUM_LOGPROBS = 20
TOLERANCE = 1e-4
VOCABULARY = 1024
MODEL_FILE = Path("nanovllm", "models", "qwen3.py")
_REPLACED = ("nanovllm", "flash_attn", "triton")


@dataclass(frozen=True, slots=True)
class NanoAnswer:
    token_ids: tuple[int, ...]
    logprobs: Tensor
    """[answer tokens, vocabulary]"""


@dataclass(frozen=True, slots=True)
class Comparison:
    num_answers: int
    num_equal: int
    num_positions: int
    """Positions with the same context: up to the first token that differs, and that one."""
    largest_difference: float
    """Of any logprob that Quire reports, from nano-vllm's."""
    smallest_distance: float
    """Of nano-vllm's best two candidates."""
    faults: tuple[str, ...]


def write_model(folder: Path) -> None:
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,  # not 128 / 8: Qwen3's heads are wider, too
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=False,
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + noise / 5 if name.endswith("norm.weight") else noise / 10)
    model.save_pretrained(folder)


def make_prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randint(VOCABULARY, (length,), generator=generator).tolist()
        for length in PROMPT_LENGTHS
    ]


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    block_table: Tensor | None = None,
) -> Tensor:
    """In the place of flash-attn's: sequences lie one after another, each sees only itself."""
    lengths = cu_seqlens_q.diff().tolist()
    if not causal or block_table is not None or lengths != cu_seqlens_k.diff().tolist():
        raise ValueError("only causal attention of whole sequences without a cache is replaced")
    if {max_seqlen_q, max_seqlen_k} != {max(lengths)}:
        raise ValueError(f"the longest of {lengths} is not {max_seqlen_q} and {max_seqlen_k}")
    parts = [
        F.scaled_dot_product_attention(
            query.transpose(0, 1),
            key.transpose(0, 1),
            value.transpose(0, 1),
            is_causal=True,
            scale=softmax_scale,
            enable_gqa=True,
        ).transpose(0, 1)
        for query, key, value in zip(
            *(torch.split(part, lengths) for part in (q, k, v)), strict=True
        )
    ]
    return torch.cat(parts)


def _flash_attn_with_kvcache(*_: object, **__: object) -> Tensor:
    raise RuntimeError("nano-vllm was given no cache, but attends to one")


def _module(name: str, **contents: Any) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(contents)
    return module


@contextmanager
def nano_vllm(checkout: Path) -> Iterator[None]:
    """Inside of it, modules of nano-vllm can be imported and used without a GPU."""
    language = _module("triton.language", constexpr=object)
    modules = {
        # Not its __init__.py, which imports the whole engine.
        "nanovllm": _module("nanovllm", __path__=[str(checkout / "nanovllm")]),
        "flash_attn": _module(
            "flash_attn",
            flash_attn_varlen_func=flash_attn_varlen_func,
            flash_attn_with_kvcache=_flash_attn_with_kvcache,
        ),
        "triton": _module("triton", jit=lambda kernel: kernel, language=language),
        "triton.language": language,
    }
    before = _take_away()
    sys.modules.update(modules)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several wait for each other where the cores have other work, too
    try:
        with (
            patch.object(torch, "compile", lambda function: function),
            patch.object(dist, "get_rank", lambda: 0),
            patch.object(dist, "get_world_size", lambda: 1),
        ):
            yield
    finally:
        torch.set_num_threads(num_threads)
        _take_away()
        sys.modules.update(before)


def _take_away() -> dict[str, ModuleType]:
    names = [name for name in sys.modules if name.partition(".")[0] in _REPLACED]
    return {name: sys.modules.pop(name) for name in names}


def _load(folder: Path, config: PretrainedConfig) -> Any:
    """As nano-vllm's `ModelRunner` does."""
    model: nn.Module = importlib.import_module("nanovllm.models.qwen3").Qwen3ForCausalLM(config)
    importlib.import_module("nanovllm.utils.loader").load_model(model, str(folder))
    norm = importlib.import_module("nanovllm.layers.layernorm").RMSNorm
    for module in model.modules():
        if isinstance(module, norm):
            module.register_forward_pre_hook(_to_float64)
            module.register_forward_hook(_to_float32)
    return model


def _to_float64(_: nn.Module, inputs: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    return tuple(None if tensor is None else tensor.double() for tensor in inputs)


def _to_float32(_: nn.Module, __: object, output: Tensor | tuple[Tensor, ...]) -> Any:
    return output.float() if isinstance(output, Tensor) else tuple(part.float() for part in output)


@torch.inference_mode()
def nano_answers(
    checkout: Path, folder: Path, prompts: Sequence[Sequence[int]]
) -> list[NanoAnswer]:
    config = AutoConfig.from_pretrained(folder)
    with nano_vllm(checkout):
        model = _load(folder, config)
        set_context = importlib.import_module("nanovllm.utils.context").set_context
        sequences = [list(prompt) for prompt in prompts]
        steps = []
        for _ in range(NEW_TOKENS):
            lengths = [len(sequence) for sequence in sequences]
            ends = torch.tensor([0, *lengths]).cumsum(0).int()
            set_context(True, ends, ends, max(lengths), max(lengths))
            token_ids = torch.tensor([token for sequence in sequences for token in sequence])
            positions = torch.cat([torch.arange(length) for length in lengths])
            logits = model.compute_logits(model(token_ids, positions))
            steps.append(logits.double().log_softmax(-1))
            for sequence, token in zip(sequences, logits.argmax(-1).tolist(), strict=True):
                sequence.append(token)
    logprobs = torch.stack(steps, 1)
    return [
        NanoAnswer(tuple(sequence[-NEW_TOKENS:]), of_one)
        for sequence, of_one in zip(sequences, logprobs, strict=True)
    ]


def quire_answers(folder: Path, prompts: Sequence[Sequence[int]]) -> list[RequestOutput]:
    greedy = SamplingParams(
        temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=NUM_LOGPROBS
    )
    with LLM(
        folder, device="cpu", dtype="float32", skip_tokenizer_init=True, kv_cache_memory="16MiB"
    ) as llm:
        return llm.generate(prompts, greedy)


def compare(ours: Sequence[RequestOutput], theirs: Sequence[NanoAnswer]) -> Comparison:
    num_equal = num_positions = 0
    differences = [0.0]
    distances = [math.inf]
    faults = []
    for prompt, (our, their) in enumerate(zip(ours, theirs, strict=True)):
        num_equal += our.token_ids == their.token_ids
        assert our.logprobs is not None
        for place, (scored, token, logprobs) in enumerate(
            zip(our.logprobs, their.token_ids, their.logprobs, strict=True)
        ):
            where = f"prompt of {len(our.prompt_token_ids)} tokens (number {prompt}), answer token {place}"
            best, second = logprobs.topk(2).values.tolist()
            difference = max(
                _distance(candidate.logprob, float(logprobs[candidate.token_id]))
                for candidate in (scored, *scored.top)
            )
            num_positions += 1
            differences.append(difference)
            distances.append(best - second)
            if difference > TOLERANCE:
                faults.append(f"{where}: logprobs differ by {difference:.1e}")
            if scored.token_id != token:
                apart = _distance(best, float(logprobs[scored.token_id]))
                if apart > TOLERANCE:
                    faults.append(
                        f"{where}: {scored.token_id} by Quire, {token} by nano-vllm, {apart:.1e} apart"
                    )
                break  # from here on they answer different texts
    return Comparison(
        len(ours), num_equal, num_positions, max(differences), min(distances), tuple(faults)
    )


def _distance(one: float, other: float) -> float:
    """NaN would be smaller than any tolerance."""
    distance = abs(one - other)
    return math.inf if math.isnan(distance) else distance


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description="Compare Quire's greedy answers with those of nano-vllm's modules."
    )
    parser.add_argument("checkout", type=Path, help="folder of a checkout of nano-vllm")
    checkout: Path = parser.parse_args(arguments).checkout
    if not (checkout / MODEL_FILE).is_file():
        parser.error(
            f"{checkout} has no {MODEL_FILE}: give the folder of a checkout of "
            "https://github.com/GeeeekExplorer/nano-vllm"
        )
    disable_progress_bar()
    prompts = make_prompts()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder)
        result = compare(quire_answers(folder, prompts), nano_answers(checkout, folder, prompts))
    print(
        f"{result.num_equal} of {result.num_answers} answers equal, {result.num_positions} positions compared\n"
        f"logprobs differ by {result.largest_difference:.1e} at most; the closest two candidates are "
        f"{result.smallest_distance:.1e} apart"
    )
    for fault in result.faults:
        print(f"error: {fault}")
    return 1 if result.faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
