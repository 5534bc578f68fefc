"""What the server costs: the same requests through the offline API and through `quire serve`, in
alternating rounds.

32 requests at once with prompts of 140 to 260 tokens and 67 to 125 new tokens (greedy, end tokens
ignored, no prefix cache) on SmolLM2-135M-Instruct. Throughput counts new tokens; latency is the
mean time per output token that a request saw: in the engine for the offline runs, at the client for
the server's.

    python -m quire.tools.bench.server_costs.served
    OMP_NUM_THREADS=1 python -m quire.tools.bench.server_costs.served --input-len 64 --output-len 48 --repeats 15

The whole-run figures need a quiet machine: a few milliseconds drown in the noise of others. So the
step logs of both are read as well: how long the engine does something else between two steps, and
how long a token is on its way from the end of its step to the client.

Engine, server and client share this machine's cores. With as many threads in the engine as there
are cores, what HTTP and the client do is taken from it; OMP_NUM_THREADS leaves them some.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from bisect import bisect
from collections.abc import Mapping
from contextlib import AbstractContextManager
from itertools import pairwise
from pathlib import Path
from typing import Any

from quire import LLM
from quire.observe.step_log import read_step_log
from quire.tools.bench.http_client import HttpClient
from quire.tools.bench.jobs import Job, Lengths, TokenSource, random_jobs
from quire.tools.bench.offline import run_together
from quire.tools.bench.serve.load import Load, measure
from quire.tools.bench.server_costs.start import ServerProcess, end_with_servers, serving
from quire.tools.bench.spread import percentile_of

ENGINE: dict[str, Any] = {
    "max_num_seqs": 32,
    "max_batched_tokens": 512,
    "max_model_len": 1024,
    "kv_cache_memory": "512MiB",
}


def offline(llm: LLM, jobs: list[Job]) -> tuple[float, float]:
    """New tokens per second, and seconds per output token."""
    start = time.perf_counter()
    outputs = run_together(llm, jobs)
    seconds = time.perf_counter() - start
    times = [output.metrics.time_per_output_token for output in outputs]
    return sum(job.max_tokens for job in jobs) / seconds, statistics.fmean(
        one for one in times if one is not None
    )


def served(url: str, jobs: list[Job], arrivals: list[float]) -> tuple[float, float]:
    """The same; the moments at which tokens came are added to `arrivals`."""
    load = Load(ignore_eos=True, temperature=0)

    async def run() -> tuple[float, float]:
        async with HttpClient(url) as client:
            results, seconds = await measure(client, jobs, load)
        failed = [result.error for result in results if not result.is_success]
        if failed:
            raise SystemExit(f"{len(failed)} requests failed: {failed[0]}")
        assert [result.output_tokens for result in results] == [job.max_tokens for job in jobs]
        arrivals.extend(moment for result in results for moment in result.chunks)
        times = [result.tpot for result in results if result.tpot is not None]
        return sum(job.max_tokens for job in jobs) / seconds, statistics.fmean(times)

    return asyncio.run(run())


def between_steps(log: Path, num_requests: int) -> float:
    """Median seconds from the end of a step to the beginning of the next, while all requests run."""
    entries = read_step_log(log)
    gaps = [
        later.step.now - earlier.committed
        for earlier, later in pairwise(entries)
        if len(earlier.step.scheduled) == len(later.step.scheduled) == num_requests
    ]
    return statistics.median(gaps)


def on_the_way(log: Path, arrivals: list[float]) -> list[float]:
    """Seconds from the end of the last step to each token's arrival at the client, shortest first."""
    ends = [entry.committed for entry in read_step_log(log)]
    return sorted(moment - ends[bisect(ends, moment) - 1] for moment in arrivals)


def server(
    dtype: str, log: Path, limits: Mapping[str, object] = ENGINE
) -> AbstractContextManager[ServerProcess]:
    """One that writes a log of its steps."""
    options = [f"--{name.replace('_', '-')}={value}" for name, value in limits.items()]
    return serving(f"--dtype={dtype}", *options, "--no-prefix-caching", f"--step-log={log}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--input-len", type=int, default=200)
    parser.add_argument("--output-len", type=int, default=96)
    parser.add_argument(
        "--repeats", type=int, default=3, help="many short rounds stand up to noise best"
    )
    options = parser.parse_args()
    end_with_servers()
    with tempfile.TemporaryDirectory() as folder:
        prompts = Lengths.around("--input-len", options.input_len, 0.3)
        answers = Lengths.around("--output-len", options.output_len, 0.3)
        jobs = random_jobs(options.requests, prompts, answers, TokenSource(0, 49152))
        compare(options.dtype, jobs, options.repeats, Path(folder))


def compare(dtype: str, jobs: list[Job], repeats: int, folder: Path) -> None:
    logs = {"offline": folder / "offline.jsonl", "served": folder / "served.jsonl"}
    llm = LLM(
        "smollm2",
        dtype=dtype,
        device="cpu",
        prefix_caching=False,
        step_log=str(logs["offline"]),
        **ENGINE,
    )
    print(llm.description, flush=True)
    rates: dict[str, list[float]] = {"offline": [], "served": []}
    times: dict[str, list[float]] = {"offline": [], "served": []}
    arrivals: list[float] = []
    with llm, server(dtype, logs["served"]) as (url, _):
        offline(llm, jobs[:2])
        served(url, jobs[:2], [])
        for i in range(repeats):  # interleaved, so that a busy moment hits both alike
            for name, (rate, seconds) in (
                ("offline", offline(llm, jobs)),
                ("served", served(url, jobs, arrivals)),
            ):
                rates[name].append(rate)
                times[name].append(seconds)
            print(
                f"round {i + 1}: "
                + ", ".join(
                    f"{name} {rates[name][-1]:.1f} tok/s {1000 * times[name][-1]:.2f} ms"
                    for name in rates
                ),
                flush=True,
            )
    report(rates, times, repeats)
    for name, log in logs.items():
        print(
            f"{name}: {1000 * between_steps(log, len(jobs)):.2f} ms between two steps of all requests (median)"
        )
    ways = on_the_way(logs["served"], arrivals)
    middle = percentile_of(ways, 50)
    late = percentile_of(ways, 99)
    print(
        f"served: a token is at the client {1000 * middle:.2f} ms after its step (median; P99 {1000 * late:.2f} ms)"
    )


def report(rates: dict[str, list[float]], times: dict[str, list[float]], repeats: int) -> None:
    shares = [
        after / before for before, after in zip(rates["offline"], rates["served"], strict=True)
    ]
    added = [
        after - before for before, after in zip(times["offline"], times["served"], strict=True)
    ]
    print(f"\n{'':10} {'out tok/s':>10} {'ms/token':>10}   (medians of {repeats} rounds)")
    for name in rates:
        print(
            f"{name:10} {statistics.median(rates[name]):10.1f} {1000 * statistics.median(times[name]):10.2f}"
        )
    share = statistics.median(shares)
    extra = 1000 * statistics.median(added)
    print(
        f"through the server: {share:.1%} of the throughput, {extra:+.2f} ms per token (medians of each round's own)"
    )


if __name__ == "__main__":
    main()
