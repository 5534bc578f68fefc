"""Start-up: seconds from the start of a process to the first token of a request of 128 tokens.

    python -m quire.tools.bench.gpu.startup --shape qwen3-0.6b
    python -m quire.tools.bench.gpu.startup --shape tiny  # to try it on a CPU

A checkpoint of random weights in safetensors, with a tokenizer of the usual size, is written first
and so lies in the page cache. The first process finds no compiled kernels (Triton's cache is
empty), the later ones find its kernels; the figure is the best of those. The CPU kernels are built
once per machine and not built again here.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

from quire.tools.bench.gpu.report import Measurement, report
from quire.tools.bench.random_checkpoint import write_checkpoint
from quire.tools.bench.shapes import CONFIGS

CHILD = "quire.tools.bench.gpu.startup_child"


def time_start(folder: Path, device: str, dtype: str, kernel_cache: Path) -> tuple[float, str, str]:
    """Starts a process; returns the seconds to its first token, those of each part in words, and
    what it ran.
    """
    environment = os.environ | {"TRITON_CACHE_DIR": str(kernel_cache)}
    command = [sys.executable, "-m", CHILD, str(folder), device, dtype]
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
    result = Measurement(options.shape, "startup", warm, detail=f"{cold:.2f} s the first time")
    found = report([result], starts[0][2])
    found.print()
    found.write(None, options.json)


if __name__ == "__main__":
    main()
