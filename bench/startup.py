"""Start-up: seconds from the start of a process to the first token of a request of 128 tokens.

    python bench/startup.py --shape qwen3-0.6b
    python bench/startup.py --shape tiny                          # to try it on a CPU

A checkpoint of random weights in safetensors, with a tokenizer of the usual size, is written first
and so lies in the page cache. The first process finds no compiled kernels (Triton's cache is
empty), the later ones find its kernels; the figure is the best of those. The CPU kernels are built
once per machine and not built again here.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

# so that it runs where nothing is installed
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from bench.report import Result, report
from bench.shapes import CONFIGS, spec_of, write_config
from quire.models.names import huggingface_pieces

CHILD = Path(__file__).with_name("startup_child.py")


def write_checkpoint(shape: str, folder: Path) -> int:
    """A folder in Hugging Face layout; returns the bytes of its weights."""
    write_config(shape, folder)
    spec = spec_of(shape)
    parameters = spec.parameters()
    # the values don't matter: repeated as often as needed
    noise = (torch.randn(2**22) * 0.02).to(torch.bfloat16)
    weights = {}
    for piece in huggingface_pieces(spec, ()):
        size = piece.shape(parameters[piece.parameter])
        count = math.prod(size)
        weights[piece.name] = noise.repeat(-(-count // noise.numel()))[:count].view(size).clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(spec.vocab_size, folder)
    return sum(weight.numel() * weight.element_size() for weight in weights.values())


def write_tokenizer(vocab_size: int, folder: Path) -> None:
    """A byte-level BPE whose tokens are random pairs of earlier ones: it takes as long to load as a
    real one.
    """
    source = random.Random(0)
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    known = set(tokens)
    merges = []
    while len(tokens) < vocab_size:
        left, right = source.choice(tokens[:5000]), source.choice(tokens[:5000])
        if left + right not in known:
            known.add(left + right)
            tokens.append(left + right)
            merges.append((left, right))
    tokenizer = Tokenizer(
        models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


def time_start(folder: Path, device: str, dtype: str, kernel_cache: Path) -> tuple[float, str, str]:
    """Starts a process; returns the seconds to its first token, those of each part in words, and
    what it ran.
    """
    environment = os.environ | {"TRITON_CACHE_DIR": str(kernel_cache)}
    command = [sys.executable, str(CHILD), str(folder), device, dtype]
    began = time.monotonic()
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    report = json.loads(done.stdout.splitlines()[-1])
    marks = [("", began), *report["marks"]]
    parts = [f"{name} {end - start:.2f}" for (_, start), (name, end) in pairwise(marks)]
    return marks[-1][1] - began, ", ".join(parts), report["about"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=list(CONFIGS), default="qwen3-0.6b")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--dtype", default="auto", help="auto, bfloat16, float16 or float32")
    parser.add_argument(
        "--repeats", type=int, default=3, help="processes after the one that compiles"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    options = parser.parse_args()
    with TemporaryDirectory() as name:
        folder, kernel_cache = Path(name) / "model", Path(name) / "kernels"
        folder.mkdir()
        size = write_checkpoint(options.shape, folder)
        print(f"{options.shape}: {size / 1e9:.2f} GB of weights written", flush=True)
        starts = []
        for i in range(options.repeats + 1):
            starts.append(time_start(folder, options.device, options.dtype, kernel_cache))
            kind = "nothing compiled" if i == 0 else "kernels compiled"
            print(f"{kind}: {starts[-1][0]:.2f} s ({starts[-1][1]})", flush=True)
    cold, warm = starts[0][0], min(seconds for seconds, _, _ in starts[1:])
    result = Result(options.shape, "startup", warm, detail=f"{cold:.2f} s the first time")
    found = report([result], starts[0][2])
    found.print()
    found.write(None, options.json)


if __name__ == "__main__":
    main()
