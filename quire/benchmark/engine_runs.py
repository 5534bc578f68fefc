"""Jobs through the engine: all at once, or one after the other."""

from __future__ import annotations

from collections.abc import Sequence

from quire.benchmark.jobs import Job
from quire.errors import EngineError
from quire.llm import LLM
from quire.outputs import RequestOutput
from quire.sampling_params import SamplingParams


def run_together(llm: LLM, jobs: Sequence[Job], salt: str | None = None) -> list[RequestOutput]:
    """All jobs in one call. With a new `salt` nothing is found in the prefix cache: a cold start."""
    outputs = llm.generate([job.prompt for job in jobs], [_greedy(job, salt) for job in jobs], progress=False)
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


def _greedy(job: Job, salt: str | None) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=job.new_tokens, ignore_eos=True, cache_salt=salt)
