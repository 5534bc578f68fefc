"""Throughput on the CPU: Quire and transformers on the same requests, in the same run, in the same
dtype.

32 requests with prompts of 100 to 300 tokens and 64 to 128 new tokens each (greedy, end tokens
ignored) on SmolLM2-135M-Instruct. transformers runs them one by one (the first few: it is a rate)
and in padded batches of 8. `quire bench compare` does the like with prompts of your lengths; this
workload stays as it is, and is profiled.

    python -m quire.tools.bench.cpu.throughput
    python -m quire.tools.bench.cpu.throughput --dtype float32 --repeats 1
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import random
from collections.abc import Sequence

import torch

from quire import LLM
from quire.checkpoints.sources import resolve
from quire.frontend.progress import BenchmarkBar
from quire.tools.bench.jobs import Job
from quire.tools.bench.machine import report_facts, this_command
from quire.tools.bench.measure import in_turn
from quire.tools.bench.offline import run_together
from quire.tools.bench.peers import PeerSetting, Transformers
from quire.tools.bench.report import Factor, Report, Table


def make_jobs(count: int, vocab_size: int) -> list[Job]:
    source = random.Random(0)
    return [
        Job(
            tuple(source.randrange(3, vocab_size) for _ in range(source.randint(100, 300))),
            source.randint(64, 128),
        )
        for _ in range(count)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument(
        "--one-by-one", type=int, default=4, help="how many requests transformers runs singly"
    )
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    device = torch.device("cpu")
    facts = report_facts(device, this_command())
    llm = LLM(
        "smollm2", dtype=options.dtype, device="cpu", prefix_caching=False, max_model_len=1024
    )
    jobs = make_jobs(options.requests, 49152)
    path = str(resolve("smollm2").path)
    peer = Transformers(
        PeerSetting("smollm2", path, "cpu", options.dtype, torch.get_num_threads(), 8, 1024)
    )

    def run_peer(some: Sequence[Job], batch_size: int) -> None:
        peer.batch_size = batch_size
        peer.run(some)

    run_together(llm, jobs[:2])
    run_peer(jobs[:1], 1)
    singly = jobs[: options.one_by_one]
    ways = {
        "quire": (jobs, lambda: run_together(llm, jobs)),
        "transformers, batches of 8": (jobs, lambda: run_peer(jobs, 8)),
        "transformers, one by one": (singly, lambda: run_peer(singly, 1)),
    }
    with BenchmarkBar(len(ways) * options.repeats) as bar:
        found = in_turn(
            {name: run for name, (_, run) in ways.items()}, options.repeats, device, bar=bar
        )
    rates = {
        name: found[name][0].per(sum(job.max_tokens for job in some))
        for name, (some, _) in ways.items()
    }
    profile = cProfile.Profile()
    profile.runcall(run_together, llm, jobs)
    print("Where Quire's time goes (one more run, under the profiler):")
    pstats.Stats(profile).strip_dirs().sort_stats("tottime").print_stats(12)
    rows = tuple(
        (name, rate, Factor(rates["quire"].median / rate.median)) for name, rate in rates.items()
    )
    note = f"Medians of {options.repeats} interleaved passes, the lowest and highest in brackets."
    table = Table("Throughput on the CPU", note, ("engine", "output tokens", "quire is"), rows)
    Report(table.title, facts | {"model": llm.description}, (table,)).print()


if __name__ == "__main__":
    main()
