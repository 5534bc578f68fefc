"""Starts an engine, serves requests of many kinds, and prints as JSON which kernels were compiled
or read from the disk after the start. A program of its own, so that no test before it has compiled
them.

    python -m tests.gpu.compiled_while_serving auto
"""

from __future__ import annotations

import json
import random
import sys

import triton

from quire.sampling_params import SamplingParams
from tests.gpu.support import GpuEngine, Job, decoder_of, shape_of


def main(kv_cache_dtype: str) -> None:
    """Lists of work of 1 to some dozens of entries, 1 to 64 requests, tables whose width no power
    of two divides.
    """
    names: list[str] = []
    decoder = decoder_of(shape_of("qwen3-0.6b", 2))
    options = {"max_model_len": 1000, "max_num_seqs": 64, "max_batched_tokens": 2048}
    engine = GpuEngine(decoder, kv_cache_dtype=kv_cache_dtype, **options)
    source = random.Random(0)

    def jobs(lengths: list[int]) -> list[Job]:
        params = SamplingParams(temperature=0.6, max_tokens=source.randint(1, 12), ignore_eos=True)
        return [Job([source.randrange(1000) for _ in range(length)], params) for length in lengths]

    engine.run(jobs([40, 700]))
    triton.knobs.compilation.listener = lambda src, **_: names.append(src.name)
    for count in (1, 2, 3, 7, 16, 17, 31, 40, 64):
        engine.run(jobs([source.choice((1, 17, 64, 128, 400, 900)) for _ in range(count)]))
    for _ in range(30):  # each captures one of the graphs that are still missing
        engine.run(jobs([source.randint(1, 900)]))
    print(json.dumps(names))


if __name__ == "__main__":
    main(sys.argv[1])
