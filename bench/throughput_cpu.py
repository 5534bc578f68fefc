"""Throughput on the CPU: Quire and transformers on the same requests, in the same run, in the same dtype.

32 requests with prompts of 100 to 300 tokens and 64 to 128 new tokens each (greedy, end tokens ignored) on
SmolLM2-135M-Instruct. transformers runs them one by one (the first few: it is a rate) and in padded batches of 8.

    python bench/throughput_cpu.py
    python bench/throughput_cpu.py --dtype float32 --repeats 1
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from quire import LLM, SamplingParams
from quire.models.sources import resolve


@dataclass(frozen=True)
class Job:
    prompt: list[int]
    new_tokens: int


def make_jobs(count: int, vocab_size: int) -> list[Job]:
    source = random.Random(0)
    return [
        Job([source.randrange(3, vocab_size) for _ in range(source.randint(100, 300))], source.randint(64, 128))
        for _ in range(count)
    ]


def rate(jobs: list[Job], run: Callable[[], None]) -> float:
    """Requested new tokens per second."""
    start = time.perf_counter()
    run()
    return sum(job.new_tokens for job in jobs) / (time.perf_counter() - start)


def run_quire(llm: LLM, jobs: list[Job]) -> None:
    params = [SamplingParams(temperature=0, max_tokens=job.new_tokens, ignore_eos=True) for job in jobs]
    outputs = llm.generate([job.prompt for job in jobs], params)
    assert [len(output.token_ids) for output in outputs] == [job.new_tokens for job in jobs]


def load_transformers(dtype: str) -> Any:
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TQDM_DISABLE", "1")
    import transformers

    path = resolve("smollm2").path
    return transformers.AutoModelForCausalLM.from_pretrained(
        str(path.parent), gguf_file=path.name, dtype=getattr(torch, dtype)
    ).eval()


def run_transformers(model: Any, jobs: list[Job], batch_size: int) -> None:
    """Left-padded batches, each until its longest request is done."""
    with torch.inference_mode():
        for start in range(0, len(jobs), batch_size):
            batch = jobs[start : start + batch_size]
            width = max(len(job.prompt) for job in batch)
            ids = torch.tensor([[0] * (width - len(job.prompt)) + job.prompt for job in batch])
            mask = torch.tensor([[0] * (width - len(job.prompt)) + [1] * len(job.prompt) for job in batch])
            longest = max(job.new_tokens for job in batch)
            model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=longest,
                min_new_tokens=longest,
                do_sample=False,
                pad_token_id=0,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--one-by-one", type=int, default=4, help="how many requests transformers runs singly")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    llm = LLM("smollm2", dtype=options.dtype, device="cpu", prefix_caching=False, max_model_len=1024)
    print(llm.description, flush=True)
    jobs = make_jobs(options.requests, 49152)
    run_quire(llm, jobs[:2])
    model = load_transformers(options.dtype)
    run_transformers(model, jobs[:1], 1)
    rates: dict[str, list[float]] = {"quire": [], "transformers, batches of 8": [], "transformers, one by one": []}
    for i in range(options.repeats):  # interleaved, so that a busy moment hits all alike
        rates["quire"].append(rate(jobs, lambda: run_quire(llm, jobs)))
        rates["transformers, batches of 8"].append(rate(jobs, lambda: run_transformers(model, jobs, 8)))
        few = jobs[: options.one_by_one]
        rates["transformers, one by one"].append(rate(few, lambda few=few: run_transformers(model, few, 1)))
        print(f"round {i + 1}: " + ", ".join(f"{name} {values[-1]:.1f}" for name, values in rates.items()), flush=True)
    profile = cProfile.Profile()
    profile.runcall(run_quire, llm, jobs)
    print("\nWhere Quire's time goes (one more run, under the profiler):")
    pstats.Stats(profile).strip_dirs().sort_stats("tottime").print_stats(12)
    ours = statistics.median(rates["quire"])
    print(f"{'engine':30} {'out tok/s':>10} {'quire is':>10}   (medians of {options.repeats}, {options.dtype})")
    for name, values in rates.items():
        median = statistics.median(values)
        print(f"{name:30} {median:10.1f} {ours / median:9.2f}x")


if __name__ == "__main__":
    main()
