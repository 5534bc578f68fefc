"""Throughput and latency of the engine in this process."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch

from quire.errors import EngineError
from quire.frontend.progress import BenchmarkBar
from quire.llm import LLM
from quire.outputs import RequestOutput
from quire.sampling_params import SamplingParams
from quire.tools.bench.jobs import Job, Lengths, TokenSource, random_jobs
from quire.tools.bench.machine import report_facts
from quire.tools.bench.measure import Clock, in_turn
from quire.tools.bench.peers import PeerSetting
from quire.tools.bench.report import Row, Table
from quire.tools.bench.spread import Spread


@contextmanager
def open_engine(
    model: str, num_jobs: int, prompts: Lengths, answers: Lengths, max_num_seqs: int, **options: Any
) -> Iterator[tuple[LLM, list[Job], dict[str, str]]]:
    """An engine with room for random jobs of these lengths, the jobs, and the facts for the report."""
    options |= {"max_num_seqs": max_num_seqs, "max_batched_tokens": max(512, max_num_seqs)}
    with LLM(model, max_model_len=prompts.high + answers.high, **options) as llm:
        jobs = random_jobs(num_jobs, prompts, answers, token_source(llm))
        yield llm, jobs, report_facts(device_of(llm)) | {"model": llm.description}


def device_of(llm: LLM) -> torch.device:
    """Where the engine computes."""
    return llm.engine.decoder.device


def token_source(llm: LLM, seed: int = 0) -> TokenSource:
    """Token ids the model knows."""
    return TokenSource(seed, llm.engine.decoder.spec.vocab_size)


def run_together(llm: LLM, jobs: Sequence[Job], salt: str | None = None) -> list[RequestOutput]:
    """All jobs in one call. With a new `salt` nothing is found in the prefix cache: a cold start."""
    each = [
        SamplingParams(temperature=0, max_tokens=job.max_tokens, ignore_eos=True, cache_salt=salt)
        for job in jobs
    ]
    outputs = llm.generate([job.token_ids for job in jobs], each, progress=False)
    for output in outputs:
        if output.error is not None:
            raise EngineError(f"a request of the benchmark failed: {output.error}")
    return outputs


def run_one_by_one(llm: LLM, jobs: Sequence[Job], salt: str | None = None) -> list[RequestOutput]:
    """Each job when the one before it is done."""
    return [output for job in jobs for output in run_together(llm, [job], salt)]


def time_to_first_token(output: RequestOutput) -> float:
    """Of a request that was answered."""
    seconds = output.metrics.time_to_first_token
    assert seconds is not None
    return seconds


def measure_throughput(
    llm: LLM, jobs: Sequence[Job], repeats: int, clock: Clock = time.perf_counter
) -> Table:
    """All jobs at once, `repeats` times after one small run to warm up."""
    seconds, runs = _passes(llm, run_together, jobs, 2, repeats, clock)
    prompt_tokens, new_tokens = _count(jobs)

    def each(
        of: Callable[[RequestOutput], float], summary: Callable[[list[float]], float]
    ) -> Spread:
        return Spread.of(summary([of(output) for output in outputs]) for outputs in runs)

    rows: tuple[Row, ...] = (
        ("time", seconds),
        ("output tokens", seconds.per(new_tokens)),
        ("prompt and output tokens", seconds.per(prompt_tokens + new_tokens)),
        ("requests", seconds.per(len(jobs), "per s")),
        ("time to first token, median", each(time_to_first_token, statistics.median)),
        ("time to first token, longest", each(time_to_first_token, max)),
        ("time to the whole answer, median", each(_latency, statistics.median)),
        ("time to the whole answer, longest", each(_latency, max)),
    )
    note = (
        f"{len(jobs)} requests at once, {prompt_tokens} prompt tokens and {new_tokens} new ones in all, greedy, end "
        f"tokens ignored. Medians of {repeats} passes from an empty cache, the lowest and highest in brackets."
    )
    return Table("Throughput", note, ("what", "measured"), rows)


def measure_latency(llm: LLM, jobs: Sequence[Job], repeats: int) -> Table:
    """One request at a time: how long a user alone waits."""
    _, runs = _passes(llm, run_one_by_one, jobs, 1, repeats, time.perf_counter)
    outputs = [output for run in runs for output in run]
    rows: list[Row] = [
        ("time to first token", Spread.of(map(time_to_first_token, outputs))),
        ("time to the whole answer", Spread.of(map(_latency, outputs))),
    ]
    between = [output.metrics.time_per_output_token for output in outputs]
    further = Spread.of((1000 * seconds for seconds in between if seconds is not None), "ms")
    if further.values:
        rows.append(("time per further token", further))
    note = (
        f"{len(jobs)} requests one after the other, {repeats} passes from an empty cache, greedy, end tokens ignored; "
        "medians, the lowest and highest in brackets."
    )
    return Table("Latency", note, ("what", "measured"), tuple(rows))


class OwnEngine:
    """Quire as one of the engines of a comparison."""

    def __init__(self, setting: PeerSetting, options: Mapping[str, Any]) -> None:
        torch.set_num_threads(setting.threads)
        each = {
            "device": setting.device,
            "dtype": setting.dtype,
            "max_model_len": setting.max_model_len,
            **options,
        }
        self._llm = LLM(setting.path, **each)
        self.name = f"{setting.model}: {self._llm.description.removeprefix(f'{setting.path}: ')}"

    def run(self, jobs: Sequence[Job]) -> list[tuple[int, ...]]:
        return [output.token_ids for output in run_together(self._llm, jobs)]


def _passes(
    llm: LLM,
    run: Callable[[LLM, Sequence[Job], str], list[RequestOutput]],
    jobs: Sequence[Job],
    num_warmups: int,
    repeats: int,
    clock: Clock,
) -> tuple[Spread, list[list[RequestOutput]]]:
    """Seconds and answers of each pass, all from an empty cache."""
    with BenchmarkBar(repeats + 1) as bar:
        bar.begin("warming up")
        run(llm, jobs[:num_warmups], "warm-up")
        bar.advance()
        salts = map("pass {}".format, count())
        ways = {f"{len(jobs)} requests": lambda: run(llm, jobs, next(salts))}
        (found,) = in_turn(ways, repeats, device_of(llm), clock, bar).values()
    return found


def _count(jobs: Sequence[Job]) -> tuple[int, int]:
    """Prompt tokens and new ones."""
    return sum(len(job.prompt) for job in jobs), sum(job.max_tokens for job in jobs)


def _latency(output: RequestOutput) -> float:
    return output.metrics.finished - output.metrics.arrival
