"""What sampling costs a step, with each feature asked for by every row.

    python -m quire.tools.bench.engine.sampling [--batches 64] [--history 512] [--without-model]
    python -m quire.tools.bench.engine.sampling --device cuda --batches 1 64 256 --only top_p

On a CPU, milliseconds; "added" is what a feature costs beyond plain temperature, and the last
column compares that with a decode step of SmolLM2-135M-Instruct at the same batch (model and head,
without sampling). On a GPU, microseconds: "gpu" is the time from the first to the last kernel of a
step's sampling when the host is far ahead, "host" what the host needs to send it off; a step costs
whichever is more. All are medians.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire import LLM, SamplingParams
from quire.backends.select import select_kernels
from quire.kernels.ops import Kernels
from quire.runner.request_rows import RequestRows
from quire.sampling.logprobs import logprobs_of_rows
from quire.sampling.metadata import SamplingMetadata
from quire.sampling.sampler import Sampler
from quire.sampling_params import ResolvedTokens, StructuredOutput
from quire.step import AdmittedRequest, Step
from quire.tools.bench.gpu.ceiling import timed_by_gpu

VOCAB_SIZE, GPU_VOCAB_SIZE = 49152, 151_936
"""SmolLM2's, and Qwen3's."""
AHEAD = 20_000_000
"""Clock cycles the GPU is kept busy with, so that the host's share is not part of its time."""
ROUNDS = 7
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


def make_metadata(
    name: str, rows: int, history: int, vocab_size: int, kernels: Kernels, device: torch.device
) -> tuple[Sampler, SamplingMetadata]:
    """A sampler with a request in each row that asks for the feature, and a draw for each."""
    source = np.random.default_rng(0)
    # Text repeats itself: half of the tokens are from a few hundred, as in any language.
    tokens = np.where(
        source.random((rows, history)) < 0.5,
        source.integers(300, size=(rows, history)),
        source.integers(vocab_size, size=(rows, history)),
    )
    resolved = ResolvedTokens(
        BAD_WORDS if "bad_words" in name else (), tuple(range(1500)) if name == "DRY" else ()
    )
    admitted = tuple(
        AdmittedRequest(
            request_id=str(row),
            row=row,
            token_ids=tuple(tokens[row].tolist()),
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
        for row in range(rows)
    )
    masks = None
    if "structured" in FEATURES[name]:
        words = -(-vocab_size // 32)
        masks = torch.full((rows, words), 0x5A5A5A5A, dtype=torch.int32, device=device)
    table = RequestRows(rows, history + 8, 16, device)
    table.apply(Step(0, 0.0, admitted=admitted))
    sampler = Sampler(rows, vocab_size, kernels, device)
    for admission in admitted:
        sampler.admit(admission)
    metadata = sampler.metadata(np.arange(rows), np.full(rows, history), table.token_ids)
    return sampler, replace(metadata, masks=masks)


def model_logits(rows: int, vocab_size: int, device: torch.device) -> Tensor:
    """Shaped like a language model's: a few high ones over a broad hump, in bfloat16's steps."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(rows, vocab_size, generator=generator) * 2.5
    logits[:, torch.randint(vocab_size, (60,), generator=generator)] += (
        torch.rand(60, generator=generator) * 14
    )
    return logits.bfloat16().float().to(device)


def measure_cpu(rows: int, history: int, seconds: float, names: Sequence[str]) -> dict[str, float]:
    """Milliseconds of each feature; rounds of all features take turns."""
    kernels = select_kernels(CPU, torch.float32)
    logits = model_logits(rows, VOCAB_SIZE, CPU)
    work = torch.empty_like(logits)
    batches = {name: make_metadata(name, rows, history, VOCAB_SIZE, kernels, CPU) for name in names}
    times: dict[str, list[float]] = {name: [] for name in names}
    started, rounds = time.perf_counter(), 0
    while time.perf_counter() - started < seconds * len(names) or rounds < 4:
        for name, (sampler, draws) in batches.items():
            work.copy_(logits)
            begin = time.perf_counter()
            sampler.sample(work, draws)
            if rounds:  # the first round warms up
                times[name].append(time.perf_counter() - begin)
        rounds += 1
    return {name: statistics.median(its) * 1000 for name, its in times.items()}


def measure_gpu(
    function: Callable[[], object], prepare: Callable[[], object]
) -> tuple[float, float]:
    """Microseconds on the GPU and on the host."""
    on_gpu, on_host = [], []
    for _ in range(ROUNDS + 2):
        prepare()
        torch.cuda.synchronize()
        torch.cuda._sleep(AHEAD)  # type: ignore[no-untyped-call]
        with timed_by_gpu() as seconds:
            started = time.perf_counter()
            function()
            on_host.append(time.perf_counter() - started)
        on_gpu.append(seconds())
    return statistics.median(on_gpu[2:]) * 1e6, statistics.median(on_host[2:]) * 1e6


def show_gpu(batches: Sequence[int], history: int, names: Sequence[str]) -> None:
    device = torch.device("cuda")
    kernels = select_kernels(device, torch.bfloat16)
    print(f"{'us (gpu/host)':26}" + "".join(f"{f'batch {rows}':>18}" for rows in batches))
    for name in [*names, "logprobs 5"]:
        line = f"{name:26}"
        for rows in batches:
            logits = model_logits(rows, GPU_VOCAB_SIZE, device)
            work = logits.clone()
            if name.startswith("logprobs"):
                ids = torch.arange(rows, device=device)
                sample: Callable[[], object] = partial(
                    logprobs_of_rows, work, lambda x: x, ids, 5, kernels
                )
            else:
                sampler, draws = make_metadata(name, rows, history, GPU_VOCAB_SIZE, kernels, device)
                sample = partial(sampler.sample, work, draws)
            gpu, host = measure_gpu(sample, partial(work.copy_, logits))
            line += f"{gpu:9.0f}/{host:<8.0f}"
        print(line, flush=True)


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


def show_cpu(rows: int, history: int, seconds: float, names: Sequence[str], model: bool) -> None:
    step = decode_step(rows, history) if model else None
    found = measure_cpu(rows, history, seconds, names)
    plain = found["plain temperature"]
    print(
        f"batch {rows}, vocabulary {VOCAB_SIZE}, history {history}, {torch.get_num_threads()} threads"
    )
    if step is not None:
        print(f"a decode step of SmolLM2-135M: {step:.1f} ms, of which sampling {plain:.1f}")
    print(f"{'all rows ask for':26} {'ms':>8} {'added ms':>9} {'of a step':>10}")
    for name, milliseconds in found.items():
        is_base = name in ("plain temperature", "greedy")
        added = milliseconds if is_base else milliseconds - plain
        share = f"{added / (step - plain):10.1%}" if step is not None else ""
        print(f"{name:26} {milliseconds:8.2f} {added:9.2f} {share}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--batches", type=int, nargs="+", default=[64])
    parser.add_argument("--history", type=int, default=512, help="tokens before the sampled one")
    parser.add_argument("--only", default="", help="features whose names contain this")
    parser.add_argument("--seconds", type=float, default=0.5, help="for each feature, on a CPU")
    parser.add_argument("--without-model", action="store_true", help="no decode step beside it")
    options = parser.parse_args()
    names = [name for name in FEATURES if options.only in name or name == "plain temperature"]
    with torch.inference_mode():
        if options.device == "cuda":
            show_gpu(options.batches, options.history, names)
            return
        for rows in options.batches:
            show_cpu(rows, options.history, options.seconds, names, not options.without_model)


if __name__ == "__main__":
    main()
