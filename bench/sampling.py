"""What sampling costs: milliseconds a step at batch 64, with each feature asked for by every row.

    python bench/sampling.py [--batch 64] [--history 512] [--seconds 0.5] [--without-model]

The last column compares with a decode step of SmolLM2-135M-Instruct at the same batch, measured in
the same run (model and head, without sampling). Features are measured one by one on top of plain
temperature; "added" is what a feature costs beyond that. Figures are medians, rounds of all
features taking turns.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire import LLM, SamplingParams
from quire.backends.select import select_kernels
from quire.kernels.ops import Kernels
from quire.runner.request_rows import RequestRows
from quire.sampling.draws import Draws
from quire.sampling.sampler import Sampler
from quire.sampling_params import ResolvedTokens, StructuredOutput
from quire.step import Admission, Step

VOCAB_SIZE = 49152
CPU = torch.device("cpu")


def lift_first(history: Tensor, scores: Tensor) -> Tensor:
    scores[0] += 1
    return scores


FEATURES: dict[str, dict[str, Any]] = {
    "plain temperature": {},
    "greedy": {"temperature": 0.0},
    "structured (mask)": {"structured": StructuredOutput(json_object=True)},
    "allowed_token_ids (1000)": {"allowed_token_ids": tuple(range(0, 49000, 49))},
    "min_tokens": {"min_tokens": 10_000, "max_tokens": None},
    "bad_words (20)": {},
    "no_repeat_ngram_size 3": {"no_repeat_ngram_size": 3},
    "logit_bias (100)": {"logit_bias": dict.fromkeys(range(100), 1.0)},
    "repetition_penalty": {"repetition_penalty": 1.1},
    "presence_penalty": {"presence_penalty": 0.5},
    "frequency_penalty": {"frequency_penalty": 0.5},
    "DRY": {"dry_multiplier": 0.8},
    "logits_processors (one)": {"logits_processors": (lift_first,)},
    "top_n_sigma 1": {"top_n_sigma": 1.0},
    "top_k 40": {"top_k": 40},
    "top_p 0.9": {"top_p": 0.9},
    "top_k 40, top_p 0.9": {"top_k": 40, "top_p": 0.9},
    "min_p 0.05": {"min_p": 0.05},
    "typical_p 0.9": {"typical_p": 0.9},
    "XTC": {"xtc_probability": 1.0},
}
BAD_WORDS = tuple((1000 + i, 2000 + i, 3000 + i)[: 1 + i % 3] for i in range(20))


def make_draws(name: str, rows: int, history: int, kernels: Kernels) -> tuple[Sampler, Draws]:
    """A sampler with a request in each row that asks for the feature, and a draw for each."""
    source = random.Random(0)
    resolved = ResolvedTokens(
        BAD_WORDS if "bad_words" in name else (), tuple(range(1500)) if name == "DRY" else ()
    )
    # Text repeats itself: half of the tokens are from a few hundred, as in any language.
    admitted = []
    for row in range(rows):
        tokens = [
            source.choice((source.randrange(300), source.randrange(VOCAB_SIZE)))
            for _ in range(history)
        ]
        admitted.append(
            Admission(
                request_id=str(row),
                row=row,
                token_ids=tuple(tokens),
                num_prompt_tokens=history // 2,
                block_ids=(),
                num_cached_tokens=0,
                num_host_tokens=0,
                params=SamplingParams(**FEATURES[name]),
                seed=row,
                eos_token_ids=(2,),
                arrival=0.0,
                resolved=resolved,
            )
        )
    masks = (
        torch.full((rows, VOCAB_SIZE // 32), 0x5A5A5A5A, dtype=torch.int32)
        if "structured" in FEATURES[name]
        else None
    )
    return admit(admitted, VOCAB_SIZE, history, kernels, CPU, masks)


def admit(
    admitted: Sequence[Admission],
    vocab_size: int,
    history: int,
    kernels: Kernels,
    device: torch.device,
    masks: Tensor | None,
) -> tuple[Sampler, Draws]:
    rows = RequestRows(len(admitted), history + 8, 16, device)
    rows.apply(Step(0, 0.0, admitted=tuple(admitted)))
    sampler = Sampler(len(admitted), vocab_size, kernels, device)
    for admission in admitted:
        sampler.admit(admission)
    draws = sampler.draws(np.arange(len(admitted)), np.full(len(admitted), history), rows.token_ids)
    return sampler, replace(draws, masks=masks)


def model_logits(rows: int) -> Tensor:
    """Shaped like a language model's: a few high ones over a broad hump, in bfloat16's steps."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(rows, VOCAB_SIZE, generator=generator) * 2.5
    logits[:, torch.randint(VOCAB_SIZE, (60,), generator=generator)] += (
        torch.rand(60, generator=generator) * 14
    )
    return logits.bfloat16().float()


def measure(rows: int, history: int, seconds: float, kernels: Kernels) -> dict[str, float]:
    logits = model_logits(rows)
    work = torch.empty_like(logits)
    batches = {name: make_draws(name, rows, history, kernels) for name in FEATURES}
    times: dict[str, list[float]] = {name: [] for name in FEATURES}
    started, rounds = time.perf_counter(), 0
    while time.perf_counter() - started < seconds * len(FEATURES) or rounds < 4:
        for name, (sampler, draws) in batches.items():
            work.copy_(logits)
            begin = time.perf_counter()
            sampler.sample(work, draws)
            if rounds:  # the first round warms up
                times[name].append(time.perf_counter() - begin)
        rounds += 1
    return {name: statistics.median(its) * 1000 for name, its in times.items()}


def decode_step(rows: int, history: int) -> float:
    """Milliseconds of a step of the model for `rows` requests, the sampling of plain rows included."""
    with LLM(
        "smollm2",
        device="cpu",
        max_num_seqs=rows,
        max_batched_tokens=4096,
        max_model_len=history + 64,
    ) as llm:
        source = random.Random(1)
        params = SamplingParams(max_tokens=40, ignore_eos=True, seed=0)
        for _ in range(rows):
            llm.add_request([source.randrange(3, VOCAB_SIZE) for _ in range(history)], params)
        times = []
        while llm.has_work:
            begin = time.perf_counter()
            deltas = llm.step()
            if len(deltas) == rows:
                times.append(time.perf_counter() - begin)
        return statistics.median(times[2:]) * 1000


def report(found: dict[str, float], step: float | None) -> None:
    plain = found["plain temperature"]
    print(f"{'all rows ask for':26} {'ms':>8} {'added ms':>9} {'of a step':>10}")
    for name, milliseconds in found.items():
        added = (
            milliseconds - plain if name not in ("plain temperature", "greedy") else milliseconds
        )
        share = f"{added / (step - plain):10.1%}" if step is not None else ""
        print(f"{name:26} {milliseconds:8.2f} {added:9.2f} {share}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--history", type=int, default=512, help="tokens before the sampled one")
    parser.add_argument("--seconds", type=float, default=0.5, help="for each feature")
    parser.add_argument("--without-model", action="store_true")
    options = parser.parse_args(arguments)
    step = None if options.without_model else decode_step(options.batch, options.history)
    kernels = select_kernels(CPU, torch.float32)
    found = measure(options.batch, options.history, options.seconds, kernels)
    print(
        f"batch {options.batch}, vocabulary {VOCAB_SIZE}, history {options.history}, {torch.get_num_threads()} threads"
    )
    if step is not None:
        plain = found["plain temperature"]
        print(f"a decode step of SmolLM2-135M: {step:.1f} ms, of which sampling {plain:.1f}")
    report(found, step)


if __name__ == "__main__":
    main()
