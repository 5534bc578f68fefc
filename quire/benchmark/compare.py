"""Quire and another engine on the same jobs, in the same run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

from quire.benchmark.engine_runs import run_together
from quire.benchmark.jobs import Job, with_other_tokens
from quire.benchmark.measure import Clock, Spread, timed
from quire.benchmark.peers import Peer
from quire.benchmark.report import Factor, Table
from quire.frontend.progress import BenchmarkBar
from quire.llm import LLM


def compare(llm: LLM, peer: Peer, jobs: Sequence[Job], repeats: int, clock: Clock = time.perf_counter) -> Table:
    """Interleaved passes, so that a busy moment hits both; after a small one of each to warm up.

    Every pass has prompts of its own: a peer may keep prefixes, too, and can't be asked to forget them.
    """
    device = llm.engine.decoder.embedding.device
    ours: list[float] = []
    theirs: list[float] = []
    new_tokens = sum(job.new_tokens for job in jobs)
    equal: int | None = None
    with BenchmarkBar(2 * repeats + 1) as bar:
        bar.begin("warming up")
        run_together(llm, jobs[:2])
        peer.run(jobs[:2])
        bar.advance()
        for repeat in range(repeats):
            fresh = with_other_tokens(jobs, llm.engine.decoder.spec.vocab_size, seed=repeat + 1)
            bar.begin(f"quire, pass {repeat + 1}")
            seconds, outputs = timed(partial(run_together, llm, fresh), device, clock)
            ours.append(new_tokens / seconds)
            bar.advance()
            bar.begin(f"{peer.name}, pass {repeat + 1}")
            seconds, answers = timed(partial(peer.run, fresh), device, clock)
            count = answers if isinstance(answers, int) else sum(map(len, answers))
            theirs.append(count / seconds)
            bar.advance()
            if not isinstance(answers, int):
                agree = sum(output.token_ids == answer for output, answer in zip(outputs, answers, strict=True))
                equal = agree + (equal or 0)
    same = "not told" if equal is None else f"{equal} of {repeats * len(jobs)}"
    quire, other = Spread(tuple(ours), "tok/s"), Spread(tuple(theirs), "tok/s")
    rows = (("quire", quire, "", ""), (peer.name, other, Factor(quire.median / other.median), same))
    note = (
        f"{len(jobs)} requests, {sum(len(job.prompt) for job in jobs)} prompt tokens and {new_tokens} new ones in all, "
        f"greedy. Medians of {repeats} interleaved passes, each with prompts of its own, the lowest and highest in "
        "brackets. Answers agree where every token does; engines that round differently part at near ties."
    )
    return Table("Comparison", note, ("engine", "output tokens", "quire is", "answers that agree"), rows)
