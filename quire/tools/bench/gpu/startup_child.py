"""The process whose start `startup.py` times: loads a model folder, computes one token, prints when
each part was done.

Times are of the system's monotonic clock, which parent and child share.
"""

from __future__ import annotations

import json
import sys
import time

STARTED = time.monotonic()


def main(folder: str, device: str, dtype: str) -> None:
    marks = [("python", STARTED)]

    def mark(part: str) -> None:
        marks.append((part, time.monotonic()))

    # Here, so that their time is told apart.
    import torch  # noqa: F401 (the largest part of them)

    from quire.assemble import build_engine
    from quire.checkpoints.sources import resolve
    from quire.config import EngineConfig
    from quire.engine import make_requests
    from quire.sampling_params import SamplingParams

    mark("imports")
    reading: list[float] = []

    def progress(done: int, total: int) -> None:
        if done in (0, total):
            reading.append(time.monotonic())

    engine = build_engine(
        resolve(folder), EngineConfig(device=device, dtype=dtype, max_model_len=4096), progress
    )
    marks += zip(("device, tokenizer, code of kernels", "weights"), reading, strict=True)
    mark("cache, kernels, runner")
    [request] = make_requests(
        "first", range(100, 228), SamplingParams(temperature=0.6, max_tokens=1), seed=0
    )
    engine.core.add_request(request, time.monotonic())
    while not request.num_output_tokens:
        for update in engine.core.step(time.monotonic()):
            if update.error is not None:
                raise RuntimeError(update.error)
    mark("first token")
    print(json.dumps({"marks": marks, "about": engine.description}))


if __name__ == "__main__":
    from quire.process.gc_pauses import no_collections
    from quire.process.preload import load_torch_libraries

    load_torch_libraries()  # as the command line does
    with no_collections():
        main(*sys.argv[1:])
