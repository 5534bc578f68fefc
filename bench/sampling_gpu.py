"""What sampling costs on a GPU: microseconds a step, with each feature asked for by every row.

    python bench/sampling_gpu.py [--vocab 151936] [--batches 1,64,256] [--history 512] [--only top_p]

"gpu" is the time from the first to the last kernel of a step's sampling when the host is far ahead,
"host" what the host needs to send it off; a step costs whichever is more. Both are medians.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

# so that it runs where nothing is installed
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.sampling import BAD_WORDS, FEATURES, admit
from quire import SamplingParams
from quire.backends.triton.kernels import TritonKernels
from quire.sampling.draws import Draws
from quire.sampling.logprobs import score_rows
from quire.sampling.sampler import Sampler
from quire.sampling_params import ResolvedTokens
from quire.step import Admission

AHEAD = 20_000_000
"""Clock cycles the GPU is kept busy with, so that the host's share is not part of its time."""
ROUNDS = 7


def make_draws(
    name: str,
    rows: int,
    history: int,
    vocab_size: int,
    kernels: TritonKernels,
    device: torch.device,
) -> tuple[Sampler, Draws]:
    source = np.random.default_rng(0)
    resolved = ResolvedTokens(
        BAD_WORDS if "bad_words" in name else (), tuple(range(1500)) if name == "DRY" else ()
    )
    params = SamplingParams(**FEATURES[name])
    # Text repeats itself: half of the tokens are from a few hundred, as in any language.
    tokens = np.where(
        source.random((rows, history)) < 0.5,
        source.integers(300, size=(rows, history)),
        source.integers(vocab_size, size=(rows, history)),
    )
    admitted = tuple(
        Admission(
            str(row),
            row,
            tuple(tokens[row].tolist()),
            history // 2,
            (),
            0,
            0,
            params,
            row,
            (2,),
            0.0,
            resolved=resolved,
        )
        for row in range(rows)
    )
    words = None
    if "structured" in FEATURES[name]:
        words = torch.full(
            (rows, -(-vocab_size // 32)), 0x5A5A5A5A, dtype=torch.int32, device=device
        )
    return admit(admitted, vocab_size, history, kernels, device, words)


def measure(function: Callable[[], object], prepare: Callable[[], object]) -> tuple[float, float]:
    """Microseconds on the GPU and on the host."""
    on_gpu, on_host = [], []
    for _ in range(ROUNDS + 2):
        prepare()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        torch.cuda._sleep(AHEAD)
        begin.record()
        started = time.perf_counter()
        function()
        on_host.append(time.perf_counter() - started)
        end.record()
        torch.cuda.synchronize()
        on_gpu.append(begin.elapsed_time(end))
    return statistics.median(on_gpu[2:]) * 1e3, statistics.median(on_host[2:]) * 1e6


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--batches", default="1,64,256")
    parser.add_argument("--history", type=int, default=512, help="tokens before the sampled one")
    parser.add_argument("--only", default="", help="features whose names contain this")
    options = parser.parse_args(arguments)
    device, kernels = torch.device("cuda"), TritonKernels()
    batches = [int(rows) for rows in options.batches.split(",")]
    generator = torch.Generator(device=device).manual_seed(0)
    print(f"{'us (gpu/host)':26}" + "".join(f"{f'batch {rows}':>18}" for rows in batches))
    for name in [*(name for name in FEATURES if options.only in name), "logprobs 5"]:
        line = f"{name:26}"
        for rows in batches:
            # A few high ones over a broad hump, as a language model's are.
            logits = torch.randn(rows, options.vocab, generator=generator, device=device) * 2.5
            logits[:, :: options.vocab // 60] += (
                torch.rand(logits[:, :: options.vocab // 60].shape, device=device) * 14
            )
            work = logits.clone()
            if name.startswith("logprobs"):
                ids = torch.arange(rows, device=device)
                found = measure(
                    lambda x=work, i=ids: score_rows(x, lambda x: x, i, 5, kernels), lambda: None
                )
            else:
                sampler, draws = make_draws(
                    name, rows, options.history, options.vocab, kernels, device
                )
                found = measure(
                    lambda x=work, s=sampler, d=draws: s.sample(x, d),
                    lambda x=work, source=logits: x.copy_(source),
                )
            line += f"{found[0]:9.0f}/{found[1]:<8.0f}"
        print(line, flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
