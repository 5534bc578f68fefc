"""Quire and another engine on the same jobs, in the same run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

from quire.benchmark.engine_runs import run_together
from quire.benchmark.jobs import Job
from quire.benchmark.measure import Clock, Spread, timed
from quire.benchmark.peers import Peer
from quire.benchmark.report import Factor, Table
from quire.llm import LLM
from quire.progress import BenchmarkBar


def compare(llm: LLM, peer: Peer, jobs: Sequence[Job], repeats: int, clock: Clock = time.perf_counter) -> Table:
    """Interleaved passes, so that a busy moment hits both; after a small one of each to warm up."""
    device = llm.engine.decoder.embedding.device
    ours: list[float] = []
    theirs: list[float] = []
    new_tokens = sum(job.new_tokens for job in jobs)
    same = "not told"
    with BenchmarkBar(2 * repeats + 1) as bar:
        bar.begin("warming up")
        run_together(llm, jobs[:2], salt="warm-up")
        peer.run(jobs[:2])
        for repeat in range(repeats):
            bar.advance()
            bar.begin(f"quire, pass {repeat + 1}")
            seconds, outputs = timed(partial(run_together, llm, jobs, f"pass {repeat}"), device, clock)
            ours.append(new_tokens / seconds)
            bar.advance()
            bar.begin(f"{peer.name}, pass {repeat + 1}")
            seconds, answers = timed(lambda: peer.run(jobs), device, clock)
            count = answers if isinstance(answers, int) else sum(map(len, answers))
            theirs.append(count / seconds)
            if not isinstance(answers, int):
                equal = sum(output.token_ids == answer for output, answer in zip(outputs, answers, strict=True))
                same = f"{equal} of {len(jobs)}"
    quire, other = Spread(tuple(ours), "tok/s"), Spread(tuple(theirs), "tok/s")
    rows = (("quire", quire, "", ""), (peer.name, other, Factor(quire.median / other.median), same))
    note = (
        f"{len(jobs)} requests, {sum(len(job.prompt) for job in jobs)} prompt tokens and {new_tokens} new ones in all, "
        f"greedy. Medians of {repeats} interleaved passes, the lowest and highest in brackets. Answers agree where "
        "every token does; engines that round differently part at near ties."
    )
    return Table("Comparison", note, ("engine", "output tokens", "quire is", "answers that agree"), rows)
