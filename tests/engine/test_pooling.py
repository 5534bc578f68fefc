"""Requests that want their prompt's hidden states pooled: through chunks, preemptions and the
prefix cache.
"""

from __future__ import annotations

from typing import Any

import pytest

from quire.engine.request import Request, make_requests
from quire.errors import InvalidRequestError
from quire.sampling_params import SamplingParams
from quire.step import Pooling, StepResult
from quire.tools.simulate.fake_model import fake_vector, solo_states
from tests.engine.harness import Harness, config

PARAMS = SamplingParams(max_tokens=1, temperature=0)
PROMPT = range(30)


def add(harness: Harness, name: str, pooling: Pooling, prompt: range = PROMPT) -> Request:
    (request,) = make_requests(name, prompt, PARAMS, 0, pooling=pooling)
    harness.core.add_request(request, harness.now)
    harness.tokens[name] = []
    return request


def expected(pooling: Pooling, prompt: range = PROMPT) -> bytes:
    states = solo_states(prompt, PARAMS, config())
    return fake_vector(sum(states) if pooling == "mean" else states[-1])


@pytest.mark.parametrize("pooling", ["mean", "last"])
@pytest.mark.parametrize(
    "changes", [{}, {"max_batched_tokens": 7}, {"max_batched_tokens": 7, "num_host_blocks": 8}]
)
@pytest.mark.parametrize("depth", [1, 3])
def test_the_vector_is_that_of_the_whole_prompt(
    pooling: Pooling, changes: dict[str, Any], depth: int
) -> None:
    harness = Harness(config(**changes), depth)
    harness.add("other", range(30), max_tokens=4)  # its blocks are there to be found
    harness.turn(3)
    add(harness, "a", pooling)
    add(harness, "b", pooling, range(17))
    turns = 0
    while harness.core.has_work:
        harness.turn()
        turns += 1
        if turns in (2, 5) and "a" in harness.scheduler.table.requests:
            harness.scheduler.preempt("a")
    for name, prompt in (("a", PROMPT), ("b", range(17))):
        end = harness.ends[name]
        assert (end.finish_reason, end.pooled) == ("stop", expected(pooling, prompt))
        assert harness.tokens[name] == []
        assert end.metrics is not None
        assert end.metrics.num_output_tokens == 0


def test_the_mean_takes_nothing_from_the_cache_but_gives_to_it() -> None:
    harness = Harness()
    first = add(harness, "first", "mean")
    harness.run()
    again = add(harness, "again", "mean")
    last = add(harness, "last", "last")
    harness.run()
    assert (first.cached_tokens, again.cached_tokens, last.cached_tokens) == (0, 0, 28)
    assert harness.ends["again"].pooled == harness.ends["first"].pooled == expected("mean")
    assert harness.ends["last"].pooled == expected("last")


def test_a_runner_that_returns_no_vector_fails_the_request_alone() -> None:
    harness = Harness()
    add(harness, "a", "mean")
    step = harness.scheduler.schedule(0.0)
    (update,) = harness.scheduler.commit(step, StepResult(step.step_id, {"a": (1,)}), 0.0)
    assert update.finish_reason == "error"
    assert update.error is not None
    assert "no pooled hidden state" in update.error


def test_vectors_stay_out_of_the_step_log() -> None:
    harness = Harness()
    add(harness, "a", "mean")
    harness.run()
    results = [entry.result for entry in harness.log]
    assert results
    assert all(result is not None and result.pooled == {} for result in results)
    assert harness.steps[0].admitted[0].pooling == "mean"


def test_a_prompt_has_one_vector() -> None:
    with pytest.raises(InvalidRequestError, match="one pooled vector"):
        make_requests("a", PROMPT, SamplingParams(n=2), 0, pooling="mean")
